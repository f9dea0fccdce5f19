from math import sqrt

import numpy as np
import pytest

from mooring.theory import upper_bounds as theory
from mooring.theory.alternative import fedprox_aer_regime
from mooring.theory.diversity import radius_max, radius_rms
from mooring.theory.lambda_aer import lambda_aer
from mooring.theory.lambda_ier import lambda_ier
from mooring.theory.weights import imbalance, s1, s2, size_weights, uniform_weights

RNG = np.random.default_rng(7)
MU, SMOOTH, DIM, RADIUS = 0.4, 2.0, 2, 1.0
ELL_MAX = SMOOTH / 2 * (2 * RADIUS) ** 2
N, P = np.array([30, 40, 60, 70]), np.array([0.1, 0.2, 0.3, 0.4])


class Simulation:
    """l = h/2 |w - z|^2, z = w*_i + noise in a ball, h independent of z: 3,000 federations in closed form."""

    def __init__(self, spread, p=P, n=N, runs=3000):
        truths = RNG.normal(size=(len(n), DIM))
        truths -= p @ truths
        self.truths = truths * spread / radius_max(truths, p)
        self.p, self.n = p, n
        reach = RADIUS - spread
        curvature, center, square = [], [], []
        for truth, k in zip(self.truths, n):
            h = RNG.uniform(MU, SMOOTH, (runs, k))
            angle = RNG.uniform(0, 2 * np.pi, (runs, k))
            z = truth + reach * np.sqrt(RNG.uniform(0, 1, (runs, k)))[..., None] * np.stack(
                [np.cos(angle), np.sin(angle)], 2
            )
            curvature.append(h.mean(1))
            center.append(np.mean(h[..., None] * z, axis=1))
            square.append(np.mean(np.sum((h[..., None] * (z - truth)) ** 2, axis=2)))
        self.curvature, self.center = np.stack(curvature, 1)[..., None], np.stack(center, 1)
        self.noise = sqrt(max(square)) * 1.02  # Monte Carlo
        self.rms, self.max = radius_rms(self.truths, p), radius_max(self.truths, p)

    def risks(self, models):
        """E[excess risk] per client: the population curvature is (MU + SMOOTH)/2."""
        return (MU + SMOOTH) / 4 * np.mean(np.sum((models - self.truths) ** 2, axis=2), axis=0)

    def common(self):
        w = self.p[:, None]
        return np.sum(w * self.center, 1, keepdims=True) / np.sum(w * self.curvature, 1, keepdims=True)

    def fedprox(self, lam):
        share = self.p[:, None] / (self.curvature + lam)
        w = np.sum(share * self.center, 1, keepdims=True) / (1 - lam * share.sum(1, keepdims=True))
        return w, (self.center + lam * w) / (self.curvature + lam)


@pytest.mark.parametrize("spread", [0.0, 0.05, 0.4])
def test_bounds_hold_on_simulated_risks(spread):
    sim = Simulation(spread)
    risks = sim.risks(sim.common())
    aer = theory.fedavg_aer(sim.rms, MU, SMOOTH, ELL_MAX, P, N, constants=theory.FEDAVG_AER_PROOF)
    ier = theory.fedavg_ier(sim.max, MU, SMOOTH, sim.noise, P, N, constants=theory.FEDAVG_IER_PROOF)
    assert P @ risks <= aer
    assert risks.max() <= ier
    risks = sim.risks(sim.center / sim.curvature)
    assert np.all(risks <= theory.local_ier(MU, SMOOTH, ELL_MAX, N, constant=theory.LOCAL_PROOF))
    assert P @ risks <= theory.local_aer(MU, SMOOTH, ELL_MAX, P, N, constant=theory.LOCAL_PROOF)


@pytest.mark.parametrize("spread", [0.0, 0.05, 0.4])
def test_fedprox_bounds_hold_on_simulated_risks(spread):
    sim = Simulation(spread)
    for lam in (1e-3, lambda_aer(sim.rms, MU, P, N).lam, lambda_ier(sim.max, MU, P, N).lam, MU / 16 / P.max()):
        common, personal = sim.fedprox(lam)
        risks = sim.risks(personal)
        assert P @ risks <= theory.fedprox_aer_at(
            lam, sim.rms, MU, SMOOTH, ELL_MAX, P, N, constant=theory.FEDPROX_PROOF
        )
        assert np.all(
            risks
            <= theory.fedprox_ier_at(
                lam, sim.max, MU, SMOOTH, ELL_MAX, sim.noise, 2 * RADIUS, P, N, constant=theory.FEDPROX_PROOF
            )
        )
        # Proposition C.4; the truths average to 0
        assert np.mean(np.sum(common**2, 2)) <= theory.fedprox_global_error(lam, sim.max, MU, SMOOTH, sim.noise, P, N)
    at_rule = P @ sim.risks(sim.fedprox(lambda_aer(sim.rms, MU, P, N).lam)[1])
    assert at_rule <= theory.fedprox_aer(sim.rms, MU, SMOOTH, ELL_MAX, P, N, constant=16 * theory.FEDPROX_PROOF)


