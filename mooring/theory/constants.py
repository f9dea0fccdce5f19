"""The constants that theorems ask for, estimated: curvature, noise, the loss's bound; each with an interval and doubts.

    smooth          largest curvature of any client's risk          mu       smallest
    noise           rho: root mean square of a record's gradient at its client's truth, the largest client's
    response_noise  sigma of a linear task                          ell_max  largest loss of any record
    batch_variance  mean squared error of a minibatch gradient

At a fit the gradients have been made small: rho^2 and sigma^2 carry the factor n/(n - d) (summaries.py). Intervals are
for sampling error with normal records: eigenvalues by Anderson (1963), variances by chi-square. All are first-order.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nan
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from scipy.stats import chi2, norm
from torch import Tensor

from mooring.core.errors import RequestError
from mooring.theory.estimate import Estimate, not_identified
from mooring.theory.reml import LARGEST
from mooring.theory.spread import spread_likelihood
from mooring.theory.summaries import LinearStats, LocalFits, fits_from_stats, trace
from mooring.theory.weights import check_weights

SAMPLE = "{} is a property of the rows at hand: the truth's may differ more than the interval says."


class ConstantEstimates(NamedTuple):
    smooth: Estimate
    mu: Estimate
    noise: Estimate
    response_noise: Estimate
    ell_max: Estimate
    batch_variance: Estimate


def estimate_constants(
    summary: LinearStats | LocalFits,
    *,
    losses: Tensor | None = None,
    bounded: bool = False,
    batch: int | None = None,
    level: float = 0.95,
) -> ConstantEstimates:
    """All constants that the summaries allow.

    `losses` holds every record's loss at its client's fit, `bounded` says whether the loss has a bound at all.
    """
    fits = fits_from_stats(summary) if isinstance(summary, LinearStats) else summary
    unknown = not_identified("Not asked for.")
    return ConstantEstimates(
        smoothness(fits.hessian, fits.n, level),
        strong_convexity(fits.hessian, fits.n, level),
        gradient_noise(fits, level),
        response_noise(summary, level) if isinstance(summary, LinearStats) else not_identified("Not a linear task."),
        unknown if losses is None else loss_bound(losses, bounded),
        unknown if batch is None else batch_variance(fits, batch, level),
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
    warnings = (SAMPLE.format("Strong convexity"),)
    if bool(open_.any()):
        warnings = (f"{int(open_.sum())} clients' losses are not strongly convex; give the task a ridge > 0.",)
    return _eigenvalue(
        smallest, int(smallest.argmin()), n, level, "smallest eigenvalue of the clients' Hessians", warnings
    )


def smoothness_by_products(
    product: Callable[[Tensor], Tensor], clients: int, dim: int, *, passes: int = 100, tol: float = 1e-6, seed: int = 0
) -> Estimate:
    """The largest eigenvalue over clients by power iteration on Hessian-vector products [m, d] -> [m, d].

    The value is a Rayleigh quotient, hence never too large; the upper end adds the norm of its residual.
    """
    v = torch.randn(clients, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    for _ in range(passes):
        v = v / v.norm(dim=1, keepdim=True).clamp(min=torch.finfo(v.dtype).tiny)
        hv = product(v).double()
        value = (v * hv).sum(1)
        residual = (hv - value[:, None] * v).norm(dim=1)
        if bool((residual <= tol * value.abs()).all()):
            break
        v = hv
    top = int(value.argmax())
    high = float((value + residual).max())
    warnings = () if float(residual[top]) <= tol * abs(float(value[top])) else (f"Not settled after {passes} passes.",)
    return Estimate(float(value[top]), float(value[top]), high, "power iteration on Hessian-vector products", warnings)


def gradient_noise(fits: LocalFits, level: float = 0.95) -> Estimate:
    """rho, the largest client's root mean square gradient of a record at its truth."""
    known = fits.freedom > 0
    if not bool(known.any()):
        return not_identified("No client has more rows than coefficients.")
    square = torch.where(known, trace(fits.gradient_cov), -inf)
    top = int(square.argmax())
    low, high = _variance_interval(float(square[top]), float(fits.freedom[top]), level)
    few = int((~known).sum())
    warnings = (f"{few} clients with n <= d were left out.",) if few else ()
    warnings += ("The largest of the clients' estimates tends to be too large.",)
    return Estimate(float(square[top]) ** 0.5, low**0.5, high**0.5, "records' gradients at the fits", warnings)


