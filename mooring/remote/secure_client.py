"""A client's part in secure sums (`secure_sums.py`): what it sends, and what it refuses.

The server is not trusted to follow the protocol. The client refuses

- every request that is not marked `secure` in `requests.py`: no statistics of its rows, no loss and no model of its
  own in the clear;
- a cohort of fewer than three clients, or with a client whose key is not in the list of peers that it was given;
- weights that do not follow from what all clients signed, and a share of its own above MAX_OWN_SHARE;
- a second sum for the same round over other clients or of another model: the difference would be one client's message;
- more evaluations, rounds and beginnings than its run file plans, and settings that are not its run file's;
- a schema that turns one of its columns of numbers into a category, which would show its values.

The state that it stores for this is one file in its folder, written before every reply and removed at the end.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from mooring.core.errors import RequestError
from mooring.core.types import JsonObject
from mooring.data.clients import PARTS
from mooring.remote import secure_sums
from mooring.remote.messages import Payload, commit_to_share
from mooring.runs.atomic_files import make_synced_folder, read_json, write_json

if TYPE_CHECKING:
    from mooring.remote.client_node import ClientNode

STATE = "secure.json"
SCHEMA_REQUESTS = ("survey", "tally", "names", "spread")
MAX_OWN_SHARE = 0.9
MAX_STARTS = 3  # beginnings of a run that one `mooring join` takes part in: the first, and after a crash
MAX_SCHEMA_VARIANTS = 5  # different requests of one kind: clients that cannot take part change the plan
SPARE_EVALUATIONS = 5
EVALUATIONS_IF_UNSET = 20  # as the round loop has it


def check_schema_request(node: ClientNode, what: str, payload: Payload) -> None:
    """Refuse more than a few different requests about the schema, and a plan that would show values."""
    if what in SCHEMA_REQUESTS:
        known = load_state(node)
        seen = known["schema"].setdefault(what, [])
        fields = {key: payload.fields.get(key) for key in ("plan", "draft", "wanted")}
        digest = hashlib.sha256(secure_sums.canonical_bytes(fields)).hexdigest()
        if digest not in seen:
            if len(seen) >= MAX_SCHEMA_VARIANTS:
                raise RequestError(
                    f"client '{node.name}' was asked {len(seen)} different times for {what!r}; it answers no more."
                )
            seen.append(digest)
            save_state(node, known)


def check_begin(node: ClientNode, label: str, hyperparameters: JsonObject, start: str, fresh: bool) -> None:
    """Refuse hyperparameters other than the run file's, and more than MAX_STARTS beginnings of a run."""
    own = node.run.algorithm
    if own is not None and label == own.name:
        for name, value in own.fields.items():
            if not isinstance(value, str) and json.dumps(hyperparameters.get(name)) != json.dumps(value):
                raise RequestError(
                    f"client '{node.name}' has {name} = {value!r} in its run file, and the server "
                    f"{hyperparameters.get(name)!r}."
                )
    known = load_state(node)
    starts = known["starts"].setdefault(label, [])
    if fresh and start not in starts:
        if len(starts) >= MAX_STARTS:
            raise RequestError(
                f"client '{node.name}' has begun this secure run {len(starts)} times; start `mooring join` again."
            )
        starts.append(start)
        known["sums"] = {key: value for key, value in known["sums"].items() if not key.startswith(f"{label}/")}
        save_state(node, known)


def round_up_to_power_of_two(value: float) -> float:
    """Return all that a secure run reveals of a client's curvature, so that step sizes can be set."""
    return float(2.0 ** np.ceil(np.log2(value))) if value > 0 and np.isfinite(value) else value


def empty_state() -> JsonObject:
    return {"session": None, "starts": {}, "sums": {}, "evaluations": {}, "schema": {}}


def state_path(node: ClientNode) -> Path:
    return node.folder / STATE


def load_state(node: ClientNode) -> JsonObject:
    return read_json(state_path(node)) if state_path(node).exists() else empty_state()


def save_state(node: ClientNode, known: JsonObject, *, durable: bool = True) -> None:
    """Replace the state; a power cut may cost a state that is not `durable`, and the attempt is then repeated."""
    make_synced_folder(node.folder)
    write_json(state_path(node), known, durable=durable)


