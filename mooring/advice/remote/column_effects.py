"""Partial dependence of clients that keep their rows, from counts and sums that they send.

count_bins        rows in each bin of a fixed grid, by column: the range of its values
sum_targets       the target's spread
sum_predictions   sums of predictions of some rows if all of them had the same value in a column
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mooring.advice.remote.columns import count_bins
from mooring.advice.reporting.column_effects import MeanPredictions, sampled_places, value_grid
from mooring.core.client_functions import rows_function
from mooring.core.cohort import Rows
from mooring.core.task import Task
from mooring.engines.fit_result import to_target_units
from mooring.engines.prepare import Job
from mooring.remote.remote_rows import RemoteRows
from mooring.shapes.columns import ShapedColumns
from mooring.shapes.quantiles import bin_values

REPLACED = "replaced"  # (REPLACED, column, value, *part): the rows with this value in a column


def average_remote_predictions(job: Job, shape: ShapedColumns, w: Tensor, columns: Sequence[int]) -> MeanPredictions:
    """The mean predictions of the global model over the same rows as in memory, between quantiles of counts."""
    clients, train = job.clients, job.clients.train
    assert isinstance(train, RemoteRows)
    rows = train.at(("train",), train.size)
    steps = [
        lambda: count_bins(None, rows, columns=torch.tensor(columns, dtype=torch.int64)),
        lambda: sum_targets(None, rows),
    ]
    (counts,), (sums,) = rows.map_independent(lambda step: [step()], steps)
    grids = {column: value_grid(*quantiles(count)) for column, count in zip(columns, counts.sum(0).numpy())}
    grids = {column: grid for column, grid in grids.items() if grid[-1] > grid[0]}
    total, end = int(rows.size.sum()), torch.cumsum(rows.size, 0)
    places = sampled_places(total)
    owner = torch.bucketize(places, end, right=True)
    taken = torch.full((len(rows), int(owner.bincount(minlength=1).max())), -1, dtype=torch.int32)
    for i in range(len(rows)):
        mine = places[owner == i] - (end[i] - rows.size[i])
        taken[i, : len(mine)] = mine

    def predict(at: tuple[int, float]) -> list[Tensor]:
        replaced = rows.at((REPLACED, *at, *rows.part), rows.size).map_columns(shape)
        return [sum_predictions(job.task, replaced, taken, w=w).sum() / len(places)]

    points = [(column, float(value)) for column, grid in grids.items() for value in grid]
    means = [float(mean) for (mean,) in rows.map_independent(predict, points)]
    effects = to_target_units(clients, torch.tensor(means, dtype=torch.float64)).reshape(len(grids), -1)
    mean, square = (sums.sum(0) / total).tolist()
    deviation = (max(square - mean**2, 0.0) * total / max(total - 1, 1)) ** 0.5
    unit = to_target_units(clients, torch.tensor([0.0, 1.0], dtype=torch.float64)).diff().abs()
    by_column = {column: (grid, effects[j]) for j, (column, grid) in enumerate(grids.items())}
    return MeanPredictions(deviation * float(unit), by_column)


def quantiles(counts: np.ndarray) -> tuple[float, float]:
    """The 5% and the 95% quantile of counts [BINS]."""
    share = np.cumsum(counts) / counts.sum()
    low, high = (bin_values()[int(np.searchsorted(share, level))] for level in (0.05, 0.95))
    return float(low), float(high)


@rows_function
def sum_targets(task: Task, rows: Rows) -> Tensor:
    """[C, 2]: sums of the target, and of its square."""
    y = [rows.of(c)[1].double() for c in range(len(rows))]
    return torch.stack([torch.stack([part.sum(), (part**2).sum()]) for part in y])


@rows_function
def sum_predictions(task: Task, rows: Rows, taken: Tensor, *, w: Tensor) -> Tensor:
    """[C]: sums of predictions by one model [d] over rows at `taken` [C, S], of which negative places are padding."""
    out = []
    for c in range(len(rows)):
        x = rows.of(c)[0][taken[c][taken[c] >= 0].long()]
        out.append(task.predict(w[None], x[None].to(task.dtype)).double().sum())
    return torch.stack(out)
