"""Improvements: exact in the normal-mean problem, transitive, and with intervals that agree with probabilities."""

import numpy as np
import pytest
import torch

from mooring.advice.evaluation.loss_sums import ALTERNATIVES, GLOBAL, LOCAL, PERSONAL, zero_sums
from mooring.advice.inference.improvements import (
    MAX_EXCESS,
    SHARE_FLOOR,
    Improvements,
    compare_models,
    estimate_improvements,
    shares_of_own_rows,
)
from mooring.advice.inference.recommendation import CLIENT_LEVEL, HIGH_PROBABILITY
from tests.advice.loss_sum_cases import make_sums


def normal_means(m, n, tau, sigma=1.0, seed=0):
    """Clients that estimate a mean theta ~ N(0, tau^2) from n rows of variance sigma^2, and their posteriors.

    local: the mean ybar; global: 0; personal: s ybar with s = tau^2 / (tau^2 + sigma^2/n). Sums over all rows, as
    expected of rows that the models have not seen, except that differences are exactly those of theta.
    """
    rng = np.random.default_rng(seed)
    theta = tau * rng.standard_normal(m)
    ybar = theta + sigma / n**0.5 * rng.standard_normal(m)
    s = tau**2 / (tau**2 + sigma**2 / n)
    models = np.stack([ybar, 0 * ybar, s * ybar], 1)
    loss = sigma**2 + (models - theta[:, None]) ** 2
    divergence = (models[:, :2] - models[:, 2:]) ** 2
    away = 2 * sigma * (models[:, 2:] - models[:, :2])  # deviation of a row: this times its standardized noise
    deviation = np.stack([away[:, 0] ** 2, away[:, 1] ** 2, away[:, 0] * away[:, 1]], 1)
    sums = make_sums(np.full(m, n), loss, divergence, deviation, apart=ybar**2)
    return theta, ybar, s, sums


def test_with_known_tau_they_are_the_posterior_of_a_normal_mean():
    """global - personal = theta^2 - (theta - p)^2 = 2 p theta - p^2, p = s ybar: mean p^2, variance 4 p^2 v."""
    tau, n, m = 0.5, 8, 4_000
    theta, ybar, s, sums = normal_means(m, n, tau)
    found = estimate_improvements(sums, sums)
    p, v = s * ybar, tau**2 * (1 - s)  # the posterior's mean and variance
    assert float(found.slope[1]) == pytest.approx(1, abs=0.06) and float(found.excess[1]) < 0.02
    np.testing.assert_allclose(found.mean[:, 1], s**2 * ybar**2, rtol=0.1, atol=1e-3)
    variance = found.covariance[:, 1, 1].numpy()
    np.testing.assert_allclose(variance, 4 * p**2 * v, rtol=0.1, atol=1e-4)
    # And so they cover: theta is a draw from its posterior.
    z = (2 * p * theta - p**2 - found.mean[:, 1].numpy()) / np.sqrt(variance)
    assert np.mean(np.abs(z) < 1.645) == pytest.approx(0.9, abs=0.03)
    # local - personal = (theta - ybar)^2 - (theta - p)^2 has the posterior mean (ybar - p)^2.
    np.testing.assert_allclose(found.mean[:, 0], (ybar - p) ** 2, rtol=0.3, atol=1e-3)


def test_the_share_of_own_rows_is_the_shrinkage_factor_of_one_coefficient():
    _, _, s, sums = normal_means(1_000, 8, 0.5)
    shares = shares_of_own_rows(sums.divergence, sums.apart)
    expected = np.full((1_000, 2), np.sqrt(s**2 + SHARE_FLOOR / 1_000))
    np.testing.assert_allclose(shares, expected, rtol=1e-9)
    few = shares_of_own_rows(torch.zeros(4, 2).double(), torch.ones(4).double())
    assert bool((few == 1).all())  # of four clients the share is not known


def test_shares_of_several_coefficients_are_averaged_where_models_differ():
    """By hand, variances are 4 sigma^2 / n times the sums of s_j (1 - s_j)^2 V_j and of s_j^3 V_j."""
    rng = np.random.default_rng(0)
    m, s = 20_000, np.array([0.02, 0.1, 0.4, 0.9, 0.98])
    apart = rng.standard_normal((m, len(s))) ** 2  # V_j
    local, global_ = ((1 - s) ** 2 * apart).sum(1), (s**2 * apart).sum(1)
    divergence = torch.from_numpy(np.stack([local, global_], 1))
    shares = shares_of_own_rows(divergence, torch.from_numpy(apart.sum(1))).numpy()
    exact = np.stack([(s * (1 - s) ** 2 * apart).sum(1) / local, (s**3 * apart).sum(1) / global_], 1)
    one_for_all = np.sqrt(global_ / apart.sum(1))
    weighted = np.stack([(s * (1 - s) * apart).sum(1) / ((1 - s) * apart).sum(1), global_ / (s * apart).sum(1)], 1)
    np.testing.assert_allclose(shares, np.sqrt(weighted**2 + SHARE_FLOOR / m), rtol=1e-9)
    assert (weighted[:, 0] >= exact[:, 0]).all() and (weighted[:, 1] <= exact[:, 1]).all()
    assert np.abs(weighted - exact).mean() < 0.5 * np.abs(one_for_all[:, None] - exact).mean()


