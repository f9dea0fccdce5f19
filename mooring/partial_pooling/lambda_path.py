"""The personalization path: the FedProx objective solved for every lambda between the global model and local ones.

    min  sum_i p_i [ L_i(v_i) + 1/2 sum_j lam_ij (v_ij - w_j)^2 ] + ridge/2 |w|^2,    lam_ij = scale tight_i / slack_j

A path has fixed tight [m] and slack [d] (1 unless given: one lam for all) and is solved for any number of scales,
infinity (v_i = w: the global model) among them. A slack of 0 makes a coefficient the same for all clients. The ridge
does not apply to intercepts.

    linear tasks      exact: one eigendecomposition per client serves every scale, of its rows where they are fewer than
                      the columns of a wide table
    smooth convex     Newton's method on w and all v_i at once, warm started from the scale before
    other tasks       see `lambda_path_iterative.py`
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mooring.core.client_functions import ClientRows, client_function
from mooring.core.cohort import Batch
from mooring.core.errors import RequestError
from mooring.core.task import HasHessian, Task, layer_mask, require
from mooring.estimates.client_queries import linear_sums
from mooring.partial_pooling.client_fits import LossDerivatives, differentiate_losses
from mooring.partial_pooling.lambda_path_iterative import choose_path_solver
from mooring.tasks.linear import Linear
from mooring.tasks.proximal import is_dense

LAMBDA_SCALES = torch.logspace(3, -3, 25, dtype=torch.float64)  # lambdas of a path, in units of the clients' curvature
MIN_EIGENVALUE_SHARE = 1e-12  # share of the largest eigenvalue below which a direction counts as undetermined
NEWTON_TOLERANCE = 1e-8  # predicted decrease of the objective from which Newton's next step, which squares it, is last
GRADIENT_TOLERANCE = 1e-10  # the same of the global model, absolute
WIDE_RIDGE_SHARE = 1e-9  # of the mean eigenvalue, which stands in for undetermined directions of wide tables,
WIDE_REFINEMENTS = 4  # and is taken back by as many steps of refinement
MAX_NEWTON_STEPS = 50
MAX_HALVINGS = 30
MAX_CLIENTS_PER_BLOCK = 4_000  # clients beyond which a linear path is solved block by block
MAX_HESSIAN_NUMBERS = 2**17  # numbers that the Hessians may have that are factorized at a time: they stay in the cache


class PathPoint(NamedTuple):
    """The solution at one scale."""

    scale: float
    w: Tensor  # [d]
    v: Tensor  # [m, d]


class PullShape(NamedTuple):
    """What a path's lam_ij = scale tight_i / slack_j has besides its scale; None is 1."""

    tight: Tensor | None = None  # [m]
    slack: Tensor | None = None  # [d]


def solve_path(
    task: Any,
    rows: Any,
    p: Tensor,
    scales: Sequence[float] | Tensor,
    shape: PullShape | None = None,
    ridge: float = 0.0,
    start: PathPoint | None = None,
) -> Iterator[PathPoint]:
    """The path at `scales`, in that order; from tight to slack is the quickest. Newton's method begins at `start`."""
    shape = shape or PullShape()
    scales = [float(s) for s in scales]
    if min(scales, default=1.0) <= 0:
        raise RequestError(f"path: scales must be above 0, got {min(scales)}; local models have a ridge of their own.")
    tight = torch.ones(len(rows), dtype=torch.float64) if shape.tight is None else shape.tight.double()
    p = p.double() / p.double().sum()
    penalty = ridge * ridge_mask(task)
    if isinstance(task, Linear):
        return _linear(task, rows, p, scales, tight, shape.slack, penalty.double())
    if is_dense(task):
        return _newton(task, rows, p, scales, tight, shape.slack, penalty, start)
    if shape.slack is not None:
        raise RequestError(f"path: task '{task.name}' has no Hessian to give each coefficient its own lambda.")
    return (PathPoint(*point) for point in choose_path_solver(task, rows)(task, rows, p, scales, tight, penalty))


def ridge_mask(task: Task) -> Tensor:
    """[d]: 1 where a ridge on the global model applies, 0 at intercepts."""
    return (~layer_mask(task.layout, ("intercept",))).to(task.dtype)


