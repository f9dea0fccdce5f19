"""Each client's noise: limits of the shrinkage, planted variances, heavy tails."""

import numpy as np
import pytest
import torch

from mooring.core.cohort import Rows
from mooring.partial_pooling.client_noise import (
    NoiseDistribution,
    degrees_of_freedom,
    estimate_noise,
    estimate_noise_distribution,
    residual_kurtosis,
    shrink_to_pooled,
    sum_residuals,
)
from mooring.tasks.linear import Linear


def test_shrinkage_has_the_pooled_and_the_own_variance_as_its_limits():
    rss, freedom = torch.tensor([2.0, 30.0, 0.0]).double(), torch.tensor([4.0, 10.0, 0.0]).double()
    assert shrink_to_pooled(rss, freedom, NoiseDistribution(1.5, torch.inf)).tolist() == [1.5] * 3
    weak = shrink_to_pooled(rss, freedom, NoiseDistribution(1.5, 1e-12))
    torch.testing.assert_close(weak[:2], (rss / freedom)[:2], rtol=1e-9, atol=0)
    middle = shrink_to_pooled(rss, freedom, NoiseDistribution(1.5, 6.0))
    torch.testing.assert_close(middle[:2], (6 * 1.5 + rss[:2]) / (6 + freedom[:2]))
    assert float(middle[2]) == 1.5  # without a degree of freedom there is nothing to shrink
    heavy = shrink_to_pooled(rss, freedom, NoiseDistribution(1.5, 6.0, kurtosis=9.0))
    assert bool(((heavy - 1.5).abs() < (middle - 1.5).abs())[:2].all())


@pytest.mark.parametrize("spread", [0.0, 0.8])
def test_the_law_is_that_of_planted_variances(spread):
    """Scaled inverse chi-square variances of a strength nu have cv^2 = 2 / (nu - 2), found by moments."""
    rng = np.random.default_rng(0)
    m, f = 3_000, 12
    nu = np.inf if spread == 0 else 2 / spread**2 + 4
    variance = np.full(m, 2.0) if spread == 0 else 2.0 * (nu - 2) / rng.chisquare(nu, m)
    law = estimate_noise_distribution(
        torch.from_numpy(variance * rng.chisquare(f, m)), torch.full((m,), float(f)).double()
    )
    assert law.typical == pytest.approx(2.0, rel=0.05)
    if spread == 0:
        assert law.strength > 100
    else:
        assert law.strength == pytest.approx(2 / (variance.var() / variance.mean() ** 2) + 2, rel=0.2)


def test_kurtosis_of_normal_and_of_heavy_residuals():
    rng = np.random.default_rng(0)
    for draw, wanted in ((rng.standard_normal, 3.0), (lambda size: rng.standard_t(9, size), 3 + 6 / 5)):
        e = torch.from_numpy(draw((4_000, 30)))
        found = residual_kurtosis(e.pow(4).sum(1), e.square().sum(1), torch.full((4_000,), 30.0))
        assert found == pytest.approx(wanted, rel=0.1)


def test_degrees_of_freedom_are_the_trace_of_the_hat_matrix():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(9, 3))
    variance = np.array([0.5, 0.0, 2.0])
    some = variance > 0
    k = x.T @ x
    hat = x[:, some] @ np.linalg.solve(k[some][:, some] + np.diag(1 / variance[some]), x[:, some].T)
    found = degrees_of_freedom(torch.from_numpy(k)[None], torch.from_numpy(variance))
    assert float(found) == pytest.approx(np.trace(hat))


def clients_with_noise(sd, n, seed=0, d=2):
    rng = np.random.default_rng(seed)
    m = len(sd)
    x = rng.standard_normal((m, n, d))
    w = 1 + 0.5 * rng.standard_normal((m, d))
    y = np.einsum("cnq,cq->cn", x, w) + sd[:, None] * rng.standard_normal((m, n))
    return Rows.stack(*([torch.from_numpy(one) for one in part] for part in (x, y)))


def test_noises_that_differ_are_found_and_those_that_do_not_are_the_same():
    sd = np.where(np.arange(60) % 2 == 0, 0.5, 2.0)
    task, tau = Linear(2), torch.tensor([0.25, 0.25, 0.0]).double()
    found, law = estimate_noise(task, clients_with_noise(sd, 400), tau, torch.ones(60).double())
    assert float(np.median(found[::2])) == pytest.approx(0.25, rel=0.3)
    assert float(np.median(found[1::2])) == pytest.approx(4.0, rel=0.3) and np.isfinite(law.strength)
    found, law = estimate_noise(task, clients_with_noise(np.ones(60), 8), tau, torch.ones(60).double())
    assert float(found.std() / found.mean()) < 0.15 and law.typical == pytest.approx(1.0, rel=0.2)


def test_residual_sums_are_those_of_the_rows():
    rows, models = clients_with_noise(np.ones(3), 5), torch.randn(3, 3, generator=torch.Generator().manual_seed(0))
    found = sum_residuals(Linear(2), rows, models)
    for i in range(3):
        x, y = rows.of(i)
        residual = y.numpy() - np.column_stack([x, np.ones(5)]) @ models[i].double().numpy()
        assert float(found.square[i]) == pytest.approx((residual**2).sum())
        assert float(found.fourth[i]) == pytest.approx((residual**4).sum())
