"""Exact answers that the figures measure against: the minimizer of the personalized objective, and squared errors.

Clients i = 1..m with weights p, population risk Lpop_i, truth w*_i = arg min Lpop_i, w*_avg = sum_i p_i w*_i:

    IER_i = Lpop_i(v_i) - Lpop_i(w*_i)        AER = sum_i p_i IER_i            (alternative, Definitions 2.1 and 4.2)
    errors: common |w - w*_avg|^2, personal |v_i - w*_i|^2                 (`effect`; statistical at the exact minimizer
                                                                                of the objective, total at an iterate)
    Phi(w, v) = sum_i p_i (L_i(v_i) + lam/2 |w - v_i|^2)                       (effect, Eq. 1; alternative, Eq. 4.8)

A ridge is part of the loss throughout. Models v are [m, d]; a single [d] stands for the same model at all clients.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from mooring.core.cohort import Rows, broadcast_per_client
from mooring.core.newton import damped_newton
from mooring.core.task import HasHessian, HasProx, HasSolve, Task, require


def average_excess(excess: Tensor, p: Tensor) -> float:
    """AER from the clients' IER."""
    return float(p @ excess)


class Errors(NamedTuple):
    common: float
    personal: Tensor  # [m]


def squared_errors(w: Tensor, v: Tensor, truths: Tensor, p: Tensor) -> Errors:
    """Distances from the truths: w and v exact minimizers (statistical error) or iterates (total error).

    For local training w is sum_i p_i v_i; for one global model v is w.
    """
    return Errors(float((w - p @ truths).square().sum()), (v - truths).square().sum(1))


def objective(task: Task, w: Tensor, v: Tensor, lam: float | Tensor, p: Tensor, rows: Rows) -> float:
    """Phi; lam a number, [m] or [m, d]."""
    pull = broadcast_per_client(lam, v)
    return float(p @ (task.loss(v, rows.full(task)) + 0.5 * (pull * (v - w) ** 2).sum(1)))


class Minimum(NamedTuple):
    w: Tensor  # [d]
    v: Tensor  # [m, d]


def minimize_objective(task: Task, lam: float | Tensor, p: Tensor, rows: Rows) -> Minimum:
    """The exact minimizer of Phi for a task with a prox.

    Newton's method on F = sum_i p_i F_i, whose Hessian at w is sum_i p_i H_i (H_i + lam)^-1 lam at the prox; kinked
    tasks, whose F still has a gradient, by L-BFGS, to about seven digits.
    """
    full, m = rows.full(task), len(rows)
    pull = broadcast_per_client(lam, p) * torch.ones(m, task.dim, dtype=task.dtype)
    p = p.to(task.dtype)
    zero = torch.zeros(1, task.dim, dtype=task.dtype)
    if not bool((pull > 0).any()):
        v = require(task, HasSolve).solve(full)
        return Minimum(p @ v, v)

    def at(w: Tensor) -> Tensor:
        return require(task, HasProx).prox(w.expand(m, -1), pull, full)

    def value(w: Tensor) -> Tensor:
        v = at(w)
        return (p @ (task.loss(v, full) + 0.5 * (pull * (v - w) ** 2).sum(1)))[None]

    def grad(w: Tensor) -> Tensor:
        return (p[:, None] * pull * (w - at(w))).sum(0, keepdim=True)

    if task.smooth_loss:

        def direction(w: Tensor, g: Tensor) -> Tensor:
            h = require(task, HasHessian).hessian(at(w), full)
            lam_matrix = torch.diag_embed(pull)
            bend = (p[:, None, None] * (h @ torch.linalg.solve(h + lam_matrix, lam_matrix))).sum(0)
            return torch.linalg.lstsq((bend + bend.mT) / 2, g[0], driver="gelsd").solution[None]

        w = damped_newton(value, grad, direction, zero, tol=1e-13)
    else:

        def value_and_grad(flat: np.ndarray) -> tuple[float, np.ndarray]:
            w = torch.from_numpy(flat)[None].to(task.dtype)
            return float(value(w)), grad(w)[0].double().numpy()

        solution = minimize(
            value_and_grad, zero[0].numpy(), jac=True, method="L-BFGS-B", options={"ftol": 1e-15, "gtol": 1e-11}
        )
        w = torch.from_numpy(solution.x)[None].to(task.dtype)
    return Minimum(w[0], at(w))
