import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mooring.core.errors import RequestError
from mooring.theory import fedmspp_rate as rate
from mooring.theory import fedprox_shared_rate as full_batch

CENTRES = np.linspace(-2, 2, 6)
WAVE = 0.5
CONSTANT = 1 + WAVE  # Lipschitz and smoothness constant of every record's loss


def record_slope(w, z):
    """Derivative of sqrt(1 + (w - z)^2) + WAVE cos(w + z)."""
    return (w - z) / np.sqrt(1 + (w - z) ** 2) - WAVE * np.sin(w + z)


def record_loss(w, z):
    return np.sqrt(1 + (w - z) ** 2) + WAVE * np.cos(w + z)


def population(function, w):
    """Client i's records are c_i - 1 and c_i + 1, equally likely."""
    return np.mean([function(w, c + e) for c in CENTRES for e in (-1, 1)], axis=0)


def simulate(eta, rounds, sampled, batch, runs, off):
    rng = np.random.default_rng(1)
    w, path = np.full(runs, 5.0), []
    for _ in range(rounds):
        path.append(w)
        clients = rng.permuted(np.tile(np.arange(6), (runs, 1)), axis=1)[:, :sampled]
        z = CENTRES[clients][..., None] + rng.choice([-1.0, 1.0], (runs, sampled, batch))
        u = np.repeat(w[:, None], sampled, axis=1)
        for _ in range(6):  # a contraction by eta * smooth < 1/100
            u = w[:, None] - eta * record_slope(u[..., None], z).mean(-1)
        w = (u + off).mean(axis=1)
    return np.array(path)


def test_theorem_3_holds_with_inexact_solves_of_a_non_convex_problem():
    rounds, sampled, batch = 1500, 2, 2
    eta = rate.step_size(CONSTANT, rounds, sampled, batch)
    off = rate.gradient_tolerance(CONSTANT, CONSTANT, eta, sampled, batch) / (1 / eta + CONSTANT)
    path = simulate(eta, rounds, sampled, batch, runs=4, off=off)
    gap = population(record_loss, 5.0) - population(record_loss, np.linspace(-9, 9, 9001)).min()
    bound = rate.smooth_bound(gap, CONSTANT, CONSTANT, eta, rounds, sampled, batch)
    assert np.mean(population(record_slope, path) ** 2) <= bound < CONSTANT**2


@settings(deadline=None)
@given(st.floats(0.1, 10), st.floats(0.1, 10), st.floats(0.01, 1), st.integers(1, 40), st.integers(1, 64))
def test_the_gradient_certificate_implies_every_term_of_the_printed_one(lipschitz, smooth, scale, sampled, batch):
    eta = scale / (8 * smooth)
    tolerance = rate.gradient_tolerance(lipschitz, smooth, eta, sampled, batch)
    assert tolerance <= 2 * smooth * min(lipschitz / (2 * smooth), lipschitz * eta / (2 * batch * sampled)) * (
        1 + 1e-12
    )
    value = full_batch.suboptimality_from_gradient(tolerance, eta, smooth)
    assert value <= rate.value_tolerance(lipschitz, eta, batch) * (1 + 1e-12)


def test_records_and_clients_are_interchangeable():
    assert rate.step_size(2.0, 10**6, 4, 10) == rate.step_size(2.0, 10**6, 8, 5)
    assert rate.smooth_bound(1, 1, 1, 0.01, 100, 4, 10) == rate.smooth_bound(1, 1, 1, 0.01, 100, 8, 5)
    assert rate.smooth_rate(1, 1, 1, 10**9, 4, 10) == pytest.approx(2 / math.sqrt(10**9 * 40))


def test_the_regime_switches_at_the_cube_of_batch_times_clients():
    assert not rate.sampling_dominates(215, 2, 3)
    assert rate.sampling_dominates(216, 2, 3)
    assert 8 * rate.step_size(1.0, 216, 2, 3) == pytest.approx(1 / 6)


@settings(deadline=None)
@given(st.floats(0.1, 10), st.floats(0.1, 10), st.floats(0.1, 10), st.integers(1, 10**7), st.integers(1, 200))
def test_the_bound_at_the_prescribed_step_is_within_32_times_the_rate(gap, lipschitz, smooth, rounds, product):
    eta = rate.step_size(smooth, rounds, product, 1)
    bound = rate.smooth_bound(gap, lipschitz, smooth, eta, rounds, product, 1)
    assert bound <= 32 * rate.smooth_rate(gap, lipschitz, smooth, rounds, product, 1) * (1 + 1e-9)


@settings(deadline=None)
@given(st.floats(0.1, 10), st.floats(0.1, 10), st.floats(0.001, 1), st.integers(1, 40), st.integers(1, 64))
@example(1.0, 1.0, 1.0, 40, 1)  # single records at the longest step: 376 would not do
def test_the_constants_cover_what_one_step_of_the_proof_spends(lipschitz, smooth, scale, sampled, batch):
    """Lemma 11's bias and variance of the mean direction, and inexact solves at the full tolerance."""
    eta = scale / (8 * smooth)
    tolerance = rate.gradient_tolerance(lipschitz, smooth, eta, sampled, batch)
    unit = (smooth * lipschitz * eta) ** 2
    stable = 75 * unit / (1 - eta * smooth) ** 2
    bias = 12 * unit + stable / batch**2 + stable / batch
    variance = 8 * unit + 2 * lipschitz**2 / (batch * sampled)
    spent = bias / 2 + 2 * smooth * eta * variance + lipschitz * tolerance + smooth * eta * tolerance**2
    bound = rate.smooth_bound(0.0, lipschitz, smooth, eta, 1, sampled, batch)
    assert 4 * spent <= bound * (1 + 1e-12)
    assert 4 * spent >= bound / 20  # nor are they out of proportion


def test_the_bound_at_one_point():
    expected = 1.6 + 424 * (0.5 * 3 * 0.1) ** 2 + 24 * 0.5 * 9 * 0.1 / 20
    assert rate.smooth_bound(2.0, 3.0, 0.5, 0.1, 50, 4, 5) == pytest.approx(expected)


def test_too_long_a_step_is_refused():
    with pytest.raises(RequestError, match=r"at most 1/\(8 smooth\)"):
        rate.smooth_bound(1, 1, 1, 0.2, 100, 2, 2)


def test_theorem_4_is_theorem_2_for_the_population():
    assert rate.weakly_convex_bound(1.0, 2.0, 0.4, 100, 1.0) == pytest.approx(1 / 40 + (2 + 4 * 0.4 * 4) / (0.4 * 10))
