"""Coefficients in the units of the data: those of every client's model beside the global one.

A model is trained on scaled columns and, in a regression, on a scaled target:

    (y - m_y) / s_y = b + sum_j w_j (x_j - m_j) / s_j

so that in the units of the data the slope of column j is s_y w_j / s_j, and the intercept is m_y + s_y (b - sum_j w_j
m_j / s_j). Classes and counts have no scale of their own: there s_y = 1 and m_y = 0, and the coefficients are those of
the log-odds, of the classes' scores, or of the log of the expected count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from torch import Tensor

from mooring.core.errors import RequestError
from mooring.core.task import Task
from mooring.data.clients import REGRESSION, Clients
from mooring.data.schema import Schema
from mooring.tasks.kernel_regression import KernelRegression

INTERCEPT = "(intercept)"


class Scaling(NamedTuple):
    """Scaling of the columns and of the target."""

    features: tuple[str, ...]
    mean: np.ndarray  # [q] of each column
    scale: np.ndarray  # [q]
    classes: tuple[str, ...] = ()
    target_mean: float = 0.0
    target_scale: float = 1.0


def read_scaling(data: Schema | Clients) -> Scaling:
    """Return the scaling of a schema, or of clients: by their schema, or only of the target if rows are arrays."""
    if isinstance(data, Clients) and data.schema is None:
        q = data.train.x.shape[-1]
        features = data.features or tuple(f"x{j}" for j in range(q))
        columns = (features, np.zeros(q), np.ones(q))
    else:
        data = data.schema if isinstance(data, Clients) else data
        extra = len(data.features) - len(data.mean)  # columns of nonlinear effects are in standard units
        columns = (data.features, np.append(data.mean, np.zeros(extra)), np.append(data.scale, np.ones(extra)))
    units = (data.target_mean, data.target_scale) if data.kind == REGRESSION else (0.0, 1.0)
    return Scaling(*columns, tuple(data.classes), *units)


def to_data_units(task: Task, w: Tensor, scaling: Scaling) -> tuple[np.ndarray, np.ndarray]:
    """Slopes [C, scores, q] and intercepts [C, scores] of the models w [C, d]."""
    parts = {part.name: part for part in task.layout}
    q = len(scaling.mean)
    if "slopes" not in parts or isinstance(task, KernelRegression) or parts["slopes"].shape[0] != q:
        raise RequestError(
            f"task '{task.name}' has no coefficients of columns; linear and logistic regression, and other tasks with "
            "a linear score, have them."
        )
    values = w.detach().double().numpy()
    slopes = values[:, parts["slopes"].place].reshape(len(values), q, -1).transpose(0, 2, 1)
    if "intercept" in parts:
        start = values[:, parts["intercept"].place]
    else:
        start = np.zeros(slopes.shape[:2])
    slopes = slopes / scaling.scale
    intercept = scaling.target_mean + scaling.target_scale * (start - slopes @ scaling.mean)
    return scaling.target_scale * slopes, intercept


def coefficient_table(
    task: Task, scaling: Scaling, common: Tensor, personal: Tensor | None, names: Sequence[str]
) -> pd.DataFrame:
    """One row per client and term: client, term, coefficient, global, deviation = coefficient - global.

    With three classes or more each class has its own, and a column `class` names it. `names` and `personal` may be
    empty: then the table has the global model only, under the client `None`.
    """
    slopes, intercept = to_data_units(task, common[None], scaling)
    shared = np.concatenate([intercept[..., None], slopes], -1)[0]  # [scores, 1 + q]
    coefficients, owners = shared[None], np.array([None], dtype=object)
    if personal is not None and len(names):
        slopes, intercept = to_data_units(task, personal, scaling)
        coefficients, owners = np.concatenate([intercept[..., None], slopes], -1), np.array(names, dtype=object)
    m, scores, terms = coefficients.shape
    frame = pd.DataFrame({"client": np.repeat(owners, scores * terms)})
    if scores > 1:
        frame["class"] = np.tile(np.repeat(np.array(scaling.classes, dtype=object), terms), m)
    frame["term"] = np.tile(np.array([INTERCEPT, *scaling.features], dtype=object), m * scores)
    frame["coefficient"] = coefficients.reshape(-1)
    frame["global"] = np.tile(shared.reshape(-1), m)
    return frame.assign(deviation=frame["coefficient"] - frame["global"])
