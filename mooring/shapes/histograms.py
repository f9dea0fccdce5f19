"""Boosted trees of clients that keep their rows: level by level, from sums of gradients in bins.

Trees grow as in XGBoost's histogram method. For every node of a level, column and bin, the clients send the sums

    G = sum of g,   H = sum of h        g, h: first and second derivative of a row's loss at its score

over their rows there; the server adds them over clients and splits each node where

    G_left^2 / (H_left + ridge) + G_right^2 / (H_right + ridge) - G^2 / (H + ridge)

is largest. A leaf adds -rate G / (H + ridge). The sums of the last level contain those of the leaves, so that a tree
of depth d takes d messages. The boosters of all folds, the one of all rows and all classes are lanes of one message.

Symbols  M boosters, K classes, L = M K lanes, f columns, B bins, n = 2^level nodes
Limits   several clients are one; one is XGBoost with row_share = column_share = 1 and equal bins, to rounding
Departs  absolute and quantile losses: h = 1, where XGBoost moves a leaf to the quantile of its residuals
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from operator import add
from typing import Any, NamedTuple

import numpy as np

from mooring.core.seeds import generator, uniforms
from mooring.shapes.boosting import Boosting, measure_loss
from mooring.shapes.quantiles import bin_values
from mooring.shapes.trees import Trees

TIE_TOLERANCE = 1e-9  # relative; of splits with equal gains the first is taken, however the sums were rounded
MIN_GAIN = 1e-6  # XGBoost's: a split must lower the loss by more
POISSON_STEP = 0.7  # XGBoost's max_delta_step: bounds a leaf before `rate`, and h = exp(score + 0.7)
Edges = Sequence[np.ndarray]  # per column, rising float32: bin b holds edge[b - 1] <= x < edge[b]


class NodeSplits(NamedTuple):
    """Where the nodes of a level are split; gain 0: not at all."""

    feature: np.ndarray  # [L, n]
    cut: np.ndarray  # [L, n], rows in a bin above it go right
    gain: np.ndarray  # [L, n]
    child: np.ndarray  # [L, 2 n, 2], G and H of the children


class BoostingStep(NamedTuple):
    """A message to the clients: how the level before was split, then histograms of which level to send."""

    tree: int
    level: int
    splits: NodeSplits | None  # of the level before; at level 0 those of the last level of the tree before
    leaf: np.ndarray | None  # [L, 2^d] of the tree before, at level 0


class HistogramReply(NamedTuple):
    """A client's sums; those of clients are added."""

    histogram: np.ndarray  # [L, n, f, B, 2]
    loss: np.ndarray  # [M], of the rows that each booster does not see, at its score before this tree

    def __add__(self, other: HistogramReply) -> HistogramReply:  # type: ignore[override]
        return HistogramReply(self.histogram + other.histogram, self.loss + other.loss)


class ClientRows(NamedTuple):
    """A client's rows between two messages."""

    bins: np.ndarray  # [f, N], uint8
    y: np.ndarray  # [N]
    trains: np.ndarray  # [M, N], whether booster m sees a row
    score: np.ndarray  # [M, K, N]
    key: int  # the client's number in its draws
    node: Any = None  # [L, N]
    g: Any = None  # [L, N]
    h: Any = None  # [L, N]


def place_edges(counts: np.ndarray, bins: int) -> list[np.ndarray]:
    """Edges of at most `bins` bins of about equally many rows, from the counts of all clients [f, BINS]."""
    values, edges = bin_values(), []
    for count in counts:
        places, rows = values[count > 0], count[count > 0]
        between = (places[:-1] + places[1:]) / 2
        part = np.ceil(np.cumsum(rows) / max(rows.sum(), 1) * bins)  # from 1 to bins
        last = np.diff(part) > 0 if len(rows) > bins else np.full(len(between), True)
        edges.append(between[last].astype(np.float32))
    return edges


def bin_columns(x: np.ndarray, edges: Edges) -> np.ndarray:
    """The bin of every value of x [N, f], by columns: [f, N]."""
    columns = np.asarray(x, dtype=np.float32).T
    bins = [np.searchsorted(edge, column, side="right") for edge, column in zip(edges, columns)]
    return np.array(bins, dtype=np.uint8).reshape(len(edges), len(x))


