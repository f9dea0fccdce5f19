import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar

from mooring.core.errors import RequestError
from mooring_papers.theory import apfl_generalization as apfl

terms = st.floats(0.01, 100)


@settings(deadline=None)
@given(terms, terms)
def test_alpha_star_minimises_the_bound(local, common):
    best = apfl.best_alpha(local, common)
    found = minimize_scalar(lambda a: apfl.mixture_bound(a, local, common), bounds=(0, 1), method="bounded")
    assert best == pytest.approx(found.x, abs=1e-4)
    assert apfl.mixture_bound(best, local, common) <= found.fun * (1 + 1e-12)


def test_alpha_star_leans_on_the_local_model_as_the_distribution_drifts():
    local = apfl.local_term(0.1, vc_dim=5, samples=100, delta=0.05, lipschitz=1.0, disagreement=0.2, constant=0.5)
    commons = [apfl.global_term(0.1, 1.0, distance, 5, 10_000, 0.05, 0.5) for distance in (0.0, 0.5, 2.0, 1e6)]
    alphas = [apfl.best_alpha(local, common) for common in commons]
    assert alphas == sorted(alphas)
    assert alphas[-1] > 0.999
    assert apfl.best_alpha(local, 0.0) == 0.0


def test_alpha_star_stays_below_one_with_unlimited_local_data():
    local = apfl.local_term(0.0, vc_dim=5, samples=10**12, delta=0.05, lipschitz=1.0, disagreement=0.2, constant=0.5)
    common = apfl.global_term(0.1, 1.0, 0.3, 5, 10**13, 0.05, 0.5)
    assert apfl.best_alpha(local, common) == pytest.approx(0.4 / 0.6, rel=1e-4)


def test_alpha_star_is_refused_where_it_is_undefined():
    with pytest.raises(RequestError, match="not both 0"):
        apfl.best_alpha(0.0, 0.0)


def test_the_decomposition_holds_for_squared_error_on_data():
    rng = np.random.default_rng(0)
    y, one, two = rng.standard_normal((3, 1000))
    for alpha in np.linspace(0, 1, 11):
        mixed = np.mean((y - alpha * one - (1 - alpha) * two) ** 2)
        assert mixed <= apfl.mixture_bound(alpha, np.mean((y - one) ** 2), np.mean((y - two) ** 2))


def test_corollary_1_is_theorem_1_minus_the_lower_bound_on_the_local_model():
    alpha, risk, dim, n, delta, lipschitz, disagreement, c1, c2 = 0.4, 0.2, 7, 60, 0.1, 1.5, 0.3, 0.8, 0.5
    local = apfl.local_term(risk, dim, n, delta, lipschitz, disagreement, c1)
    common = apfl.global_term(0.15, 2.0, 0.1, dim, 6000, delta, c1)
    deviation = apfl.deviation(dim, n, delta)
    assert deviation == pytest.approx(math.sqrt((7 + math.log(10)) / 60))
    expected = apfl.mixture_bound(alpha, local, common) - (risk + c2 * deviation)
    args = (alpha, risk, deviation, lipschitz, disagreement, common, c1, c2)
    assert apfl.improvement_over_local(*args) == pytest.approx(expected)
    # the printed constant drops 2 alpha^2 C1 of it
    assert apfl.improvement_over_local(*args, printed=True) == pytest.approx(expected - 2 * alpha**2 * c1 * deviation)


@pytest.mark.parametrize("printed", [False, True])
def test_at_the_largest_helpful_alpha_the_leading_terms_vanish(printed):
    for c1, c2 in [(1.0, 0.3), (1.0, 1.9)]:
        alpha = apfl.largest_helpful_alpha(c1, c2, printed)
        at = [
            apfl.improvement_over_local(alpha, *case, 0.0, 0.0, 0.0, c1, c2, printed)
            for case in [(1.0, 0.0), (0.0, 1.0)]
        ]
        assert max(at) == pytest.approx(0.0, abs=1e-12)
        above = alpha + 0.01
        past = [
            apfl.improvement_over_local(above, *case, 0.0, 0.0, 0.0, c1, c2, printed)
            for case in [(1.0, 0.0), (0.0, 1.0)]
        ]
        assert max(past) > 0
    assert apfl.largest_helpful_alpha(1.0, 0.3) == pytest.approx(math.sqrt(0.3 / 4))
    assert apfl.largest_helpful_alpha(1.0, 0.3, printed=True) == pytest.approx(math.sqrt(0.3 / 2))