def response_noise(stats: LinearStats, level: float = 0.95) -> Estimate:
    """sigma of a linear task: residuals of the clients' own fits, or restricted likelihood where there are none."""
    fits = fits_from_stats(stats)
    freedom = float(fits.freedom.sum())
    if freedom <= 0:
        spread = spread_likelihood(stats)
        t = float(spread.variance[0] / spread.noise[0])
        if t * float(stats.n.max()) * float(trace(stats.gram).max()) > LARGEST / 10:
            return not_identified("No client has more rows than coefficients and the likelihood puts the noise at 0.")
        value = float(spread.noise[0]) ** 0.5
        return Estimate(value, nan, nan, "restricted likelihood under a common spread", spread.warnings)
    own = stats.n * (stats.yy - (fits.fit * stats.moment).sum(1)).clamp(min=0)
    square = float(own[fits.freedom > 0].sum()) / freedom
    low, high = _variance_interval(square, freedom, level)
    return Estimate(square**0.5, low**0.5, high**0.5, "residuals of the clients' own fits")


def loss_bound(losses: Tensor, bounded: bool) -> Estimate:
    """ell_max: the largest loss seen. A loss without a bound has none to estimate; the value then serves as a clip."""
    value = float(losses.max())
    if bounded:
        return Estimate(value, value, inf, "largest loss of a record", ("Unseen records may lose more.",))
    warning = "The loss has no bound; the theorem's ell_max is replaced by the largest loss seen."
    return Estimate(value, value, inf, "largest loss of a record", (warning,))


def batch_variance(fits: LocalFits, batch: int, level: float = 0.95) -> Estimate:
    """E|minibatch gradient - client's gradient|^2, averaged over clients; batches are drawn without replacement."""
    if batch < 1:
        raise RequestError(f"batch_variance: batch must be at least 1, got {batch}.")
    share = (1 - batch / fits.n).clamp(min=0) * fits.n / (fits.n - 1).clamp(min=1)
    each = share * trace(fits.gradient_cov) / batch
    known = fits.freedom > 0
    if not bool(known.any()):
        return not_identified("No client has more rows than coefficients.")
    value = float(each[known].mean())
    low, high = _variance_interval(value, float(fits.freedom[known].sum()), level)
    return Estimate(value, low, high, f"records' gradients at the fits, batches of {batch}")


def batch_variance_from(gradients: Tensor, level: float = 0.95) -> Estimate:
    """The same from minibatch gradients [batches, d] at one model."""
    batches, d = gradients.shape
    if batches < 2:
        raise RequestError(f"batch_variance_from: at least 2 batches are needed, got {batches}.")
    cov = torch.cov(gradients.double().T).reshape(d, d)
    value = float(trace(cov))
    effective = value**2 / float(cov.square().sum()) if value > 0 else 1.0  # at most d, and at most batches - 1 here
    low, high = _variance_interval(value, (batches - 1) * max(1.0, effective), level)
    return Estimate(value, low, high, "between-batch variance")


def assumption_warnings(
    mu: float, smooth: float, n: ArrayLike, p: ArrayLike, lam: float | None = None, bounded_domain: bool = True
) -> tuple[str, ...]:
    """Which assumptions of `alternative`'s and `effect`'s theorems fail at these constants."""
    p, n = check_weights(p, n)
    found = []
    if not mu > 0:
        found.append(f"The risk is not strongly convex (mu = {mu:g}): no theorem on lam applies.")
    elif (few := int(np.sum(n < 4 * smooth / mu))) > 0:
        least = f"4 smooth/mu = {4 * smooth / mu:.3g}"
        found.append(f"{few} clients have fewer than {least} rows (alternative, Theorem 4.4).")
    if lam is not None and mu > 0 and p.max() * lam > mu / 16 * (1 + 1e-9):
        found.append(f"p_max lam = {p.max() * lam:.3g} exceeds mu/16 = {mu / 16:.3g} (alternative, Eq. C.5).")
    if not bounded_domain:
        found.append("The domain is unbounded: D and ell_max (alternative, Assumption A) do not exist.")
    return tuple(found)


def _eigenvalue(values: Tensor, at: int, n: Tensor, level: float, method: str, warnings: tuple[str, ...]) -> Estimate:
    """sqrt(n) (log l^ - log l) tends to N(0, 2) for the eigenvalue of a normal sample's second moment."""
    value = float(values[at])
    width = float(norm.ppf((1 + level) / 2) * np.sqrt(2 / float(n[at])))
    return Estimate(value, value * np.exp(-width), value * np.exp(width), method, warnings)


def _variance_interval(square: float, freedom: float, level: float) -> tuple[float, float]:
    tail = (1 - level) / 2
    return square * freedom / chi2.ppf(1 - tail, freedom), square * freedom / chi2.ppf(tail, freedom)
