"""A client of a federation that asks for recommendations: it runs its own program and sends masked parts of sums.

roll_call   its statement: run, plan, name, columns and a fresh key, signed where it has an enrolled key
cohort      it checks all statements; the first client returns the cohort's common secret, encrypted for the others
step        the total of the last step; it returns its masked part of the next one, or that its program has ended
declare     five numbers about its result, where its policy lets results leave

The client answers each step once and stores the answer before it is sent. After a restart it runs its program again,
with the totals that it has stored.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch

from mooring.advice.evaluation.loss_sums import MODEL_KINDS
from mooring.advice.federated.estimate import SIZES
from mooring.advice.federated.plan import plan_digest
from mooring.advice.federated.program import (
    ClientResult,
    FederationResult,
    advise_program,
    apply_columns,
    home_rows,
    shape_of,
)
from mooring.advice.federated.results import client_row, federation_record, pick_model
from mooring.core.errors import RequestError, WorkError
from mooring.core.summing import Program, Step, Sum, to_integers, to_values
from mooring.core.types import JsonObject
from mooring.data.schema_sums import Agreement, SchemaOptions, agree_by_sums
from mooring.engines.model_store import describe_task
from mooring.engines.prepare import Job
from mooring.remote.client_node import ClientNode
from mooring.remote.client_requests import ADOPTED_SCHEMA_FILE, DONE_FILE, RESULT_DIR, client_table_digest
from mooring.remote.cohorts import COHORT_FILE, check_same_rows, check_statements, record_cohort, sign_statement
from mooring.remote.messages import Payload
from mooring.remote.transcript import (
    TAG_WORDS,
    Journal,
    MaskedAnswers,
    derive,
    from_text,
    make_statement,
    pair_secrets,
    seal,
    to_text,
    unseal,
)
from mooring.runs.atomic_files import json_bytes, make_synced_folder, parquet_bytes, read_json, write_json
from mooring.runs.directory import ADVICE_FILE, CLIENTS_FILE, RUN_FILE, SCHEMA_FILE, StoredModels, create_run
from mooring.runs.runfile import RunFile, run_bytes
from mooring.runs.sections import AdviceSection
from mooring.runs.table_schemas import CLIENTS_SCHEMA, clients_table
from mooring.shapes.columns import BOOSTED

DECLARED_FILE = "declared.json"
REVEALS = (
    "its parts of sums over all clients, under masks: the server learns totals, no client's numbers. `mooring advise "
    "RUN.toml --plan` lists them. Where its policy shares results: its rows, three losses and its recommendation"
)


def check_clients(step: Step, values: np.ndarray, clients: int) -> None:
    """Refuse sizes of another number of clients: what a run may add up depends on it."""
    if step.name == SIZES.name and ((values < 0).any() or values[1:].sum() != clients):
        raise RequestError(
            f"the total of step '{step.name}' has the sizes of another number of clients than {clients}."
        )


def schema_options(run: RunFile) -> SchemaOptions:
    """Return what the run file decides of a schema."""
    data = run.data
    if data.target is None:
        raise RequestError("recommendations across machines need the name of the target column in the run file.")
    return SchemaOptions(
        target=data.target,
        client=data.client,
        target_type=data.target_type or "auto",
        min_category_rows=data.min_category_rows or 1,
        keeps_useless=data.features is not None,
        formula=data.formula,
    )


def refuse_unsupported(run: RunFile) -> None:
    """Refuse what sums do not serve, before anything is sent."""
    if run.data.formula is not None:
        raise RequestError("a formula does not apply to recommendations across machines yet; name the columns instead.")
    if run.data.time_column is not None:
        raise RequestError(
            "time_column does not apply across machines: models of earlier rows would need sums over these, and their "
            "difference from the sums over all rows shows the later ones."
        )
    if run.advice is not None and run.advice.shape == BOOSTED:
        raise RequestError(
            "--shape boosted does not apply across machines: sums for trees would show single rows; use auto, which "
            "tries splines, or linear."
        )
    if run.task.model is not None or run.task.name == "module":
        raise RequestError("recommendations across machines are for linear, logistic and Poisson tasks, not networks.")


class AdviceClientNode(ClientNode):
    """A client of a federation that is advised."""

    own_answers: ClassVar[dict[str, Callable[..., Payload]]] = {}
    of_cohort: ClassVar[tuple[str, ...]] = ("statement", "cohort", "secrets", "running")
    what = "a recommendation"
    reveals = REVEALS
    running: RunningProgram | None = None

    @cached_property
    def statement(self) -> JsonObject:
        refuse_unsupported(self.run)
        if self.policy is not None:
            self.policy.check_plan(plan_digest(self.run))
        public = self.private.public_key().public_bytes_raw()
        with details_for_operator(self, "cannot read its table"):
            columns = [*self.member.features, schema_options(self.run).target]
        return make_statement(self.digest, plan_digest(self.run), self.name, columns, public)

    def answers(self, common: bytes) -> MaskedAnswers:
        return MaskedAnswers(self.cohort, self.name, self.secrets, common, Journal(self.sums / "steps"))

    def common_secret(self) -> bytes:
        """The first client's secret, which all clients share."""
        raw = self.private.private_bytes_raw()
        return derive(raw, b"common secret" + self.cohort.digest)

    def program(self, secret: bytes) -> Program[tuple[FederationResult, ClientResult]]:
        """All that this client computes and sends."""
        m, columns = len(self.cohort.statements), list(self.statement["columns"])[:-1]
        agreement: Agreement = yield from agree_by_sums(self.member, columns, schema_options(self.run), secret, m)
        for note in [*agreement.notes, *agreement.own_notes]:
            self.report(note)
        make_synced_folder(self.folder)
        write_json(
            self.folder / ADOPTED_SCHEMA_FILE,
            {"schema": agreement.schema.model_dump(mode="json"), "rows": client_table_digest(self)},
        )
        for stale in self.of_schema:
            self.__dict__.pop(stale, None)
        advice = self.run.advice or AdviceSection()
        shape = shape_of(self.task, self.clients.schema, advice.shape)
        result, own = yield from advise_program(shape, home_rows(self.task, self.clients), advice.margin, advice.level)
        assert own is not None
        return result, own

    def run_program(self, sealed: str = "") -> RunningProgram:
        """Return its program as far as it has come; after a restart it runs again with the stored totals."""
        if self.running is None:
            self.running = RunningProgram(self, sealed)
        return self.running


