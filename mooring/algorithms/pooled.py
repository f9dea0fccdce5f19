"""Pooled: one model for all clients, fitted to all rows in one place; a baseline.

effect, Eq. 2 (GlobalTrain); the exact FedAvg of alternative, Eq. 1.2.

    w = arg min_w  sum_i p_i L_i(w)

Symbols  w: Server.w
Limits   FedProx as lam -> infinity; with p = size, empirical risk minimisation on the pooled rows
Departs  tasks without an exact solver are trained by SGD, `steps` a round: with all rows a row of client i weighs
         p_i/n_i, into a batch it is drawn with that probability (in shuffled passes, for p = size exactly once a pass)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mooring.algorithms.base import Algorithm, NoState
from mooring.algorithms.hyperparameters import check_ranges, resolve_auto, takes_optimizer_steps
from mooring.core.cohort import Batch, CohortData, Condensed, HasSummary, Round, Rows
from mooring.core.local_training import LocalTraining
from mooring.core.local_work import LocalWork
from mooring.core.seeds import uniforms
from mooring.core.task import HasSolve, Task, require
from mooring.estimates.client_statistics import ClientStatistics

EQUAL_WEIGHT_TOLERANCE = 1e-9  # rows whose weights differ by no more than this share of them count as equal: p = size


class Server(NamedTuple):
    w: Tensor  # [d]


@dataclass(frozen=True)
class Pooled(LocalWork, Algorithm[Server, NoState, Tensor]):
    inner: str = "auto"  # "exact" where the task has a solver, "sgd" elsewhere
    steps: int = 100

    paper: ClassVar[str] = "effect, Eq. 2"
    group: ClassVar[str] = "baseline"
    reveals: ClassVar[str] = "everything: all rows are pooled; a baseline for simulations"
    pooled: ClassVar[bool] = True
    full_participation: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, inner=("auto", "exact", "sgd"))

    @property
    def one_shot(self) -> bool:
        return self.inner == "exact"

    def resolve(self, task: Task, statistics: ClientStatistics) -> Pooled:
        steps = takes_optimizer_steps(self) or not isinstance(task, HasSolve)
        inner = ("sgd" if steps else "exact") if self.inner == "auto" else self.inner
        return resolve_auto(replace(self, inner=inner), task, statistics)

    def init(self, task: Task, w0: Tensor) -> tuple[Server, NoState]:
        return Server(w0), NoState()

    def client_update(self, server: Server, client: NoState, local: LocalTraining) -> tuple[NoState, Tensor]:
        if self.inner == "exact":
            w = require(local.task, HasSolve).solve(local.data.train.pooled(local.data.p))[0]
        else:
            w = local.train(server.w, data=pool_clients(local.data, local.round))[0]
        return client, local.expand(w - server.w)

    def server_update(self, server: Server, mean: Tensor, round: Round) -> Server:
        return Server(server.w + mean)

    def personal_model(self, server: Server, client: NoState) -> Tensor:
        return server.w


@dataclass(frozen=True, eq=False)
class PooledRows(Rows):
    """The rows of all clients as one client's, with unequal weights."""

    weight: Tensor | None = None  # [N], p_i/n_i, sums to 1
    shift: float = 0.0  # in [0, 1)

    def padded(self) -> Batch:
        assert self.weight is not None
        return Batch(self.x[None], self.y[None], self.weight[None].to(self.weight_dtype))

    def full(self, task: object) -> Condensed:
        return task.condense(self.padded()) if isinstance(task, HasSummary) else self.padded()

    def take(self, index: Tensor, valid: Tensor) -> Batch:
        """Rows by systematic sampling: place k of N is the row at (k + shift)/N of the cumulative weights.

        Over shifts, a row has N p_i/n_i places on average, and never fewer or more than that rounded down or up.
        """
        assert self.weight is not None
        cumulative = torch.cumsum(self.weight, 0)
        position = torch.searchsorted(cumulative, (index + self.shift) / len(cumulative) * cumulative[-1], right=True)
        return super().take(position.clamp(max=len(cumulative) - 1), valid)


def pool_clients(data: CohortData, round: Round) -> CohortData:
    """The whole federation as a cohort of one, for SGD on sum_i p_i L_i; every round has its own `Pool.shift`."""
    start, size = torch.zeros(1, dtype=torch.long), data.train.size.sum()[None]
    batch = data.train.pooled(data.p)
    rows = Rows(batch.x[0], batch.y[0], start, size)
    weight = torch.repeat_interleave(data.p.double() / data.train.size.clamp(min=1), data.train.size)
    weight = weight / weight.sum()
    if float((weight * size - 1).abs().max()) > EQUAL_WEIGHT_TOLERANCE:
        shift = float(uniforms(round.seed, "algorithm", round.t)[0])
        rows = PooledRows(rows.x, rows.y, start, size, weight=weight, shift=shift)
    return CohortData(np.zeros(1, np.uint64), start, torch.ones(1), rows, rows)
