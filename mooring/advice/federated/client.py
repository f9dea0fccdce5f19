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
from collections.abc import Callable
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch

from mooring.advice.evaluation.loss_sums import MODEL_KINDS
from mooring.advice.federated.plan import plan_digest
from mooring.advice.federated.program import ClientResult, FederationResult, advise_program, home_rows
from mooring.advice.federated.results import client_row, federation_record, pick_model
from mooring.core.errors import RequestError
from mooring.core.summing import Program, Sum, to_values
from mooring.core.types import JsonObject
from mooring.data.schema_sums import Agreement, SchemaOptions, agree_by_sums
from mooring.engines.fit_files import describe_task
from mooring.engines.prepare import Job
from mooring.remote.client_node import ClientNode
from mooring.remote.client_requests import ADOPTED_SCHEMA_FILE, DONE_FILE, RESULT_DIR, client_table_digest
from mooring.remote.fixed_sums import COHORT_FILE, check_other_cohorts, check_statements
from mooring.remote.messages import Payload
from mooring.remote.secure_sums import sign
from mooring.remote.transcript import Journal, MaskedAnswers, derive, make_statement, seal, unseal
from mooring.runs.atomic_files import json_bytes, make_synced_folder, parquet_bytes, read_json, write_json
from mooring.runs.directory import ADVICE_FILE, CLIENTS_FILE, RUN_FILE, SCHEMA_FILE, StoredModels, create_run
from mooring.runs.runfile import RunFile, run_bytes
from mooring.runs.sections import AdviceSection
from mooring.runs.table_schemas import CLIENTS_SCHEMA, clients_table

