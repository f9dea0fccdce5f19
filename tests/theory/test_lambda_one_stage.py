from math import inf, sqrt

import numpy as np
import pytest

from mooring.core.errors import RequestError
from mooring.theory import lambda_one_stage as theory
from mooring.theory.weights import s1, s2, size_weights, uniform_weights
from tests.support.radii import radius_max

RNG = np.random.default_rng(3)
CONSTANTS = {"mu": 0.5, "smooth": 2.0, "noise": 1.3}


def equal(clients, samples):
    return uniform_weights(clients), np.full(clients, samples)


def test_rule_equals_the_theorem_for_equal_clients():
    for _ in range(300):
        mu, noise = RNG.uniform(0.1, 2, 2)
        smooth, radius = mu * RNG.uniform(1, 4), 10 ** RNG.uniform(-5, 0)
        m, n = int(10 ** RNG.uniform(0.5, 3.5)), int(RNG.integers(2, 400))
        cond, total = smooth / mu, m * n
        if radius > 1 / sqrt(n):
            expected, case = noise**2 / (n * mu * radius**2), "small"
        else:
            middle = (2 * smooth**2 * radius**2 + noise**2 / n) / (smooth**2 * radius**2 + noise**2 / total)
            expected, case = max(64 * cond**2 * smooth, max(2 * cond, 5) * mu * middle) - mu, "large"
        found = theory.lambda_one_stage(radius, mu, smooth, noise, *equal(m, n), cap=1e9)
        assert found == (pytest.approx(expected), case, False)


def test_rule_implies_what_the_two_proofs_need():
    """20,000 draws with R <= 1/sqrt(n): Eq. 82 >= a_1 and the corrected a_2; the printed a_2 is weaker."""
    size = 20_000
    mu, noise = 10 ** RNG.uniform(-3, 3, (2, size))
    smooth = mu * 10 ** RNG.uniform(0, 3, size)
    alone = 10 ** RNG.uniform(-6, 0, size)
    together = alone / RNG.integers(1, 10_000, size)
    radius = np.sqrt(alone) * 10 ** RNG.uniform(-6, 0, size)
    args = radius, mu, smooth, noise, alone, together
    rule = theory.lambda_floor(*args)
    assert np.all(rule >= theory.lambda_floor_global(*args) * (1 - 1e-12))
    corrected = theory.lambda_floor_local(*args)
    assert np.all(rule >= corrected)
    above = 64 * noise**2 * together + 66 * smooth**2 * radius**2 + noise**2 * alone
    below = 32 * noise**2 * together / mu**2 + 33 * (smooth / mu) ** 2 * radius**2
    assert np.all(corrected >= np.sqrt(8 * above / below) - mu)


def test_global_floor_is_what_the_inequality_of_the_proof_needs():
    """At lam = a_1 the bound 8 cond/(mu (mu + lam)) on g(lam) equals the right side of Eq. 52."""
    for _ in range(200):
        mu, noise, ratio = 10 ** RNG.uniform(-1, 1, 3)
        smooth, n, total = mu * RNG.uniform(1, 5), 50, 10 ** RNG.uniform(2, 7)
        radius = min(1.0, ratio) / sqrt(n)
        lam = theory.lambda_floor_global(radius, mu, smooth, noise, 1 / n, 1 / total)
        spread = (smooth * radius) ** 2
        right = min(1 / (8 * smooth**2), 4 / mu**2 * (noise**2 / total + spread) / (2 * spread + noise**2 / n))
        assert 8 * smooth / mu / (mu * (mu + lam)) == pytest.approx(right)