def test_divergences_that_few_rows_show_are_shrunk_and_uncertain():
    """True divergences are about three times those over own rows; held-out rows show them badly."""
    rng = np.random.default_rng(0)
    m, n, spread = 2_000, 8, 4.0
    own = np.exp(0.5 * rng.standard_normal((m, 2)))
    truth = 3 * own * np.exp(0.3 * rng.standard_normal((m, 2)))
    held = truth * rng.gamma(n / spread, spread / n, (m, 2))  # means of n rows
    loss = np.concatenate([1 + held, np.ones((m, 1))], 1)
    sums = [make_sums(np.full(m, n), loss, part, spread=spread) for part in (held, own)]
    mean = estimate_improvements(*sums).mean.numpy()
    assert np.mean(np.log(mean / truth) ** 2) < 0.4 * np.mean(np.log(held / truth) ** 2)
    assert mean.sum() == pytest.approx(held.sum(), rel=0.02)
    exact = estimate_improvements(*(sum_._replace(divergence_square=sum_.divergence**2 / n) for sum_ in sums))
    np.testing.assert_allclose(exact.mean, held, rtol=0.02)
    assert bool((exact.covariance[:, 0, 0] < estimate_improvements(*sums).covariance[:, 0, 0]).double().mean() > 0.9)


def test_held_out_rows_that_contradict_the_models_are_heeded():
    """Where differences scatter far beyond chance, what a client's own rows show counts; where they do not, not."""
    rng = np.random.default_rng(0)
    m, n, divergence = 200, 400, 0.1
    wrong = 0.15 * rng.standard_normal(m)

    def found(beyond):
        difference = divergence + beyond + 0.01 * rng.standard_normal(m)
        loss = np.stack([1 + difference, 1 + difference, np.ones(m)], 1)
        deviation = np.tile([0.04, 0.04, 0.04], (m, 1))
        sums = make_sums(np.full(m, n), loss, np.full((m, 2), divergence), deviation, apart=np.full(m, 2 * divergence))
        return estimate_improvements(sums, sums)

    right, misled = found(0.0), found(wrong)
    assert float(right.excess.max()) == 0 and 0.05 < float(misled.excess[0]) <= MAX_EXCESS
    assert float(right.mean[:, 0].std()) < 0.002
    assert np.corrcoef(misled.mean[:, 0], wrong)[0, 1] > 0.95


def test_the_slope_is_shrunk_to_1_by_how_little_clients_show():
    def slope(m, factor):
        loss = np.stack([np.full(m, 1 + 0.1 * factor), np.full(m, 1.1), np.ones(m)], 1)
        loss[::2, 0] += 0.05
        loss[1::2, 0] -= 0.05
        sums = make_sums(np.full(m, 20), loss, np.full((m, 2), 0.1))
        return float(estimate_improvements(sums, sums).slope[0])

    assert slope(1_000, 0.5) == pytest.approx(0.5, abs=0.01)
    assert 0.5 < slope(4, 0.5) < 1 and slope(4, 0.5) > slope(100, 0.5)


def test_clients_without_held_out_rows_have_wider_intervals_around_what_their_models_imply():
    _, _, _, sums = normal_means(50, 8, 0.5)
    held = sums._replace(**{name: part.clone() for name, part in sums._asdict().items()})
    for part in held:
        part[7] = 0
    found = estimate_improvements(held, sums)
    assert bool(torch.isfinite(found.mean).all()) and bool((found.covariance.diagonal(dim1=1, dim2=2) >= 0).all())
    assert float(found.mean[7, 1]) == pytest.approx(float(found.slope[1] * sums.divergence[7, 1] / 8))
    nothing = estimate_improvements(zero_sums(3), zero_sums(3))
    assert float(nothing.mean.abs().sum()) == 0 and float(compare_models(nothing, GLOBAL, LOCAL).probability[0]) == 0.5


