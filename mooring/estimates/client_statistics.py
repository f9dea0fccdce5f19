"""Client statistics: sums that clients send before the first round to resolve hyperparameters such as "auto".

    always         sizes, weights, and the constants that step sizes need: a few scalars per client
    "fit"          each client's own fit
    "spread"       variation between clients, which lam = "auto" needs (`task_random_effects.py`)
    "rules"        that, and the summaries for every other rule for lam (see `client_summaries.py`)
    "alone"        validation risk of each client's own fits, by ridge
    ALL_RESOLVED   nothing is left to resolve: the constants of a network, which are slow to measure, are nan

An algorithm's `required_statistics` names what it needs; nothing else is computed. Statistics that a task does not have
(networks, nonsmooth losses, very many parameters) are None, and hyperparameters are resolved from the scalars.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mooring.core.client_functions import ClientRows
from mooring.core.cohort import Batch, CohortData, Condensed, chunk_size
from mooring.core.task import Constants, HasProx, HasSolve, Task, require
from mooring.estimates.federation_estimates import FederationEstimates, estimate_federation
from mooring.tasks.proximal import MAX_DENSE_PARAMETERS

RIDGE_GRID = torch.logspace(-4, 2, 25, dtype=torch.float64)  # the ridges that validation rows choose from
MAX_PROBE_ROWS = 256  # rows of a client that a network's curvature is measured on
ALL_RESOLVED = "resolved"  # sent if no hyperparameter is a word
LOCAL_FIT_RIDGE = 1e-6  # makes every client's own fit exist, also where its rows do not determine it


class ClientStatistics(NamedTuple):
    """Stacked over all clients, [m] unless stated otherwise. Statistics that a task does not have are nan or None."""

    n: Tensor  # training rows
    p: Tensor  # client weights
    smooth: Tensor
    convex: Tensor
    noise: Tensor
    trace: Tensor
    dispersion: Tensor
    largest: Tensor
    fit: Tensor | None  # [m, d] each client's own fit
    alone: Tensor | None  # [m, len(RIDGES)] validation risk of the ridge fits
    validation: Tensor  # validation rows
    federation: (
        FederationEstimates | None
    )  # estimates from all clients: their variation and, for "rules", every rule's lam


def collect_statistics(task: Task, data: CohortData, w0: Tensor, required: tuple[str, ...] = ()) -> ClientStatistics:
    """Return the statistics of a cohort whose rows are in memory; optional ones only if required."""
    return add_federation_estimates(compute_statistics(task, data, w0, required), task, data.train, required)


def compute_statistics(task: Task, data: CohortData, w0: Tensor, required: tuple[str, ...] = ()) -> ClientStatistics:
    """Return each client's own statistics, stacked."""
    return data.each(
        lambda block, _: _of_block(task, block, w0, required), None if isinstance(task, HasSolve) else chunk_size(task)
    )


def add_federation_estimates(
    statistics: ClientStatistics, task: Task, rows: ClientRows, required: tuple[str, ...]
) -> ClientStatistics:
    """Return the statistics with the federation's estimates, if these are required."""
    if not {"spread", "rules"} & set(required):
        return statistics
    return statistics._replace(federation=estimate_federation(task, rows, statistics.p, everything="rules" in required))


def _of_block(task: Task, data: CohortData, w0: Tensor, required: tuple[str, ...]) -> ClientStatistics:
    rows = data.train.full(task) if isinstance(task, HasSolve) else _probe(data)
    is_expensive = (
        not isinstance(task, HasSolve) or task.dim > MAX_DENSE_PARAMETERS
    )  # such tasks are not fitted only to resolve a number
    if not isinstance(task, HasSolve) and ALL_RESOLVED in required:
        constants = Constants(*(torch.full((len(data),), torch.nan, dtype=torch.float64) for _ in Constants._fields))
    else:
        constants = Constants(
            *(c.double() for c in task.constants(rows, w0.expand(len(data), -1) if is_expensive else None))
        )
    fit = alone = None
    if not is_expensive and task.smooth_loss and "fit" in required:
        fit = require(task, HasProx).prox(torch.zeros(1, task.dim, dtype=task.dtype), LOCAL_FIT_RIDGE, rows)
    if isinstance(task, HasProx) and task.dim <= MAX_DENSE_PARAMETERS and "alone" in required:
        alone = _ridge_path(task, rows, data.validation.padded())
    sizes = data.train.size.double(), data.validation.size.double()
    return ClientStatistics(sizes[0], data.p, *constants, fit, alone, sizes[1], None)


def _ridge_path(task: Task, rows: Condensed, held_out: Batch) -> Tensor:
    """Return [C, len(RIDGE_GRID)]: validation risk of each ridge fit, from large to small ridges, warm started."""
    zero = torch.zeros(1, task.dim, dtype=task.dtype)
    risk = torch.full((len(held_out.y), len(RIDGE_GRID)), torch.inf, dtype=torch.float64)
    fit = None
    for k in range(len(RIDGE_GRID) - 1, -1, -1):
        fit = require(task, HasProx).prox(zero, float(RIDGE_GRID[k]), rows, fit)
        risk[:, k] = task.risk(fit, held_out)
    return risk


def _probe(data: CohortData) -> Batch:
    batch = data.train.padded()
    weight = batch.weight[:, :MAX_PROBE_ROWS]
    weight = weight / weight.sum(1, keepdim=True).clamp(min=torch.finfo(weight.dtype).tiny)
    return Batch(batch.x[:, :MAX_PROBE_ROWS], batch.y[:, :MAX_PROBE_ROWS], weight)
