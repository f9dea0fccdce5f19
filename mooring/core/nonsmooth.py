"""Minimise sums of kinked losses plus a quadratic, exactly: C problems at once, by a primal-dual interior point.

    min_v  sum_j max_{low <= a_j <= high} a_j u_j(v)  +  linear'v + 1/2 v' diag(quad) v

u_j is a row's weighted residual: y - x'v gives quantile losses (low = tau - 1, high = tau), 1 - s x'v the hinge (0, 1),
(x'v)^2 - y robust phase retrieval (-1, 1), the last one as long as the whole stays convex. The conditions

    quad v + linear + J'a = 0      u + z - y = 0      z (a - low) = y (high - a) = mu      J = du/dv

with the box's multipliers z, y >= 0 are followed to mu = 0 by Mehrotra's predictor and corrector; each iteration
factorises one d x d matrix per problem.

That path leaves an error: a gap of rounding size, eps f, allows |v - v*| up to sqrt(2 eps f / quad), half the digits,
and which of them are right depends on rounding. So the end is polished: rows are divided into those at their kink,
u_j = 0 with a_j inside the box, and those beside it, whose a_j is a bound, and the equations that are left,

    quad v + linear + J'a = 0      u_j = 0 at the kinks

are solved by proximal multiplier steps; a solution that every row agrees with is the minimiser. It is off by rounding
alone, at most about eps (forces / quad + (size of u) / |J|), however it was found.

With a `Coupling` the C problems share a center, which is minimized over as well (`find_shared_center`): every step then
solves one more d x d system, the Schur complement of the center.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

Residuals = Callable[[Tensor], tuple[Tensor, Tensor]]  # v [C, d] -> u [C, B], J [C, B, d]
Curvature = Callable[[Tensor], Tensor]  # a [C, B] -> sum_j a_j grad^2 u_j, [C, d, d]

MAX_BOUNDARY_STEP_SHARE = 0.995  # share of the way to the nearest bound that a step may go
MAX_STALLED_ITERATIONS = 3  # iterations near the end that do not halve the error: rounding has been reached
POLISHING_STEPS = 3  # steps on one partition: each reduces the error to about SLACK of it
ACTIVE_SET_RATIOS = (
    1.0,
    1e-3,
    1e3,
    1e-5,
    1e5,
    1e-7,
    1e7,
)  # how small a slack, beside its multiplier, puts a row at a bound
POLISHING_RIDGE_SHARE = (
    1e-8  # how far a polishing step gives at a kink, as a share of how far the kink's row can move the model
)
ROUNDING_UNITS = 64  # units of rounding by which a row may miss its kink, or be on the wrong side of it


class Coupling(NamedTuple):
    """Pulls of C problems to one center: sum_i p_i [..._i + lam_i/2 |v_i - w|^2] + 1/2 w' diag(ridge) w."""

    p: Tensor  # [C], the problems' weights
    lam: Tensor  # [C]
    ridge: Tensor  # [d]

    def center(self, v: Tensor) -> Tensor:
        """[d]: the best w for given v [C, d]."""
        weight = self.p * self.lam
        return weight @ v / (weight.sum() + self.ridge)

    def solver(self, h: Tensor) -> Callable[[Tensor], Tensor]:
        """Gives for right [C, d] the v with H_i v_i - lam_i w(v) = right_i, H [C, d, d] with the pulls on its diagonal.

        The Schur complement sum_i p_i (lam_i - lam_i H_i^-1 lam_i) is computed without that difference, which may be
        rounding: with K_i = H_i - lam_i it is sum_i p_i lam_i H_i^-1 K_i.
        """
        factor, weight = _factor(h), self.p * self.lam
        k = h - torch.diag_embed(self.lam[:, None].expand(h.shape[:2]))
        schur = torch.diag(self.ridge) + torch.einsum("c,cij->ij", weight, torch.cholesky_solve(k, factor))
        center_factor = _factor((schur + schur.T)[None] / 2)[0]

        def solve(rhs: Tensor) -> Tensor:
            free = _solve_separately(factor, rhs)
            w = torch.cholesky_solve((weight @ free)[:, None], center_factor)[:, 0]
            return free + _solve_separately(factor, self.lam[:, None] * w)

        return solve


class PrimalDualPoint(NamedTuple):
    """An iterate, or a step from one."""

    v: Tensor  # [C, d]
    low: Tensor  # [C, B], a - low
    high: Tensor  # high - a
    z: Tensor
    y: Tensor


