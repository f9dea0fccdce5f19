import numpy as np
import pytest

from mooring.shapes import boosting
from mooring.shapes.boosting import Boosting, constant_score, fit_booster, measure_loss
from mooring.shapes.histograms import (
    ClientRows,
    bin_columns,
    find_derivatives,
    fit_by_histograms,
    gather_replies,
    grow_level,
    node_histograms,
    place_edges,
)
from mooring.shapes.quantiles import count_values

N = 500
RNG = np.random.default_rng(0)
X = RNG.standard_normal((N, 6))
X[:, 3] = np.round(X[:, 3])
MEAN = X[:, 0] ** 2 + X[:, 1] * X[:, 2] - 1
EDGES = place_edges(count_values(X), 32)
BINS = bin_columns(X, EDGES)
WIDTH = max(map(len, EDGES)) + 1
WHOLE = {"row_share": 1.0, "column_share": 1.0, "bins": 256}
LOSSES = {
    "squared": (Boosting("squared", **WHOLE), MEAN + RNG.standard_normal(N)),
    "logistic": (Boosting("logistic", **WHOLE), (RNG.random(N) < 1 / (1 + np.exp(-MEAN))).astype(float)),
    "softmax": (Boosting("softmax", classes=3, **WHOLE), np.digitize(MEAN, [-1, 1]).astype(float)),
    "poisson": (Boosting("poisson", **WHOLE), RNG.poisson(np.exp(np.clip(MEAN / 2, -5, 3))).astype(float)),
}


def make_clients(y, settings, parts, fold=None):
    """Clients of the rows `parts`; boosters of all folds and of all rows."""
    folds = [] if fold is None else list(np.unique(fold))
    trains = np.array([*(fold != label for label in folds), np.full(N, True)])
    base = np.array([constant_score(y[seen], settings) for seen in trains])
    clients = [
        ClientRows(BINS[:, i], y[i], trains[:, i], np.repeat(base[:, :, None], len(i), 2), key)
        for key, i in enumerate(parts)
    ]
    return clients, base


def fit(y, settings, parts, fold=None, trees=None):
    clients, base = make_clients(y, settings, parts, fold)
    return fit_by_histograms(gather_replies(clients, settings, WIDTH), EDGES, base, settings, trees)


@pytest.mark.parametrize("loss", LOSSES)
def test_one_client_is_xgboost_on_the_same_bins(loss):
    pytest.importorskip("xgboost")
    settings, y = LOSSES[loss]
    y, _ = boosting._prepare_target(y, settings)
    (ours,), _ = fit(y, settings, [np.arange(N)], trees=40)
    theirs = fit_booster(BINS.T.astype(float), y, settings, 40)
    np.testing.assert_allclose(ours.score(X), theirs.score(BINS.T), atol=5e-6)
    if loss != "poisson":  # bounded leaves have equal gains at many cuts
        used = np.isfinite(ours.threshold)
        assert (used == np.isfinite(theirs.threshold)).all() and (ours.feature == theirs.feature)[used].all()
        np.testing.assert_allclose(ours.gain, theirs.gain, rtol=1e-4)


@pytest.mark.parametrize("loss", ["squared", "softmax", "poisson"])
def test_several_clients_grow_the_trees_of_one(loss):
    settings, y = LOSSES[loss]
    (one,), _ = fit(y, settings, [np.arange(N)], trees=15)
    (three,), _ = fit(y, settings, np.split(np.arange(N), [7, 300]), trees=15)
    assert (one.feature == three.feature).all() and (one.threshold == three.threshold).all()
    np.testing.assert_allclose(one.leaf, three.leaf, atol=1e-12)


