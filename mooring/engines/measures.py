"""What a federation's models are worth, and how far an optimiser has come: pure functions on tensors.

Clients i = 1..m with weights p, population risk Lpop_i, truth w*_i = arg min Lpop_i, w*_avg = sum_i p_i w*_i:

    IER_i = Lpop_i(v_i) - Lpop_i(w*_i)        AER = sum_i p_i IER_i            (alternative, Definitions 2.1 and 4.2)
    errors: common |w - w*_avg|^2, personal |v_i - w*_i|^2                 (`effect`; statistical at the exact minimiser
                                                                                of the objective, total at an iterate)
    Phi(w, v) = sum_i p_i (L_i(v_i) + lam/2 |w - v_i|^2)                       (effect, Eq. 1; alternative, Eq. 4.8)
    stationarity |grad F_rho(w)| = |w - prox_{rho F}(w)| / rho                 (mspp, Remark 5), F = sum_i p_i L_i

A ridge is part of the loss throughout. Models v are [m, d]; a single [d] stands for the same model at all clients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor
from torch.nn.functional import softplus

from mooring.core.cohort import Batch, Rows, per_client
from mooring.core.newton import newton
from mooring.tasks.proximal import moreau_gradient

GRID = torch.arange(-267, 268, dtype=torch.float64) * 0.03  # the trapezoid rule on it is exact for smooth integrands
LEVELS = (0.1, 0.25, 0.5, 0.75, 0.9)


def linear_excess(v: Tensor, truth: Tensor, second_moment: Tensor) -> Tensor:
    """[m]: 1/2 (v_i - w*_i)' E[x x'] (v_i - w*_i), exact for half the squared loss."""
    gap = v - truth
    return 0.5 * torch.einsum("mi,mij,mj->m", gap, second_moment.expand(len(gap), -1, -1), gap)


def logistic_excess(v: Tensor, truth: Tensor, mean: Tensor, covariance: Tensor) -> Tensor:
    """[m]: the excess log-loss when x ~ N(mean, covariance) and P(y = 1) = sigmoid(x'w*_i), by one-dimensional sums.

    E[sigmoid(x'w*) x'v] needs only x'w*, for E[x'v | x'w*] is linear.
    """
    v = v.expand_as(truth)
    covariance, mean = covariance.expand(len(truth), -1, -1), mean.expand_as(truth)
    weight = torch.exp(-(GRID**2) / 2)
    weight = weight / weight.sum()

    def moments(a: Tensor, b: Tensor) -> Tensor:
        return torch.einsum("mi,mij,mj->m", a, covariance, b)

    def partition(w: Tensor) -> Tensor:
        """E log(1 + exp(x'w))."""
        score = (mean * w).sum(1)[:, None] + moments(w, w).sqrt()[:, None] * GRID
        return softplus(score) @ weight

    width = moments(truth, truth).sqrt()
    head = torch.sigmoid((mean * truth).sum(1)[:, None] + width[:, None] * GRID)
    slope = torch.where(width > 0, moments(v - truth, truth) / width.clamp(min=torch.finfo(v.dtype).tiny), 0.0)
    shift = ((mean * (v - truth)).sum(1)[:, None] + slope[:, None] * GRID) * head
    return partition(v) - partition(truth) - shift @ weight


def sampled_excess(task: Any, v: Tensor, truth: Tensor, draws: Batch) -> Tensor:
    """[m]: the excess loss on draws that v and the truth share: Monte Carlo with common random numbers."""
    return task.loss(v.expand_as(truth), draws) - task.loss(truth, draws)


def average_excess(excess: Tensor, p: Tensor) -> float:
    """AER from the clients' IER."""
    return float(p @ excess)


class Errors(NamedTuple):
    common: float
    personal: Tensor  # [m]


def squared_errors(w: Tensor, v: Tensor, truths: Tensor, p: Tensor) -> Errors:
    """Distances from the truths: w and v exact minimisers (statistical error) or iterates (total error).

    For training alone w is sum_i p_i v_i; for one common model v is w.
    """
    return Errors(float((w - p @ truths).square().sum()), (v - truths).square().sum(1))


def objective(task: Any, w: Tensor, v: Tensor, lam: Any, p: Tensor, rows: Rows) -> float:
    """Phi; lam a number, [m] or [m, d]."""
    pull = per_client(lam, v)
    return float(p @ (task.loss(v, rows.full(task)) + 0.5 * (pull * (v - w) ** 2).sum(1)))


class Minimum(NamedTuple):
    w: Tensor  # [d]
    v: Tensor  # [m, d]


def minimiser(task: Any, lam: Any, p: Tensor, rows: Rows) -> Minimum:
    """The exact minimiser of Phi for a task with a prox.

    Newton's method on F = sum_i p_i F_i, whose Hessian at w is sum_i p_i H_i (H_i + lam)^-1 lam at the prox; kinked
    tasks, whose F still has a gradient, by L-BFGS, to about seven digits.
    """
    full, m = rows.full(task), len(rows)
    pull = per_client(lam, p) * torch.ones(m, task.dim, dtype=task.dtype)
    p = p.to(task.dtype)
    zero = torch.zeros(1, task.dim, dtype=task.dtype)
    if not bool((pull > 0).any()):
        v = task.solve(full)
        return Minimum(p @ v, v)

    def at(w: Tensor) -> Tensor:
        return task.prox(w.expand(m, -1), pull, full)

    def value(w: Tensor) -> Tensor:
        v = at(w)
        return (p @ (task.loss(v, full) + 0.5 * (pull * (v - w) ** 2).sum(1)))[None]

    def grad(w: Tensor) -> Tensor:
        return (p[:, None] * pull * (w - at(w))).sum(0, keepdim=True)

    if task.smooth_loss:

        def direction(w: Tensor, g: Tensor) -> Tensor:
            h = task.hessian(at(w), full)
            lam_matrix = torch.diag_embed(pull)
            bend = (p[:, None, None] * (h @ torch.linalg.solve(h + lam_matrix, lam_matrix))).sum(0)
            return torch.linalg.lstsq((bend + bend.mT) / 2, g[0], driver="gelsd").solution[None]

        w = newton(value, grad, direction, zero, tol=1e-13)
    else:

        def both(flat: np.ndarray) -> tuple[float, np.ndarray]:
            w = torch.from_numpy(flat)[None].to(task.dtype)
            return float(value(w)), grad(w)[0].double().numpy()

        found = minimize(both, zero[0].numpy(), jac=True, method="L-BFGS-B", options={"ftol": 1e-15, "gtol": 1e-11})
        w = torch.from_numpy(found.x)[None].to(task.dtype)
    return Minimum(w[0], at(w))


def optimisation_error(task: Any, w: Tensor, v: Tensor, lam: Any, p: Tensor, rows: Rows) -> float:
    """E_OPT: Phi at the models minus its minimum (alternative, before Proposition 4.1)."""
    best = minimiser(task, lam, p, rows)
    return objective(task, w, v, lam, p, rows) - objective(task, best.w, best.v, lam, p, rows)


class GradientNorm(NamedTuple):
    training: float  # of F = sum_i p_i L_i, half the squared loss for regression
    plotted: float  # of (1/N) sum |y - Xw|^2, as `kernel`'s figures have it: twice the former


def gradient_norm(task: Any, w: Tensor, p: Tensor, rows: Rows) -> GradientNorm:
    """The size of the global risk's gradient in both conventions."""
    size = float((p @ task.grad(w.expand(len(rows), -1), rows.full(task))).norm())
    return GradientNorm(size, 2 * size)


def moreau_stationarity(task: Any, w: Tensor, p: Tensor, rows: Rows, rho: float) -> float:
    """|grad F_rho(w)|, from one pooled prox: how near w is to a stationary point of a loss with kinks."""
    return float(moreau_gradient(task, w[None], rho, rows.pooled(p)))


def federated_stability(
    fit: Callable[[Rows], Tensor], task: Any, rows: Rows, client: int, fresh: Iterable[tuple[Any, Any]], probe: Batch
) -> Tensor:
    """How far replacing one record of a client moves the loss of its model (alternative, Definition 4.3).

    `fit` maps training rows to all clients' models [m, d]. The k-th of the client's records is replaced by the k-th
    (x, y) of `fresh`, one at a time; each entry of the answer is the largest change of the loss over `probe`, one
    client's batch. The maximum over enough records estimates gamma_i from below.
    """

    def losses(model: Tensor) -> Tensor:
        single = Batch(probe.x[0][:, None], probe.y[0][:, None], torch.ones_like(probe.weight[0])[:, None])
        return task.loss(model.expand(len(single.y), -1), single)

    before = losses(fit(rows)[client])
    changes = []
    for k, (x, y) in enumerate(fresh):
        place = int(rows.start[client]) + k % int(rows.size[client])
        new_x, new_y = rows.x.clone(), rows.y.clone()
        new_x[place], new_y[place] = x, y
        after = losses(fit(Rows(new_x, new_y, rows.start, rows.size))[client])
        changes.append((after - before).abs().max())
    return torch.stack(changes)


class Fairness(NamedTuple):
    quantiles: dict[float, float]  # of the clients' risks
    worst_decile: float  # mean risk of the worst tenth of the clients, at least one
    harmed: float  # share of clients that do worse than alone; nan without that comparison


def fairness(risk: Tensor, alone: Tensor | None = None) -> Fairness:
    """How unevenly the clients fare; clients without a risk (nan) are left out."""
    known = ~risk.isnan() if alone is None else ~(risk.isnan() | alone.isnan())
    values = risk[known].double()
    if len(values) == 0:
        nothing = float("nan")
        return Fairness(dict.fromkeys(LEVELS, nothing), nothing, nothing)
    levels = torch.quantile(values, torch.tensor(LEVELS, dtype=torch.float64)).tolist()
    worst = values.sort(descending=True).values[: -(-len(values) // 10)]
    harmed = float("nan") if alone is None else float((values > alone[known].double()).double().mean())
    return Fairness(dict(zip(LEVELS, levels)), float(worst.mean()), harmed)


class Accessed(NamedTuple):
    """Data points accessed, counted in both ways in use."""

    draws: int  # rows drawn into minibatches
    gradients: int  # per-row gradient evaluations


def accessed(records: Iterable[dict[str, Any]], until: int | None = None) -> Accessed:
    """Sums over a run's records of rounds, up to and including round `until`."""
    taken = [r for r in records if until is None or r["round"] <= until]
    return Accessed(sum(int(r["samples"]) for r in taken), sum(int(r["gradients"]) for r in taken))


def rounds_to(records: Iterable[dict[str, Any]], target: float, column: str = "test_loss") -> int | None:
    """The first evaluated round whose value is at or below the target; None if there is none."""
    return next((int(r["round"]) for r in records if r[column] <= target), None)
