"""Both ends of the path over lambda: one global model for all rows, and each client's own model, with a ridge."""

from __future__ import annotations

import torch
from torch import Tensor

from mooring.core.client_functions import ClientRows
from mooring.core.cohort import HasSummary
from mooring.core.task import HasProx, Task, require
from mooring.partial_pooling.client_fits import fit_ridge
from mooring.partial_pooling.lambda_path import (
    MAX_CLIENTS_PER_BLOCK,
    cached_moments,
    eigen_moments,
    minimize_global_loss,
    ridge_mask,
    solve_path,
)
from mooring.tasks.linear import Linear
from mooring.tasks.proximal import is_dense


def fit_global_model(task: Task, rows: ClientRows, p: Tensor, ridge: float, start: Tensor | None = None) -> Tensor:
    """[d]: one model for all rows, client i's rows weighing p_i; `start` is where iterations begin."""
    if isinstance(task, Linear) or not is_dense(task):
        return next(solve_path(task, rows, p, [torch.inf], ridge=ridge)).w
    return minimize_global_loss(task, rows, p, ridge * ridge_mask(task), start)


def fit_local_models(
    task: Task, rows: ClientRows, ridge: float, free: bool = False, start: Tensor | None = None
) -> Tensor:
    """[m, d]: local models with a ridge, which leaves the intercept out if `free`; a client without rows gets 0.

    `start` [m, d] is where iterations begin.
    """
    out = torch.zeros(len(rows), task.dim, dtype=task.dtype)
    if isinstance(task, Linear) and len(rows) > MAX_CLIENTS_PER_BLOCK and ridge > 0:
        for block in torch.arange(len(rows)).split(MAX_CLIENTS_PER_BLOCK):
            some = rows.select(block)
            h, moment, *means = centered_moments(task, some) if free else cached_moments(task, some)
            fit = torch.linalg.solve(h + ridge * torch.eye(h.shape[-1], dtype=h.dtype), moment)
            out[block] = (append_intercept(fit, *means) if free else fit).to(task.dtype)
        return out
    if isinstance(task, Linear) and free:
        return fit_centered_models(task, rows, ridge)
    if isinstance(task, Linear) and ridge > 0:
        e, u, _, moment = eigen_moments(task, rows, None)
        return (u @ (moment / (e + ridge))[..., None])[..., 0].to(task.dtype)
    if isinstance(task, HasSummary):
        return (
            require(task, HasProx)
            .prox(torch.zeros(1, task.dim, dtype=task.dtype), ridge, rows.full(task))
            .to(task.dtype)
        )
    pull = ridge * ridge_mask(task) if free else torch.tensor(ridge, dtype=task.dtype)
    return fit_ridge(task, rows, out if start is None else start, pull=pull)


def fit_centered_models(task: Linear, rows: ClientRows, ridge: float) -> Tensor:
    """[m, d]: ridge regression on centered rows, then the intercept; one eigendecomposition serves all ridges."""
    name = ("centred", task)
    if name not in rows.cache:
        spread, *others = centered_moments(task, rows)
        rows.cache[name] = (*torch.linalg.eigh(spread), *others)
    values, vectors, cross, mean, target = rows.cache[name]
    inverse = 1 / (values.clamp(min=0) + ridge)
    slopes = (vectors @ (inverse * (vectors.mT @ cross[..., None])[..., 0])[..., None])[..., 0]
    return append_intercept(slopes, mean, target).to(task.dtype)


def centered_moments(task: Linear, rows: ClientRows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Covariances of x [m, d-1, d-1] and with y [m, d-1], means of x [m, d-1] and of y [m]."""
    h, moment = cached_moments(task, rows)
    mean, target = h[:, :-1, -1], moment[:, -1]
    return h[:, :-1, :-1] - mean[..., None] * mean[:, None], moment[:, :-1] - mean * target[:, None], mean, target


def append_intercept(slopes: Tensor, mean: Tensor, target: Tensor) -> Tensor:
    return torch.cat([slopes, (target - (mean * slopes).sum(1))[:, None]], 1)


def has_free_intercept(task: Task) -> bool:
    """Whether local models come with and without a ridge on the intercept."""
    return bool(getattr(task, "intercept", False)) and is_dense(task) and not (isinstance(task, Linear) and task.ridge)
