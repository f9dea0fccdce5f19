import math

import numpy as np
import pytest

from mooring.theory import apfl_schedule as schedule
from mooring_papers.theory import apfl_bounds as bounds

PRINTED_OVER_CORRECTED = 1536 / 24576


def recursion(start_sq, mu, smooth, sgd_var, zeta, averaged, tau, iterations, a):
    """The inequality of Lemma 4's proof, iterated step by step."""
    error = start_sq
    for t in range(1, iterations + 1):
        eta, before = schedule.step_size(t, mu, a), schedule.step_size(t - 1, mu, a)
        drift = 3 * tau * (sgd_var + 2 * tau * zeta / averaged) * before**2
        error = (
            (1 - mu * eta / 2) * error + (2 * eta / mu + 2 * eta**2) * smooth**2 * drift + eta**2 * sgd_var / averaged
        )
    return error


@pytest.mark.parametrize("mu", [0.5, 2.0])
@pytest.mark.parametrize("iterations", [1, 50, 3000])
@pytest.mark.parametrize(("sgd_var", "zeta"), [(0.0, 0.0), (1.0, 0.0), (0.0, 40.0), (2.0, 3.0)])
def test_the_distance_bound_covers_its_recursion(mu, iterations, sgd_var, zeta):
    smooth, averaged, tau = 2 * mu, 5, 10
    a = schedule.shift(mu, smooth, tau)
    args = (4.0, mu, smooth, sgd_var, zeta, averaged, tau, iterations, a)
    assert recursion(*args) <= bounds.global_bounds(*args).distance * (1 + 1e-9)


def test_the_printed_constant_does_not_cover_the_recursion():
    mu = smooth = 1.0
    args = (0.0, mu, smooth, 0.0, 5.0, 5, 10, 3000, schedule.shift(mu, smooth, 10))
    assert recursion(*args) > PRINTED_OVER_CORRECTED * bounds.global_bounds(*args).distance


def test_the_distance_bound_term_by_term():
    mu, smooth, averaged, tau, t = 0.5, 2.0, 4, 6, 100
    a = schedule.shift(mu, smooth, tau)
    start = bounds.global_bounds(3.0, mu, smooth, 0.0, 0.0, averaged, tau, t, a).distance
    assert start == pytest.approx(3.0 * a**3 / (t + a) ** 3)
    noise = bounds.global_bounds(0.0, mu, smooth, 1.7, 0.0, averaged, 1, t, a).distance
    factor = (t + 16 * (1 / (a + 1) + math.log(t + a))) * a**2 / ((a - 1) ** 2 * mu**4 * (t + a) ** 3)
    expected = factor * 24576 * 1.7 * smooth**2 + 128 * 1.7 * t * (t + 2 * a + 1) / (averaged * mu**2 * (t + a) ** 3)
    assert noise == pytest.approx(expected)
    drift = bounds.global_bounds(0.0, mu, smooth, 0.0, 1.3, averaged, tau, t, a).distance
    assert drift == pytest.approx(factor * 24576 * tau * 2 * tau * 1.3 / averaged * smooth**2)


def test_the_risk_bound_is_the_distance_bound_in_other_units():
    mu, smooth, averaged, tau, t = 0.5, 2.0, 4, 6, 100
    a = schedule.shift(mu, smooth, tau)
    args = (3.0, mu, smooth, 1.7, 1.3, averaged, tau, t, a)
    ratio = mu * (t + a) ** 3 / 16 / math.fsum((k + a) ** 2 for k in range(1, t + 1))
    assert bounds.global_bounds(*args).risk == pytest.approx(ratio * bounds.global_bounds(*args).distance)


def test_local_sgd_stays_inside_the_bounds():
    rng = np.random.default_rng(3)
    clients, tau, iterations, runs, noise = 5, 5, 400, 200, 0.5
    hessians, centres = rng.uniform(1, 1.5, clients), rng.standard_normal(clients)
    mu, smooth = hessians.min(), hessians.max()
    best = (hessians * centres).sum() / hessians.sum()
    grid = np.linspace(-10, 10, 2001)[:, None]  # W: every iterate lies in it
    gradients = hessians * (grid - centres)
    zeta = ((gradients.mean(1, keepdims=True) - gradients) ** 2).max(0).sum()
    a = schedule.shift(mu, smooth, tau)
    w, total = np.full((runs, clients), 4.0), 0.0
    for t, weight in enumerate(schedule.weights(iterations, a), start=1):
        total = total + weight * w.mean(1)
        step = schedule.step_size(t, mu, a)
        w = w - step * (hessians * (w - centres) + noise * rng.standard_normal(w.shape))
        if t % tau == 0:
            w = np.repeat(w.mean(1, keepdims=True), clients, axis=1)
    args = ((4.0 - best) ** 2, mu, smooth, noise**2, zeta, clients, tau, iterations, a)
    assert np.mean((w.mean(1) - best) ** 2) <= bounds.global_bounds(*args).distance
    mean = total / schedule.weight_sum(iterations, a)
    excess = hessians.mean() / 2 * (mean - best) ** 2
    assert np.mean(excess) <= bounds.global_bounds(*args).risk


def bump(w, c):
    return 1 - np.exp(-((w - c) ** 2) / 2)


def bump_slope(w, c):
    return (w - c) * np.exp(-((w - c) ** 2) / 2)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.8, 1.0])
