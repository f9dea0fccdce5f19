"""Restricted maximum likelihood for coefficients that vary over clients, from sums that clients may send.

    y_i = X_i w_i + noise,   w_i ~ N(w, sigma^2 T),   T = diag(t),   noise ~ N(0, sigma^2)

Client i enters through K_i = X_i'X_i = C_i'C_i, b_i = X_i'y_i = C_i'c_i, q_i = y_i'y_i and its number of rows. With

    G_i = 1 + C_i T C_i'
    P_i = C_i'G_i^-1 C_i = (K_i^-1 + T)^-1,   r_i = C_i'G_i^-1 c_i
    A = sum_i P_i,   w = A^-1 sum_i r_i,   u_i = r_i - P_i w
    rss = sum_i (q_i - |c_i|^2 + c_i'G_i^-1 c_i) - w'A w,   sigma^2 = rss / (N - d)

    deviance(t)      = (N - d) log sigma^2 + sum_i log|G_i| + log|A|       (-2 log-likelihood, sigma profiled)
    d deviance/d t_j = sum_i [ P_i - P_i A^-1 P_i ]_jj - sum_i u_ij^2 / sigma^2

and the posterior of w_i given w has mean w + T u_i and covariance sigma^2 (T - T P_i T). Nothing is divided by t and no
K_i is inverted, so t = 0, singular K_i and clients with fewer rows than coefficients need no special case.

A server needs only the sums over clients of P_i, r_i, log|G_i|, c_i'G_i^-1 c_i and, once it has sent w and A, of the
two terms of the derivative: a round trip per iteration, and secure aggregation suffices.

Where the noise is known (rows already divided by it, or a Gaussian approximation of a log-likelihood), sigma = 1, the
deviance is rss + sum_i log|G_i| + log|A|, and q_i does not matter.

Steps are Fisher scoring on t >= 0 with halving; where no scoring step helps, the multiplicative step
t_j sqrt(sum_i u_ij^2/sigma^2 / sum_i [P_i - P_i A^-1 P_i]_jj), which never raises the deviance (Zhou, Hu, Zhou, Lange,
MM algorithms for variance components models, 2019).
"""

from __future__ import annotations

from math import log
from typing import NamedTuple

import torch
from torch import Tensor

MAX_ITERATIONS = 200
MAX_HALVINGS = 6
DEVIANCE_TOLERANCE = 1e-11  # on the deviance's last decrease, relative to the number of clients and rows
NULL_EIGENVALUE_SHARE = 1e-12  # share of the largest eigenvalue below which a direction counts as unobserved
MAX_LOW_RANK_SHARE = 0.25  # of the coefficients vary: up to here their eigenvectors are quicker than Cholesky's factor
MAX_VARIANCE_RATIO = 1e8  # largest spread over noise, relative to 1/K: beyond it the noise is 0 for all purposes


class GaussianLikelihoods(NamedTuple):
    """Every client's log-likelihood, a quadratic in its coefficients."""

    c: Tensor  # [m, r, d], C: as many rows as the client with the most observed directions needs
    z: Tensor  # [m, r], c
    rss: float  # sum_i q_i - |c_i|^2: the squares that remain after each client's own fit
    rows: float | None  # N; None where the noise is known to be 1
    tilt: Tensor | None = None  # [d], adds 2 sum_j tilt_j log(1 + t_j/near_j) to the deviance, whose slope in log t_j
    near: Tensor | None = None  # [d]  at t = near is tilt_j: bounded at 0, so that a spread may become 0
    is_orthogonal: bool = False  # whether the rows of each C_i are orthogonal


class RemlState(NamedTuple):
    t: Tensor  # [d], spread over noise
    deviance: float
    noise: float  # sigma^2
    w: Tensor  # [d]
    w_cov: Tensor  # [d, d], A^-1 (times sigma^2: the covariance of w)
    p: Tensor  # [m, d, d]
    u: Tensor  # [m, d]

    @property
    def models(self) -> Tensor:
        """[m, d]: posterior means of the clients' coefficients."""
        return self.w + self.t * self.u

    @property
    def covs(self) -> Tensor:
        """[m, d, d]: their posterior covariances given w."""
        return self.noise * (torch.diag(self.t) - self.t[:, None] * self.p * self.t)


