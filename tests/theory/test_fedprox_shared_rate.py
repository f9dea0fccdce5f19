import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooring.core.errors import RequestError
from mooring.theory import fedprox_shared_rate as rate

CENTRES = np.linspace(-3, 3, 10)
PHASES = np.linspace(0, 5, 10)
WAVE = 0.5  # weight of the cosine that makes the losses non-convex


def smooth_slope(w, clients):
    """Derivative of sqrt(1 + (w - c)^2) + WAVE cos(w + phase): Lipschitz and smooth with constant 1 + WAVE."""
    u = w - CENTRES[clients]
    return u / np.sqrt(1 + u**2) - WAVE * np.sin(w + PHASES[clients])


def kinked_slope(w, clients):
    """A subgradient of |w - c| + WAVE cos(w + phase): (1 + WAVE)-Lipschitz, WAVE-weakly convex."""
    return np.sign(w - CENTRES[clients]) - WAVE * np.sin(w + PHASES[clients])


def prox(slope, w, eta, radius):
    """Root of the increasing u -> slope(u) + (u - w)/eta by bisection on |u - w| <= radius eta."""
    low, high = w - radius * eta, w + radius * eta
    for _ in range(40):
        middle = (low + high) / 2
        right = slope(middle) + (middle - w) / eta > 0
        low, high = np.where(right, low, middle), np.where(right, middle, high)
    return (low + high) / 2


def simulate(slope, eta, rounds, sampled, runs, inexact=0.0, seed=0):
    """w_0..w_{T-1} of shared-model FedProx, [rounds, runs]; every local solve is off by `inexact`."""
    rng = np.random.default_rng(seed)
    w, path = np.full(runs, 6.0), []
    for _ in range(rounds):
        path.append(w)
        clients = rng.permuted(np.tile(np.arange(10), (runs, 1)), axis=1)[:, :sampled]
        local = prox(lambda u, clients=clients: slope(u, clients), w[:, None], eta, radius=2.0)
        w = (local + inexact).mean(axis=1)
    return np.array(path)


def mean_risk(w, loss):
    return np.mean([loss(w, i) for i in range(10)], axis=0)


def smooth_loss(w, i):
    return np.sqrt(1 + (w - CENTRES[i]) ** 2) + WAVE * np.cos(w + PHASES[i])


def kinked_loss(w, i):
    return np.abs(w - CENTRES[i]) + WAVE * np.cos(w + PHASES[i])


GRID = np.linspace(-10, 10, 20001)


@pytest.mark.parametrize("sampled", [1, 4])
def test_theorem_1_holds_with_inexact_solves_of_a_non_convex_problem(sampled):
    smooth = lipschitz = 1 + WAVE
    rounds = 600
    eta = rate.step_size(smooth, rounds, sampled)
    tolerance = rate.gradient_tolerance(lipschitz, smooth, eta, sampled)
    off = tolerance / (1 / eta + smooth)  # then |grad Q| <= tolerance
    path = simulate(smooth_slope, eta, rounds, sampled, runs=8, inexact=off)
    gradients = np.mean([smooth_slope(path, i) for i in range(10)], axis=0)
    gap = mean_risk(6.0, smooth_loss) - mean_risk(GRID, smooth_loss).min()
    bound = rate.smooth_bound(gap, lipschitz, smooth, eta, rounds, sampled)
    assert np.mean(gradients**2) <= bound
    assert bound < lipschitz**2  # says more than that gradients are bounded


def test_remark_2_holds_with_everyone_taking_part():
    smooth = lipschitz = 1 + WAVE
    rounds = 250
    eta = rate.full_participation_step(smooth, rounds)
    off = rate.full_participation_tolerance(lipschitz, smooth, eta) / (1 / eta + smooth)
    path = simulate(smooth_slope, eta, rounds, sampled=10, runs=1, inexact=off)
    gradients = np.mean([smooth_slope(path, i) for i in range(10)], axis=0)
    gap = mean_risk(6.0, smooth_loss) - mean_risk(GRID, smooth_loss).min()
    bound = rate.full_participation_bound(gap, lipschitz, smooth, eta, rounds)
    assert np.mean(gradients**2) <= bound < lipschitz**2


def test_theorem_2_holds_for_a_kinked_weakly_convex_problem():
    lipschitz, moreau, rounds = 1 + WAVE, 0.8, 400
    eta = rate.weakly_convex_step(moreau, rounds, WAVE)
    path = simulate(kinked_slope, eta, rounds, sampled=2, runs=4)
    near = prox(lambda u: np.mean([kinked_slope(u, i) for i in range(10)], axis=0), path, moreau, radius=2.0)
    envelope_gradients = (path - near) / moreau
    start = mean_risk(near[0, 0], kinked_loss) + (near[0, 0] - 6.0) ** 2 / (2 * moreau)
    gap = start - mean_risk(GRID, kinked_loss).min()
    bound = rate.weakly_convex_bound(gap, lipschitz, moreau, rounds, WAVE)
    assert np.mean(envelope_gradients**2) <= bound < lipschitz**2
    assert rate.moreau_gradient_norm(path[0], near[0], moreau) == pytest.approx(np.linalg.norm(envelope_gradients[0]))


