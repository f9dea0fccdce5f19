"""A client's part in secure sums (`secure_sums.py`): what it sends, and what it refuses.

The server is not trusted to follow the protocol. The client refuses

- every request that is not one of ALLOWED: no statistics of its rows, no loss and no model of its own in the clear;
- a cohort of fewer than three clients, or with a client whose key is not in the list of peers that it was given;
- weights that do not follow from what all clients signed, and a share of its own above MAX_OWN_SHARE;
- a second sum for the same round over other clients or of another model: the difference would be one client's message;
- more evaluations, rounds and beginnings than its run file plans, and settings that are not its run file's;
- a schema that turns one of its columns of numbers into a category, which would show its values.

What it must remember for this is one file in its folder, written before every reply and removed at the end.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from mooring.core.errors import RequestError
from mooring.data.clients import PARTS
from mooring.engines.flower import secure_sums
from mooring.engines.flower.messages import Payload
from mooring.runs.atomic_files import json_bytes, make_synced_folder, read_json, write_json

STATE = "secure.json"
ALLOWED = frozenset(
    {"hello", "survey", "tally", "names", "spread", "adopt", "facts", "begin", "visit", "done", "dismissed"}
    | {
        secure_sums.KEYS,
        secure_sums.PEERS,
        secure_sums.UPDATE,
        secure_sums.EVALUATE,
        secure_sums.CONFIRM,
        secure_sums.UNMASK,
    }
)
SCHEMA_REQUESTS = ("survey", "tally", "names", "spread")
MAX_OWN_SHARE = 0.9
MAX_STARTS = 3  # beginnings of a run that one `mooring join` takes part in: the first, and after a crash
MAX_SCHEMA_VARIANTS = 5  # different requests of one kind: clients that cannot take part change the plan
SPARE_EVALUATIONS = 5
EVALUATIONS_IF_UNSET = 20  # as the round loop has it


def check_allowed(home: Any, what: str, parcel: Payload) -> None:
    """Refuse a request that is not part of the protocol of a secure run."""
    if what not in ALLOWED:
        raise RequestError(f"client '{home.name}' refuses {what!r}: with secure = true it sends secure sums only.")
    if what in SCHEMA_REQUESTS:
        known = load_state(home)
        seen = known["schema"].setdefault(what, [])
        words = {key: parcel.words.get(key) for key in ("plan", "draft", "wanted")}
        digest = hashlib.sha256(secure_sums.canonical_bytes(words)).hexdigest()
        if digest not in seen:
            if len(seen) >= MAX_SCHEMA_VARIANTS:
                raise RequestError(
                    f"client '{home.name}' was asked {len(seen)} different times for {what!r}; it answers no more."
                )
            seen.append(digest)
            save_state(home, known)
        check_plan(home, parcel.words.get("plan"))


def check_plan(home: Any, plan: Any) -> None:
    """A column of numbers must not become a category: its values would be sent as names."""
    from mooring.data.schema_client import survey_table

    if not isinstance(plan, dict):
        return
    own = survey_table(home.member).facts
    for column in plan.get("columns", ()):
        about = own.get(str(column.get("source") or column.get("name")))
        if about is None or column.get("kind") != "category" or column.get("part"):
            continue
        if float(about["present"][0]) > 0 and float(about["numbers"][0]) == float(about["present"][0]):
            raise RequestError(
                f"client '{home.name}' refuses a schema that takes its column of numbers '{column['name']}' as a "
                "category: its values would be sent."
            )


def check_begin(home: Any, label: str, fields: dict[str, Any], start: str, fresh: bool) -> None:
    """The settings are those of the run file, and a run begins a few times only."""
    own = home.run.algorithm
    if label == own.name:
        for name, value in own.fields.items():
            if not isinstance(value, str) and json.dumps(fields.get(name)) != json.dumps(value):
                raise RequestError(
                    f"client '{home.name}' has {name} = {value!r} in its run file, and the server {fields.get(name)!r}."
                )
    known = load_state(home)
    starts = known["starts"].setdefault(label, [])
    if fresh and start not in starts:
        if len(starts) >= MAX_STARTS:
            raise RequestError(
                f"client '{home.name}' has begun this secure run {len(starts)} times; start `mooring join` again."
            )
        starts.append(start)
        known["sums"] = {key: value for key, value in known["sums"].items() if not key.startswith(f"{label}/")}
        save_state(home, known)


def round_up_to_power_of_two(value: float) -> float:
    """All that a secure run reveals of a client's curvature, so that step sizes can be set."""
    return float(2.0 ** np.ceil(np.log2(value))) if value > 0 and np.isfinite(value) else value