def factor_likelihoods(
    k: Tensor, b: Tensor, q: Tensor, rows: float | None, is_orthogonal: bool = True
) -> GaussianLikelihoods:
    """The factors of K_i [m, d, d], b_i [m, d], q_i [m]: roots by eigenvalues, or by Cholesky where these suffice.

    Roots with orthogonal rows take ten times as long, and make states where all t are the same four times as quick.
    """
    if not is_orthogonal:
        factor, failed = torch.linalg.cholesky_ex(k)
        pivot = factor.diagonal(dim1=1, dim2=2).square()
        if not bool(failed.any()) and bool((pivot.amin(1) > NULL_EIGENVALUE_SHARE * pivot.amax(1)).all()):
            z = torch.linalg.solve_triangular(factor, b[..., None], upper=False)[..., 0]
            return GaussianLikelihoods(factor.mT, z, float((q - z.square().sum(1)).clamp(min=0).sum()), rows)
    values, vectors = torch.linalg.eigh(k)
    is_observed = values > NULL_EIGENVALUE_SHARE * values[:, -1:].clamp(min=torch.finfo(k.dtype).tiny)
    root = torch.where(is_observed, values, 0.0).sqrt()
    z = torch.where(is_observed, (vectors.mT @ b[..., None])[..., 0] / torch.where(is_observed, root, 1.0), 0.0)
    residual_squares = float((q - z.square().sum(1)).clamp(min=0).sum())
    rank = max(int(is_observed.sum(1).max()), 1)  # eigenvalues ascend: unobserved directions come first
    c = (root[..., None] * vectors.mT)[:, -rank:]
    return GaussianLikelihoods(c, z[:, -rank:], residual_squares, rows, is_orthogonal=True)


def typical_variance_ratio(data: GaussianLikelihoods) -> float:
    """The t at which a client's own rows and the others weigh the same, on average over clients and coefficients."""
    return 1 / max(float(data.c.square().sum(1).mean()), torch.finfo(torch.float64).tiny)


def evaluate_deviance(data: GaussianLikelihoods, t: Tensor) -> RemlState:
    """Return the state at t."""
    half, hz, logs = _whiten(data, t)
    p = half.mT @ half
    r = (half.mT @ hz[..., None])[..., 0]
    values, vectors = torch.linalg.eigh(p.sum(0))
    is_observed = values > NULL_EIGENVALUE_SHARE * values[-1].clamp(min=torch.finfo(values.dtype).tiny)
    w_cov = vectors[:, is_observed] / values[is_observed] @ vectors[:, is_observed].T
    w = w_cov @ r.sum(0)
    rss = data.rss + float((hz - (half @ w)).square().sum())
    logs += float(values[is_observed].log().sum())
    if data.rows is None:
        noise, deviance = 1.0, rss + logs
    else:
        freedom = data.rows - int(is_observed.sum())
        noise = max(rss / freedom, torch.finfo(t.dtype).tiny)
        deviance = freedom * log(noise) + logs
    return RemlState(t, deviance + tilt_deviance(data, t), noise, w, w_cov, p, r - p @ w)


def tilt_deviance(data: GaussianLikelihoods, t: Tensor) -> float:
    """Return what the tilt adds to the deviance at t."""
    if data.tilt is None or data.near is None:
        return 0.0
    return 2 * float((data.tilt * (t / data.near).log1p()).sum())


def _whiten(data: GaussianLikelihoods, t: Tensor) -> tuple[Tensor, Tensor, float]:
    """G_i^-1/2 C_i [m, r, d], G_i^-1/2 c_i [m, r] and sum_i log|G_i|, by what is quickest at t."""
    varies = t > 0
    if data.is_orthogonal and bool((t == t[0]).all()):  # G_i is diagonal
        growth = 1 + t[0] * data.c.square().sum(2)
        root = growth.sqrt()
        return data.c / root[..., None], data.z / root, float(growth.log().sum())
    both = torch.cat([data.c, data.z[..., None]], -1)
    if int(varies.sum()) <= len(t) * MAX_LOW_RANK_SHARE:  # G_i = 1 + F F' = 1 + U diag(values) U' of orthogonal U
        few = data.c[..., varies] * t[varies].sqrt()
        values, vectors = torch.linalg.eigh(few.mT @ few)
        few, root = few @ vectors, (1 + values.clamp(min=0)).sqrt()
        both = both - (few / (root * (1 + root))[:, None]) @ (few.mT @ both)
        return both[..., :-1], both[..., -1], 2 * float(root.log().sum())
    matrix = torch.eye(data.c.shape[1], dtype=t.dtype) + (data.c * t) @ data.c.mT
    factor, failed = torch.linalg.cholesky_ex(matrix)
    if bool(failed.any()):  # rounding errors of entries of very different sizes
        rounding = torch.finfo(t.dtype).eps * matrix.diagonal(dim1=1, dim2=2).sum(1)
        factor = torch.linalg.cholesky(matrix + rounding[:, None, None] * torch.eye(len(matrix[0]), dtype=t.dtype))
    both = torch.linalg.solve_triangular(factor, both, upper=False)
    return both[..., :-1], both[..., -1], 2 * float(factor.diagonal(dim1=1, dim2=2).log().sum())


