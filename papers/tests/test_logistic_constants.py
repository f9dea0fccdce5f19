from itertools import product
from math import sqrt

import numpy as np
import pytest
from scipy.special import expit

from mooring.core.errors import RequestError
from mooring_papers.theory.logistic_constants import logistic_constants, logistic_strong_convexity

RNG = np.random.default_rng(9)


@pytest.mark.parametrize(("bound", "dim", "diameter"), [(1.0, 1, 0.3), (1.0, 3, 2.0), (0.5, 4, 6.0)])
def test_constants_bound_what_they_name(bound, dim, diameter):
    """Over the corners of the feature cube and models in W = {|w| <= D}, 0 in W: attained or not exceeded."""
    c = logistic_constants(bound, dim, diameter)
    x = bound * np.array(list(product((-1, 1), repeat=dim)))
    direction = RNG.normal(size=(300, dim))
    w = diameter * direction / np.linalg.norm(direction, axis=1, keepdims=True) * RNG.uniform(0, 1, (300, 1))
    w = np.vstack([w, np.full(dim, diameter / sqrt(dim)), np.zeros(dim)])
    margins = w @ x.T
    assert np.logaddexp(0, -margins).max() == pytest.approx(c.ell_max)  # at the corner; never above
    curvature = expit(margins) * expit(-margins)
    assert curvature.min() == pytest.approx(c.mu0)
    assert (curvature * np.sum(x**2, axis=1)).max() == pytest.approx(c.smooth)
    # gradient noise at the truth: E |grad|^2 over y, averaged over the uniform corners, largest at w = 0
    noise2 = np.mean(expit(margins) * expit(-margins) * np.sum(x**2, axis=1), axis=1)
    assert noise2.max() == pytest.approx(c.noise**2)


def test_corrections_matter():
    c = logistic_constants(1.0, 3, 2.0)
    reach = 2.0 * sqrt(3)
    printed = (np.exp(reach / 2) + np.exp(-reach)) ** -2
    assert c.mu0 == pytest.approx((np.exp(reach / 2) + np.exp(-reach / 2)) ** -2)
    assert printed > c.mu0  # the printed value promises more curvature than there is at the corner
    assert reach < c.ell_max <= reach + np.log(2)


def test_large_domains_do_not_overflow():
    c = logistic_constants(10.0, 10_000, 100.0)
    assert c.mu0 == 0.0 and c.ell_max == pytest.approx(1e5)


def test_strong_convexity_of_a_client():
    x = RNG.uniform(-1, 1, (50, 3))
    mu = logistic_strong_convexity(x, 1.0, 2.0)
    for _ in range(200):
        w = RNG.normal(size=3)
        w *= 2.0 * RNG.uniform() / np.linalg.norm(w)
        curvature = expit(x @ w) * expit(-x @ w)
        assert np.linalg.eigvalsh((x.T * curvature) @ x / 50)[0] >= mu > 0
    assert logistic_strong_convexity(x[:2], 1.0, 2.0) == pytest.approx(0.0, abs=1e-12)


def test_refusals():
    with pytest.raises(RequestError, match="diameter must be"):
        logistic_constants(1.0, 3, 0.0)
