"""Client functions for estimates of the variation between clients and for the rules for lambda.

    summarize_rows        sums of a linear task, or a fit with its covariance (`client_summaries.py`)
    differentiate_at      the gradient and the Hessian of L_i at one w: finds the global model
    fit_penalized         penalized fits and the Hessians there: Laplace's approximation
    sum_for_dispersion    two sums of residuals: how much more targets vary than the loss implies

Results of rows in memory and of remote clients agree up to rounding, and hyperparameters that are resolved from them
are rounded further than that (`lambda_rules.LAM_DIGITS`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mooring.core.client_functions import ClientRows, client_function, rows_function
from mooring.core.cohort import Batch, Rows, select
from mooring.core.task import HasDispersion, HasHessian, Task, require
from mooring.estimates.client_summaries import ClientSummary, LinearStats, summarize_clients
from mooring.tasks.proximal import proximal_newton

RELATIVE_GRADIENT_TOLERANCE = 1e-5  # of penalized fits, from which Newton's next step, which squares it, is the last


class PointAndHessian(NamedTuple):
    """Gradients or models of each client, and the Hessians of its loss."""

    point: Tensor  # [C, d], or [C, k, d]
    hessian: Tensor  # [C, d, d], or [C, k, d, d]


class DispersionSums(NamedTuple):
    square: Tensor  # [C]
    scale: Tensor  # [C]


@rows_function
def summarize_rows(task: Task, rows: Rows) -> ClientSummary:
    """Sums of a linear task, or a fit with its covariance."""
    return summarize_clients(task, rows)


def cached_summary(task: Task, rows: ClientRows) -> ClientSummary:
    """The summary of every client, computed once; for some clients of others it is looked up there."""
    name, parent = ("summary", task), getattr(rows, "parent", None)
    if name not in rows.cache:
        known = None if parent is None else parent.cache.get(name)
        rows.cache[name] = summarize_rows(task, rows) if known is None else select(known, rows.position)  # type: ignore[attr-defined]
    return rows.cache[name]


def linear_sums(task: Task, rows: ClientRows) -> LinearStats:
    """The sums of a linear task's clients, computed once."""
    sums = cached_summary(task, rows)
    assert isinstance(sums, LinearStats)
    return sums


@client_function
def differentiate_at(task: Task, batch: Batch, *, w: Tensor) -> PointAndHessian:
    """Gradients and Hessians of L_i at w [d]."""
    at = w.to(task.dtype).expand(len(batch.y), -1)
    return PointAndHessian(task.grad(at, batch), require(task, HasHessian).hessian(at, batch).double())


@client_function
def fit_penalized(task: Task, batch: Batch, lam: Tensor, start: Tensor, *, center: Tensor) -> PointAndHessian:
    """Minimizers of L_i(v) + 1/2 sum_j lam_ikj (v_j - center_j)^2 for each k, and the Hessians of L_i there.

    The first is searched from `start`, each other one from the one before.
    """
    points, hessians, w = [start], [], center.to(task.dtype).expand_as(start)
    for pull in lam.to(task.dtype).unbind(1):
        points.append(proximal_newton(task, pull, w, batch, points[-1], tol=RELATIVE_GRADIENT_TOLERANCE))
        hessians.append(require(task, HasHessian).hessian(points[-1], batch).double())
    return PointAndHessian(torch.stack(points[1:], 1), torch.stack(hessians, 1))


@client_function
def sum_for_dispersion(task: Task, batch: Batch, models: Tensor) -> DispersionSums:
    """Sums of squares and of scales (`HasDispersion`) at models [C, d]."""
    return DispersionSums(*(part.double() for part in require(task, HasDispersion).dispersion_sums(models, batch)))


STATISTICS = tuple(f.name for f in (summarize_rows, differentiate_at, fit_penalized, sum_for_dispersion))
