"""How much the clients' true models differ, from their noisy fits, with intervals.

    R^2   = sum_i p_i |w*_i - w*_avg|^2        R_i = |w*_i - w*_avg|,   R_max = max R_i
    Gamma = max_ij |w*_i - w*_j|

for the clients at hand (they are not a sample of others; only their records are random). Fits scatter even if all
w*_i are equal: E sum_i p_i |w_i - wbar|^2 = R^2 + sum_i p_i (1 - p_i) tr Cov(w_i). Each client estimates its part of
the second term (`client_summaries.py`), which is subtracted; `squared_length_interval.py` computes the interval.
Each client sends a model and its covariance.

Norms are those of the coefficients, so R changes with the units of the features: standardize them first.

Source   alternative, Section 1.1 and Assumptions B, C (R); kernel, Section 6 (Gamma).
         The estimates are ours; `alternative` names estimating R as open.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mooring.core.errors import RequestError
from mooring.estimates.client_summaries import (
    ClientSummary,
    Estimate,
    LocalFits,
    fit_covariance,
    hessian_shaped_covariance,
    local_fits,
    trace,
    unidentified,
)
from mooring.estimates.squared_length_interval import QuadraticForm, confidence_interval, noise_quantile
from mooring.theory.weights import check_weights

SELECTION_WARNING = "The largest of many noisy distances tends to be too large; only the interval allows for that."
PAIR_BLOCK_CLIENTS = 1_000  # clients whose distances to all others are held at a time


def estimate_radius(summary: ClientSummary, p: Tensor | None = None, level: float = 0.95) -> Estimate:
    """R: plug-in minus the fits' variance. Clients with n <= d make it unidentified: see `radius_likelihood`."""
    fits = local_fits(summary)
    p = resolve_client_weights(p, fits.n)
    if problem := _find_undetermined(fits):
        return problem
    form = _between(fits.fit, hessian_shaped_covariance(fits), trace(fit_covariance(fits)), fits.freedom, p)
    return _take_roots(form, level, "debiased fits", _warnings(fits))


def estimate_client_radii(summary: ClientSummary, p: Tensor | None = None, level: float = 0.95) -> Estimate:
    """R_i [m], each client's distance from the average model; each interval holds for its client only."""
    fits = local_fits(summary)
    p = resolve_client_weights(p, fits.n)
    if problem := _find_undetermined(fits):
        return problem
    _, form = _from_average(fits, p)
    return _take_roots(form, level, "debiased fits", _warnings(fits))


def estimate_max_radius(summary: ClientSummary, p: Tensor | None = None, level: float = 0.95) -> Estimate:
    """R_max; the interval holds for the largest because it holds for all clients at once."""
    fits = local_fits(summary)
    p = resolve_client_weights(p, fits.n)
    if problem := _find_undetermined(fits):
        return problem
    deviation, form = _from_average(fits, p)
    distance = deviation.norm(dim=1).numpy()
    reach = np.sqrt(noise_quantile(form, level ** (1 / len(p))))
    value = np.sqrt(np.maximum(form.square - form.bias, 0).max())
    low, high = np.maximum(distance - reach, 0).max(), (distance + reach).max()
    return Estimate(
        float(value), float(low), float(high), "largest debiased distance", (*_warnings(fits), SELECTION_WARNING)
    )


def estimate_diameter(summary: ClientSummary, level: float = 0.95) -> Estimate:
    """Gamma; the interval comes from balls that hold all true models at once."""
    fits = local_fits(summary)
    if problem := _find_undetermined(fits):
        return problem
    v = trace(fit_covariance(fits))
    form = _each(fits.fit - fits.fit.mean(0), hessian_shaped_covariance(fits), v, 2 * v**2 / fits.freedom)
    reach = torch.from_numpy(np.sqrt(noise_quantile(form, level ** (1 / len(v)))))
    best = torch.zeros(3, dtype=torch.float64)
    for rows in torch.arange(len(v)).split(PAIR_BLOCK_CLIENTS):
        distance = torch.cdist(fits.fit[rows], fits.fit, compute_mode="donot_use_mm_for_euclid_dist")
        slack = reach[rows, None] + reach
        off = torch.arange(len(v)) != rows[:, None]
        debiased = distance**2 - v[rows, None] - v
        for k, candidate in enumerate((debiased, distance - slack, distance + slack)):
            best[k] = torch.maximum(best[k], torch.where(off, candidate, 0.0).max())
    value, low, high = best.tolist()
    return Estimate(value**0.5, low, high, "largest debiased distance", (*_warnings(fits), SELECTION_WARNING))


def resolve_client_weights(p: Tensor | None, n: Tensor) -> Tensor:
    """p as given, or n/N."""
    checked, _ = check_weights(n / n.sum() if p is None else p, n)
    if len(checked) < 2:
        raise RequestError(f"heterogeneity: at least 2 clients are needed, got {len(checked)}.")
    return torch.from_numpy(checked)


