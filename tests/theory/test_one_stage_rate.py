from itertools import pairwise, product
from math import ceil, log

import numpy as np
import pytest

from mooring.core.errors import RequestError
from mooring.theory import one_stage_rate as theory
from mooring.theory.moreau import moreau

RNG = np.random.default_rng(2)
GRID = [(mu, mu * cond, lam) for mu, cond, lam in product((1e-3, 0.1, 3.0), (1.0, 1.5, 10, 1e3), np.logspace(-4, 4, 9))]


def eq12(mu, smooth, lam, eta, gamma, steps):
    """Eq. 12 as printed."""
    mu_g, smooth_g = lam * mu / (lam + mu), lam * smooth / (lam + smooth)
    lip = lam / (lam + mu)
    return (2 + 64 * lip**2 * (1 / mu_g) ** 2 * lam**2) * (1 - eta * (mu + lam)) ** steps <= (1 - gamma * smooth_g) ** 4


def test_preset_satisfies_both_conditions_on_a_grid():
    for mu, smooth, lam in GRID:
        eta, gamma, steps = theory.corollary_step_sizes(mu, smooth, lam)
        assert steps == ceil(2 + (lam + smooth) / (lam + mu) * log(1056 * (smooth / mu) ** 2))
        assert eq12(mu, smooth, lam, eta, gamma, steps)
        assert theory.eq12_holds(mu, smooth, lam, eta, gamma, steps)
        assert theory.eq109_holds(mu, smooth, lam, gamma)


def test_least_steps_is_the_first_that_satisfies_eq12():
    for mu, smooth, lam in GRID:
        if smooth / mu > 100:
            continue
        for slow, fraction in product((0.01, 0.8), (0.1, 0.5, 0.9)):
            eta, gamma = slow / (smooth + lam), fraction * (1 / lam + 1 / smooth)
            steps = theory.least_steps(mu, smooth, lam, eta, gamma)
            assert eq12(mu, smooth, lam, eta, gamma, steps)
            assert steps == 1 or not eq12(mu, smooth, lam, eta, gamma, steps - 1)
            assert theory.eq12_holds(mu, smooth, lam, eta, gamma, steps)
            assert steps == 1 or not theory.eq12_holds(mu, smooth, lam, eta, gamma, steps - 1)
        eta, gamma, steps = theory.corollary_step_sizes(mu, smooth, lam)
        assert theory.least_steps(mu, smooth, lam, eta, gamma) <= steps
    assert theory.least_steps(0.5, 0.5, 1.0, 1 / 1.5, 1.0) == 1  # one step of size 1/smooth_l solves it


def test_step_of_the_papers_experiments_never_qualifies():
    mu, smooth, lam = 0.1, 1.0, 0.5
    eta, gamma, _ = theory.corollary_step_sizes(mu, smooth, lam)
    assert not theory.eq12_holds(mu, smooth, lam, eta, 2 * gamma, 10**6)
    assert not theory.eq12_holds(mu, smooth, lam, 1.01 * eta, gamma, 10**6)
    with pytest.raises(RequestError, match="below 1/smooth_g"):
        theory.least_steps(mu, smooth, lam, eta, 2 * gamma)
    with pytest.raises(RequestError, match="eta in"):
        theory.least_steps(mu, smooth, lam, 1.01 * eta, gamma)
    # gamma = 1/lam, the plain average, always qualifies, with more steps the smaller lam is
    needed = [theory.least_steps(mu, smooth, pull, 1 / (smooth + pull), 1 / pull) for pull in (10, 1, 0.1, 0.01)]
    assert needed == sorted(needed)


def test_eq109_is_not_implied_by_eq12():
    mu, smooth, lam = 1.0, 1.001, 1.0
    eta, gamma = 1 / (smooth + lam), 0.99 * (1 / lam + 1 / smooth)
    assert theory.eq12_holds(mu, smooth, lam, eta, gamma, 10**4)
    assert not theory.eq109_holds(mu, smooth, lam, gamma)
    for mu, smooth, lam in GRID:
        mu_g, smooth_g = lam * mu / (lam + mu), lam * smooth / (lam + smooth)
        for fraction in np.linspace(0.4, 1.2, 81):
            gamma = fraction / smooth_g
            zeta = 1 - gamma * smooth_g
            printed = zeta > 0 and gamma * (2 + 1 / zeta) * mu_g / 2
            if abs(printed - 1) > 1e-9:
                assert theory.eq109_holds(mu, smooth, lam, gamma) == (zeta > 0 and printed <= 1)


