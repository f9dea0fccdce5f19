"""Effects of columns that are not linear: partial dependence of the global model, in the units of the data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mooring.core.cohort import Rows
from mooring.core.types import JsonObject
from mooring.engines.coefficients import read_scaling
from mooring.engines.model_store import to_target_units
from mooring.engines.prepare import Job
from mooring.shapes.columns import SPLINE, ShapedColumns, partial_dependence

MAX_EFFECTS = 6  # columns that are reported, the least linear first
GRID_VALUES = 15  # between the 5% and the 95% quantile of a column
SAMPLED_ROWS = 200  # that predictions are averaged over
MIN_CURVATURE = 0.01  # root mean square distance from a straight line, as a share of the target's standard deviation


class MeanPredictions(NamedTuple):
    """Mean predictions over a sample of rows if all of these had each value of a column, in the target's units."""

    target_deviation: float  # standard deviation of the target
    by_column: dict[int, tuple[Tensor, Tensor]]  # values [G] of the column, standardized, and mean predictions [G]


def sampled_places(total: int) -> Tensor:
    """The places of the rows, client after client, that predictions are averaged over."""
    return torch.linspace(0, total - 1, min(SAMPLED_ROWS, total)).long()


def value_grid(low: float, high: float) -> Tensor:
    return torch.linspace(low, high, GRID_VALUES, dtype=torch.float64)


def average_predictions(job: Job, shape: ShapedColumns, w: Tensor, columns: Sequence[int]) -> MeanPredictions:
    """The mean predictions of the global model, from rows in memory."""
    clients, task = job.clients, job.task
    rows: Rows = clients.train.compact()
    sample = rows.x[sampled_places(len(rows.y)), : shape.inputs].double()

    def predict(x: Tensor) -> Tensor:
        return to_target_units(clients, task.predict(w[None], x[None].to(task.dtype))[0]).double()

    by_column = {}
    for column in columns:
        low, high = np.quantile(rows.x[:, column].numpy(), [0.05, 0.95])
        if high > low:
            grid = value_grid(float(low), float(high))
            by_column[column] = grid, partial_dependence(shape, predict, sample, column, grid)
    return MeanPredictions(float(to_target_units(clients, rows.y.to(task.dtype)).double().std()), by_column)


def measure_effects(
    job: Job,
    shape: ShapedColumns | None,
    w: Tensor,
) -> list[JsonObject]:
    """Partial dependence on numeric columns, the least linear first: column, values, prediction, linear, curvature.

    `linear` is the straight line through the predictions, `curvature` the root mean square distance from it, and
    `spline` whether the column has a spline. Empty without extra columns, and for several classes.
    """
    clients, task = job.clients, job.task
    columns = None if shape is None else clients.schema.numeric_places
    if shape is None or not columns or task.predict(w[None], clients.train.x[:1][None].to(task.dtype))[0].ndim != 1:
        return []
    averages, scaling = average_predictions(job, shape, w, columns), read_scaling(clients)
    splines = {extra.bases[0] for extra in shape.groups if extra.kind == SPLINE}
    least = MIN_CURVATURE * averages.target_deviation
    out: list[tuple[float, JsonObject]] = []
    for column, (grid, mean) in averages.by_column.items():
        effect = mean.numpy()
        line = np.polyval(np.polyfit(grid.numpy(), effect, 1), grid.numpy())
        curvature = float(np.sqrt(np.mean((effect - line) ** 2)))
        if curvature < least:
            continue
        values = scaling.mean[column] + scaling.scale[column] * grid.numpy()
        numbers = {"values": values.tolist(), "prediction": effect.tolist(), "linear": line.tolist()}
        named = {"column": clients.features[column], "spline": column in splines}
        out.append((curvature, named | numbers | {"curvature": curvature}))
    return [entry for _, entry in sorted(out, key=lambda pair: -pair[0])[:MAX_EFFECTS]]
