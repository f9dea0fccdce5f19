import numpy as np
import pytest
import torch
from sklearn.linear_model import LinearRegression

from mooring.core.errors import RequestError
from mooring.shapes import fitting
from mooring.shapes.boosting import Boosting
from mooring.shapes.fitting import fit_columns

pytest.importorskip("xgboost")
N = 600
RNG = np.random.default_rng(0)
X = torch.from_numpy(RNG.standard_normal((2 * N, 5)))
CLIENT = RNG.integers(0, 15, 2 * N)
LEVEL = 3 * RNG.standard_normal(15)[CLIENT]
MEAN = (X[:, 0] + X[:, 1].abs() + X[:, 2] * X[:, 3]).numpy()
Y = torch.from_numpy(LEVEL + MEAN + 0.5 * RNG.standard_normal(2 * N))
FOLD = np.arange(N) % 5
TRAIN, TEST = slice(0, N), slice(N, 2 * N)


def loss_of(columns_train, columns_test):
    target = (Y - torch.from_numpy(LEVEL)).numpy()
    model = LinearRegression().fit(columns_train, target[TRAIN])
    return np.mean((model.predict(columns_test) - target[TEST]) ** 2)


def test_extra_columns_explain_what_linear_ones_miss():
    fitted = fit_columns(X[TRAIN], Y[TRAIN], FOLD, Boosting(), offset=LEVEL[TRAIN, None])
    assert [i for i, _ in fitted.columns.splines] == [1] and not fitted.columns.products
    z = fitted.train(X[TRAIN])
    np.testing.assert_allclose(z.mean(0)[5:], 0, atol=1e-12)
    linear = loss_of(X[TRAIN], X[TEST])
    assert loss_of(z, fitted.columns(X[TEST])) < 0.45 * linear
    spline = fit_columns(X[TRAIN], Y[TRAIN], FOLD, Boosting(), offset=LEVEL[TRAIN, None], boosted=False)
    assert spline.scores is None and spline.columns.booster is None
    assert loss_of(spline.train(X[TRAIN]), spline.columns(X[TEST])) < 0.85 * linear


def test_products_are_found_if_asked_for():
    fitted = fit_columns(X[TRAIN], Y[TRAIN], FOLD, Boosting(), LEVEL[TRAIN, None], products=True, boosted=False)
    assert fitted.columns.products[0] == (2, 3) and len(fitted.columns.products) <= 5


@pytest.mark.parametrize(
    "settings, y",
    [
        (Boosting("logistic"), MEAN > 1),
        (Boosting("softmax", classes=3), np.digitize(MEAN, [0, 2])),
        (Boosting("poisson"), RNG.poisson(np.exp(np.clip(MEAN / 2, -3, 2)))),
        (Boosting("absolute"), MEAN),
        (Boosting("quantile", level=0.9), MEAN),
    ],
)
def test_every_loss_finds_the_bent_column(settings, y):
    fitted = fit_columns(X[TRAIN], torch.tensor(y, dtype=torch.float64)[TRAIN], FOLD, settings)
    assert 1 in [i for i, _ in fitted.columns.splines] and fitted.scores.shape == (N, settings.classes)
    assert torch.isfinite(fitted.train(X[TRAIN])).all()


def test_noise_gets_no_extra_columns():
    y = torch.from_numpy(RNG.standard_normal(N))
    fitted = fit_columns(X[TRAIN], y, FOLD, Boosting(), products=True)
    assert not fitted.columns.splines and not fitted.columns.products
    same = fit_columns(X[TRAIN], y, FOLD, Boosting(), boosted=False)
    assert (same.train(X[TRAIN]) == X[TRAIN]).all()


def test_without_xgboost_there_is_no_boosted_column(monkeypatch):
    monkeypatch.setattr(fitting, "has_boosting", lambda: False)
    assert fit_columns(X[TRAIN], Y[TRAIN], FOLD, Boosting()).columns.booster is None


def test_an_offset_that_is_not_finite_is_refused():
    with pytest.raises(RequestError, match="must be finite"):
        fit_columns(X[TRAIN], Y[TRAIN], FOLD, Boosting(), offset=np.full((N, 1), np.nan))