@pytest.mark.parametrize(("cond", "lam"), [(1.5, 0.2), (5, 0.05), (5, 1.0), (20, 0.3), (20, 30.0)])
def test_algorithm_1_contracts_as_stated(cond, lam):
    """Algorithm 1 on random quadratics: the proof's Lyapunov sum shrinks by r each round, the error in the long run."""
    mu, clients, dim = 0.5, 6, 4
    smooth = cond * mu
    q = np.linalg.qr(RNG.normal(size=(clients, dim, dim)))[0]
    eig = np.concatenate(
        [np.full((clients, 1), mu), np.full((clients, 1), smooth), RNG.uniform(mu, smooth, (clients, 2))], 1
    )
    h = np.einsum("iab,ib,icb->iac", q, eig, q)
    c, p = RNG.normal(size=(clients, dim)), RNG.dirichlet(np.ones(clients))
    inverse = np.linalg.inv(h + lam * np.eye(dim))
    pulled = lam * np.einsum("iab,ibc->iac", inverse, h)
    best = np.linalg.solve(np.einsum("i,iab->ab", p, pulled), np.einsum("i,iab,ib->a", p, pulled, c))

    eta, gamma, steps = theory.corollary_step_sizes(mu, smooth, lam)
    m = moreau(mu, smooth, lam)
    r = theory.rate(gamma, m.mu_g)
    eps_g, zeta = m.mu_g / 2 * (1 - gamma * m.mu_g), 1 - gamma * m.smooth_g  # Eq. 105, below Eq. 110
    q_inner = (2 + 4 * m.lip_prox**2 * gamma**2 * lam**2) * (1 - eta * m.mu_l) ** steps  # Eq. 100 with epsilon = 1
    c1 = 2 / (1 - gamma * m.mu_g + gamma * eps_g - q_inner) * (gamma / eps_g + gamma**2 * (2 + 1 / zeta)) * lam**2
    assert r == pytest.approx(1 - gamma * m.mu_g + gamma * eps_g)

    personal = np.einsum("iab,ib->ia", inverse, np.einsum("iab,ib->ia", h, c) + lam * best)
    w, v = RNG.normal(size=dim), RNG.normal(size=(clients, dim))
    errors, lyapunov = [], []
    for _ in range(60):
        for _ in range(steps):
            v = v - eta * (np.einsum("iab,ib->ia", h, v - c) + lam * (v - w))
        prox = np.einsum("iab,ib->ia", inverse, np.einsum("iab,ib->ia", h, c) + lam * w)
        errors.append(np.sum((w - best) ** 2))
        inner = np.sum((v - prox) ** 2, axis=1)
        lyapunov.append(errors[-1] + c1 * p @ inner)
        # Eq. 123: the personal models follow
        assert np.all(np.sum((v - personal) ** 2, axis=1) <= 2 * inner + 2 * m.lip_prox**2 * errors[-1] + 1e-24)
        if errors[-1] < 1e-22:
            break
        w = w - gamma * p @ (lam * (w - v))
    lyapunov = np.array(lyapunov)
    assert np.all(lyapunov[1:] <= r * lyapunov[:-1] + 1e-24)
    assert (errors[-1] / errors[0]) ** (1 / (len(errors) - 1)) <= r


def test_rounds():
    for mu, smooth, lam in GRID:
        gamma = theory.corollary_step_sizes(mu, smooth, lam).gamma
        r = theory.rate(gamma, moreau(mu, smooth, lam).mu_g)
        for eps in (0.5, 1e-3, 1e-9):
            rounds = theory.rounds_for(eps, r)
            assert r**rounds <= eps * (1 + 1e-9) < r ** (rounds - 1) * (1 + 2e-9)
            assert rounds <= theory.rounds_bound(mu, smooth, lam, eps)
    assert theory.rounds_for(1e-6, 0.0) == 1
    with pytest.raises(RequestError, match="between 0 and 1"):
        theory.rounds_for(1.5, 0.5)


def test_table_2():
    mu, smooth, eps = 0.1, 2.0, 1e-4
    costs = [theory.cost_one_stage(eps, mu, smooth, lam) for lam in np.logspace(-3, 3, 7)]
    # Eq. 14: the product does not depend on lam; Eq. 13: rounds grow from log(1/eps) to cond log(1/eps)
    assert [c.computation * c.rounds for c in costs] == pytest.approx([20 * log(1e4)] * 7)
    assert all(a.rounds < b.rounds and a.computation > b.computation for a, b in pairwise(costs))
    assert theory.cost_one_stage(eps, mu, smooth, 1e-9).rounds == pytest.approx(log(1e4))
    assert theory.cost_one_stage(eps, mu, smooth, 1e9).rounds == pytest.approx(20 * log(1e4))
    # L2GD: computation unbounded for small lam, twice the rounds of one-stage FedProx for large lam
    assert theory.cost_l2gd(eps, mu, smooth, 1e-9).computation > 1e9
    assert theory.cost_l2gd(eps, mu, smooth, 1e9).rounds == pytest.approx(2 * costs[-1].rounds, rel=1e-2)
    assert theory.cost_l2gd(eps, mu, smooth, 2.0) == pytest.approx((2.0, 20 * log(1e4)))
    assert theory.cost_two_stage(0.01, 0.5) == pytest.approx((50.0, 100.0))
    assert theory.cost_two_stage(0.01, 3.0) == pytest.approx((300.0, 300.0))
    assert theory.cost_ditto(0.01) == pytest.approx((1.0, 100.0))
    assert theory.cost_pfedme(0.01, clients=10, inner=5) == (None, pytest.approx(2.0))
    assert theory.cost_fedprox_shared(0.01, gap=3.0, accuracy=0.5) == (None, pytest.approx(600.0))


def test_orders_match_the_preset_up_to_the_logarithm():
    for mu, smooth, lam in GRID:
        cost, steps = theory.cost_one_stage(1e-3, mu, smooth, lam), theory.corollary_step_sizes(mu, smooth, lam).steps
        assert cost.computation <= steps <= cost.computation * (log(1056 * (smooth / mu) ** 2) + 3)
        assert theory.rounds_bound(mu, smooth, lam, 1e-3) == ceil(4 * cost.rounds)
