"""The server of a federation that asks for recommendations: it adds masked parts, and learns totals.

It runs the clients' program without rows (`program.py`), to know which sum is next and to learn what everybody learns.
It stores nothing before the end: after a restart it asks for all steps again, and clients send what they have stored.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from mooring.advice.evaluation.loss_sums import ALTERNATIVES
from mooring.advice.federated.client import check_clients, refuse_unsupported, schema_options
from mooring.advice.federated.plan import plan_digest
from mooring.advice.federated.program import FederationResult, advise_program, apply_columns, shape_of
from mooring.advice.federated.results import federation_record
from mooring.core.cohort import Rows
from mooring.core.errors import RequestError, WorkError
from mooring.core.summing import Program, Sum, to_values
from mooring.core.task import Task
from mooring.core.types import JsonObject
from mooring.data.clients import BINARY, CLASSES, Clients
from mooring.data.schema import Schema
from mooring.data.schema_sums import agree_by_sums
from mooring.data.tables import quote_list
from mooring.engines.fit_files import initial_files
from mooring.engines.model_store import describe_task
from mooring.engines.prepare import Job, make_task
from mooring.engines.progress import OnProgress, ignore_progress
from mooring.remote.client_node import run_digest
from mooring.remote.messages import ClientFailedError, Payload
from mooring.remote.messenger import Messenger, ignore_event, ignore_message
from mooring.remote.transcript import (
    MIN_CLIENTS,
    PROTOCOL,
    TAG_WORDS,
    WEIGHT_KEYS,
    describe_other_columns,
    remove_tag,
)
from mooring.remote.transport import Transport
from mooring.runs.atomic_files import directory_lock, write_json, write_parquet
from mooring.runs.directory import ADVICE_FILE, CLIENTS_FILE, StoredModels, create_run
from mooring.runs.runfile import RunFile
from mooring.runs.sections import AdviceSection, FederationSection
from mooring.runs.table_schemas import clients_table

PARTICIPATION_FILE = "federation.json"
DECLARE_SECONDS = 60.0  # for clients that went away after their last sum


Observed = tuple[Task, Clients, FederationResult, list[str]]  # what the clients' program gives without rows


class FederatedAdvice:
    """What the server of a federation learns."""

    def __init__(self, job: Job, result: FederationResult, record: JsonObject, run: Path):
        self.job, self.result, self.record, self.run = job, result, record, run
        self.headline, self.summary = str(record["headline"]), record["summary"]
        self.clients = pd.DataFrame(record["clients"])  # those that have declared their results


def without_rows(run: RunFile, schema: Schema, names: tuple[str, ...]) -> Clients:
    """Return the clients as the server knows them: no rows, no sizes."""
    label = torch.int64 if schema.kind in (BINARY, CLASSES) else torch.float64
    size = torch.zeros(len(names), dtype=torch.long)
    x, y = torch.zeros(0, len(schema.features), dtype=torch.float64), torch.zeros(0, dtype=label)
    empty = Rows(x, y, torch.zeros_like(size), size)
    return Clients(
        names,
        empty,
        empty,
        empty,
        kind=schema.kind,
        classes=schema.classes,
        features=schema.features,
        target_mean=schema.target_mean,
        target_scale=schema.target_scale,
        schema=schema,
        title=Path(run.data.source).stem,
    )


def observe(run: RunFile, names: tuple[str, ...], columns: list[str]) -> Program[Observed]:
    """The clients' program without rows."""
    agreement = yield from agree_by_sums(None, columns, schema_options(run), b"", len(names))
    clients = without_rows(run, agreement.schema, names)
    task = make_task(run, clients)
    advice = run.advice or AdviceSection()
    shape = shape_of(task, clients.schema, advice.shape)
    result, _ = yield from advise_program(shape, None, advice.margin, advice.level)
    task, clients = apply_columns(task, clients, result)
    return task, clients, result, agreement.notes


