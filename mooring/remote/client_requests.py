"""How a client answers the requests of `requests.py`. Its rows stay in this process, its personal state in its folder.

    hello                      its name, version and the digest of its run file
    survey, tally, names, spread   counts and sums for the schema (`data/schema_client.py`)
    adopt                      stores the agreed schema; replies with its numbers of rows
    client_statistics, statistics  what hyperparameters such as "auto" are resolved from (`estimates/`)
    begin                      stores the resolved algorithm and the first model
    local_update               a message, and a new generation of its state
    evaluate, models, numbers  mean losses of its model; its model and numbers of its state, where it shares them
    done                       writes its model as a run directory that `mooring predict` reads
    dismissed                  stores why the server continues without it

Every request can be answered again: a local update starts from the generation that the request names, and drops no
generation that the server may still name.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from scipy.stats import t
from torch import Tensor

from mooring.algorithms.base import AnyAlgorithm, build
from mooring.core.cohort import Round, Rows, StateTree
from mooring.core.costs import CostMeter
from mooring.core.errors import RequestError, WorkError
from mooring.core.task import HasSolve, Task
from mooring.core.types import JsonObject
from mooring.data.clients import PARTS
from mooring.data.column_statistics import ColumnStatistics
from mooring.data.column_types import CATEGORY
from mooring.data.data_warnings import find_suspicious_values
from mooring.data.formulas import categories_in, parse_formula
from mooring.data.loading import table_digest
from mooring.data.rare_categories import hide_rare_levels, reveal_levels
from mooring.data.schema import Schema
from mooring.data.schema_client import (
    ClientTable,
    count_values,
    name_own_cells,
    parse_table,
    sum_squares,
    survey_table,
)
from mooring.data.schema_server import SchemaPlan
from mooring.data.splits import TRAIN
from mooring.engines import local_update
from mooring.engines.exchange import check_model_sharing
from mooring.engines.fit_files import with_resolved
from mooring.engines.model_store import describe_task
from mooring.engines.personal_parts import keep_personal_parts
from mooring.engines.prepare import Job
from mooring.estimates.client_queries import STATISTICS
from mooring.estimates.client_statistics import ALL_RESOLVED, compute_statistics
from mooring.remote import secure_client
from mooring.remote.compression import compress_with_feedback
from mooring.remote.messages import PROTOCOL_VERSION, Payload, printable
from mooring.remote.remote_rows import answer_calls
from mooring.remote.secure_rule import HIDDEN_IN_SECURE_RUNS
from mooring.runs.atomic_files import json_bytes, make_synced_folder, parquet_bytes, read_json, write_json
from mooring.runs.directory import CLIENTS_FILE, RUN_FILE, SCHEMA_FILE, SUMMARY_FILE, StoredModels, create_run
from mooring.runs.runfile import run_bytes
from mooring.runs.sections import installed_version
from mooring.runs.table_schemas import clients_table
from mooring.runs.tensor_files import flatten

if TYPE_CHECKING:
    from mooring.remote.client_node import ClientNode


LOCAL = "local"
BASELINES = (LOCAL,)  # what a server may ask for beside the run file's own algorithm
ADOPTED_SCHEMA_FILE, RESULT_DIR, DONE_FILE, DISMISSED_FILE = "adopted.json", "result", "done.json", "dismissed.json"
CONFIDENCE_LEVEL = 0.95
MIN_ROWS = 2  # rows that have a spread
MAX_CODES = 10  # different numbers of a column that may be a category


class StateHistory(NamedTuple):
    """An algorithm's run at this client: its start, and the generations of its state by round."""

    start: str  # the server's name for this start
    hyperparameters: JsonObject  # of the resolved algorithm, as they were sent
    algorithm: AnyAlgorithm
    server: StateTree  # a template
    first: StateTree  # generation 0
    w0: Tensor
    states: dict[int, StateTree]
    residuals: Mapping[int, dict[str, Tensor]] = MappingProxyType({})  # of compressed messages, by round

    def at(self, base: int, client: str) -> StateTree:
        if base == 0:
            return self.first
        if base not in self.states:
            held = ", ".join(map(str, sorted(self.states))) or "none"
            raise RequestError(
                f"{client} has no state of round {base} any more (it has: {held}); it cannot return to it."
            )
        return self.states[base]