def delete_state(node: ClientNode) -> None:
    """Delete keys and seeds of a finished run, so that its masks can no longer be removed."""
    state_path(node).unlink(missing_ok=True)


def check_keys(node: ClientNode) -> None:
    """Refuse masks without enrolled keys, except in a trial on one machine: the server could take clients' places."""
    if node.identity is None and not node.unsigned:
        raise RequestError(
            f"client '{node.name}' needs its key and its peers' keys for secure sums: give --key and --peers."
        )


def handle_keys(node: ClientNode, payload: Payload) -> Payload:
    """A fresh key for a session, signed together with this client's weight and numbers of rows."""
    fields = payload.fields
    check_keys(node)
    session, cohort = str(fields["session"]), [str(name) for name in fields["cohort"]]
    check_cohort(node, cohort)
    known = load_state(node)
    current = known["session"]
    if current is None or current["id"] != session:
        private, signing = X25519PrivateKey.generate(), Ed25519PrivateKey.generate()
        sizes = {part: int(getattr(node.clients, part).size[0]) for part in PARTS}
        statement = {
            "protocol": secure_sums.PROTOCOL_NAME,
            "run": node.digest,
            "session": session,
            "name": node.name,
            "public": private.public_key().public_bytes_raw().hex(),
            "signing": signing.public_key().public_bytes_raw().hex(),
            "weight": own_weight(node),
            "sizes": sizes,
            "cohort": sorted(cohort),
        }
        known["session"] = {
            "id": session,
            "private": private.private_bytes_raw().hex(),
            "signing": signing.private_bytes_raw().hex(),
            "statement": statement,
            "signature": "" if node.identity is None else secure_sums.sign(node.identity.private, statement),
            "peers": None,
            "attempt": None,
        }
        save_state(node, known)
    elif current["statement"]["cohort"] != sorted(cohort):
        raise RequestError(f"client '{node.name}' receives another cohort for the same session.")
    current = known["session"]
    return Payload({"statement": current["statement"], "signature": current["signature"]})


def check_cohort(node: ClientNode, cohort: list[str]) -> None:
    peers = None if node.identity is None else node.identity.peers
    if len(set(cohort)) < secure_sums.MIN_COHORT:
        raise RequestError(
            f"client '{node.name}' takes part in secure sums of {secure_sums.MIN_COHORT} clients or more, not of "
            f"{len(set(cohort))}."
        )
    unknown = [name for name in cohort if peers is not None and name != node.name and name not in peers]
    if unknown:
        raise RequestError(
            f"client '{node.name}' does not know the key of '{unknown[0]}'; its list of peers has "
            f"{len(peers or ())} names."
        )
    if node.name not in cohort:
        raise RequestError(f"client '{node.name}' is not in the cohort that it is asked to join.")


def own_weight(node: ClientNode) -> float:
    """This client's weight before the weights of all are divided by their sum, by the rule of the run file."""
    rule = node.run.training.weights
    if isinstance(rule, dict):
        return float(rule[node.name])
    if rule == "size":
        return float(node.clients.train.size[0])
    if rule == "uniform":
        return 1.0
    own = node.clients.weights_from_column
    return 1.0 if own is None else float(own[node.name])


def handle_peers(node: ClientNode, payload: Payload) -> Payload:
    """Check what all others signed, and store it for the session."""
    check_keys(node)
    identity, known = node.identity, load_state(node)
    current = find_session(node, known, payload)
    cohort = current["statement"]["cohort"]
    statements = payload.fields["statements"]
    if sorted(statements) != cohort:
        raise RequestError(f"client '{node.name}' needs a statement of every client of the session.")
    peers = {}
    for name in cohort:
        statement, signature = statements[name]["statement"], statements[name]["signature"]
        expected = {"protocol": secure_sums.PROTOCOL_NAME, "run": node.digest, "session": current["id"], "name": name}
        expected |= {"cohort": cohort}
        if any(statement.get(key) != value for key, value in expected.items()):
            raise RequestError(f"client '{node.name}' is shown a statement of '{name}' for another session.")
        if identity is not None and not secure_sums.is_signed(
            identity.own if name == node.name else identity.peers[name], statement, signature
        ):
            raise RequestError(f"client '{node.name}' is shown a statement of '{name}' that '{name}' did not sign.")
        if not (float(statement["weight"]) > 0 and all(int(statement["sizes"][part]) >= 0 for part in PARTS)):
            raise RequestError(f"client '{name}' states no weight.")
        peers[name] = {key: statement[key] for key in ("public", "signing", "weight", "sizes")}
    if len({about["public"] for about in peers.values()}) < len(peers):
        raise RequestError(f"client '{node.name}' is shown one key for two clients.")
    share = peers[node.name]["weight"] / sum(about["weight"] for about in peers.values())
    if share > MAX_OWN_SHARE:
        raise RequestError(
            f"client '{node.name}' has {share:.0%} of the weight: the sum would show its own message. Use weights = "
            '"uniform".'
        )
    current["peers"] = peers
    save_state(node, known)
    return Payload({})


