"""A mean over rows whose unit of chance is the client, with Student's interval."""

from __future__ import annotations

from typing import NamedTuple

import torch
from scipy.special import stdtrit
from torch import Tensor


class MeanDifference(NamedTuple):
    """A mean difference over the federation's rows, with its interval."""

    mean: float
    low: float
    high: float


CLUSTERED_NUMBERS = 6  # of `clustered_sums`


def clustered_sums(rows: Tensor, sums: Tensor, group: Tensor) -> Tensor:
    """[m, 6]: each client's parts of what its group's mean and error follow from; 0 outside of the group."""
    parts = torch.stack([torch.ones_like(rows), rows, sums, rows**2, rows * sums, sums**2], 1)
    return torch.where(group[:, None], parts, 0.0)


def mean_and_error(total: Tensor) -> tuple[float, float]:
    """The mean over rows of clients' sums, and its standard error, clients being the units of chance; infinite for
    one."""
    m, n, s, nn, ns, ss = total.tolist()
    if m == 0 or n == 0:
        return 0.0, float("inf")
    mean = s / n
    if m == 1:
        return mean, float("inf")
    return mean, (max(ss - 2 * mean * ns + mean**2 * nn, 0.0) * m / (m - 1)) ** 0.5 / n


def mean_from_sums(total: Tensor, level: float) -> MeanDifference:
    """The mean difference over rows with Student's interval."""
    mean, error = mean_and_error(total)
    reach = float(stdtrit(max(float(total[0]) - 1, 1), (1 + level) / 2)) * error
    return MeanDifference(mean, mean - reach, mean + reach)


def mean_difference(rows: Tensor, sums: Tensor, level: float) -> MeanDifference:
    """The mean difference over the rows of all clients, with Student's interval."""
    return mean_from_sums(clustered_sums(rows, sums, rows > 0).sum(0), level)