def initial_curvature(task: Task, rows: ClientRows, p: Tensor) -> float:
    """The mean curvature of a coefficient at the start: the unit in which SCALES are lambdas."""
    mean = float((p.double() / p.double().sum()) @ client_curvature(task, rows).double())
    return mean if 0 < mean < float("inf") else 1.0


@client_function
def client_curvature(task: Task, batch: Batch) -> Tensor:
    """[C]: over the coefficients, at 0."""
    w = torch.zeros(len(batch.y), task.dim, dtype=task.dtype)
    if isinstance(task, Linear) and not is_dense(task):
        return (batch.weight * task.design(batch.x).square().mean(-1)).sum(1) + task.ridge
    if is_dense(task):
        return require(task, HasHessian).hessian(w, batch).diagonal(dim1=1, dim2=2).mean(1)
    return task.constants(batch, w).trace / task.dim


def _linear(
    task: Task, rows: ClientRows, p: Tensor, scales: list[float], tight: Tensor, slack: Tensor | None, ridge: Tensor
) -> Iterator[PathPoint]:
    """v_i = w + S U (e + scale tight_i)^-1 U'S (m_i - H_i w),  S = slack^1/2,  S H_i S = U diag(e) U'.

    w makes sum_i p_i (H_i v_i - m_i) + ridge w = 0: a d x d system per scale.
    """
    if len(rows) > MAX_CLIENTS_PER_BLOCK:
        yield from _linear_in_blocks(task, rows, p, scales, tight, slack, ridge)
        return
    if slack is not None and bool((slack == slack[0]).all()) and slack[0] > 0:
        tight, slack = tight / float(slack[0]), None
    wide = is_wide(task, rows)
    h, moment = cached_roots(task, rows) if wide else cached_moments(task, rows)
    weighted = (p.sqrt()[:, None, None] * h).flatten(0, 1) if wide else None
    total = torch.einsum("c,cij->ij", p, h) if weighted is None else weighted.T @ weighted
    total, target = total + torch.diag(ridge), p @ moment
    solve_symmetric = _solve_wide if wide else _solve_symmetric
    if all(scale == torch.inf for scale in scales):
        w = solve_symmetric(total, target, total).to(task.dtype)
        yield from (PathPoint(scale, w, w.expand(len(rows), -1)) for scale in scales)
        return
    e, su, k, k0 = eigen_moments(task, rows, slack)
    flat = k.reshape(-1, task.dim)
    pull = tight[:, None, None] * torch.tensor(scales, dtype=torch.float64)
    inverse = torch.where(torch.isinf(pull), 0.0, 1 / (e[..., None] + pull))  # [m, d, scales]
    weight = (p[:, None, None] * inverse).flatten(0, 1)
    squares, sums = sum_weighted_squares(flat, weight), (k0.reshape(-1, 1) * weight).T @ flat
    for j, scale in enumerate(scales):
        w = solve_symmetric(total - squares[j], target - sums[j], total)
        v = w + torch.einsum("cij,cj->ci", su, inverse[..., j] * (k0 - k @ w))
        yield PathPoint(scale, w.to(task.dtype), v.to(task.dtype))


