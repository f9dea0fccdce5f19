"""The personalization path where Hessians are too large or do not exist; one number lam_i per client.

large_path      smooth convex tasks of many parameters (softmax on images): Newton's method with conjugate gradients on
                all v_i at once. Given them the best w is their mean with weights p_i lam_i, so w is eliminated.
nonsmooth_path  convex nonsmooth losses of linear scores: an interior point on w and all v_i at once
envelope_path   other tasks with an exact prox, and where the interior point would take too much memory: L-BFGS on w
                and the sum of Moreau envelopes, which is smooth: gradient sum_i p_i lam_i (w - prox_i(w))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mooring.core.cohort import Batch, Rows
from mooring.core.task import HasHessianProduct, HasProx, Task, require
from mooring.tasks.linear_score import PiecewiseLinearTask

RELATIVE_GRADIENT_TOLERANCE = 1e-3  # of a solution, relative to the gradient at 0
MAX_NEWTON_STEPS = 50
MAX_HESSIAN_PRODUCTS = 30  # Hessian products a Newton step may take
RELATIVE_STEP_RESIDUAL = 0.3  # residual at which a Newton step counts as solved, relative to the gradient
MOMENT_FLOOR_SHARE = 1e-4  # of the moments in the preconditioner, as a share of the largest
MAX_HALVINGS = 20
MAX_PADDED_NUMBERS = 1_000_000  # numbers, padding included, that are worked on at once
MAX_JOINT_NUMBERS = (
    10_000_000  # of the rows, padding included, and of the Hessians, up to which clients are solved jointly
)
RELATIVE_ENVELOPE_TOLERANCE = 1e-10  # an envelope that falls by less, relative to its value, is at its lowest

Batches = Iterable[tuple[Tensor, Batch]]  # clients, and their rows
PathSolution = tuple[float, Tensor, Tensor]


def solve_large_path(
    task: Task, rows: Rows, p: Tensor, scales: list[float], tight: Tensor, ridge: Tensor
) -> Iterator[PathSolution]:
    """Each point to a gradient of RELATIVE times that at the start, in the norm that weighs client i by p_i.

    The inputs are rotated to the eigenvectors of their pooled second moments: there the Hessian is nearly diagonal, so
    that conjugate gradients need few products; lengths, and with them pulls and ridges, are unchanged.
    """
    p = p.to(task.dtype)
    basis, moments = _principal(task, rows, p)
    turned = Rows(rows.x @ basis, rows.y, rows.start, rows.size)
    batches = [(block, turned.select(block).padded()) for block in turned.blocks()]
    v = torch.zeros(len(rows), task.dim, dtype=task.dtype)
    start = _norm(_slopes(task, batches, v, None), p)
    v = _fit_pooled(task, turned, ridge, RELATIVE_GRADIENT_TOLERANCE, moments).expand_as(v).clone()
    change = torch.zeros_like(v)
    for k, scale in enumerate(scales):
        lam = (scale * tight).to(task.dtype)
        # Scales are usually a geometric series: once two points are solved, go on in a line.
        solution = _solve(task, batches, v + change, p, lam, ridge, RELATIVE_GRADIENT_TOLERANCE * start, moments)
        v, change = solution, solution - v if k else change
        back = _rotate_back(task, v, basis)
        yield scale, _center(back, p, lam, ridge), back


def _fit_pooled(task: Task, rows: Rows, ridge: Tensor, goal: float, moments: Tensor) -> Tensor:
    """[d]: roughly the global model, from all rows as those of one client: where a path starts."""
    first, last = int(rows.start.min()), int((rows.start + rows.size).max())
    batch = Rows(
        rows.x[first:last], rows.y[first:last], torch.zeros(1, dtype=torch.long), torch.tensor([last - first])
    ).padded()
    zero, weight = torch.zeros(1, task.dim, dtype=task.dtype), torch.ones(1, dtype=task.dtype)
    start = _norm(task.grad(zero, batch), weight)
    return _solve(
        task,
        [(torch.zeros(1, dtype=torch.long), batch)],
        zero,
        weight,
        weight * torch.inf,
        ridge,
        10 * goal * start,
        moments,
    )[0]


def _principal(task: Any, rows: Rows, p: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvectors [q, q] of the pooled second moments of the inputs, and the moments [d] of each parameter's input."""
    weight = torch.repeat_interleave(p / rows.size.clamp(min=1), rows.size).to(task.dtype)
    place = torch.arange(int(rows.size.sum())) - torch.repeat_interleave(
        torch.cumsum(rows.size, 0) - rows.size, rows.size
    )
    x = rows.x[torch.repeat_interleave(rows.start, rows.size) + place]
    values, basis = torch.linalg.eigh((x.T @ (weight[:, None] * x)).double())
    outputs = task.dim // (task.features + task.intercept)
    moments = torch.cat([values.clamp(min=0), torch.ones(int(task.intercept), dtype=values.dtype)])
    return basis.to(task.dtype), moments.repeat_interleave(outputs).to(task.dtype)


