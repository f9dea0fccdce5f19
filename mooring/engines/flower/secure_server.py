"""The server's part in secure sums (`secure_sums.py`): it carries keys and signatures, and takes the masks off the
sum."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from mooring.core.errors import RequestError, WorkError
from mooring.engines.flower import secure_sums
from mooring.engines.flower.messages import Payload
from mooring.engines.flower.messenger import ClientFailedError, Messenger
from mooring.runs.sections import FederationSection

MAX_ATTEMPTS = 10  # at a secure sum, for clients that went away to come back


class SecureSum(NamedTuple):
    """The sum over the clients that stayed to the end, and what each of them reports of its work."""

    total: np.ndarray
    survivors: tuple[str, ...]
    words: dict[str, dict[str, Any]]


class SecureAggregator:
    """Sums over the clients of one federation; `open` agrees on keys, once for each start of the server."""

    def __init__(self, post: Messenger, names: tuple[str, ...], how: FederationSection):
        self.post, self.names, self.how = post, names, how
        self.session, self.number = "", 0
        self.weights: dict[str, float] = {}

    def open(self) -> None:
        """Let every client sign a key, and show every client what all have signed."""
        if self.session:
            return
        session = secrets.token_hex(16)
        about = {"session": session, "cohort": list(self.names)}
        replies = self.post.ask_all(secure_sums.KEYS, {name: Payload(about) for name in self.names})
        statements = {}
        for name, reply in replies.items():
            statements[name] = {key: reply.words[key] for key in ("statement", "signature")}
            self.weights[name] = float(reply.words["statement"]["weight"])
        shown = Payload({"session": session, "statements": statements})
        self.post.ask_all(secure_sums.PEERS, dict.fromkeys(self.names, shown))
        self.session = session

    def ask(self, what: str, requests: Mapping[str, Payload], range_: float, title: str) -> SecureSum:
        """The sum of what these clients answer; attempts that too few clients finish are repeated."""
        self.open()
        deadline = self.how.deadline or self.how.wait
        why = "too few clients answered"
        for _ in range(MAX_ATTEMPTS):
            found = self._attempt(what, requests, range_, deadline, title)
            if not isinstance(found, str):
                return found
            why = found or why
            self.post.look_again()
        raise WorkError(f"{title}: no secure sum after {MAX_ATTEMPTS} attempts: {why}")

    def _attempt(
        self, what: str, requests: Mapping[str, Payload], range_: float, deadline: float, title: str
    ) -> SecureSum | str:
        self.number += 1
        cohort = sorted(requests)
        about = {"session": self.session, "attempt": self.number}
        enough = secure_sums.min_survivors(len(cohort))
        letters = {
            name: parcel._replace(words=parcel.words | about | {"cohort": cohort}) for name, parcel in requests.items()
        }
        answered = self.post.ask(what, letters, deadline=deadline, quorum=enough)
        if len(answered.replies) < enough:
            return next(iter(answered.missing.values()), "")
        survivors, signatures = self._confirm(about, sorted(answered.replies), enough, deadline)
        if unsigned := [name for name in survivors if name not in signatures]:
            return f"client '{unsigned[0]}' did not confirm who is in the sum"
        shown = Payload(about | {"survivors": survivors, "signatures": signatures})
        opened = self.post.ask(secure_sums.UNMASK, dict.fromkeys(survivors, shown))
        if opened.missing:
            name, reason = next(iter(opened.missing.items()))
            raise WorkError(
                f"{title}: client '{name}' confirmed a secure sum and did not finish it ({reason}); nobody else knows "
                "its seed. Start it again with the state that it had, or start a new run without it."
            )
        masked = {name: masked_vector(name, answered.replies[name]) for name in survivors}
        if len({len(vector) for vector in masked.values()}) > 1:
            return "the clients' vectors differ in length"
        seeds = {name: parse_seed(name, reply.words.get("seed")) for name, reply in opened.replies.items()}
        outside = [name for name in cohort if name not in survivors]
        pairs = {
            name: {other: parse_seed(name, reply.words.get("pairs", {}).get(other)) for other in outside}
            for name, reply in opened.replies.items()
        }
        total = secure_sums.dequantize(secure_sums.unmask(masked, seeds, pairs), range_, len(cohort))
        return SecureSum(total, tuple(survivors), {name: answered.replies[name].words for name in survivors})

    def _confirm(
        self, about: dict[str, Any], survivors: list[str], enough: int, deadline: float
    ) -> tuple[list[str], dict[str, str]]:
        """The signatures under a list of survivors. Clients that confirmed an earlier list for the same sum, before the
        server was started again, confirm that one only."""
        for _ in range(2):
            asked = Payload(about | {"survivors": survivors})
            answered = self.post.ask(
                secure_sums.CONFIRM, dict.fromkeys(survivors, asked), deadline=deadline, quorum=enough
            )
            earlier = [reply.words["confirmed"] for reply in answered.replies.values() if "confirmed" in reply.words]
            if not earlier:
                signed = {name: str(reply.words.get("signature")) for name, reply in answered.replies.items()}
                return survivors, signed
            known = sorted(str(name) for name in earlier[0])
            if not set(known) <= set(survivors):
                return survivors, {}
            survivors = known
        return survivors, {}


def masked_vector(name: str, reply: Payload) -> np.ndarray:
    found = reply.tensors.get("masked")
    if found is None or found.dim() != 1:
        raise ClientFailedError(name, f"client '{name}' sends no masked vector.")
    return found.numpy().astype(np.int64).view(np.uint64)


def parse_seed(name: str, value: Any) -> bytes:
    try:
        seed = bytes.fromhex(str(value))
    except ValueError:
        seed = b""
    if len(seed) != 32:
        raise ClientFailedError(name, f"client '{name}' does not reveal the seed of a mask that it confirmed.")
    return seed


def check_secure_run(run: Any, how: FederationSection) -> None:
    """Refuse what secure sums rule out: all that needs single messages."""
    from mooring.core.aggregation import MEAN

    training = run.training
    asked = [f"average = {training.average!r}"] if training.average != MEAN else []
    asked += ["clip"] * (training.clip is not None) + ["weight_cap"] * (training.weight_cap is not None)
    asked += ["share_models = true"] * how.share_models
    if how.secure and asked:
        raise RequestError(f"secure = true hides single messages and models; leave out {asked[0]}.")
    many = how.clients if isinstance(how.clients, int) else len(how.clients or ())
    if how.secure and many < secure_sums.MIN_COHORT:
        raise RequestError(
            f"secure = true needs 3 clients or more, and {many} take part: two see each other's message."
        )
