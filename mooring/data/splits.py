"""Who is in which part: train, validation, test, as 0, 1, 2 for every row.

A random split of a client depends on the seed, the client's name and its own rows, never on the other clients.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from mooring.core.seeds import uniforms

TRAIN, VALIDATION, TEST = range(3)
HELD_OUT = 0.2  # share of a client's rows in validation, and in test


def ranks(group: np.ndarray, *scores: np.ndarray) -> np.ndarray:
    """Each row's place, from 0, among its group's rows sorted by the scores (the first is the most important)."""
    order = np.lexsort((*reversed(scores), group))
    ordered = group[order]
    rank = np.empty(len(group), dtype=np.int64)
    rank[order] = np.arange(len(group)) - np.searchsorted(ordered, ordered)
    return rank


def cut(code: np.ndarray, rank: np.ndarray) -> np.ndarray:
    """Parts by rank within the client: the first 60 % train, then 20 % validation, 20 % test, none of them empty
    for three rows or more."""
    n = np.bincount(code)[code]
    held = np.maximum(np.rint(HELD_OUT * n), 1)
    return np.where(rank < n - 2 * held, TRAIN, np.where(rank < n - held, VALIDATION, TEST))


def random_split(code: np.ndarray, keys: np.ndarray, seed: int, strata: np.ndarray | None = None) -> np.ndarray:
    """A random 60/20/20 split within each client; rows of each stratum (class) are spread over the parts alike.

    Rows of a stratum take random places at the quantiles (rank + u) / size, u uniform; all the client's rows are then
    cut in the order of their quantiles, so each row is equally likely in each place and every class is split 60/20/20
    up to rounding. code: each row's client; keys: each client's key.
    """
    mine, row = keys[code], ranks(code, np.arange(len(code)))
    strata = np.zeros_like(code) if strata is None else strata
    cell = pd.factorize(code * (int(strata.max(initial=0)) + 1) + strata)[0]
    rank = ranks(cell, uniforms(seed, "split", mine, row))
    quantile = (rank + uniforms(seed, "split", mine, row, 1)) / np.bincount(cell)[cell]
    return cut(code, ranks(code, quantile, row))


def unit_split(
    code: np.ndarray, keys: np.ndarray, seed: int, unit: np.ndarray, strata: np.ndarray | None = None
) -> np.ndarray:
    """A random split that keeps a unit's rows together; a unit's stratum is that of its first row.

    Units of different clients are different, whatever their numbers.
    """
    pair, first = units(code, unit)
    return random_split(code[first], keys, seed, None if strata is None else strata[first])[pair]


def units(code: np.ndarray, unit: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each row's (client, unit) pair as a number in order of appearance, and the first row of each pair."""
    pair, _ = pd.factorize(code * (int(unit.max()) + 1) + unit)
    return pair, np.unique(pair, return_index=True)[1]


def time_split(code: np.ndarray, time: np.ndarray) -> np.ndarray:
    """The earliest rows of each client train, the latest test; rows of equal time stay in their order."""
    return cut(code, ranks(code, time, np.arange(len(code))))