@contextmanager
def details_for_operator(node: AdviceClientNode, what: str) -> Iterator[None]:
    """Report an error about rows to the client's operator; the server learns only that there is one."""
    try:
        yield
    except (WorkError, OSError):  # a full disk: it can be tried again
        raise
    except Exception as error:  # of rows, or of totals that no honest clients give
        foreseen = isinstance(error, RequestError | WorkError)
        node.report(str(error) if foreseen else f"unexpected {type(error).__name__}: {error}")
        raise RequestError(f"client '{node.name}' {what}; its operator reads why.") from error


class RunningProgram:
    """A client's program as far as it has come."""

    def __init__(self, node: AdviceClientNode, sealed: str):
        self.node, self.number = node, 0
        secret = self._common_secret(sealed)
        self.steps = node.program(secret)
        self.answers = node.answers(secret)
        self.part: Sum | None = None
        self.result: tuple[FederationResult, ClientResult] | None = None

    def _common_secret(self, sealed: str) -> bytes:
        node = self.node
        first, path = node.cohort.names[0], node.sums / "secret.json"
        if path.exists():
            return bytes.fromhex(str(read_json(path)["secret"]))
        is_first = node.name == first
        secret = (
            node.common_secret() if is_first else unseal(sealed, node.name, first, node.secrets[first], node.cohort)
        )
        write_json(path, {"secret": secret.hex()})
        return secret

    def answer(self, number: int, total: np.ndarray | None) -> np.ndarray | None:
        """Return the masked part of a step; None where the program has ended."""
        known = self.answers.recall(number, total)
        if known is not None and "refused" in known:
            raise RequestError(str(known["refused"]))
        if known is not None and known["answer"]:
            return from_text(str(known["answer"]))
        self.replay(number)
        if self.result is not None and known is not None:
            return None
        if number != self.number or self.result is not None:
            raise RequestError(f"client '{self.node.name}' is at step {self.number}, not at step {number}.")
        return self._advance(total)

    def replay(self, number: int) -> None:
        """Advance to a step by what was stored before a restart; through the step where the program has ended."""
        while self.result is None and (known := self.answers.journal.read(self.number)) is not None:
            if self.number > number or "refused" in known:
                return
            self._advance(from_text(str(known["total"])) if self.number else None)

    def _advance(self, total: np.ndarray | None) -> np.ndarray | None:
        """Give the program the total of its last step, and return its part of the next one.

        That the program refuses a total is stored as an answer is, and its reason is for the client's operator:
        otherwise a server could try many totals, and learn about rows from what is refused."""
        values = None if total is None else self._values_of(total)
        journal = self.answers.journal
        try:
            with details_for_operator(self.node, f"does not continue after the total of step {self.number - 1}"):
                self.part = self._next_part(values)
        except RequestError as error:
            journal.write(self.number, {"total": to_text(total), "refused": str(error)})
            raise
        if self.part is None:
            journal.write(self.number, {"total": to_text(total), "answer": ""})
            return None
        out = self.answers.answer(self.number, self.part, total)
        self.number += 1
        return out

    def _next_part(self, values: np.ndarray | None) -> Sum | None:
        try:
            part = next(self.steps) if values is None else self.steps.send(values)
        except StopIteration as end:
            self.result = end.value
            return None
        to_integers(part)  # numbers that cannot be added are a reason to end, too
        return part

    def _values_of(self, total: np.ndarray) -> np.ndarray:
        assert self.part is not None
        step, clients = self.part.step, len(self.node.cohort.statements)
        if len(total) != np.atleast_2d(self.part.values).shape[1] + 1 + TAG_WORDS:
            raise RequestError(f"client '{self.node.name}': the total of step '{step.name}' has another size.")
        values = to_values(self.answers.check_total(total), step, clients)
        check_clients(step, values, clients)
        return values


