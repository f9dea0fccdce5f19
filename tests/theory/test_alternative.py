from math import sqrt

import numpy as np
import pytest

from mooring.core.errors import RequestError
from mooring.theory import alternative as theory
from mooring.theory.lambda_aer import lambda_aer, regime_borders
from mooring.theory.upper_bounds import fedavg_aer, local_aer
from mooring.theory.weights import size_weights, uniform_weights

RNG = np.random.default_rng(8)


def test_switches_once_and_exactly_at_the_threshold():
    n = np.array([20, 30, 50])
    threshold = theory.threshold_squared(0.5, 2.0, n)
    assert threshold == pytest.approx(2.0 * 3 / (0.5 * 100))
    radius = sqrt(threshold)
    assert theory.choose_model(radius * (1 - 1e-12), 0.5, 2.0, n) == "global"
    assert theory.choose_model(radius * (1 + 1e-12), 0.5, 2.0, n) == "local"
    decisions = [theory.choose_model(r, 0.5, 2.0, n) for r in np.linspace(0, 2, 400)]
    assert decisions == ["global"] * decisions.count("global") + ["local"] * decisions.count("local")
    assert set(decisions) == {"global", "local"}
    exact = np.array([1, 1, 2])  # threshold 1 * 3/(0.75 * 4) = 1, exact in floating point
    assert theory.choose_model(1.0, 0.75, 1.0, exact) == "global"
    assert theory.choose_model(np.nextafter(1.0, 2.0), 0.75, 1.0, exact) == "local"


def test_threshold_for_weights():
    n = np.array([10, 40, 400])
    assert theory.threshold_squared(0.5, 2.0, n, size_weights(n)) == pytest.approx(
        theory.threshold_squared(0.5, 2.0, n)
    )
    # where FedAvg's heterogeneity term meets the risk bound of training alone
    for p in (uniform_weights(3), RNG.dirichlet(np.ones(3))):
        radius = sqrt(theory.threshold_squared(0.5, 2.0, n, p))
        heterogeneity = fedavg_aer(radius, 0.5, 3.0, 2.0, p, n) - fedavg_aer(0.0, 0.5, 3.0, 2.0, p, n)
        assert heterogeneity == pytest.approx(local_aer(0.5, 3.0, 2.0, p, n))


def test_crossing_is_where_both_errors_are_equal():
    """l = mu/2 |w - z|^2: error alone tr(cov)/n, error together tr(cov)/N + R^2, noise^2 = mu^2 tr(cov)."""
    mu, m, n, dim, runs = 0.3, 8, 25, 4, 4000
    noise = mu * sqrt(dim)
    radius = theory.crossing_radius(mu, noise, n) * sqrt(1 - 1 / m)
    truths = np.array([radius, 0, 0, 0]) * np.r_[np.ones(4), -np.ones(4)][:, None]
    means = truths + RNG.normal(size=(runs, m, dim)) / sqrt(n)
    alone = np.mean(np.sum((means - truths) ** 2, axis=2))
    together = np.mean(np.sum((means.mean(1, keepdims=True) - truths) ** 2, axis=2))
    assert together == pytest.approx(alone, rel=0.05)
    assert theory.crossing_radius(mu, noise, [25, 100]) == pytest.approx([2 / 5, 2 / 10])


def test_crossing_follows_the_units_of_w():
    one = theory.crossing_radius(0.5, 2.0, 30)
    assert theory.crossing_radius(0.5 / 9, 2.0 / 3, 30) == pytest.approx(3 * one)  # w -> 3 w


def test_fedprox_regimes_for_equal_clients():
    m, n = 10, 100
    p, sizes, total = uniform_weights(m), np.full(m, n), 1000
    for radius in np.geomspace(1e-4, 10, 60):
        r2 = radius**2
        if r2 >= m / total:
            aer, ier = ("local", m / total), ("local", m / total)
        else:
            aer = ("middle", radius * sqrt(m / total)) if r2 >= 1 / (m * total) else ("global", 1 / total)
            ier = ("middle", radius / sqrt(n)) if r2 >= 1 / total else ("global", sqrt(m) / total)
        assert theory.fedprox_aer_regime(radius, p, sizes) == (aer[0], pytest.approx(aer[1]))
        assert theory.fedprox_ier_regime(radius, sizes) == (ier[0], pytest.approx(ier[1]))


def test_orders_are_continuous_and_the_cases_those_of_lambda():
    for _ in range(20):
        m = int(RNG.integers(2, 30))
        p, n = RNG.dirichlet(np.ones(m)), RNG.integers(5, 500, m)
        for border in regime_borders(p, n):
            below, above = (theory.fedprox_aer_regime(border * f, p, n).order for f in (1 - 1e-9, 1 + 1e-9))
            assert below == pytest.approx(above, rel=1e-7)
        for border in (sqrt(m / n.sum()), sqrt(1 / n.sum())):
            below, above = (theory.fedprox_ier_regime(border * f, n).order for f in (1 - 1e-9, 1 + 1e-9))
            assert below == pytest.approx(above, rel=1e-7)
        for radius in np.geomspace(1e-4, 10, 20):
            case = {"A": "local", "B": "middle", "C": "global"}[lambda_aer(radius, 1.0, p, n).case]
            assert theory.fedprox_aer_regime(radius, p, n).name == case


def test_refusals():
    with pytest.raises(RequestError, match="threshold_squared: ell_max"):
        theory.choose_model(0.1, 1.0, float("inf"), [10, 10])
    with pytest.raises(RequestError, match="decide: radius"):
        theory.choose_model(float("nan"), 1.0, 1.0, [10, 10])
