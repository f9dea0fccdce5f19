"""Quantiles of all clients' rows from counts that each client may send.

Every client counts its rows per column on one fixed grid, and the counts are added over clients: the quantiles are
those of the pooled rows, to the width of a bin. The grid is for standardized columns (mean 0 and standard deviation 1
over the federation): its edges are FINE sinh(u) for equally spaced u, about FINE * STEP wide near 0 and STEP |x| wide
far out, so that a far value does not blur the others.
"""

from __future__ import annotations

import numpy as np

from mooring.core.errors import RequestError

BINS = 1_001  # odd: the middle one is around 0
MAX_ABSOLUTE_VALUE = 1e4  # values beyond are counted in the last bins
LINEAR_WIDTH = 0.05
MAX_ARCSINH = float(np.arcsinh(MAX_ABSOLUTE_VALUE / LINEAR_WIDTH))
BIN_WIDTH = 2 * MAX_ARCSINH / BINS


def bin_values() -> np.ndarray:
    """The middle of every bin: [BINS]."""
    return LINEAR_WIDTH * np.sinh(-MAX_ARCSINH + BIN_WIDTH * (np.arange(BINS) + 0.5))


def count_values(x: np.ndarray) -> np.ndarray:
    """How many rows of x [N, f] fall into every bin: [f, BINS]. Counts of clients may be added."""
    x = np.asarray(x, dtype=np.float64)
    if not np.isfinite(x).all():
        raise RequestError("quantiles: the columns must be finite; fill in missing values first.")
    place = np.floor((np.arcsinh(x / LINEAR_WIDTH) + MAX_ARCSINH) / BIN_WIDTH).clip(0, BINS - 1).astype(np.int64)
    width = x.shape[1]
    return np.bincount((place + BINS * np.arange(width)).ravel(), minlength=width * BINS).reshape(width, BINS)
