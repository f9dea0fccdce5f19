"""The result of `fit`: models, predictions and tables in memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pandas as pd
import torch
from torch import Tensor, nn

from mooring.algorithms.base import AnyAlgorithm
from mooring.core.errors import RequestError
from mooring.core.items import TensorItems, find_items
from mooring.core.score_sentences import describe_scores
from mooring.core.task import Task
from mooring.core.types import JsonObject
from mooring.data.clients import REGRESSION
from mooring.engines.coefficients import coefficient_table, read_scaling
from mooring.engines.exchange import BEST
from mooring.engines.exported_models import make_estimator
from mooring.engines.prepare import Job
from mooring.engines.training_state import TrainingOutcome
from mooring.runs.directory import (
    RunDirectory,
)
from mooring.tasks.network import NetworkTask
from mooring.tasks.network_module import build_module

if TYPE_CHECKING:
    from sklearn.base import BaseEstimator

MAX_SHOWN_CLIENTS = 4  # clients that a result shows when it is printed


@dataclass(frozen=True)
class RoundModels:
    """The models of a federation after a round, and their losses in the target's own units."""

    t: int
    common: Tensor  # [d]
    models: Tensor | None  # [m, d]; None if clients keep their own
    validation: Tensor  # [m]
    test: Tensor  # [m]
    alpha: Tensor | None  # [m], weight of the local part in a mixture; None for methods without one


@dataclass(frozen=True)
class TrainedModels:
    """A method's result after its last round and after its best, which may be the same, and which of them is kept."""

    algorithm: AnyAlgorithm
    outcome: TrainingOutcome
    checkpoint: str
    last: RoundModels
    best: RoundModels

    @property
    def used(self) -> RoundModels:
        return self.best if self.checkpoint == BEST else self.last

    @property
    def common(self) -> Tensor:
        return self.used.common

    @property
    def models(self) -> Any:
        return self.used.models

    @property
    def validation(self) -> Tensor:
        return self.used.validation

    @property
    def test(self) -> Tensor:
        return self.used.test


@dataclass(frozen=True)
class FitResult:
    """The result of `fit`. Losses are means over test rows of the models that clients would use."""

    job: Job
    trained: TrainedModels
    summary: JsonObject  # metric; local, pooled, personal: test losses; improvement_over_local, ...; checkpoint; rounds
    clients: pd.DataFrame
    rounds: pd.DataFrame
    run: Path | None

    @property
    def notes(self) -> list[str]:
        """Notes on the data."""
        return list(self.job.clients.notes)

    def __repr__(self) -> str:
        """At most ten lines: the algorithm, its scores, some clients, the directory."""
        summary, clients = self.summary, self.clients
        stored_round = summary[f"{summary['checkpoint']}_round"]
        lines = [
            f"{self.trained.algorithm.name} on {self.job.clients.title or 'clients'}: {len(clients)} clients, "
            f"{summary['last_round']} rounds (kept: {stored_round})",
            *describe_scores(summary),
            *(f"  {row['client']}: {row['rows']} rows, {row['personal']:.4g}" for row in self._first_clients()),
            *(
                [f"  ... and {len(clients) - MAX_SHOWN_CLIENTS} more in .clients"]
                if len(clients) > MAX_SHOWN_CLIENTS
                else []
            ),
            f"run: {self.run}" if self.run else "not written; give out= to keep it",
        ]
        return "\n".join(lines)

    def _first_clients(self) -> list[JsonObject]:
        return self.clients.head(MAX_SHOWN_CLIENTS).to_dict("records")

    @property
    def models(self) -> dict[str, Tensor]:
        """Every client's parameter vector by name."""
        return {name: self._model(name) for name in self.clients["client"]}

    def _model(self, client: str | None) -> Tensor:
        """A client's parameter vector, or the global one."""
        if client is None:
            return self.trained.common
        names = list(self.clients["client"])
        if client not in names:
            raise RequestError(f"unknown client {client!r}; the run has {len(names)}, such as {', '.join(names[:5])}.")
        if self.trained.models is None:
            raise RequestError(f"client {client!r} keeps its own model; only the global one is here.")
        return self.trained.models[names.index(client)]

    def predict(self, x: object, client: str | None = None) -> Tensor:
        """Predictions at rows x by a client's model (default: the global one); a regression in the target's units.

        x is an array or, for a network, a tuple or dictionary of arrays that it takes, or a data set of items (x, y).
        """
        return to_target_units(self.job.clients, predict_arrays(self.job.task, self._model(client), x))

    def module(self, client: str | None = None) -> nn.Module:
        """A client's network (default: the global one), ready to be used: in evaluation mode, and answering in the
        target's own units; classes and labels come as logits."""
        clients = self.job.clients
        return build_module(self.job.task, self._model(client), clients.target_mean, clients.target_scale)

    def model(self, client: str | None = None) -> nn.Module | BaseEstimator:
        """A client's model (default: the global one), ready to be used: a network, or for linear and logistic tasks an
        estimator of scikit-learn's on the encoded columns in the units of the data."""
        if isinstance(self.job.task, NetworkTask):
            return self.module(client)
        clients = self.job.clients
        return make_estimator(self.job.task, self._model(client), read_scaling(clients), clients.kind)

    @property
    def coefficients(self) -> pd.DataFrame:
        """One row per client and term in the units of the data: coefficient, global, deviation."""
        names = list(self.clients["client"])
        scaling = read_scaling(self.job.clients)
        return coefficient_table(self.job.task, scaling, self.trained.common, self.trained.models, names)


def as_json(result: FitResult | RunDirectory) -> JsonObject:
    """The object that `mooring fit --json` prints, of a fit or of the run directory of one."""
    path = result.path if isinstance(result, RunDirectory) else result.run
    clients = result.clients.dropna(axis="columns", how="all") if isinstance(result, RunDirectory) else result.clients
    return {"summary": result.summary, "clients": clients.to_dict("records"), "run": str(path)}


def predict_arrays(task: Task, w: Tensor, x: object) -> Tensor:
    """Predictions of the model w [d] for rows x: see `FitResult.predict`."""
    items = find_items(x) if isinstance(task, NetworkTask) else None
    if isinstance(task, NetworkTask) and items is not None:
        return task.predict_items(w, *items)
    inputs = torch.as_tensor(x)
    inputs = inputs.to(task.dtype) if inputs.dtype.is_floating_point else inputs
    if isinstance(task, NetworkTask) and task.items is not None:  # its rows are numbers of items
        return task.predict_items(w, TensorItems(inputs), len(inputs))
    return task.predict(w[None], inputs[None])[0]


class HasTargetUnits(Protocol):
    """The target of a fit: its kind, and its units."""

    @property
    def kind(self) -> str: ...
    @property
    def target_mean(self) -> float: ...
    @property
    def target_scale(self) -> float: ...


def to_target_units(clients: HasTargetUnits, prediction: Tensor) -> Tensor:
    """Return a standardized prediction in the target's own units; probabilities are unchanged."""
    if clients.kind != REGRESSION:
        return prediction
    return prediction * clients.target_scale + clients.target_mean
