"""What clients tell once, before the first round, so that settings such as "auto" become numbers.

Two models and a few scalars per client: nothing here is a row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mooring.core.cohort import Batch, CohortData
from mooring.tasks.proximal import DENSE

RIDGES = torch.logspace(-4, 2, 25, dtype=torch.float64)  # what "a ridge chosen on validation" chooses from
PROBE_ROWS = 256  # rows of a client that a network's curvature is measured on
FIT_RIDGE = 1e-6  # makes every client's own fit exist, also where its rows do not determine it
SHRINKAGE = 0.1  # ridge of the shrunk fits, as a share of the mean curvature: mutes what a client's rows leave open


class Facts(NamedTuple):
    """Stacked over all clients, [m] unless said otherwise. What a task cannot say is nan or None."""

    n: Tensor  # training rows
    p: Tensor  # client weights
    smooth: Tensor
    convex: Tensor
    noise: Tensor
    trace: Tensor
    dispersion: Tensor
    fit: Tensor | None  # [m, d] each client's own fit
    variance: Tensor | None  # the fit's sampling variance, summed over coefficients
    shrunk: Tensor | None  # [m, d] each client's fit with a ridge
    shrunk_variance: Tensor | None  # its sampling variance, summed over coefficients
    freedom: Tensor | None  # its variance over clients, summed over coefficients, where their truths vary by 1 in each
    alone: Tensor | None  # [m, len(RIDGES)] validation risk of the ridge fits
    validation: Tensor  # validation rows


def gather(task: Any, data: CohortData, w0: Tensor, asks: tuple[str, ...] = ("fit", "alone")) -> Facts:
    """The facts of a cohort; the optional ones only where asked for."""
    return data.each(lambda block, _: _of_block(task, block, w0, asks))


def _of_block(task: Any, data: CohortData, w0: Tensor, asks: tuple[str, ...]) -> Facts:
    rows = data.train.full(task) if task.solve is not None else _probe(data)
    dear = task.solve is None or task.dim > DENSE  # no fits and no Hessians of such tasks only to settle a number
    constants = tuple(c.double() for c in task.constants(rows, w0.expand(len(data), -1) if dear else None))
    fit = variance = shrunk = shrunk_variance = freedom = alone = None
    if not dear and task.smooth_loss and "fit" in asks:
        zero = torch.zeros(1, task.dim, dtype=task.dtype)
        per_row = constants[4] / data.train.size.clamp(min=1)
        fit = task.prox(zero, FIT_RIDGE, rows)
        # Sandwich variance with gradient covariance = dispersion * Hessian: dispersion * tr(H^-1) / n.
        curvature = torch.linalg.eigvalsh(task.hessian(fit, rows)).clamp(min=FIT_RIDGE)
        variance = per_row * (1 / curvature).sum(1)
        ridge = (SHRINKAGE * constants[3] / task.dim)[:, None]
        shrunk = task.prox(zero, ridge.to(task.dtype), rows)
        curvature = (torch.linalg.eigvalsh(task.hessian(shrunk, rows)).double() - task.ridge).clamp(min=0)
        ridge = ridge + task.ridge
        passed = curvature / (curvature + ridge)  # the share of the truth that reaches the fit, by direction
        freedom = (passed**2).sum(1)
        # The same sandwich with a ridge r: dispersion * tr((H + r)^-1 H (H + r)^-1) / n.
        shrunk_variance = per_row * (passed / (curvature + ridge)).sum(1)
    if task.prox is not None and task.dim <= DENSE and "alone" in asks:
        alone = _ridge_path(task, rows, data.validation.padded())
    sizes = data.train.size.double(), data.validation.size.double()
    return Facts(sizes[0], data.p, *constants, fit, variance, shrunk, shrunk_variance, freedom, alone, sizes[1])


def _ridge_path(task: Any, rows: Any, held_out: Batch) -> Tensor:
    """[C, len(RIDGES)]: validation risk of each ridge fit, from stiff to loose, each from the one before."""
    zero = torch.zeros(1, task.dim, dtype=task.dtype)
    risk = torch.full((len(held_out.y), len(RIDGES)), torch.inf, dtype=torch.float64)
    fit = None
    for k in range(len(RIDGES) - 1, -1, -1):
        fit = task.prox(zero, float(RIDGES[k]), rows, fit)
        risk[:, k] = task.risk(fit, held_out)
    return risk


def _probe(data: CohortData) -> Batch:
    batch = data.train.padded()
    weight = batch.weight[:, :PROBE_ROWS]
    weight = weight / weight.sum(1, keepdim=True).clamp(min=torch.finfo(weight.dtype).tiny)
    return Batch(batch.x[:, :PROBE_ROWS], batch.y[:, :PROBE_ROWS], weight)
