import numpy as np
import pytest
import torch
from scipy.stats import f as fisher
from scipy.stats import ncf

from mooring.core.errors import RequestError
from mooring.estimates.client_queries import fit_penalized
from mooring.estimates.client_summaries import (
    LocalFits,
    compute_linear_stats,
    fit_covariance,
    fit_from_stats,
    fit_logistic,
    trace,
)
from mooring.estimates.heterogeneity import (
    _between,
    estimate_client_radii,
    estimate_diameter,
    estimate_max_radius,
    estimate_radius,
)
from mooring.estimates.heterogeneity_likelihood import estimate_radii, estimate_radius_by_likelihood
from mooring.estimates.random_effects import fit_laplace, fit_reml
from mooring.estimates.squared_length_interval import (
    QuadraticForm,
    confidence_interval,
    noise_quantile,
    probability_below,
)
from mooring.estimates.task_random_effects import SampledRandomEffects
from mooring.tasks.logistic import Logistic
from tests.support import radii

from .planted import linear_rows, logistic_rows, truths

D, FREEDOM, M = 4, 30, 6


def isotropic(square, clients=M, dim=D, freedom=FREEDOM):
    """sum over m clients with unit noise: k = d (m - 1) directions, noise estimated with m * freedom degrees."""
    k = dim * (clients - 1)
    total = clients * freedom
    return QuadraticForm(square, k, k, k, 1.0, 1.0, 2 * k**2 / total, 8 * k**3 / total**2), k, total


def test_chance_is_fishers_f_at_zero_and_nearly_noncentral_beyond():
    for square in (8.0, 20.0, 35.0, 60.0):
        form, k, total = isotropic(square)
        assert probability_below(form, 0.0) == pytest.approx(fisher.cdf(square / k, k, total), abs=0.004)
    # With the noise known, Q is noncentral chi-square with noncentrality r^2.
    form, k, _ = isotropic(80.0, freedom=1e9)
    for r2 in (5.0, 40.0, 100.0):
        assert probability_below(form, r2) == pytest.approx(ncf.cdf(80.0 / k, k, 1e9, r2), abs=0.004)


def test_interval_ends_are_where_the_chances_are():
    form, _, _ = isotropic(np.array([70.0, 20.0, 11.0, 1.0]))
    low, high = confidence_interval(form)
    assert probability_below(form, low)[0] == pytest.approx(0.975, abs=1e-6)
    assert probability_below(form, high)[0] == pytest.approx(0.025, abs=1e-4)
    assert low[1] == low[2] == low[3] == 0
    assert np.all(np.diff(high[:3]) < 0)
    assert 0 < high[3] <= high[2]  # a square far below its noise does not give an empty interval


def test_noise_quantile_is_fishers():
    form, k, total = isotropic(0.0)
    assert noise_quantile(form, 0.99) / k == pytest.approx(fisher.ppf(0.99, k, total), rel=0.02)


def test_no_noise_gives_a_point():
    points = torch.tensor([[0.0, 1.0], [2.0, 1.0], [1.0, 4.0]], dtype=torch.float64)
    still = torch.zeros(3, 2, 2, dtype=torch.float64)
    fits = LocalFits(
        torch.full((3,), 9.0).double(), points, torch.eye(2).double().expand(3, 2, 2), still, torch.ones(3).double()
    )
    p = np.array([0.2, 0.3, 0.5])
    found = estimate_radius(fits, torch.from_numpy(p))
    expected = radii.radius_rms(points.numpy(), p)
    assert found.value == pytest.approx(expected)
    assert found.low == pytest.approx(expected, rel=1e-4) and found.high == pytest.approx(expected, rel=1e-4)
    assert estimate_max_radius(fits, torch.from_numpy(p)).value == pytest.approx(radii.radius_max(points.numpy(), p))
    assert estimate_diameter(fits).value == pytest.approx(radii.pairwise_spread(points.numpy()))


def test_cumulants_equal_those_of_the_full_matrix():
    rng = np.random.default_rng(0)
    m, d = 4, 3
    root = rng.normal(size=(m, d, d))
    cov = torch.from_numpy(root @ root.transpose(0, 2, 1))
    p = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    form = _between(torch.from_numpy(rng.normal(size=(m, d))), cov, trace(cov), torch.full((m,), 5.0).double(), p)
    a = np.kron(np.diag(p) - np.outer(p, p), np.eye(d))
    av = a @ np.asarray(torch.block_diag(*cov))
    assert form.bias == pytest.approx(np.trace(av))
    assert form.second == pytest.approx(np.trace(av @ av))
    assert form.third == pytest.approx(np.trace(av @ av @ av))


def covered(estimate, truth):
    return (estimate.low <= truth) & (truth <= estimate.high)


@pytest.mark.parametrize("r", [0.0, 1.0])
def test_linear_intervals_cover_at_three_rows_per_coefficient(r):
    rng = np.random.default_rng(int(r) + 1)
    n, hits, errors = np.array([15, 15, 15, 20, 40, 15, 15, 15, 60, 15]), 0, []
    p = torch.from_numpy(n / n.sum())
    for _ in range(80):
        rows, _, _ = linear_rows(n, truths(10, 5, r, p.numpy(), rng), rng)
        found = estimate_radius(fit_from_stats(compute_linear_stats(rows)))
        hits += covered(found, r)
        errors.append(abs(found.value - r))
    assert hits >= 70
    assert r == 0 or np.median(errors) < 0.15


