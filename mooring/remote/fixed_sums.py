"""Secure sums of a fixed cohort: each client sends one message for each sum.

    fixed_keys      each client's statement: run, schema, columns, weight, rows, and a fresh key, signed
    fixed_cohort    all statements; every client checks all of them, and that its weight follows from them
    fixed_update    the message of a local update, times the client's share of the mean, under masks
    fixed_evaluate  its part of the mean losses, under masks

The masks are those of `transcript.py`: the digest of each sum covers the cohort and the content of all requests up to
its own, including the model, so that a server that sends different clients different models adds up random numbers, in
this sum and in all later ones. Every sum has a name, such as "fedavg/round 3". A client answers one request of each
name and stores the answer before it sends it; the same request gets the same bytes, and another one is refused. No mask
is ever revealed, so that a sum needs all clients: one that restarts sends what it has stored, and one that is gone ends
the run. Values are rounded to steps of range / 2^BITS, as in `secure_sums.py`.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from mooring.core.errors import RequestError, WorkError
from mooring.core.summing import Step, Sum, to_integers, to_values
from mooring.core.types import JsonObject
from mooring.data.clients import PARTS, Clients
from mooring.data.schema import Schema
from mooring.engines.exchange import ClientRoster
from mooring.remote import secure_client
from mooring.remote.client_requests import mean_losses, run_local_update
from mooring.remote.cohorts import (
    COHORT_FILE,
    check_same_clients,
    check_same_rows,
    check_statements,
    record_cohort,
    sign_statement,
)
from mooring.remote.messages import FIXED_COHORT, FIXED_EVALUATE, FIXED_KEYS, FIXED_UPDATE, ClientFailedError, Payload
from mooring.remote.secure_rule import agreed_shares, bound_rows, bound_weight
from mooring.remote.secure_sums import (
    LOSS_RANGE,
    SecureSum,
    bounded_loss,
    digest_tensors,
    flatten_message,
    is_signed,
    steps_per_unit,
)
from mooring.remote.transcript import (
    PROTOCOL,
    Cohort,
    Transcript,
    canonical_bytes,
    describe_other_columns,
    make_statement,
    mask,
)
from mooring.runs.atomic_files import DamagedFile, make_synced_folder, read_json, write_json
from mooring.runs.runfile import RunFile
from mooring.runs.tensor_files import read_tensors, write_tensors

if TYPE_CHECKING:
    from mooring.remote.client_node import ClientNode
    from mooring.remote.messenger import Messenger

ANSWERS_FOLDER, REFUSED_FILE = "answers", "refused.json"  # of a run at a client
STORED_ROUNDS = 3  # answers to local updates: a server that was restarted returns to one of its two latest checkpoints
BOUND_FIELDS = ("what", "label", "round", "base", "parts")  # of a request, beside its tensors


def schema_digest(schema: Schema) -> str:
    return hashlib.sha256(canonical_bytes(schema.model_dump(mode="json"))).hexdigest()


def request_digest(payload: Payload, start: str) -> bytes:
    """Return a digest of all that decides the clients' answers: the request, and what their first state was made of."""
    fields = {name: payload.fields.get(name) for name in BOUND_FIELDS}
    return bytes.fromhex(digest_tensors([fields, start], payload.tensors))