def test_local_floor_is_what_the_inequality_of_the_proof_needs():
    """At lam = a_2 the last line of Eq. 72 equals the bound of Eq. 74, with 96 cond^2 + 3 <= 99 cond^2."""
    radius, mu, smooth, noise, alone, together = 0.03, 0.4, 1.7, 0.9, 1 / 50, 1 / 1000
    lam = theory.lambda_floor_local(radius, mu, smooth, noise, alone, together)
    cond = smooth / mu
    bracket = (
        128 * cond**2 * noise**2 * together
        + (128 * cond**2 + 4 * cond**2) * smooth**2 * radius**2
        + 2 * noise**2 * alone
    )
    left = 12 / (mu + lam) ** 2 * bracket + 96 * noise**2 / mu**2 * together + 99 * cond**2 * radius**2
    assert left == pytest.approx(192 * noise**2 / mu**2 * together + 198 * cond**2 * radius**2)


def test_border_jump_and_monotonicity():
    p, n = equal(20, 100)
    at = theory.lambda_one_stage(0.1, **CONSTANTS, p=p, n=n)
    above = theory.lambda_one_stage(np.nextafter(0.1, 1), **CONSTANTS, p=p, n=n)
    assert at.case == "large" and above.case == "small"
    assert above.lam == pytest.approx(1.3**2 / 0.5)
    assert at.lam > above.lam
    radii = np.geomspace(0.101, 10, 50)
    lams = [theory.lambda_one_stage(r, **CONSTANTS, p=p, n=n).lam for r in radii]
    assert np.all(np.diff(lams) < 0)
    lams = [theory.lambda_one_stage(r, **CONSTANTS, p=p, n=n).lam for r in np.linspace(0, 0.1, 50)]
    assert np.all(np.diff(lams) <= 0)


def test_unequal_clients_enter_through_s1_and_s2():
    n = np.array([20, 50, 400])
    p = size_weights(n)
    assert theory.regime_border(0.5, 1.3, p, n) == pytest.approx(sqrt(3 / 470))
    assert theory.lambda_one_stage(0.3, **CONSTANTS, p=p, n=n).lam == pytest.approx(1.3**2 * (3 / 470) / (0.5 * 0.09))
    found = theory.lambda_one_stage(0.01, **CONSTANTS, p=p, n=n)
    assert found.lam == pytest.approx(theory.lambda_floor(0.01, 0.5, 2.0, 1.3, s1(p, n), s2(p, n)))


def test_scale_free_border_does_not_depend_on_units():
    p, n = equal(10, 64)
    for radius in np.geomspace(1e-3, 10, 25):
        for unit in (1e-3, 0.1, 40.0):  # w -> unit w: mu, L -> /unit^2, noise -> /unit, R -> x unit
            scaled = {"mu": 0.5 / unit**2, "smooth": 2.0 / unit**2, "noise": 1.3 / unit}
            one = theory.lambda_one_stage(radius, **CONSTANTS, p=p, n=n, scale_free=True)
            other = theory.lambda_one_stage(radius * unit, **scaled, p=p, n=n, scale_free=True)
            assert other == (pytest.approx(one.lam / unit**2), one.case, one.capped)
    printed = {theory.lambda_one_stage(0.3 * u, 0.5 / u**2, 2.0 / u**2, 1.3 / u, p, n).case for u in (0.1, 1.0)}
    assert printed == {"small", "large"}
    just_above = 1.3 / 0.5 / 8 * (1 + 1e-12)
    assert theory.lambda_one_stage(just_above, **CONSTANTS, p=p, n=n, scale_free=True).lam == pytest.approx(0.5)


def test_cap_and_infinity():
    p, n = equal(10, 64)
    found = theory.lambda_one_stage(0.0, 0.01, 1.0, 1.0, p, n)
    assert found == (1e4, "large", True)
    assert theory.lambda_one_stage(0.0, 0.01, 1.0, 1.0, p, n, cap=1e9).lam == pytest.approx(64e4 - 0.01)
    assert theory.lambda_one_stage(0.0, 0.01, 1.0, 1.0, p, n, large="inf") == (inf, "large", False)
    assert theory.lambda_one_stage(0.0, 1.0, 1.0, 0.0, p, n).lam == pytest.approx(63.0)  # neither spread nor noise
    with pytest.raises(RequestError, match="'floor' or 'inf'"):
        theory.lambda_one_stage(0.0, 0.01, 1.0, 1.0, p, n, large="none")
    with pytest.raises(RequestError, match="lambda_one_stage: mu"):
        theory.lambda_one_stage(0.0, 0.0, 1.0, 1.0, p, n)