def node_histograms(
    bins: np.ndarray, node: np.ndarray, g: np.ndarray, h: np.ndarray, nodes: int, width: int
) -> np.ndarray:
    """Sums of g and h per lane, node, column and bin: [L, nodes, f, width, 2]."""
    sums = np.empty((len(node), len(bins), nodes * width, 2))
    for lane, (place, first, second) in enumerate(zip(node, g, h)):
        used = np.flatnonzero(second)
        offset, first, second = place[used] * width, first[used], second[used]
        for column, values in enumerate(bins):
            index = offset + values[used]
            sums[lane, column, :, 0] = np.bincount(index, first, nodes * width)
            sums[lane, column, :, 1] = np.bincount(index, second, nodes * width)
    return sums.reshape(len(node), len(bins), nodes, width, 2).swapaxes(1, 2)


def grow_level(histogram: np.ndarray, settings: Boosting, columns: np.ndarray) -> NodeSplits:
    """The best split of every node from the sums over clients [L, n, f, B, 2], among these columns [f] (booleans)."""
    left = histogram.cumsum(3)
    total = left[:, :, 0, -1]
    right = total[:, :, None, None] - left
    gain = _explain(left, settings) + _explain(right, settings) - _explain(total, settings)[:, :, None, None]
    allowed = (np.minimum(left[..., 1], right[..., 1]) >= settings.min_leaf) & columns[:, None]
    gain = np.where(allowed & (gain > MIN_GAIN), gain, 0.0).reshape(*total.shape[:2], -1)
    best = (gain >= (1 - TIE_TOLERANCE) * gain.max(-1, keepdims=True)).argmax(-1)
    feature, cut = np.divmod(best, histogram.shape[3])
    lane, node = np.ogrid[: len(histogram), : histogram.shape[1]]
    gain = gain[lane, node, best]
    first = left[lane, node, feature, cut]
    split = (gain > 0)[..., None]
    child = np.where(split[:, :, None], np.stack([first, total - first], 2), total[:, :, None])  # or both the node's
    return NodeSplits(feature, cut, gain, child.reshape(len(histogram), -1, 2))


def split_rows(bins: np.ndarray, node: np.ndarray, splits: NodeSplits) -> np.ndarray:
    """The nodes of the next level that rows in nodes [L, N] go to. Rows of a node without split go left."""
    lane = np.arange(len(node))[:, None]
    above = bins[splits.feature[lane, node], np.arange(node.shape[1])] > splits.cut[lane, node]
    return 2 * node + (above & (splits.gain[lane, node] > 0))


def find_derivatives(y: np.ndarray, score: np.ndarray, settings: Boosting) -> tuple[np.ndarray, np.ndarray]:
    """First and second derivatives of the losses of y [N] at scores [M, K, N]: twice [M, K, N]."""
    if settings.loss == "squared":
        return score - y, np.ones_like(score)
    if settings.loss == "logistic":
        p = 1 / (1 + np.exp(-score))
        return p - y, np.maximum(p * (1 - p), 1e-16)
    if settings.loss == "poisson":
        return np.exp(score) - y, np.exp(score + POISSON_STEP)
    if settings.loss == "softmax":
        p = np.exp(score - np.logaddexp.reduce(score, axis=1, keepdims=True))
        return p - (y == np.arange(settings.classes)[:, None]), np.maximum(2 * p * (1 - p), 1e-16)
    level = settings.level if settings.loss == "quantile" else 0.5
    return np.where(score > y, 1 - level, -level), np.ones_like(score)


def answer_step(
    rows: ClientRows, step: BoostingStep, settings: Boosting, width: int
) -> tuple[ClientRows, HistogramReply]:
    """A client's rows after a message, and the sums that it sends."""
    boosters, classes, size = rows.score.shape
    node = np.zeros((boosters * classes, size), np.int64) if rows.node is None else rows.node
    if step.splits is not None:
        node = split_rows(rows.bins, node, step.splits)
    if step.level == 0:
        if step.leaf is not None:
            leaf = np.take_along_axis(step.leaf, node, 1)
            rows = rows._replace(score=rows.score + leaf.reshape(rows.score.shape))
        node = np.zeros_like(node)
        drawn = uniforms(settings.seed, "algorithm", rows.key, step.tree, np.arange(size)) < settings.row_share
        seen = (rows.trains & drawn)[:, None]
        g, h = ((part * seen).reshape(node.shape) for part in find_derivatives(rows.y, rows.score, settings))
        rows = rows._replace(g=g, h=h)
    rows = rows._replace(node=node)
    loss = np.array([measure_loss(rows.y, score.T, settings) @ ~m for score, m in zip(rows.score, rows.trains)])
    return rows, HistogramReply(node_histograms(rows.bins, node, rows.g, rows.h, 2**step.level, width), loss)


