import numpy as np
import pytest

from mooring.core.errors import RequestError
from mooring.theory import two_stage_rate as theory
from mooring.theory.weights import size_weights, uniform_weights

RNG = np.random.default_rng(5)


def test_steps_by_hand():
    assert [theory.local_step(k, 0.5, 1.5) for k in range(3)] == pytest.approx([1 / 2, 1 / 4, 1 / 6])
    # lam gamma_t = 2 (mu + lam)/(mu (t + 1)) is above 1 until t + 1 > 2 (mu + lam)/mu
    weights = [1.5 * theory.server_step(t, 0.5, 1.5) for t in range(10)]
    assert weights == pytest.approx([8 / (t + 1) for t in range(10)])
    with pytest.raises(RequestError, match="server_step: lam"):
        theory.server_step(0, 0.5, 0.0)


def test_inner_steps_are_the_first_that_lemma_b2_allows():
    for _ in range(200):
        mu, lam, ell_max, diameter = 10 ** RNG.uniform(-1, 1, 4)
        smooth, t = mu * RNG.uniform(1, 4), int(RNG.integers(0, 50))
        steps = theory.inner_steps(t, mu, smooth, lam, ell_max, diameter)
        need = (4 * t + 20) * max(
            (lam / mu) ** 2, lam * smooth**2 * diameter**2 / (2 * mu**2 * ell_max), (smooth / mu) ** 2
        )
        assert need * (1 - 1e-12) <= steps + 1 < need * (1 + 1e-12) + 1
        assert steps >= 19  # smooth >= mu


def test_global_guarantee_follows_from_the_recursion_of_the_proof():
    """Eq. B.9: a_{t+1} <= (1 - 2/(t+1)) a_t + 12/(t+1)^2 with a_0 <= 4, in units of m|p|^2 G2/mu_F^2."""
    args = (0.5, 1.0, 2.0, 3.0, 1.0, [0.2, 0.8])
    unit = theory.global_guarantee(0, *args) / 12
    a = 4.0
    for t in range(200):
        assert a <= theory.global_guarantee(t, *args) / unit * (1 + 1e-12)
        a = max(0.0, 1 - 2 / (t + 1)) * a + 12 / (t + 1) ** 2
    # printed as 12/(t + 1) for every t; the recursion reaches 12, not 6, at t = 1
    assert theory.global_guarantee(1, *args) == pytest.approx(12 * unit)
    assert theory.global_guarantee(2, *args) == pytest.approx(4 * unit)


def test_guarantees_by_hand():
    mu, smooth, lam, ell_max, diameter = 0.5, 1.0, 3.0, 0.3, 2.0
    p = [0.5, 0.25, 0.25]
    g2 = 2 * 3 * 0.3
    assert theory.gradient_bound(smooth, lam, ell_max, diameter) == pytest.approx(g2)
    assert theory.gradient_bound(1.5, 9.0, 8.0, 3.0) == pytest.approx(4.5**2)
    assert theory.gradient_bound(9.0, 1.5, 8.0, 3.0) == pytest.approx(4.5**2)
    assert theory.local_guarantee(9, mu, smooth, diameter) == pytest.approx(8 * 4 / 0.25 / 10)
    global_9 = 12 * 3.5**2 * 3 * 0.375 * g2 / (9 * 0.25 * 10)
    assert theory.global_guarantee(9, mu, smooth, lam, ell_max, diameter, p) == pytest.approx(global_9)
    expected = 4 * 4 * 4 / (0.25 * 21) + 6 * 3.5**2 * 3 * 0.375 * g2 / (3 * 0.25 * 10)
    assert theory.objective_guarantee(9, 20, mu, smooth, lam, ell_max, diameter, p) == pytest.approx(expected)


def test_schedules():
    n = np.array([50, 100, 350])
    p = size_weights(n)
    for lam in (1e-3, 0.2, 3.0):
        reach, m_p2 = lam * max(lam, 1), 3 * np.sum(p**2)
        assert theory.rounds_aer(lam, p, n) == pytest.approx(reach * m_p2 * max(500 / 3, reach * 350**2))
        assert theory.final_steps_aer(lam, p, n) == pytest.approx((lam + 1) ** 2 * max(500 / 3, (lam * 350 * 0.7) ** 2))
        rounds = max(reach * n[i] * max(1 / p[i], reach * n[i]) for i in range(3))
        steps = max((lam + 1) ** 2 * n[i] * max(1 / p[i], lam**2 * p[i] ** 2 * n[i]) for i in range(3))
        assert theory.rounds_ier(lam, p, n) == pytest.approx(rounds)
        assert theory.final_steps_ier(lam, p, n, constant=2.0) == pytest.approx(2 * steps)
    # the orders are far beyond what anyone would run: about 6e6 rounds for n = 100 and lam = 5
    assert theory.rounds_aer(5.0, uniform_weights(10), np.full(10, 100)) == pytest.approx(6.25e6)


