"""Heterogeneity without a formula for the fits' variance: from fits to halves of the rows, or to resampled rows.

Two fits a_i, b_i to disjoint halves of a client's rows have independent noise, so it drops out of cross products:

    E sum_i p_i <a_i - abar, b_i - bbar> = sum_i p_i |w~_i - w~avg|^2,    w~_i what a fit to half of the rows estimates

which serves fits of any kind, and predictions of networks, whose coefficients cannot be compared. The price: twice the
noise, and the bias of a fit to half of the rows (R of logistic clients comes out high below 20 rows per coefficient).
"""

from __future__ import annotations

from collections.abc import Callable
from math import nan

import numpy as np
import torch
from scipy.stats import t as student
from torch import Tensor

from mooring.core.cohort import Rows
from mooring.core.errors import RequestError
from mooring.theory.estimate import Estimate, not_identified
from mooring.theory.heterogeneity import client_weights
from mooring.theory.summaries import LocalFits, fit_covariance, trace

BIASED = "Without fits to halves of the rows the value includes sampling noise: it is too large and has no interval."


def radius_split(first: Tensor, second: Tensor, p: Tensor, level: float = 0.95) -> Estimate:
    """R from fits [m, d] to two halves of each client's rows."""
    p = client_weights(p, torch.ones_like(first[:, 0]))
    square, low, high = _cross(first, second, p, level)
    return Estimate(square**0.5, low**0.5, high**0.5, "split halves")


def function_distance(
    predictions: Tensor,
    p: Tensor | None = None,
    halves: tuple[Tensor, Tensor] | None = None,
    level: float = 0.95,
) -> Estimate:
    """Root mean square distance of the clients' predictions [m, probes, outputs] on common probes from their mean.

    sqrt( sum_i p_i mean_probes |f_i(x) - fbar(x)|^2 ): a substitute for R where coefficients cannot be compared.
    `halves` are predictions of models trained on disjoint halves of each client's rows; with them the noise drops out.
    """
    clients, probes = predictions.shape[:2]
    p = client_weights(p, torch.ones(clients, dtype=torch.float64))
    flat = predictions.double().reshape(clients, -1) / probes**0.5
    if halves is None:
        away = flat - p @ flat
        return Estimate(float((p * away.square().sum(1)).sum().sqrt()), nan, nan, "plug-in predictions", (BIASED,))
    if any(half.shape != predictions.shape for half in halves):
        raise RequestError(
            f"function_distance: halves need the shape of predictions {tuple(predictions.shape)}, "
            f"got {tuple(halves[0].shape)} and {tuple(halves[1].shape)}."
        )
    first, second = (half.double().reshape(clients, -1) / probes**0.5 for half in halves)
    square, low, high = _cross(first, second, p, level)
    return Estimate(square**0.5, low**0.5, high**0.5, "split halves of predictions")


def radius_bootstrap(
    rows: Rows,
    build: Callable[[Rows], LocalFits],
    p: Tensor | None = None,
    level: float = 0.95,
    repeats: int = 200,
    seed: int = 0,
) -> Estimate:
    """R with an interval from records resampled within clients; `build` is a builder of `summaries.py`.

    Resampling gives each fit's errors e_i and estimated variances. If the true radius were r, the clients at
    wbar + (r/sqrt(Q)) (w_i - wbar), Q the observed square, would show the square r^2 + 2 r/sqrt(Q) L + E with
    L = sum p_i <w_i - wbar, e_i>, E = sum p_i |e_i - ebar|^2. The interval holds the r for which the observed debiased
    square is not extreme among these. `radius` is better calibrated below some ten rows per coefficient.
    """
    fits = build(rows)
    if bool((fits.freedom <= 0).any()):
        return not_identified("Some clients' rows do not determine their coefficients.")
    p = client_weights(p, fits.n)
    away = fits.fit - p @ fits.fit
    square = float((p * away.square().sum(1)).sum())
    seen = square - _noise(fits, p)
    generator = torch.Generator().manual_seed(seed)
    cross, extra = np.empty(repeats), np.empty(repeats)
    for k in range(repeats):
        again = build(resampled(rows, generator))
        if bool((again.freedom <= 0).any()):
            return not_identified("Resampled rows do not determine the coefficients of some clients; use more rows.")
        error = again.fit - fits.fit
        error = error - p @ error
        cross[k] = float((p * (away * error).sum(1)).sum()) / max(square, 1e-300) ** 0.5
        extra[k] = float((p * error.square().sum(1)).sum()) - _noise(again, p)
    tail = (1 - level) / 2

    def below(r: float) -> float:
        return float(np.mean(r**2 + 2 * r * cross + extra <= seen))

    none = below(0.0)
    grid = np.linspace(0, 2 * (square**0.5 + np.sqrt(np.abs(extra).max())) + 4 * np.abs(cross).max(), 2_001)
    chances = np.array([below(r) for r in grid])
    kept = grid[chances > tail * none]
    low = 0.0 if none <= 1 - tail else float(grid[chances > 1 - tail].max())
    return Estimate(max(seen, 0.0) ** 0.5, low, float(kept.max(initial=low)), "debiased fits, resampled records")


def resampled(rows: Rows, generator: torch.Generator) -> Rows:
    """As many records per client, drawn with replacement from its own."""
    owner = torch.repeat_interleave(torch.arange(len(rows)), rows.size)
    draw = (torch.rand(len(owner), generator=generator, dtype=torch.float64) * rows.size[owner]).long()
    index = rows.start[owner] + draw
    return Rows(rows.x[index], rows.y[index], torch.cumsum(rows.size, 0) - rows.size, rows.size)


def _noise(fits: LocalFits, p: Tensor) -> float:
    return float((p * (1 - p) * trace(fit_covariance(fits))).sum())


def _cross(first: Tensor, second: Tensor, p: Tensor, level: float) -> tuple[float, float, float]:
    """The cross product, cut at 0, and its interval.

    With sums s_i = (a_i + b_i)/2 and differences e_i = a_i - b_i its variance is E sum_i p_i^2 <s_i - sbar, e_i>^2 for
    halves of equal noise. Student's t with m - 1 degrees of freedom.
    """
    a, b = first.double() - p @ first.double(), second.double() - p @ second.double()
    value = float((p * (a * b).sum(1)).sum())
    spread = float((p**2 * ((a + b) / 2 * (a - b)).sum(1) ** 2).sum()) ** 0.5
    half = float(student.ppf((1 + level) / 2, len(p) - 1)) * spread
    return max(value, 0.0), max(value - half, 0.0), max(value + half, 0.0)
