"""The likelihood of a linear mixed model with one grouping column, from sums that clients may send.

    y_i = X_i beta + Z_i b_i + e_i,    b_i ~ N(0, sigma^2 L L'),    e_i ~ N(0, sigma^2 I)

Bates, Maechler, Bolker, Walker. Fitting linear mixed-effects models using lme4. J. Stat. Softw. 67 (2015), Section 3.
With M_i = I + L' Z_i'Z_i L, each client enters by its cross-products of X, Z and y alone. The criterion is -2 log of
the likelihood (ML), or of the likelihood of the residuals (REML), with beta and sigma profiled out.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

STARTS = (1.0, 0.2, 0.03)  # standard deviations of the random effects, in residual ones, to start from
MIN_RELATIVE_RANK = 1e-10


class CrossProducts(NamedTuple):
    """Per client: all that the likelihood needs of its rows. Columns are divided by their scale."""

    zz: Tensor  # [m, q, q]
    zx: Tensor  # [m, q, p]
    zy: Tensor  # [m, q]
    xx: Tensor  # [p, p], summed over clients
    xy: Tensor  # [p]
    yy: Tensor  # []
    rows: int


class ProfiledFit(NamedTuple):
    """A fit at one L, in scaled columns."""

    factor: Tensor  # [q, q], L
    beta: Tensor  # [p]
    sigma2: Tensor  # []
    information: Tensor  # [p, p], X' V^-1 X with V in units of sigma^2
    criterion: Tensor  # [], -2 log-likelihood


def sum_products(x: np.ndarray, z: np.ndarray, y: np.ndarray, code: np.ndarray, clients: int) -> CrossProducts:
    """Each client's cross-products."""
    rows = [np.flatnonzero(code == i) for i in range(clients)]
    zz, zx, zy = (np.stack([z[mine].T @ other[mine] for mine in rows]) for other in (z, x, y))
    per_client = {name: torch.from_numpy(part) for name, part in (("zz", zz), ("zx", zx), ("zy", zy))}
    xx, xy, yy = torch.from_numpy(x.T @ x), torch.from_numpy(x.T @ y), torch.tensor(float(y @ y))
    return CrossProducts(**per_client, xx=xx, xy=xy, yy=yy, rows=len(y))


def profile(products: CrossProducts, factor: Tensor, reml: bool) -> ProfiledFit:
    """The best beta and sigma at a factor L, and the criterion there."""
    q, p, n = factor.shape[0], len(products.xy), products.rows
    m = torch.eye(q, dtype=factor.dtype) + factor.T @ products.zz @ factor
    root = torch.linalg.cholesky(m)
    a = torch.linalg.solve_triangular(root, factor.T @ products.zx, upper=False)  # [m, q, p]
    b = torch.linalg.solve_triangular(root, (factor.T @ products.zy[..., None]), upper=False)[..., 0]
    information = products.xx - torch.einsum("iqp,iqr->pr", a, a)
    right = products.xy - torch.einsum("iqp,iq->p", a, b)
    chol = torch.linalg.cholesky(information)
    beta = torch.cholesky_solve(right[:, None], chol)[:, 0]
    residual = products.yy - (b * b).sum() - beta @ right
    free = n - p if reml else n
    sigma2 = residual / free
    log_det = 2 * root.diagonal(dim1=1, dim2=2).log().sum()
    criterion = log_det + free * (1 + torch.log(2 * math.pi * sigma2))
    if reml:
        criterion = criterion + 2 * chol.diagonal().log().sum()
    return ProfiledFit(factor, beta, sigma2, information, criterion)


def to_factor(theta: Tensor, q: int, correlated: bool) -> Tensor:
    """The lower triangle L of parameters: column by column, or its diagonal."""
    if not correlated:
        return torch.diag(theta)
    place = torch.tril_indices(q, q)
    return torch.zeros(q, q, dtype=theta.dtype).index_put((place[0], place[1]), theta)