def advise_federation(
    run: RunFile,
    transport: Transport,
    out: str | Path,
    *,
    report: Callable[[str], None] = ignore_message,
    record: Callable[..., None] = ignore_event,
    on_progress: OnProgress = ignore_progress,
) -> FederatedAdvice:
    """Recommend a model to every client of a federation; the result is written to the run directory `out`, and every
    client writes its own.

    Every sum is of all clients: if one fails or does not answer in time, the run ends and names it.
    """
    options = run.federation or FederationSection()
    if options.clients is None:
        raise RequestError("how many clients take part? Set [federation] clients = 8, or list their names.")
    refuse_unsupported(run)
    messenger = Messenger(
        transport,
        run_digest(run),
        wait=options.wait,
        deadline=options.deadline,
        report=report,
        record=record,
    )
    names = messenger.wait_for_clients(options.clients)
    if len(names) < MIN_CLIENTS:
        raise RequestError(f"{len(names)} clients are too few for sums; at least {MIN_CLIENTS} must take part.")
    statements, sealed = agree_on_cohort(messenger, names, plan_digest(run))
    task, clients, result, notes = lead(
        messenger, names, observe(run, names, statements[0]["columns"][:-1]), sealed, on_progress
    )
    declared = collect_declared(messenger, names)
    return write_advice(run, task, clients, result, notes, declared, out)


def ask_all(messenger: Messenger, what: str, messages: dict[str, Payload]) -> dict[str, Payload]:
    """Return the replies of all clients. If several refuse for one reason, another client has caused it, and the run
    ends with the reason, not with their names."""
    try:
        return messenger.ask_all(what, messages)
    except ClientFailedError as error:
        reasons = Counter(
            why.removeprefix(f"client '{name}': ").replace(f"client '{name}'", "a client")
            for name, why in error.clients.items()
        )
        reason, count = reasons.most_common(1)[0]
        if count == 1:
            raise
        raise WorkError(f"{count} of {len(messages)} clients refuse: {reason}") from error


def check_statements(statements: list[JsonObject], run: str, plan: str) -> None:
    """Refuse the first statement that differs from what most clients state, by its name."""
    usual, _ = Counter(json.dumps(statement["columns"]) for statement in statements).most_common(1)[0]
    example = next(statement for statement in statements if json.dumps(statement["columns"]) == usual)
    for statement in statements:
        name = str(statement["name"])
        if not WEIGHT_KEYS.isdisjoint(statement):
            raise ClientFailedError(name, f"client '{name}' has signed a statement for a fit.")
        for what, value in (("protocol", PROTOCOL), ("run", run), ("plan", plan)):
            if statement[what] != value:
                raise ClientFailedError(name, f"client '{name}' takes part with another {what} than the server.")
        if statement["columns"] != example["columns"]:
            raise ClientFailedError(name, describe_other_columns(statement, example))
    keys = Counter(statement["public"] for statement in statements)
    twice = [str(statement["name"]) for statement in statements if keys[statement["public"]] > 1]
    if twice:
        raise ClientFailedError(twice[0], f"clients {quote_list(twice)} have the same key.")


def agree_on_cohort(messenger: Messenger, names: tuple[str, ...], plan: str) -> tuple[list[JsonObject], dict[str, str]]:
    """Return all clients' statements, and the common secret as the first client has encrypted it for the others."""
    replies = messenger.ask_all("roll_call", {name: Payload({}) for name in names})
    statements = [replies[name].fields["statement"] for name in names]
    check_statements(statements, messenger.run, plan)
    signatures = {name: replies[name].fields["signature"] for name in names}
    message = Payload({"statements": {"list": statements}, "signatures": signatures})
    agreed = ask_all(messenger, "cohort", dict.fromkeys(names, message))
    return statements, {str(name): str(text) for name, text in agreed[names[0]].fields["sealed"].items()}


