"""FedProx, one stage: personal models moored to a common one, both trained in one loop with warm starts.

003, Algorithm 1, Eqs. 8-11.

    v_i <- K steps on  h_i(v) = L_i(v) + lam/2 |v - w|^2   from the last v_i      (exact: v_i = prox_i(w))
    g_i  = lam (w - v_i)
    w   <- w - gamma sum_i p_i g_i                          over the cohort

    lam per client or per coefficient:  w <- w - gamma (sum_i p_i lam_i)^-1 sum_i p_i lam_i (w - v_i)

Symbols  w: Server.w    v_i: Client.v    K: steps    gamma: server step (with lam per client, relative to plain
         averaging)
Limits   lam = 0 is Local; lam -> infinity is Global; gamma = 1/lam averages the personal models; exact prox is
         gradient descent on sum_i p_i F_i
Departs  the printed 1/m is p_i; w_{T+1} is returned, not w_T; gamma = "auto" is 1/L_g = 1/lam + 1/L with exact
         inner solves, half of it otherwise
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from mooring.algorithms.base import Algorithm
from mooring.algorithms.settings import check, local_sgd, read_lam, settled
from mooring.core.moor import Moor, is_uniform, stiffness
from mooring.core.solvers import descend


class Server(NamedTuple):
    w: Tensor  # [d]


class Client(NamedTuple):
    v: Tensor  # [C, d]


class Message(NamedTuple):
    pull: Tensor  # [C, d]  lam (w - v_i)
    lam: Tensor | None  # [C, 1] or [C, d]; None when one number serves all


@dataclass(frozen=True)
class FedProxOneStage(Algorithm):
    lam: float | str | Moor = "auto"
    gamma: float | str = "auto"
    inner: str = "auto"  # "exact", "descent" or "sgd"; auto: exact where the task has a prox, sgd elsewhere
    eta: float | str = "auto"
    decay: float = 0.0
    steps: int = 10
    epochs: int = 0  # passes over the data instead of steps, when > 0
    batch: int | str = "auto"  # 0: all rows
    tol: float = 1e-8
    warm: bool = True  # start from the client's last model; False: from the common one
    aggregation: str = "average"  # "elastic": unbiased under partial participation

    paper: ClassVar[str] = "003, Algorithm 1"
    reveals: ClassVar[str] = "each client's personal model: w - message / lam; use secure aggregation"

    def __post_init__(self) -> None:
        read_lam(self, ("auto",))
        check(self, gamma=(0, None, "auto"), inner=("auto", "exact", "descent", "sgd"), eta=(0, None, "auto"))
        check(self, decay=(0, None), steps=(1, None), epochs=(0, None), batch=(0, None, "auto"), tol=(0, None))
        check(self, aggregation=("average", "elastic"))

    def settle(self, task, facts):
        inner = ("exact" if task.prox else "sgd") if self.inner == "auto" else self.inner
        ready = settled(replace(self, inner=inner), task, facts)
        return ready if ready.gamma != "auto" else replace(ready, gamma=auto_gamma(ready, task, facts))

    def start(self, task, w0):
        return Server(w0), Client(w0)

    def visit(self, server, client, task, data, round):
        w = server.w.expand(len(data), -1)
        lam = stiffness(self.lam, data.index, w)
        v = self.moored(client.v if self.warm else w, w, lam, task, data, round)
        return Client(v), Message(lam * (w - v), None if is_uniform(self.lam) else lam)

    def moored(self, v, w, lam, task, data, round):
        """Each client's model after its inner loop from v, moored to w."""
        rows = data.train.full(task) if self.inner != "sgd" else None
        if self.inner == "exact":
            return task.prox(w, lam, rows, v)
        if self.inner == "descent":
            return descend(task, v, rows, lam, w, self.eta, tol=self.tol, most=self.steps)
        return local_sgd(self, task, v, data, round, pull=(lam, w))

    def merge(self, server, mean, round):
        step = mean.pull
        if mean.lam is not None:
            step = step / mean.lam.clamp(min=torch.finfo(step.dtype).tiny)
        if self.aggregation == "elastic":
            step = step * (round.clients / round.cohort * round.weight)
        return Server(server.w - self.gamma * step)

    def deploy(self, server, client):
        return client.v


def auto_gamma(algorithm, task, facts) -> float:
    """1/L_g with exact inner solves, half of that (003, Corollary 1) otherwise; 1/lam where L is unknown."""
    lam = algorithm.lam
    smooth = float(facts.smooth.max())
    known = smooth > 0 and task.smooth_loss and task.solve is not None
    share = 1.0 if algorithm.inner == "exact" else 0.5
    if isinstance(lam, Moor):
        least = min(lam.per_client or (1.0,)) * min(lam.per_coefficient or (1.0,))
        return share * (1 + least / smooth) if known else 1.0
    if lam == 0:
        return 0.0
    return share * (1 / lam + 1 / smooth) if known else 1 / lam