def fit_by_histograms(
    send: Callable[[BoostingStep], HistogramReply],
    edges: Edges,
    base: np.ndarray,
    settings: Boosting,
    trees: int | None = None,
) -> tuple[list[Trees], np.ndarray]:
    """Boosters [M] that start from base [M, K], and their held-out loss by number of trees.

    `send` gives a message to all clients and returns the sum of their replies. Without a number of trees, it is where
    the held-out loss is lowest: the loss of each booster on the rows that it does not see.
    """
    parts: list[tuple[np.ndarray, ...]] = []
    curve: list[float] = []
    splits: Any = None
    leaf = None
    for tree in range((settings.max_trees if trees is None else trees) + 1):
        columns = generator(settings.seed, "algorithm", tree).random(len(edges)) < settings.column_share
        columns = columns if columns.any() else ~columns
        levels = []
        for level in range(settings.depth):
            reply = send(BoostingStep(tree, level, splits, leaf if level == 0 else None))
            if level == 0:
                curve.append(float(reply.loss.sum()))
                stop = tree == trees if trees is not None else tree - int(np.argmin(curve)) >= settings.patience
                if stop or tree == settings.max_trees:
                    best = int(np.argmin(curve)) if trees is None else trees
                    return _collect_trees(parts[:best], edges, base, settings), np.array(curve)
            splits = grow_level(reply.histogram, settings, columns)
            levels.append(splits)
        leaf = settings.rate * _find_leaf(splits.child, settings)
        parts.append((*(np.concatenate(part, 1) for part in list(zip(*levels))[:3]), leaf))
    raise AssertionError("unreachable")


def gather_replies(
    clients: list[ClientRows], settings: Boosting, width: int
) -> Callable[[BoostingStep], HistogramReply]:
    """A `send` for clients in this process."""

    def send(step: BoostingStep) -> HistogramReply:
        clients[:], replies = zip(*(answer_step(rows, step, settings, width) for rows in clients))
        return reduce(add, replies)

    return send


def _find_leaf(sums: np.ndarray, settings: Boosting) -> np.ndarray:
    """The value of a leaf with these sums G and H, before `rate`."""
    leaf = -sums[..., 0] / np.maximum(sums[..., 1] + settings.ridge, 1e-300)
    return leaf.clip(-POISSON_STEP, POISSON_STEP) if settings.loss == "poisson" else leaf


def _explain(sums: np.ndarray, settings: Boosting) -> np.ndarray:
    """How much a leaf with these sums lowers the loss, times two."""
    leaf = _find_leaf(sums, settings)
    return -(2 * sums[..., 0] + (sums[..., 1] + settings.ridge) * leaf) * leaf


def _collect_trees(
    parts: list[tuple[np.ndarray, ...]], edges: Edges, base: np.ndarray, settings: Boosting
) -> list[Trees]:
    boosters, classes = base.shape
    thresholds = np.full((len(edges), max((len(edge) for edge in edges), default=0) + 1), np.inf, np.float32)
    for row, edge in zip(thresholds, edges):
        row[: len(edge)] = edge
    nodes = 2**settings.depth - 1
    empty = [np.zeros((0, len(base) * classes, size)) for size in (nodes, nodes, nodes, nodes + 1)]
    feature, cut, gain, leaf = (np.stack(part) for part in zip(*parts)) if parts else empty
    threshold = np.where(gain > 0, thresholds[feature.astype(int), cut.astype(int)], np.float32(np.inf))
    result = []
    for m in range(boosters):
        lane = slice(m * classes, (m + 1) * classes)
        where, size, total = feature[:, lane].reshape(-1, nodes).astype(int), len(parts) * classes, gain[:, lane]
        used = np.bincount(where.ravel(), total.ravel(), len(edges))
        cuts, leaves = threshold[:, lane].reshape(size, nodes), leaf[:, lane].reshape(size, nodes + 1)
        result.append(Trees(len(edges), base[m], where, cuts, leaves, np.arange(size) % classes, used))
    return result
