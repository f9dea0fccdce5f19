"""Additive trees as plain arrays: scores without the library that fitted them, and JSON without code in it.

All trees have the same depth d and are complete: node j of a level has children 2j and 2j + 1 of the next, a row goes
right where x[feature] >= threshold. A branch that ends early repeats its value in all leaves below it. Thresholds and
inputs are compared as 32-bit numbers, values are added as 64-bit numbers in the order of the trees.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from mooring.core.errors import RequestError
from mooring.core.types import JsonObject

MAX_DEPTH = 6
MAX_TREES = 100_000


@dataclass(frozen=True, eq=False)
class Trees:
    """base[k] + the sum of the leaves that a row falls into, over the trees of output k."""

    features: int  # columns of x
    base: np.ndarray  # [K], float64
    feature: np.ndarray  # [T, 2^d - 1], int64, by levels
    threshold: np.ndarray  # [T, 2^d - 1], float32; inf where a branch has ended
    leaf: np.ndarray  # [T, 2^d], float64
    output: np.ndarray  # [T], int64: which score a tree adds to
    gain: np.ndarray = field(default_factory=lambda: np.zeros(0))  # [features], total gain of the splits, or empty

    def __len__(self) -> int:
        return len(self.leaf)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Trees) and self.as_json() == other.as_json()

    def __hash__(self) -> int:
        return hash((self.features, self.leaf.tobytes()))

    @property
    def depth(self) -> int:
        return self.leaf.shape[1].bit_length() - 1

    @property
    def has_splits(self) -> bool:
        """Whether any two rows may have different scores."""
        return bool(np.isfinite(self.threshold).any())

    def score(self, x: np.ndarray) -> np.ndarray:
        """The scores of rows x [N, f]: [N, K]. A row's score does not depend on the rows around it."""
        columns = np.ascontiguousarray(np.asarray(x, dtype=np.float32).T)
        scores = np.repeat(self.base[:, None], columns.shape[1], axis=1)
        for feature, threshold, leaf, k in zip(self.feature, self.threshold, self.leaf, self.output):
            scores[k] += leaf[_find_leaves(columns, feature, threshold)]
        return scores.T

    def as_json(self) -> JsonObject:
        """Plain numbers; `from_json` gives back the same bits."""
        ended = np.isinf(self.threshold)
        return {
            "features": self.features,
            "base": self.base.tolist(),
            "feature": self.feature.tolist(),
            "threshold": [
                [None if stop else value for value, stop in zip(*row)] for row in zip(self.threshold.tolist(), ended)
            ],
            "leaf": self.leaf.tolist(),
            "output": self.output.tolist(),
            "gain": self.gain.tolist(),
        }

    @staticmethod
    def from_json(content: object, title: str = "boosted trees") -> Trees:
        """The trees of `as_json`; anything else is a RequestError of one sentence."""
        try:
            return _read(content)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            reason = f"no {error} in it" if isinstance(error, KeyError) else str(error)
            raise RequestError(f"{title}: not trees that Mooring wrote ({reason}); fit them again.") from error


def _find_leaves(columns: np.ndarray, feature: np.ndarray, threshold: np.ndarray) -> np.ndarray:
    """Each row's leaf of one tree: [N]."""
    place = (columns[feature[0]] >= threshold[0]).astype(np.intp)
    first, size = 1, 2
    rows = np.arange(columns.shape[1])
    while first < len(feature):
        node = first + place
        place = 2 * place + (columns[feature[node], rows] >= threshold[node])
        first, size = first + size, 2 * size
    return place


def _read_whole(content: object) -> np.ndarray:
    numbers = np.array(content)
    if numbers.size and numbers.dtype.kind != "i":
        raise ValueError("whole numbers were expected")
    return numbers.astype(np.int64)


def _read(content: object) -> Trees:
    if not isinstance(content, Mapping):
        raise ValueError(f"an object was expected, got {type(content).__name__}")
    features = content["features"]
    if not (type(features) is int and features >= 1):
        raise ValueError(f"features must be a whole number >= 1, got {features!r}")
    threshold = [[np.inf if value is None else value for value in row] for row in content["threshold"]]
    trees = Trees(
        features,
        np.array(content["base"], dtype=np.float64),
        _read_whole(content["feature"]).reshape(len(threshold), -1 if threshold else 0),
        np.array(threshold, dtype=np.float32).reshape(len(threshold), -1 if threshold else 0),
        np.array(content["leaf"], dtype=np.float64).reshape(len(threshold), -1 if threshold else 0),
        _read_whole(content["output"]),
        np.array(content["gain"], dtype=np.float64),
    )
    nodes, leaves = trees.feature.shape[1], trees.leaf.shape[1]
    if not (trees.base.ndim == 1 and len(trees.base) and len(threshold) <= MAX_TREES):
        raise ValueError(f"{len(threshold)} trees for {trees.base.size} scores")
    if len(trees) and not (leaves == nodes + 1 and leaves & nodes == 0 and 1 <= trees.depth <= MAX_DEPTH):
        raise ValueError(f"{nodes} nodes and {leaves} leaves per tree")
    if trees.threshold.shape != trees.feature.shape or trees.output.shape != (len(trees),):
        raise ValueError("lists of different lengths")
    if trees.gain.shape not in ((0,), (features,)):
        raise ValueError("lists of different lengths")
    for name, index, bound in (("feature", trees.feature, features), ("output", trees.output, len(trees.base))):
        if index.size and not (index.min() >= 0 and index.max() < bound):
            raise ValueError(f"{name} must be from 0 to {bound - 1}")
    if not (np.isfinite(trees.leaf).all() and np.isfinite(trees.base).all() and np.isfinite(trees.gain).all()):
        raise ValueError("a value is not finite")
    if np.isnan(trees.threshold).any() or np.isneginf(trees.threshold).any():
        raise ValueError("a threshold is not finite")
    return trees
