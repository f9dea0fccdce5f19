"""Lemmas 1 and 3 of mspp against estimators whose stability is known or measured."""

import numpy as np
import pytest

from mooring_papers.theory.argument_stability import argument_stability, gradient_bias, gradient_variance


def huber_location(z, lam):
    """argmin mean of sqrt(1 + (w - z)^2) + lam/2 w^2, by Newton's method: 1-Lipschitz and 1-smooth losses."""
    w = 0.0
    for _ in range(100):
        root = np.sqrt(1 + (w - z) ** 2)
        w -= (np.mean((w - z) / root) + lam * w) / (np.mean(1 / root**3) + lam)
    return w


def test_no_replaced_record_moves_the_estimator_further():
    rng = np.random.default_rng(0)
    for lam, n in ((0.5, 10), (2.0, 40)):
        worst = 0.0
        for _ in range(50):
            z = 3 * rng.standard_normal(n)
            other = z.copy()
            other[0] = -50 * np.sign(z[0])
            worst = max(worst, abs(huber_location(z, lam) - huber_location(other, lam)))
        assert 0 < worst <= argument_stability(1.0, lam, n)


def test_inexact_minimizers_add_their_distance():
    """A value within eps of the minimum of a lam-strongly convex objective is within sqrt(2 eps/lam) of its place."""
    exact, inexact = argument_stability(1.0, 2.0, 10), argument_stability(1.0, 2.0, 10, tolerance=0.01)
    assert inexact - exact == pytest.approx(2 * np.sqrt(2 * 0.01 / 2.0))


def test_gradients_at_the_estimator():
    """Over many draws of the records, bias and variance of the population gradient are below Lemma 3's bounds."""
    rng = np.random.default_rng(1)
    lam, n, population = 1.0, 20, 3 * np.random.default_rng(2).standard_normal(20_000)

    def slope(w, z):
        return np.mean((w - z) / np.sqrt(1 + (w - z) ** 2))

    gaps, slopes = [], []
    for _ in range(400):
        z = 3 * rng.standard_normal(n)
        w = huber_location(z, lam)
        slopes.append(slope(w, population))
        gaps.append(slopes[-1] - slope(w, z))
    stability = argument_stability(1.0, lam, n)
    assert abs(np.mean(gaps)) <= gradient_bias(1.0, stability)
    assert 0 < np.var(slopes) <= gradient_variance(1.0, stability, n)
