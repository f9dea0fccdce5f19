"""Boosted trees from histograms of gradients: sums that clients may send, so that their rows stay with them.

    G, H      sums of first and second derivatives of the loss over the rows of a node and a bin
    gain      G_l^2 / (H_l + ridge) + G_r^2 / (H_r + ridge) - G^2 / (H + ridge)
    leaf      -rate G / (H + ridge)

Several boosters grow side by side, level by level: one without each fold of the rows, and one of all rows. Trees add to
given scores. The number of trees is where the held-out loss of all folds is lowest (as in `boosting.py`).

Source   Chen, Guestrin. XGBoost: a scalable tree boosting system. KDD 2016 (gain, leaf).
Departs  all rows grow every tree, and thresholds are edges of the grid of `quantiles.py`, which all clients share
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from mooring.shapes.boosting import Boosting
from mooring.shapes.quantiles import BIN_WIDTH, LINEAR_WIDTH, MAX_ARCSINH
from mooring.shapes.trees import Trees

MAX_POISSON_LEAF = 0.7  # of counts, whose losses are steep
MIN_GAIN = 1e-9


class Thresholds(NamedTuple):
    """Where columns may be split: those of column j are values[start[j] : start[j + 1]], rising."""

    values: np.ndarray  # [B], float32
    start: np.ndarray  # [f + 1]

    @property
    def bins(self) -> int:
        """Bins of all columns: one more than thresholds, of each."""
        return len(self.values) + len(self.start) - 1


class GrowingTrees(NamedTuple):
    """The trees of several boosters, complete but for the last one while it grows; its leaves are 0."""

    feature: np.ndarray  # [boosters, T, 2^d - 1], int64
    threshold: np.ndarray  # [boosters, T, 2^d - 1], float32; inf where a branch has ended
    leaf: np.ndarray  # [boosters, T, 2^d]


def choose_thresholds(counts: np.ndarray, bins: int) -> Thresholds:
    """At most `bins` - 1 thresholds per column, at quantiles of counts [f, BINS] of all clients' rows."""
    values: list[np.ndarray] = []
    for count in counts:
        share = np.cumsum(count) / max(count.sum(), 1)
        occupied = np.flatnonzero(count)[:-1]  # a threshold is the upper edge of an occupied bin
        if len(occupied) > bins - 1:
            wanted = np.searchsorted(share[occupied], np.arange(1, bins) / bins)
            occupied = occupied[np.unique(wanted.clip(0, len(occupied) - 1))]
        values.append(LINEAR_WIDTH * np.sinh(-MAX_ARCSINH + BIN_WIDTH * (occupied + 1.0)))
    start = np.cumsum([0, *map(len, values)])
    return Thresholds(np.concatenate(values).astype(np.float32), start)


def find_bins(x: np.ndarray, thresholds: Thresholds) -> np.ndarray:
    """[N, f]: the bin of each cell among the bins of all columns."""
    x = np.asarray(x, dtype=np.float32)
    out = np.empty(x.shape, dtype=np.int64)
    for j in range(x.shape[1]):
        own = thresholds.values[thresholds.start[j] : thresholds.start[j + 1]]
        out[:, j] = thresholds.start[j] + j + np.searchsorted(own, x[:, j], side="right")
    return out


def find_nodes(x: np.ndarray, feature: np.ndarray, threshold: np.ndarray, level: int) -> np.ndarray:
    """[N]: the node of a level of one tree that each row is in, from the left."""
    x, rows = np.asarray(x, dtype=np.float32), np.arange(len(x))
    place = np.zeros(len(x), dtype=np.int64)
    for depth in range(level):
        node = 2**depth - 1 + place
        place = 2 * place + (x[rows, feature[node]] >= threshold[node])
    return place


def score_trees(x: np.ndarray, feature: np.ndarray, threshold: np.ndarray, leaf: np.ndarray) -> np.ndarray:
    """[N]: the sum of the leaves [T, 2^d] that rows fall into."""
    depth = leaf.shape[1].bit_length() - 1
    out = np.zeros(len(x))
    for k in range(len(leaf)):
        out += leaf[k][find_nodes(x, feature[k], threshold[k], depth)]
    return out


def second_derivative(scores: np.ndarray, loss: str) -> np.ndarray:
    """Of the loss of each row by its score [N]."""
    if loss == "logistic":
        p = 1 / (1 + np.exp(-scores))
        return p * (1 - p)
    return np.exp(scores) if loss == "poisson" else np.ones_like(scores)


def sum_histogram(
    bins: np.ndarray, node: np.ndarray, nodes: int, total: int, gradient: np.ndarray, curvature: np.ndarray
) -> np.ndarray:
    """[nodes, bins, 2]: sums of derivatives [N] over rows by their node [N] and bins [N, f]."""
    place = (node[:, None] * total + bins).ravel()
    width = bins.shape[1]
    sums = [np.bincount(place, np.repeat(part, width), nodes * total) for part in (gradient, curvature)]
    return np.stack(sums, -1).reshape(nodes, total, 2)


