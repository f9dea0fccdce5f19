"""Stated chances and calls, held against rows that were put aside: these are few, too, and err themselves.

Advice states of a client's gain a chance c to be above 0 and an interval, read here as a normal law of that chance and
that width. The judge sees the gain with an error e (`steadied_error`: few rows do not know their own). Then

    promised   false calls if every stated chance is right: the mean of 1 - c, or of c where "worse" is called
    expected   calls that the judge would deny if every stated chance is right, its error included
    by noise   the part of these that it would deny although they are right
    left       what is left of the denied calls with the judge's error taken out: the share below 0 of the law of
               gains over errors that, with a normal error of 1, makes what the judge saw likeliest (Kiefer and
               Wolfowitz's estimate, by EM on a grid of normal laws half as wide as the error: points next to 0 would
               stand on either side of it as they please); its error is that over resampled federations
    ECE        calibration error of the chances that the judge says "above 0": right chances make it 0, however large
               the judge's errors are
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import ndtr, ndtri

LEVEL = 0.9  # of the stated intervals
SURE = 1e-6  # chances are taken to be no nearer to 0 and 1
POINTS = ndtri((np.arange(200) + 0.5) / 200)  # a normal law
GRID = np.arange(-8, 20, 0.25)  # gains over errors
SMOOTH = 0.5
SEEN = np.arange(-10, 22.05, 0.1)  # what was seen, in steps much finer than the judge's error
STEPS = 300
RESAMPLES = 50


class StatedGains(NamedTuple):
    """Clients of whom something was told, [k] each."""

    chance: np.ndarray  # stated, of a gain above 0
    width: np.ndarray  # of the stated interval
    call: np.ndarray  # 1: called better, -1: worse, 0: no call
    seen: np.ndarray  # the gain, by the rows aside
    error: np.ndarray  # its standard error


def concatenate(parts: Sequence[StatedGains]) -> StatedGains:
    return StatedGains(*(np.concatenate(column) for column in zip(*parts)))


def stated_distribution(found: StatedGains) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of the stated laws."""
    sd = found.width / (2 * ndtri((1 + LEVEL) / 2))
    return sd * ndtri(np.clip(found.chance, SURE, 1 - SURE)), sd


def probability_seen_above(found: StatedGains) -> np.ndarray:
    """[k]: the chance that the judge says "above 0", if what is stated is right."""
    mean, sd = stated_distribution(found)
    return ndtr(mean / np.maximum(np.hypot(sd, found.error), 1e-300))


def probability_denied_if_right(found: StatedGains) -> np.ndarray:
    """[k]: the chance that the judge says the opposite of a call that is right."""
    mean, sd = stated_distribution(found)
    gain = found.call[:, None] * mean[:, None] + sd[:, None] * POINTS
    return np.where(gain > 0, ndtr(-gain / np.maximum(found.error[:, None], 1e-300)), 0.0).mean(1)


def share_below(z: np.ndarray) -> float:
    """The share of true gains below 0, from gains over errors [k] that were seen with errors of 1."""
    count, _ = np.histogram(np.clip(z, SEEN[0], SEEN[-1]), SEEN)
    kept = count > 0
    middle = (SEEN[:-1] + SEEN[1:])[kept] / 2
    likely = np.exp(-0.5 * (middle[:, None] - GRID) ** 2 / (1 + SMOOTH**2))
    law = np.full(len(GRID), 1 / len(GRID))
    for _ in range(STEPS):
        mine = likely * law
        law = count[kept] / len(z) @ (mine / mine.sum(1, keepdims=True))
    return float(law @ ndtr(-GRID / SMOOTH))


def calibration_error(said: np.ndarray, true: np.ndarray, bins: int = 10) -> float:
    place = np.minimum((said * bins).astype(int), bins - 1)
    gaps = np.bincount(place, said - true, bins)
    return float(np.abs(gaps).sum() / len(said))


def describe(parts: Sequence[StatedGains], seed: int = 0) -> str:
    """What the rows aside say of several federations' calls."""
    found = concatenate(parts)
    k = len(found.chance)
    if k == 0:
        return "nothing to tell"
    made = found.call != 0
    ece = calibration_error(probability_seen_above(found), found.seen > 0)
    of = f"{made.sum()} calls at {k} clients in {sum(bool((p.call != 0).any()) for p in parts)} of {len(parts)}"
    if not made.any():
        return f"{of}; ECE {ece:.3f}"
    mine = StatedGains(*(column[made] for column in found))
    z = mine.call * mine.seen / np.maximum(mine.error, 1e-300)
    above = probability_seen_above(mine)
    expected = np.where(mine.call > 0, 1 - above, above).mean()
    promised = np.where(mine.call > 0, 1 - mine.chance, mine.chance).mean()
    raw = f"{(z < 0).sum()} denied ({(z < 0).mean():.1%}), {(z < -2).sum()} by two errors"
    rest = f"promised {promised:.1%}, expected {expected:.1%}, by noise {probability_denied_if_right(mine).mean():.1%}"
    return f"{of}, {raw}; {rest}, left {estimate_false_share(parts, seed)}; ECE {ece:.3f}"


def estimate_false_share(parts: Sequence[StatedGains], seed: int) -> str:
    """`share_below` of all calls, with its error over resampled federations."""
    each = [p.call[p.call != 0] * p.seen[p.call != 0] / np.maximum(p.error[p.call != 0], 1e-300) for p in parts]
    share = share_below(np.concatenate(each))
    if len(each) < 3:
        return f"{share:.1%}"
    rng = np.random.default_rng(seed)
    again = [[each[j] for j in rng.integers(len(each), size=len(each))] for _ in range(RESAMPLES)]
    shares = [share_below(np.concatenate(some)) for some in again if sum(map(len, some))]
    return f"{share:.1%} (error {np.std(shares):.1%})"


def select_calls(probability: np.ndarray, rate: float = 0.035) -> tuple[np.ndarray, np.ndarray]:
    """Which clients are called better, and which worse: each at a mean probability of the other sign of `rate`."""
    return admit_calls(1 - probability, rate), admit_calls(probability, rate)


def admit_calls(wrong: np.ndarray, rate: float, ahead: float = 0.1) -> np.ndarray:
    """The largest set of clients whose mean probability of a wrong call, `ahead` calls' worth added, is at most `rate`:
    a handful of calls among many clients are the extremes, where a model's tails are least to be trusted."""
    order = np.argsort(wrong, kind="stable")
    running = (np.cumsum(wrong[order]) + ahead) / np.arange(1, len(wrong) + 1)
    fits = np.flatnonzero(running <= rate)
    out = np.zeros(len(wrong), bool)
    out[order[: fits[-1] + 1 if len(fits) else 0]] = True
    return out & (wrong < 0.5)
