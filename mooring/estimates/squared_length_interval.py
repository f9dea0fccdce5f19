"""An interval for a squared length r^2 >= 0 from a noisy, biased square Q and an estimate C^ of its bias.

    Q = |theta + noise|^2 in the norm A, Cov(noise) = V:   E Q = r^2 + C,   r^2 = theta'A theta,   C = tr(A V)
    cumulants of Q:  2 tr((AV)^2) + 4 r^2 eta,   8 tr((AV)^3) + 24 r^2 eta_2,   r^2 eta = theta'AVA theta
    C^ is independent of Q and has cumulants C, c2, c3

Each r^2 is tested by T = (Q - r^2)/C^. As P(T <= t) = P(Q - r^2 - t C^ <= 0), the ratio's distribution is that of a sum
of independent parts, matched by a shifted gamma variable with the same three cumulants. At r = 0 and V proportional to
the identity T is Fisher's F; for large r the interval tends to Student's t. The interval contains the r^2 that two
one-sided tests at level alpha/2 do not reject. Its lower end is 0 unless r = 0 is rejected. The upper test's level is
divided by the chance at r = 0 of a square so small, and a Q in the lowest LUCK of its range at r = 0 counts as at that
border, so that a Q below its noise does not yield an empty interval.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from scipy.special import gammainc, gammaincc, ndtr

MIN_SKEWNESS = 1e-4  # skewness below which the gamma variable is normal for all purposes
BISECTIONS = 40
LOW_TAIL_PROBABILITY = 0.05
FloatOrArray = Any  # a number or an array of them
MIN_RELATIVE_NOISE = 1e-12  # noise below this share of the square counts as this share


class QuadraticForm(NamedTuple):
    """Moments of Q; arrays of one shape."""

    square: FloatOrArray  # Q as observed
    bias: FloatOrArray  # C^
    second: FloatOrArray  # tr((AV)^2)
    third: FloatOrArray  # tr((AV)^3)
    slope: FloatOrArray  # eta
    slope2: FloatOrArray  # eta_2
    bias2: FloatOrArray  # variance of C^
    bias3: FloatOrArray  # third cumulant of C^


def confidence_interval(form: QuadraticForm, level: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
    """The ends (low, high) of the interval for r^2."""
    form = _regular(form)
    tail = (1 - level) / 2
    probability_at_zero = probability_below(form, 0.0)
    low = np.where(probability_at_zero <= 1 - tail, 0.0, _solve(form, form.square, 1 - tail))
    raised = form._replace(square=np.maximum(form.square, noise_quantile(form, LOW_TAIL_PROBABILITY)))
    chance = tail * probability_below(raised, 0.0)
    upper = raised.square + form.bias + 20 * np.sqrt(form.second) + 40 * form.slope
    while (is_short := probability_below(raised, upper) > chance).any():
        upper = np.where(is_short, 2 * upper, upper)
    return low, _solve(raised, upper, chance)


def probability_below(form: QuadraticForm, r2: FloatOrArray) -> np.ndarray:
    """P(T <= its observed value) if the squared length is r2; it falls as r2 grows."""
    t = (form.square - r2) / form.bias
    mean = form.bias * (1 - t)
    variance = 2 * form.second + 4 * r2 * form.slope + t**2 * form.bias2
    third = 8 * form.third + 24 * r2 * form.slope2 - t**3 * form.bias3
    return _gamma_below(-mean / np.sqrt(variance), third / variance**1.5)


def _regular(form: QuadraticForm) -> QuadraticForm:
    """Return arrays of one shape, with minimal noise in place of 0, so that nothing is divided by 0."""
    form = QuadraticForm(*np.broadcast_arrays(*(np.asarray(part, float) for part in form)))
    floor = MIN_RELATIVE_NOISE * np.maximum(form.square + form.bias, np.finfo(float).tiny ** 0.25)
    return form._replace(bias=np.maximum(form.bias, floor), second=np.maximum(form.second, floor**2))


def _gamma_below(z: np.ndarray, skew: np.ndarray) -> np.ndarray:
    """P(Z <= z) for a standardised gamma variable Z, reflected where its skewness is negative."""
    size = np.maximum(np.abs(skew), MIN_SKEWNESS)
    shape = 4 / size**2
    at = np.maximum(shape + np.sqrt(shape) * np.sign(skew) * z, 0.0)
    below = np.where(skew > 0, gammainc(shape, at), gammaincc(shape, at))
    return np.where(np.abs(skew) > MIN_SKEWNESS, below, ndtr(z))


def _solve(form: QuadraticForm, upper: np.ndarray, chance: FloatOrArray) -> np.ndarray:
    """The r2 in [0, upper] with probability_below(r2) = chance, by bisection in r."""
    low, high = np.zeros(upper.shape), np.sqrt(upper)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        above = probability_below(form, middle**2) > chance
        low, high = np.where(above, middle, low), np.where(above, high, middle)
    return ((low + high) / 2) ** 2


def noise_quantile(form: QuadraticForm, chance: float) -> np.ndarray:
    """The square that pure noise (r = 0) stays below with this chance, allowing for the error of C^."""
    form = _regular(form)
    low, high = np.zeros(form.bias.shape), form.bias + 20 * np.sqrt(form.second)
    while (is_short := probability_below(form._replace(square=high), 0.0) < chance).any():
        high = np.where(is_short, 2 * high, high)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        below = probability_below(form._replace(square=middle), 0.0) < chance
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    return (low + high) / 2
