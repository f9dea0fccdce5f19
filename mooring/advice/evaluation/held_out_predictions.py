"""Predictions of rows by models that have not seen them: of clients' own rows, and of clients that took no part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mooring.advice.candidates.families import fit_settings
from mooring.advice.evaluation.loss_sums import MODEL_KINDS, ModelTriple
from mooring.advice.evaluation.setting_choice import Choice, client_weights
from mooring.core.cohort import Rows
from mooring.core.task import Task
from mooring.engines.metrics import Predictions, concatenate_predictions, predict_all
from mooring.partial_pooling.client_prior import Prior, select_priors
from mooring.shapes.column_sets import ColumnSets

CLIENT_FOLDS = 10  # parts of the clients that are left out in turn


class HeldOutPredictions(NamedTuple):
    """Targets and predictions in the units of training."""

    y: np.ndarray  # [n]
    by_model: dict[str, np.ndarray]  # [n] or [n, classes] each: by local, global and personal models
    owner: np.ndarray  # [n], each row's client
    new_clients: Predictions | None = None  # by global models that were fitted without the client


def predict_held_out(task: Task, rows: Rows, models: ModelTriple) -> HeldOutPredictions | None:
    """Predictions by each client's three models; None without rows."""
    if int(rows.size.sum()) == 0:
        return None
    predictions = {name: predict_all(task, w, rows) for name, w in zip(MODEL_KINDS, models.each())}
    y, _, owner = predictions[MODEL_KINDS[0]]
    return HeldOutPredictions(y, {name: part[1] for name, part in predictions.items()}, owner)


def join_predictions(parts: Sequence[HeldOutPredictions | None], clients: Tensor) -> HeldOutPredictions | None:
    """The predictions of all folds; owners are places among all clients."""
    known = [part for part in parts if part is not None]
    if not known:
        return None
    names = known[0].by_model
    return HeldOutPredictions(
        np.concatenate([part.y for part in known]),
        {name: np.concatenate([part.by_model[name] for part in known]) for name in names},
        clients.numpy()[np.concatenate([part.owner for part in known])],
    )


def predict_new_clients(
    task: Task, rows: Any, choice: Choice, priors: Sequence[Prior], weights: str | Tensor, sets: ColumnSets | None
) -> Predictions | None:
    """Predictions of each client's rows by the global model of the other clients, some clients at a time."""
    if len(rows) < 2:
        return None
    everyone = torch.arange(len(rows))
    found = []
    for k in range(min(CLIENT_FOLDS, len(rows))):
        left_out = everyone[everyone % CLIENT_FOLDS == k]
        others = everyone[everyone % CLIENT_FOLDS != k]
        train, held = rows.select(others), rows.select(left_out)
        share = weights if isinstance(weights, str) else weights[others]
        if int(train.size.sum()) == 0 or int(held.size.sum()) == 0:
            continue
        few = select_priors(priors, others)
        (fit,) = fit_settings(task, train, client_weights(train, share), [choice.global_], few, sets)
        y, prediction, owner = predict_all(task, fit.w.expand(len(held), -1), held)
        found.append((y, prediction, left_out.numpy()[owner]))
    return concatenate_predictions(found) if found else None