class StoredAnswers:
    """What a client has sent under masks: a file for each answer, which also lists all answers up to it.

    A power failure may cost the last one. The client then answers the same request with the same bytes once more, and
    another request under other masks.
    """

    def __init__(self, cohort: Cohort, name: str, secrets_by_peer: Mapping[str, bytes], folder: Path):
        self.name, self.secrets, self.folder = name, dict(secrets_by_peer), folder
        self.transcript, self.steps = Transcript(cohort), list[list[str | int]]()
        make_synced_folder(folder)
        for number in sorted((int(path.stem) for path in folder.glob("*.safetensors")), reverse=True):
            try:
                self.steps = read_tensors(self._path(number))[1]["steps"]
                break
            except DamagedFile:  # by a power failure
                self._path(number).unlink()
        for step in self.steps:
            self.transcript.add(*_as_step(step))

    def _path(self, number: int) -> Path:
        return self.folder / f"{number}.safetensors"

    def find(self, name: str, request: bytes) -> Payload | None:
        """Return the stored answer to the same request; refuse another request of that name, and new ones after a
        refusal."""
        number = next((number for number, step in enumerate(self.steps) if step[0] == name), None)
        if number is None:
            if (path := self.folder / REFUSED_FILE).exists():
                raise RequestError(str(read_json(path)["refused"]))
            return None
        if self.steps[number][2] != request.hex() or not self._path(number).exists():
            raise RequestError(
                f"client '{self.name}' has answered {name} already, for another request; it answers each once."
            )
        tensors, about = read_tensors(self._path(number))
        return Payload(about["fields"], {"masked": tensors["masked"]})

    def add(self, name: str, request: bytes, part: Sum, fields: JsonObject) -> Payload:
        """Return a part under the masks of its request, after it was stored."""
        values, transcript = to_integers(part), copy.copy(self.transcript)
        step: list[str | int] = [name, len(values), request.hex()]
        digest = transcript.add(*_as_step(step))
        masked = torch.from_numpy(mask(values, self.name, self.secrets, digest).view(np.int64))
        steps = [*self.steps, step]
        write_tensors(
            self._path(len(self.steps)), {"masked": masked}, {"steps": steps, "fields": fields}, durable=False
        )
        self.transcript, self.steps = transcript, steps
        return Payload(fields, {"masked": masked})

    def refuse(self, why: str) -> None:
        """Store that this client answers no more sums of this run: a server that could try many models after a
        refusal would learn about rows from what is refused."""
        write_json(self.folder / REFUSED_FILE, {"refused": why})

    def drop(self, name: str) -> None:
        """Delete an old answer, which no server asks for again; that it was given stays known."""
        for number, step in enumerate(self.steps):
            if step[0] == name:
                self._path(number).unlink(missing_ok=True)


def _as_step(step: list[str | int]) -> tuple[str, int, np.ndarray]:
    name, size, request = step
    return str(name), int(size), np.frombuffer(bytes.fromhex(str(request)), dtype="<u8")


def make_part(name: str, values: np.ndarray, range_: float, clients: int) -> Sum:
    return Sum(Step(name, "", 1 / steps_per_unit(range_, clients)), values[None])


# at a client


def own_statement(node: ClientNode) -> JsonObject:
    columns = list(node.schema.features)
    statement = make_statement(
        node.digest, schema_digest(node.schema), node.name, columns, node.private.public_key().public_bytes_raw()
    )
    sizes = {part: int(getattr(node.clients, part).size[0]) for part in PARTS}
    weights = node.clients.weights_from_column
    return statement | {"sizes": sizes, "weight": None if weights is None else float(weights[node.name])}


def handle_keys(node: ClientNode, payload: Payload) -> Payload:
    """Return this client's statement and its signature."""
    secure_client.check_keys(node)
    node.begin_again()
    check_same_rows(node)
    return sign_statement(node, own_statement(node))


def handle_cohort(node: ClientNode, payload: Payload) -> Payload:
    """Check what all clients have signed, and store it."""
    cohort = check_statements(node, payload, own_statement(node))
    stated = {str(statement["name"]): statement for statement in cohort.statements}
    share = agreed_shares(node.run, stated)[node.name]
    if share > secure_client.MAX_OWN_SHARE:
        raise RequestError(
            f"client '{node.name}' has {share:.0%} of the weight: the sum would show its own message. Use weights = "
            '"uniform".'
        )
    path = node.sums / COHORT_FILE
    is_other = path.exists() and read_json(path)["statements"] != list(cohort.statements)
    if is_other and node.stored_answers.steps:
        raise RequestError(
            f"client '{node.name}' takes part in this run with other clients, keys or columns; a new run needs "
            "`mooring join --again`."
        )
    check_same_clients(node, cohort)
    write_json(path, {"statements": list(cohort.statements)})
    node.forget_cohort()
    return Payload({})


