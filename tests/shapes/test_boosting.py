import json
import subprocess
import sys

import numpy as np
import pytest
from sklearn.ensemble import HistGradientBoostingRegressor

from mooring.core.errors import RequestError
from mooring.shapes import boosting
from mooring.shapes.boosting import (
    Boosting,
    average_loss,
    constant_score,
    differentiate_loss,
    fit_booster,
    measure_loss,
    out_of_fold_scores,
)
from mooring.shapes.trees import Trees

xgboost = pytest.importorskip("xgboost")
N = 400
RNG = np.random.default_rng(1)
X = RNG.standard_normal((N, 5))
MEAN = X[:, 0] ** 2 + X[:, 1] * X[:, 2] - 1
FOLD = np.arange(N) % 5
LOSSES = {
    "squared": (Boosting("squared"), 1e4 + 7 * (MEAN + RNG.standard_normal(N))),
    "logistic": (Boosting("logistic"), (RNG.random(N) < 1 / (1 + np.exp(-2 * MEAN))).astype(float)),
    "softmax": (Boosting("softmax", classes=3), np.digitize(MEAN + 0.3 * RNG.standard_normal(N), [-1, 0.5])),
    "poisson": (Boosting("poisson"), RNG.poisson(np.exp(np.clip(MEAN, -4, 2)))),
    "absolute": (Boosting("absolute"), MEAN + RNG.standard_normal(N)),
    "quantile": (Boosting("quantile", level=0.8), 3 * MEAN + RNG.standard_normal(N)),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_scores_are_the_margins_of_xgboost(loss):
    settings, y = LOSSES[loss]
    trees = fit_booster(X, y, settings, 20)
    target, scale = boosting._prepare_target(y, settings)
    base = np.tile(constant_score(target, settings), (N, 1))
    matrix = boosting._make_matrix(xgboost, X, target, settings, None)
    matrix.set_base_margin(boosting._as_margin(base, settings))
    theirs = xgboost.train(boosting._parameters(settings), matrix, 20)
    margin = theirs.predict(matrix, output_margin=True).reshape(N, -1)
    np.testing.assert_allclose(trees.score(X), scale[0] + scale[1] * margin, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("loss", LOSSES)
def test_derivatives_are_those_of_the_loss(loss):
    settings, y = LOSSES[loss][0], np.asarray(LOSSES[loss][1][:20], dtype=float)
    scores = np.random.default_rng(3).standard_normal((20, settings.classes))
    slopes = differentiate_loss(y, scores, settings)
    for k in range(settings.classes):
        step = 1e-6 * (np.arange(settings.classes) == k)
        up, down = (measure_loss(y, scores + sign * step, settings) for sign in (1, -1))
        np.testing.assert_allclose(slopes[:, k], (up - down) / 2e-6, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("loss", LOSSES)
def test_held_out_scores_beat_a_constant_and_are_the_same_in_every_run(loss):
    settings, y = LOSSES[loss]
    first, again = (out_of_fold_scores(X, y, FOLD, settings) for _ in range(2))
    assert (first.scores == again.scores).all() and first.booster.as_json() == again.booster.as_json()
    y = np.asarray(y, dtype=float)
    constant = average_loss(y, np.tile(constant_score(y, settings), (N, 1)), settings)
    assert average_loss(y, first.scores, settings) == pytest.approx(first.loss.min(), rel=1e-6)
    assert first.loss.min() < constant - 0.04 * abs(constant)
    fresh = np.random.default_rng(2).standard_normal((N, 5))
    mean = fresh[:, 0] ** 2 + fresh[:, 1] * fresh[:, 2] - 1
    assert abs(np.corrcoef(first.booster.score(fresh)[:, 0], mean)[0, 1]) > 0.5


@pytest.mark.parametrize("loss", LOSSES)
def test_json_gives_back_the_same_bits(loss):
    settings, y = LOSSES[loss]
    trees = fit_booster(X, y, settings, 7)
    copy = Trees.from_json(json.loads(json.dumps(trees.as_json(), allow_nan=False)))
    assert copy == trees and (copy.score(X) == trees.score(X)).all()


def test_a_row_is_scored_by_a_booster_without_its_fold():
    settings, held = Boosting("squared", max_trees=10), FOLD == 2
    y = 5 * MEAN + RNG.standard_normal(N)
    changed = y.copy()
    changed[held] = RNG.permutation(y[held])
    first, other = (out_of_fold_scores(X, target, FOLD, settings) for target in (y, changed))
    assert len(first.booster) == len(other.booster) == 10
    assert (first.scores[held] == other.scores[held]).all()
    assert (first.scores[~held] != other.scores[~held]).mean() > 0.9
    alone = fit_booster(X[~held], y[~held], settings, 10).score(X[held])
    assert np.corrcoef(alone[:, 0], first.scores[held, 0])[0, 1] > 0.97  # the bins are those of all rows


@pytest.mark.parametrize("loss", LOSSES)
def test_a_constant_offset_changes_nothing_but_the_base(loss):
    settings, y = LOSSES[loss]
    base = fit_booster(X, y, settings, 10).base
    offset = np.tile(base, (N, 1))
    np.testing.assert_allclose(
        base + fit_booster(X, y, settings, 10, offset=offset).score(X), fit_booster(X, y, settings, 10).score(X)
    )


def test_trees_learn_what_the_offset_misses():
    client = RNG.integers(0, 20, N)
    level = 10 * RNG.standard_normal(20)[client]
    y = level + np.sin(2 * X[:, 0]) + 0.1 * RNG.standard_normal(N)
    result = out_of_fold_scores(X, y, FOLD, Boosting(), offset=level[:, None])
    assert np.corrcoef(result.scores[:, 0], np.sin(2 * X[:, 0]))[0, 1] > 0.95
    assert np.corrcoef(result.booster.score(X)[:, 0], np.sin(2 * X[:, 0]))[0, 1] > 0.95
    assert result.loss.min() == pytest.approx(np.mean((y - level - result.scores[:, 0]) ** 2) / 2, rel=1e-4)


def test_noise_gets_almost_no_trees():
    y = np.random.default_rng(3).standard_normal(200)
    result = out_of_fold_scores(X[:200], y, FOLD[:200], Boosting())
    assert result.scores.std() < 0.2 and len(result.booster) < 20
    assert (result.booster.score(X) == result.booster.base).all() or len(result.booster) > 0


def test_trees_that_do_not_split_are_left_out():
    """They move all rows alike, towards what the offset lacks on average, and make no column."""
    x, y, fold = np.zeros((60, 2)), 5 + np.random.default_rng(0).normal(size=60), np.arange(60) % 3
    moved = fit_booster(x, y, Boosting(), 5, offset=np.zeros((60, 1)))
    assert len(moved) == 5 and not moved.has_splits and np.ptp(moved.score(x)) == 0
    held_out = out_of_fold_scores(x, y, fold, Boosting(), offset=np.zeros((60, 1)))
    assert len(held_out.booster) == 0 and held_out.loss.min() < 0.1 * held_out.loss[0]
    assert not held_out.scores.any()
    assert fit_booster(np.arange(60.0)[:, None], y, Boosting(), 5).has_splits


def test_as_good_as_the_boosting_of_scikit_learn():
    rng = np.random.default_rng(4)
    x = rng.standard_normal((3000, 6))
    mean = np.sin(2 * x[:, 0]) + x[:, 1] * x[:, 2]
    y = mean + rng.standard_normal(3000)
    ours = out_of_fold_scores(x[:1500], y[:1500], np.arange(1500) % 5, Boosting()).booster.score(x[1500:])[:, 0]
    theirs = HistGradientBoostingRegressor(random_state=0, early_stopping=True).fit(x[:1500], y[:1500])
    assert np.mean((ours - mean[1500:]) ** 2) < 1.05 * np.mean((theirs.predict(x[1500:]) - mean[1500:]) ** 2)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_constant_target_has_a_constant_score(loss):
    settings, y = LOSSES[loss]
    y = np.full(60, float(np.max(y)))
    result = out_of_fold_scores(X[:60], y, FOLD[:60], settings)
    assert np.isfinite(result.scores).all() and np.ptp(result.booster.score(X), axis=0).max() < 1e-6


def test_weights_are_repeated_rows():
    settings = Boosting(row_share=1.0, column_share=1.0)
    y = LOSSES["squared"][1]
    times = RNG.integers(1, 4, N)
    weighted = fit_booster(X, y, settings, 10, times.astype(float)).score(X)
    repeated = fit_booster(np.repeat(X, times, 0), np.repeat(y, times), settings, 10).score(X)
    assert np.corrcoef(weighted[:, 0], repeated[:, 0])[0, 1] > 0.99


@pytest.mark.parametrize(
    "settings, y, words",
    [
        (("logistic",), np.array([0.0, 2.0]), "class from 0 to 1, got 0 to 2"),
        (("poisson",), np.array([-1.0, 2.0]), "counts must be >= 0, got -1"),
        (("squared",), np.array([np.nan, 2.0]), "finite"),
        (("huber",), np.zeros(2), "must be one of squared, logistic"),
        (("softmax",), np.zeros(2), "classes > 1"),
    ],
)
def test_wrong_requests_are_one_sentence(settings, y, words):
    with pytest.raises(RequestError, match=words) as error:
        fit_booster(np.zeros((2, 1)), y, Boosting(*settings), 1)
    assert "\n" not in str(error.value)


def test_one_fold_is_refused():
    with pytest.raises(RequestError, match="at least 2 folds, got 1"):
        out_of_fold_scores(X, MEAN, np.zeros(N), Boosting())


def test_without_xgboost_the_sentence_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "xgboost", None)
    monkeypatch.setattr(boosting, "find_spec", lambda name: None)
    assert not boosting.has_boosting()
    with pytest.raises(RequestError, match=r"pip install 'mooring-fl\[trees\]'"):
        fit_booster(X, MEAN, Boosting(), 1)


@pytest.mark.processes
@pytest.mark.parametrize(("module", "imported"), [("mooring.cli", False), ("mooring", True)])
def test_a_command_imports_xgboost_without_scikit_learn(module, imported):
    code = f"""
import sys, {module}
from mooring.shapes.boosting import _import_xgboost
assert _import_xgboost().Booster and ("sklearn" in sys.modules) == {imported}
import sklearn.base
"""
    subprocess.run([sys.executable, "-c", code], check=True)
