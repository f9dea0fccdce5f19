from math import sqrt

import numpy as np
import pytest

from mooring.theory import upper_bounds as theory
from mooring.theory.alternative import fedprox_aer_regime
from mooring.theory.lambda_aer import lambda_aer
from mooring.theory.lambda_ier import lambda_ier
from mooring.theory.weights import imbalance, s1, s2, size_weights, uniform_weights
from tests.support.radii import radius_max, radius_rms

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
    for _ in range(15):
        m = int(RNG.integers(2, 30))
        p, n = RNG.dirichlet(np.ones(m)), RNG.integers(10, 1000, m)
        scale = MU + imbalance(p, n) * SMOOTH * ELL_MAX / MU
        for radius in np.geomspace(1e-4, 10, 20):
            rate = theory.fedprox_aer(radius, MU, SMOOTH, ELL_MAX, p, n) / scale
            order = fedprox_aer_regime(radius, p, n).order
            assert order * (1 - 1e-12) <= rate <= 2 * order * (1 + 1e-12)


def test_fedprox_bounds_equal_a_transcription():
    for _ in range(100):
        mu, ell_max, noise, diameter, lam = RNG.uniform(0.1, 3, 5)
        smooth, n, p = mu * RNG.uniform(1, 5), RNG.integers(2, 50, 3), RNG.dirichlet(np.ones(3))
        radius = 10 ** RNG.uniform(-2, 0.5)
        alone, together = sum(w / k for w, k in zip(p, n)), sum(w * w / k for w, k in zip(p, n))
        c_p, total = max(p) * alone / together, sum(n)
        found = theory.fedprox_aer(radius, mu, smooth, ell_max, p, n, constant=2.0)
        rate = min(radius * sqrt(alone), alone) + together
        assert found == pytest.approx(2 * (mu + c_p * smooth * ell_max / mu) * rate)
        found = theory.fedprox_aer_at(lam, radius, mu, smooth, ell_max, p, n, constant=2.0)
        assert found == pytest.approx(2 * smooth * ell_max * alone / (mu + lam) + lam * radius * radius / 2)
        mean = sum(w / sqrt(k) for w, k in zip(p, n)) ** 2
        found = theory.fedprox_global_error(lam, radius, mu, smooth, noise, p, n)
        terms = (
            smooth**2 * noise**2 / lam**2 * mean,
            smooth**2 * radius**2,
            (mu + lam) ** 2 * noise**2 / lam**2 * together,
        )
        assert found == pytest.approx((48 * terms[0] + 48 * terms[1] + 12 * terms[2]) / mu**2)
        at_rule = theory.fedprox_ier(radius, mu, smooth, ell_max, noise, diameter, n, constant=2.0)
        at_lam = theory.fedprox_ier_at(lam, radius, mu, smooth, ell_max, noise, diameter, p, n, constant=2.0)
        for i, k in enumerate(n):
            inner = smooth * ell_max + (noise**2 * smooth**2 + smooth**2 + noise**2) / (mu * mu)
            scale = (mu + 1 / mu) * inner + mu * diameter * diameter
            rate = min(radius / sqrt(k), 1 / k) + sqrt(3) / total
            assert at_rule[i] == pytest.approx(2 * scale * rate)
            bracket = smooth * ell_max + noise**2 * smooth**2 * k / (mu * mu) * mean + noise**2 * k * together
            spread = (1 + smooth**2 / (mu * mu)) * radius**2 + noise**2 / (mu * mu) * together
            one, two = bracket / (lam * k) + lam * spread, smooth * ell_max / (mu * k) + lam * diameter * diameter
            assert at_lam[i] == pytest.approx(2 * min(one, two))


def test_baselines_equal_a_transcription():
    for _ in range(50):
        mu, ell_max, noise, radius = RNG.uniform(0.1, 3, 4)
        smooth, n, p = mu * RNG.uniform(1, 5), RNG.integers(2, 50, 3), RNG.dirichlet(np.ones(3))
        s_2, total = sum(w * w / k for w, k in zip(p, n)), sum(n)
        args = radius, mu, smooth
        found = theory.fedavg_aer(*args, ell_max, p, n, constants=(2.0, 3.0))
        assert found == pytest.approx(2 * smooth * ell_max * s_2 / mu + 3 * smooth * radius * radius)
        found = theory.fedavg_ier(*args, noise, p, n, constants=(2.0, 3.0))
        assert found == pytest.approx(2 * smooth * noise**2 * s_2 / mu**2 + 3 * smooth**3 * radius**2 / mu**2)
        found = theory.local_aer(mu, smooth, ell_max, p, n, constant=2.0)
        assert found == pytest.approx(2 * smooth * ell_max / mu * sum(w / k for w, k in zip(p, n)))
        found = theory.better_aer(*args, ell_max, p, n)
        choice = min(ell_max * 3 / mu / total, radius**2)
        assert found == pytest.approx(smooth * choice + smooth * ell_max * s_2 / mu)
        for i, k in enumerate(n):
            choice = min(ell_max / mu / k, radius**2)
            expected = smooth**3 * choice / mu**2 + smooth * noise**2 * s_2 / mu**2
            assert theory.better_ier(*args, ell_max, noise, p, n)[i] == pytest.approx(expected)


def test_orders_have_no_constant_by_default():
    args = 0.3, MU, SMOOTH, ELL_MAX
    assert theory.fedavg_aer(*args, P, N) == theory.fedavg_aer(*args, P, N, constants=(1.0, 1.0))
    assert theory.fedavg_ier(*args, P, N) == theory.fedavg_ier(*args, P, N, constants=(1.0, 1.0))
    assert theory.local_aer(*args[1:], P, N) == theory.local_aer(*args[1:], P, N, constant=1.0)
    assert theory.fedprox_aer(*args, P, N) == theory.fedprox_aer(*args, P, N, constant=1.0)
    assert theory.fedprox_aer_at(0.1, *args, P, N) == theory.fedprox_aer_at(0.1, *args, P, N, constant=1.0)
    rest = (*args, 1.5, 2.0)
    assert np.array_equal(theory.fedprox_ier(*rest, N), theory.fedprox_ier(*rest, N, constant=1.0))
    assert np.array_equal(
        theory.fedprox_ier_at(0.1, *rest, P, N), theory.fedprox_ier_at(0.1, *rest, P, N, constant=1.0)
    )