def empty_state() -> dict[str, Any]:
    return {"session": None, "starts": {}, "sums": {}, "evaluations": {}, "schema": {}}


def state_path(home: Any) -> Path:
    return home.folder / STATE


def load_state(home: Any) -> dict[str, Any]:
    return read_json(state_path(home)) if state_path(home).exists() else empty_state()


def save_state(home: Any, known: dict[str, Any], *, durable: bool = True) -> None:
    """Replace the state. What a power cut may cost is not `durable`: an attempt that is then made anew."""
    make_synced_folder(home.folder)
    if durable:
        write_json(state_path(home), known)
        return
    fresh = state_path(home).with_suffix(".new")
    handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(json_bytes(known))
    os.replace(fresh, state_path(home))


def delete_state(home: Any) -> None:
    """Keys and seeds of a run that is over: nobody can take the masks off any more."""
    state_path(home).unlink(missing_ok=True)


def require_identity(home: Any) -> Any:
    if home.identity is None:
        raise RequestError(
            f"client '{home.name}' needs its key and its peers' keys for secure = true: give --key and --peers."
        )
    return home.identity


def handle_keys(home: Any, parcel: Payload) -> Payload:
    """A fresh key for a session, signed together with this client's weight and numbers of rows."""
    identity, words = require_identity(home), parcel.words
    session, cohort = str(words["session"]), [str(name) for name in words["cohort"]]
    check_cohort(home, cohort)
    known = load_state(home)
    current = known["session"]
    if current is None or current["id"] != session:
        private, signing = X25519PrivateKey.generate(), Ed25519PrivateKey.generate()
        sizes = {part: int(getattr(home.clients, part).size[0]) for part in PARTS}
        statement = {
            "protocol": secure_sums.PROTOCOL_NAME,
            "run": home.digest,
            "session": session,
            "name": home.name,
            "public": private.public_key().public_bytes_raw().hex(),
            "signing": signing.public_key().public_bytes_raw().hex(),
            "weight": own_weight(home),
            "sizes": sizes,
            "cohort": sorted(cohort),
        }
        known["session"] = {
            "id": session,
            "private": private.private_bytes_raw().hex(),
            "signing": signing.private_bytes_raw().hex(),
            "statement": statement,
            "signature": secure_sums.sign(identity.private, statement),
            "peers": None,
            "attempt": None,
        }
        save_state(home, known)
    elif current["statement"]["cohort"] != sorted(cohort):
        raise RequestError(f"client '{home.name}' is told another cohort for the same session.")
    current = known["session"]
    return Payload({"statement": current["statement"], "signature": current["signature"]})


def check_cohort(home: Any, cohort: list[str]) -> None:
    identity = require_identity(home)
    if len(set(cohort)) < secure_sums.MIN_COHORT:
        raise RequestError(
            f"client '{home.name}' takes part in secure sums of {secure_sums.MIN_COHORT} clients or more, not of "
            f"{len(set(cohort))}."
        )
    unknown = [name for name in cohort if name != home.name and name not in identity.peers]
    if unknown:
        raise RequestError(
            f"client '{home.name}' does not know the key of '{unknown[0]}'; its list of peers has "
            f"{len(identity.peers)} names."
        )
    if home.name not in cohort:
        raise RequestError(f"client '{home.name}' is not in the cohort that it is asked to join.")


