"""Stated probabilities and calls, compared with withheld rows, which are few and have errors of their own.

Advice states for a client's gain a probability c of being above 0 and an interval, read here as a normal distribution
with that probability and that width. The withheld rows show the gain with a standard error e (shrunken to the other
clients' errors, because few rows cannot estimate their own). Then

  promised   false calls if every stated probability is right: the mean of 1 - c, or of c where "worse" is called
  expected   calls that the withheld rows would deny if every stated probability is right, their error included
  by noise   the part of these that they would deny although the calls are right
  left       share of false calls with the error of the withheld rows removed: the share below 0 of the distribution
             of gains over errors that, with a normal error of 1, maximizes the likelihood of the observed gains
             (Kiefer and Wolfowitz's estimate, by EM on a grid of normal distributions half as wide as the error:
             points next to 0 could lie on either side of it); its error is that over resampled federations
  ECE        calibration error of the probabilities that the withheld rows show a gain above 0: right probabilities
             make it 0, however large the errors of the withheld rows are
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import ndtr, ndtri

LEVEL = 0.9  # of the stated intervals
SURE = 1e-6  # stated probabilities are clipped to [SURE, 1 - SURE]
POINTS = ndtri((np.arange(200) + 0.5) / 200)  # quantiles of the standard normal distribution
GRID = np.arange(-8, 20, 0.25)  # gains over errors
SMOOTH = 0.5
SEEN = np.arange(-10, 22.05, 0.1)  # observed gains over errors, in steps much finer than 1
STEPS = 300
RESAMPLES = 50


class StatedGains(NamedTuple):
    """What was stated and observed for k clients, [k] each."""

    chance: np.ndarray  # stated probability of a gain above 0
    width: np.ndarray  # of the stated interval
    call: np.ndarray  # 1: called better, -1: worse, 0: no call
    seen: np.ndarray  # the gain on the withheld rows
    error: np.ndarray  # its standard error


def concatenate(parts: Sequence[StatedGains]) -> StatedGains:
    return StatedGains(*(np.concatenate(column) for column in zip(*parts)))


def stated_distribution(stated: StatedGains) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and standard deviation of the stated distributions."""
    sd = stated.width / (2 * ndtri((1 + LEVEL) / 2))
    return sd * ndtri(np.clip(stated.chance, SURE, 1 - SURE)), sd


def probability_seen_above(stated: StatedGains) -> np.ndarray:
    """Return [k]: the probability that withheld rows show a gain above 0, if what is stated is right."""
    mean, sd = stated_distribution(stated)
    return ndtr(mean / np.maximum(np.hypot(sd, stated.error), 1e-300))


def probability_denied_if_right(stated: StatedGains) -> np.ndarray:
    """Return [k]: the probability that withheld rows show the opposite of a call that is right."""
    mean, sd = stated_distribution(stated)
    gain = stated.call[:, None] * mean[:, None] + sd[:, None] * POINTS
    return np.where(gain > 0, ndtr(-gain / np.maximum(stated.error[:, None], 1e-300)), 0.0).mean(1)


def share_below(z: np.ndarray) -> float:
    """Return the share of true gains below 0, from observed gains over errors [k], which have errors of 1."""
    count, _ = np.histogram(np.clip(z, SEEN[0], SEEN[-1]), SEEN)
    is_filled = count > 0
    middle = (SEEN[:-1] + SEEN[1:])[is_filled] / 2
    likelihood = np.exp(-0.5 * (middle[:, None] - GRID) ** 2 / (1 + SMOOTH**2))
    mass = np.full(len(GRID), 1 / len(GRID))
    for _ in range(STEPS):
        joint = likelihood * mass
        mass = count[is_filled] / len(z) @ (joint / joint.sum(1, keepdims=True))
    return float(mass @ ndtr(-GRID / SMOOTH))


def calibration_error(stated: np.ndarray, true: np.ndarray, bins: int = 10) -> float:
    bin_of = np.minimum((stated * bins).astype(int), bins - 1)
    gaps = np.bincount(bin_of, stated - true, bins)
    return float(np.abs(gaps).sum() / len(stated))


def describe(parts: Sequence[StatedGains], seed: int = 0) -> str:
    """Return a line that compares the calls of several federations with withheld rows."""
    stated = concatenate(parts)
    k = len(stated.chance)
    if k == 0:
        return "nothing to tell"
    is_call = stated.call != 0
    ece = calibration_error(probability_seen_above(stated), stated.seen > 0)
    of = f"{is_call.sum()} calls at {k} clients in {sum(bool((p.call != 0).any()) for p in parts)} of {len(parts)}"
    if not is_call.any():
        return f"{of}; ECE {ece:.3f}"
    calls = StatedGains(*(column[is_call] for column in stated))
    z = calls.call * calls.seen / np.maximum(calls.error, 1e-300)
    above = probability_seen_above(calls)
    expected = np.where(calls.call > 0, 1 - above, above).mean()
    promised = np.where(calls.call > 0, 1 - calls.chance, calls.chance).mean()
    raw = f"{(z < 0).sum()} denied ({(z < 0).mean():.1%}), {(z < -2).sum()} by two errors"
    shares = (
        f"promised {promised:.1%}, expected {expected:.1%}, by noise {probability_denied_if_right(calls).mean():.1%}"
    )
    return f"{of}, {raw}; {shares}, left {estimate_false_share(parts, seed)}; ECE {ece:.3f}"


def estimate_false_share(parts: Sequence[StatedGains], seed: int) -> str:
    """Return `share_below` of all calls, with its error over resampled federations."""
    ratios = [p.call[p.call != 0] * p.seen[p.call != 0] / np.maximum(p.error[p.call != 0], 1e-300) for p in parts]
    share = share_below(np.concatenate(ratios))
    if len(ratios) < 3:
        return f"{share:.1%}"
    rng = np.random.default_rng(seed)
    resamples = [[ratios[j] for j in rng.integers(len(ratios), size=len(ratios))] for _ in range(RESAMPLES)]
    shares = [share_below(np.concatenate(sample)) for sample in resamples if sum(map(len, sample))]
    return f"{share:.1%} (error {np.std(shares):.1%})"


def select_calls(probability: np.ndarray, rate: float = 0.035) -> tuple[np.ndarray, np.ndarray]:
    """Return the clients called better and those called worse, each at a mean probability of error of `rate`."""
    return admit_calls(1 - probability, rate), admit_calls(probability, rate)


def admit_calls(wrong: np.ndarray, rate: float, ahead: float = 0.1) -> np.ndarray:
    """Return the largest set of clients whose mean probability of a wrong call is at most `rate`.

    `ahead` calls' worth is added to the sum of probabilities: a handful of calls among many clients are the extremes,
    where a model's tails are least reliable.
    """
    order = np.argsort(wrong, kind="stable")
    running = (np.cumsum(wrong[order]) + ahead) / np.arange(1, len(wrong) + 1)
    fits = np.flatnonzero(running <= rate)
    out = np.zeros(len(wrong), bool)
    out[order[: fits[-1] + 1 if len(fits) else 0]] = True
    return out & (wrong < 0.5)