def find_session(node: ClientNode, known: JsonObject, payload: Payload) -> JsonObject:
    current = known["session"]
    if current is None or current["id"] != payload.fields.get("session"):
        raise RequestError(f"client '{node.name}' has no such session of secure sums; its keys are made anew.")
    return current


def handle_masked_update(node: ClientNode, payload: Payload) -> Payload:
    """The message of a local update under masks, and the work that it took."""
    from mooring.remote.client_requests import run_local_update

    fields, known = payload.fields, load_state(node)
    current = find_session(node, known, payload)
    turn = int(fields["round"][0])
    if not 1 <= turn <= max(node.run.training.rounds, 1):
        raise RequestError(f"client '{node.name}' takes part in {node.run.training.rounds} rounds, not in {turn}.")
    check_share(node, current, fields)
    reply = run_local_update(node, payload)
    share, limit = float(fields["p"]), float(node.federation.secure_range)
    vector = secure_sums.flatten_message(reply.tensors) * share
    check_range(node, vector)
    masked = mask_once(node, known, payload, lambda cohort: secure_sums.quantize(vector, limit, cohort))
    work = {name: reply.fields["meter"][name] for name in ("samples", "gradients")}
    return Payload({"meter": work}, {"masked": masked})


def check_range(node: ClientNode, vector: np.ndarray) -> None:
    """Refuse a part that is out of range; the server does not learn by how much."""
    limit = float(node.federation.secure_range)
    if vector.size and not (largest := np.abs(vector).max()) <= limit:
        node.report(f"its message has an entry of {largest:.3g}, and secure_range is {limit:g}")
        raise RequestError(f"client '{node.name}' would send a larger number, and secure_range is {limit:g}; raise it.")


def handle_masked_losses(node: ClientNode, payload: Payload) -> Payload:
    """This client's part of the mean loss over all clients' rows, under masks."""
    from mooring.remote.client_requests import mean_losses

    known = load_state(node)
    current = find_session(node, known, payload)
    digest = secure_sums.request_digest(payload.fields, payload.tensors)
    budget, used = evaluation_budget(node), known["evaluations"]
    if digest not in used and len(used) >= budget:
        raise RequestError(
            f"client '{node.name}' has evaluated {len(used)} models, which is all that its run file plans ({budget})."
        )
    check_share(node, current, payload.fields)
    parts = [str(part) for part in payload.fields["parts"]]
    losses, values = mean_losses(node, payload).tolist(), []
    for part, loss in zip(parts, losses):
        rows = {name: int(about["sizes"][part]) for name, about in current["peers"].items()}
        own_rows, total = rows[node.name], sum(rows.values())
        values.append(0.0 if not own_rows else own_rows / total * secure_sums.bounded_loss(loss))
    used.setdefault(digest, None)
    masked = mask_once(
        node, known, payload, lambda cohort: secure_sums.quantize(np.array(values), secure_sums.LOSS_RANGE, cohort)
    )
    return Payload({}, {"masked": masked})


