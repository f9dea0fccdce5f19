from math import inf, isnan

import numpy as np
import pytest
import torch

from mooring.estimates.client_summaries import compute_linear_stats, fit_from_stats, trace
from mooring.estimates.constants import (
    assumption_warnings,
    estimate_constants,
    gradient_noise,
    loss_bound,
    response_noise,
    smoothness,
    strong_convexity,
)

from .planted import linear_rows

N = [20, 50, 35]


@pytest.fixture
def clients():
    rng = np.random.default_rng(0)
    return linear_rows(N, rng.normal(size=(3, 4)), rng, noise=0.7)


def test_curvatures_are_eigenvalues(clients):
    rows, xs, _ = clients
    stats = compute_linear_stats(rows)
    values = [np.linalg.eigvalsh(x.T @ x / len(x)) for x in xs]
    top, bottom = smoothness(stats.gram, stats.n), strong_convexity(stats.gram, stats.n)
    assert top.value == pytest.approx(max(v[-1] for v in values)) and top.low < top.value < top.high
    assert bottom.value == pytest.approx(min(v[0] for v in values)) and bottom.low < bottom.value < bottom.high


def test_open_directions_are_not_strongly_convex():
    hessian = torch.diag_embed(torch.tensor([[1.0, 0.0], [2.0, 1.0]])).double()
    found = strong_convexity(hessian, torch.tensor([5, 5]))
    assert found.value == 0 and "1 clients' losses are not strongly convex" in found.warnings[0]


def test_noise_is_unbiased_at_three_rows_per_coefficient():
    """rho^2 = sigma^2 tr(X'X/n) for one client, with sigma = 0.7."""
    rng = np.random.default_rng(1)
    ratio, covered = [], 0
    for _ in range(200):
        rows, (x,), _ = linear_rows([12], np.ones((1, 4)), rng, noise=0.7)
        truth = 0.49 * np.sum(x**2) / 12
        found = gradient_noise(fit_from_stats(compute_linear_stats(rows)))
        ratio.append(found.value**2 / truth)
        covered += found.low**2 <= truth <= found.high**2
    assert np.mean(ratio) == pytest.approx(1, abs=0.1)
    assert 180 <= covered <= 200


def test_response_noise_pools_residuals_and_covers():
    rng = np.random.default_rng(2)
    covered = []
    for _ in range(100):
        rows, xs, ys = linear_rows([6, 8, 3], rng.normal(size=(3, 3)), rng, noise=0.7)
        found = response_noise(compute_linear_stats(rows))
        covered.append(found.low <= 0.7 <= found.high)
    assert np.mean(covered) >= 0.89
    rss = sum(np.linalg.lstsq(x, y, rcond=None)[1][0] for x, y in zip(xs[:2], ys[:2]))
    assert found.value == pytest.approx(np.sqrt(rss / (3 + 5)))


def test_response_noise_without_local_fits_comes_from_the_likelihood():
    rng = np.random.default_rng(3)
    rows, _, _ = linear_rows([3] * 200, 1 + 0.5 * rng.normal(size=(200, 4)), rng, noise=0.7)
    found = response_noise(compute_linear_stats(rows))
    assert found.value == pytest.approx(0.7, rel=0.2) and "likelihood" in found.method and isnan(found.low)
    rows, _, _ = linear_rows([2] * 40, 3 * rng.normal(size=(40, 3)), rng, noise=0.0)
    assert response_noise(compute_linear_stats(rows)).method == "not identified"


def test_loss_bound_says_what_it_is():
    losses = torch.tensor([0.1, 2.5, 0.7])
    assert loss_bound(losses, bounded=True)[:3] == (2.5, 2.5, inf)
    assert "no bound" in loss_bound(losses, bounded=False).warnings[0]


def test_all_constants_at_once(clients):
    rows = clients[0]
    stats = compute_linear_stats(rows)
    found = estimate_constants(stats, losses=torch.rand(9))
    fits = fit_from_stats(stats)
    assert found.noise.value == pytest.approx(float(trace(fits.gradient_cov).max()) ** 0.5)
    assert 0 < found.mu.value < found.smooth.value
    assert found.response_noise.value == pytest.approx(0.7, rel=0.3)
    partial = estimate_constants(fits)
    assert partial.ell_max.method == partial.response_noise.method == "not identified"


def test_failed_assumptions_are_named():
    p, n = np.full(4, 0.25), np.array([10, 100, 100, 100])
    assert assumption_warnings(1.0, 2.0, n, p, lam=0.1) == ()
    assert "1 clients have fewer" in assumption_warnings(0.1, 2.0, n, p)[0]
    assert "exceeds mu/16" in assumption_warnings(1.0, 2.0, n, p, lam=1.0)[0]
    assert "not strongly convex" in assumption_warnings(0.0, 2.0, n, p)[0]
    assert "unbounded" in assumption_warnings(1.0, 2.0, n, p, bounded_domain=False)[0]