def own_weight(home: Any) -> float:
    """This client's weight before the weights of all are divided by their sum, by the rule of the run file."""
    rule = home.run.training.weights
    if isinstance(rule, dict):
        return float(rule[home.name])
    if rule == "size":
        return float(home.clients.train.size[0])
    if rule == "uniform":
        return 1.0
    own = home.clients.weights_from_column
    return 1.0 if own is None else float(own[home.name])


def handle_peers(home: Any, parcel: Payload) -> Payload:
    """Check what all others signed, and keep it for the session."""
    identity, known = require_identity(home), load_state(home)
    current = find_session(home, known, parcel)
    cohort = current["statement"]["cohort"]
    statements = parcel.words["statements"]
    if sorted(statements) != cohort:
        raise RequestError(f"client '{home.name}' needs a statement of every client of the session.")
    peers = {}
    for name in cohort:
        statement, signature = statements[name]["statement"], statements[name]["signature"]
        public = identity.own if name == home.name else identity.peers[name]
        expected = {"protocol": secure_sums.PROTOCOL_NAME, "run": home.digest, "session": current["id"], "name": name}
        expected |= {"cohort": cohort}
        if any(statement.get(key) != value for key, value in expected.items()):
            raise RequestError(f"client '{home.name}' is shown a statement of '{name}' for another session.")
        if not secure_sums.is_signed(public, statement, signature):
            raise RequestError(f"client '{home.name}' is shown a statement of '{name}' that '{name}' did not sign.")
        if not (float(statement["weight"]) > 0 and all(int(statement["sizes"][part]) >= 0 for part in PARTS)):
            raise RequestError(f"client '{name}' states no weight.")
        peers[name] = {key: statement[key] for key in ("public", "signing", "weight", "sizes")}
    if len({about["public"] for about in peers.values()}) < len(peers):
        raise RequestError(f"client '{home.name}' is shown one key for two clients.")
    share = peers[home.name]["weight"] / sum(about["weight"] for about in peers.values())
    if share > MAX_OWN_SHARE:
        raise RequestError(
            f"client '{home.name}' has {share:.0%} of the weight: the sum would show its own message. Use weights = "
            '"uniform".'
        )
    current["peers"] = peers
    save_state(home, known)
    return Payload({})


def find_session(home: Any, known: dict[str, Any], parcel: Payload) -> dict[str, Any]:
    current = known["session"]
    if current is None or current["id"] != parcel.words.get("session"):
        raise RequestError(f"client '{home.name}' has no such session of secure sums; its keys are made anew.")
    return current


def handle_masked_update(home: Any, parcel: Payload) -> Payload:
    """The message of a local update under masks, and the work that it took."""
    from mooring.engines.flower.client_node import run_local_update

    words, known = parcel.words, load_state(home)
    current = find_session(home, known, parcel)
    turn = int(words["round"][0])
    if not 1 <= turn <= max(home.run.training.rounds, 1):
        raise RequestError(f"client '{home.name}' takes part in {home.run.training.rounds} rounds, not in {turn}.")
    check_share(home, current, words)
    reply = run_local_update(home, parcel)
    share, limit = float(words["p"]), float(home.federation.secure_range)
    vector = secure_sums.flatten_message(reply.tensors) * share
    if vector.size and not np.abs(vector).max() <= limit:
        raise RequestError(
            f"client '{home.name}' would send {np.abs(vector).max():.3g}, and secure_range is {limit:g}; raise it."
        )
    masked = mask_once(home, known, parcel, lambda cohort: secure_sums.quantize(vector, limit, cohort))
    work = {name: reply.words["meter"][name] for name in ("samples", "gradients")}
    return Payload({"meter": work}, {"masked": masked})


