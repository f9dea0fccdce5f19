import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooring.core.errors import RequestError
from mooring.theory import apfl_schedule as schedule


@settings(deadline=None)
@given(st.integers(1, 300), st.floats(0.5, 1e4))
def test_the_sum_of_weights_in_closed_form(iterations, shift):
    weights = schedule.weights(iterations, shift)
    assert weights[0] == pytest.approx((1 + shift) ** 2)
    assert schedule.weight_sum(iterations, shift) == pytest.approx(math.fsum(weights))
    assert schedule.weight_sum(iterations, shift) >= iterations**3 / 3


def test_the_sum_of_weights_falls_below_the_cube_beyond_twice_the_shift():
    assert schedule.weight_sum(200, 100.0) > 200**3
    assert schedule.weight_sum(230, 100.0) < 230**3


def telescope(mu, smooth, any_alpha, contraction):
    """(1 - mu eta_t/contraction) p_t/eta_t - p_{t-1}/eta_{t-1}, with p_t, for t = 1..499."""
    a = schedule.shift(mu, smooth, 10, any_alpha)
    t = np.arange(1, 500)
    eta, before = schedule.step_size(t, mu, a, any_alpha), schedule.step_size(t - 1, mu, a, any_alpha)
    p, p_before = schedule.weights(499, a), schedule.weights(499, a - 1)
    return (1 - mu * eta / contraction) * p / eta - p_before / before, p


@pytest.mark.parametrize(("any_alpha", "contraction"), [(False, 2), (True, 8 / 3)])
def test_weights_over_steps_telescope_under_the_contraction_of_lemma_4_and_theorem_7(any_alpha, contraction):
    excess, _ = telescope(0.3, 2.0, any_alpha, contraction)
    assert np.all(excess <= 0)


def test_the_telescoping_of_theorem_5_fails_as_printed_but_by_no_more_than_strong_convexity_absorbs():
    excess, p = telescope(0.3, 2.0, any_alpha=False, contraction=8)
    assert np.all(excess > 0)
    assert np.all(excess <= 0.3 * p / 16)


@pytest.mark.parametrize("any_alpha", [False, True])
def test_steps_start_below_an_eighth_of_the_inverse_smoothness(any_alpha):
    a = schedule.shift(0.3, 2.0, 10, any_alpha)
    assert schedule.step_size(1, 0.3, a, any_alpha) <= 1 / (8 * 2.0)


def test_long_rounds_slow_the_steps_down():
    assert schedule.shift(1.0, 2.0, 10) == 256
    assert schedule.shift(1.0, 2.0, 1000) == 1000
    assert schedule.shift(1.0, 2.0, 10, any_alpha=True) == 128


@settings(deadline=None)
@given(st.floats(0.01, 10), st.floats(1, 100))
def test_least_alpha_gives_the_two_inequalities_of_the_proof(mu, cond):
    smooth = mu * cond
    gap = 1 - schedule.least_alpha(mu, smooth)
    bounds = 12 * smooth**2 * gap**2 / mu, 12 * smooth**2 * gap**2
    assert bounds[0] <= mu / 8 * (1 + 1e-9)
    assert bounds[1] <= mu / 8 * (1 + 1e-9)
    assert max(bounds) == pytest.approx(mu / 8, rel=1e-6)  # and no smaller alpha does
    alpha = 1 - gap
    assert 1 - 8 * (alpha - alpha**2) >= 0


def test_sampling_breaks_the_proof_near_alpha_one():
    assert schedule.sampled_proof_holds(0.99, 20, 20)
    assert not schedule.sampled_proof_holds(0.99, 10, 20)
    assert schedule.sampled_proof_holds(1.0, 18, 20)
    assert not schedule.sampled_proof_holds(1.0, 17, 20)


def test_participation_factor():
    assert schedule.participation_factor(2, 10) == 0.2
    assert schedule.participation_factor(9, 10) == 0.5


@settings(deadline=None)
@given(st.floats(0, 1), st.integers(1, 30), st.integers(0, 30))
def test_participation_factor_bounds_the_share_of_progress(alpha, sampled, others):
    clients = sampled + others
    share = alpha**2 * sampled / clients + 1 - alpha
    assert share >= schedule.participation_factor(sampled, clients) - 1e-12


def test_round_lengths_and_numbers_multiply_to_the_iterations():
    assert schedule.local_steps(10_000, 25) == 20
    assert schedule.local_steps(10_000, 25) * schedule.rounds(10_000, 25) == pytest.approx(10_000)
    assert schedule.nonconvex_local_steps(160_000, 16) == pytest.approx(10)
    assert schedule.nonconvex_local_steps(160_000, 16) * schedule.nonconvex_rounds(160_000, 16) == pytest.approx(
        160_000
    )


def test_nonconvex_step_respects_the_drift_condition_of_the_proof():
    smooth, iterations = 3.0, 400
    assert schedule.nonconvex_step_size(smooth, iterations, 20) <= 1 / (2 * math.sqrt(5) * 20 * smooth) * (1 + 1e-12)
    with pytest.raises(RequestError, match="at most sqrt"):
        schedule.nonconvex_step_size(smooth, iterations, 21)