def lead(
    messenger: Messenger,
    names: tuple[str, ...],
    program: Program[Observed],
    sealed: dict[str, str],
    on_progress: OnProgress,
) -> Observed:
    """Ask for step after step until the program has ended."""
    part: Sum | None = next(program)
    number, total, result = 0, np.zeros(0, np.uint64), None
    while True:
        tensors = {"total": torch.from_numpy(total.astype("<i8"))} if number else {}
        fields = {
            name: {"number": number} | ({"secret": sealed.get(name, "")} if number == 0 else {}) for name in names
        }
        replies = ask_all(messenger, "step", {name: Payload(fields[name], tensors) for name in names})
        ended = [bool(replies[name].fields["ended"]) for name in names]
        if part is None:
            for name, is_done in zip(names, ended):
                if not is_done:
                    raise ClientFailedError(name, f"client '{name}' has further steps than the server.")
            assert result is not None
            return result
        size = np.atleast_2d(part.values).shape[1] + 1 + TAG_WORDS
        for name in names:
            if ended[names.index(name)] or len(replies[name].tensors["masked"]) != size:
                raise ClientFailedError(name, f"client '{name}' sent another step than '{part.step.name}'.")
        parts = [replies[name].tensors["masked"].numpy().astype("<i8").view(np.uint64) for name in names]
        total = np.add.reduce(parts)
        on_progress(part.step.name, number + 1, number + 2)
        number += 1
        try:
            values = to_values(remove_tag(total), part.step, len(names))
            check_clients(part.step, values, len(names))
            part = program.send(values)
        except StopIteration as end:
            result, part = end.value, None
        except RequestError:
            raise
        except Exception as error:  # totals that no honest clients give
            raise WorkError(f"the totals cannot be used: {type(error).__name__} {error}.") from error


def collect_declared(messenger: Messenger, names: tuple[str, ...]) -> list[JsonObject]:
    """Return the results of the clients whose policy shares them."""
    answered = messenger.ask("declare", {name: Payload({}) for name in names}, deadline=DECLARE_SECONDS, quorum=0)
    own = {name: reply.fields["declared"] for name, reply in sorted(answered.replies.items())}
    rows = {name: row for name, row in own.items() if row is not None}
    return [declared_row(name, row) for name, row in rows.items()]


def declared_row(name: str, row: JsonObject) -> JsonObject:
    """Return a client's row of what it has declared, with the changes that follow from its losses."""
    out: JsonObject = {"client": name, "train": row["rows"], "validation": 0, "test": 0, **row}
    for other in ALTERNATIVES:
        change = float(row[other]) - float(row[row["recommended"]])
        share = 100 * change / float(row[other]) if row[other] else 0.0
        out |= {f"improvement_over_{other}": change, f"improvement_over_{other}_pct": share}
    return out


def write_advice(
    run: RunFile,
    task: Task,
    clients: Clients,
    result: FederationResult,
    notes: list[str],
    declared: list[JsonObject],
    out: str | Path,
) -> FederatedAdvice:
    """Write the run directory: the global model, what everybody learns, and what clients have declared."""
    options = (run.federation or FederationSection()).model_copy(update={"clients": list(clients.names)})
    job = Job(run.model_copy(update={"federation": options}), replace(clients, notes=notes), task)
    record = federation_record(task, clients, result, run.advice or AdviceSection())
    record |= {"notes": notes, "clients": declared}
    directory = create_run(out, initial_files(job))
    with directory_lock(directory.path):
        write_json(directory.path / ADVICE_FILE, record)
        write_parquet(directory.path / CLIENTS_FILE, clients_table(declared))
        write_json(directory.path / PARTICIPATION_FILE, {"clients": list(clients.names), "dismissed": {}})
        w = torch.from_numpy(result.federation.w).to(task.dtype)
        directory.write_models(StoredModels(w, None, clients.names, *describe_task(job)))
    return FederatedAdvice(job, result, record, directory.path)