REVEALS = (
    "its parts of sums over all clients, under masks: the server learns totals, no client's numbers. `mooring advise "
    "RUN.toml --plan` lists them. Where its policy shares results: its rows, three losses and its recommendation"
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
    if run.task.model is not None or run.task.name == "module":
        raise RequestError("recommendations across machines are for linear, logistic and Poisson tasks, not networks.")


class AdviceClientNode(ClientNode):
    """A client of a federation that is advised."""

    own_answers: ClassVar[dict[str, Callable[..., Payload]]] = {}
    what = "a recommendation"
    reveals = REVEALS

    of_cohort = ("statement", "cohort", "secrets", "answers", "running")

    @cached_property
    def statement(self) -> JsonObject:
        refuse_unsupported(self.run)
        if self.policy is not None:
            self.policy.check_plan(plan_digest(self.run))
        public = self.private.public_key().public_bytes_raw()
        columns = [*self.member.features, schema_options(self.run).target]
        return make_statement(self.digest, plan_digest(self.run), self.name, columns, public)

    @cached_property
    def answers(self) -> MaskedAnswers:
        return MaskedAnswers(self.cohort, self.name, self.secrets, Journal(self.sums / "steps"))

    def common_secret(self) -> bytes:
        """The first client's secret, which all clients share."""
        raw = self.private.private_bytes_raw()
        return derive(raw, b"common secret" + self.cohort.digest)

    def program(self, secret: bytes) -> Program[tuple[FederationResult, ClientResult]]:
        """All that this client computes and sends."""
        m, columns = len(self.cohort.statements), list(self.statement["columns"])[:-1]
        agreement: Agreement = yield from agree_by_sums(
            self.member, columns, schema_options(self.run), secret, m, self._read_planned
        )
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
        result, own = yield from advise_program(
            self.task, home_rows(self.task, self.clients), advice.margin, advice.level
        )
        assert own is not None
        return result, own

    def _read_planned(self, plan: object) -> object:
        return self.member

    @cached_property
    def running(self) -> RunningProgram:
        return RunningProgram(self)


class RunningProgram:
    """A client's program as far as it has come."""

    def __init__(self, node: AdviceClientNode):
        self.node, self.number = node, 0
        self.steps: Program[tuple[FederationResult, ClientResult]] | None = None
        self.part: Sum | None = None
        self.result: tuple[FederationResult, ClientResult] | None = None
        self.secret: bytes | None = None

    def answer(self, number: int, total: np.ndarray | None, sealed: str | None) -> np.ndarray | None:
        """Return the masked part of a step; None where the program has ended."""
        node, journal = self.node, self.node.answers.journal
        known = journal.read(number)
        if known is not None:
            if known["total"] != ("" if total is None else total.tobytes().hex()):
                raise RequestError(
                    f"client '{node.name}' has answered step {number} after another total; it answers each step once."
                )
            return _numbers(str(known["answer"]))
        if self.result is not None:
            return None
        if self.steps is None:
            self._begin(sealed)
        while self.number < number and (stored := journal.read(self.number)) is not None:  # after a restart
            self._advance(_numbers(str(stored["total"])) if self.number else None)
        if number != self.number:
            raise RequestError(f"client '{node.name}' is at step {self.number}, not at step {number}.")
        return self._advance(total)

    def _begin(self, sealed: str | None) -> None:
        node = self.node
        first = node.cohort.names[0]
        path = node.sums / "secret.json"
        if path.exists():
            secret = bytes.fromhex(str(read_json(path)["secret"]))
        elif node.name == first:
            secret = node.common_secret()
        else:
            secret = unseal(str(sealed), node.secrets[first], node.cohort)
        write_json(path, {"secret": secret.hex()})
        self.steps = node.program(secret)

    def _advance(self, total: np.ndarray | None) -> np.ndarray | None:
        """Give the program the total of its last step, and return its part of the next one."""
        node, steps, m = self.node, self.steps, len(self.node.cohort.statements)
        assert steps is not None
        try:
            if total is None:
                self.part = next(steps)
            else:
                assert self.part is not None
                self.part = steps.send(to_values(total, self.part.step, m))
        except StopIteration as end:
            self.result = end.value
            return None
        except RequestError:
            raise
        except Exception as error:  # totals that no honest clients give
            raise RequestError(
                f"client '{node.name}' cannot use the totals: {type(error).__name__} {error}. A client may have sent "
                "false numbers."
            ) from error
        out = node.answers.answer(self.number, self.part, total)
        self.number += 1
        return out


def _numbers(text: str) -> np.ndarray:
    return np.frombuffer(bytes.fromhex(text), dtype="<u8")


def handle_roll_call(node: AdviceClientNode, payload: Payload) -> Payload:
    node.begin_again()
    signature = "" if node.identity is None else sign(node.identity.private, node.statement)
    return Payload({"statement": node.statement, "signature": signature})


def handle_cohort(node: AdviceClientNode, payload: Payload) -> Payload:
    cohort = check_statements(node, payload, node.statement)
    path = node.sums / COHORT_FILE
    if path.exists() and read_json(path)["statements"] != list(cohort.statements):
        raise RequestError(
            f"client '{node.name}' takes part in this run with other clients; a new run needs `mooring join --again`."
        )
    check_other_cohorts(node, cohort, record=True)
    write_json(path, {"statements": list(cohort.statements)})
    node.__dict__.pop("cohort", None)
    if node.name != cohort.names[0]:
        return Payload({"sealed": {}})
    return Payload({"sealed": seal(node.common_secret(), node.secrets, cohort)})


def handle_step(node: AdviceClientNode, payload: Payload) -> Payload:
    number, total = int(payload.fields["number"]), payload.tensors.get("total")
    numbers = None if total is None else total.numpy().view("<u8").copy()
    if (number == 0) != (numbers is None):
        raise RequestError(f"client '{node.name}': step {number} must come with the total of the step before it.")
    answer = node.running.answer(number, numbers, payload.fields.get("secret"))
    if answer is None:
        write_result(node)
        return Payload({"ended": True})
    return Payload({"ended": False}, {"masked": torch.from_numpy(answer.astype("<i8", copy=True))})


def handle_declare(node: AdviceClientNode, payload: Payload) -> Payload:
    """Return its rows, three losses to two digits and its recommendation."""
    if node.running.result is None:
        raise RequestError(f"client '{node.name}' has no result yet.")
    row = client_row(node.task, node.clients, *node.running.result)
    losses = {name: float(f"{row[name]:.2g}") for name in MODEL_KINDS}
    return Payload({"declared": {"rows": int(row["rows"]), "recommended": str(row["recommended"]), **losses}})


def write_result(node: AdviceClientNode) -> None:
    """Write the client's recommendation and its models as a run directory, and what its operator reads."""
    assert node.running.result is not None
    result, own = node.running.result
    clients, task = node.clients, node.task
    record = federation_record(task, clients, result, node.run.advice or AdviceSection())
    row = client_row(task, clients, result, own)
    sentence = f"Use {MODEL_SENTENCES[str(row['recommended'])]}."
    record |= {"clients": [row], "words": record["words"] | {"recommendation": sentence}}
    run = node.run.model_copy(
        update={"data": node.run.data.model_copy(update={"source": str(node.path)}), "federation": None}
    )
    files = {
        RUN_FILE: run_bytes(run),
        SCHEMA_FILE: json_bytes(node.schema.model_dump(mode="json")),
        CLIENTS_FILE: parquet_bytes(clients_table([{name: row[name] for name in CLIENTS_SCHEMA.names if name in row}])),
        ADVICE_FILE: json_bytes(record),
    }
    path = node.folder / RESULT_DIR
    shutil.rmtree(path, ignore_errors=True)
    about, layout = describe_task(Job(run, clients, task))
    w = torch.from_numpy(result.federation.center.w).to(task.dtype)
    v = torch.from_numpy(pick_model(own)).to(task.dtype)[None]
    create_run(path, files).write_models(StoredModels(w, v, (node.name,), about, layout))
    write_json(node.folder / DONE_FILE, row | {"metric": task.metric, "said": sentence})


MODEL_SENTENCES = {"local": "the local model", "global": "the global model", "personal": "a personal model"}

AdviceClientNode.own_answers = {
    "roll_call": handle_roll_call,
    "cohort": handle_cohort,
    "step": handle_step,
    "declare": handle_declare,
}