def _rotate_back(task: Any, v: Tensor, basis: Tensor) -> Tensor:
    """Models of the rotated inputs as models of the inputs."""
    outputs = task.dim // (task.features + task.intercept)
    slopes = basis @ v[:, : task.features * outputs].reshape(len(v), task.features, outputs)
    return torch.cat([slopes.flatten(1), v[:, task.features * outputs :]], 1)


def _center(v: Tensor, p: Tensor, lam: Tensor, ridge: Tensor) -> Tensor:
    """The w that minimises sum_i p_i lam_i/2 |v_i - w|^2 + ridge/2 |w|^2."""
    if bool(torch.isinf(lam).all()):
        return p @ v
    return (p * lam) @ v / ((p * lam).sum() + ridge)


def _slopes(task: Any, batches: Batches, v: Tensor, direction: Tensor | None) -> Tensor:
    """[m, d]: the gradients of L_i at v, or their Hessians times a direction."""
    out = torch.empty_like(v)
    for block, batch in batches:
        if direction is None:
            out[block] = task.grad(v[block], batch)
        else:
            out[block] = require(task, HasHessianProduct).hessian_product(v[block], batch, direction[block])
    return out


def _dot(a: Tensor, b: Tensor, p: Tensor) -> float:
    return float(p @ (a * b).sum(1))


def _norm(g: Tensor, p: Tensor) -> float:
    return _dot(g, g, p) ** 0.5


def _solve(
    task: Task,
    batches: Batches,
    v: Tensor,
    p: Tensor,
    lam: Tensor,
    ridge: Tensor,
    goal: float,
    moments: Tensor,
) -> Tensor:
    is_global = bool(torch.isinf(lam).all())
    if is_global:
        v = (p @ v).expand_as(v).clone()

    def apply_pull(s: Tensor) -> Tensor:
        """The Hessian of all pulls (w eliminated), times s."""
        return ridge * s if is_global else lam[:, None] * (s - _center(s, p, lam, ridge))

    def averaged(g: Tensor) -> Tensor:
        """The global model has one gradient."""
        return (p @ g).expand_as(g) if is_global else g

    def slope(v: Tensor) -> Tensor:
        return averaged(_slopes(task, batches, v, None)) + apply_pull(v)

    g = slope(v)
    for _ in range(MAX_NEWTON_STEPS):
        size = _norm(g, p)
        if size <= goal:
            break
        step = _conjugate(
            lambda s, v=v: averaged(_slopes(task, batches, v, s)) + apply_pull(s),
            g,
            p,
            lam,
            is_global,
            moments,
            0.5 * goal / size,
        )
        rate = 1.0
        for _ in range(MAX_HALVINGS):  # the gradient's own size judges the step: it costs no pass for the value
            trial = slope(v - rate * step)
            if _norm(trial, p) <= size:
                break
            rate /= 2
        v, g = v - rate * step, trial
    return v


def _conjugate(
    product: Callable[..., Tensor],
    g: Tensor,
    p: Tensor,
    lam: Tensor,
    is_global: bool,
    moments: Tensor,
    enough: float,
) -> Tensor:
    """Solve Hessian s = g to a residual of FORCING (or `enough`, if larger), in the inner product sum_i p_i <a_i, b_i>.

    Preconditioned by c moments + lam on what clients differ in and c moments on what they share, c so that both have
    the Hessian's curvature along g.
    """
    length = _dot(g, g, p)
    mean = p @ g
    between = 0.0 if is_global else _dot(lam[:, None] * (g - mean), g - mean, p)
    c = max((_dot(g, product(g), p) - between) / _dot(g, moments * g, p), 1e-4)
    shared = c * (moments + MOMENT_FLOOR_SHARE * moments.max())
    separate = shared if is_global else shared + lam[:, None]

    def precondition(r: Tensor) -> Tensor:
        if is_global:
            return r / shared
        mean = p @ r
        return (r - mean) / separate + mean / shared

    s, r = torch.zeros_like(g), g.clone()
    y = precondition(r)
    q, ry = y.clone(), _dot(r, y, p)
    for _ in range(MAX_HESSIAN_PRODUCTS):
        hq = product(q)
        curvature = _dot(q, hq, p)
        if curvature <= 0:
            break
        step = ry / curvature
        s, r = s + step * q, r - step * hq
        if _dot(r, r, p) <= max(RELATIVE_STEP_RESIDUAL, enough) ** 2 * length:
            break
        y = precondition(r)
        new = _dot(r, y, p)
        q, ry = y + new / ry * q, new
    return s if float(s.abs().max()) > 0 else precondition(g)


