"""Client summaries for estimates of heterogeneity and lam: a client's size and a few sums, never a row.

    LinearStats   n, X'X/n, X'y/n, y'y/n: all that half the squared loss L_i depends on
    LocalFits     n, the local fit w_i, and the parts of its sampling covariance:
                  Cov(w_i) = H_i^-1 G_i H_i^-1 / n_i,   H_i Hessian of L_i,  G_i covariance of a record's gradient

`summarize_clients` builds the kind that a task needs. Laplace's approximation (`task_random_effects.py`) also requests,
a few dozen times at most, the fit under a given pull and its Hessian.

What this reveals. LinearStats: every moment up to the second of the client's columns and target, hence any linear model
of them; a client with one row reveals that row, one with fewer rows than columns the space that its rows span.
LocalFits and penalised fits: a model of the client's own, the weighted second moments of its columns.
The estimates of spread need only sums over clients (`reml.py`), so secure aggregation could hide each one's; the
constants and the radii per client do not.

Everything is stacked over the m clients and float64. Plain plug-in values of G_i and, for logistic tasks, of w_i itself
are off by a factor 1 + O(d/n). With a few rows per coefficient that is as large as the heterogeneity to be
estimated, hence the corrections in each builder below, which hold down to n = 3d (linear) and n = 10d (logistic).
"""

from __future__ import annotations

from collections.abc import Callable
from math import nan
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mooring.core.cohort import CACHED_BLOCK_SHARE, Batch, Condensed, Rows, StateTree, map_blocks
from mooring.core.errors import RequestError
from mooring.core.task import HasHessian, HasSolve, Task, require
from mooring.estimates.firth import fit_firth
from mooring.tasks.kernel_regression import KernelRegression
from mooring.tasks.linear import Linear
from mooring.tasks.logistic import Logistic

SINGULAR_EIGENVALUE_SHARE = (
    1e-10  # a Hessian is singular when its smallest eigenvalue is below this share of its largest
)
MAX_PAIR_NUMBERS = 4_000_000  # numbers that one block's pairs of rows may take


class LinearStats(NamedTuple):
    n: Tensor  # [m] rows
    gram: Tensor  # [m, d, d], X'X/n
    moment: Tensor  # [m, d], X'y/n
    yy: Tensor  # [m], y'y/n


class LocalFits(NamedTuple):
    n: Tensor  # [m] rows
    fit: Tensor  # [m, d]
    hessian: Tensor  # [m, d, d], of the averaged loss at the fit
    gradient_cov: Tensor  # [m, d, d], of one record's gradient at the fit
    freedom: Tensor  # [m], degrees of freedom behind the covariance; 0 where the rows do not determine the fit


ClientSummary = LinearStats | LocalFits


def summarize_clients(task: Task, rows: Rows) -> ClientSummary:
    """Return the summaries of a convex task: sums for a linear one, fits with their covariances for others."""
    if isinstance(task, Linear):
        return compute_linear_stats(rows, task.intercept, task.lift if isinstance(task, KernelRegression) else None)
    if isinstance(task, Logistic) and task.classes == 2:
        return fit_logistic(rows, task.intercept)
    return fit_convex(task, rows)


def omitted_ridge(task: Task) -> float:
    """Return the task's ridge if `summarize_clients` leaves it out of the Hessians, else 0 (`fit_convex` includes
    it)."""
    without = isinstance(task, Linear) or (isinstance(task, Logistic) and task.classes == 2)
    return float(task.ridge) if without else 0.0


def compute_linear_stats(
    rows: Rows, intercept: bool = False, lift: Callable[[Tensor], Tensor] | None = None
) -> LinearStats:
    """The sufficient statistics of every client's linear regression on x, or on lift(x).

    An intercept becomes the last coefficient. The sums of a client without rows are 0.
    """

    def block(batch: Batch) -> LinearStats:
        lifted = batch if lift is None else batch._replace(x=lift(batch.x))
        return _stats(_design(lifted, intercept), batch)

    return map_blocks(rows.blocks(times=CACHED_BLOCK_SHARE), lambda some: block(rows.select(some).padded()))


def fit_from_stats(stats: LinearStats) -> LocalFits:
    """Least squares per client, G_i = sigma_i^2 X'X/n, sigma_i^2 = RSS/(n - d): exact for equal noise on all rows."""
    solvable = is_determined(stats.n, stats.gram)
    fit = (inverse(stats.gram, solvable) @ stats.moment[..., None])[..., 0]
    residual = (stats.yy - (fit * stats.moment).sum(1)).clamp(min=0)
    freedom = torch.where(solvable, stats.n - stats.moment.shape[1], 0.0)
    noise = residual * stats.n / freedom.clamp(min=1)
    return LocalFits(stats.n, fit, stats.gram, noise[:, None, None] * stats.gram, freedom)


def local_fits(summary: ClientSummary) -> LocalFits:
    """The local fits behind a summary of either kind."""
    return fit_from_stats(summary) if isinstance(summary, LinearStats) else summary


def fit_logistic(rows: Rows, intercept: bool = False) -> LocalFits:
    """Firth's logistic regression per client (y > 0 is a success), with H_i = J/n and G_i = phi J/n of `firth.py`.

    The fits' tails are heavier than normal ones; half of n - d degrees of freedom makes up for that in intervals.
    """

    def block(batch: Batch) -> LocalFits:
        firth = fit_firth(_design(batch, intercept), batch.y > 0, batch.weight > 0)
        n = _count(batch)
        hessian = firth.curvature / n[:, None, None]
        freedom = torch.where(is_determined(n, firth.fisher), (n - hessian.shape[1]) / 2, 0.0)
        return LocalFits(n, firth.fit, hessian, firth.phi[:, None, None] * hessian, freedom)

    return _by_blocks(rows, block, pairs=True)