def test_boosters_of_folds_do_not_see_their_fold_and_choose_the_number_of_trees():
    settings = Boosting("squared", max_trees=60, patience=10, seed=3)
    y, fold = MEAN + RNG.standard_normal(N), np.arange(N) % 4
    boosters, curve = fit(y, settings, np.split(np.arange(N), [200]), fold)
    held = np.empty(N)
    for label, booster in enumerate(boosters[:4]):
        held[fold == label] = booster.score(X[fold == label])[:, 0]
    assert {len(booster) for booster in boosters} == {int(np.argmin(curve))} and len(boosters) == 5
    assert measure_loss(y, held[:, None], settings).sum() == pytest.approx(curve.min(), rel=1e-9)
    assert curve.min() < 0.9 * curve[0]
    changed = y.copy()
    changed[fold == 2] = RNG.permutation(y[fold == 2])
    other, _ = fit(changed, settings, np.split(np.arange(N), [200]), fold, trees=5)
    same, _ = fit(y, settings, np.split(np.arange(N), [200]), fold, trees=5)
    assert [a == b for a, b in zip(same, other)] == [False, False, True, False, False]


def test_messages_are_depth_per_tree():
    settings, y = LOSSES["squared"]
    clients, base = make_clients(y, settings, [np.arange(N)])
    send, sent = gather_replies(clients, settings, WIDTH), []
    fit_by_histograms(lambda step: (sent.append(step), send(step))[1], EDGES, base, settings, trees=4)
    assert len(sent) == 4 * settings.depth + 1


def test_histograms_are_sums_over_rows():
    node, g = RNG.integers(0, 2, (3, N)), RNG.standard_normal((3, N))
    h = RNG.random((3, N))
    sums = node_histograms(BINS, node, g, h, 2, WIDTH)
    rows = (node[1] == 1) & (BINS[4] == 5)
    np.testing.assert_allclose(sums[1, 1, 4, 5], [g[1, rows].sum(), h[1, rows].sum()])
    np.testing.assert_allclose(sums.sum((1, 3)), np.stack([g.sum(1), h.sum(1)], 1)[:, None].repeat(6, 1))


def test_a_level_is_split_where_the_loss_falls_most():
    settings = Boosting(ridge=0.5, min_leaf=3, **WHOLE)
    g, node = RNG.standard_normal(N), np.zeros((1, N), int)
    splits = grow_level(node_histograms(BINS, node, g[None], np.ones((1, N)), 1, WIDTH), settings, np.full(6, True))

    def gain(right):
        parts = (g[right], g[~right], g)
        return sum(sign * p.sum() ** 2 / (len(p) + 0.5) for sign, p in zip((1, 1, -1), parts))

    every = {
        (f, c): gain(BINS[f] > c)
        for f in range(6)
        for c in range(WIDTH)
        if min((BINS[f] > c).sum(), (BINS[f] <= c).sum()) >= 3
    }
    best = max(every, key=every.get)
    assert (splits.feature[0, 0], splits.cut[0, 0]) == best and splits.gain[0, 0] == pytest.approx(every[best])
    right = BINS[best[0]] > best[1]
    np.testing.assert_allclose(splits.child[0], [[g[~right].sum(), (~right).sum()], [g[right].sum(), right.sum()]])


@pytest.mark.parametrize("loss", [*LOSSES, "absolute", "quantile"])
def test_derivatives_are_those_of_the_loss(loss):
    settings = LOSSES[loss][0] if loss in LOSSES else Boosting(loss, level=0.3)
    y = LOSSES[loss][1][:20] if loss in LOSSES else MEAN[:20]
    score = RNG.standard_normal((1, settings.classes, 20))
    g, _ = find_derivatives(y, score, settings)
    for k in range(settings.classes):
        step = np.zeros_like(score)
        step[0, k] = 1e-6
        up, down = (measure_loss(y, (score + sign * step)[0].T, settings) for sign in (1, -1))
        np.testing.assert_allclose(g[0, k], (up - down) / 2e-6, atol=1e-5)


def test_edges_hold_about_equally_many_rows():
    assert [len(edge) for edge in EDGES] == [31, 31, 31, len(np.unique(X[:, 3])) - 1, 31, 31]
    assert np.bincount(BINS[0]).max() < 2.5 * N / 32
    assert (bin_columns(X, EDGES)[3] == np.unique(X[:, 3], return_inverse=True)[1]).all()
    assert bin_columns(np.zeros((0, 6)), EDGES).shape == (6, 0)
    assert [len(edge) for edge in place_edges(count_values(np.zeros((9, 1))), 32)] == [0]
