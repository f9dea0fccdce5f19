"""Parts of rows: train, validation, test, as 0, 1, 2 for every row.

A random split of a client depends on the seed, the client's name and its own rows, never on the other clients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from mooring.core.errors import RequestError
from mooring.core.seeds import uniforms

TRAIN, VALIDATION, TEST = range(3)
HELD_OUT_SHARE = 0.2  # share of a client's rows in validation, and in test
Shares = tuple[float, float, float]  # of a client's rows: to train, to validate, to test
DEFAULT_SHARES: Shares = (1 - 2 * HELD_OUT_SHARE, HELD_OUT_SHARE, HELD_OUT_SHARE)


def are_shares(split: Sequence[float]) -> bool:
    """Return whether these are shares to train, validate and test: not negative, above 0 for training, with sum 1."""
    is_valid = len(split) == 3 and all(0 <= share <= 1 for share in split) and split[0] > 0
    return is_valid and math.isclose(sum(split), 1)


def parse_shares(split: str | Sequence[float] | None) -> Shares:
    """Return the shares of a split; the default ones for a column, or for None."""
    if split is None or isinstance(split, str):
        return DEFAULT_SHARES
    if not are_shares(split):
        raise RequestError(
            f"split must be three shares (train, validation, test) that add up to 1, or a column, got {list(split)}."
        )
    return (float(split[0]), float(split[1]), float(split[2]))


def ranks(group: np.ndarray, *scores: np.ndarray) -> np.ndarray:
    """Return each row's rank, from 0, among its group's rows sorted by the scores (the first is the most important)."""
    order = np.lexsort((*reversed(scores), group))
    ordered = group[order]
    rank = np.empty(len(group), dtype=np.int64)
    rank[order] = np.arange(len(group)) - np.searchsorted(ordered, ordered)
    return rank


def cut(code: np.ndarray, rank: np.ndarray, shares: Shares = DEFAULT_SHARES) -> np.ndarray:
    """Return parts by rank within the client: the first rows train, then come validation and test.

    Each held-out part has its share of the rows, rounded; a share above 0 is one row at least, and so are the training
    rows, at the cost of the larger held-out part, for three rows or more.
    """
    n = np.bincount(code)[code]
    validation, test = (np.maximum(np.rint(share * n), 1) if share > 0 else np.zeros(len(n)) for share in shares[1:])
    excess = np.maximum(validation + test - np.maximum(n - 1, 0), 0)
    larger = validation >= test
    validation, test = validation - excess * larger, test - excess * ~larger
    return np.where(rank < n - validation - test, TRAIN, np.where(rank < n - test, VALIDATION, TEST))


def random_split(
    code: np.ndarray, keys: np.ndarray, seed: int, strata: np.ndarray | None = None, shares: Shares = DEFAULT_SHARES
) -> np.ndarray:
    """Return a random split within each client; every stratum (class) is divided by the same shares.

    Rows of a stratum take random places at the quantiles (rank + u) / size, u uniform; all the client's rows are then
    cut in the order of their quantiles, so each row is equally likely in each place and every class is split by the
    same shares up to rounding. code: each row's client; keys: each client's key.
    """
    row_keys, row = keys[code], ranks(code, np.arange(len(code)))
    strata = np.zeros_like(code) if strata is None else strata
    cell = pd.factorize(code * (int(strata.max(initial=0)) + 1) + strata)[0]
    rank = ranks(cell, uniforms(seed, "split", row_keys, row))
    quantile = (rank + uniforms(seed, "split", row_keys, row, 1)) / np.bincount(cell)[cell]
    return cut(code, ranks(code, quantile, row), shares)


def group_split(
    code: np.ndarray,
    keys: np.ndarray,
    seed: int,
    unit: np.ndarray,
    strata: np.ndarray | None = None,
    shares: Shares = DEFAULT_SHARES,
) -> np.ndarray:
    """Return a random split that keeps a unit's rows together; a unit's stratum is that of its first row. Shares are of
    units.

    Units of different clients are different, whatever their numbers.
    """
    pair, first = number_groups(code, unit)
    return random_split(code[first], keys, seed, None if strata is None else strata[first], shares)[pair]


def number_groups(code: np.ndarray, unit: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each row's (client, unit) pair as a number in order of appearance, and the first row of each pair."""
    pair, _ = pd.factorize(code * (int(unit.max()) + 1) + unit)
    return pair, np.unique(pair, return_index=True)[1]


def time_split(code: np.ndarray, time: np.ndarray, shares: Shares = DEFAULT_SHARES) -> np.ndarray:
    """Return a split in which the earliest rows of each client train, the latest test; rows of equal time stay in
    their order."""
    return cut(code, ranks(code, time, np.arange(len(code))), shares)
