"""The personalized objective and its exact minimizer, to compare algorithms with, and the accuracy of models.

Phi(w, v) = sum_i p_i (L_i(v_i) + lam/2 |w - v_i|^2)                       (effect, Eq. 1; alternative, Eq. 4.8)
"""

from typing import NamedTuple

import torch
from scipy.optimize import minimize
from torch import Tensor

from mooring.core.cohort import Batch, Rows
from mooring.core.newton import damped_newton
from mooring.core.task import Task


def objective(task: Task, w: Tensor, v: Tensor, lam: float, p: Tensor, rows: Rows) -> float:
    """Phi at models w [d] and v [m, d]."""
    return float(p @ (task.loss(v, rows.full(task)) + 0.5 * lam * (v - w).square().sum(1)))


class Minimum(NamedTuple):
    w: Tensor  # [d]
    v: Tensor  # [m, d]


def minimize_objective(task: Task, lam: float, p: Tensor, rows: Rows) -> Minimum:
    """The minimizer of Phi for a task with a prox.

    Newton's method on F = sum_i p_i F_i, whose Hessian at w is sum_i p_i H_i (H_i + lam)^-1 lam at the prox; for kinked
    losses, whose F still has a gradient, L-BFGS, to about seven digits.
    """
    full, p = rows.full(task), p.to(task.dtype)
    pull = torch.full((len(rows), task.dim), float(lam), dtype=task.dtype)
    zero = torch.zeros(1, task.dim, dtype=task.dtype)
    if lam == 0:
        v = task.solve(full)
        return Minimum(p @ v, v)

    def at(w):
        return task.prox(w.expand(len(rows), -1), pull, full)

    def value(w):
        v = at(w)
        return (p @ (task.loss(v, full) + 0.5 * (pull * (v - w) ** 2).sum(1)))[None]

    def grad(w):
        return (p[:, None] * pull * (w - at(w))).sum(0, keepdim=True)

    def direction(w, g):
        h, lam_matrix = task.hessian(at(w), full), torch.diag_embed(pull)
        curvature = (p[:, None, None] * (h @ torch.linalg.solve(h + lam_matrix, lam_matrix))).sum(0)
        return torch.linalg.lstsq((curvature + curvature.mT) / 2, g[0], driver="gelsd").solution[None]

    def value_and_grad(flat):
        w = torch.from_numpy(flat)[None].to(task.dtype)
        return float(value(w)), grad(w)[0].double().numpy()

    if task.smooth_loss:
        w = damped_newton(value, grad, direction, zero, tol=1e-13)
    else:
        options = {"ftol": 1e-15, "gtol": 1e-11}
        solution = minimize(value_and_grad, zero[0].numpy(), jac=True, method="L-BFGS-B", options=options)
        w = torch.from_numpy(solution.x)[None].to(task.dtype)
    return Minimum(w[0], at(w))


def measure_accuracy(task: Task, w: Tensor, batch: Batch) -> Tensor:
    """[C]: the share of rows whose most probable class is theirs."""
    return (batch.weight * (task.predict(w, batch.x).argmax(-1) == batch.y)).sum(1)