@settings(deadline=None)
@given(st.floats(0.1, 10), st.floats(0.1, 10), st.floats(0.1, 10), st.integers(1, 10**6), st.integers(1, 50))
def test_the_bound_at_the_prescribed_step_is_within_six_times_the_rate(gap, lipschitz, smooth, rounds, sampled):
    eta = rate.step_size(smooth, rounds, sampled)
    bound = rate.smooth_bound(gap, lipschitz, smooth, eta, rounds, sampled)
    assert bound <= 6 * rate.smooth_rate(gap, lipschitz, smooth, rounds, sampled) * (1 + 1e-9)


@settings(deadline=None)
@given(st.floats(0.1, 10), st.floats(0.1, 10), st.floats(0.001, 1), st.integers(1, 50))
def test_the_constants_cover_what_one_step_of_the_proof_spends(lipschitz, smooth, scale, sampled):
    """Per round: drift of the local models, sampling of clients, and inexact solves at the full tolerance."""
    eta = scale / (3 * smooth)
    tolerance = rate.gradient_tolerance(lipschitz, smooth, eta, sampled)
    drift = (smooth * (lipschitz + tolerance) * eta) ** 2
    sampling = 3 * smooth * lipschitz**2 * eta / sampled
    inexact = 2 * lipschitz * tolerance + 3 * smooth * eta * tolerance**2
    bound = rate.smooth_bound(0.0, lipschitz, smooth, eta, 1, sampled)
    assert drift + sampling + inexact <= bound * (1 + 1e-12)
    off = rate.full_participation_tolerance(lipschitz, smooth, eta)
    alone = (smooth * (lipschitz + off) * eta) ** 2 + 2 * lipschitz * off + 2 * smooth * eta * off**2
    assert alone <= rate.full_participation_bound(0.0, lipschitz, smooth, eta, 1) * (1 + 1e-12)


def test_the_bounds_at_one_point():
    assert rate.smooth_bound(2.0, 3.0, 0.5, 0.1, 50, 4) == pytest.approx(0.8 + 4 * 0.15**2 + 10 * 0.5 * 9 * 0.1 / 4)
    assert rate.full_participation_bound(2.0, 3.0, 0.5, 0.1, 50) == pytest.approx(0.8 + 4 * 0.15**2)
    assert rate.weakly_convex_bound(2.0, 3.0, 0.1, 25, 1.0) == pytest.approx(0.8 + (4 + 3.6) / 0.5)


def test_the_regime_switches_at_the_cube_of_the_sampled_clients():
    assert not rate.sampling_dominates(26, 3)
    assert rate.sampling_dominates(27, 3)
    assert 3 * rate.step_size(1.0, 27, 3) == pytest.approx(27 ** (-1 / 3)) == pytest.approx(math.sqrt(3 / 27))
    assert rate.smooth_rate(1, 1, 1, 26, 3) == pytest.approx(2 * 26 ** (-2 / 3))
    assert rate.smooth_rate(1, 1, 1, 28, 3) == pytest.approx(2 / math.sqrt(28 * 3))


def test_gradient_certificate_is_the_printed_length_times_twice_the_smoothness():
    args = {"lipschitz": 2.0, "smooth": 3.0, "eta": 0.05, "sampled": 4}
    assert rate.gradient_tolerance(**args) == pytest.approx(min(2.0 / 2, 2 * 3 * 2 * 0.05 / 4))
    assert rate.gradient_tolerance(**args) == pytest.approx(6 * rate.printed_inexactness(**args))


def test_a_small_gradient_bounds_the_suboptimality_and_is_tight_for_the_most_concave_loss():
    smooth, eta, x = 2.0, 0.3, 0.7
    curvature = 1 / eta - smooth  # Q for the loss -smooth/2 w^2, centred at 0
    assert rate.suboptimality_from_gradient(curvature * x, eta, smooth) == pytest.approx(curvature * x**2 / 2)
    with pytest.raises(RequestError, match="below 1/smooth"):
        rate.suboptimality_from_gradient(1.0, 0.5, smooth)


def test_inputs_outside_the_theorems_are_refused():
    with pytest.raises(RequestError, match=r"below 1/\(2 weak\)"):
        rate.weakly_convex_step(1.0, 100, 0.5)
    with pytest.raises(RequestError, match=r"at most 1/\(3 smooth\)"):
        rate.smooth_bound(1.0, 1.0, 1.0, 0.5, 100, 2)
    assert rate.weakly_convex_step(5.0, 100, 0.0) == pytest.approx(0.5)  # convex: any parameter
