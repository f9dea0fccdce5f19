import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq

from mooring.core.errors import RequestError
from mooring.theory import kernel_operator as op
from mooring.theory import kernel_stopping as ks


def naive_stopping_time(eigenvalues, samples, update, sigma, cap):
    """Eq. 23, corrected, round by round."""
    last = 0
    for t in range(1, cap + 1):
        u = update.eta * t * update.steps
        rad = math.sqrt(sum(min(v, 1 / u) for v in eigenvalues) / samples)
        if rad <= 1 / (math.sqrt(2 * math.e) * sigma * u):
            last = t
    return last


@settings(deadline=None)
@given(
    st.lists(st.floats(0, 3), min_size=1, max_size=6),
    st.floats(0.01, 1),
    st.integers(1, 5),
    st.floats(0.05, 3),
    st.booleans(),
)
def test_bisection_finds_the_last_round_of_the_definition(eigenvalues, eta, steps, sigma, prox):
    update = op.fedprox(eta) if prox else op.fedavg(eta, steps)
    expected = naive_stopping_time(eigenvalues, 8, update, sigma, 200)
    assert ks.stopping_time(np.array(eigenvalues), 8, update, sigma, cap=200) == expected


def test_borders():
    eigenvalues, update = np.array([1.0, 0.5, 0.1]), op.fedavg(0.5)
    assert ks.stopping_time(eigenvalues, 10, update, sigma=0.0, cap=77) == 77
    assert ks.stopping_time(eigenvalues, 10, update, sigma=100.0) == 0
    assert ks.stopping_time(np.zeros(3), 10, update, sigma=1.0, cap=50) == 50  # nothing to fit, nothing to overfit
    assert ks.stopping_time(eigenvalues, 10**9, update, sigma=1.0, cap=50) == 50
    with pytest.raises(RequestError, match="sigma must be"):
        ks.stopping_time(eigenvalues, 10, update, sigma=-1.0)


def test_less_noise_more_rows_and_smaller_steps_run_longer():
    eigenvalues = np.arange(1, 101) ** -2.0
    base = ks.stopping_time(eigenvalues, 500, op.fedavg(0.1), 0.5)
    assert ks.stopping_time(eigenvalues, 500, op.fedavg(0.1), 0.2) > base
    assert ks.stopping_time(eigenvalues, 2000, op.fedavg(0.1), 0.5) > base
    assert ks.stopping_time(eigenvalues, 500, op.fedavg(0.1, 4), 0.5) == base // 4
    assert ks.stopping_time(eigenvalues, 500, op.fedavg(0.05), 0.5) in (2 * base, 2 * base + 1)


def test_finite_rank_reduces_to_the_closed_form():
    update, samples, sigma = op.fedavg(0.01, 5), 100_000, 0.5
    stop = ks.stopping_time(np.array([1.0, 0.8, 0.6]), samples, update, sigma)
    assert stop == math.floor(ks.rank_stopping_time(3, samples, update, sigma))
    assert ks.rank_stopping_time(3, samples, update, sigma) == pytest.approx(100_000 / (2 * math.e * 0.25 * 3 * 0.05))


@pytest.mark.parametrize(
    "update", [op.fedavg(0.5), op.fedavg(0.5, 5), op.fedprox(0.5)], ids=["gd", "fedavg5", "fedprox"]
)
def test_stopping_is_near_the_best_round_and_running_on_overfits(update):
    clients, rows, sigma = 20, 15, 0.5
    rng = np.random.default_rng(0)
    x = np.concatenate([np.sort(rng.uniform(i / clients, (i + 1) / clients, rows)) for i in range(clients)])
    gram = np.minimum.outer(x, x)
    eigenvalues = np.linalg.eigvalsh(gram / len(x))
    truth, norm = np.sin(2 * np.pi * x), math.sqrt(2) * np.pi  # |f|_H^2 = integral of f'^2
    flow = op.kernel_flow(gram, [rows] * clients, update)

    def error(rounds):
        """E|f_t - f|_N^2, exactly."""
        mean = op.predictions(flow, truth, rounds) - truth
        modes = 1 - (1 - update.eta * flow.eigenvalues) ** rounds
        return (mean @ mean + sigma**2 * ((flow.from_modes * modes @ flow.to_modes) ** 2).sum()) / len(x)

    best = min(error(int(t)) for t in np.unique(np.geomspace(1, 10**6, 60).astype(int)))
    stop = ks.stopping_time(eigenvalues, len(x), update, sigma, norm)
    assert error(stop) <= 1.2 * best
    assert error(10**6) > 10 * error(stop)
    # in the paper's units the truth has norm 1: here its rule stops much too early
    assert error(ks.stopping_time(eigenvalues, len(x), update, sigma)) > 5 * best


