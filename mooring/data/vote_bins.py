"""Bins in which clients vote: each client marks the bin of a number of its own, and counts of clients are added up.

The bins grow by 19 % (a quarter of an octave) in the usual range, and faster beyond. Magnitudes of any column are
found by two votes: in coarse bins, then in the fine ones inside the coarse bins in use. Distances in the spreads of a
column are found by one.
"""

from __future__ import annotations

import math

import numpy as np

SUBDIVISION = 16  # fine bins in a coarse one


class Grid:
    """Bins of numbers by magnitude between powers of two, and one of smaller magnitudes; for both signs if `signed`."""

    def __init__(self, exponents: np.ndarray, signed: bool = False) -> None:
        self.edges, self.signed = 2.0**exponents, signed
        inner, outer = np.append(0.0, self.edges[:-1]), np.append(self.edges[0], self.edges[1:])
        center = np.append(0.0, np.sqrt(self.edges[:-1] * self.edges[1:]))
        self.center = np.append(-center[:0:-1], center) if signed else center
        self.lower = np.concatenate([-outer[:0:-1], [-outer[0]], inner[1:]]) if signed else inner
        self.upper = np.concatenate([-inner[:0:-1], [outer[0]], outer[1:]]) if signed else outer

    def __len__(self) -> int:
        return len(self.center)

    def place(self, values: float | np.ndarray) -> np.ndarray:
        """Return the bins of some numbers."""
        size = np.minimum(np.searchsorted(self.edges, np.abs(values), side="right"), len(self.edges) - 1)
        return len(self.edges) - 1 + np.sign(values).astype(np.int64) * size if self.signed else size

    def vote(self, value: float | None) -> np.ndarray:
        """Return [bins]: a one in the bin of a number; zeros without one."""
        votes = np.zeros(len(self))
        if value is not None:
            votes[self.place(value)] = 1
        return votes

    def quantile(self, votes: np.ndarray, share: float) -> int:
        """Return the bin of the smallest value that has at least this share of the values up to it."""
        rank = max(math.ceil(share * votes.sum() - 1e-9), 1)
        return int(np.searchsorted(np.cumsum(votes), rank))

    def median(self, votes: np.ndarray) -> float:
        """Return the median, the mean of two values in the middle."""
        ends = np.cumsum(votes)
        low, high = (np.searchsorted(ends, rank) for rank in ((ends[-1] + 1) // 2, ends[-1] // 2 + 1))
        return float(self.center[low] + self.center[high]) / 2

    def highest(self, votes: np.ndarray) -> int:
        return int(np.flatnonzero(votes)[-1])


COARSE_EXPONENTS = np.concatenate([np.arange(-160.0, -32, 32), np.arange(-32.0, 96, 4), np.arange(96.0, 353, 32)])
FINE_EXPONENTS = np.append(
    (COARSE_EXPONENTS[:-1, None] + np.diff(COARSE_EXPONENTS)[:, None] * np.arange(SUBDIVISION) / SUBDIVISION).ravel(),
    COARSE_EXPONENTS[-1],
)
RELATIVE_EXPONENTS = np.concatenate([np.arange(-40, -4, 2), np.arange(-4, 12, 0.25), np.arange(12, 61, 2)])
COARSE, COARSE_SIGNED, FINE = Grid(COARSE_EXPONENTS), Grid(COARSE_EXPONENTS, signed=True), Grid(FINE_EXPONENTS)
RELATIVE, RELATIVE_SIGNED = Grid(RELATIVE_EXPONENTS), Grid(RELATIVE_EXPONENTS, signed=True)
COUNT_GRID = Grid(np.arange(0, 53.25, 0.25))  # of whole numbers, to within 19 %
COARSE_OF_FINE = np.append(0, np.arange(len(FINE) - 1) // SUBDIVISION + 1)