def _linear_in_blocks(
    task: Task, rows: ClientRows, p: Tensor, scales: list[float], tight: Tensor, slack: Tensor | None, ridge: Tensor
) -> Iterator[PathPoint]:
    """The same for very many clients: over blocks of them, once for every w and once per scale for v; none is stored.

    Few scales are needed of so many, and S H_i S + scale tight_i = L L' takes a third of an eigendecomposition's time.
    """
    s = torch.ones(task.dim, dtype=torch.float64) if slack is None else slack.double().sqrt()
    blocks = torch.arange(len(rows)).split(MAX_CLIENTS_PER_BLOCK)

    def factor(h: Tensor, block: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """L [C, d, d], and whether the client moves at all [C]."""
        pull = scale * tight[block]
        inner = s[:, None] * h * s
        diagonal = inner.diagonal(dim1=1, dim2=2)
        diagonal += torch.where(torch.isinf(pull), 1.0, pull)[:, None]
        diagonal *= 1 + 8 * torch.finfo(h.dtype).eps  # keeps it positive definite
        return torch.linalg.cholesky_ex(inner)[0], torch.isfinite(pull)

    total = torch.zeros(task.dim, task.dim + 1, dtype=torch.float64)  # sums of H_i and, in the last column, of m_i
    taken = {scale: torch.zeros_like(total) for scale in scales}
    for block in blocks:
        h, moment = cached_moments(task, rows.select(block))
        both = torch.cat([h, moment[..., None]], 2)
        total = total + torch.einsum("c,cij->ij", p[block], both)
        for scale in taken:
            if scale != torch.inf:
                half, moves = factor(h, block, scale)
                half = torch.linalg.solve_triangular(half, s[:, None] * both, upper=False)
                weight = (p[block] * moves)[:, None].expand(-1, task.dim).reshape(-1, 1)
                taken[scale] += sum_weighted_squares(half.flatten(0, 1), weight)[0][:-1]
    for scale in scales:
        left = total - taken[scale]
        ridged = total[:, :-1] + torch.diag(ridge)
        w = _solve_symmetric(left[:, :-1] + torch.diag(ridge), left[:, -1], ridged)
        v = w.expand(len(rows), -1).to(task.dtype, copy=True)
        for block in blocks if scale != torch.inf else ():
            h, moment = cached_moments(task, rows.select(block))
            half, moves = factor(h, block, scale)
            away = s * torch.cholesky_solve((s * (moment - h @ w))[..., None], half)[..., 0]
            v[block] = (w + moves[:, None] * away).to(task.dtype)
        yield PathPoint(scale, w.to(task.dtype), v)


def cached_moments(task: Task, rows: ClientRows) -> tuple[Tensor, Tensor]:
    """Every client's H = X'X/n + ridge [m, d, d] and X'y/n [m, d]."""
    sums = linear_sums(task, rows)
    gram = sums.gram + task.ridge * torch.eye(task.dim, dtype=sums.gram.dtype) if task.ridge else sums.gram
    return gram, sums.moment


def is_wide(task: Task, rows: ClientRows) -> bool:
    """Whether every client has fewer rows than a linear model has coefficients, and these are many."""
    return isinstance(task, Linear) and not task.ridge and not is_dense(task) and int(rows.size.max()) < task.dim


def cached_roots(task: Task, rows: ClientRows) -> tuple[Tensor, Tensor]:
    """Every client's R with R'R = X'X/n [m, most rows, d], and X'y/n [m, d], computed once."""
    name = ("roots", task)
    if name not in rows.cache:
        rows.cache[name] = tuple(factor_moments(task, rows, rank=rows.size.max()))
    return rows.cache[name]


class MomentRoots(NamedTuple):
    root: Tensor  # [C, rank, d]
    moment: Tensor  # [C, d]


@client_function
def factor_moments(task: Any, batch: Batch, *, rank: Tensor) -> MomentRoots:
    """The moments of fewer rows than columns: R = E^1/2 V' of X'X/n = V E V', not the rows."""
    half = batch.weight.double().sqrt()
    x, y = half[..., None] * task.design(batch.x).double(), half * batch.y.double()
    vectors = torch.linalg.eigh(x @ x.mT)[1]
    root = x.new_zeros(len(x), int(rank), task.dim)
    root[:, : x.shape[1]] = vectors.mT @ x
    return MomentRoots(root, (x.mT @ y[..., None])[..., 0])


def eigen_moments(task: Task, rows: ClientRows, slack: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """e, S U, U'S H and U'S m of every client; those of S = 1 and of the last slack are cached, for the next ridge.

    Several threads may share `rows`: each reads the cache once and returns what it read or computed itself.
    """
    name = ("eigen", task, slack is None)
    key = None if slack is None else tuple(slack.tolist())
    cached = rows.cache.get(name)
    if cached is None or cached[0] != key:
        s = torch.ones(task.dim, dtype=torch.float64) if slack is None else slack.double().sqrt()
        if is_wide(task, rows):
            root, moment = cached_roots(task, rows)
            e, q = torch.linalg.eigh((root * s) @ (root * s).mT)
            seen = e > MIN_EIGENVALUE_SHARE * e[:, -1:]
            e, half = torch.where(seen, e, 0.0), torch.where(seen, e, torch.inf).sqrt()
            uh = q.mT @ root  # U'S H over the root of e
            su, k = s[:, None] * (s * uh / half[..., None]).mT, torch.where(seen, half, 0.0)[..., None] * uh
        else:
            h, moment = cached_moments(task, rows)
            e, u = torch.linalg.eigh(s[:, None] * h * s)
            e, su = e.clamp(min=0), s[:, None] * u
            k = su.mT @ h
        cached = key, (e, su, k, (su.mT @ moment[..., None])[..., 0])
        rows.cache[name] = cached
    return cached[1]


def _solve_symmetric(a: Tensor, b: Tensor, like: Tensor | None = None) -> Tensor:
    """a^-1 b for a positive semi-definite a, the least-norm solution where a direction is undetermined.

    A direction is undetermined when `like`, which a was made from, does not see it, or when a itself is rounding.
    """
    values, vectors = torch.linalg.eigh((a + a.T) / 2)
    top = values[-1].clamp(min=torch.finfo(a.dtype).tiny)
    keep = values > MIN_EIGENVALUE_SHARE * top
    if like is not None:
        floor = 100 * torch.finfo(a.dtype).eps * torch.linalg.matrix_norm(like, 2)
        keep &= values > torch.minimum(floor, top / 2)
    return vectors[:, keep] @ ((vectors[:, keep].T @ b) / values[keep])


def _solve_wide(a: Tensor, b: Tensor, like: Tensor) -> Tensor:
    """a^-1 b by Cholesky's factor of a with a small ridge, refined: undetermined directions stay near 0."""
    ridge = WIDE_RIDGE_SHARE * like.diagonal().mean()
    factor = torch.linalg.cholesky_ex(a + ridge * torch.eye(len(a), dtype=a.dtype))[0]
    x = torch.zeros_like(b)
    for _ in range(1 + WIDE_REFINEMENTS):
        x = x + torch.cholesky_solve((b - a @ x)[:, None], factor)[:, 0]
    return x


def minimize_global_loss(task: Task, rows: ClientRows, p: Tensor, ridge: Tensor, start: Tensor | None = None) -> Tensor:
    """[d]: arg min sum_i p_i L_i(w) + 1/2 sum_j ridge_j w_j^2 of a smooth convex task, by Newton's method."""
    w = torch.zeros(task.dim, dtype=task.dtype) if start is None else start
    p = (p.double() / p.double().sum()).to(task.dtype)

    def at(w: Tensor) -> tuple[float, Tensor, Tensor]:
        losses = differentiate_losses(task, rows, w.expand(len(rows), -1))
        value = float(p @ losses.loss) + 0.5 * float(ridge @ w**2)
        return value, p @ losses.slope + ridge * w, torch.einsum("c,cij->ij", p, losses.hessian) + torch.diag(ridge)

    with rows.keep_batches():
        value, slope, hessian = at(w)
        for _ in range(MAX_NEWTON_STEPS):
            if float(slope.norm()) <= GRADIENT_TOLERANCE:
                break
            step = _solve_symmetric(hessian, slope)
            for _ in range(MAX_HALVINGS):
                ahead = at(w - step)
                if ahead[0] <= value + 1e-14 * (1 + abs(value)):
                    break
                step = step / 2
            moved = ahead[0] < value or float(ahead[1].norm()) < float(slope.norm())
            if not moved:
                break
            w, (value, slope, hessian) = w - step, ahead
    return w


def _newton(
    task: Task,
    rows: ClientRows,
    p: Tensor,
    scales: list[float],
    tight: Tensor,
    slack: Tensor | None,
    ridge: Tensor,
    start: PathPoint | None,
) -> Iterator[PathPoint]:
    """Newton's method on (w, z_1..z_m), v_i = w + S z_i, pull scale tight_i |z_i|^2 / 2; w by a Schur complement.

    The clients' losses, gradients and Hessians at v are needed once for every point that is tried.
    """
    s = torch.ones(task.dim, dtype=task.dtype) if slack is None else slack.sqrt().to(task.dtype)
    w = torch.zeros(task.dim, dtype=task.dtype)
    z = torch.zeros(len(rows), task.dim, dtype=task.dtype)
    if start is not None:
        w, v = start.w.to(task.dtype), start.v.to(task.dtype)
        z = torch.where(s > 0, (v - w) / s, 0.0)
    p = p.to(task.dtype)
    with rows.keep_batches():
        here = differentiate_losses(task, rows, w + s * z)
        for scale in scales:
            pull = (scale * tight).to(task.dtype)
            frozen = torch.isinf(pull)[:, None] & (z != 0)
            if bool(frozen.any()):
                z = torch.where(frozen, 0.0, z)
                here = differentiate_losses(task, rows, w + s * z)
            value = _objective(here, p, pull, ridge, w, z)
            for _ in range(MAX_NEWTON_STEPS):
                dw, dz, decrease = _newton_step(here, p, s, pull, ridge, w, z)
                rate, moved = 1.0, False
                for _ in range(MAX_HALVINGS):
                    ahead = differentiate_losses(task, rows, w - rate * dw + s * (z - rate * dz))
                    new = _objective(ahead, p, pull, ridge, w - rate * dw, z - rate * dz)
                    if new <= value + 1e-14 * (1 + abs(value)):
                        moved = new < value
                        break
                    rate /= 2
                if not moved:
                    break
                w, z, value, here = w - rate * dw, z - rate * dz, new, ahead
                if decrease <= NEWTON_TOLERANCE * (1 + abs(value)):
                    break
            yield PathPoint(scale, w, w + s * z)


def _objective(here: LossDerivatives, p: Tensor, pull: Tensor, ridge: Tensor, w: Tensor, z: Tensor) -> float:
    finite = torch.where(torch.isinf(pull), 0.0, pull)
    return 0.5 * float(ridge @ w**2) + float(p @ (here.loss + 0.5 * finite * (z**2).sum(1)))


def _newton_step(
    here: LossDerivatives, p: Tensor, s: Tensor, pull: Tensor, ridge: Tensor, w: Tensor, z: Tensor
) -> tuple[Tensor, Tensor, float]:
    """The steps of w and z, and twice the decrease that they would bring if the losses were quadratic."""
    schur, slope = torch.diag(ridge), ridge * w + p @ here.slope
    moves = (~torch.isinf(pull)).to(w.dtype)[:, None]
    stiff = torch.where(moves > 0, pull[:, None], 1.0)
    gz, solutions = moves * (s * here.slope + stiff * z), []
    for block in torch.arange(len(z)).split(max(1, MAX_HESSIAN_NUMBERS // len(w) ** 2)):
        sh = s[:, None] * here.hessian[block]
        inner = sh * s
        inner.diagonal(dim1=1, dim2=2).add_(stiff[block]).mul_(1 + 8 * torch.finfo(w.dtype).eps)  # stays definite
        factor = torch.linalg.cholesky_ex(inner)[0]
        both = torch.cat([moves[block, None] * sh, gz[block, :, None]], 2)
        half = torch.linalg.solve_triangular(factor, both, upper=False)
        weighted = p[block, None, None].sqrt() * half
        square = (weighted[..., :-1].mT @ weighted).sum(0)
        schur = schur + torch.einsum("c,cij->ij", p[block], here.hessian[block]) - square[:, :-1]
        slope = slope - square[:, -1]
        solutions.append((block, factor, half))
    dw = _solve_symmetric(schur, slope)
    dz = torch.zeros_like(z)
    for block, factor, half in solutions:
        left = half[..., -1:] - half[..., :-1] @ dw[:, None]
        dz[block] = torch.linalg.solve_triangular(factor.mT, left, upper=True)[..., 0]
    return dw, dz, float((ridge * w + p @ here.slope) @ dw + p @ (gz * dz).sum(1))


CACHE_NUMBERS = 2**17  # that are weighed at a time: they stay in the processor's cache, which is several times as fast


def sum_weighted_squares(rows: Tensor, weight: Tensor) -> Tensor:
    """[c, d, d]: sum_n weight_nc x_n x_n' over rows x [N, d], with weights [N, c]."""
    d, c = rows.shape[1], weight.shape[1]
    out = torch.zeros(d, c * d, dtype=rows.dtype)
    few = max(1, CACHE_NUMBERS // (c * d))
    for x, w in zip(rows.split(few), weight.split(few)):
        out.addmm_(x.T, (w[..., None] * x[:, None]).flatten(1))
    return out.view(d, c, d).transpose(0, 1)