def test_the_norm_is_a_change_of_units():
    eigenvalues, update = np.arange(1, 101) ** -2.0, op.fedavg(0.1)
    assert ks.stopping_time(eigenvalues, 500, update, 2.0, norm=4.0) == ks.stopping_time(eigenvalues, 500, update, 0.5)
    assert ks.rank_stopping_time(3, 500, update, 2.0, 4.0) == pytest.approx(ks.rank_stopping_time(3, 500, update, 0.5))


def test_sigma_from_residuals_of_linear_models_is_the_classical_estimate():
    rng = np.random.default_rng(0)
    xs = [rng.standard_normal((40, 6)) for _ in range(30)]
    ys = [x @ rng.standard_normal(6) + 0.5 * rng.standard_normal(40) for x in xs]  # every client its own truth
    residuals = [np.linalg.lstsq(x, y, rcond=None)[1][0] for x, y in zip(xs, ys)]
    expected = math.sqrt(sum(residuals) / (30 * 34))
    assert ks.sigma_from_residuals([x @ x.T for x in xs], ys) == pytest.approx(expected)
    assert expected == pytest.approx(0.5, rel=0.05)


def test_sigma_from_residuals_of_a_smooth_function():
    rng = np.random.default_rng(1)
    xs = [np.sort(rng.uniform(0, 1, 30)) for _ in range(20)]
    grams = [1 + np.minimum.outer(x, x) for x in xs]
    ys = [np.sin(6 * x) + 0.3 * rng.standard_normal(30) for x in xs]
    assert ks.sigma_from_residuals(grams, ys) == pytest.approx(0.3, rel=0.08)
    noisier = ks.sigma_from_residuals([7.0 * g for g in grams], [10 * y for y in ys])
    assert noisier == pytest.approx(10 * ks.sigma_from_residuals(grams, ys))  # the kernel's scale does not matter
    with pytest.raises(RequestError, match="share"):
        ks.sigma_from_residuals(grams, ys, share=1.0)


def test_sigma_from_residuals_spends_the_given_share_of_degrees_of_freedom():
    rng = np.random.default_rng(2)
    x, y = np.sort(rng.uniform(0, 1, 12)), rng.standard_normal(12)
    gram = np.minimum.outer(x, x)

    def hat(ridge):
        return gram @ np.linalg.inv(gram + ridge * np.eye(12))

    ridge = brentq(lambda r: np.trace(hat(r)) - 0.25 * 12, 1e-6, 1e3)
    left = np.eye(12) - hat(ridge)
    expected = math.sqrt(np.sum((left @ y) ** 2) / np.trace(left @ left))
    assert ks.sigma_from_residuals([gram], [y], share=0.25) == pytest.approx(expected)


def test_sigma_from_holdout():
    assert ks.sigma_from_holdout(np.zeros(4), np.array([1.0, -1, 1, -1])) == 1.0


def test_the_pooled_spectrum_needs_only_the_clients_second_moments():
    rng = np.random.default_rng(0)
    xs = [rng.standard_normal((n, 4)) for n in (3, 9, 20)]
    x = np.concatenate(xs)
    found = ks.pooled_eigenvalues([xi.T @ xi / len(xi) for xi in xs], [3, 9, 20])
    np.testing.assert_allclose(found, np.linalg.eigvalsh(x @ x.T / 32)[::-1][:4], atol=1e-12)