def score_terms(data: GaussianLikelihoods, at: RemlState) -> tuple[Tensor, Tensor, Tensor]:
    """Per coefficient: sum_i [P - P A^-1 P]_jj, sum_i u^2/sigma^2, and the deviance's expected Hessian [d, d]."""
    diagonal = at.p.diagonal(dim1=1, dim2=2).sum(0)
    expected = diagonal - ((at.p @ at.w_cov) * at.p).sum((0, 2))
    observed = at.u.square().sum(0) / at.noise
    hessian = at.p.square().sum(0)
    if data.rows is not None:
        hessian = hessian - torch.outer(diagonal, diagonal) / data.rows
    if data.tilt is not None and data.near is not None:
        slant = 2 * data.tilt / (data.near + at.t)
        expected, hessian = expected + slant, hessian + torch.diag(slant.abs() / (data.near + at.t))
    return expected, observed, hessian


def maximize_likelihood(
    data: GaussianLikelihoods,
    pattern: Tensor | None,
    start: Tensor | RemlState | None = None,
    iterations: int = MAX_ITERATIONS,
    least_gain: float = 0.0,
) -> tuple[RemlState, bool]:
    """The restricted maximum likelihood estimate of t, and whether it converged.

    With `pattern` [d] t is a multiple of it, such as the same for all coefficients; without, each has its own. It ends
    when a step lowers the deviance by less than `least_gain`, or by less than rounding errors, or would do so if the
    deviance were quadratic. `start` is a t, or the state there.
    """
    unit = typical_variance_ratio(data)
    if isinstance(start, RemlState):
        at = start
    else:
        first = torch.full_like(data.c[0, 0], unit) if start is None else start
        at = evaluate_deviance(data, project_on_pattern(first, pattern))
    least_gain = max(least_gain, DEVIANCE_TOLERANCE * (len(data.z) + (data.rows or 0)))
    for _ in range(iterations):
        expected, observed, hessian = score_terms(data, at)
        step, predicted = _scoring_step(at.t, expected - observed, hessian, pattern)
        if 0 <= predicted < least_gain:
            return at, True
        new = _first_improvement(data, at, step, MAX_VARIANCE_RATIO * unit)
        if new is None:
            if pattern is not None:
                expected, observed = pattern @ expected, pattern @ observed
            ratio = observed / expected.clamp(min=torch.finfo(at.t.dtype).tiny)
            t = torch.where(at.t > 0, at.t * ratio.sqrt(), 0.0)  # the ratio may be infinite
            new = evaluate_deviance(data, t.clamp(max=MAX_VARIANCE_RATIO * unit))
            if not new.deviance < at.deviance:
                return at, True
        gain, at = at.deviance - new.deviance, new
        if gain < least_gain:
            return at, True
    return at, False


def project_on_pattern(t: Tensor, pattern: Tensor | None) -> Tensor:
    """[d]: the multiple of the pattern with the mean of t on it."""
    return t if pattern is None else float((t * pattern).sum() / pattern.sum()) * pattern


def _scoring_step(t: Tensor, slope: Tensor, hessian: Tensor, pattern: Tensor | None) -> tuple[Tensor, float]:
    """[d]: Fisher's scoring step s, for which slope's + s'hessian s / 2 is least, and how far that is below 0.

    Coefficients that the step would make negative are put to 0, and the steps of the others are solved for again.
    """
    basis = torch.eye(len(t), dtype=t.dtype) if pattern is None else pattern[None]
    if pattern is not None:
        t, slope, hessian = (t.max() / pattern.max())[None], basis @ slope, basis @ hessian @ basis.T
    free, step = (t > 0) | (slope < 0), -t
    while bool(free.any()):
        rest = slope + hessian[:, ~free] @ step[~free]
        step[free] = -(torch.linalg.pinv(hessian[free][:, free], hermitian=True) @ rest[free])
        negative = free & (t + step < 0)
        if not bool(negative.any()):
            break
        free, step = free & ~negative, torch.where(negative, -t, step)
    return step @ basis, -float(slope @ step + step @ hessian @ step / 2)


def _first_improvement(data: GaussianLikelihoods, at: RemlState, step: Tensor, largest: float) -> RemlState | None:
    """The state after the first halved step that lowers the deviance."""
    for halving in range(MAX_HALVINGS):
        new = evaluate_deviance(data, (at.t + step * 0.5**halving).clamp(0, largest))
        if new.deviance < at.deviance:
            return new
    return None
