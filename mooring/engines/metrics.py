"""Well-known measures of the models that clients would use: on all test rows, and by client.

    numbers   rmse, mae in the target's own units; r2 = 1 - sum (y - f)^2 / sum (y - mean y)^2
    classes   accuracy, of tokens and pixels over those that have a target; with two classes auc, the share of pairs
              (one of each class) in the right order
    labels    accuracy, the share of correct labels

A client's r2 and auc are about its own rows, and nan where these do not vary. Metrics of users are functions of
(targets, predictions); predictions are numbers, classes (0, 1, ...) or labels (0 or 1), or, for a function with a
parameter `probabilities`, the model's probabilities.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from numpy.typing import ArrayLike
from scipy.special import stdtrit
from torch import Tensor

from mooring.core.cohort import Batch, Rows
from mooring.core.errors import RequestError
from mooring.core.task import Task
from mooring.data.clients import BINARY, CLASSES, COUNT, MULTILABEL, REGRESSION, Clients
from mooring.data.folds import map_rows
from mooring.tasks.network_losses import IGNORED_CLASS, class_dim

CONFIDENCE_LEVEL = 0.95  # of intervals over clients
CLASS_TARGETS = (BINARY, CLASSES, MULTILABEL)
ERROR_MEASURES = ("rmse", "mae")  # the lower, the better
Metric = Callable[..., float]
Predictions = tuple[np.ndarray, np.ndarray, np.ndarray]  # of rows: targets, predictions, clients


class MetricValues(NamedTuple):
    """Measures by name: on all rows together, and each client's own [m]."""

    overall: dict[str, float]
    by_client: dict[str, np.ndarray]


def compute_metrics(
    task: Task,
    clients: Clients,
    models: Tensor | None,
    part: str = "test",
    metrics: Mapping[str, Metric] | None = None,
) -> MetricValues:
    """The measures of each client's model [m, d] (or one model [d] for all), also by the user's `metrics`; empty if
    they do not apply.

    They do not apply if clients keep their models or rows, or predict neither a number nor probabilities.
    """
    rows: Rows | None = getattr(clients, part, None)
    if models is None or rows is None or not 0 < int(rows.size.sum()) <= len(rows.y):  # sizes without their rows
        return MetricValues({}, {})
    blocks = predict_blocks(task, models if models.ndim == 2 else models.expand(len(rows), -1), rows)
    return measure_predictions(task, clients, blocks, metrics or {})


def measure_predictions(
    task: Task, clients: Clients, blocks: list[Predictions], metrics: Mapping[str, Metric], by_client: bool = True
) -> MetricValues:
    """The measures of predictions, and each client's own if they are requested."""
    y, prediction, owner = concatenate_predictions(blocks)
    if not by_client:
        owner = np.zeros_like(owner)
    m = len(clients) if by_client else 1
    if clients.kind in (REGRESSION, COUNT) and prediction.ndim == 1 and prediction.shape == y.shape:
        unit, mean = (clients.target_scale, clients.target_mean) if clients.kind == REGRESSION else (1.0, 0.0)
        y, prediction = y * unit + mean, prediction * unit + mean
        scores = number_metrics(y, prediction, owner, m)
    else:
        scores = class_metrics(task, clients.kind, y, prediction, owner, m)
    for name, metric in metrics.items():
        scores.overall[name] = _apply_metric(name, metric, y, prediction)
        places = [owner == i for i in range(m)]
        values = [_apply_metric(name, metric, y[at], prediction[at]) if at.any() else np.nan for at in places]
        scores.by_client[name] = np.array(values)
    return scores


def _apply_metric(name: str, metric: Metric, y: np.ndarray, prediction: np.ndarray) -> float:
    """A user's metric of some rows."""
    if "probabilities" not in inspect.signature(metric).parameters and y.dtype.kind in "iub":
        has_classes = prediction.ndim > y.ndim
        prediction = likeliest_class(prediction, y) if has_classes else (prediction > 0.5).astype(y.dtype)
    try:
        return float(metric(y, prediction))
    except Exception as error:
        raise RequestError(f"metric {name!r} fails: {type(error).__name__}: {error}") from error


def predict_all(task: Task, models: Tensor, rows: Rows) -> Predictions:
    """Return targets, predictions and clients of all rows, sorted by client."""
    return concatenate_predictions(predict_blocks(task, models, rows))


def concatenate_predictions(predictions: list[Predictions]) -> Predictions:
    y, prediction, owner = (np.concatenate(column) for column in zip(*predictions))
    return y, prediction, owner


def predict_blocks(task: Task, models: Tensor, rows: Rows) -> list[Predictions]:
    """Return the predictions of each block of clients that has rows."""
    predictions: list[Predictions] = []
    for block in rows.blocks():
        block_rows = rows.select(block)
        if int(block_rows.size.sum()) == 0:
            continue
        batch = block_rows.padded()
        real = (batch.weight > 0).numpy()
        with torch.no_grad():
            answer = task.predict(models[block], batch.x).double().numpy()
        predictions.append((batch.y.numpy()[real], answer[real], np.repeat(block.numpy(), block_rows.size.numpy())))
    return predictions


def number_metrics(y: np.ndarray, prediction: np.ndarray, owner: np.ndarray, m: int) -> MetricValues:
    def measures(group: np.ndarray, groups: int) -> dict[str, np.ndarray]:
        with np.errstate(invalid="ignore", divide="ignore"):
            count = np.bincount(group, minlength=groups)
            square = np.bincount(group, (prediction - y) ** 2, groups)
            mean = np.bincount(group, y, groups) / count
            spread = np.bincount(group, (y - mean[group]) ** 2, groups)
            r2 = np.where(spread > 0, 1 - square / spread, np.nan)
            return {
                "rmse": np.sqrt(square / count),
                "mae": np.bincount(group, np.abs(prediction - y), groups) / count,
                "r2": r2,
            }

    overall = measures(np.zeros(len(y), dtype=int), 1)
    return MetricValues({name: float(value[0]) for name, value in overall.items()}, measures(owner, m))


