"""Global: one model for all, from all rows in one place. The pooled referee.

effect, Eq. 2 (GlobalTrain); the exact FedAvg of alternative, Eq. 1.2.

    w = arg min_w  sum_i p_i L_i(w)

Symbols  w: Server.w
Limits   FedProx as lam -> infinity; with p = size, empirical risk minimisation on the pooled rows
Departs  tasks without an exact solver are trained by SGD on the pooled rows, `steps` a round
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mooring.algorithms.base import Algorithm, Setting
from mooring.algorithms.settings import check, local_sgd, settled
from mooring.core.cohort import CohortData, Rows


class Server(NamedTuple):
    w: Tensor  # [d]


class Client(NamedTuple):
    pass


@dataclass(frozen=True)
class Global(Algorithm):
    inner: str = "auto"  # "exact" where the task has a solver, "sgd" elsewhere
    eta: Setting = "auto"
    decay: float = 0.0
    steps: int = 100
    epochs: int = 0  # passes over the data instead of steps, when > 0
    batch: Setting = "auto"  # 0: all rows

    paper: ClassVar[str] = "effect, Eq. 2"
    reveals: ClassVar[str] = "everything: all rows are pooled; a referee for simulations"
    pooled: ClassVar[bool] = True
    full_participation: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check(self, inner=("auto", "exact", "sgd"), eta=(0, None, "auto"), decay=(0, None))
        check(self, steps=(1, None), epochs=(0, None), batch=(0, None, "auto"))

    @property
    def one_shot(self) -> bool:
        return self.inner == "exact"

    def settle(self, task, facts):
        inner = ("exact" if task.solve else "sgd") if self.inner == "auto" else self.inner
        return settled(replace(self, inner=inner), task, facts)

    def start(self, task, w0):
        return Server(w0), Client()

    def visit(self, server, client, task, data, round):
        if self.inner == "exact":
            w = task.solve(data.train.pooled(data.p))[0]
        else:
            w = local_sgd(self, task, server.w, in_one_place(data), round)[0]
        return client, (w - server.w).expand(len(data), -1)

    def merge(self, server, mean, round):
        return Server(server.w + mean)

    def deploy(self, server, client):
        return server.w


def in_one_place(data: CohortData) -> CohortData:
    """The whole federation as a cohort of one, for SGD on the pooled rows (weights p = size)."""

    def merged(rows: Rows) -> Rows:
        batch = rows.pooled(rows.size.double())
        return Rows(batch.x[0], batch.y[0], torch.zeros(1, dtype=torch.long), rows.size.sum()[None])

    one = torch.zeros(1, dtype=torch.long)
    return CohortData(np.zeros(1, np.uint64), one, torch.ones(1), merged(data.train), merged(data.validation))