def test_shrinkage_rule_per_client():
    found = theory.lambda_shrinkage([0.5, 0.0, 2.0], 0.5, [1.0, 1.0, 3.0], [10, 20, 30])
    assert found == pytest.approx([1 / (10 * 0.5 * 0.25), inf, 9 / (30 * 0.5 * 4)])
    p, n = equal(8, 25)
    assert theory.lambda_shrinkage(0.7, 0.5, 1.3, 25) == pytest.approx(
        theory.lambda_one_stage(0.7, **CONSTANTS, p=p, n=n).lam
    )


class Quadratics:
    """l(w, z) = 1/2 (w - z)' A_i (w - z), z ~ (w*_i, cov_i): the FedProx minimiser and its exact expected errors."""

    def __init__(self, cond, clients, samples, radius, dim=3):
        self.m, self.n, self.dim, self.mu, self.smooth = clients, samples, dim, 0.7, 0.7 * cond
        q = np.linalg.qr(RNG.normal(size=(clients, dim, dim)))[0]
        eig = RNG.uniform(self.mu, self.smooth, (clients, dim))
        eig[:, 0], eig[:, 1] = self.mu, self.smooth
        self.a = np.einsum("iab,ib,icb->iac", q, eig, q)
        root = RNG.normal(size=(clients, dim, dim)) * RNG.uniform(0.2, 2)
        self.cov = np.einsum("iab,icb->iac", root, root)
        self.noise = sqrt(np.einsum("iab,ibc,ica->i", self.a, self.cov, self.a).max())
        truths = RNG.normal(size=(clients, dim))
        truths -= truths.mean(0)
        self.truths = truths * radius / radius_max(truths, uniform_weights(clients))
        self.radius = radius

    def errors(self, lam):
        """E|w~ - w*_avg|^2 and max_i E|w~_i - w*_i|^2."""
        inverse = np.linalg.inv(self.a + lam * np.eye(self.dim))
        pulled = lam * inverse @ self.a
        common = np.linalg.solve(pulled.sum(0), pulled)  # w~ = sum_j common_j zbar_j
        bias = np.einsum("jab,jb->a", common, self.truths)
        cov = np.einsum("jab,jbc,jdc->ad", common, self.cov, common) / self.n
        worst = 0.0
        for i in range(self.m):
            personal = lam * inverse[i] @ common  # w~_i = sum_j personal_j zbar_j
            personal[i] += inverse[i] @ self.a[i]
            gap = np.einsum("jab,jb->a", personal, self.truths) - self.truths[i]
            spread = np.einsum("jab,jbc,jac->", personal, self.cov, personal) / self.n
            worst = max(worst, gap @ gap + spread)
        return bias @ bias + np.trace(cov), worst


def test_exact_errors_against_a_simulation():
    problem = Quadratics(3.0, 4, 6, 0.8)
    lam, repeats = 0.6, 20_000
    root = np.linalg.cholesky(problem.cov / problem.n)
    means = problem.truths + np.einsum("iab,sib->sia", root, RNG.normal(size=(repeats, 4, 3)))
    inverse = np.linalg.inv(problem.a + lam * np.eye(3))
    pulled = lam * inverse @ problem.a
    common = np.linalg.solve(pulled.sum(0), np.einsum("iab,sib->as", pulled, means)).T
    personal = np.einsum("iab,sib->sia", inverse, np.einsum("iab,sib->sia", problem.a, means) + lam * common[:, None])
    found = np.mean(np.sum(common**2, 1)), np.mean(np.sum((personal - problem.truths) ** 2, 2), axis=0).max()
    assert problem.errors(lam) == pytest.approx(found, rel=0.05)


