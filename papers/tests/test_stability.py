import numpy as np
import pytest

from mooring.theory import upper_bounds
from mooring.theory.weights import s2
from mooring_papers.theory import stability as theory

RNG = np.random.default_rng(6)
MU, SMOOTH, RADIUS, DIM = 0.4, 2.0, 1.0, 2
ELL_MAX = SMOOTH / 2 * (2 * RADIUS) ** 2
SIZES, WEIGHTS = np.array([30, 40, 60, 70]), np.array([0.1, 0.2, 0.3, 0.4])


def unit(shape):
    direction = RNG.normal(size=(*shape, DIM))
    return direction / np.linalg.norm(direction, axis=-1, keepdims=True)


class Federation:
    """Records (h, z): l(w) = h/2 |w - z|^2, h in [MU, SMOOTH], z in a ball: closed forms for every method."""

    def __init__(self, n, p):
        self.n, self.p = np.asarray(n), np.asarray(p)
        self.h = [RNG.uniform(MU, SMOOTH, k) for k in n]
        self.z = [RADIUS * unit((k,)) * RNG.uniform(0, 1, (k, 1)) for k in n]

    def replaced(self, client, record, h, z):
        other = Federation.__new__(Federation)
        other.n, other.p = self.n, self.p
        other.h, other.z = [a.copy() for a in self.h], [a.copy() for a in self.z]
        other.h[client][record], other.z[client][record] = h, z
        return other

    def sums(self):
        curvature = np.array([h.mean() for h in self.h])
        return curvature, np.array([np.mean(h[:, None] * z, axis=0) for h, z in zip(self.h, self.z)])

    def common(self):
        curvature, center = self.sums()
        return self.p @ center / (self.p @ curvature)

    def prox(self, w, lam):
        curvature, center = self.sums()
        return (center + lam * w) / (curvature + lam)[:, None]

    def fedprox(self, lam, global_error=0.0, local_error=0.0):
        curvature, center = self.sums()
        share = self.p / (curvature + lam)
        w = share @ center / (1 - lam * share.sum()) + global_error * unit(())
        return self.prox(w, lam) + local_error * unit((len(self.p),))


def worst_change(before, after):
    """sup over records of the change of the loss at a client's model, on the ball's boundary and inside."""
    z = np.concatenate([RADIUS * unit((400,)), RADIUS * unit((100,)) * RNG.uniform(0, 1, (100, 1))])
    change = np.sum((before - z) ** 2, axis=1) - np.sum((after - z) ** 2, axis=1)
    return SMOOTH / 2 * np.abs(change).max()


def replacements(federation, client):
    for _ in range(15):
        record = RNG.integers(federation.n[client])
        yield federation.replaced(client, record, RNG.choice([MU, SMOOTH]), RADIUS * unit(()))


def test_fedavg_bound_holds():
    federation = Federation([30, 60, 90], [0.2, 0.5, 0.3])
    assert theory.fedavg_condition(SMOOTH, MU, federation.p, federation.n).all()
    bound = theory.fedavg_stability(SMOOTH, ELL_MAX, MU, federation.p, federation.n)
    for client in range(3):
        measured = [worst_change(federation.common(), f.common()) for f in replacements(federation, client)]
        assert 0 < max(measured) <= bound[client]


@pytest.mark.parametrize("lam", [0.0, 0.01, 0.05])
def test_fedprox_bound_holds_for_exact_minimisers(lam):
    federation = Federation([30, 60, 90], [0.2, 0.5, 0.3])
    assert theory.fedprox_condition(SMOOTH, MU, lam, federation.p, federation.n).all()
    bound = theory.fedprox_stability(SMOOTH, ELL_MAX, MU, lam, federation.p, federation.n)
    before = federation.fedprox(lam)
    for client in range(3):
        measured = [worst_change(before[client], f.fedprox(lam)[client]) for f in replacements(federation, client)]
        assert 0 < max(measured) <= bound[client]


def test_fedprox_bound_holds_for_approximate_minimisers():
    federation, lam = Federation([2000, 3000], [0.5, 0.5]), 0.05
    for global_error, local_error in ((0.3, 0.0), (0.0, 0.1), (0.2, 0.2)):
        bound = theory.fedprox_stability(
            SMOOTH, ELL_MAX, MU, lam, federation.p, federation.n, global_error=global_error, local_error=local_error
        )
        before = federation.fedprox(lam, global_error, local_error)
        for client in range(2):
            after = [f.fedprox(lam, global_error, local_error)[client] for f in replacements(federation, client)]
            assert max(worst_change(before[client], w) for w in after) <= bound[client]


def test_error_term_is_that_of_lemmas_c1_and_c2():
    """Eq. C.16 with delta = lam/2 e^2, zeta = lam e, delta_i = (L + lam)/2 e_i^2, zeta_i = (L + lam) e_i."""
    lam, e, e_i, p, n = 0.3, 0.02, np.array([0.01, 0.05]), np.array([0.4, 0.6]), np.array([100, 200])
    delta, zeta = lam / 2 * e**2, lam * e
    for i in range(2):
        delta_i, zeta_i = (SMOOTH + lam) / 2 * e_i[i] ** 2, (SMOOTH + lam) * e_i[i]
        err = 8 * zeta_i / (MU + lam) + np.sqrt(8 * delta_i / (MU + lam))
        err += 8 / MU * (2 * zeta + 4 * p[i] * lam * e_i[i] + np.sqrt(2 * MU * lam * delta / (MU + lam)))
        expected = 160 * SMOOTH * ELL_MAX / (n[i] * (MU + lam)) + np.sqrt(2 * SMOOTH * ELL_MAX) * err + SMOOTH * err**2
        found = theory.fedprox_stability(SMOOTH, ELL_MAX, MU, lam, p, n, global_error=e, local_error=e_i)[i]
        assert found == pytest.approx(expected)


