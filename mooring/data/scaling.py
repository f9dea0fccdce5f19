"""Federated statistics: only counts, sums and sums of squares leave a client.

Two exchanges. First every client sends, for each column, how many values it has and their sum; the server adds them
up and answers with the mean. Then every client sends the sum of squares about that mean. Squares about the common
mean, unlike plain squares, lose no digits when a column's mean is large against its spread (years, days).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

NEGLIGIBLE = 1e-12  # a spread this small against the mean is rounding of a constant


class Sums(NamedTuple):
    """What clients send about their columns: [m, d] each. Missing values (NaN) do not count."""

    count: np.ndarray
    total: np.ndarray


class Moments(NamedTuple):
    """The federation's statistics of each column, [d]."""

    count: np.ndarray
    mean: np.ndarray  # 0 where there are no values
    scale: np.ndarray  # the standard deviation; 1 for a constant column, so that dividing by it is safe


def by_client(values: np.ndarray, code: np.ndarray, clients: int) -> np.ndarray:
    """Each client's column sums [clients, d] of values [N, d], where row r belongs to client code[r]."""
    sums = [np.bincount(code, weights=column, minlength=clients) for column in values.T]
    return np.stack(sums, axis=1) if sums else np.zeros((clients, 0))


def sums(x: np.ndarray, code: np.ndarray, clients: int) -> Sums:
    """First exchange: every client's counts and sums."""
    present = ~np.isnan(x)
    return Sums(by_client(present, code, clients), by_client(np.where(present, x, 0.0), code, clients))


def squares(x: np.ndarray, code: np.ndarray, clients: int, mean: np.ndarray) -> np.ndarray:
    """Second exchange: every client's sums of squares about the common mean, [clients, d]."""
    return by_client(np.nan_to_num(x - mean, nan=0.0) ** 2, code, clients)


def mean_of(sent: Sums) -> tuple[np.ndarray, np.ndarray]:
    """The server's counts and means from what the clients sent."""
    count = sent.count.sum(0)
    return count, sent.total.sum(0) / np.maximum(count, 1)


def merge(sent: Sums, squared: np.ndarray) -> Moments:
    """The server's statistics from both exchanges."""
    count, mean = mean_of(sent)
    scale = np.sqrt(squared.sum(0) / np.maximum(count, 1))
    return Moments(count, mean, np.where(scale > NEGLIGIBLE * np.abs(mean), scale, 1.0))


def moments(x: np.ndarray, code: np.ndarray, clients: int) -> Moments:
    """Mean and standard deviation (divided by n) of every column over all clients, by the two exchanges."""
    sent = sums(x, code, clients)
    return merge(sent, squares(x, code, clients, mean_of(sent)[1]))


def level_counts(levels: np.ndarray, code: np.ndarray, clients: int, many: int) -> np.ndarray:
    """Every client's count of each of `many` levels, [clients, many]; level -1 is a missing value."""
    present = levels >= 0
    flat = code[present] * many + levels[present]
    return np.bincount(flat, minlength=clients * many).reshape(clients, many)
