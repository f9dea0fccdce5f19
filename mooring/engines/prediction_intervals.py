"""Prediction intervals from held-out residuals (split conformal prediction; Lei et al. 2018).

A client of the run: |y - f| of rows that the models were not fitted to, divided by the client's residual standard
deviation, which is pulled towards that of all clients where its rows are few. A new client: |y - f| of global models
that were fitted without the client, each client with equal weight: the mean over clients of the distributions of their
residuals (Dunn, Wasserman, Ramdas 2023), without the factor (m + 1) / m of the quantile level that guarantees coverage
with few clients and widens the intervals: coverage is nominal on average over clients
(`benchmarks.interval_coverage`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from mooring.core.task import Task
from mooring.data.clients import REGRESSION, Clients
from mooring.engines.metrics import concatenate_predictions, predict_all

NUM_QUANTILES = 400  # number of stored quantiles
PRIOR_ROWS = 10.0  # rows that the residual variance of all clients counts like, in a client's own


class UnseenPredictions(NamedTuple):
    """Predictions for rows that the models were not fitted to, in the target's units."""

    y: np.ndarray  # [n]
    prediction: np.ndarray  # [n], or [n, classes]
    owner: np.ndarray  # [n], each row's client


class IntervalScores(BaseModel):
    """Held-out residuals as quantiles, and the clients' residual standard deviations."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    known: tuple[float, ...]  # quantiles 0, 1 / NUM_QUANTILES, ..., 1 of |residual| / sd of the client
    new: tuple[float, ...]  # of |residual| of global models fitted without the client; empty: not known
    sd: dict[str, float]  # by client
    rows: int
    clients: int

    def half_width(self, client: str | None, level: float) -> float:
        """Half the width of the interval for a client of the run, or (None) for a new one."""
        if client in self.sd:
            return self.sd[client] * quantile_at(self.known, level * (self.rows + 1) / self.rows)
        return quantile_at(self.new, level) if self.new else math.nan


def quantile_at(grid: tuple[float, ...], share: float) -> float:
    """A quantile of a grid, rounded up; the largest where the share exceeds 1."""
    return grid[min(math.ceil(share * (len(grid) - 1)), len(grid) - 1)]


def score_residuals(
    names: tuple[str, ...], predictions: UnseenPredictions, new: UnseenPredictions | None
) -> IntervalScores:
    """The scores of held-out predictions: by the models that clients use, and by global models without the client."""
    residual = predictions.y - predictions.prediction
    count = np.bincount(predictions.owner, minlength=len(names))
    squares = np.bincount(predictions.owner, residual**2, len(names))
    overall = squares.sum() / max(count.sum(), 1)
    sd = np.sqrt((PRIOR_ROWS * overall + squares) / (PRIOR_ROWS + count))
    sd = np.maximum(sd, 1e-12 * max(float(np.abs(predictions.y).max(initial=0)), 1e-300))
    scores = np.sort(np.abs(residual) / sd[predictions.owner])
    grid = np.linspace(0, 1, NUM_QUANTILES + 1)
    return IntervalScores(
        known=tuple(np.quantile(scores, grid, method="higher").tolist()),
        new=() if new is None else tuple(quantiles_by_client(np.abs(new.y - new.prediction), new.owner, grid).tolist()),
        sd=dict(zip(names, sd.tolist())),
        rows=len(residual),
        clients=int((count > 0).sum()),
    )


def score_fit(task: Task, clients: Clients, models: Tensor | None) -> IntervalScores | None:
    """The scores of a fit from its validation and test rows, which its models were not fitted to; None where the target
    is not a number, or models stay with their clients. There are no scores for new clients."""
    if models is None or clients.kind != REGRESSION or clients.schema is None:
        return None
    held_out = [rows for rows in (clients.validation, clients.test) if int(rows.size.sum())]
    if any(len(rows.y) < int(rows.size.sum()) for rows in held_out):
        return None  # the rows stay with their clients
    parts = [predict_all(task, models, rows) for rows in held_out]
    if not parts or parts[0][1].ndim != 1:
        return None
    y, prediction, owner = concatenate_predictions(parts)
    scale, mean = clients.target_scale, clients.target_mean
    return score_residuals(clients.names, UnseenPredictions(y * scale + mean, prediction * scale + mean, owner), None)


def quantiles_by_client(values: np.ndarray, owner: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Quantiles of values where all clients have the same weight."""
    count = np.bincount(owner)
    weight = 1.0 / (count[owner] * (count > 0).sum())
    order = np.argsort(values)
    reached = np.cumsum(weight[order])
    return values[order][np.minimum(np.searchsorted(reached, grid - 1e-12), len(values) - 1)]
