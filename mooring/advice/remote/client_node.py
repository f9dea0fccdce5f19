"""A client of a federation that is advised: it computes client functions on its own rows.

asked      calls of client functions, with the rows that each is for
advised    the end: it writes its recommendation and its model as a run directory that `mooring predict` reads
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import cached_property
from typing import ClassVar

import pandas as pd
import torch
from torch import Tensor

from mooring.advice.advise import AdviceResult  # imports all modules with client functions
from mooring.advice.candidates.shaper import INNER_FOLDS
from mooring.advice.evaluation.loss_sums import ALTERNATIVES
from mooring.advice.remote.access import HELD, TRAIN
from mooring.advice.remote.column_effects import REPLACED
from mooring.advice.remote.columns import HELD_INSIDE, INNER_PARTS, STACKING_SALT
from mooring.advice.reporting.sentences import ALTERNATIVE_PHRASES, MODEL_PHRASES
from mooring.core.client_functions import CLIENT_FUNCTIONS
from mooring.core.cohort import Rows
from mooring.core.errors import RequestError
from mooring.core.types import JsonObject
from mooring.data.folds import (
    assign_folds,
    assign_time_folds,
    filter_rows,
    number_distinct_rows,
    row_groups,
    row_times,
    usable_rows,
)
from mooring.engines.fit_files import describe_task
from mooring.engines.prepare import Job, make_task
from mooring.remote.client_node import ClientNode
from mooring.remote.client_requests import DONE_FILE, RESULT_DIR
from mooring.remote.disclosure import QUANTITY_OF_FUNCTION, count_functions
from mooring.remote.messages import Payload
from mooring.remote.remote_rows import SHAPED, ColumnStore, Part, answer_calls
from mooring.runs.atomic_files import json_bytes, parquet_bytes, to_plain, write_json
from mooring.runs.directory import ADVICE_FILE, CLIENTS_FILE, RUN_FILE, SCHEMA_FILE, StoredModels, create_run
from mooring.runs.runfile import run_bytes
from mooring.runs.table_schemas import CLIENTS_SCHEMA, clients_table
from mooring.shapes.columns import BOOSTED, LINEAR, ShapedColumns
from mooring.shapes.quantiles import BINS

FINISH_MESSAGE = "advised"
DISCLOSED = (
    "sums over its rows: for a linear task all first and second moments of its columns and its target, for others its "
    "loss, gradient and Hessian at the models that it is sent; for every candidate the sum of its losses on held-out "
    "rows. From these its own models follow, and more where it has few rows; no row is sent"
)


DISCLOSED_FOR_SHAPES = (
    'For nonlinear effects (shape = "linear" avoids this): of every numeric column how many rows lie in each of '
    f"{BINS:,} bins, which are 0.1% (at the mean) to 3% (one standard deviation from it) of the column's standard "
    "deviation wide, and moments of splines and products of columns with residuals"
)
DISCLOSED_FOR_TREES = (
    ", and for every level of every tree the sums of derivatives of its loss by node and bin, and its held-out loss"
)


class AdviceClientNode(ClientNode):
    """A client of a federation that is advised."""

    of_schema: ClassVar[tuple[str, ...]] = (*ClientNode.of_schema, "parts")
    what = "an advice"

    @property
    def reveals(self) -> str:
        """What a curious server sees of it."""
        if self.is_linear:
            return DISCLOSED
        is_boosted = self.run.advice is not None and self.run.advice.shape == BOOSTED
        return f"{DISCLOSED}. {DISCLOSED_FOR_SHAPES}{DISCLOSED_FOR_TREES if is_boosted else ''}"

    @property
    def is_linear(self) -> bool:
        """Whether its run file excludes columns for nonlinear effects."""
        return self.run.advice is not None and self.run.advice.shape == LINEAR

    def rows(self, part: Part) -> Rows:
        """Some of its rows, in a pool of their own; where there are none, one row that does not count."""
        if part not in self.parts:
            self.parts[part] = ensure_nonempty(self._rows(part), self.clients.train)
        return self.parts[part]

    @cached_property
    def parts(self) -> dict[Part, Rows]:
        return {}

    @cached_property
    def columns(self) -> ColumnStore:
        """The extra columns that the server has described."""
        return ColumnStore(self.folder / "columns")

    def _rows(self, part: Part) -> Rows:
        name, *others = part
        if name in ("train", "validation", "test"):
            return getattr(self.clients, name).compact()
        if name == SHAPED:
            digest, ranges, *base = others
            rows, fold = self.rows(tuple(base)), None
            if self.columns.get(str(digest)).without and int(rows.size.sum()):
                fold = self._inner_folds(tuple(base), INNER_FOLDS, STACKING_SALT)
            return self.columns.shape_rows(str(digest), str(ranges), rows, fold)
        if name == REPLACED:
            column, value, *base = others
            rows = self._rows(tuple(base))
            x = rows.x.clone()
            x[:, int(column)] = float(value)
            return Rows(x, rows.y, rows.start, rows.size)
        if name in INNER_PARTS:
            fold, folds, salt, *base = others
            assigned = self._inner_folds(tuple(base), int(folds), int(salt))
            return filter_rows(self._rows(tuple(base)), (assigned == int(fold)) == (name == HELD_INSIDE))
        usable = usable_rows(self.clients).compact()
        return usable if name == "usable" else filter_rows(usable, self._mask(part))

    def _inner_folds(self, part: Part, folds: int, salt: int) -> Tensor:
        """[N]: the inner fold of each row of a part."""
        rows, seed = self._rows(part), self.run.training.seed + salt
        return assign_folds(rows, self.clients.keys, folds, seed, self._units(part))

    def _mask(self, part: Part) -> Tensor:
        """[N]: which of the usable rows are in a fold, or train for it."""
        name, *numbers = part
        if name not in (HELD, TRAIN):
            raise RequestError(f"client '{self.name}' has no rows called {name!r}.")
        fold, folds = map(int, numbers)
        assigned = self.assigned(folds)
        if row_times(self.clients) is not None and name == TRAIN:
            return assigned < fold
        return (assigned == fold) == (name == HELD)

    def _units(self, part: Part) -> Tensor | None:
        """[N]: the units of rows, which stay in one fold; None where every row stands for itself."""
        units = row_groups(self.clients)
        if units is None and row_times(self.clients) is None:
            units = number_distinct_rows(self.rows(("usable",)))
        return units if units is None or part == ("usable",) else units[self._mask(part)]

    def assigned(self, folds: int) -> Tensor:
        """[N]: the fold of each usable row; negative for rows that only train."""
        rows, time = self.rows(("usable",)), row_times(self.clients)
        if time is not None:
            return assign_time_folds(rows, time, folds)
        units = row_groups(self.clients)
        units = number_distinct_rows(rows) if units is None else units
        return assign_folds(rows, self.clients.keys, folds, self.run.training.seed, units)


def ensure_nonempty(rows: Rows, like: Rows) -> Rows:
    if len(rows.y):
        return rows
    return Rows(torch.zeros_like(like.x[:1]), torch.zeros_like(like.y[:1]), rows.start, rows.size)


def handle_calls(node: AdviceClientNode, payload: Payload) -> Payload:
    histograms = QUANTITY_OF_FUNCTION.keys() & count_functions(payload.fields)
    if node.is_linear and histograms:
        raise RequestError(
            f"client '{node.name}' does not compute {min(histograms)!r}: its run file sets linear columns."
        )
    node.columns.add(payload.fields.get("shapes", {}))
    return answer_calls(node.name, node.task, payload, node.rows, CLIENT_FUNCTIONS)


def client_record(advice: AdviceResult, row: pd.Series) -> JsonObject:
    """What a client receives: the federation's numbers, and its own row; no other client's."""
    record, own_row = advice.record, to_plain(row.to_dict())
    shared = {name: record[name] for name in ("headline", "summary", "title", "plan", "path", "candidates", "run")}
    return shared | {
        "clients": [own_row],
        "notes": [],
        "words": {"recommendation": describe_recommendation(own_row)},
        "learning_curve": record["learning_curve"],
    }


def describe_recommendation(row: JsonObject) -> str:
    """A client's recommendation in a sentence."""
    sides = [
        f"better than {ALTERNATIVE_PHRASES[other]} with probability {row[f'probability_better_than_{other}']:.2f}"
        for other in ALTERNATIVES
        if row["recommended"] != other and row[f"improvement_over_{other}"] != 0
    ]
    return f"Use {MODEL_PHRASES[row['recommended']]}{': ' + ' and '.join(sides) if sides else ''}."


