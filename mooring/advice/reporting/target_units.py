"""Held-out predictions in the target's own units: measures that people know, and scores for prediction intervals."""

from __future__ import annotations

import numpy as np

from mooring.advice.evaluation.held_out_predictions import HeldOutPredictions
from mooring.advice.evaluation.loss_sums import GLOBAL, LOCAL, PERSONAL
from mooring.core.task import Task
from mooring.data.clients import COUNT, REGRESSION, Clients
from mooring.engines.metrics import class_metrics, number_metrics
from mooring.engines.prediction_intervals import IntervalScores, UnseenPredictions, score_residuals

RECOMMENDED = "recommended"


def predict_recommended(predictions: HeldOutPredictions, recommended: np.ndarray) -> np.ndarray:
    """What each row's client would have been told by the model that it is recommended."""
    out = predictions.by_model[PERSONAL].copy()
    for name in (LOCAL, GLOBAL):
        mine = (recommended == name)[predictions.owner]
        out[mine] = predictions.by_model[name][mine]
    return out


def measure_held_out(
    task: Task, clients: Clients, predictions: HeldOutPredictions | None, recommended: np.ndarray
) -> dict[str, dict[str, float]]:
    """RMSE, MAE and R2 of numbers, MAE of counts, accuracy and AUC of classes, by model, on held-out rows."""
    if predictions is None:
        return {}
    by_model = predictions.by_model | {RECOMMENDED: predict_recommended(predictions, recommended)}
    together = np.zeros_like(predictions.owner)
    out = {}
    for name, values in by_model.items():
        if clients.kind in (REGRESSION, COUNT) and values.ndim == 1:
            unit, mean = (clients.target_scale, clients.target_mean) if clients.kind == REGRESSION else (1.0, 0.0)
            out[name] = number_metrics(predictions.y * unit + mean, values * unit + mean, together, 1).overall
        else:
            out[name] = class_metrics(task, clients.kind, predictions.y, values, together, 1).overall
    return out


def score_intervals(
    clients: Clients, predictions: HeldOutPredictions | None, recommended: np.ndarray
) -> IntervalScores | None:
    """What prediction intervals need, in the target's units; None where the target is not a number."""
    if predictions is None or clients.kind != REGRESSION or predictions.y.ndim != 1:
        return None
    scale, mean = clients.target_scale, clients.target_mean

    def in_units(y: np.ndarray, prediction: np.ndarray, owner: np.ndarray) -> UnseenPredictions:
        return UnseenPredictions(y * scale + mean, prediction * scale + mean, owner)

    known = in_units(predictions.y, predict_recommended(predictions, recommended), predictions.owner)
    new = None if predictions.new_clients is None else in_units(*predictions.new_clients)
    return score_residuals(clients.names, known, new)
