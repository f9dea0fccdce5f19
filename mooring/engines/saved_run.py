"""`mooring.open`: a finished run from its directory, without its data."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pandas as pd
from torch import Tensor

from mooring.core.task import Task
from mooring.core.types import JsonObject
from mooring.data.loading import encode_new_rows
from mooring.data.schema import Schema
from mooring.engines.coefficients import read_scaling
from mooring.engines.model_store import ModelStore
from mooring.engines.predict import choose_method, read_schema, stored_intervals, stored_recommendations
from mooring.engines.prediction_intervals import IntervalScores
from mooring.engines.prepare import read_task
from mooring.engines.request import check_trusted_run
from mooring.runs.atomic_files import frame_from_rows
from mooring.runs.directory import SCHEMA_FILE, RunDirectory, StoredModels, method_folder, open_run

if TYPE_CHECKING:
    pass


class RunTables(NamedTuple):
    """Functions that read the tables of a run, by purpose."""

    clients: Callable[[RunDirectory], pd.DataFrame]
    summary: Callable[[RunDirectory, str], JsonObject]  # (run, the folder of a comparison's method)


def _method_summary(run: RunDirectory, folder: str) -> JsonObject:
    rows = run.comparison["methods"]
    row = next(row for row in rows if method_folder(Path(), row["method"]).name == folder)
    return {"metric": run.comparison["metric"], **row}


_FIT_TABLES = RunTables(lambda run: run.clients, lambda run, _: run.summary)
RUN_TABLES = {
    "fit": _FIT_TABLES,
    "personalize": _FIT_TABLES,
    "advise": RunTables(lambda run: run.clients, lambda run, _: run.advice["summary"]),
    "compare": RunTables(lambda run: frame_from_rows(run.comparison["clients"]), _method_summary),
}


@dataclass(frozen=True)
class SavedRun(ModelStore):
    """A finished run: its models, its tables, and predictions of new rows."""

    path: Path
    purpose: str  # "fit", "compare", "advise" or "personalize"
    method: str | None  # the algorithm whose models these are
    directory: RunDirectory  # of the models: a comparison has one per method
    notes: list[str]
    in_memory: tuple[object, object] = (None, None)  # a model and a loss that were in memory

    @property
    def place(self) -> str:
        return str(self.path)

    @cached_property
    def saved(self) -> StoredModels:
        return self.directory.models

    @cached_property
    def task(self) -> Task:
        return read_task(self.directory, *self.in_memory)

    @cached_property
    def schema(self) -> Schema | None:
        """The encoding of the run's table; None if it was made from arrays."""
        return self.encoding if (self.directory.path / SCHEMA_FILE).exists() else None

    @property
    def encoding(self) -> Schema:
        return read_schema(self.directory)

    @property
    def intervals(self) -> IntervalScores | None:
        return stored_intervals(self.directory)

    @property
    def recommended_kinds(self) -> dict[str, str]:
        return stored_recommendations(self.directory)

    @cached_property
    def models(self) -> dict[str, Tensor]:
        """Every client's parameter vector by name; empty if clients keep their own."""
        personal = self.saved.personal
        return {} if personal is None else dict(zip(self.names, personal))

    @cached_property
    def clients(self) -> pd.DataFrame:
        """One row per client, as the run reports it."""
        return RUN_TABLES[self.purpose].clients(open_run(self.path))

    @cached_property
    def summary(self) -> JsonObject:
        """The run's summary; of a comparison, the row of the method."""
        return RUN_TABLES[self.purpose].summary(open_run(self.path), self.directory.path.name)

    def inputs(self, source: object) -> pd.DataFrame:
        """A table's rows as the models see them, in the units of the data: a column for each term."""
        scaled, _, notes = encode_new_rows(source, self.encoding)
        for note in notes:
            warnings.warn(note, stacklevel=2)
        scaling = read_scaling(self.encoding)
        return pd.DataFrame(scaled * scaling.scale + scaling.mean, columns=list(self.encoding.features))

    def __repr__(self) -> str:
        return f"<run {self.path}: {self.purpose}, {self.method}, {len(self.names)} clients>"


def open(
    path: str | Path, method: str | None = None, *, model: object = None, loss: object = None, trust_code: bool = False
) -> SavedRun:
    """A finished run of `fit`, `compare`, `advise` or `personalize`.

    `method` chooses among those of a comparison; without it, it is the best on validation rows. A `model` or a `loss`
    that was in memory is passed again. `trust_code` allows code that an untrusted run names.
    """
    purpose = open_run(path).run.mooring.purpose
    directory, notes = choose_method(path, method)
    algorithm = directory.run.algorithm
    if trust_code:
        check_trusted_run(directory.run, directory.path, trust_code)
    return SavedRun(Path(path), purpose, algorithm.name if algorithm else None, directory, notes, (model, loss))
