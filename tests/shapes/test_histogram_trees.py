"""Trees from histograms: the splits, leaves and held-out losses of a naive search over all rows."""

import numpy as np
import pytest

from mooring.shapes.boosting import Boosting, differentiate_loss, measure_loss
from mooring.shapes.histogram_trees import (
    choose_thresholds,
    find_bins,
    find_nodes,
    grow_boosters,
    score_trees,
    second_derivative,
    sum_histogram,
)
from mooring.shapes.quantiles import count_values

SETTINGS = Boosting("squared", depth=2, rate=0.5, ridge=1.0, min_leaf=4, max_trees=3, patience=3, bins=8)


def table(n=60, seed=0):
    rng = np.random.default_rng(seed)
    x = np.column_stack([rng.normal(size=n), rng.integers(0, 2, n), rng.normal(size=n)])
    return x, np.sin(2 * x[:, 0]) + x[:, 1] * x[:, 2] + 0.1 * rng.normal(size=n)


def ask_here(x, y, fold, thresholds, settings):
    """Answers of rows in memory, in parts by fold; the last booster sees all."""

    def ask(trees, level):
        boosters = len(trees.feature)
        out, loss = np.zeros((boosters, 2**level, thresholds.bins, 2)), 0.0
        for k in np.unique(fold):
            some, target = x[fold == k], y[fold == k]
            for b in range(boosters):
                scores = score_trees(some, *(part[b] for part in trees))[:, None]
                if b == k:
                    loss += measure_loss(target, scores, settings).sum()
                    continue
                g, h = (
                    differentiate_loss(target, scores, settings)[:, 0],
                    second_derivative(scores[:, 0], settings.loss),
                )
                node = find_nodes(some, trees.feature[b, -1], trees.threshold[b, -1], level)
                out[b] += sum_histogram(find_bins(some, thresholds), node, 2**level, thresholds.bins, g, h)
        return out, loss / len(y)

    return ask


def naive_tree(x, y, thresholds, score, settings, depth):
    """{leaf path: value} by recursion over rows."""
    g, h = score - y, np.ones(len(y))

    def grow(rows, left):
        def fit(keep):
            return g[keep].sum() ** 2 / (h[keep].sum() + settings.ridge)

        best = (1e-9, None, None)
        for j in range(x.shape[1]) if left else ():
            for t in thresholds.values[thresholds.start[j] : thresholds.start[j + 1]]:
                right = rows & (x[:, j].astype(np.float32) >= t)
                other = rows & ~right
                if min(right.sum(), other.sum()) >= settings.min_leaf:
                    gain = fit(right) + fit(other) - fit(rows)
                    best = max(best, (gain, right, other), key=lambda split: split[0])
        if best[1] is None:
            return np.where(rows, -settings.rate * g[rows].sum() / (h[rows].sum() + settings.ridge), 0.0)
        return grow(best[1], left - 1) + grow(best[2], left - 1)

    return grow(np.ones(len(y), bool), depth)


def test_trees_are_those_of_a_naive_search():
    x, y = table()
    thresholds = choose_thresholds(count_values(x), SETTINGS.bins)
    fold = np.arange(len(y)) % 2
    *without, of_all = grow_boosters(ask_here(x, y, fold, thresholds, SETTINGS), 3, thresholds, 3, SETTINGS)[0]
    for trees, keep in ((of_all, fold >= 0), (without[0], fold != 0), (without[1], fold != 1)):
        score = np.zeros(keep.sum())
        assert len(trees) >= 1
        for k in range(len(trees)):
            score = score + naive_tree(x[keep], y[keep], thresholds, score, SETTINGS, 2)
            part = score_trees(x[keep], trees.feature[: k + 1], trees.threshold[: k + 1], trees.leaf[: k + 1])
            np.testing.assert_allclose(part, score, atol=1e-12)
        np.testing.assert_allclose(trees.score(x[keep])[:, 0], score, atol=1e-12)


def test_the_held_out_loss_chooses_the_number_of_trees():
    x, y = table(n=200)
    noise = np.random.default_rng(1).normal(size=200)
    settings = Boosting("squared", depth=3, rate=0.5, max_trees=20, patience=4, bins=16)
    for target, expected in ((y, True), (noise, False)):
        thresholds = choose_thresholds(count_values(x), settings.bins)
        ask = ask_here(x, target, np.arange(200) % 3, thresholds, settings)
        boosters, curve = grow_boosters(ask, 4, thresholds, 3, settings)
        assert len(boosters[-1]) == int(np.argmin(curve)) and (len(boosters[-1]) >= 3) == expected
        assert curve[0] == pytest.approx(float(np.mean(target**2)) / 2)
        held = [boosters[k].score(x[np.arange(200) % 3 == k])[:, 0] for k in range(3)]
        loss = sum(((target[np.arange(200) % 3 == k] - held[k]) ** 2).sum() / 2 for k in range(3)) / 200
        assert loss == pytest.approx(min(curve))


def test_thresholds_lie_at_quantiles_and_split_two_values():
    x, _ = table(n=1_000)
    thresholds = choose_thresholds(count_values(x), 8)
    one, two, three = (thresholds.values[a:b] for a, b in zip(thresholds.start, thresholds.start[1:]))
    assert len(one) == len(three) == 7 and len(two) == 1 and 0 < two[0] < 1
    shares = [(x[:, 0] < t).mean() for t in one]
    np.testing.assert_allclose(shares, np.arange(1, 8) / 8, atol=0.02)
    bins = find_bins(x, thresholds)
    assert bins.min() == 0 and bins.max() == thresholds.bins - 1
    np.testing.assert_array_equal(bins[:, 1] == bins[:, 1].max(), x[:, 1] == 1)


@pytest.mark.parametrize("loss", ["squared", "logistic", "poisson"])
def test_second_derivatives_are_slopes_of_first_ones(loss):
    s, y, step = np.linspace(-2, 2, 9), np.ones(9), 1e-6
    ahead, behind = (differentiate_loss(y, (s + move)[:, None], Boosting(loss))[:, 0] for move in (step, -step))
    np.testing.assert_allclose(second_derivative(s, loss), (ahead - behind) / (2 * step), rtol=1e-6)
