"""A mean over rows whose unit of chance is the client, with Student's interval."""

from __future__ import annotations

from typing import NamedTuple

from scipy.special import stdtrit
from torch import Tensor


class MeanDifference(NamedTuple):
    """A mean difference over the federation's rows, with its interval."""

    mean: float
    low: float
    high: float


def clustered_mean(rows: Tensor, sums: Tensor) -> tuple[float, float]:
    """The mean over rows of clients' sums, and its standard error, clients being the units of chance; infinite for
    one."""
    m = len(rows)
    if m == 0:
        return 0.0, float("inf")
    total = float(rows.sum())
    mean = float(sums.sum()) / total
    if m == 1:
        return mean, float("inf")
    return mean, float((sums - mean * rows).square().sum() * m / (m - 1)) ** 0.5 / total


def mean_difference(rows: Tensor, sums: Tensor, level: float) -> MeanDifference:
    """The mean difference over rows with Student's interval."""
    seen = rows > 0
    mean, error = clustered_mean(rows[seen], sums[seen])
    reach = float(stdtrit(max(int(seen.sum()) - 1, 1), (1 + level) / 2)) * error
    return MeanDifference(mean, mean - reach, mean + reach)
