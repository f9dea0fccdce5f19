"""The constants of the theorems, estimated: curvature, noise, the loss's bound; each with an interval and warnings.

    smooth          largest curvature of any client's risk          mu       smallest
    noise           rho: root mean square of a record's gradient at its client's truth, the largest client's
    response_noise  sigma of a linear task                          ell_max  largest loss of any record

At a fit the gradients are small: rho^2 and sigma^2 carry the factor n/(n - d) (summaries.py). Intervals are
for sampling error with normal records: eigenvalues by Anderson (1963), variances by chi-square. All are first-order.
"""

from __future__ import annotations

from math import inf, nan
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from scipy.special import chdtri, ndtri
from torch import Tensor

from mooring.estimates.client_summaries import (
    ClientSummary,
    Estimate,
    LinearStats,
    LocalFits,
    fit_from_stats,
    local_fits,
    trace,
    unidentified,
)
from mooring.estimates.random_effects import fit_reml
from mooring.estimates.reml import MAX_VARIANCE_RATIO
from mooring.theory.weights import check_weights

FLAT_EIGENVALUE_SHARE = 1e-8  # a curvature below this share of the largest is a direction without variation
SAMPLE_WARNING = "{} is a property of the rows at hand: that of the true risk may be outside of the interval."


class ConstantEstimates(NamedTuple):
    smooth: Estimate
    mu: Estimate
    noise: Estimate
    response_noise: Estimate
    ell_max: Estimate


def estimate_constants(
    summary: ClientSummary,
    *,
    losses: Tensor | None = None,
    bounded: bool = False,
    level: float = 0.95,
) -> ConstantEstimates:
    """All constants that the summaries allow.

    `losses` contains every record's loss at its client's fit; `bounded` states whether the loss has a bound.
    """
    fits = local_fits(summary)
    unknown = unidentified("Not asked for.")
    return ConstantEstimates(
        smoothness(fits.hessian, fits.n, level),
        strong_convexity(fits.hessian, fits.n, level),
        gradient_noise(fits, level),
        response_noise(summary, level) if isinstance(summary, LinearStats) else unidentified("Not a linear task."),
        unknown if losses is None else loss_bound(losses, bounded),
    )


def smoothness(hessian: Tensor, n: Tensor, level: float = 0.95) -> Estimate:
    """The largest eigenvalue of the clients' Hessians [m, d, d]."""
    values = torch.linalg.eigvalsh(hessian)[:, -1]
    return _eigenvalue(values, int(values.argmax()), n, level, "largest eigenvalue of the clients' Hessians", ())


def strong_convexity(hessian: Tensor, n: Tensor, level: float = 0.95) -> Estimate:
    """The smallest eigenvalue; 0 where some client's rows leave a direction open."""
    values = torch.linalg.eigvalsh(hessian)
    open_ = values[:, 0] <= torch.finfo(values.dtype).eps * values.shape[1] * values[:, -1]
    smallest = torch.where(open_, 0.0, values[:, 0])
    warnings = (SAMPLE_WARNING.format("Strong convexity"),)
    if bool(open_.any()):
        warnings = (f"{int(open_.sum())} clients' losses are not strongly convex; give the task a ridge > 0.",)
    return _eigenvalue(
        smallest, int(smallest.argmin()), n, level, "smallest eigenvalue of the clients' Hessians", warnings
    )


def theorem_convexity(hessian: Tensor, n: Tensor, p: Tensor, level: float = 0.95) -> Estimate:
    """mu for the theorems: the smallest client's, or that of the averaged risk where rows leave directions open."""
    smallest = strong_convexity(hessian, n, level)
    if smallest.value > FLAT_EIGENVALUE_SHARE * float(torch.linalg.eigvalsh(hessian).max()):
        return smallest
    values = torch.linalg.eigvalsh((p[:, None, None] * hessian).sum(0))
    positive = values[values > FLAT_EIGENVALUE_SHARE * values[-1]]
    warning = "Some clients' rows leave directions open (mu_i = 0); mu of the averaged risk stands in for theirs."
    if len(positive) < len(values):
        warning += f" {len(values) - len(positive)} direction(s) that no row looks along are left out."
    return Estimate(float(positive[0]) if len(positive) else 0.0, nan, nan, "averaged Hessian", (warning,))