def select_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose names begin with the prefix, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def handle_hello(node: ClientNode, payload: Payload) -> Payload:
    """Return its name, run file and version; report a server of another version to this client's operator."""
    theirs = payload.fields.get("protocol")
    if theirs is not None and theirs != PROTOCOL_VERSION:
        node.report(
            f"the server has Mooring {payload.fields.get('version')} (protocol {theirs}), this client "
            f"{installed_version()} "
            f"(protocol {PROTOCOL_VERSION}); install the same version at both."
        )
    return Payload(
        {"name": node.name, "run": node.digest, "version": installed_version(), "protocol": PROTOCOL_VERSION}
    )


def handle_survey(node: ClientNode, payload: Payload) -> Payload:
    member = node.member_for(payload)
    reply = summary_payload(survey_table(member))
    if member.formula is not None:
        reply.fields["varying"] = list(member.formula.varying)
    return reply


def handle_tally(node: ClientNode, payload: Payload) -> Payload:
    return summary_payload(
        hide_rare_levels(compute_tally(node, payload), node.run.data.min_category_rows or 1, node.digest)
    )


def handle_names(node: ClientNode, payload: Payload) -> Payload:
    """Return names of levels that are rare here and common over all clients."""
    return Payload({"names": reveal_levels(compute_tally(node, payload), payload.fields["wanted"], node.digest)})


def check_plan(node: ClientNode, member: ClientTable, plan: SchemaPlan) -> None:
    """Refuse a plan with columns that this client does not learn from, such as those that its run file drops, and one
    that takes a column of many numbers or dates as a category: its values would be sent as names. In a secure run few
    are too many; a formula may ask for it."""
    own, most = survey_table(member).facts, 0 if node.federation.secure else MAX_CODES
    formula = node.run.data.formula
    asked = {*(node.run.data.categorical or ()), *(() if formula is None else categories_in(parse_formula(formula)))}
    for column in plan.columns:
        name = column.source or column.name
        if name not in member.features:
            raise RequestError(
                f"client '{node.name}' refuses a schema with the column '{name}', which it does not learn from."
            )
        about = own[name]
        numeric = float(about["numbers"][0]) + float(about["dates"][0])
        is_numeric = 0 < float(about["present"][0]) == numeric and float(about["distinct"][0]) > most
        if column.kind == CATEGORY and not column.part and is_numeric and name not in asked:
            raise RequestError(
                f"client '{node.name}' refuses a schema that takes its column of numbers '{name}' as a category: its "
                "values would be sent."
            )


def compute_tally(node: ClientNode, payload: Payload) -> ColumnStatistics:
    plan, member = SchemaPlan.model_validate(payload.fields["plan"]), node.member_for(payload)
    check_plan(node, member, plan)
    reading = parse_table(member, plan)
    if node.run.data.formula is not None and member.formula is None:  # categories of a formula are those of all rows
        reading = replace(reading, part=np.full_like(reading.part, TRAIN))
    return count_values(member, plan, reading)


def handle_spread(node: ClientNode, payload: Payload) -> Payload:
    """Return sums of squares; report suspicious values to this client's operator only."""
    plan, draft = SchemaPlan.model_validate(payload.fields["plan"]), Schema.model_validate(payload.fields["draft"])
    member = node.member_for(payload)
    reading = parse_table(member, plan)
    odd = find_suspicious_values(reading.columns, reading.target, member.roles.target)
    notes = [name_own_cells(member.table.frame, str(note)) for note in payload.fields.get("notes", ())]
    for sentence in [*notes, *(suspicion.sentence for suspicion in odd)]:
        node.report(sentence)
    return summary_payload(sum_squares(member, draft, reading))


def summary_payload(summary: ColumnStatistics) -> Payload:
    return Payload({"summary": summary.to_json()})


def handle_adopt(node: ClientNode, payload: Payload) -> Payload:
    """Store the schema; refuse rows that have changed since the run began."""
    formula = payload.fields["schema"].get("formula")
    if (None if formula is None else formula["text"]) != node.run.data.formula:
        raise RequestError(f"client '{node.name}' has another formula than the server's schema.")
    make_synced_folder(node.folder)
    path = node.folder / ADOPTED_SCHEMA_FILE
    digest = client_table_digest(node)
    if path.exists() and not payload.fields["fresh"] and read_json(path)["rows"] != digest:
        raise RequestError(f"{node.path.name} has changed since the run began; start a new run, or bring it back.")
    write_json(path, {"schema": payload.fields["schema"], "rows": digest})
    for stale in node.of_schema:
        node.__dict__.pop(stale, None)
    sizes = {part: int(getattr(node.clients, part).size[0]) for part in PARTS}
    own = node.clients.weights_from_column
    about = {"sizes": sizes, "weight": None if own is None else own[node.name]}
    return Payload(about | {"by_chance": node.clients.has_random_parts})