def test_full_gradient_apfl_on_a_non_convex_problem_stays_inside_theorems_3_and_8(alpha):
    clients, iterations, smooth = 8, 2000, 1.0
    centres = np.linspace(-0.5, 0.5, clients)
    tau = round(schedule.nonconvex_local_steps(iterations, clients))
    eta = schedule.nonconvex_step_size(smooth, iterations, tau)
    grid = np.linspace(-6, 6, 4001)[:, None]
    slopes = bump_slope(grid, centres)
    zetas = ((slopes.mean(1, keepdims=True) - slopes) ** 2).max(0)
    w, v = np.full(clients, 1.5), np.full(clients, 1.5)
    common, personal, apart = [], [], 0.0
    for t in range(1, iterations + 1):
        mean = w.mean()
        mixed = alpha * v + (1 - alpha) * mean
        common.append(bump_slope(mean, centres).mean() ** 2)
        personal.append(bump_slope(mixed, centres) ** 2)
        apart = max(apart, ((mixed - mean) ** 2).max())
        own = alpha * v + (1 - alpha) * w
        w, v = w - eta * bump_slope(w, centres), v - eta * alpha * bump_slope(own, centres)
        if t % tau == 0:
            w = np.full(clients, w.mean())
    start = bump(1.5, centres)
    limit = bounds.nonconvex_global_bound(start.mean(), smooth, zetas.sum(), clients, eta, tau, iterations)
    assert np.mean(common) <= limit
    for i in range(clients):
        args = (alpha, start[i], start.mean(), smooth, zetas[i], zetas.sum(), apart, clients, eta, tau, iterations)
        assert np.mean(personal, axis=0)[i] <= bounds.nonconvex_personal_bound(*args)


def test_nonconvex_terms():
    assert bounds.nonconvex_residual(1.0, 2.0, 3.0, 4.0) == 0.0
    assert bounds.nonconvex_residual(0.0, 2.0, 3.0, 4.0) == 48 * 3 + 128 * 4 * 4
    common = bounds.nonconvex_global_bound(0.7, 2.0, 30.0, 10, 0.01, 5, 1000)
    assert common == pytest.approx(8 * 0.7 / 10 + 6 * 4 * 10 * 25 * 1e-4 * 3)  # Lemma 9 with Lemma 10 inserted
    alone = bounds.nonconvex_personal_bound(1.0, 0.7, 9.0, 2.0, 3.0, 30.0, 4.0, 10, 0.01, 5, 1000)
    assert alone == pytest.approx(8 * 0.7 / (0.01 * 1000))
    mixed = bounds.nonconvex_personal_bound(0.5, 0.0, 0.0, 2.0, 0.0, 30.0, 0.0, 10, 0.01, 5, 1000)
    reach = (2.0 * 5 * 0.01) ** 2
    assert mixed == pytest.approx(24 * 0.25 / 16 * 200 * reach**2 * 3 + 7800 * 0.25 * reach * 3)
    own = bounds.nonconvex_personal_bound(0.5, 0.0, 0.0, 2.0, 0.4, 0.0, 0.0, 10, 0.01, 5, 1000)
    assert own == pytest.approx(24 * 0.25 / 16 * 20 * reach * 0.4 + 48 * 0.75**2 * 0.4)


PROBLEM = {"mu": 0.5, "smooth": 2.0, "sgd_var": 1.5, "zeta_i": 0.3, "zeta": 6.0}


def order(name, alpha=0.97, iterations=10_000, **changes):
    args = {**PROBLEM, "local_steps": 10, "iterations": iterations, **changes}
    if name == "full":
        return bounds.personal_order_full(alpha=alpha, delta_i=0.2, clients=20, **args)
    if name == "sampled":
        return bounds.personal_order_sampled(alpha=alpha, delta_i=0.2, sampled=5, clients=20, **args)
    return bounds.personal_order_any_alpha(alpha=alpha, gradient_max=4.0, sampled=5, clients=20, **args)


@pytest.mark.parametrize("name", ["full", "sampled", "any"])
def test_personal_orders_scale_as_printed(name):
    one, two = order(name), order(name, iterations=20_000)
    assert one.local_noise / two.local_noise == pytest.approx(2)
    assert one.global_noise / two.global_noise == pytest.approx(2)
    assert one.drift / two.drift == pytest.approx(4)
    assert one.residual == two.residual > 0
    assert one.total == pytest.approx(sum(one))
    assert order(name, alpha=1.0)[2:] == (0, 0, 0)
    noiseless = order(name, sgd_var=0.0)
    assert noiseless.local_noise == noiseless.global_noise == 0
    assert noiseless.drift / order(name, sgd_var=0.0, local_steps=20).drift == pytest.approx(1 / 4)


def test_personal_orders_at_one_point():
    full = order("full")
    mix, cond, t = 0.03**2, 4.0, 10_000
    assert full.local_noise == pytest.approx(0.97**2 * 1.5 / (0.5 * t))
    assert full.global_noise == pytest.approx(mix * cond**2 * 1.5 / (0.5 * 20 * t))
    own, common = cond**2 * 10 * (1.5 + 10 * (0.3 + 0.3)), cond**4 * 10 * (1.5 + 20 * 0.3)
    assert full.drift == pytest.approx(mix * (own + common) / (0.5 * t**2))
    assert full.residual == pytest.approx(mix * (0.3 / 0.5 + cond * 2.0 * 0.2))
    sampled = order("sampled")
    b = 0.25
    assert sampled.local_noise == pytest.approx(0.97**2 * 1.5 / (0.5 * b * t))
    assert sampled.drift == pytest.approx(mix * cond**2 * 10 * (10 * 0.3 + cond**2 * 10 * 6 / 5) / (0.5 * b * t**2))
    assert sampled.residual == pytest.approx(mix * ((0.3 + 6 / 5) / (0.5 * b) + cond * 2.0 * 0.2 / b))
    assert order("any").residual == pytest.approx(mix * 16 / (0.5 * b))
