"""Predicted gains held against gains on rows that were left out: how far predictions are to be trusted.

For each client d_i is the mean difference of losses on held-out rows, m_i with standard deviation sd_i its prediction
from the other folds, e_i the error of d_i given the truth.

    b     slope of d on m, weights 1/(sd^2 + e^2), its error robust to what differs by client; shrunk to N(1, .2^2)
    phi   how much larger (d - b m)^2 is than sd^2 + e^2, at least 1, shrunk to 1
    P_i   = sum_c weight_ic Phi( b g_ic / (phi sd_ic^2 + se_b^2 g_ic^2)^1/2 ), g and sd at full size: the chance to gain

Rows that took no part in choice and fits (a table's own test rows) are one more witness: they update each g_ic.

Calls: the largest sets of gains and of losses of which, on average, at most a share RATE has the other sign; few calls
have to be surer.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from scipy.special import ndtri, stdtrit
from torch import Tensor

from mooring.advice.gain import Gain

DOUBT = 0.2  # prior standard deviation of the slope around 1
OVERALL_DOUBT = 0.3  # the same for the slope of the whole federation's mean
STEADY = 10.0  # clients' worth of trust in phi = 1
HALVINGS = 50
FEW = 2_000  # clients whose intervals are sought at a time: their numbers stay in the processor's cache
RATE = 0.035  # mean chance of the other sign among calls,
AHEAD = 0.1  # so many wrong ones being counted before the first


class Witness(NamedTuple):
    """Observed and predicted mean differences on held-out rows; nan where a client has none."""

    observed: Tensor  # [m], d
    error: Tensor  # [m], e
    predicted: Tensor  # [m], m
    sd: Tensor  # [m]
    rows: Tensor  # [m]
    kurtosis: float = 3.0  # of the rows' differences: how long their tails are (`heldout.py`)


class Trust(NamedTuple):
    slope: float
    slope_error: float
    phi: float


def trust(seen: Witness) -> Trust:
    """Slope and phi from the clients that have held-out rows."""
    kept = (seen.rows > 0) & torch.isfinite(seen.observed) & (seen.sd**2 + seen.error**2 > 0)
    d, m, total = seen.observed[kept], seen.predicted[kept], (seen.sd**2 + seen.error**2)[kept]
    count = len(d)
    if count < 2 or not bool((m.abs() > 0).any()):
        return Trust(1.0, DOUBT, 1.0)
    weight = 1 / total
    curve = float((weight * m**2).sum())
    raw = float((weight * m * d).sum()) / max(curve, 1e-300)
    left = d - raw * m
    spread = float((weight**2 * m**2 * left**2).sum()) * count / (count - 1)
    error2 = max(spread / max(curve, 1e-300) ** 2, 1 / max(curve, 1e-300))
    precision = 1 / DOUBT**2 + 1 / error2
    slope = (1 / DOUBT**2 + raw / error2) / precision
    ratio = float((weight * (d - slope * m) ** 2).mean())
    phi = max(1.0, (STEADY + count * ratio) / (STEADY + count))
    return Trust(slope, precision**-0.5, phi)


def trusted(gain: Gain, known: Trust) -> Gain:
    """The predicted gains as far as they are to be trusted."""
    variance = known.phi * gain.variance + (known.slope_error * gain.mean) ** 2
    return gain._replace(mean=known.slope * gain.mean, variance=variance)


def with_witness(gain: Gain, observed: Tensor, error: Tensor) -> Gain:
    """Gains after a look at rows that took no part in anything: mean difference and its error, nan where none."""
    seen = torch.isfinite(observed) & torch.isfinite(error) & (error > 0)
    d, noise = torch.where(seen, observed, 0.0), torch.where(seen, error, 1.0) ** 2
    wide = gain.variance + noise
    weight = gain.weight * torch.exp(-0.5 * (d - gain.mean) ** 2 / wide) / wide.sqrt()
    weight = weight / weight.sum(0).clamp(min=1e-300)
    share = gain.variance / wide
    mean, variance = gain.mean + share * (d - gain.mean), (1 - share) * gain.variance
    kept = seen & (weight.sum(0) > 0.5)  # an observation that no scale can explain explains nothing
    return gain._replace(
        weight=torch.where(kept, weight, gain.weight),
        mean=torch.where(kept, mean, gain.mean),
        variance=torch.where(kept, variance, gain.variance),
    )


def chances(gain: Gain) -> Tensor:
    """[m]: the chance that the gain is above 0; one half where the models are the same."""
    sd = gain.variance.sqrt()
    same = (sd == 0) & (gain.mean == 0)
    chance = torch.where(same, 0.5, torch.special.ndtr(gain.mean / sd.clamp(min=torch.finfo(sd.dtype).tiny)))
    return (gain.weight * chance).sum(0).clamp(0, 1)


def interval(gain: Gain, level: float) -> tuple[Tensor, Tensor]:
    """The middle `level` of each client's gain, [m] each: quantiles of the mixture over scales, by bisection."""
    sd = (gain.variance + gain.doubt * gain.mean**2).sqrt().clamp(min=torch.finfo(gain.mean.dtype).tiny)
    reach = 2 * float(ndtri((1 + level) / 2)) + 2
    ends = []
    for weight, mean, width in zip(*(part.split(FEW, 1) for part in (gain.weight, gain.mean, sd))):
        for chance in ((1 - level) / 2, (1 + level) / 2):
            low, high = (mean - reach * width).min(0).values, (mean + reach * width).max(0).values
            for _ in range(HALVINGS):
                middle = (low + high) / 2
                below = (weight * torch.special.ndtr((middle - mean) / width)).sum(0) < chance
                low, high = torch.where(below, middle, low), torch.where(below, high, middle)
            ends.append((low + high) / 2)
    return torch.cat(ends[::2]), torch.cat(ends[1::2])