def client_table_digest(node: ClientNode) -> str:
    source = node._source[1]
    return table_digest(source[node.name] if isinstance(source, dict) else source)


def handle_client_statistics(node: ClientNode, payload: Payload) -> Payload:
    fields, asks = payload.fields, tuple(str(name) for name in payload.fields["asks"])
    if node.federation.secure and (
        set(asks) - {ALL_RESOLVED} or (not isinstance(node.task, HasSolve) and ALL_RESOLVED not in asks)
    ):
        raise RequestError(f"client '{node.name}' sends no {asks}: its run file sets secure = true; give numbers.")
    facts = compute_statistics(node.task, node.data(fields), payload.tensors["w0"], asks)
    if node.federation.secure:  # all that is shown of its rows is how steep its loss is, to a power of two
        hidden: JsonObject = dict.fromkeys(HIDDEN_IN_SECURE_RUNS, torch.full_like(facts.smooth, torch.nan))
        smooth = [secure_client.round_up_to_power_of_two(float(value)) for value in facts.smooth]
        facts = facts._replace(smooth=torch.tensor(smooth, dtype=facts.smooth.dtype), **hidden)
    return Payload({}, flatten("facts", facts))


def handle_statistics(node: ClientNode, payload: Payload) -> Payload:
    """Return the statistics of training rows that random effects and rules for lambda are estimated from."""
    return answer_calls(node.name, node.task, payload, lambda part: node.clients.train, STATISTICS)


def handle_begin(node: ClientNode, payload: Payload) -> Payload:
    """Create the first state; a repeated or resumed start keeps the present one."""
    fields = payload.fields
    label, hyperparameters = fields["label"], fields["hyperparameters"]
    path, algorithm = node._file(label), keep_personal_parts(build(label, hyperparameters), node.task)
    check_model_sharing(algorithm, node.federation.share_models)
    if node.federation.secure:
        secure_client.check_begin(node, label, hyperparameters, str(fields["start"]), bool(fields["fresh"]))
    node.starts.pop(label, None)
    server, _ = algorithm.init(node.task, payload.tensors["w0"])
    first = local_update.initial_states(algorithm, node.task, payload.tensors["w0"], 1)
    if path.exists():
        known = node.history(fields)
        if known.start == fields["start"] or not fields["fresh"]:
            if known.algorithm != algorithm:
                raise RequestError(f"client '{node.name}' has a state of {label} with other settings; start a new run.")
            return Payload({})
        if known.states:
            os.replace(path, path.with_suffix(".before"))  # another run of the same file: its states are not ours
    node.keep(
        label, StateHistory(fields["start"], hyperparameters, algorithm, server, first, payload.tensors["w0"], {})
    )
    return Payload({})


def handle_update(node: ClientNode, payload: Payload) -> Payload:
    reply = run_local_update(node, payload)
    if node.federation.secure and any(tensor.numel() for tensor in reply.tensors.values()):
        raise RequestError(
            f"client '{node.name}' sends no message that is not masked: its run file sets secure = true."
        )
    return reply


def run_local_update(node: ClientNode, payload: Payload) -> Payload:
    """Run a local update and store the new state; return the message and the work that it took."""
    fields = payload.fields
    history, turn = node.history(fields), Round(*fields["round"])
    state = history.at(fields["base"], f"client '{node.name}'")
    server = node.server_state(history, payload)
    meter = CostMeter()
    new, message = local_update.client_update(
        history.algorithm, node.task, server, state, node.data(fields), turn, meter
    )
    if not bool(local_update.finite_states(new).all()):
        raise WorkError(local_update.NOT_FINITE)
    held = {t: known for t, known in history.states.items() if t in fields["hold"]}
    tensors, residuals = flatten("message", message), dict(history.residuals)
    if node.federation.compress is not None and not node.federation.secure:
        last = residuals.get(fields["base"], {})
        tensors, residuals[turn.t] = compress_with_feedback(tensors, last, node.federation.compress)
    remaining = {t: residual for t, residual in residuals.items() if t in held or t == turn.t}
    node.keep(fields["label"], history._replace(states=held | {turn.t: new}, residuals=remaining))
    work = {"samples": meter.samples, "gradients": meter.gradients, "solves": list(meter.solves)}
    return Payload({"meter": work}, tensors)


def handle_evaluate(node: ClientNode, payload: Payload) -> Payload:
    return Payload({"parts": payload.fields["parts"]}, {"risk": mean_losses(node, payload)})