@pytest.mark.parametrize("r", [0.0, 2.0])
def test_logistic_intervals_cover_at_ten_rows_per_coefficient(r):
    rng = np.random.default_rng(int(r) + 3)
    p, hits, errors = np.full(15, 1 / 15), 0, []
    for _ in range(40):
        rows, _, _ = logistic_rows([50] * 15, truths(15, 5, r, p, rng), rng)
        found = estimate_radius(fit_logistic(rows))
        hits += covered(found, r)
        errors.append(abs(found.value - r))
    assert hits >= 34
    assert r == 0 or np.median(errors) < 0.15 * r


def test_client_radii_maximum_and_diameter_cover():
    rng = np.random.default_rng(5)
    n = np.array([20, 40, 30, 60, 25, 20])
    p = torch.from_numpy(n / n.sum())
    each, largest, widest = [], [], []
    for _ in range(40):
        w = truths(6, 3, 0.7, p.numpy(), rng)
        stats = compute_linear_stats(linear_rows(n, w, rng)[0])
        each.append(covered(estimate_client_radii(stats), torch.from_numpy(radii.distances(w, p))).double().mean())
        largest.append(covered(estimate_max_radius(stats), radii.radius_max(w, p)))
        widest.append(covered(estimate_diameter(stats), radii.pairwise_spread(w)))
    assert 0.9 <= np.mean(each) <= 0.99
    assert np.mean(largest) >= 0.93 and np.mean(widest) >= 0.93


def test_few_rows_are_not_identified_and_the_likelihood_steps_in():
    rng = np.random.default_rng(8)
    n = [3] * 20 + [30] * 5
    p = np.array(n) / np.sum(n)
    w = truths(25, 5, 1.0, p, rng)
    stats = compute_linear_stats(linear_rows(n, w, rng)[0])
    assert np.isnan(estimate_radius(stats).value) and "20 of 25 clients" in estimate_radius(stats).warnings[0]
    spread = SampledRandomEffects(fit_reml(stats), torch.arange(25))
    found, most, each = estimate_radii(stats, spread)
    truth = radii.distances(w, p)
    assert float(most.value) == pytest.approx(truth.max(), rel=0.5) and np.isnan(most.low)
    assert np.mean(each.value.numpy() ** 2) == pytest.approx(np.mean(truth**2), rel=0.4)
    assert covered(found, 1.0) and found.method == "restricted likelihood"
    assert any("assumed spread" in warning for warning in found.warnings)


def test_likelihood_agrees_with_debiased_fits_where_both_apply():
    rng = np.random.default_rng(9)
    p = np.full(40, 1 / 40)
    for r, low in ((1.0, True), (0.0, False)):
        stats = compute_linear_stats(linear_rows([60] * 40, truths(40, 4, r, p, rng), rng)[0])
        likely, plain = estimate_radius_by_likelihood(fit_reml(stats), stats.n), estimate_radius(stats)
        assert likely.value == pytest.approx(plain.value, abs=0.06)
        assert likely.high == pytest.approx(plain.high, abs=0.06)
        assert (likely.low > 0) == low == (plain.low > 0)


def test_likelihood_works_for_logistic_clients_with_few_rows():
    rng = np.random.default_rng(14)
    task, p = Logistic(3, intercept=False, ridge=0.0), np.full(60, 1 / 60)
    for r, low in ((1.2, True), (0.0, False)):
        rows, _, _ = logistic_rows([3] * 20 + [40] * 40, truths(60, 3, r, p, rng), rng)

        def refit(center, lam, rows=rows):
            return fit_penalized(task, rows, lam, torch.zeros(60, 3).double(), center=center)

        spread = fit_laplace(rows.size, refit, torch.zeros(3).double())
        found = estimate_radius_by_likelihood(spread, rows.size.double(), torch.from_numpy(p))
        assert covered(found, r) and (found.low > 0) == low


def test_radius_does_not_depend_on_the_axes_or_the_order_of_clients():
    rng = np.random.default_rng(13)
    n = [20, 40, 30]
    rows, _, _ = linear_rows(n, rng.normal(size=(3, 3)), rng)
    fits = fit_from_stats(compute_linear_stats(rows))
    turn = torch.from_numpy(np.linalg.qr(rng.normal(size=(3, 3)))[0])
    order = torch.tensor([2, 0, 1])
    turned = LocalFits(
        fits.n, fits.fit @ turn, turn.T @ fits.hessian @ turn, turn.T @ fits.gradient_cov @ turn, fits.freedom
    )
    for other in (turned, LocalFits(*(part[order] for part in fits))):
        assert estimate_radius(other)[:3] == pytest.approx(estimate_radius(fits)[:3])
    assert float(trace(fit_covariance(turned)).sum()) == pytest.approx(float(trace(fit_covariance(fits)).sum()))


def test_one_client_is_refused():
    with pytest.raises(RequestError, match="at least 2 clients"):
        estimate_radius(compute_linear_stats(linear_rows([9], np.ones((1, 2)), np.random.default_rng(0))[0]))