@pytest.mark.parametrize("side", [0, 1])
def test_where_every_personal_model_is_the_local_or_the_global_one_the_other_comparison_stands(side):
    """Identical clients end there: the personal models are the global one exactly."""
    loss, divergence = np.tile([1.5, 1.5, 1.0], (30, 1)), np.full((30, 2), 0.5)
    loss[:, side], divergence[:, side] = 1.0, 0.0
    deviation = np.tile([2.0, 2.0, 0.0], (30, 1)) * (np.arange(3) != side)
    sums = make_sums(np.full(30, 40), loss, divergence, deviation)
    found = estimate_improvements(sums, sums)
    assert bool(torch.isfinite(found.mean).all()) and bool(torch.isfinite(found.covariance).all())
    same, other = (compare_models(found, PERSONAL, ALTERNATIVES[k]) for k in (side, 1 - side))
    assert bool((same.probability == 0.5).all()) and float(other.probability.min()) > 0.9
    ends = compare_models(found, ALTERNATIVES[side], ALTERNATIVES[1 - side])
    torch.testing.assert_close(ends.probability, other.probability)


def random_improvements(m=300, seed=0):
    rng = np.random.default_rng(seed)
    mean = rng.normal(size=(m, 2))
    root = rng.normal(size=(m, 2, 2))
    covariance = root @ root.transpose(0, 2, 1)
    freedom = rng.uniform(3, 30, len(mean))
    parts = (torch.from_numpy(part) for part in (mean, covariance, freedom))
    return Improvements(*parts, torch.ones(2), torch.zeros(2))


def test_comparisons_are_transitive():
    found = random_improvements()
    over_local, over_global, between = (
        compare_models(found, *pair) for pair in ((PERSONAL, LOCAL), (PERSONAL, GLOBAL), (GLOBAL, LOCAL))
    )
    torch.testing.assert_close(between.mean, over_local.mean - over_global.mean)
    both = (over_local.probability > 0.5) & (between.probability < 0.5)  # personal < local < global
    assert int(both.sum()) > 20 and bool((over_global.probability[both] > 0.5).all())
    # And from one joint distribution: simulated triples have these probabilities.
    draws = torch.distributions.MultivariateNormal(torch.zeros(20, 2).double(), found.covariance[:20]).sample((40_000,))
    scale = torch.distributions.Chi2(found.freedom[:20]).sample((40_000,)) / found.freedom[:20]  # Student's
    local, global_ = (found.mean[:20] + draws / scale.sqrt()[..., None]).unbind(-1)
    for model, other, better in (
        (PERSONAL, LOCAL, local > 0),
        (PERSONAL, GLOBAL, global_ > 0),
        (GLOBAL, LOCAL, local > global_),
        (LOCAL, GLOBAL, global_ > local),
    ):
        shares = better.double().mean(0)
        torch.testing.assert_close(compare_models(found, model, other).probability[:20], shares, atol=0.015, rtol=0)
    back = compare_models(found, LOCAL, GLOBAL)
    torch.testing.assert_close(back.probability, 1 - between.probability)
    assert bool((compare_models(found, LOCAL, LOCAL).probability == 0.5).all())


@pytest.mark.parametrize("other", ALTERNATIVES)
def test_an_interval_leaves_out_0_just_where_the_probability_is_high(other):
    found = random_improvements(2_000, seed=1)
    side = compare_models(found, PERSONAL, other)
    low, high = side.interval(CLIENT_LEVEL)
    assert torch.equal(low > 0, side.probability > HIGH_PROBABILITY) and torch.equal(
        high < 0, side.probability < 1 - HIGH_PROBABILITY
    )
    assert 50 < int((low > 0).sum()) < 1_900 and bool((low < side.mean).all())


def test_variances_that_differ_by_orders_of_magnitude_are_shrunk_on_the_log_scale():
    """Few clients with very noisy rows leave the improvements over the global model of the others as certain as own
    rows show them."""
    m, n, divergence = 100, 20, np.full((100, 2), 0.1)
    loss = np.tile([1.1, 1.1, 1.0], (m, 1))
    noise = np.where(np.arange(m) < 5, 1e4, 1.0) * np.exp(np.random.default_rng(0).normal(0, 1, m))
    deviation = np.stack([0.4 * noise, 0.4 * noise, 0.2 * noise], 1)
    sums = make_sums(np.full(m, n), loss, divergence, deviation, apart=np.full(m, 0.4))  # one coefficient, s = 1/2
    variance = estimate_improvements(sums, sums).covariance.diagonal(dim1=1, dim2=2).numpy()
    quiet = np.arange(m) >= 5
    assert np.median(variance[quiet, 1]) < 0.01 * np.median(variance[quiet, 0])
    assert (variance[~quiet, 1] > 100 * np.median(variance[quiet, 1])).all()


def test_few_clients_and_few_rows_make_the_tails_heavier():
    def freedom(m, n):
        return float(estimate_improvements(*[normal_means(m, n, 0.5)[3]] * 2).freedom.median())

    assert freedom(4, 4) < freedom(40, 4) and freedom(40, 4) < freedom(40, 400)
