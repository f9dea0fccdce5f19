import numpy as np
import pytest
from scipy.optimize import approx_fprime, minimize

from mooring.core.errors import RequestError
from mooring.theory.moreau import mixed_strong_convexity, moreau

RNG = np.random.default_rng(1)
MU, SMOOTH = 0.3, 4.0


def random_hessian(mu, smooth, dim):
    q = np.linalg.qr(RNG.normal(size=(dim, dim)))[0]
    return (q * np.r_[mu, smooth, RNG.uniform(mu, smooth, dim - 2)]) @ q.T


@pytest.mark.parametrize("lam", [1e-3, 0.3, 2.0, 1e3])
def test_quadratics_attain_every_constant(lam):
    c = moreau(MU, SMOOTH, lam)
    h = random_hessian(MU, SMOOTH, 5)
    prox = lam * np.linalg.inv(h + lam * np.eye(5))  # the linear part of prox
    envelope = np.linalg.eigvalsh(lam * (np.eye(5) - prox))  # grad F = lam (w - prox(w))
    assert envelope[[0, -1]] == pytest.approx([c.mu_g, c.smooth_g])
    assert np.linalg.eigvalsh(h + lam * np.eye(5))[[0, -1]] == pytest.approx([c.mu_l, c.smooth_l])
    assert np.linalg.norm(prox, ord=2) == pytest.approx(c.lip_prox)
    assert c.cond_g == pytest.approx(envelope[-1] / envelope[0])


def test_bounds_hold_for_a_loss_that_is_not_quadratic():
    """sum_j log cosh(x_j'v - y_j) + ridge: the envelope's gradient by finite differences, its constants on pairs."""
    x, y, lam = RNG.normal(size=(6, 3)), RNG.normal(size=6), 0.7
    smooth = np.linalg.eigvalsh(x.T @ x)[-1] + MU
    c = moreau(MU, smooth, lam)

    def loss(v):
        t = x @ v - y
        return np.sum(np.logaddexp(t, -t)) + MU / 2 * v @ v

    def solve(w):
        def objective(v):
            return loss(v) + lam / 2 * np.sum((v - w) ** 2)

        def gradient(v):
            return x.T @ np.tanh(x @ v - y) + MU * v + lam * (v - w)

        return minimize(objective, w, jac=gradient, method="BFGS", options={"gtol": 1e-10})

    for _ in range(10):
        a, b = RNG.normal(size=(2, 3))
        at_a, at_b = solve(a).x, solve(b).x
        assert approx_fprime(a, lambda w: solve(w).fun, 1e-6) == pytest.approx(lam * (a - at_a), abs=1e-4)
        step = a - b
        slope = lam * (step - (at_a - at_b)) @ step / (step @ step)
        assert c.mu_g - 1e-6 <= slope <= c.smooth_g + 1e-6
        assert np.linalg.norm(at_a - at_b) <= c.lip_prox * np.linalg.norm(step) + 1e-6


def test_limits():
    alone, common = moreau(MU, SMOOTH, 0.0), moreau(MU, SMOOTH, 1e12)
    assert (alone.mu_g, alone.smooth_g, alone.lip_prox, alone.cond_g) == (0.0, 0.0, 0.0, 1.0)
    assert (common.mu_g, common.smooth_g, common.cond_g) == pytest.approx((MU, SMOOTH, SMOOTH / MU))


def test_one_pull_per_client():
    lam, p = RNG.uniform(0.01, 10, 6), RNG.dirichlet(np.ones(6))
    total = sum(
        w * pull * (np.eye(4) - pull * np.linalg.inv(random_hessian(MU, SMOOTH, 4) + pull * np.eye(4)))
        for w, pull in zip(p, lam)
    )
    bound = mixed_strong_convexity(MU, lam, p)
    assert np.linalg.eigvalsh(total)[0] >= bound
    assert bound == pytest.approx(sum(w * moreau(MU, SMOOTH, pull).mu_g for w, pull in zip(p, lam)))


def test_refusals():
    with pytest.raises(RequestError, match="at most smooth"):
        moreau(2.0, 1.0, 1.0)
    with pytest.raises(RequestError, match="lam must be"):
        moreau(1.0, 2.0, -1.0)
    with pytest.raises(RequestError, match="mu must be"):
        moreau(0.0, 2.0, 1.0)