def padding_blocks(task: Task, rows: Rows) -> list[Tensor]:
    """All clients at once where that pads little memory: a prox of few rows takes as long as one of many."""
    padded = len(rows) * int(rows.size.max()) * task.dim
    return [torch.arange(len(rows))] if padded <= MAX_PADDED_NUMBERS else rows.blocks()


def choose_path_solver(task: Task, rows: Rows) -> Callable[..., Iterator[PathSolution]]:
    """The solver for a task whose Hessians are too large or do not exist."""
    if task.smooth_loss and isinstance(task, HasHessianProduct):
        return solve_large_path
    numbers = len(rows) * max(int(rows.size.max()), task.dim) * task.dim
    is_joint = isinstance(task, PiecewiseLinearTask) and numbers <= MAX_JOINT_NUMBERS
    return solve_nonsmooth_path if is_joint else solve_envelope_path


def solve_nonsmooth_path(
    task: Any, rows: Rows, p: Tensor, scales: list[float], tight: Tensor, ridge: Tensor
) -> Iterator[PathSolution]:
    """The global model by an interior point on w and all v_i at once, the v_i given it exactly; any order of scales."""
    batches = [(block, rows.select(block).padded()) for block in padding_blocks(task, rows)]
    p, all_rows = p.to(task.dtype), rows.padded()
    for scale in scales:
        if np.isinf(scale):
            w = task.prox(torch.zeros(task.dim, dtype=task.dtype), ridge[None], rows.pooled(p))[0]
            yield scale, w, w.expand(len(rows), -1)
            continue
        lam = (scale * tight).to(task.dtype)
        w = task.find_center(lam, p, ridge, all_rows)
        v = torch.empty(len(rows), task.dim, dtype=task.dtype)
        for block, batch in batches:
            v[block] = task.prox(w, lam[block][:, None], batch)
        yield scale, w, v


def solve_envelope_path(
    task: Task, rows: Rows, p: Tensor, scales: list[float], tight: Tensor, ridge: Tensor
) -> Iterator[PathSolution]:
    """Infinity stands for a lambda so large that no model differs from w."""
    from scipy.optimize import minimize  # slow to import, and most tasks do not need it

    batches = [(block, rows.select(block).padded()) for block in padding_blocks(task, rows)]
    finite = [s for s in scales if np.isfinite(s)]
    stiffest = 1e3 * max(finite) if finite else 1e6
    w = torch.zeros(task.dim, dtype=task.dtype)
    v = torch.zeros(len(rows), task.dim, dtype=task.dtype)
    for scale in scales:
        lam = (min(scale, stiffest) * tight).to(task.dtype)

        def envelope(flat: np.ndarray, lam: Tensor = lam) -> tuple[float, np.ndarray]:
            at = torch.from_numpy(flat).to(task.dtype)
            total, slope = 0.5 * float(ridge @ at**2), ridge * at
            for block, batch in batches:
                share, stiff = p[block].to(task.dtype), lam[block][:, None]
                v[block] = require(task, HasProx).prox(at, stiff, batch, v[block])
                gap = at - v[block]
                total += float(share @ (task.loss(v[block], batch) + 0.5 * (stiff * gap**2).sum(1)))
                slope = slope + share @ (stiff * gap)
            return total, slope.double().numpy()

        optimum = minimize(
            envelope,
            w.double().numpy(),
            jac=True,
            method="L-BFGS-B",
            options={"maxiter": 300, "ftol": RELATIVE_ENVELOPE_TOLERANCE},
        )
        w = torch.from_numpy(optimum.x).to(task.dtype)
        envelope(optimum.x)
        yield scale, w, w.expand_as(v).clone() if np.isinf(scale) else v.clone()