def minimize_nonsmooth(
    residuals: Residuals,
    low: float,
    high: float,
    quad: Tensor,
    linear: Tensor,
    v: Tensor,
    real: Tensor,
    *,
    curvature: Curvature | None = None,
    most: int = 100,
) -> Tensor:
    """The minimisers [C, d] from the start v; quad [C, d] > 0; `real` [C, B] is False at padding (u = 0, J = 0).

    A problem stops when its duality gap and the residuals of the conditions are down to rounding, and is polished then:
    see above. Where no partition settles, the interior point's own digits are kept.
    """
    at, spread = _follow_path(residuals, low, high, quad, linear, v, real, curvature, None, most)
    return _polish(at, spread, residuals, low, high, quad, linear, real, curvature)


def find_shared_center(
    residuals: Residuals,
    low: float,
    high: float,
    quad: Tensor,
    linear: Tensor,
    v: Tensor,
    real: Tensor,
    coupling: Coupling,
    most: int = 100,
) -> Tensor:
    """[d]: the center of problems that are pulled to it; quad [C, d] contains the pulls.

    To half the digits, as the path ends without polishing: the problems' own minimizers given it have all digits.
    """
    at, _ = _follow_path(residuals, low, high, quad, linear, v, real, None, coupling, most)
    return coupling.center(at.v)


def _follow_path(
    residuals: Residuals,
    low: float,
    high: float,
    quad: Tensor,
    linear: Tensor,
    v: Tensor,
    real: Tensor,
    curvature: Curvature | None,
    coupling: Coupling | None,
    most: int,
) -> tuple[PrimalDualPoint, Tensor]:
    """Where the path to mu = 0 ends, and the size of a row's residual at its start; coupled problems move together."""
    u, j = residuals(v)
    tol, tiny = 4 * torch.finfo(u.dtype).eps, torch.finfo(u.dtype).tiny
    rows = real.sum(1, keepdim=True).clamp(min=1)
    first = u.abs().sum(1) + tiny
    spread = first[:, None] / rows
    half = torch.full_like(u, (high - low) / 2)
    at = PrimalDualPoint(v, half, half, (-u).clamp(min=0) + spread, u.clamp(min=0) + spread)
    best, best_error, waited = at, torch.full_like(first, torch.inf), torch.zeros_like(first)
    for _ in range(most):
        a = low + at.low
        mu = (_gap(at, real) / rows).clamp(min=tiny)
        force = _transpose_product(j, a)
        slope = quad * at.v + linear + force
        if coupling is not None:
            slope = slope - coupling.lam[:, None] * coupling.center(at.v)
        forces = (quad * at.v).norm(dim=1) + linear.norm(dim=1) + force.norm(dim=1) + tiny
        miss = (real * (u + at.z - at.y)).abs().sum(1)
        error = ((rows * mu)[:, 0] + miss) / first + slope.norm(dim=1) / forces
        if coupling is not None:
            error = error.amax().expand_as(error)
        waited = torch.where((error < best_error / 2) | (best_error > tol**0.5), 0, waited + 1)
        better = error < best_error
        best = PrimalDualPoint(*(torch.where(better[:, None], new, old) for new, old in zip(at, best)))
        best_error = torch.where(better, error, best_error)
        live = (best_error > tol) & (waited < MAX_STALLED_ITERATIONS) & torch.isfinite(error)
        if not bool(live.any()):
            break
        weights = at.z / at.low + at.y / at.high
        h = torch.bmm((j / weights[..., None]).mT, j) + torch.diag_embed(quad)
        if curvature is not None:
            h = h + curvature(a)
        solve = partial(_solve_separately, _factor(h)) if coupling is None else coupling.solver(h)
        zero = torch.zeros_like(u)
        predictor = _newton(at, u, j, slope, weights, solve, zero, zero)
        reached = _gap(_move(at, predictor, _max_step(at, predictor, real, coupling is not None)), real) / rows
        goal = mu / 2 * (reached / mu).clamp(max=1) ** 3
        step = _newton(
            at, u, j, slope, weights, solve, goal - predictor.low * predictor.z, goal - predictor.high * predictor.y
        )
        max_step = _max_step(at, step, real, coupling is not None)
        at = _move(at, step, (MAX_BOUNDARY_STEP_SHARE * max_step).clamp(max=1) * live[:, None])
        u, j = residuals(at.v)
    return best, spread


