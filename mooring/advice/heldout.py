"""Gains where nothing predicts them (networks, newcomers): held-out rows alone tell.

Client i's n_i held-out rows have losses that differ between two models by d_i on average, with standard deviation u_i
over rows (steadied by all clients'). The effects theta_i = gain_i / u_i are draws from N(mu, t^2) over the clients,
each observed with error 1/sqrt(n_i); mu and t are integrated, t on a grid: an estimate of t that happens to be 0 would
decide about all clients at once. Effects, not gains, have one law: a client whose models differ more has both larger
gains and larger errors, and weights by error would then be weights by gain.

One half of the prior is on mu = 0: of two models that are trained much alike neither need be the better one on average.
The better looking one is deployed, and without this half what it seems to gain would be believed just because it was
chosen. The other half is normal, as wide as a client's error or four times as wide: what many clients see survives.

Rows' differences have long tails: a network is seldom wrong, but then by much. The means d_i have a kurtosis of
k = 3 + (rows' kurtosis - 3) / n, their squares vary (k - 1) / 2 times as much as normal ones would, and so much less do
they tell of t: its likelihood is tempered by 2 / (k - 1).

Test rows that a table keeps apart are rows like those of the folds: together they know errors and tails better than
either part, which may have seen no row of large loss.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from mooring.advice.calibrate import Witness
from mooring.advice.gain import Gain

OVER_ALONE, COMMON_OVER_ALONE = "personal over alone", "common over alone"
MEANS = {0.0: 0.5, 1.0: 0.25, 4.0: 0.25}  # standard deviations of mu, in a typical client's error, and their chances
SPREADS = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 8.0)  # t, in a typical client's error; half-Cauchy prior


class Moments(NamedTuple):
    """Of rows' numbers, by client: [m] each."""

    mean: Tensor
    variance: Tensor
    fourth: Tensor  # central moment


def moments(rows: Tensor, sums: Tensor) -> Moments:
    """From the sums [4, m] of the numbers and of their powers; zeros without rows."""
    n = rows.double()
    first, second, third, fourth = torch.where(n > 0, sums.double() / n, 0.0)
    peaks = fourth - 4 * first * third + 6 * first**2 * second - 3 * first**4
    return Moments(first, (second - first**2).clamp(min=0), peaks.clamp(min=0))


def steadied_error(rows: Tensor, sums: Tensor) -> Tensor:
    """[m]: standard errors of clients' means, from the sums [4, m] of their rows' numbers and of their powers.

    A client's variance is its own by the share n / (n + k), else everybody's: k is how much squares vary from row to
    row, over how much variances vary from client to client beyond chance (Buehlmann and Straub's credibility). With
    long tails hardly any client knows its own variance: it would be far too small where no row of large loss was in
    sight, and these are the clients that seem to gain.
    """
    n = rows.double()
    _, central, fourth = moments(rows, sums)
    freedom = (n - 1).clamp(min=0)
    total = freedom.sum().clamp(min=1)
    own = central * n / freedom.clamp(min=1)
    pooled = (freedom * own).sum() / total
    normal = 2 * own**2 * freedom / (n + 1)  # what squares of normal rows would vary: few rows show less than that
    within = torch.maximum((n * (fourth - central**2)).sum(), (n * normal).sum()) / n.sum().clamp(min=1)
    others = max(int((freedom > 0).sum()) - 1, 0)
    chance = others + 2 * (2 * others) ** 0.5  # what equal variances would show at most, in 19 of 20 federations
    seen = (freedom * (own - pooled) ** 2).sum() - chance * within
    between = (seen / (total - (freedom**2).sum() / total).clamp(min=1)).clamp(min=0)
    share = torch.where(between > 0, freedom * between / (freedom * between + within), 0.0)
    return ((share * own + (1 - share) * pooled) / n.clamp(min=1)).sqrt()


def row_kurtosis(rows: Tensor, sums: Tensor, error: Tensor) -> float:
    """Of the rows' numbers, in units of their clients' variances; 3, as of normal ones, if nothing varies."""
    n = rows.double()
    square = n * error**2  # rows' variances
    some = (n > 0) & (square > 0)
    if not bool(some.any()):
        return 3.0
    fourth = moments(rows, sums).fourth
    return float((n * fourth / square**2)[some].sum() / n[some].sum())


def tempering(kurtosis: float, rows: Tensor) -> float:
    """2 / (kurtosis of clients' means - 1), at most 1: how much less their spread tells than that of normal ones."""
    return 1 / (1 + max(kurtosis - 3, 0.0) / 2 / float(rows.double().mean()))