def _between(points: Tensor, cov: Tensor, v: Tensor, freedom: Tensor, p: Tensor) -> QuadraticForm:
    """Q = sum_i p_i |x_i - xbar|^2: A = diag(p) - pp' over clients, so AV is block diagonal less a matrix of rank d."""
    deviation = points - p @ points
    square = (p * deviation.square().sum(1)).sum()
    power1 = p[:, None, None] * cov
    two = power1 @ power1
    three = two @ power1
    u1, u2, u3 = ((p[:, None, None] * power).sum(0) for power in (power1, two, three))
    second = trace(two).sum() - 2 * trace(u2) + trace(u1 @ u1)
    third = trace(three).sum() - 3 * trace(u3) + 3 * trace(u2 @ u1) - trace(u1 @ u1 @ u1)
    weight = p * (1 - p)
    bias = (weight * v).sum()
    weighted_deviation = p[:, None] * deviation
    directed = torch.einsum("mi,mij,mj->", weighted_deviation, cov, weighted_deviation)
    even = (p**2 * (1 - 2 * p + p.square().sum()) * v).sum() / (points.shape[1] * weight.sum())
    parts = (weight**2 * 2 * v**2 / freedom).sum(), (weight**3 * 8 * v**3 / freedom**2).sum()
    return _form(square, bias, second, third, directed, even, *parts)


def _from_average(fits: LocalFits, p: Tensor) -> tuple[Tensor, QuadraticForm]:
    """w_i - wbar, and the squares |w_i - wbar|^2."""
    v, cov = trace(fit_covariance(fits)), hessian_shaped_covariance(fits)
    shrink = 1 - 2 * p
    contrast = shrink[:, None, None] * cov + (p**2 @ cov.flatten(1)).view(cov.shape[1:])
    bias = shrink * v + (p**2 * v).sum()
    bias2 = shrink**2 * 2 * v**2 / fits.freedom + (p**4 * 2 * v**2 / fits.freedom).sum()
    deviation = fits.fit - p @ fits.fit
    return deviation, _each(deviation, contrast, bias, bias2)


def _each(deviation: Tensor, cov: Tensor, bias: Tensor, bias2: Tensor) -> QuadraticForm:
    """One square |deviation_i|^2 per client, with noise of covariance cov_i and an estimated bias of variance bias2."""
    two = cov @ cov
    directed = torch.einsum("mi,mij,mj->m", deviation, cov, deviation)
    second, third = trace(two), (two * cov).sum((1, 2))
    bias3 = (2 * bias2**2 / bias).nan_to_num()  # as for a multiple of a chi-square variable
    return _form(deviation.square().sum(1), bias, second, third, directed, bias / deviation.shape[1], bias2, bias3)


def _form(
    square: Tensor,
    bias: Tensor,
    second: Tensor,
    third: Tensor,
    directed: Tensor,
    even: Tensor,
    bias2: Tensor,
    bias3: Tensor,
) -> QuadraticForm:
    """eta is the noise along the true differences. It is estimated along the observed ones (`directed`), less their own
    noise, and drawn towards the noise along a random direction (`even`) while the square is not far above its noise.
    That is also its least value: chance pulls square and eta down together, and an interval must not shrink then."""
    signal, signal_noise = (square - bias).clamp(min=0), (directed - second).clamp(min=0)
    eta = torch.maximum((signal_noise + bias * even) / (signal + bias), even).nan_to_num()
    eta2 = (eta * third / second).nan_to_num()
    return QuadraticForm(*(part.numpy() for part in (square, bias, second, third, eta, eta2, bias2, bias3)))


def _take_roots(form: QuadraticForm, level: float, method: str, warnings: tuple[str, ...]) -> Estimate:
    value = np.sqrt(np.maximum(form.square - form.bias, 0))
    low, high = (np.sqrt(end) for end in confidence_interval(form, level))
    if value.ndim == 0:
        return Estimate(float(value), float(low), float(high), method, warnings)
    return Estimate(torch.from_numpy(value), torch.from_numpy(low), torch.from_numpy(high), method, warnings)


def _find_undetermined(fits: LocalFits) -> Estimate | None:
    undetermined = int((fits.freedom <= 0).sum())
    if not undetermined:
        return None
    d = fits.fit.shape[1]
    return unidentified(
        f"{undetermined} of {len(fits.n)} clients have rows that do not determine their d = {d} coefficients; "
        "leave them out, or state a spread and use radius_likelihood."
    )


def _warnings(fits: LocalFits) -> tuple[str, ...]:
    thin = int((fits.n < 3 * fits.fit.shape[1]).sum())
    return (f"{thin} clients have fewer than 3 rows per coefficient.",) if thin else ()
