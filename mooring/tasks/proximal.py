"""Proximal steps on a cohort: the exact one of a smooth convex task by Newton's method, and the score of a step."""

from __future__ import annotations

import torch
from torch import Tensor

from mooring.core.cohort import Condensed
from mooring.core.newton import conjugate_gradient, damped_newton
from mooring.core.task import HasHessian, HasHessianProduct, HasProx, Task, require

MAX_DENSE_PARAMETERS = 300  # up to so many parameters each client's Hessian is factorised; above, conjugate gradients
MIN_RIDGE = 1e-10  # in place of a ridge of 0 and no pull: what makes a minimiser exist and be the only one
MAX_HESSIAN_PRODUCTS = 200  # Hessian products that one Newton direction may take


def is_dense(task: Task) -> bool:
    """Whether Newton's method with each client's Hessian is affordable."""
    exact = isinstance(task, HasProx) and isinstance(task, HasHessian)
    return exact and task.smooth_loss and task.dim <= MAX_DENSE_PARAMETERS


def proximal_newton(
    task: Task, pull: Tensor, center: Tensor, batch: Condensed, start: Tensor, tol: float | None = None
) -> Tensor:
    """Minimise L_i(v) + 1/2 sum_j pull_ij (v_j - center_ij)^2 from `start`; pull and center are [C, d].

    Where neither the task's ridge nor the pull holds a coefficient, MIN_RIDGE holds it to 0. Rows that determine a
    minimizer do not depend on it; of many minimizers it takes the one of least norm, and where there is none (two
    classes that a plane separates, counts that are all 0) it stops at scores of about -log MIN_RIDGE, 23.
    `tol`: where a gradient, relative to the first one, is near enough for the next step, which squares it, to be the
    last. The task offers loss, grad, hessian (up to MAX_DENSE_PARAMETERS) and hessian_product.
    """
    held = pull + task.ridge > 0
    center, pull = torch.where(pull > 0, center, 0.0), torch.where(held, pull, MIN_RIDGE)

    is_small = task.dim <= MAX_DENSE_PARAMETERS
    known: list[tuple[Tensor, tuple[Tensor, Tensor, Tensor]]] = []  # the derivatives at the last point

    def value(v: Tensor) -> Tensor:
        if is_small:
            known[:] = [(v, task.derivatives(v, batch))]
        return (known[0][1][0] if is_small else task.loss(v, batch)) + 0.5 * (pull * (v - center) ** 2).sum(1)

    def slope(v: Tensor) -> Tensor:
        gradient = known[0][1][1] if known and known[0][0] is v else task.grad(v, batch)
        return gradient + pull * (v - center)

    def dense(v: Tensor, g: Tensor) -> Tensor:
        known_here = known[0][0] is v
        h = known[0][1][2] if known_here else require(task, HasHessian).hessian(v, batch)
        h = h.clone()
        h.diagonal(dim1=1, dim2=2).add_(pull).mul_(1 + 8 * torch.finfo(h.dtype).eps)  # keeps it invertible
        return torch.cholesky_solve(g[..., None], torch.linalg.cholesky_ex(h)[0])[..., 0]

    def iterated(v: Tensor, g: Tensor) -> Tensor:
        product = require(task, HasHessianProduct).hessian_product
        tol = g.norm(dim=1).sqrt().clamp(max=0.1)
        return conjugate_gradient(
            lambda s: product(v, batch, s) + pull * s,
            g,
            tol=tol,
            most=min(MAX_HESSIAN_PRODUCTS, task.dim),
        )

    exact = 1e-10 if task.dtype == torch.float64 else 1e-4
    # The pull of MIN_RIDGE must show in the gradient, or it decides nothing: such clients iterate down to rounding.
    goal = torch.where(held.all(1), exact if tol is None else tol, exact * MIN_RIDGE).to(task.dtype)
    return damped_newton(value, slope, dense if is_small else iterated, start, tol=goal)
