"""`mooring.open`: a finished run from its directory, without its data."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple

import pandas as pd
from torch import Tensor, nn

from mooring.core.errors import RequestError
from mooring.core.task import Task
from mooring.core.types import JsonObject
from mooring.data.column_types import client_name
from mooring.data.loading import encode_new_rows
from mooring.data.schema import Schema
from mooring.data.tables import suggest_name
from mooring.engines.coefficients import coefficient_table, read_scaling
from mooring.engines.exported_models import make_estimator
from mooring.engines.fit_result import predict_arrays, to_target_units
from mooring.engines.predict import choose_method, predict_rows, read_schema, stored_intervals, stored_recommendations
from mooring.engines.prepare import read_task
from mooring.engines.request import check_trusted_run
from mooring.runs.atomic_files import frame_from_rows
from mooring.runs.directory import SCHEMA_FILE, RunDirectory, StoredModels, method_folder, open_run
from mooring.tasks.network import NetworkTask
from mooring.tasks.network_module import build_module

if TYPE_CHECKING:
    from sklearn.base import BaseEstimator


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
class SavedRun:
    """A finished run: its models, its tables, and predictions of new rows."""

    path: Path
    purpose: str  # "fit", "compare", "advise" or "personalize"
    method: str | None  # the algorithm whose models these are
    directory: RunDirectory  # of the models: a comparison has one per method
    notes: list[str]
    in_memory: tuple[object, object] = (None, None)  # a model and a loss that were in memory

    @cached_property
    def saved(self) -> StoredModels:
        return self.directory.models

    @cached_property
    def task(self) -> Task:
        return read_task(self.directory, *self.in_memory)

    @cached_property
    def schema(self) -> Schema:
        """The encoding of the run's table."""
        return read_schema(self.directory)

    @property
    def names(self) -> tuple[str, ...]:
        return self.saved.clients

    @property
    def global_(self) -> Tensor:
        """The global model's parameter vector."""
        return self.saved.common

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

    @cached_property
    def coefficients(self) -> pd.DataFrame:
        """One row per client and term in the units of the data: coefficient, global, deviation."""
        return coefficient_table(self.task, read_scaling(self.schema), self.global_, self.saved.personal, self.names)

    def vector(self, client: object = None) -> Tensor:
        """A client's parameter vector (default: the global one)."""
        if client is None:
            return self.global_
        name = client_name(client)
        if name not in self.models:
            examples = f"{len(self.names)} clients, such as {', '.join(self.names[:5])}"
            raise RequestError(
                f"{self.path}: no model of client {name!r}; the run has {examples}.{suggest_name(name, self.names)}"
            )
        return self.models[name]

    def predict(self, source: object, client: object = None, interval: float | None = None) -> pd.DataFrame | Tensor:
        """Return one row per row of a table, each predicted by its own client's model, or all by that of `client`.

        Unknown clients and cells without a client raise warnings. A run that
        was made from arrays takes arrays, all rows by the model of `client` (default: the global one), and returns
        a tensor, as the result of `fit` does. `interval` is the level of prediction intervals, such as 0.9, of a run of
        `advise`.
        """
        if not (self.directory.path / SCHEMA_FILE).exists():
            answers = predict_arrays(self.task, self.vector(client), source)
            return to_target_units(SimpleNamespace(**self.saved.task), answers)
        frame, notes = predict_rows(
            self.task,
            self.schema,
            self.saved,
            source,
            client,
            self.path,
            None if interval is None else stored_intervals(self.directory),
            interval,
            stored_recommendations(self.directory),
        )
        for note in notes:
            warnings.warn(note, stacklevel=2)
        return frame

    def module(self, client: object = None) -> nn.Module:
        """A client's network (default: the global one), ready to be used: in evaluation mode, and answering in the
        target's own units; classes and labels come as logits."""
        description = self.saved.task
        return build_module(
            self.task, self.vector(client), description.get("target_mean", 0.0), description.get("target_scale", 1.0)
        )

    def model(self, client: object = None) -> nn.Module | BaseEstimator:
        """A client's model (default: the global one), ready to be used: a network, or an estimator of scikit-learn's
        that takes the columns of `inputs`."""
        if isinstance(self.task, NetworkTask):
            return self.module(client)
        return make_estimator(self.task, self.vector(client), read_scaling(self.schema), self.schema.kind)

    def inputs(self, source: object) -> pd.DataFrame:
        """A table's rows as the models see them, in the units of the data: a column for each term."""
        scaled, _, notes = encode_new_rows(source, self.schema)
        for note in notes:
            warnings.warn(note, stacklevel=2)
        scaling = read_scaling(self.schema)
        return pd.DataFrame(scaled * scaling.scale + scaling.mean, columns=list(self.schema.features))

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