def gradient_noise(fits: LocalFits, level: float = 0.95) -> Estimate:
    """rho, the largest client's root mean square gradient of a record at its truth."""
    has_fit = fits.freedom > 0
    if not bool(has_fit.any()):
        return unidentified(
            "No client's rows determine all of its coefficients, so that the gradient noise is unknown."
        )
    square = torch.where(has_fit, trace(fits.gradient_cov), -inf)
    top = int(square.argmax())
    low, high = _variance_interval(float(square[top]), float(fits.freedom[top]), level)
    dropped = int((~has_fit).sum())
    warnings: tuple[str, ...] = (f"{dropped} clients with n <= d were left out.",) if dropped else ()
    warnings += ("The largest of the clients' estimates tends to be too large.",)
    return Estimate(float(square[top]) ** 0.5, low**0.5, high**0.5, "gradients of single rows at the fits", warnings)


def response_noise(stats: LinearStats, level: float = 0.95) -> Estimate:
    """sigma of a linear task: residuals of the clients' own fits, or restricted likelihood if there are none."""
    fits = fit_from_stats(stats)
    freedom = float(fits.freedom.sum())
    if freedom <= 0:
        spread = fit_reml(stats)
        t = float(spread.variance[0] / spread.noise[0])
        if t * float(stats.n.max()) * float(trace(stats.gram).max()) > MAX_VARIANCE_RATIO / 10:
            return unidentified(
                "No client's rows determine all of its coefficients, and the likelihood puts the noise at 0."
            )
        value = float(spread.noise[0]) ** 0.5
        return Estimate(value, nan, nan, "restricted likelihood under a common spread", spread.warnings)
    squares = stats.n * (stats.yy - (fits.fit * stats.moment).sum(1)).clamp(min=0)
    square = float(squares[fits.freedom > 0].sum()) / freedom
    low, high = _variance_interval(square, freedom, level)
    return Estimate(square**0.5, low**0.5, high**0.5, "residuals of the clients' own fits")


def loss_bound(losses: Tensor, bounded: bool) -> Estimate:
    """ell_max: the largest loss seen. A loss without a bound has none to estimate; the value then serves as a clip."""
    value = float(losses.max())
    if bounded:
        return Estimate(value, value, inf, "largest loss of a row", ("Unseen rows may have a larger loss.",))
    warning = "The loss has no bound; the theorem's ell_max is replaced by the largest loss seen."
    return Estimate(value, value, inf, "largest loss of a row", (warning,))


def assumption_warnings(
    mu: float, smooth: float, n: ArrayLike, p: ArrayLike, lam: float | None = None, bounded_domain: bool = True
) -> tuple[str, ...]:
    """Return warnings on assumptions of `alternative`'s and `effect`'s theorems that fail at these constants."""
    p, n = check_weights(p, n)
    failed = []
    if not mu > 0:
        failed.append(f"The risk is not strongly convex (mu = {mu:g}): no theorem on lam applies.")
    elif (small_clients := int(np.sum(n < 4 * smooth / mu))) > 0:
        required_rows = f"4 smooth/mu = {4 * smooth / mu:.3g}"
        failed.append(f"{small_clients} clients have fewer than {required_rows} rows (alternative, Theorem 4.4).")
    if lam is not None and mu > 0 and p.max() * lam > mu / 16 * (1 + 1e-9):
        failed.append(f"p_max lam = {p.max() * lam:.3g} exceeds mu/16 = {mu / 16:.3g} (alternative, Eq. C.5).")
    if not bounded_domain:
        failed.append("The domain is unbounded: D and ell_max (alternative, Assumption A) do not exist.")
    return tuple(failed)


def _eigenvalue(values: Tensor, at: int, n: Tensor, level: float, method: str, warnings: tuple[str, ...]) -> Estimate:
    """sqrt(n) (log l^ - log l) tends to N(0, 2) for the eigenvalue of a normal sample's second moment."""
    value = float(values[at])
    width = float(ndtri((1 + level) / 2) * np.sqrt(2 / float(n[at])))
    return Estimate(value, value * np.exp(-width), value * np.exp(width), method, warnings)


def _variance_interval(square: float, freedom: float, level: float) -> tuple[float, float]:
    tail = (1 - level) / 2
    return square * freedom / chdtri(freedom, tail), square * freedom / chdtri(freedom, 1 - tail)