def fit_convex(task: Task, rows: Rows) -> LocalFits:
    """Local fits of any task with `solve`; G_i from records one by one, with the factor n/(n - d).

    First-order asymptotics: good for n much larger than d, biased where the fit itself is (n around 10d and below).
    """
    if not isinstance(task, HasSolve):
        raise RequestError(f"fit_convex: task '{task.name}' has no exact minimizer (solve); use a convex task.")

    def block(batch: Batch) -> LocalFits:
        n, fit = _count(batch), require(task, HasSolve).solve(batch)
        clients, longest = batch.y.shape[:2]
        unit_weight = torch.ones(clients * longest, 1, dtype=batch.weight.dtype)
        records = Batch(batch.x.flatten(0, 1)[:, None], batch.y.flatten(0, 1)[:, None], unit_weight)
        score = task.grad(fit.repeat_interleave(longest, 0), records).view(clients, longest, -1).double()
        valid = (batch.weight > 0)[..., None]
        score = valid * (score - (batch.weight[..., None] * score).sum(1, keepdim=True))
        hessian = compute_hessian(task, fit, batch)
        freedom = torch.where(is_determined(n, hessian), n - task.dim, 0.0)
        return LocalFits(n, fit.double(), hessian, score.mT @ score / freedom.clamp(min=1)[:, None, None], freedom)

    return _by_blocks(rows, block)


def compute_hessian(task: Task, w: Tensor, batch: Condensed) -> Tensor:
    """[m, d, d]: the task's own Hessian, or central differences of its gradient."""
    if isinstance(task, HasHessian):
        return task.hessian(w, batch).double()
    step = torch.finfo(w.dtype).eps ** (1 / 3) * (1 + w.abs().amax(1))
    columns = []
    for j in range(w.shape[1]):
        shift = torch.zeros_like(w)
        shift[:, j] = step
        columns.append((task.grad(w + shift, batch) - task.grad(w - shift, batch)) / (2 * step[:, None]))
    hessian = torch.stack(columns, -1).double()
    return (hessian + hessian.mT) / 2


def is_determined(n: Tensor, hessian: Tensor) -> Tensor:
    """[m]: whether a client's rows determine all d coefficients and leave something for their variance."""
    values = torch.linalg.eigvalsh(hessian)
    return (n > hessian.shape[1]) & (
        values[:, 0] > SINGULAR_EIGENVALUE_SHARE * values[:, -1].clamp(min=torch.finfo(values.dtype).tiny)
    )


def fit_covariance(fits: LocalFits) -> Tensor:
    """[m, d, d]: H^-1 G H^-1 / n; nan for clients whose rows do not determine their fit."""
    has_fit = fits.freedom > 0
    bread = inverse(fits.hessian, has_fit)
    cov = bread @ fits.gradient_cov @ bread / fits.n[:, None, None]
    return torch.where(has_fit[:, None, None], (cov + cov.mT) / 2, torch.nan)


def hessian_shaped_covariance(fits: LocalFits) -> Tensor:
    """[m, d, d]: H^-1 scaled to the trace of `fit_covariance`.

    The trace is what debiasing needs. For the spread of an estimate the products of covariances matter, and there the
    noise of an empirical G_i would add up to a bias of relative size d/n, which the shape of H^-1 does not have.
    """
    bread = inverse(fits.hessian, fits.freedom > 0)
    return (trace(fit_covariance(fits)) / trace(bread))[:, None, None] * bread


def trace(matrices: Tensor) -> Tensor:
    """[m] traces of [m, d, d]."""
    return matrices.diagonal(dim1=-2, dim2=-1).sum(-1)


def inverse(matrices: Tensor, regular: Tensor) -> Tensor:
    """[m, d, d] inverses; the identity stands in for matrices that are not regular."""
    eye = torch.eye(matrices.shape[-1], dtype=matrices.dtype)
    return torch.linalg.inv(torch.where(regular[:, None, None], matrices, eye))


def _stats(x: Tensor, batch: Batch) -> LinearStats:
    y, weight = batch.y.double(), batch.weight.double()
    weighted = weight[..., None] * x
    return LinearStats(_count(batch), weighted.mT @ x, (weighted.mT @ y[..., None])[..., 0], (weight * y**2).sum(1))


def _design(batch: Batch, intercept: bool) -> Tensor:
    """x with a column of ones, if there is an intercept, and zero rows for padding."""
    x = batch.x.double()
    x = torch.cat([x, torch.ones_like(x[..., :1])], -1) if intercept else x
    return x * (batch.weight > 0)[..., None]


def _count(batch: Batch) -> Tensor:
    return (batch.weight > 0).sum(1).double()


def _by_blocks(rows: Rows, build: Callable[[Batch], StateTree], pairs: bool = False) -> StateTree:
    """`build` on padded blocks of clients of similar size, put together in the order of the clients."""
    if int(rows.size.min()) == 0:
        raise RequestError(f"summaries: client {int(rows.size.argmin())} has no rows; leave it out.")
    blocks = rows.blocks(times=CACHED_BLOCK_SHARE)
    if pairs:
        blocks = [p for b in blocks for p in b.split(max(1, MAX_PAIR_NUMBERS // int(rows.size[b].max()) ** 2))]
    return map_blocks(blocks, lambda block: build(rows.select(block).padded()))


class Estimate(NamedTuple):
    value: Any  # a number, or a tensor with one entry per client
    low: Any
    high: Any
    method: str  # how it was estimated
    warnings: tuple[str, ...] = ()


def unidentified(reason: str) -> Estimate:
    """Return an estimate without value and interval, with the reason."""
    return Estimate(nan, nan, nan, "not identified", (reason,))