@pytest.mark.parametrize("ratio", [1e-3, 0.1, 0.5, 1.0, 1.001, 2.0, 20.0])
def test_error_bounds_hold(ratio):
    """Exact expected errors at the rule's lam stay below the bounds; slack 2 for the constants of Eq. 50."""
    for cond in (1.0, 3.0, 6.0):
        problem = Quadratics(cond, clients=7, samples=30, radius=ratio / sqrt(30))
        p, n = equal(7, 30)
        found = theory.lambda_one_stage(problem.radius, problem.mu, problem.smooth, problem.noise, p, n, cap=1e9)
        common, personal = problem.errors(found.lam)
        args = problem.radius, problem.mu, problem.smooth, problem.noise, p, n
        assert common <= 2 * theory.global_error_bound(*args)
        assert personal <= 2 * theory.local_error_bound(*args)


def test_lemmas_1_4_5():
    problem = Quadratics(5.0, 6, 20, 0.4)
    p, n = equal(6, 20)
    root = np.linalg.cholesky(problem.cov / problem.n)
    sample = problem.truths + np.einsum("iab,sib->sia", root, RNG.normal(size=(400, 6, 3)))
    by_mean = np.einsum("iab,sib->as", problem.a, sample)
    together = np.linalg.solve(problem.a.sum(0), by_mean).T
    assert np.linalg.norm(together, axis=1).mean() <= theory.global_error(
        problem.mu, problem.smooth, problem.noise, problem.radius, p, n
    )
    for lam in (0.01, 1.0, 100.0):
        inverse = np.linalg.inv(problem.a + lam * np.eye(3))
        pulled = lam * inverse @ problem.a
        for means, joint in zip(sample[:20], together):
            w = np.linalg.solve(pulled.sum(0), np.einsum("iab,ib->a", pulled, means))
            gradients = np.linalg.norm(np.einsum("iab,ib->ia", problem.a, w - means), axis=1)
            personal = np.einsum("iab,ib->ia", inverse, np.einsum("iab,ib->ia", problem.a, means) + lam * w)
            assert np.sum((w - joint) ** 2) <= theory.distance_to_global(problem.mu, problem.smooth, lam, p, gradients)
            bound = theory.distance_to_personal(problem.mu, lam, gradients)
            assert np.all(np.linalg.norm(w - personal, axis=1) <= bound)


def test_constants_by_hand():
    c = theory.error_constants(0.5, 1.0, 1.0)
    assert c == pytest.approx((128.0, 128.0, 768.0, (2 * (1 + sqrt(517))) ** 2))
    quiet = theory.error_constants(0.5, 1.0, 0.0)
    assert quiet == pytest.approx((0.0, 128.0, 0.0, 792.0))


def test_bounds_equal_a_transcription():
    n, p = np.array([20, 50, 400]), np.array([0.2, 0.5, 0.3])
    mu, smooth, noise, lam = 0.6, 1.7, 1.3, 0.9
    alone, together = sum(w / k for w, k in zip(p, n)), sum(w * w / k for w, k in zip(p, n))
    c = theory.error_constants(mu, smooth, noise)
    for radius in (0.01, 0.1, 3.0):
        spread = min(alone, radius * radius)
        args = radius, mu, smooth, noise, p, n
        assert theory.global_error_bound(*args) == pytest.approx(c.c1 * together + c.c2 * spread)
        assert theory.local_error_bound(*args) == pytest.approx(c.c3 * together + c.c4 * spread)
        expected = (noise * together**0.5 + smooth * radius) / (mu / 2)
        assert theory.global_error(mu, smooth, noise, radius, p, n) == pytest.approx(expected)
    norms = [0.3, 1.1, 2.0]
    expected = 4 * (1 + smooth / mu) / mu / (mu + lam) * sum(w * g * g for w, g in zip(p, norms))
    assert theory.distance_to_global(mu, smooth, lam, p, norms) == pytest.approx(expected)
    assert theory.distance_to_personal(mu, lam, norms) == pytest.approx([2 * g / (mu + lam) for g in norms])