def maximize(products: CrossProducts, reml: bool, correlated: bool) -> ProfiledFit:
    """The fit at the best factor."""
    q = products.zz.shape[1]
    if q == 0:
        return profile(products, torch.zeros(0, 0, dtype=torch.float64), reml)
    place = torch.tril_indices(q, q)
    diagonal = (place[0] == place[1]).numpy() if correlated else np.ones(q, dtype=bool)

    def value(theta: np.ndarray) -> tuple[float, np.ndarray]:
        at = torch.tensor(theta, requires_grad=True)
        criterion = profile(products, to_factor(at, q, correlated), reml).criterion
        (slope,) = torch.autograd.grad(criterion, at)
        return float(criterion.detach()), slope.numpy()

    bounds = [(0.0, None) if on else (None, None) for on in diagonal]
    options = {"ftol": 1e-15, "gtol": 1e-9, "maxiter": 1000}
    fits = [minimize(value, start * diagonal, jac=True, bounds=bounds, options=options) for start in STARTS]
    best = min(fits, key=lambda fit: fit.fun)
    return profile(products, to_factor(torch.tensor(best.x), q, correlated), reml)


def full_criterion(products: CrossProducts, covariance: Tensor, sigma2: Tensor, reml: bool) -> Tensor:
    """-2 log-likelihood at a covariance of the random effects and a residual variance, beta profiled out."""
    q, p, n = covariance.shape[0], len(products.xy), products.rows
    m = torch.eye(q, dtype=covariance.dtype) + products.zz @ covariance / sigma2
    solved_x, solved_y = (torch.linalg.solve(m, part) for part in (products.zx, products.zy[..., None]))
    inner_x, inner_y = covariance @ products.zx / sigma2, covariance @ products.zy[..., None] / sigma2
    information = products.xx - torch.einsum("iqp,iqr->pr", solved_x, inner_x)
    right = products.xy - torch.einsum("iqp,iq->p", solved_x, inner_y[..., 0])
    squares = products.yy - (solved_y * inner_y).sum()
    beta = torch.linalg.solve(information, right)
    residual = (squares - beta @ right) / sigma2
    criterion = torch.linalg.slogdet(m)[1].sum() + n * torch.log(2 * math.pi * sigma2) + residual
    if reml:
        criterion = criterion + torch.linalg.slogdet(information / sigma2)[1] - p * math.log(2 * math.pi)
    return criterion


def variance_covariance(products: CrossProducts, fit: ProfiledFit, reml: bool, correlated: bool) -> np.ndarray:
    """The covariance matrix of the estimates (variances and covariances of random effects, residual variance): the
    inverse of the observed information; NaN where an estimate lies on the boundary."""
    q = fit.factor.shape[0]
    covariance = fit.sigma2 * fit.factor @ fit.factor.T
    place = torch.tril_indices(q, q) if correlated else torch.arange(q).repeat(2, 1)
    start = torch.cat([covariance[place[0], place[1]], fit.sigma2[None]])

    def criterion(values: Tensor) -> Tensor:
        lower = torch.zeros(q, q, dtype=values.dtype).index_put((place[0], place[1]), values[:-1])
        return full_criterion(products, lower + lower.T - torch.diag(lower.diagonal()), values[-1], reml)

    hessian = torch.autograd.functional.hessian(criterion, start).numpy() / 2
    scale = np.sqrt(np.abs(np.diag(hessian)))
    singular = bool((fit.factor.diagonal() < 1e-6).any())
    if (
        singular
        or not np.isfinite(hessian).all()
        or np.linalg.cond(hessian / np.outer(scale, scale)) > 1 / MIN_RELATIVE_RANK
    ):
        return np.full(hessian.shape, np.nan)
    return np.linalg.inv(hessian)


def random_effects(products: CrossProducts, fit: ProfiledFit) -> tuple[Tensor, Tensor]:
    """Each client's random effects [m, q] and their conditional covariances [m, q, q], given the estimates."""
    q = fit.factor.shape[0]
    m = torch.eye(q, dtype=torch.float64) + fit.factor.T @ products.zz @ fit.factor
    inner = fit.factor @ torch.linalg.solve(m, fit.factor.T.expand(len(m), q, q))
    left = products.zy - products.zx @ fit.beta
    return (inner @ left[..., None])[..., 0], fit.sigma2 * inner
