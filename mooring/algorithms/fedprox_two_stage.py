"""FedProx, two stages: federated rounds find the common model, then every client settles its own near it.

000, Algorithms 2 and 3, with SoftLocalSGD.

    v_i <- project_W( v_i - eta_k ( grad L_B(v_i) + lam (v_i - w) ) )      K_t times, cohort only, from the last v_i
    w   <- project_W( w - gamma_t (m / cohort) sum_i p_i lam (w - v_i) )   over the cohort
    last: K_T more steps at every client, from its v_i towards the final w

    schedule = "inverse"   eta_k = 1/((mu + lam)(k + 1)),  gamma_t = 2 (mu + lam)/(lam mu (t + 1)),
                           K_t + 1 = (4t + 20) (max(lam, L)/mu)^2        (000, Lemma B.2, Theorems 4.4 and 4.5)

Symbols  w: Server.w    v_i: Client.v    K_t: steps    K_T: final_steps    W: the ball of `radius` around 0    L: smooth
Limits   lam = 0 is Local; gamma = 1/lam with all clients and inner = "exact" is shared-model FedProx
Departs  sampled clients train and the others wait (the listings say the reverse); w is projected too, for early steps
         overshoot. gamma = "auto" is 1/lam; lam per client or coefficient merges as in one-stage FedProx. K_t is Lemma
         B.2's for losses up to L D^2/2, in which D cancels. radius = "auto" holds twice the farthest local fit.
         Minibatches are shuffled passes. inner = "exact" solves without the bound
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, NamedTuple

from torch import Tensor

from mooring.algorithms.base import Algorithm, Setting
from mooring.algorithms.fedprox_one_stage import Message, mean_pull
from mooring.algorithms.settings import check, choose_inner, read_lam, settled
from mooring.algorithms.settings import schedule as local_work
from mooring.core.errors import RequestError
from mooring.core.moor import Moor, is_uniform, stiffness
from mooring.core.solvers import Ball, project, sgd
from mooring.theory.from_facts import curvature
from mooring.theory.two_stage_rate import inner_steps, local_step, server_step

FINAL_STAYS = 10  # final_steps = "auto": as much work as so many stays
FINAL_SLOT = 1  # the last stage draws apart from the round it follows
DIAMETER = 1.0  # any: it cancels in the number of steps


class Server(NamedTuple):
    w: Tensor  # [d]


class Client(NamedTuple):
    v: Tensor  # [C, d]


@dataclass(frozen=True)
class FedProxTwoStage(Algorithm):
    lam: Setting = "auto"
    schedule: str = "constant"  # of step sizes and work; "inverse" is the theorems'
    inner: str = "sgd"  # or "exact"
    eta: Setting = "auto"
    decay: float = 0.0
    gamma: Setting = "auto"
    steps: int = 10
    epochs: int = 0  # passes over the data instead of steps, when > 0
    final_steps: Setting = "auto"
    batch: Setting = "auto"  # 0: all rows
    radius: Setting = "auto"  # 0: W is all of space
    aggregation: str = "elastic"  # or "average": weights that sum to 1 over the cohort
    mu: Setting = "auto"  # used by schedule = "inverse"
    smooth: Setting = "auto"

    paper: ClassVar[str] = "000, Algorithms 2 and 3"
    reveals: ClassVar[str] = "each client's personal model: w + message; use secure aggregation"
    last_stage: ClassVar[bool] = True
    newcomer: ClassVar[str] = "prox"

    def __post_init__(self) -> None:
        read_lam(self, ("auto",))
        check(self, schedule=("constant", "inverse"), inner=("sgd", "exact"), eta=(0, None, "auto"), decay=(0, None))
        check(self, gamma=(0, None, "auto"), steps=(1, None), epochs=(0, None), final_steps=(0, None, "auto"))
        check(self, batch=(0, None, "auto"), radius=(0, None, "auto"), aggregation=("elastic", "average"))
        check(self, mu=(0, None, "auto"), smooth=(0, None, "auto"))
        if self.schedule == "inverse" and (isinstance(self.lam, Moor) or self.lam == 0):
            raise RequestError(f"FedProxTwoStage: schedule = 'inverse' needs lam as one number > 0, got {self.lam}.")

    @property
    def asks(self):
        return ("fit",) if "auto" in (self.lam, self.radius) else ()

    def settle(self, task, facts):
        choose_inner(self, task)
        ready = settled(self, task, facts)
        radius, mu, smooth = self.radius, self.mu, self.smooth
        if radius == "auto":
            radius = 0.0 if facts.fit is None else 2 * float(facts.fit.norm(dim=1).max())
        if self.schedule == "inverse" and "auto" in (mu, smooth):
            known = curvature("FedProxTwoStage: schedule = 'inverse'", task, facts)
            mu, smooth = known.mu if mu == "auto" else mu, known.smooth if smooth == "auto" else smooth
        gamma = self.gamma
        if gamma == "auto":
            gamma = 1.0 if not is_uniform(ready.lam) else 1 / ready.lam if ready.lam else 0.0
        return replace(
            ready,
            radius=radius,
            gamma=gamma,
            final_steps=FINAL_STAYS * self.steps if self.final_steps == "auto" else self.final_steps,
            mu=0.0 if mu == "auto" else mu,
            smooth=0.0 if smooth == "auto" else smooth,
        )

    def start(self, task, w0):
        return Server(w0), Client(w0)

    def visit(self, server, client, task, data, round):
        w = server.w.expand(len(data), -1)
        lam = stiffness(self.lam, data.index, w)
        v = self.soft_local_sgd(client.v, w, lam, task, data, round, self.work(data, round))
        return Client(v), Message(lam * (w - v), None if is_uniform(self.lam) else lam)

    def soft_local_sgd(self, v, w, lam, task, data, round, steps, slot=0):
        """Projected steps from v, pulled towards w; or the exact prox."""
        if self.inner == "exact":
            return task.prox(w, lam, data.train.full(task), v)
        batch, _, eta = local_work(self, data, round)
        if self.schedule == "inverse":
            eta = partial(local_step, mu=self.mu, lam=self.lam)
        return sgd(task, v, data, round, eta, batch=batch, steps=steps, pull=(lam, w), region=self.region, slot=slot)

    def work(self, data, round):
        """K_t."""
        if self.schedule == "constant":
            return local_work(self, data, round)[1]
        most = self.smooth * DIAMETER**2 / 2  # how far losses in W lie above their minimum
        return inner_steps(round.t - 1, self.mu, self.smooth, self.lam, most, DIAMETER)

    @property
    def region(self):
        return Ball(self.radius) if self.radius else None

    def merge(self, server, mean, round):
        gamma = server_step(round.t - 1, self.mu, self.lam) if self.schedule == "inverse" else self.gamma
        return Server(project(server.w - gamma * mean_pull(mean, round, self.aggregation), self.region))

    def finish(self, server, client, task, data, round):
        w = server.w.expand(len(data), -1)
        lam = stiffness(self.lam, data.index, w)
        return Client(self.soft_local_sgd(client.v, w, lam, task, data, round, self.final_steps, FINAL_SLOT))

    def deploy(self, server, client):
        return client.v