def handle_roll_call(node: AdviceClientNode, payload: Payload) -> Payload:
    node.begin_again()
    check_same_rows(node)
    return sign_statement(node, node.statement)


def handle_cohort(node: AdviceClientNode, payload: Payload) -> Payload:
    cohort = check_statements(node, payload, node.statement)
    path = node.sums / COHORT_FILE
    if path.exists():
        if read_json(path)["statements"] != list(cohort.statements):
            raise RequestError(
                f"client '{node.name}' takes part in this run with other clients; a new run needs "
                "`mooring join --again`."
            )
    else:
        pair_secrets(node.private, cohort, node.name)  # refuses keys that are none
        record_cohort(node, cohort)
        write_json(path, {"statements": list(cohort.statements)})
        node.__dict__.pop("cohort", None)
    if node.name != cohort.names[0]:
        return Payload({"sealed": {}})
    return Payload({"sealed": seal(node.common_secret(), node.name, node.secrets, cohort)})


def handle_step(node: AdviceClientNode, payload: Payload) -> Payload:
    number, total = int(payload.fields["number"]), payload.tensors.get("total")
    if (number == 0) != (total is None):
        raise RequestError(f"client '{node.name}': step {number} must come with the total of the step before it.")
    if total is not None and (total.dim() != 1 or total.dtype != torch.int64):
        raise RequestError(f"client '{node.name}': a total is a vector of whole numbers.")
    numbers = None if total is None else total.numpy().view("<u8").copy()
    try:
        answer = node.run_program(payload.fields.get("secret", "")).answer(number, numbers)
    except (WorkError, OSError):
        node.running = None  # what was not stored is computed again
        raise
    if answer is None:
        write_result(node)
        return Payload({"ended": True})
    return Payload({"ended": False}, {"masked": torch.from_numpy(answer.astype("<i8", copy=True))})


def handle_declare(node: AdviceClientNode, payload: Payload) -> Payload:
    """Return its rows, three losses to two digits and its recommendation, where its policy lets results leave; this is
    the last request of a run."""
    path = node.sums / DECLARED_FILE
    if not path.exists():
        raise RequestError(f"client '{node.name}' has no result yet.")
    known = read_json(path)
    write_json(node.folder / DONE_FILE, known["done"])
    shares = node.policy is None or node.policy.allows("results")
    return Payload({"declared": known["declared"] if shares else None})


def write_result(node: AdviceClientNode) -> None:
    """Write the client's recommendation and its models as a run directory, and what its operator reads."""
    assert node.running is not None and node.running.result is not None
    result, own = node.running.result
    task, clients = apply_columns(node.task, node.clients, result)
    record = federation_record(task, clients, result, node.run.advice or AdviceSection())
    row = client_row(task, clients, result, own)
    sentence = f"Use {MODEL_SENTENCES[str(row['recommended'])]}."
    record |= {"clients": [row], "words": record["words"] | {"recommendation": sentence}}
    run = node.run.model_copy(
        update={"data": node.run.data.model_copy(update={"source": str(node.path)}), "federation": None}
    )
    files = {
        RUN_FILE: run_bytes(run),
        SCHEMA_FILE: json_bytes(clients.schema.model_dump(mode="json")),  # type: ignore[union-attr]
        CLIENTS_FILE: parquet_bytes(clients_table([{name: row[name] for name in CLIENTS_SCHEMA.names if name in row}])),
        ADVICE_FILE: json_bytes(record),
    }
    path = node.folder / RESULT_DIR
    shutil.rmtree(path, ignore_errors=True)
    about, layout = describe_task(Job(run, clients, task))
    w = torch.from_numpy(result.federation.w).to(task.dtype)
    v = torch.from_numpy(pick_model(own)).to(task.dtype)[None]
    create_run(path, files).write_models(StoredModels(w, v, (node.name,), about, layout))
    losses = {name: float(f"{row[name]:.2g}") for name in MODEL_KINDS}
    declared = {"rows": int(row["rows"]), "recommended": str(row["recommended"]), **losses}
    done = row | {"metric": task.metric, "said": sentence}
    write_json(node.sums / DECLARED_FILE, {"declared": declared, "done": done})


MODEL_SENTENCES = {"local": "the local model", "global": "the global model", "personal": "a personal model"}

AdviceClientNode.own_answers = {
    "roll_call": handle_roll_call,
    "cohort": handle_cohort,
    "step": handle_step,
    "declare": handle_declare,
}