def calls(chance: Tensor, rate: float = RATE) -> tuple[np.ndarray, np.ndarray]:
    """Which clients surely gain, and which surely lose: each at a mean chance of the other sign of `rate`."""
    p = chance.numpy()
    return admitted(1 - p, rate), admitted(p, rate)


def admitted(wrong: np.ndarray, rate: float) -> np.ndarray:
    """The largest set of clients whose mean chance of a wrong call, AHEAD calls' worth added, is at most `rate`.

    A handful of calls among many clients are the extremes, where a model's tails are least to be trusted: the few need
    more than the many.
    """
    order = np.argsort(wrong, kind="stable")
    running = (np.cumsum(wrong[order]) + AHEAD) / np.arange(1, len(wrong) + 1)
    fits = np.flatnonzero(running <= rate)
    out = np.zeros(len(wrong), bool)
    out[order[: fits[-1] + 1 if len(fits) else 0]] = True
    return out & (wrong < 0.5)


def federation_line(
    seen: Witness, gain: Gain | None, everyone: Tensor, known: Trust, level: float
) -> tuple[float, float, float]:
    """The mean gain over all rows, and its interval.

    Without predictions: the row-weighted mean of d_i with its error, clients being the units of chance. With them: the
    predicted mean at full size times the slope of observed on predicted means, shrunk to N(1, .3^2). The truth is that
    of the models as they are, not on average over samples, so the posterior's own variance belongs to the error.
    `everyone` [m] are all clients' shares of the rows.
    """
    kept = (seen.rows > 0) & torch.isfinite(seen.observed)
    d, n = seen.observed[kept].double(), seen.rows[kept].double()
    m = len(d)
    if m == 0:
        return float("nan"), float("nan"), float("nan")
    share = n / n.sum()
    mean = float(share @ d)
    if m == 1:
        return mean, float("-inf"), float("inf")
    variance = float((share**2 * (d - mean) ** 2).sum()) * m / (m - 1)
    if gain is not None:
        small = float(share @ seen.predicted[kept])
        large, own = gain.total(everyone, known.phi)
        precision = 1 / OVERALL_DOUBT**2 + small**2 / max(variance, 1e-300)
        slope = (1 / OVERALL_DOUBT**2 + small * mean / max(variance, 1e-300)) / precision
        mean, variance = slope * large, large**2 / precision + own
    reach = float(stdtrit(m - 1, (1 + level) / 2)) * variance**0.5
    return mean, mean - reach, mean + reach