def handle_update(node: ClientNode, payload: Payload) -> Payload:
    """Return the message of a local update under masks, and the work that it took."""
    fields, answers = payload.fields, node.stored_answers
    turn, label = int(fields["round"][0]), str(fields["label"])
    if not 1 <= turn <= node.run.training.rounds or int(fields["base"]) != turn - 1:
        raise RequestError(
            f"client '{node.name}' takes part in rounds 1 to {node.run.training.rounds}, each after the one before."
        )
    share = check_place(node, answers, fields)
    request = bind_request(node, payload, FIXED_UPDATE)
    name = f"{label}/round {turn}"
    if (known := answers.find(name, request)) is not None:
        if turn not in node.history(fields).states:  # the run has begun once more, and its states with it
            run_local_update(node, payload)
        return known
    reply = run_local_update(node, payload)
    limit, vector = float(node.federation.secure_range), flatten_message(reply.tensors) * share
    try:
        secure_client.check_range(node, vector)
    except RequestError as error:
        answers.refuse(str(error))
        raise
    work = {name: reply.fields["meter"][name] for name in ("samples", "gradients")}
    out = add_answer(node, name, request, vector, limit, {"meter": work})
    answers.drop(f"{label}/round {turn - STORED_ROUNDS}")
    return out


def handle_evaluate(node: ClientNode, payload: Payload) -> Payload:
    """Return this client's part of the mean losses over all clients' rows, under masks."""
    fields, answers = payload.fields, node.stored_answers
    turn, base = int(fields["round"][0]), int(fields["base"])
    if not 1 <= turn <= node.run.training.rounds or base not in ((turn, 0) if turn == 1 else (turn,)):
        raise RequestError(f"client '{node.name}' evaluates its model of round {turn} after that round only.")
    check_place(node, answers, fields)
    request = bind_request(node, payload, FIXED_EVALUATE)
    name = f"{fields['label']}/losses {base}"
    if (known := answers.find(name, request)) is not None:
        return known
    if sum("/losses " in str(step[0]) for step in answers.steps) >= (budget := secure_client.evaluation_budget(node)):
        raise RequestError(f"client '{node.name}' has evaluated {budget} models, which is all that its run file plans.")
    sizes = {str(statement["name"]): statement["sizes"] for statement in answers.transcript.cohort.statements}
    bound, values = bound_rows((about["train"] for about in sizes.values()), node.federation.max_rows), []
    for part, loss in zip(fields["parts"], mean_losses(node, payload).tolist()):
        rows = {name: min(int(about[str(part)]), bound) for name, about in sizes.items()}
        values.append(bounded_loss(loss) * rows[node.name] / max(sum(rows.values()), 1))
    return add_answer(node, name, request, np.array(values), LOSS_RANGE, {})


def check_place(node: ClientNode, answers: StoredAnswers, fields: JsonObject) -> float:
    """Return this client's share of the mean; refuse a share or a place that does not follow from the statements."""
    cohort = answers.transcript.cohort
    stated = {str(statement["name"]): statement for statement in cohort.statements}
    share = agreed_shares(node.run, stated)[node.name]
    if not abs(float(fields["p"]) - share) <= 1e-9 or int(fields["index"]) != cohort.names.index(node.name):
        raise RequestError(
            f"client '{node.name}' would weigh {float(fields['p']):.6g} in place {int(fields['index'])}, and "
            f"{share:.6g} in place {cohort.names.index(node.name)} follows from what all clients have signed."
        )
    return share


def bind_request(node: ClientNode, payload: Payload, what: str) -> bytes:
    label = str(payload.fields["label"])
    if label not in node.starts:
        history = node.history(payload.fields)
        node.starts[label] = digest_tensors([history.hyperparameters], {"w0": history.w0})
    return request_digest(payload._replace(fields=payload.fields | {"what": what}), node.starts[label])


def add_answer(
    node: ClientNode, name: str, request: bytes, vector: np.ndarray, range_: float, fields: JsonObject
) -> Payload:
    answers = node.stored_answers
    if not answers.steps:
        record_cohort(node, answers.transcript.cohort)
    part = make_part(name, vector, range_, len(answers.transcript.cohort.statements))
    return answers.add(name, request, part, fields)


# at the server


