"""What clients tell once, before the first round, so that settings such as "auto" become numbers.

One model and a few scalars per client: nothing here is a row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mooring.core.cohort import Batch, CohortData

RIDGES = torch.logspace(-4, 2, 25, dtype=torch.float64)  # what "a ridge chosen on validation" chooses from
PROBE_ROWS = 256  # rows of a client that a network's curvature is measured on
FIT_RIDGE = 1e-6  # makes every client's own fit exist, also where its rows do not determine it


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
    alone: Tensor | None  # [m, len(RIDGES)] validation risk of the ridge fits
    validation: Tensor  # validation rows


def gather(task: Any, data: CohortData, w0: Tensor, asks: tuple[str, ...] = ("fit", "alone")) -> Facts:
    """The facts of a cohort; the optional ones only where asked for."""
    blocks = data.train.blocks()
    parts = [_of_block(task, data.select(block), w0, asks) for block in blocks]
    order = torch.argsort(torch.cat(blocks))
    return Facts(*(None if column[0] is None else torch.cat(column)[order] for column in zip(*parts)))


def _of_block(task: Any, data: CohortData, w0: Tensor, asks: tuple[str, ...]) -> Facts:
    rows = data.train.full(task) if task.solve is not None else _probe(data)
    nothing = torch.full((len(data),), torch.nan, dtype=torch.float64)
    if not task.smooth_loss:
        constants = (nothing,) * 5
    else:
        constants = tuple(c.double() for c in task.constants(rows, None if task.solve else w0.expand(len(data), -1)))
    fit = variance = alone = None
    zero = torch.zeros(1, task.dim, dtype=task.dtype)
    if task.prox is not None and task.smooth_loss and "fit" in asks:
        fit = task.prox(zero, FIT_RIDGE, rows)
        # Sandwich variance with gradient covariance = dispersion * Hessian: dispersion * tr(H^-1) / n.
        curvature = torch.linalg.eigvalsh(task.hessian(fit, rows)).clamp(min=FIT_RIDGE)
        variance = constants[4] * (1 / curvature).sum(1) / data.train.size.clamp(min=1)
    if task.prox is not None and "alone" in asks:
        held_out = data.validation.padded()
        alone = torch.stack([task.risk(task.prox(zero, float(r), rows), held_out) for r in RIDGES], 1).double()
    return Facts(data.train.size.double(), data.p, *constants, fit, variance, alone, data.validation.size.double())


def _probe(data: CohortData) -> Batch:
    batch = data.train.padded()
    weight = batch.weight[:, :PROBE_ROWS]
    weight = weight / weight.sum(1, keepdim=True).clamp(min=torch.finfo(weight.dtype).tiny)
    return Batch(batch.x[:, :PROBE_ROWS], batch.y[:, :PROBE_ROWS], weight)