def write_client_run(node: AdviceClientNode, payload: Payload) -> Payload:
    """Write recommendation and model as a run directory."""
    record = payload.fields["record"]
    row = record["clients"][0]
    run = node.run.model_copy(
        update={"data": node.run.data.model_copy(update={"source": str(node.path)}), "federation": None}
    )
    schema, clients = node.schema, node.clients
    if payload.fields["shape"] is not None:
        shape = ShapedColumns.from_json(payload.fields["shape"])
        schema = schema.model_copy(update={"shape": shape.as_json()})
        clients = replace(clients, train=clients.train.map_columns(shape), features=schema.features, schema=schema)
    files = {
        RUN_FILE: run_bytes(run),
        SCHEMA_FILE: json_bytes(schema.model_dump(mode="json")),
        CLIENTS_FILE: parquet_bytes(clients_table([{name: row[name] for name in CLIENTS_SCHEMA.names if name in row}])),
        ADVICE_FILE: json_bytes(record),
    }
    path = node.folder / RESULT_DIR
    shutil.rmtree(path, ignore_errors=True)
    about, layout = describe_task(Job(run, clients, make_task(run, clients)))
    saved = StoredModels(payload.tensors["common"], payload.tensors["own"], (node.name,), about, layout)
    create_run(path, files).write_models(saved)
    write_json(
        node.folder / DONE_FILE,
        row | {"metric": record["summary"]["metric"], "said": record["words"]["recommendation"]},
    )
    return Payload({"result": True})


AdviceClientNode.own_answers = {"asked": handle_calls, FINISH_MESSAGE: write_client_run}