def evaluation_budget(node: ClientNode) -> int:
    """Evaluations that the run file plans, for the algorithm and its baseline, and some to spare after a crash."""
    training = node.run.training
    every = training.evaluate_every or max(1, training.rounds // EVALUATIONS_IF_UNSET)
    planned = training.rounds // every + 4
    return 2 * planned + SPARE_EVALUATIONS


def check_share(node: ClientNode, current: JsonObject, fields: JsonObject) -> None:
    """The weight that the server names must follow from what all clients signed."""
    if current["peers"] is None:
        raise RequestError(f"client '{node.name}' has not seen its peers' keys yet.")
    weights = {name: float(about["weight"]) for name, about in current["peers"].items()}
    share = weights[node.name] / sum(weights.values())
    if not abs(float(fields["p"]) - share) <= 1e-9:
        raise RequestError(
            f"client '{node.name}' would weigh {float(fields['p']):.6g}, and {share:.6g} follows from the agreed sizes."
        )


def mask_once(
    node: ClientNode, known: JsonObject, payload: Payload, values: Callable[[int], np.ndarray]
) -> torch.Tensor:
    """[d] int64 under the masks of an attempt. The same request gets the same reply; another one with the same number
    is refused, because two vectors under one mask show their difference."""
    fields, current = payload.fields, known["session"]
    number, cohort = int(fields["attempt"]), sorted(str(name) for name in fields["cohort"])
    check_cohort(node, cohort)
    outside = set(cohort) - set(current["peers"])
    if outside:
        raise RequestError(f"client '{node.name}' has no key of '{min(outside)}' in this session.")
    digest = secure_sums.request_digest(fields, payload.tensors)
    label = str(fields.get("label"))
    name = f"{label}/round {int(fields['round'][0])}" if "parts" not in fields else f"{label}/loss {digest}"
    before = known["sums"].get(name)
    if before is not None and before["digest"] != digest:
        raise RequestError(f"client '{node.name}' has summed {name} already, for another model.")
    attempt = current["attempt"]
    if attempt is None or attempt["number"] < number:
        attempt = {"number": number, "digest": digest, "cohort": cohort, "name": name, "survivors": None}
        attempt["model"] = secure_sums.request_digest({}, payload.tensors) if "parts" not in fields else digest
        attempt["seed"] = secrets.token_bytes(32).hex()
        history = node.history(fields)
        attempt["common"] = secure_sums.common_digest(
            fields, payload.tensors, cohort, history.hyperparameters, history.w0
        )
        current["attempt"] = attempt
        save_state(node, known, durable=False)
    elif (attempt["number"], attempt["digest"], attempt["cohort"]) != (number, digest, cohort):
        raise RequestError(f"client '{node.name}' has used the masks of attempt {number} already.")
    pairs = {other: shared_seed(node, current, other) for other in cohort if other != node.name}
    masked = secure_sums.mask(values(len(cohort)), node.name, bytes.fromhex(attempt["seed"]), pairs)
    return torch.from_numpy(masked.view(np.int64).copy())


def shared_seed(node: ClientNode, current: JsonObject, other: str) -> bytes:
    return secure_sums.pair_seed(
        bytes.fromhex(current["private"]),
        bytes.fromhex(current["peers"][other]["public"]),
        current["id"],
        current["attempt"]["number"],
        current["attempt"]["common"],
        node.name,
        other,
    )


def handle_confirm(node: ClientNode, payload: Payload) -> Payload:
    """Sign the list of clients in the sum, once per attempt: `confirmed` names those of a sum that was opened before.

    An attempt that this client has not opened may be repeated over other clients: its masks are never removed."""
    known = load_state(node)
    current = find_session(node, known, payload)
    attempt = find_attempt(node, current, payload)
    survivors = sorted(str(name) for name in payload.fields["survivors"])
    if not set(survivors) <= set(attempt["cohort"]) or node.name not in survivors:
        raise RequestError(f"client '{node.name}' is shown survivors that are not of its cohort.")
    if len(survivors) < secure_sums.min_survivors(len(attempt["cohort"])):
        raise RequestError(
            f"client '{node.name}' needs {secure_sums.min_survivors(len(attempt['cohort']))} of "
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
                f"client '{node.name}' has been in a sum over other clients for the same model ({name}); the "
                "difference of the two would show single messages."
            )
    attempt["survivors"] = survivors
    save_state(node, known, durable=False)
    signed = secure_sums.survivor_list(node.digest, current["id"], attempt["number"], survivors)
    signature = secure_sums.sign_survivors(bytes.fromhex(current["signing"]), signed)
    return Payload({"signature": signature} | share_answer(node, current, attempt))


def share_answer(node: ClientNode, current: JsonObject, attempt: JsonObject) -> JsonObject:
    """Return the answer to unmask under a fresh key, and an encrypted share of that key for each peer of the sum."""
    key, places = secrets.token_bytes(32), secure_sums.share_places(attempt["survivors"], node.name)
    threshold = secure_sums.share_threshold(len(attempt["survivors"]))
    values = secure_sums.split_secret(key, threshold, len(places))
    shares, commitments = {}, {}
    for peer, place in places.items():
        wrapping, share = _share_key(node, current, sender=node.name, receiver=peer), f"{values[place - 1]:x}"
        shares[peer] = secure_sums.encrypt(wrapping, share.encode(), [node.name, peer])
        commitments[peer] = commit_to_share(node.name, peer, share)
    answer = secure_sums.canonical_bytes(unmask_answer(node, current, attempt))
    return {"shares": shares, "commitments": commitments, "sealed": secure_sums.encrypt(key, answer, node.name)}


def _share_key(node: ClientNode, current: JsonObject, sender: str, receiver: str) -> bytes:
    peer = receiver if sender == node.name else sender
    return secure_sums.share_key(
        bytes.fromhex(current["private"]),
        bytes.fromhex(current["peers"][peer]["public"]),
        current["id"],
        current["attempt"]["number"],
        sender,
        receiver,
    )


def unmask_answer(node: ClientNode, current: JsonObject, attempt: JsonObject) -> JsonObject:
    """Return the client's own seed, and those that it shares with clients outside of the sum."""
    outside = [name for name in attempt["cohort"] if name not in attempt["survivors"]]
    return {"seed": attempt["seed"], "pairs": {other: shared_seed(node, current, other).hex() for other in outside}}


def find_attempt(node: ClientNode, current: JsonObject, payload: Payload) -> JsonObject:
    attempt = current["attempt"]
    if attempt is None or attempt["number"] != int(payload.fields["attempt"]):
        raise RequestError(f"client '{node.name}' has no sum under way with this number.")
    return attempt


def handle_unmask(node: ClientNode, payload: Payload) -> Payload:
    """Reveal the seeds that take the masks off a sum that enough clients have confirmed."""
    current, attempt = open_confirmed(node, payload)
    return Payload(unmask_answer(node, current, attempt))


def handle_recover(node: ClientNode, payload: Payload) -> Payload:
    """Reveal the shares of peers that confirmed the same sum and went away; None where a peer's share does not fit its
    commitment."""
    current, attempt = open_confirmed(node, payload)
    shares: dict[str, str | None] = {}
    for name, text in payload.fields["shares"].items():
        if name == node.name or name not in attempt["survivors"]:
            raise RequestError(f"client '{node.name}' has no share of '{name}' in this sum.")
        wrapping = _share_key(node, current, sender=str(name), receiver=node.name)
        try:
            share = secure_sums.decrypt(wrapping, str(text), [name, node.name]).decode()
        except ValueError:  # made by another client, or for another
            share = ""
        fits = commit_to_share(name, node.name, share) == payload.fields["commitments"][name]
        shares[name] = share if fits else None
    return Payload({"shares": shares})


def open_confirmed(node: ClientNode, payload: Payload) -> tuple[JsonObject, JsonObject]:
    """Return the session and the attempt of a sum that this client and enough others have confirmed; the sum of its
    round is then fixed."""
    known = load_state(node)
    current = find_session(node, known, payload)
    attempt = find_attempt(node, current, payload)
    survivors = attempt["survivors"]
    if survivors is None or sorted(str(name) for name in payload.fields["survivors"]) != survivors:
        raise RequestError(f"client '{node.name}' has not confirmed this sum.")
    signed = secure_sums.survivor_list(node.digest, current["id"], attempt["number"], survivors)
    signatures = {str(name): signature for name, signature in payload.fields["signatures"].items()}
    valid = [
        name
        for name in survivors
        if secure_sums.is_signed_by_session_key(
            bytes.fromhex(current["peers"][name]["signing"]), signed, signatures.get(name)
        )
    ]
    needed = secure_sums.min_survivors(len(attempt["cohort"]))
    if len(valid) < needed:
        raise RequestError(f"client '{node.name}' needs {needed} signatures under a sum, and sees {len(valid)}.")
    record = {name: attempt[name] for name in ("digest", "model", "survivors")}
    if known["sums"].get(attempt["name"]) != record:
        known["sums"][attempt["name"]] = record
        save_state(node, known)
    return current, attempt
