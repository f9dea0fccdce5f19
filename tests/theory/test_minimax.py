import numpy as np
import pytest

from mooring.theory import minimax as theory


def bayes_risk(radius2_per_dim, n, m, dim):
    """w_i ~ N(w_0, s), flat w_0, n unit-variance observations each: the risk that no estimator can beat, exactly."""
    s, v = radius2_per_dim, radius2_per_dim + 1 / n
    return dim * (s / (n * v) + 1 / (n**2 * v * m))


@pytest.mark.parametrize("m", [2, 10, 300])
@pytest.mark.parametrize("dim", [1, 20])
def test_order_is_that_of_the_bayes_risk(m, dim):
    """The Gaussian hierarchical model's exact risk lies between half of and the whole order, for every R."""
    for n in (5, 100, 10_000):
        sizes = np.full(m, n)
        for radius in np.r_[0.0, np.geomspace(1e-4, 30, 80)]:
            exact = bayes_risk(radius**2 / dim, n, m, dim)
            order = theory.estimation_aer_lower(radius, dim, sizes)
            assert 0.5 * order <= exact * (1 + 1e-12)
            assert exact <= order * (1 + 1e-12)
            assert theory.estimation_ier_lower(radius, dim, sizes) == pytest.approx(order)


def test_limits_and_risk_form():
    n = np.array([40, 60, 50])
    assert theory.estimation_aer_lower(0.0, 7, n) == pytest.approx(7 / 150)
    assert theory.estimation_aer_lower(1e9, 7, n) == pytest.approx(7 * 3 / 150 + 7 / 150)
    assert theory.estimation_ier_lower(1e9, 7, n) == pytest.approx(7 / n + 7 / 150)
    assert theory.aer_lower(0.1, 0.5, 3.0, n) == pytest.approx(0.5 * (min(3 * 3 / 150, 0.01) + 3 / 150))
    assert theory.ier_lower(0.3, 0.5, 3.0, n) == pytest.approx([0.5 * (min(3 / k, 0.09) + 3 / 150) for k in n])


def test_heterogeneity_never_helps():
    n = np.full(6, 30)
    values = [theory.aer_lower(r, 0.5, 3.0, n) for r in np.linspace(0, 1, 50)]
    assert np.all(np.diff(values) >= 0)
    middle = 0.2  # R^2 < smooth m/N: the bound is R^2 + 1/N, not 1/N
    assert theory.aer_lower(middle, 1.0, 3.0, n) == pytest.approx(middle**2 + 3 / 180)
