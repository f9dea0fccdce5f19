from itertools import pairwise

import numpy as np
import pytest

from mooring.core.errors import RequestError
from mooring.theory.lambda_aer import lambda_aer, regime_borders
from mooring.theory.upper_bounds import fedprox_aer, fedprox_aer_at
from mooring.theory.weights import imbalance, s1, s2, uniform_weights

RNG = np.random.default_rng(4)
MU = 0.3


def federations():
    yield uniform_weights(10), np.full(10, 50)
    yield uniform_weights(2000), np.full(2000, 10**7)  # n > m^2: the printed border would leave case B empty
    yield np.array([1.0]), np.array([30])
    for _ in range(12):
        m = int(RNG.integers(2, 50))
        yield RNG.dirichlet(np.full(m, 0.7)), RNG.integers(5, 5000, m)


def radii(p, n):
    lower, upper = regime_borders(p, n)
    return np.r_[0.0, lower, upper, np.geomspace(lower / 100, upper * 100, 24)]


def test_cases_by_hand_for_equal_clients():
    p, n = uniform_weights(10), np.full(10, 100)  # S1 = .01, S2 = .001, C_p = 1
    assert regime_borders(p, n) == pytest.approx((0.01, 0.1))
    assert lambda_aer(0.2, MU, p, n) == (pytest.approx(MU * 0.01 / (16 * 0.04)), "A")
    assert lambda_aer(0.05, MU, p, n) == (pytest.approx(MU * 0.1 / (16 * 0.05)), "B")
    assert lambda_aer(0.001, MU, p, n) == (pytest.approx(MU * 10 / 16), "C")


def test_borders_are_those_of_the_stated_regimes():
    """Equal clients: R^2 = m/N and R^2 = 1/(mN)."""
    for m, n in ((5, 20), (40, 7), (3, 5000)):
        lower, upper = regime_borders(uniform_weights(m), np.full(m, n))
        assert (lower**2, upper**2) == pytest.approx((1 / (m * m * n), 1 / n))


def test_stability_invariant_and_largest_case():
    for p, n in federations():
        for radius in radii(p, n):
            lam, case = lambda_aer(radius, MU, p, n)
            assert 0 < p.max() * lam <= MU / 16 * (1 + 1e-12)
            if case == "C":
                assert lam == pytest.approx(MU / (16 * p.max()))


def test_right_case_at_and_beside_the_borders():
    for p, n in federations():
        lower, upper = regime_borders(p, n)
        assert lambda_aer(upper, MU, p, n).case == "A"
        assert lambda_aer(0.0, MU, p, n).case == "C"
        if lower < upper * (1 - 1e-9):
            assert lambda_aer(np.nextafter(upper, 0), MU, p, n).case == "B"
            assert lambda_aer(lower, MU, p, n).case == "B"
            assert lambda_aer(np.nextafter(lower, 0), MU, p, n).case == "C"


def test_continuous_at_one_border_and_jumps_by_the_imbalance_at_the_other():
    for p, n in federations():
        lower, upper = regime_borders(p, n)
        if lower > upper * (1 - 1e-6):
            continue
        below, at = lambda_aer(lower * (1 - 1e-9), MU, p, n).lam, lambda_aer(lower, MU, p, n).lam
        assert below == pytest.approx(at, rel=1e-8)
        below, at = lambda_aer(upper * (1 - 1e-9), MU, p, n).lam, lambda_aer(upper, MU, p, n).lam
        assert below * imbalance(p, n) == pytest.approx(at, rel=1e-8) == pytest.approx(MU / 16)


def test_non_increasing_within_each_case():
    for p, n in federations():
        found = [lambda_aer(r, MU, p, n) for r in np.sort(radii(p, n))]
        for one, other in pairwise(found):
            assert one.case != other.case or one.lam >= other.lam * (1 - 1e-12)


def test_risk_at_this_lam_is_the_theorems():
    """Proposition C.3 at the chosen lam gives Eq. 4.16 up to the factor 16 of the proof, for every R."""
    smooth, ell_max = 2.0, 1.5
    for p, n in federations():
        for radius in radii(p, n):
            lam = lambda_aer(radius, MU, p, n).lam
            at = fedprox_aer_at(lam, radius, MU, smooth, ell_max, p, n)
            assert at <= 16 * fedprox_aer(radius, MU, smooth, ell_max, p, n)
    # and in case C, where lam is largest, the heterogeneity term stays below mu S2/(32 C_p), as the proof says
    for p, n in federations():
        radius = regime_borders(p, n)[0] * (1 - 1e-12)
        lam = lambda_aer(radius, MU, p, n).lam
        assert lam / 2 * radius**2 <= MU / (32 * imbalance(p, n)) * s2(p, n) * (1 + 1e-9)
        assert lam / 2 * radius**2 <= MU / 32 * s1(p, n)


def test_refusals():
    with pytest.raises(RequestError, match="lambda_aer: mu"):
        lambda_aer(0.1, 0.0, [1.0], [10])
    with pytest.raises(RequestError, match="lambda_aer: radius"):
        lambda_aer(-0.1, 1.0, [1.0], [10])