def split_nodes(
    histogram: np.ndarray, thresholds: Thresholds, settings: Boosting
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The best splits of nodes [nodes, bins, 2]: columns, thresholds, gains, and sums of the children [nodes, 2, 2].

    A node without a split that gains keeps its sums in both children, and its threshold is inf.
    """
    nodes = len(histogram)
    totals = histogram[:, thresholds.start[0] : thresholds.start[1] + 1].sum(1)  # any column's bins have all rows
    feature, value = np.zeros(nodes, np.int64), np.full(nodes, np.inf, np.float32)
    gain, children = np.full(nodes, MIN_GAIN), np.repeat(totals[:, None], 2, 1)

    def fit(sums: np.ndarray) -> np.ndarray:
        return sums[..., 0] ** 2 / (sums[..., 1] + settings.ridge)

    for j in range(len(thresholds.start) - 1):
        first, last = thresholds.start[j] + j, thresholds.start[j + 1] + j
        left = np.cumsum(histogram[:, first:last], 1)
        if not left.shape[1]:
            continue
        right = totals[:, None] - left
        is_large = (left[..., 1] >= settings.min_leaf) & (right[..., 1] >= settings.min_leaf)
        gains = np.where(is_large, fit(left) + fit(right) - fit(totals)[:, None], -np.inf)
        best = gains.argmax(1)
        for n in np.flatnonzero(gains[np.arange(nodes), best] > gain):
            k = best[n]
            feature[n], value[n], gain[n] = j, thresholds.values[thresholds.start[j] + k], gains[n, k]
            children[n] = left[n, k], right[n, k]
    return feature, value, np.where(np.isinf(value), 0.0, gain), children


def grow_boosters(
    sum_histograms: Callable[[GrowingTrees, int], tuple[np.ndarray, float]],
    boosters: int,
    thresholds: Thresholds,
    features: int,
    settings: Boosting,
) -> tuple[list[Trees], list[float]]:
    """Boosters with as many trees as the held-out loss prefers, and that loss after each number of trees.

    `sum_histograms(trees, level)` returns the histograms [boosters, nodes, bins, 2] of a level of the last tree, and
    the held-out loss of the trees before it.
    """
    inner, leaves = 2**settings.depth - 1, 2**settings.depth
    trees = GrowingTrees(
        np.zeros((boosters, 0, inner), np.int64),
        np.zeros((boosters, 0, inner), np.float32),
        np.zeros((boosters, 0, leaves)),
    )
    gains = np.zeros((boosters, 0, features))
    curve: list[float] = []
    while True:
        trees = GrowingTrees(
            np.concatenate([trees.feature, np.zeros((boosters, 1, inner), np.int64)], 1),
            np.concatenate([trees.threshold, np.full((boosters, 1, inner), np.inf, np.float32)], 1),
            np.concatenate([trees.leaf, np.zeros((boosters, 1, leaves))], 1),
        )
        gains = np.concatenate([gains, np.zeros((boosters, 1, features))], 1)
        sums = np.zeros((boosters, leaves, 2))
        for level in range(settings.depth):
            histograms, loss = sum_histograms(trees, level)
            if level == 0:
                curve.append(loss)
                best = int(np.argmin(curve))
                if len(curve) - 1 - best >= settings.patience or len(curve) > settings.max_trees:
                    return [_complete(trees, gains, b, best, features) for b in range(boosters)], curve
            width = 2**level
            for b in range(boosters):
                feature, value, gain, children = split_nodes(histograms[b], thresholds, settings)
                places = slice(width - 1, 2 * width - 1)
                trees.feature[b, -1, places], trees.threshold[b, -1, places] = feature, value
                np.add.at(gains[b, -1], feature, gain)
                if level:
                    # A node whose parent has ended has no rows of its own: it keeps its parent's sums.
                    ended = np.repeat(np.isinf(trees.threshold[b, -1, width // 2 - 1 : width - 1]), 2)
                    children = np.where(ended[:, None, None], sums[b, :width][:, None], children)
                sums[b, : 2 * width] = children.reshape(-1, 2)
        leaf = -settings.rate * sums[..., 0] / (sums[..., 1] + settings.ridge)
        trees.leaf[:, -1] = leaf.clip(-MAX_POISSON_LEAF, MAX_POISSON_LEAF) if settings.loss == "poisson" else leaf


def _complete(trees: GrowingTrees, gains: np.ndarray, b: int, count: int, features: int) -> Trees:
    feature, threshold, leaf = (part[b, :count] for part in trees)
    output, gain = np.zeros(count, np.int64), gains[b, :count].sum(0)
    return Trees(features, np.zeros(1), feature, threshold, leaf, output, gain)
