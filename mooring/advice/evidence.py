"""What test rows say about each client: losses alone, common and personal, the gain with an interval, a verdict.

Test rows took no part in any choice. The gain of client i is its mean loss alone less its mean loss with the advised
model; positive means that the federation helps it. Rows are paired: both models answer the same rows.

    interval      a paired bootstrap of the client's own rows; with fewer than LEAST rows, normal with a variance
                  steadied by all clients' differences
    many clients  differences d_i with errors s_i are taken as draws from N(g, t^2) over the clients, g and t
                  estimated; each client's posterior borrows from the others, and a sign is called only while the mean
                  posterior chance of the other sign, over all calls, is at most ERROR; at most 5 % then are wrong
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from scipy.stats import norm
from torch import Tensor

from mooring.advice.folds import row_losses
from mooring.core.seeds import uniforms
from mooring.data.clients import Clients

LEAST = 10  # test rows below which a client's own bootstrap says nothing
DRAWS = 1_000
LEVEL = 0.95
ERROR = 0.025  # mean chance of a wrong call, half of the 5 % promised: g, t and the errors s_i are estimates
SEEMING = 0.1
CELLS = 5_000_000  # bootstrap draws held at a time


class Difference(NamedTuple):
    """How much lower the second model's loss is than the first's, per client [m]."""

    mean: np.ndarray  # nan without test rows
    low: np.ndarray
    high: np.ndarray
    better: np.ndarray  # bool: the second model is better, the calls being right in 95 % of cases on average
    worse: np.ndarray


def compare(first: Tensor, second: Tensor, size: Tensor, keys: np.ndarray, seed: int = 0) -> Difference:
    """The paired difference of row losses [N] (first minus second) of clients with `size` rows each."""
    difference, n = (first - second).numpy(), size.numpy()
    owner = np.repeat(np.arange(len(n)), n)
    count = np.maximum(n, 1)
    mean = np.bincount(owner, difference, len(n)) / count
    square = np.bincount(owner, (difference - mean[owner]) ** 2, len(n))
    pooled = square.sum() / max((n - 1).clip(min=0).sum(), 1)
    own = square / np.maximum(n - 1, 1)
    # A client's own variance, steadied by ten rows' worth of everyone's.
    error = np.sqrt((own * np.maximum(n - 1, 0) + LEAST * pooled) / (np.maximum(n - 1, 0) + LEAST) / count)
    low, high = bootstrap(difference, n, keys, seed)
    few = n < LEAST
    reach = norm.ppf((1 + LEVEL) / 2) * error
    low, high = np.where(few, mean - reach, low), np.where(few, mean + reach, high)
    empty = n == 0
    mean, low, high = (np.where(empty, np.nan, part) for part in (mean, low, high))
    better, worse = calls(mean, error)
    return Difference(mean, low, high, better & ~empty, worse & ~empty)


def bootstrap(difference: np.ndarray, n: np.ndarray, keys: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The percentile interval of each client's mean, resampling its rows; a client's draws depend on nobody else."""
    start = np.cumsum(n) - n
    low, high = np.zeros(len(n)), np.zeros(len(n))
    ends = [100 * (1 - LEVEL) / 2, 100 * (1 + LEVEL) / 2]
    for i in np.flatnonzero(n >= LEAST):
        mine = difference[start[i] : start[i] + n[i]]
        draws = max(1, min(DRAWS, CELLS // n[i]))
        picks = np.floor(uniforms(seed, "bootstrap", keys[i], np.arange(draws)[:, None], np.arange(n[i])) * n[i])
        low[i], high[i] = np.percentile(mine[picks.astype(int)].mean(1), ends)
    return low, high


def calls(mean: np.ndarray, error: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which clients' differences are positive, and which negative, as far as can be said."""
    known = np.isfinite(mean) & (error > 0)
    better, worse = np.zeros(len(mean), bool), np.zeros(len(mean), bool)
    if not known.any():
        return better, worse
    center, spread = population(mean[known], error[known])
    weight = spread**2 / (spread**2 + error**2)
    middle = center + weight * (np.where(known, mean, center) - center)
    # The centre is itself estimated: its error enters where a client leans on it.
    slack = 1 / np.sum(1 / (spread**2 + error[known] ** 2))
    sd = np.sqrt(weight * error**2 + (1 - weight) ** 2 * slack)
    chance = norm.cdf(-middle / np.maximum(sd, np.finfo(float).tiny))  # of a difference below 0
    return known & _admit(chance, known), known & _admit(1 - chance, known)


def population(mean: np.ndarray, error: np.ndarray) -> tuple[float, float]:
    """Mean and spread of the clients' true differences: DerSimonian and Laird's moments."""
    weight = 1 / error**2
    center = np.sum(weight * mean) / weight.sum()
    excess = np.sum(weight * (mean - center) ** 2) - (len(mean) - 1)
    scale = weight.sum() - np.sum(weight**2) / weight.sum()
    spread2 = max(excess / scale, 0.0) if scale > 0 else 0.0
    weight = 1 / (error**2 + spread2)
    return float(np.sum(weight * mean) / weight.sum()), float(spread2**0.5)


def _admit(wrong: np.ndarray, known: np.ndarray) -> np.ndarray:
    """The largest set of clients whose mean chance of a wrong call is at most ERROR."""
    order = np.argsort(np.where(known, wrong, np.inf), kind="stable")
    running = np.cumsum(wrong[order]) / np.arange(1, len(wrong) + 1)
    admitted = np.zeros(len(wrong), bool)
    admitted[order[: int(np.sum(np.logical_and.accumulate(running <= ERROR)))]] = True
    return admitted & (wrong < 0.5)


class Judged(NamedTuple):
    """What test rows say about models: the loss of each row, each client's mean [m], the gain over alone, a verdict."""

    losses: dict[str, Tensor]  # by model, [N]
    means: dict[str, np.ndarray]  # by model, [m]; nan without test rows
    gain: Difference
    verdict: list[str]


def judge(task: Any, clients: Clients, models: dict[str, Tensor], seed: int, alike: bool = False) -> Judged:
    """Judge the models "alone", "common" and "personal" ([m, d], or one [d] for all), in the target's own units.

    Further models get losses and means.
    """
    test, unit = clients.test, clients.target_scale**task.unit_power
    losses = {name: row_losses(task, w, test, unit) for name, w in models.items()}

    def against(first: str, second: str) -> Difference:
        return compare(losses[first], losses[second], test.size, clients.keys, seed)

    n = test.size.numpy()
    owner = np.repeat(np.arange(len(n)), n)
    totals = {name: np.bincount(owner, loss.numpy(), len(n)) for name, loss in losses.items()}
    means = {name: np.where(n > 0, total / np.maximum(n, 1), np.nan) for name, total in totals.items()}
    gain = against("alone", "personal")
    return Judged(losses, means, gain, verdicts(gain, against("common", "personal"), against("alone", "common"), alike))


def verdicts(
    alone_personal: Difference, common_personal: Difference, alone_common: Difference, alike: bool = False
) -> list[str]:
    """`personal`, `common`, `alone` or `undecided` for each client: the best model, if it can be told from the others.

    personal  better than alone and than the common model; not where the clients may be `alike` for all that their
              coefficients tell: then it is luck
    common    better than alone, and the personal model is not better still
    alone     better than the common model, and the personal model not better still, nor seemingly so by more than a
              little: SEEMING of what separates alone from common
    """
    out = []
    for i in range(len(alone_personal.mean)):
        over_alone, over_common = alone_personal.better[i], common_personal.better[i]
        if over_alone and over_common and not alike:
            out.append("personal")
        elif alone_common.better[i] and (alike or not over_common):
            out.append("common")
        elif alone_common.worse[i] and not over_alone and alone_personal.mean[i] <= -SEEMING * alone_common.mean[i]:
            out.append("alone")
        else:
            out.append("undecided")
    return out