def test_conditions():
    # mu = .5, L = 2: 4 L p/mu = 12, 4; 4 L/mu = 16; mu/16 = .03125
    p = [0.75, 0.25]
    assert theory.fedavg_condition(2.0, 0.5, p, [11.9, 4]).tolist() == [False, True]
    assert theory.fedavg_condition(2.0, 0.5, p, [12, 3.9]).tolist() == [True, False]
    assert theory.fedprox_condition(2.0, 0.5, 0.01, p, [15.9, 16]).tolist() == [False, True]
    assert theory.fedprox_condition(2.0, 0.5, 0.042, p, [50, 50]).tolist() == [False, True]
    assert theory.fedprox_condition(2.0, 0.5, 0.5 / (16 * 0.75), p, [50, 50]).all()


def test_values_by_hand():
    p, n = [0.75, 0.25], [20, 50]
    assert theory.fedavg_stability(2.0, 3.0, 0.5, p, n) == pytest.approx([32 * 6 * 0.75 / 10, 32 * 6 * 0.25 / 25])
    assert theory.fedprox_stability(2.0, 3.0, 0.5, 0.3, p, n) == pytest.approx([160 * 6 / 16, 160 * 6 / 40])


def test_proposition_4_1_holds_on_simulated_risks():
    """AER and IER of exact FedProx models, 400 federations: below what their stability promises."""
    n, p, lam, spread = np.array([40, 60, 80]), np.array([0.2, 0.3, 0.5]), 0.04, 0.3
    truths = spread * unit((3,))
    truths -= p @ truths
    runs = []
    for _ in range(400):
        federation = Federation(n, p)
        for i in range(3):  # keep z in the ball and centred at the truth
            federation.z[i] = truths[i] + (RADIUS - 2 * spread) * federation.z[i] / RADIUS
        models, (curvature, center) = federation.fedprox(lam), federation.sums()
        share = p / (curvature + lam)
        common = share @ center / (1 - lam * share.sum())
        excess = (MU + SMOOTH) / 4 * np.sum((models - truths) ** 2, axis=1)  # E h/2 |w - w*|^2
        runs.append((excess, np.sum((common - truths) ** 2, axis=1)))
    excess, distance2 = np.mean([r[0] for r in runs], axis=0), np.mean([r[1] for r in runs], axis=0)
    gamma = theory.fedprox_stability(SMOOTH, ELL_MAX, MU, lam, p, n)
    radius = np.sqrt(p @ np.sum(truths**2, axis=1))
    assert p @ excess <= theory.aer_from_stability(0.0, gamma, lam, radius, p)
    assert np.all(excess <= theory.ier_from_stability(0.0, gamma, lam, distance2, p))
    assert theory.aer_from_stability(0.1, gamma, lam, radius, p) == pytest.approx(
        0.1 + 2 * sum(p[i] * gamma[i] for i in range(3)) + lam / 2 * radius**2
    )
    found = theory.ier_from_stability(0.1, gamma, lam, distance2, p)
    assert found == pytest.approx([0.1 / p[i] + 2 * gamma[i] + lam / 2 * distance2[i] for i in range(3)])


def test_constants_of_the_proofs_follow_from_stability():
    """Eq. C.1: 4 smooth R^2 + sum p_i gamma_i. Eq. 4.9: 2 sum p_i gamma_i + lam/2 R^2. Eq. C.4: 8 and 8 + 1."""
    gamma = theory.fedavg_stability(SMOOTH, ELL_MAX, MU, WEIGHTS, SIZES)
    found = upper_bounds.fedavg_aer(0.3, MU, SMOOTH, ELL_MAX, WEIGHTS, SIZES, constants=upper_bounds.FEDAVG_AER_PROOF)
    assert found == pytest.approx(4 * SMOOTH * 0.09 + WEIGHTS @ gamma)
    alone = theory.fedavg_stability(SMOOTH, ELL_MAX, MU, [1.0], [25])
    assert upper_bounds.local_ier(MU, SMOOTH, ELL_MAX, [25], constant=upper_bounds.LOCAL_PROOF) == pytest.approx(alone)
    gamma = theory.fedprox_stability(SMOOTH, ELL_MAX, MU, 0.04, WEIGHTS, SIZES)
    found = upper_bounds.fedprox_aer_at(
        0.04, 0.3, MU, SMOOTH, ELL_MAX, WEIGHTS, SIZES, constant=upper_bounds.FEDPROX_PROOF
    )
    assert found == pytest.approx(theory.aer_from_stability(0.0, gamma, 0.04, 0.3, WEIGHTS))
    distance2 = 8 / MU**2 * (1.7**2 * s2(WEIGHTS, SIZES) + (SMOOTH * 0.3) ** 2)  # bound on E|w - w*_avg|^2
    found = upper_bounds.fedavg_ier(0.3, MU, SMOOTH, 1.7, WEIGHTS, SIZES, constants=upper_bounds.FEDAVG_IER_PROOF)
    slack = (SMOOTH**3 / MU**2 - SMOOTH) * 0.09  # smooth R^2 <= smooth^3/mu^2 R^2
    assert found == pytest.approx(SMOOTH * (distance2 + 0.09) + slack)