class Balls:
    """l(w, z) = h/2 |w - z|^2 with z in a ball W of diameter D and curvatures h in [mu, smooth]."""

    def __init__(self, mu, smooth, clients=4, samples=6, dim=2, diameter=2.0):
        self.mu, self.smooth, self.diameter, self.m, self.n, self.dim = mu, smooth, diameter, clients, samples, dim
        self.ell_max = smooth / 2 * diameter**2
        z = RNG.normal(size=(clients, samples, dim)) + 2 * RNG.normal(size=(clients, 1, dim))
        self.z = self.project(z)
        self.h = RNG.uniform(mu, smooth, (clients, samples))
        self.h[:, :2] = [mu, smooth]
        self.curvature = self.h.mean(1, keepdims=True)
        self.center = np.mean(self.h[..., None] * self.z, axis=1)  # (1/n) sum_j h_j z_j

    def project(self, w):
        norm = np.linalg.norm(w, axis=-1, keepdims=True)
        return w * np.minimum(1, self.diameter / 2 / np.maximum(norm, 1e-12))

    def prox(self, w, lam):
        return (self.center + lam * w) / (self.curvature + lam)

    def best(self, p, lam):
        """Fixed point of w = sum_i p_i prox_i(w)."""
        share = np.asarray(p)[:, None] / (self.curvature + lam)
        return np.sum(share * self.center, axis=0) / (1 - lam * share.sum())

    def sgd_step(self, v, w, eta, lam, batch, client):
        """One projected step from v [runs, c, d] of the clients [.., c], each with its own batch, no replacement."""
        chosen = np.argsort(RNG.random((*v.shape[:2], self.n)), axis=2)[..., :batch]
        h, z = self.h[client[..., None], chosen], self.z[client[..., None], chosen]
        gradient = np.mean(h[..., None] * (v[:, :, None] - z), axis=2) + lam * (v - w)
        return self.project(v - eta * gradient)

    def objective(self, w, v, p, lam):
        loss = np.mean(self.h / 2 * np.sum((v[:, :, None] - self.z) ** 2, axis=3), axis=2)
        return (loss + lam / 2 * np.sum((v - w) ** 2, axis=2)) @ p


@pytest.mark.parametrize("lam", [0.05, 1.0, 20.0])
def test_lemma_b1_holds(lam):
    """Mean over 300 runs of the inner loop: below the bound at every k, and falling like 1/k."""
    balls, runs = Balls(0.5, 1.0), 300
    w = balls.project(RNG.normal(size=balls.dim))
    target = balls.prox(w, lam)
    v = balls.project(3 * RNG.normal(size=(runs, balls.m, balls.dim)))
    errors = []
    for k in range(600):
        errors.append(np.sum((v - target) ** 2, axis=2).mean(0).max())
        assert errors[-1] <= theory.local_guarantee(k, balls.mu, balls.smooth, balls.diameter)
        v = balls.sgd_step(v, w, theory.local_step(k, balls.mu, lam), lam, 2, np.arange(balls.m))
    assert 0.5 < errors[599] * 600 / (errors[149] * 150) < 2


def test_lemma_b2_and_proposition_b1_hold():
    """Algorithm 3 with half of the clients a round, 200 runs: the global model's error and the final objective."""
    balls, runs, rounds, lam, sampled = Balls(1.0, 1.0), 200, 60, 1.0, 2
    p = np.array([0.1, 0.2, 0.3, 0.4])
    constants = (balls.mu, balls.smooth, lam, balls.ell_max, balls.diameter)
    best = balls.best(p, lam)
    w = balls.project(3 * RNG.normal(size=(runs, 1, balls.dim)))
    v = balls.project(3 * RNG.normal(size=(runs, balls.m, balls.dim)))
    errors = []
    for t in range(rounds):
        errors.append(np.mean(np.sum((w[:, 0] - best) ** 2, axis=1)))
        assert errors[-1] <= theory.global_guarantee(t, *constants, p)
        asked = np.argsort(RNG.random((runs, balls.m)), axis=1)[:, :sampled]
        trained = np.take_along_axis(v, asked[..., None], axis=1)
        for k in range(theory.inner_steps(t, *constants)):
            trained = balls.sgd_step(trained, w, theory.local_step(k, balls.mu, lam), lam, 3, asked)
        np.put_along_axis(v, asked[..., None], trained, axis=1)
        step = lam * balls.m * theory.server_step(t, balls.mu, lam) / sampled
        w = balls.project(w - step * np.sum(p[asked][..., None] * (w - trained), axis=1, keepdims=True))
    assert errors[-1] < balls.diameter**2 / 20
    assert 0.3 < errors[59] * 60 / (errors[19] * 20) < 3

    final = 100
    for k in range(final):
        v = balls.sgd_step(v, w, theory.local_step(k, balls.mu, lam), lam, 3, np.arange(balls.m))
    exact = balls.objective(best, balls.prox(best, lam)[None], p, lam)
    excess = balls.objective(w, v, p, lam) - exact
    assert np.all(excess >= -1e-12)
    assert excess.mean() <= theory.objective_guarantee(rounds, final, *constants, p)
