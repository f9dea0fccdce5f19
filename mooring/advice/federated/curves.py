"""Columns for curves in numeric columns, the same at all clients: natural splines whose knots follow from histograms.

    sum over clients   how many rows lie in each of 32 bins of each numeric column
    knots              quantiles of these, fewer where rows are few (`shapes/splines.py`)
    standard scales    of the spline columns, by the bins' middles

Bins are equally wide in arcsinh(x / LINEAR_WIDTH) of columns that are standardized over the federation.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from mooring.advice.federated.score_models import HomeRows, design
from mooring.core.summing import Program, Step, Sum
from mooring.shapes.columns import ColumnSums, ShapedColumns, choose_splines
from mooring.shapes.fitting import limit_splines
from mooring.shapes.splines import KNOT_LEVELS

BINS, LINEAR_WIDTH, LARGEST_VALUE = 32, 0.3, 10.0
HALF_RANGE = float(np.arcsinh(LARGEST_VALUE / LINEAR_WIDTH))
BIN_WIDTH = 2 * HALF_RANGE / BINS
HISTOGRAM = Step("histogram", "how many rows lie in which of 32 bins of numeric columns, for knots of curves", 1.0)


def bin_middles() -> np.ndarray:
    """[BINS]."""
    return LINEAR_WIDTH * np.sinh(-HALF_RANGE + BIN_WIDTH * (np.arange(BINS) + 0.5))


def count_bins(x: np.ndarray) -> np.ndarray:
    """Return how many rows of x [n, f] lie in each bin: [f, BINS]; values beyond are counted in the last ones."""
    place = np.floor((np.arcsinh(x / LINEAR_WIDTH) + HALF_RANGE) / BIN_WIDTH).clip(0, BINS - 1).astype(np.int64)
    width = x.shape[1]
    return np.bincount((place + BINS * np.arange(width)).ravel(), minlength=width * BINS).reshape(width, BINS)


def columns_program(
    homes: Sequence[HomeRows], features: int, numeric: Sequence[int], max_extra: float
) -> Program[ShapedColumns | None]:
    """The spline columns of all clients, at most `max_extra`; None where there is none worth trying."""
    places = list(numeric)
    parts = [count_bins(home.features(features)[:, places]).ravel().astype(float) for home in homes]
    total = yield Sum(HISTOGRAM, np.stack(parts) if parts else np.zeros((0, len(places) * BINS)))
    counts = np.zeros((features, BINS))
    counts[places] = total.reshape(-1, BINS)
    for max_knots in sorted(KNOT_LEVELS, reverse=True):
        splines = limit_splines(choose_splines(counts, places, max_knots, bin_middles()))
        columns = ShapedColumns(features, splines)
        if 0 < columns.extra <= max_extra:
            return columns.standardize(_sums_of_bins(columns, counts))
    return None


def _sums_of_bins(columns: ShapedColumns, counts: np.ndarray) -> ColumnSums:
    """The sums of the spline columns over all rows, each at the middle of its bin."""
    x = torch.from_numpy(np.repeat(bin_middles()[:, None], columns.inputs, 1))
    extra = columns.make_extra(x).numpy()
    weight = counts[[column.bases[0] for column in columns.groups]].T
    rows = int(counts.sum(1).max())
    return ColumnSums(rows, (weight * extra).sum(0), (weight * extra**2).sum(0))


def expand(home: HomeRows, columns: ShapedColumns) -> HomeRows:
    """Return the rows with the spline columns; the intercept stays last."""
    x = columns(torch.from_numpy(home.features(columns.inputs))).numpy()
    has_intercept = home.dim > columns.inputs * home.family.scores
    return home._replace(jacobian=design(x, home.family.scores, has_intercept))
