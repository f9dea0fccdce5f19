"""The result of `fit`: models, predictions and tables in memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
from torch import Tensor

from mooring.algorithms.base import AnyAlgorithm
from mooring.core.score_sentences import describe_scores
from mooring.core.types import JsonObject
from mooring.engines.exchange import BEST
from mooring.engines.model_store import TrainedStore, describe_task
from mooring.engines.prediction_intervals import IntervalScores, score_fit
from mooring.engines.prepare import Job
from mooring.engines.training_state import TrainingOutcome
from mooring.runs.directory import RunDirectory, StoredModels

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
class FitResult(TrainedStore):
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
        return {name: self.vector(name) for name in self.names}

    @cached_property
    def saved(self) -> StoredModels:
        """The models as a run directory contains them."""
        trained = self.trained
        return StoredModels(trained.common, trained.models, tuple(self.clients["client"]), *describe_task(self.job))

    @cached_property
    def intervals(self) -> IntervalScores | None:
        return score_fit(self.job.task, self.job.clients, self.trained.models)

    @property
    def recommended_kinds(self) -> JsonObject:
        return {}

    def predict(self, data: object, client: object = None, interval: float | None = None) -> Any:
        """Predictions as those of `ModelStore.predict`; arrays are encoded rows, also where `fit` had a table."""
        if not isinstance(data, pd.DataFrame | str | Path):
            return self.predict_arrays(data, client)
        return super().predict(data, client, interval)


def as_json(result: FitResult | RunDirectory) -> JsonObject:
    """The object that `mooring fit --json` prints, of a fit or of the run directory of one."""
    path = result.path if isinstance(result, RunDirectory) else result.run
    clients = result.clients.dropna(axis="columns", how="all") if isinstance(result, RunDirectory) else result.clients
    return {"summary": result.summary, "clients": clients.to_dict("records"), "run": str(path)}