class FixedSums:
    """Sums over all clients of a federation; `open` agrees on the cohort, once for each start of the server."""

    update, evaluate = FIXED_UPDATE, FIXED_EVALUATE

    def __init__(self, messenger: Messenger, roster: ClientRoster, clients: Clients, run: RunFile):
        self.messenger, self.roster, self.run, self.opened = messenger, roster, run, False
        self.schema, self.weights = clients.schema, clients.weights_from_column

    def open(self) -> None:
        """Let every client sign a statement, and show every client what all have signed."""
        if self.opened:
            return
        names = self.roster.names
        replies = self.messenger.ask_all(FIXED_KEYS, {name: Payload({}) for name in names})
        statements = {name: replies[name].fields["statement"] for name in names}
        signatures = {name: replies[name].fields["signature"] for name in names}
        for name in names:
            if (problem := self._find_problem(name, statements, signatures)) is not None:
                why = f"client '{name}' {problem}"
                self.messenger.dismiss(name, why)
                raise ClientFailedError(name, why)
            same = [other for other in names if statements[other]["public"] == statements[name]["public"]]
            if len(same) > 1:
                raise WorkError(f"clients {' and '.join(same)} have signed the same key, and one has copied it.")
        message = Payload({"statements": {"list": [statements[name] for name in names]}, "signatures": signatures})
        self.messenger.ask_all(FIXED_COHORT, dict.fromkeys(names, message))
        self.opened = True

    def _find_problem(
        self, name: str, statements: Mapping[str, JsonObject], signatures: Mapping[str, object]
    ) -> str | None:
        """Return what is wrong with a client's statement, as the other clients would find."""
        statement = statements[name]
        columns = list(self.schema.features)
        expected = make_statement(self.messenger.run, schema_digest(self.schema), name, columns, b"")
        if set(statement) != {*expected, "sizes", "weight"} or statement["protocol"] != PROTOCOL:
            return "has signed another kind of statement; install the same version everywhere"
        if statement["columns"] != columns:
            return describe_other_columns(statement, expected | {"name": "the server"})
        if any(statement[key] != expected[key] for key in ("run", "plan")):
            return "has signed a statement for another run or another schema"
        place, known = self.roster.names.index(name), self.roster.sizes  # bounded already, which moves no median
        bound = bound_rows(
            known["train"].tolist(), None if self.run.federation is None else self.run.federation.max_rows
        )
        if any(min(statement["sizes"][part], bound) != int(known[part][place]) for part in PARTS):
            return "has signed other numbers of rows than it sent before"
        own = self.weights
        if own is not None and bound_weight(statement["weight"] or 0.0, own.values()) != own[name]:
            return "has signed another weight than it sent before"
        public = self.messenger.transport.public_keys.get(name)
        if public is not None and not is_signed(public, statement, signatures[name]):
            return "has not signed its statement with its enrolled key"
        return None

    def ask(self, what: str, requests: Mapping[str, Payload], range_: float, size: int, title: str) -> SecureSum:
        """Return the sum of what all clients answer, `size` numbers each; one that does not answer ends the run."""
        self.open()
        names = self.roster.names
        answered = self.messenger.ask(what, dict(requests), quorum=0)
        if answered.missing:
            name, why = next(iter(answered.missing.items()))
            raise WorkError(
                f"{title}: client '{name}' is missing from a sum over all clients ({why}). Once it is back, the same "
                "command resumes the run; without it, start a new run with another --out, which clients join with "
                "`mooring join --again`."
            )
        masked = {name: answered.replies[name].tensors["masked"] for name in names}
        for name, vector in masked.items():
            if len(vector) != size + 1:
                why = f"client '{name}' sent {len(vector)} numbers under masks, where {size + 1} are right"
                self.messenger.dismiss(name, why)
                raise WorkError(f"{title}: {why}.")
        total = np.zeros(size + 1, np.uint64)
        for vector in masked.values():
            total += vector.numpy().view(np.uint64)
        step = make_part(title, np.zeros(0), range_, len(names)).step
        values = to_values(total, step, len(names))
        return SecureSum(values, tuple(names), {name: answered.replies[name].fields for name in names})
