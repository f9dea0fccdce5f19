"""Calls held against rows aside that err themselves: what right chances lead to, what is left without the errors."""

import numpy as np
import pytest
from scipy.stats import norm

from benchmarks.advice_calibration import (
    LEVEL,
    StatedGains,
    calibration_error,
    describe,
    probability_denied_if_right,
    probability_seen_above,
    share_below,
)

WIDE = 2 * norm.ppf((1 + LEVEL) / 2)  # intervals of a standard deviation of 1


def planted(rng, k, sd=1.0, error=1.0):
    """Gains whose stated laws are right, and a judge whose errors are as it says."""
    centre = rng.normal(1.0, 1.0, k)
    gain = centre + sd * rng.standard_normal(k)
    seen = gain + error * rng.standard_normal(k)
    chance = norm.cdf(centre / sd)
    call = (chance > 0.9).astype(int) - (chance < 0.1)
    return gain, StatedGains(chance, np.full(k, sd * WIDE), call, seen, np.full(k, error))


@pytest.mark.parametrize("error", [0.1, 1.0, 3.0])
def test_right_chances_are_calibrated_by_any_judge_and_expect_what_it_denies(error):
    rng = np.random.default_rng(0)
    gain, found = planted(rng, 40_000, error=error)
    assert calibration_error(probability_seen_above(found), found.seen > 0) < 0.015
    made = found.call != 0
    denied, wrong = found.call * found.seen < 0, found.call * gain < 0
    above = probability_seen_above(found)
    # Shares of some ten thousand calls: four standard errors are .02 at most.
    assert np.where(found.call > 0, 1 - above, above)[made].mean() == pytest.approx(denied[made].mean(), abs=0.02)
    assert probability_denied_if_right(found)[made].mean() == pytest.approx((denied & ~wrong)[made].mean(), abs=0.02)


def test_chances_that_are_too_sure_are_seen_to_be():
    rng = np.random.default_rng(1)
    _, found = planted(rng, 20_000)
    bold = found._replace(chance=np.where(found.chance > 0.5, 0.98, 0.02))
    assert calibration_error(probability_seen_above(bold), bold.seen > 0) > 0.08


def test_what_is_left_of_denied_calls_is_the_share_of_false_ones():
    rng = np.random.default_rng(2)
    right = rng.normal(2, 0.5, 3_000) + rng.standard_normal(3_000)
    assert (right < 0).mean() > 0.03
    assert share_below(right) < 0.01
    some = np.where(rng.random(6_000) < 0.1, -2.0, 3.0)
    assert share_below(some + rng.standard_normal(6_000)) == pytest.approx(0.1, abs=0.02)


def test_federations_without_calls_are_told_of():
    nothing = StatedGains(*(np.array([value]) for value in (0.6, 1.0, 0, 0.2, 0.1)))
    assert describe([nothing]).startswith("0 calls at 1 clients in 0 of 1; ECE")
    assert describe([StatedGains(*(np.empty(0),) * 5)]) == "nothing to tell"
