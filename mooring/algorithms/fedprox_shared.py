"""FedProx, shared model: clients return a proximal step from the common model, the server averages.

001, Eq. 1.3; 004, Eq. 6 (there eta = 1/lam).

    w_i ~ arg min_v  L_i(v) + lam/2 |v - w|^2
    w  <- sum_i p_i w_i                                over the cohort

Symbols  w: Server.w    lam: the papers' 1/eta    eta: the inner step size
Limits   lam -> 0 with SGD is FedAvg; lam -> infinity stands still; the fixed point minimises sum_i p_i F_i, F_i the
         Moreau envelope of L_i, not sum_i p_i L_i
Departs  inner = "descent" stops at a gradient certificate |grad| <= tol, at most `steps` steps
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

from torch import Tensor

from mooring.algorithms.base import Algorithm
from mooring.algorithms.settings import check, local_sgd, read_lam, settled
from mooring.core.moor import stiffness
from mooring.core.solvers import descend


class Server(NamedTuple):
    w: Tensor  # [d]


class Client(NamedTuple):
    pass


@dataclass(frozen=True)
class FedProxShared(Algorithm):
    lam: float | str = "auto"
    inner: str = "auto"  # "exact", "descent" or "sgd"; auto: exact where the task has a prox, sgd elsewhere
    eta: float | str = "auto"
    decay: float = 0.0
    steps: int = 10
    epochs: int = 0  # passes over the data instead of steps, when > 0
    batch: int | str = "auto"  # 0: all rows
    tol: float = 1e-6

    paper: ClassVar[str] = "001, Eq. 1.3; 004, Eq. 6"
    reveals: ClassVar[str] = "each client's proximal step from the common model"

    def __post_init__(self) -> None:
        read_lam(self, ("auto",))
        check(self, inner=("auto", "exact", "descent", "sgd"), eta=(0, None, "auto"), decay=(0, None))
        check(self, steps=(1, None), epochs=(0, None), batch=(0, None, "auto"), tol=(0, None))

    def settle(self, task, facts):
        inner = ("exact" if task.prox else "sgd") if self.inner == "auto" else self.inner
        return settled(replace(self, inner=inner), task, facts)

    def start(self, task, w0):
        return Server(w0), Client()

    def visit(self, server, client, task, data, round):
        w = server.w.expand(len(data), -1)
        lam = stiffness(self.lam, data.index, w)
        if self.inner == "exact":
            v = task.prox(w, lam, data.train.full(task))
        elif self.inner == "descent":
            v = descend(task, w, data.train.full(task), lam, w, self.eta, tol=self.tol, most=self.steps)
        else:
            v = local_sgd(self, task, w, data, round, pull=(lam, w))
        return client, v - w

    def merge(self, server, mean, round):
        return Server(server.w + mean)

    def deploy(self, server, client):
        return server.w