def together(first: Witness, second: Witness) -> Witness:
    """All rows of two witnesses of the same clients; nothing is predicted of them."""
    rows, square, count, spread = [], [], [], []
    for seen in (first, second):
        n = seen.rows.double()
        rows.append(n)
        square.append(torch.where(n > 0, n * seen.error**2, 0.0))  # rows' variances
        count.append(float(n.sum()))
        spread.append(float(n @ square[-1]) / max(count[-1], 1.0))
    n, total = rows[0] + rows[1], max(sum(count), 1.0)
    sums = [torch.where(k > 0, k * seen.observed, 0.0) for k, seen in zip(rows, (first, second))]
    error = ((rows[0] * square[0] + rows[1] * square[1]) / n**2).sqrt()
    pooled = (count[0] * spread[0] + count[1] * spread[1]) / total
    fourth = (count[0] * first.kurtosis * spread[0] ** 2 + count[1] * second.kurtosis * spread[1] ** 2) / total
    nothing = torch.full_like(n, torch.nan)
    kurtosis = fourth / pooled**2 if pooled > 0 else 3.0
    return Witness((sums[0] + sums[1]) / n, error, nothing, nothing, first.rows + second.rows, kurtosis)


def at_full_size(seen: dict[str, Witness], share: Tensor | float, saved: float = 1.0) -> dict[str, Witness]:
    """What models of all rows gain over training alone, seen with models of a `share` of them.

    Of what training alone loses beyond the truth a part r is `saved` by leaning on the others. As with normal truths,
    r = k / (n + k) falls with the rows n, and that loss as one over them: from n to n / share rows the gain falls to
    share^2 / (1 - r (1 - share)) of what it was, to `share` itself if r = 1. A common model is behind by as much more.
    """
    alone = seen[OVER_ALONE].observed
    kept = share**2 / (1 - saved * (1 - share))
    changed = {OVER_ALONE: kept * alone, COMMON_OVER_ALONE: seen[COMMON_OVER_ALONE].observed - (1 - kept) * alone}
    return seen | {name: seen[name]._replace(observed=observed) for name, observed in changed.items()}


def held_out_gain(seen: Witness) -> Gain:
    """Every client's gain from `observed`, `error` and `rows` alone; a client without rows has the others' law."""
    n = seen.rows.double()
    unit = torch.where(n > 0, seen.error * n.clamp(min=1).sqrt(), 0.0)
    typical = unit[n > 0].mean() if bool((n > 0).any()) else unit.sum()
    unit = torch.where(n > 0, unit, typical)
    known = (n > 0) & (unit > 0) & torch.isfinite(seen.observed)
    if not bool(known.any()):
        nothing = torch.zeros(1, len(n), dtype=torch.float64)
        one = torch.ones(1, dtype=torch.float64)
        return Gain(
            one[:, None].expand(1, len(n)), nothing, nothing, nothing[0], one, torch.zeros_like(one), nothing[0]
        )
    effect, noise = torch.where(known, seen.observed / unit, 0.0), 1 / n.clamp(min=1)
    one = noise[known].median()  # a typical client's squared error
    edges = torch.tensor(SPREADS, dtype=torch.float64)
    t2 = edges[:, None] ** 2 * one  # [t, 1]
    precision = torch.where(known, 1 / (t2 + noise), 0.0)  # [t, m]
    total = precision.sum(1, keepdim=True)
    centre = (precision * effect).sum(1, keepdim=True) / total
    fit = -0.5 * (torch.where(known, (t2 + noise).log(), 0.0) + precision * (effect - centre) ** 2).sum(1)
    width = torch.cat([(edges[1:2] - edges[:1]) / 2, (edges[2:] - edges[:-2]) / 2, (edges[-1:] - edges[-2:-1]) / 2])
    likely = (width / (1 + edges**2)).log() + tempering(seen.kurtosis, n[known]) * (fit - 0.5 * total[:, 0].log())
    own = torch.where(known, t2 / (t2 + noise), 0.0)
    parts = []
    for size, chance in MEANS.items():
        s2 = size**2 * one
        wide = s2 + 1 / total  # variance of `centre` around 0
        mu, doubt = s2 / wide * centre, s2 / wide / total
        score = math.log(chance) + likely - 0.5 * (wide.log() + centre**2 / wide)[:, 0]
        spread = torch.where(known, own * noise, t2) + (1 - own) ** 2 * doubt
        parts.append((score, unit * (mu + own * (effect - mu)), unit**2 * spread, doubt[:, 0]))
    score, mean, variance, doubt = (torch.cat(column) for column in zip(*parts))
    weight = torch.softmax(score, 0)
    share = n / n.sum()
    shared = (((1 - own) * unit) @ share).repeat(len(MEANS)) ** 2 * doubt
    none = torch.zeros_like(unit)
    return Gain(weight[:, None].expand(-1, len(n)), mean, variance, noise * unit**2, weight, shared, none)