def test_variance_scales_as_s2_together_and_s1_alone():
    """R = 0: the simulated risks of two weightings stand in the ratio of their S2 (and S1), as the bounds do."""
    n = np.array([10, 10, 400])
    risk = {}
    for name, p in {"size": size_weights(n), "uniform": uniform_weights(3)}.items():
        sim = Simulation(0.0, p, n)
        risk[name] = p @ sim.risks(sim.common()), p @ sim.risks(sim.center / sim.curvature), s2(p, n), s1(p, n)
    together = risk["uniform"][0] / risk["size"][0]
    assert together == pytest.approx(risk["uniform"][2] / risk["size"][2], rel=0.2)
    alone = risk["uniform"][1] / risk["size"][1]
    assert alone == pytest.approx(risk["uniform"][3] / risk["size"][3], rel=0.2)


def test_weights_by_size_minimise_the_fedavg_bounds():
    n = RNG.integers(5, 300, 12)
    best = size_weights(n)
    for _ in range(100):
        p = RNG.dirichlet(np.ones(12))
        assert theory.fedavg_aer(0.1, MU, SMOOTH, ELL_MAX, best, n) <= theory.fedavg_aer(0.1, MU, SMOOTH, ELL_MAX, p, n)
        assert theory.fedavg_ier(0.1, MU, SMOOTH, 1.0, best, n) <= theory.fedavg_ier(0.1, MU, SMOOTH, 1.0, p, n)


def test_dichotomy_is_the_better_of_the_two_up_to_a_factor_two():
    n = RNG.integers(20, 200, 15)
    p = size_weights(n)
    for radius in np.r_[0.0, np.geomspace(1e-3, 10, 60)]:
        best = min(theory.fedavg_aer(radius, MU, SMOOTH, ELL_MAX, p, n), theory.local_aer(MU, SMOOTH, ELL_MAX, p, n))
        assert best * (1 - 1e-12) <= theory.better_aer(radius, MU, SMOOTH, ELL_MAX, p, n) <= 2 * best * (1 + 1e-12)


def test_fedprox_rate_is_that_of_its_regime():
    for _ in range(50):
        m = int(RNG.integers(2, 30))
        p, n = RNG.dirichlet(np.ones(m)), RNG.integers(10, 1000, m)
        scale = MU + imbalance(p, n) * SMOOTH * ELL_MAX / MU
        for radius in np.geomspace(1e-4, 10, 40):
            rate = theory.fedprox_aer(radius, MU, SMOOTH, ELL_MAX, p, n) / scale
            order = fedprox_aer_regime(radius, p, n).order
            assert order * (1 - 1e-12) <= rate <= 2 * order * (1 + 1e-12)


def test_values_by_hand():
    n, p = np.array([50, 150]), np.array([0.25, 0.75])  # S1 = .01, S2 = .005, C_p = 1.5
    mu, smooth, ell_max, noise, radius = 0.5, 2.0, 3.0, 1.5, 0.2
    assert theory.fedavg_aer(radius, mu, smooth, ell_max, p, n) == pytest.approx(12 * 0.005 + 2 * 0.04)
    assert theory.fedavg_ier(radius, mu, smooth, noise, p, n) == pytest.approx(2 * 9 * 0.005 + 32 * 0.04)
    assert theory.local_ier(mu, smooth, ell_max, n) == pytest.approx([12 / 50, 12 / 150])
    assert theory.better_aer(radius, mu, smooth, ell_max, p, n) == pytest.approx(2 * 0.04 + 12 * 0.005)
    assert theory.better_ier(radius, mu, smooth, ell_max, noise, p, n) == pytest.approx(
        [32 * min(6 / 50, 0.04) + 0.09, 32 * min(6 / 150, 0.04) + 0.09]
    )
    assert theory.fedprox_aer(radius, mu, smooth, ell_max, p, n) == pytest.approx((0.5 + 1.5 * 12) * (0.01 + 0.005))
    assert theory.fedprox_aer_at(0.3, radius, mu, smooth, ell_max, p, n) == pytest.approx(6 * 0.01 / 0.8 + 0.15 * 0.04)
    scale = 2.5 * (6 + (2.25 * 4 + 4 + 2.25) / 0.25) + 0.5 * 16
    expected = [scale * (min(0.2 / sqrt(k), 1 / k) + sqrt(2) / 200) for k in n]
    assert theory.fedprox_ier(radius, mu, smooth, ell_max, noise, 4.0, n) == pytest.approx(expected)
    mean = (0.25 / sqrt(50) + 0.75 / sqrt(150)) ** 2
    expected = 48 * 4 * 2.25 / (0.25 * 0.09) * mean + 48 * 16 * 0.04 + 12 * 0.64 * 2.25 / (0.25 * 0.09) * 0.005
    assert theory.fedprox_global_error(0.3, radius, mu, smooth, noise, p, n) == pytest.approx(expected)
    for i, k in enumerate(n):
        one = (6 + 2.25 * 16 * k * mean + 2.25 * k * 0.005) / (0.3 * k) + 0.3 * (17 * 0.04 + 9 * 0.005)
        two = 12 / k + 0.3 * 16
        found = theory.fedprox_ier_at(0.3, radius, mu, smooth, ell_max, noise, 4.0, p, n)[i]
        assert found == pytest.approx(min(one, two))
