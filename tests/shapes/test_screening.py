from functools import reduce
from operator import add

import numpy as np
import pytest
import statsmodels.api as sm
import torch

from mooring.shapes.screening import (
    MAX_PAIRS,
    list_pairs,
    multiply_columns,
    screen_products,
    screen_splines,
    sum_candidates,
)
from mooring.shapes.splines import spline_basis

RNG = np.random.default_rng(0)
X = RNG.standard_normal((600, 5))
PAIRS = list_pairs(range(5))


def screen(y, x=X, pairs=PAIRS):
    x, r = torch.from_numpy(x), torch.from_numpy(y - y.mean())
    return screen_products(sum_candidates(x, multiply_columns(x, pairs), r), pairs)


def test_planted_products_are_found_strongest_first():
    y = X[:, 0] + 1.0 * X[:, 1] * X[:, 3] - 0.6 * X[:, 0] * X[:, 4] + RNG.standard_normal(600)
    assert screen(y) == ((1, 3), (0, 4))


def test_noise_has_no_products():
    found = [screen(X[:, 0] + np.random.default_rng(seed).standard_normal(600)) for seed in range(200)]
    assert sum(map(bool, found)) <= 8  # 1 % each


def test_the_share_is_that_of_the_regression_with_the_product():
    y = X[:, 0] + 0.3 * X[:, 1] * X[:, 3] + RNG.standard_normal(600)
    q = multiply_columns(torch.from_numpy(X), [(1, 3)]).numpy()
    without = sm.OLS(y, sm.add_constant(X)).fit()
    with_it = sm.OLS(y, sm.add_constant(np.hstack([X, q]))).fit()
    share = 1 - with_it.ssr / without.ssr
    for bound, expected in ((share * 0.999, ((1, 3),)), (share * 1.001, ())):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("mooring.shapes.screening.MIN_PRODUCT_SHARE", bound)
            patch.setattr("mooring.shapes.screening.TEST_LEVEL", 0.5)
            assert screen(y, pairs=[(1, 3)]) == expected


def test_sums_of_clients_find_the_same_products():
    y = torch.from_numpy(X[:, 1] * X[:, 3] + RNG.standard_normal(600))
    x = torch.from_numpy(X)
    parts = [
        sum_candidates(a, multiply_columns(a, PAIRS), b) for a, b in zip(x.split([100, 1, 499]), y.split([100, 1, 499]))
    ]
    found = screen_products(reduce(add, parts), PAIRS)
    assert found == screen(y.numpy()) and found[0] == (1, 3)


def test_a_product_that_the_columns_explain_is_left_out():
    x = np.column_stack([X[:, 0], X[:, 0], X[:, 0] ** 2, np.ones(600), np.sign(X[:, 1])])
    assert screen(X[:, 0] ** 2 + 0.1 * X[:, 1], x) == ()


def test_few_rows_and_many_columns():
    assert screen(X[:6, 0], X[:6]) == () and screen(X[:, 0], pairs=[]) == ()
    assert len(list_pairs(range(100))) == MAX_PAIRS


def test_splines_of_bent_columns_pass():
    x = torch.from_numpy(X)
    splines = [(i, (-1.5, -0.4, 0.4, 1.5)) for i in range(5)]
    q = torch.cat([spline_basis(x[:, i], knots) for i, knots in splines], 1)
    y = X[:, 0] + 0.5 * X[:, 3] ** 2 + np.abs(X[:, 1]) + RNG.standard_normal(600)
    passed = screen_splines(sum_candidates(x, q, torch.from_numpy(y)), splines)
    assert [i for i, _ in passed] == [1, 3]
    assert screen_splines(sum_candidates(x, q[:, :0], torch.from_numpy(y)), []) == ()
