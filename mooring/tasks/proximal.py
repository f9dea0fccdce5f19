"""Proximal steps on a cohort: the exact one of a smooth convex task by Newton's method, and the score of a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mooring.core.newton import conjugate_gradient, newton

DENSE = 300  # up to so many parameters each client's Hessian is factorised; above, conjugate gradients
FLOOR = 1e-10  # curvature added where neither ridge nor pull makes the Hessian invertible
MOST_PRODUCTS = 200  # Hessian products that one Newton direction may take


def proximal_newton(task: Any, pull: Tensor, center: Tensor, batch: Any, start: Tensor) -> Tensor:
    """Minimise L_i(v) + 1/2 sum_j pull_ij (v_j - center_ij)^2 from `start`; pull and center are [C, d].

    The task offers loss, grad, hessian (up to DENSE parameters) and curve, the Hessian's product with a direction.
    """

    def value(v: Tensor) -> Tensor:
        return task.loss(v, batch) + 0.5 * (pull * (v - center) ** 2).sum(1)

    def slope(v: Tensor) -> Tensor:
        return task.grad(v, batch) + pull * (v - center)

    def dense(v: Tensor, g: Tensor) -> Tensor:
        h = task.hessian(v, batch) + torch.diag_embed(pull + FLOOR)
        return torch.cholesky_solve(g[..., None], torch.linalg.cholesky_ex(h)[0])[..., 0]

    def iterated(v: Tensor, g: Tensor) -> Tensor:
        tol = min(0.1, float(g.norm(dim=1).max()) ** 0.5)
        return conjugate_gradient(
            lambda s: task.curve(v, batch, s) + (pull + FLOOR) * s, g, tol=tol, most=min(MOST_PRODUCTS, task.dim)
        )

    tol = 1e-10 if task.dtype == torch.float64 else 1e-4
    return newton(value, slope, dense if task.dim <= DENSE else iterated, start, tol=tol)


def moreau_gradient(task: Any, w: Tensor, rho: float, batch: Any) -> Tensor:
    """[C]: |w_i - prox_{rho L_i}(w_i)| / rho, the size of the Moreau envelope's gradient (mspp, Remark 5).

    A score of stationarity where the loss has kinks and gradients do not vanish; for smooth losses it tends to the
    gradient's norm as rho -> 0.
    """
    return (w - task.prox(w, 1 / rho, batch)).norm(dim=1) / rho