def class_metrics(task: Task, kind: str, y: np.ndarray, prob: np.ndarray, owner: np.ndarray, m: int) -> MetricValues:
    """Return measures of probabilities: one column per class, one number for two classes, or one per label."""
    if kind == BINARY and prob.ndim == 1 and task.predicts_probabilities:
        prob = np.stack([1 - prob, prob], 1)
    is_known = np.ones(y.shape, dtype=bool)
    if kind == MULTILABEL and prob.shape == y.shape and task.predicts_probabilities:
        is_hit = (prob > 0.5) == (y > 0.5)
    elif kind in (BINARY, CLASSES) and _has_classes(prob, y):
        is_known = y != IGNORED_CLASS
        is_hit = (likeliest_class(prob, y) == y) & is_known
    else:
        return MetricValues({}, {})
    hits, known = (part.reshape(len(y), -1).sum(1) for part in (is_hit, is_known))
    with np.errstate(invalid="ignore", divide="ignore"):
        by_client = {"accuracy": np.bincount(owner, hits, m) / np.bincount(owner, known, m)}
        overall = {"accuracy": float(hits.sum() / known.sum())}
    if kind == BINARY:
        by_client["auc"] = auc(y, prob[:, 1], owner, m)
        overall["auc"] = float(auc(y, prob[:, 1], np.zeros(len(y), dtype=int), 1)[0])
    return MetricValues(overall, by_client)


def _has_classes(prob: np.ndarray, y: np.ndarray) -> bool:
    """Whether predictions are several numbers for each target, behind the rows or last."""
    if prob.ndim != y.ndim + 1:
        return False
    dim = class_dim(prob.shape, y.shape)
    return prob.shape[dim] > 1 and y.shape == (*prob.shape[:dim], *prob.shape[dim + 1 :])


def likeliest_class(prob: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The class of the largest probability, one per target: also of tokens and pixels."""
    return prob.argmax(class_dim(prob.shape, y.shape))


def auc(y: np.ndarray, score: np.ndarray, owner: np.ndarray, m: int) -> np.ndarray:
    """[m], by ranks within each owner's rows: (sum of the positives' ranks - n1 (n1 + 1) / 2) / (n1 n0)."""
    rank = pd.Series(score).groupby(owner).rank().to_numpy()
    positive = np.bincount(owner, y, m)
    negative = np.bincount(owner, minlength=m) - positive
    with np.errstate(invalid="ignore", divide="ignore"):
        pairs = positive * negative
        right = np.bincount(owner, rank * (y == 1), m) - positive * (positive + 1) / 2
        return np.where(pairs > 0, right / pairs, np.nan)


def improvement_pct(other: np.ndarray, loss: np.ndarray) -> np.ndarray:
    """Return the improvement of a loss over another, in percent of the other."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return 100 * (other - loss) / np.where(np.asarray(other) > 0, other, np.nan)


def mean_improvement(
    rows: ArrayLike, other: ArrayLike, loss: ArrayLike, level: float = CONFIDENCE_LEVEL
) -> dict[str, float] | None:
    """Return the improvement of a mean loss over rows over another, with Student's interval over clients.

    `other` and `loss` are mean losses by client. In the unit of the loss, and in percent of the other mean; None where
    no client has both. A loss falls by at most all of the other one, and so does the interval.
    """
    n, before, after = (np.asarray(part, dtype=float) for part in (rows, other, loss))
    is_known = (n > 0) & np.isfinite(before) & np.isfinite(after)
    n, before, after = n[is_known], before[is_known], after[is_known]
    m, total = len(n), n.sum()
    if m == 0:
        return None
    mean = float(n @ (before - after) / total)
    residual = n * (before - after - mean)
    error = float(np.sqrt(residual @ residual * m / (m - 1)) / total) if m > 1 else np.inf
    reach = float(stdtrit(max(m - 1, 1), (1 + level) / 2)) * error
    base = float(n @ before / total)
    high = min(mean + reach, base) if base > 0 else mean + reach
    values = {"mean": mean, "ci_low": mean - reach, "ci_high": high}
    bounds = {"pct": mean, "pct_ci_low": mean - reach, "pct_ci_high": high}
    return values | {name: 100 * value / base if base > 0 else np.nan for name, value in bounds.items()}


def row_errors(task: Any, models: Tensor, rows: Rows) -> Tensor:
    """[N]: 1 where a row's class is not the one that its client's model [m, d] predicts, else 0; of labels, a share."""

    def errors(w: Tensor, batch: Batch) -> Tensor:
        prediction = task.predict(w, batch.x)
        known = torch.ones_like(batch.y, dtype=torch.bool)
        if prediction.ndim == batch.y.ndim:
            wrong = (prediction > 0.5) != (batch.y > 0.5)
        else:
            known = batch.y != IGNORED_CLASS
            likeliest = prediction.argmax(class_dim(prediction.shape, batch.y.shape, 2))
            if likeliest.shape != batch.y.shape:
                raise RequestError(
                    "select_by = 'accuracy' does not apply: the model has no prediction for each target."
                )
            wrong = (likeliest != batch.y) & known
        wrong, known = (part.double().reshape(*batch.y.shape[:2], -1).sum(2) for part in (wrong, known))
        return wrong / known.clamp(min=1)

    return map_rows(errors, models, rows)