def handle_masked_losses(home: Any, parcel: Payload) -> Payload:
    """This client's part of the mean loss over all clients' rows, under masks."""
    from mooring.engines.flower.client_node import mean_losses

    known = load_state(home)
    current = find_session(home, known, parcel)
    digest = secure_sums.request_digest(parcel.words, parcel.tensors)
    budget, used = evaluation_budget(home), known["evaluations"]
    if digest not in used and len(used) >= budget:
        raise RequestError(
            f"client '{home.name}' has evaluated {len(used)} models, which is all that its run file plans ({budget})."
        )
    check_share(home, current, parcel.words)
    parts = [str(part) for part in parcel.words["parts"]]
    losses, values = mean_losses(home, parcel).tolist(), []
    for part, loss in zip(parts, losses):
        rows = {name: int(about["sizes"][part]) for name, about in current["peers"].items()}
        mine, total = rows[home.name], sum(rows.values())
        usable = loss if np.isfinite(loss) else secure_sums.LOSS_RANGE
        values.append(0.0 if not mine else mine / total * min(max(usable, 0.0), secure_sums.LOSS_RANGE))
    used.setdefault(digest, None)
    masked = mask_once(
        home, known, parcel, lambda cohort: secure_sums.quantize(np.array(values), secure_sums.LOSS_RANGE, cohort)
    )
    return Payload({}, {"masked": masked})


