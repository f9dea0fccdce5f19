from itertools import pairwise
from math import sqrt

import numpy as np
import pytest

from mooring.core.errors import RequestError
from mooring.theory.lambda_aer import lambda_aer
from mooring.theory.lambda_ier import lambda_ier
from mooring.theory.upper_bounds import fedprox_ier, fedprox_ier_at
from mooring.theory.weights import uniform_weights

MU = 0.4
SIZES = [(2, 50), (10, 100), (300, 40)]


def equal(m, n):
    return uniform_weights(m), np.full(m, n)


def test_values_by_hand():
    p, n = equal(10, 100)
    assert lambda_ier(0.1, MU, p, n) == (pytest.approx(MU * 10 / 1000), "A")
    assert lambda_ier(5.0, MU, p, n).lam == lambda_ier(0.2, MU, p, n).lam
    assert lambda_ier(0.05, MU, p, n) == (pytest.approx(MU / 16 * sqrt(10 / (0.0025 * 1000 + 1))), "B")
    assert lambda_ier(0.05, MU, p, n, scale_b=1 / 32).lam == pytest.approx(lambda_ier(0.05, MU, p, n).lam / 2)
    assert lambda_ier(0.5, MU, p, n, scale_a=3.0).lam == pytest.approx(3 * MU / 100)


@pytest.mark.parametrize(("m", "n"), SIZES)
def test_border_monotonicity_and_invariant(m, n):
    p, sizes = equal(m, n)
    border = sqrt(m / (m * n))
    assert lambda_ier(border, MU, p, sizes).case == "A"
    assert lambda_ier(border * (1 - 1e-12), MU, p, sizes).case == "B"
    found = [lambda_ier(r, MU, p, sizes) for r in np.linspace(0, 3 * border, 100)]
    assert all(a.case != b.case or a.lam >= b.lam for a, b in pairwise(found))
    assert all(p.max() * f.lam <= MU / 16 * (1 + 1e-12) for f in found)


def test_clipped_when_one_client_dominates():
    p, n = np.array([0.97, 0.01, 0.01, 0.01]), np.full(4, 6)
    assert lambda_ier(10.0, MU, p, n).lam == pytest.approx(MU / (16 * 0.97))


@pytest.mark.parametrize(("m", "n"), SIZES)
def test_risk_at_this_lam_is_the_theorems(m, n):
    """Proposition C.5 at the chosen lam gives Theorem 4.5 up to a constant, for every R."""
    p, sizes = equal(m, n)
    smooth, ell_max, noise, diameter = 1.5, 2.0, 0.8, 3.0
    for radius in np.r_[0.0, np.geomspace(1e-5, 3, 60)]:
        lam = lambda_ier(radius, MU, p, sizes).lam
        at = fedprox_ier_at(lam, radius, MU, smooth, ell_max, noise, diameter, p, sizes)
        assert np.all(at <= 40 * fedprox_ier(radius, MU, smooth, ell_max, noise, diameter, sizes))


def test_almost_alone_when_clients_differ_unlike_the_average_rule():
    p, n = equal(10, 1000)
    border = sqrt(1 / 1000)
    assert lambda_ier(border, MU, p, n).lam == pytest.approx(MU / 1000)
    assert lambda_aer(border, MU, p, n).lam == pytest.approx(MU / 16)


def test_refusals():
    with pytest.raises(RequestError, match="lambda_ier: mu"):
        lambda_ier(0.1, -1.0, [1.0], [10])