def _polish(
    at: PrimalDualPoint,
    spread: Tensor,
    residuals: Residuals,
    low: float,
    high: float,
    quad: Tensor,
    linear: Tensor,
    real: Tensor,
    curvature: Curvature | None,
) -> Tensor:
    """The minimizers by the partition of the rows at the last iterate; at.v where no partition is consistent."""
    box, eps = high - low, torch.finfo(quad.dtype).eps
    polished, waiting = at.v, real.any(1)
    for balance in ACTIVE_SET_RATIOS:
        above = real & (at.high / box < balance * at.y / spread)  # beside the kink, a = high
        below = real & ~above & (at.low / box < balance * at.z / spread)
        on = real & ~above & ~below
        v, a = at.v, torch.where(above, high, torch.where(below, low, low + at.low))
        u, j = residuals(v)
        for _ in range(POLISHING_STEPS):
            ridge = POLISHING_RIDGE_SHARE * (j**2 / quad[:, None]).sum(2)
            weight = torch.where(on & (ridge > 0), 1 / ridge.clamp(min=torch.finfo(quad.dtype).tiny), 0.0)
            h = torch.diag_embed(quad) + (weight[..., None] * j).mT @ j
            if curvature is not None:
                h = h + curvature(a)
            slope = quad * v + linear + _transpose_product(j, a + weight * u)
            dv = -torch.cholesky_solve(slope[..., None], _factor(h))[..., 0]
            v, a = v + dv, a + weight * (u + torch.bmm(j, dv[..., None])[..., 0])
            u, j = residuals(v)
        # What rounding alone may do to u (a sum of such terms) and to a (forces balanced by a row of length |J_j|).
        off = ROUNDING_UNITS * eps * (u.abs() + 2 * torch.bmm(j.abs(), v.abs()[..., None])[..., 0])
        forces = (quad * v).norm(dim=1) + linear.norm(dim=1) + _transpose_product(j, a).norm(dim=1)
        out = ROUNDING_UNITS * eps * (box + forces[:, None] / j.norm(dim=2).clamp(min=torch.finfo(quad.dtype).tiny))
        outside = (a > high + out) | (a < low - out)
        misplaced = (on & (outside | (u.abs() > off))) | (above & (u < -off)) | (below & (u > off))
        done = waiting & ~misplaced.any(1) & torch.isfinite(v).all(1)
        polished = torch.where(done[:, None], v, polished)
        waiting = waiting & ~done
        if not bool(waiting.any()):
            break
    return polished


def _newton(
    at: PrimalDualPoint,
    u: Tensor,
    j: Tensor,
    slope: Tensor,
    weights: Tensor,
    solve: Callable[[Tensor], Tensor],
    z_goal: Tensor,
    y_goal: Tensor,
) -> PrimalDualPoint:
    """The step towards z (a - low) = z_goal and y (high - a) = y_goal."""
    pull = u + z_goal / at.low - y_goal / at.high
    rhs = -slope - _transpose_product(j, pull / weights)
    dv = solve(rhs)
    da = (pull + torch.bmm(j, dv[..., None])[..., 0]) / weights
    return PrimalDualPoint(dv, da, -da, (z_goal - at.z * da) / at.low - at.z, (y_goal + at.y * da) / at.high - at.y)


def _solve_separately(factor: Tensor, rhs: Tensor) -> Tensor:
    return torch.cholesky_solve(rhs[..., None], factor)[..., 0]


def _factor(h: Tensor) -> Tensor:
    """Cholesky factors; where one fails by rounding, that of the matrix with a slightly larger diagonal."""
    factor, broken = torch.linalg.cholesky_ex(h)
    if bool(broken.any()):
        rounding = ROUNDING_UNITS * torch.finfo(h.dtype).eps * torch.diag_embed(h.diagonal(dim1=1, dim2=2))
        factor = torch.where((broken > 0)[:, None, None], torch.linalg.cholesky_ex(h + rounding)[0], factor)
    return factor


def _transpose_product(j: Tensor, rows: Tensor) -> Tensor:
    """J' rows, [C, d]."""
    return torch.bmm(rows[:, None], j)[:, 0]


def _gap(at: PrimalDualPoint, real: Tensor) -> Tensor:
    """[C, 1]: the complementarity that is left."""
    return (real * (at.z * at.low + at.y * at.high)).sum(1, keepdim=True)


def _move(at: PrimalDualPoint, step: PrimalDualPoint, share: Tensor) -> PrimalDualPoint:
    return PrimalDualPoint(*(value + share * change for value, change in zip(at, step)))


def _max_step(at: PrimalDualPoint, step: PrimalDualPoint, real: Tensor, is_shared: bool) -> Tensor:
    """[C, 1]: the largest share of the step that keeps slacks and multipliers positive, at most 1/BOUNDARY; one number
    for all clients if `is_shared`."""
    step_to_zero = torch.full_like(at.z, 1 / MAX_BOUNDARY_STEP_SHARE)
    for value, change in zip(at[1:], step[1:]):
        step_to_zero = torch.minimum(step_to_zero, torch.where(real & (change < 0), -value / change, step_to_zero))
    max_step = step_to_zero.amin(1, keepdim=True)
    return max_step.amin().expand_as(max_step) if is_shared else max_step