def evaluation_budget(home: Any) -> int:
    """Evaluations that the run file plans, for the algorithm and its baseline, and some to spare after a crash."""
    training = home.run.training
    every = training.evaluate_every or max(1, training.rounds // EVALUATIONS_IF_UNSET)
    planned = training.rounds // every + 4
    return 2 * planned + SPARE_EVALUATIONS


def check_share(home: Any, current: dict[str, Any], words: dict[str, Any]) -> None:
    """The weight that the server names must follow from what all clients signed."""
    if current["peers"] is None:
        raise RequestError(f"client '{home.name}' has not seen its peers' keys yet.")
    weights = {name: float(about["weight"]) for name, about in current["peers"].items()}
    share = weights[home.name] / sum(weights.values())
    if not abs(float(words["p"]) - share) <= 1e-9:
        raise RequestError(
            f"client '{home.name}' would weigh {float(words['p']):.6g}, and {share:.6g} follows from the agreed sizes."
        )


def mask_once(home: Any, known: dict[str, Any], parcel: Payload, values: Callable[[int], np.ndarray]) -> torch.Tensor:
    """[d] int64 under the masks of an attempt. The same request gets the same reply; another one with the same number
    is refused, because two vectors under one mask show their difference."""
    words, current = parcel.words, known["session"]
    number, cohort = int(words["attempt"]), sorted(str(name) for name in words["cohort"])
    check_cohort(home, cohort)
    outside = set(cohort) - set(current["peers"])
    if outside:
        raise RequestError(f"client '{home.name}' has no key of '{min(outside)}' in this session.")
    digest = secure_sums.request_digest(words, parcel.tensors)
    label = str(words.get("label"))
    name = f"{label}/round {int(words['round'][0])}" if "parts" not in words else f"{label}/loss {digest}"
    before = known["sums"].get(name)
    if before is not None and before["digest"] != digest:
        raise RequestError(f"client '{home.name}' has summed {name} already, for another model.")
    attempt = current["attempt"]
    if attempt is None or attempt["number"] < number:
        attempt = {"number": number, "digest": digest, "cohort": cohort, "name": name, "survivors": None}
        attempt["model"] = secure_sums.request_digest({}, parcel.tensors) if "parts" not in words else digest
        attempt["seed"] = secrets.token_bytes(32).hex()
        current["attempt"] = attempt
        save_state(home, known, durable=False)
    elif (attempt["number"], attempt["digest"], attempt["cohort"]) != (number, digest, cohort):
        raise RequestError(f"client '{home.name}' has used the masks of attempt {number} already.")
    pairs = {other: shared_seed(home, current, other) for other in cohort if other != home.name}
    masked = secure_sums.mask(values(len(cohort)), home.name, bytes.fromhex(attempt["seed"]), pairs)
    return torch.from_numpy(masked.view(np.int64).copy())


def shared_seed(home: Any, current: dict[str, Any], other: str) -> bytes:
    return secure_sums.pair_seed(
        bytes.fromhex(current["private"]),
        bytes.fromhex(current["peers"][other]["public"]),
        current["id"],
        current["attempt"]["number"],
        home.name,
        other,
    )


def handle_confirm(home: Any, parcel: Payload) -> Payload:
    """Sign who is in the sum, once for each attempt: `confirmed` names those of a sum that was opened before.

    An attempt that this client has not opened may be repeated over other clients: its masks stay on for ever."""
    known = load_state(home)
    current = find_session(home, known, parcel)
    attempt = find_attempt(home, current, parcel)
    survivors = sorted(str(name) for name in parcel.words["survivors"])
    if not set(survivors) <= set(attempt["cohort"]) or home.name not in survivors:
        raise RequestError(f"client '{home.name}' is shown survivors that are not of its cohort.")
    if len(survivors) < secure_sums.min_survivors(len(attempt["cohort"])):
        raise RequestError(
            f"client '{home.name}' needs {secure_sums.min_survivors(len(attempt['cohort']))} of "
            f"{len(attempt['cohort'])} "
            f"clients in a sum, not {len(survivors)}."
        )
    before = known["sums"].get(attempt["name"])
    if before is not None and before["survivors"] != survivors:
        return Payload({"confirmed": before["survivors"]})
    if attempt["survivors"] not in (None, survivors):
        return Payload({"confirmed": attempt["survivors"]})
    for name, other in known["sums"].items():
        if other["model"] == attempt["model"] and other["survivors"] != survivors:
            raise RequestError(
                f"client '{home.name}' has been in a sum over other clients for the same model ({name}); the "
                "difference of the two would show single messages."
            )
    attempt["survivors"] = survivors
    save_state(home, known, durable=False)
    signed = secure_sums.survivor_list(home.digest, current["id"], attempt["number"], survivors)
    return Payload({"signature": secure_sums.sign_survivors(bytes.fromhex(current["signing"]), signed)})


def find_attempt(home: Any, current: dict[str, Any], parcel: Payload) -> dict[str, Any]:
    attempt = current["attempt"]
    if attempt is None or attempt["number"] != int(parcel.words["attempt"]):
        raise RequestError(f"client '{home.name}' has no sum under way with this number.")
    return attempt


def handle_unmask(home: Any, parcel: Payload) -> Payload:
    """The seeds that take the masks off a sum that enough clients have confirmed."""
    known = load_state(home)
    current = find_session(home, known, parcel)
    attempt = find_attempt(home, current, parcel)
    survivors = attempt["survivors"]
    if survivors is None or sorted(str(name) for name in parcel.words["survivors"]) != survivors:
        raise RequestError(f"client '{home.name}' has not confirmed this sum.")
    signed = secure_sums.survivor_list(home.digest, current["id"], attempt["number"], survivors)
    signatures = {str(name): signature for name, signature in parcel.words["signatures"].items()}
    good = [
        name
        for name in survivors
        if secure_sums.is_signed_by_session_key(
            bytes.fromhex(current["peers"][name]["signing"]), signed, signatures.get(name)
        )
    ]
    needed = secure_sums.min_survivors(len(attempt["cohort"]))
    if len(good) < needed:
        raise RequestError(f"client '{home.name}' needs {needed} signatures under a sum, and sees {len(good)}.")
    known["sums"][attempt["name"]] = {name: attempt[name] for name in ("digest", "model", "survivors")}
    save_state(home, known)
    missing = [name for name in attempt["cohort"] if name not in survivors]
    pairs = {other: shared_seed(home, current, other).hex() for other in missing}
    return Payload({"seed": attempt["seed"], "pairs": pairs})


REQUEST_HANDLERS: dict[str, Callable[[Any, Payload], Payload]] = {
    secure_sums.KEYS: handle_keys,
    secure_sums.PEERS: handle_peers,
    secure_sums.UPDATE: handle_masked_update,
    secure_sums.EVALUATE: handle_masked_losses,
    secure_sums.CONFIRM: handle_confirm,
    secure_sums.UNMASK: handle_unmask,
}
