"""R under a stated spread w_i ~ N(w, diag(tau^2)): for clients with too few rows to determine their coefficients.

Given tau, the data leave a Gaussian posterior for the clients at hand, hence for R^2 = sum_i p_i |w_i - w_avg|^2 a mean
and a variance (matched by a gamma variable). tau itself, scaled along its estimate, is weighed by its restricted
likelihood with a flat prior on the scale (Gelman 2006) and on log sigma. The lower end is 0 where the likelihood does
not rule out tau = 0.

Where rows are missing, R relies on the assumption that all clients share one distribution.
"""

from __future__ import annotations

from collections.abc import Callable
from math import nan
from typing import NamedTuple

import numpy as np
import torch
from scipy.special import chdtri, gammainc
from torch import Tensor

from mooring.estimates.client_summaries import ClientSummary, Estimate, local_fits, trace
from mooring.estimates.heterogeneity import (
    estimate_client_radii,
    estimate_max_radius,
    estimate_radius,
    resolve_client_weights,
)
from mooring.estimates.random_effects import RandomEffects
from mooring.estimates.reml import GaussianLikelihoods, evaluate_deviance, maximize_likelihood, typical_variance_ratio
from mooring.estimates.task_random_effects import SampledRandomEffects

ASSUMPTION_WARNING = "R rests on the assumed spread for what the clients' own rows do not show."
SCALE_GRID_POINTS = 64
MIN_SCALE = 0.01  # smallest multiple of the estimated spread
MAX_SCALE = 1e2  # largest multiple of the estimated spread
NEGLIGIBLE_DEVIANCE = 30.0  # a scale whose deviance is so much above the least does not count


class Radii(NamedTuple):
    rms: Estimate  # R
    most: Estimate  # R_max
    each: Estimate  # R_i


def estimate_radii(
    summary: ClientSummary, spread: SampledRandomEffects, p: Tensor | None = None, level: float = 0.95
) -> Radii:
    """R, R_max and R_i: from debiased fits if all clients have one, else under the spread that was estimated.

    Under the spread R_i and R_max have no intervals; clients that it was not estimated from get R.
    """
    fits = local_fits(summary)
    p = resolve_client_weights(p, fits.n)
    if bool((fits.freedom > 0).all()):
        return Radii(
            estimate_radius(fits, p, level), estimate_max_radius(fits, p, level), estimate_client_radii(fits, p, level)
        )
    effects, sampled = spread
    share = p[sampled] / p[sampled].sum()
    rms = estimate_radius_by_likelihood(effects, fits.n[sampled], share, level)
    client_radii = torch.full_like(p, rms.value)
    client_radii[sampled] = ((effects.models - share @ effects.models).square().sum(1) + trace(effects.covs)).sqrt()
    method, doubts = effects.method, (*effects.warnings, ASSUMPTION_WARNING)
    unknown = torch.full_like(client_radii, nan)
    largest = Estimate(float(client_radii.max()), nan, nan, method, doubts)
    return Radii(rms, largest, Estimate(client_radii, unknown, unknown, method, doubts))


def estimate_radius_by_likelihood(
    spread: RandomEffects, n: Tensor, p: Tensor | None = None, level: float = 0.95
) -> Estimate:
    """R from a spread that was estimated by likelihood, whichever the task."""
    p = resolve_client_weights(p, n)
    tau2 = spread.variance / (1.0 if spread.data.rows is None else spread.noise[0])
    unit = tau2 if bool((tau2 > 0).any()) else torch.full_like(tau2, typical_variance_ratio(spread.data))
    scales = _scales(spread.data, unit)
    posteriors = [_posterior(spread.data, s**2 * unit, p) for s in scales]
    deviance, noise, mean, variance = (np.array(part) for part in zip(*posteriors))
    # Flat in tau = scale * sigma, on scales that are evenly spaced in their logarithm.
    weight = scales * np.sqrt(noise) * np.exp((deviance.min() - deviance) / 2)
    weight = weight / weight.sum()
    shape, rate = mean**2 / variance, mean / variance

    def below(r: float) -> float:
        return float(weight @ gammainc(shape, rate * r**2))

    tail = (1 - level) / 2
    data = spread.data._replace(tilt=None)
    likeliest = maximize_likelihood(data, torch.ones_like(spread.variance) if spread.form == "scalar" else None)[
        0
    ].deviance
    ruled_out = evaluate_deviance(data, torch.zeros_like(unit)).deviance - likeliest > chdtri(1, 2 * tail)
    top = 4 * np.sqrt((mean + 6 * np.sqrt(variance)).max())
    value = _posterior(spread.data, tau2, p)[2] ** 0.5
    low = _quantile(below, tail, top) if ruled_out else 0.0
    warnings = (*spread.warnings, ASSUMPTION_WARNING)
    return Estimate(value, min(low, value), max(_quantile(below, 1 - tail, top), value), spread.method, warnings)


def _posterior(data: GaussianLikelihoods, t: Tensor, p: Tensor) -> tuple[float, float, float, float]:
    """Deviance and noise at t, posterior mean and variance of R^2."""
    at = evaluate_deviance(data, t)
    pull = torch.eye(len(t), dtype=t.dtype) - t[:, None] * at.p  # how w_i follows w
    cov = at.covs
    deviation = at.models - p @ at.models
    follow = pull - (p @ pull.flatten(1)).view(pull.shape[1:])
    common = at.noise * float(p @ ((follow @ at.w_cov) * follow).sum((1, 2)))
    observed, hidden = (p * deviation.square().sum(1)).sum(), (p * (1 - p) * trace(cov)).sum() + common
    mean = observed + hidden
    weighted_deviation = p[:, None] * deviation
    variance = (
        2 * p**2 @ cov.square().sum((1, 2))
        + 4 * ((cov @ weighted_deviation[..., None])[..., 0] * weighted_deviation).sum()
    )
    if data.rows is not None:  # the posterior covariances scale with a noise that is known to so many rows only
        variance = variance + 2 * hidden**2 / (data.rows - len(t))
    return at.deviance, at.noise, float(mean), float(variance)


def _scales(data: GaussianLikelihoods, unit: Tensor) -> np.ndarray:
    """Multiples of sqrt(unit), each the same share above the last, from near 0 to where the likelihood has vanished."""
    best = evaluate_deviance(data, unit).deviance
    top = 2.0
    while top < MAX_SCALE and evaluate_deviance(data, top**2 * unit).deviance < best + NEGLIGIBLE_DEVIANCE:
        top *= 1.5
    return np.geomspace(MIN_SCALE, top, SCALE_GRID_POINTS)


def _quantile(below: Callable[[float], float], chance: float, top: float) -> float:
    low, high = 0.0, float(top)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) < chance else (low, middle)
    return (low + high) / 2