def mean_losses(node: ClientNode, payload: Payload) -> Tensor:
    """Return [parts]: the mean loss of this client's model over each named part of its rows."""
    history, w, _ = node.personal_model(payload)
    task = history.algorithm.deployed_task(node.task)
    parts = [str(part) for part in payload.fields["parts"]]
    if not set(parts) <= set(PARTS):
        raise RequestError(f"client '{node.name}' has rows to {', '.join(PARTS)}, not {', '.join(parts)}.")
    return torch.cat([local_update.mean_risk(task, w, getattr(node.clients, part)) for part in parts])


def handle_model(node: ClientNode, payload: Payload) -> Payload:
    return Payload({}, {"model": node.personal_model(payload)[1]} if node.federation.share_models else {})


def handle_number(node: ClientNode, payload: Payload) -> Payload:
    fields = payload.fields
    if not node.federation.share_models:
        raise RequestError(f"client '{node.name}' keeps the numbers of its state to itself.")
    state = node.history(fields).at(fields["base"], f"client '{node.name}'")
    number = getattr(state, fields["field"], None)
    if number is None or number.numel() != 1 or fields["base"] == 0:
        return Payload({"number": None, "known": number is not None and number.numel() == 1})
    return Payload({"number": float(number), "known": True})


def handle_dismissed(node: ClientNode, payload: Payload) -> Payload:
    """Store why the server continues without this client."""
    make_synced_folder(node.folder)
    write_json(node.folder / DISMISSED_FILE, {"why": printable(str(payload.fields.get("why")))})
    return Payload({})


def handle_done(node: ClientNode, payload: Payload) -> Payload:
    """Write the client's personal model and the global model as a run directory."""
    history, w, _ = node.personal_model(payload)
    task = history.algorithm.deployed_task(node.task)
    row, summary = payload.fields["row"], payload.fields["summary"]
    if node.federation.secure:  # the server does not know it
        unit = node.clients.target_scale**node.task.unit_power
        row = row | {"personal": float(local_update.mean_risk(task, w, node.clients.test)[0]) * unit}
        secure_client.delete_state(node)
        node.forget_sums()
    server = node.server_state(history, payload)
    run = node.run.model_copy(
        update={"data": node.run.data.model_copy(update={"source": str(node.path)}), "federation": None}
    )
    run = with_resolved(run, history.algorithm)
    files = {
        RUN_FILE: run_bytes(run),
        SCHEMA_FILE: json_bytes(node.schema.model_dump(mode="json")),
        CLIENTS_FILE: parquet_bytes(clients_table([row])),
        SUMMARY_FILE: json_bytes(summary),
    }
    path = node.folder / RESULT_DIR
    shutil.rmtree(path, ignore_errors=True)
    about, layout = describe_task(Job(run, node.clients, task))
    create_run(path, files).write_models(
        StoredModels(
            local_update.extend_model(history.algorithm.global_model(server), task.dim), w, (node.name,), about, layout
        )
    )
    write_json(node.folder / DONE_FILE, row | {"metric": summary["metric"]} | compute_test_improvement(node, task, w))
    return Payload({"result": True})


def compute_test_improvement(node: ClientNode, task: Task, w: Tensor) -> JsonObject:
    """Return the improvement over its local model, where that was trained."""
    if not node._file(LOCAL).exists():
        return {}
    alone = node.history({"label": LOCAL})
    state = alone.at(max(alone.states, default=0), f"client '{node.name}'")
    unit = node.clients.target_scale**node.task.unit_power
    local = local_update.extend_model(
        alone.algorithm.personal_model(alone.server, local_update.own_state(alone.algorithm, state)), task.dim
    )
    return improvement_on_test_rows(task, w, local, node.clients.test, unit)


def improvement_on_test_rows(task: Task, personal: Tensor, local: Tensor, rows: Rows, unit: float) -> JsonObject:
    """Of models [1, d] on one client's rows; `unit` turns losses into those of the target's own units."""
    n = int(rows.size[0])
    if torch.equal(personal, local):
        return {"improvement_over_local_ci_low": 0.0, "improvement_over_local_ci_high": 0.0}
    if n < MIN_ROWS:
        return {"improvement_over_local_ci_low": None, "improvement_over_local_ci_high": None}
    batch = rows.padded()
    gain = unit * (task.row_risk(local, batch) - task.row_risk(personal, batch))[0].double()
    mean, error = float(gain.mean()), float(gain.std()) / n**0.5
    reach = float(t.ppf((1 + CONFIDENCE_LEVEL) / 2, n - 1)) * error
    return {"improvement_over_local_ci_low": mean - reach, "improvement_over_local_ci_high": mean + reach}
