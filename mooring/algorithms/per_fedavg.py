"""Per-FedAvg: a global model from which one gradient step makes a good personal one.

Fallah, Mokhtari, Ozdaglar. Personalized federated learning with theoretical guarantees: a model-agnostic
meta-learning approach. NeurIPS 2020, Algorithm 1; variants FO and HF of its Section 5.

    u   = w_i - inner_eta grad L_i(w_i; xi)
    w_i <- w_i - eta (I - inner_eta Hessian L_i(w_i; xi'')) grad L_i(u; xi')       `steps` times from w
    w   <- sum_i p_i w_i / sum_i p_i
    v_i = w after `tune_steps` steps of size inner_eta                              what client i deploys

Symbols  w: Server.w    eta: the paper's beta    inner_eta: its alpha    xi, xi', xi'': three independent minibatches
         variant = "first-order" drops the Hessian; "hessian-free" takes its product with g as a difference of gradients
         at w +- h g/|g|
Limits   inner_eta = 0 is FedAvg; on quadratics the Hessian-free product is exact
Departs  h follows the number format (eps^(1/4)) and the size of w's coefficients, so that rounding does not show
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from mooring.algorithms.base import Algorithm
from mooring.algorithms.hyperparameters import (
    auto_eta,
    check_local_work,
    check_ranges,
    count_round,
    init_memory,
    load_optimizer_state,
    resolve_auto,
    schedule,
    store_optimizer_state,
)
from mooring.algorithms.server_optimizers import GlobalServer, GlobalState, check_server_optimizer
from mooring.core.cohort import CohortData, Condensed, Round, StateTree, broadcast_per_client
from mooring.core.local_work import LocalWork
from mooring.core.minibatches import minibatches
from mooring.core.solvers import set_buffers, sgd
from mooring.core.task import Task
from mooring.core.types import Auto, JsonObject, as_number
from mooring.estimates.client_statistics import ClientStatistics


class Client(NamedTuple):
    memory: Tensor  # [C, s], what local training keeps between rounds


class Tuned(NamedTuple):
    v: Tensor  # [C, d]


@dataclass(frozen=True)
class PerFedAvg(LocalWork, GlobalServer, Algorithm[GlobalState, Client, Tensor]):
    inner_eta: Auto = "auto"
    variant: str = "hessian-free"
    tune_steps: int = 1

    paper: ClassVar[str] = "per-fedavg, Algorithm 1"
    reveals: ClassVar[str] = "each client's change of the global model; its personal model stays with it"
    finetunes: ClassVar[bool] = True
    new_client_method: ClassVar[str] = "finetune"

    def __post_init__(self) -> None:
        check_local_work(self)
        check_server_optimizer(self)
        check_ranges(self, inner_eta=(0, None, "auto"), variant=("first-order", "hessian-free"))
        check_ranges(self, tune_steps=(0, None))

    def resolve(self, task: Task, statistics: ClientStatistics) -> PerFedAvg:
        ready = resolve_auto(self, task, statistics)
        inner = auto_eta(task, statistics, ready.batch) if self.inner_eta == "auto" else self.inner_eta
        return replace(ready, inner_eta=inner)

    def init(self, task: Task, w0: Tensor) -> tuple[GlobalState, Client]:
        return self.init_server(w0), Client(init_memory(self, task, w0))

    def client_update(
        self, server: GlobalState, client: Client, task: Task, data: CohortData, round: Round
    ) -> tuple[Client, Tensor]:
        batch, count, eta = schedule(self, data, round, client.memory)
        w = server.w.expand(len(data), -1).clone()
        p = task.gradient_dim
        state = load_optimizer_state(self, task, w, client.memory)
        work: JsonObject = {"batch": batch, "steps": count, "draws": self.draws, "trains_buffers": True}
        slots = [minibatches(task, data, round, slot=slot, **work) for slot in range(self.slots)]
        for inner, outer, *third in zip(*slots):
            rate = broadcast_per_client(eta(inner.k) if callable(eta) else eta, w)
            g, buffers = task.train_grad(w, inner.batch)
            g, buffers = task.train_grad(set_buffers(task, w - as_number(self.inner_eta) * g, buffers), outer.batch)
            if third:
                g = g - as_number(self.inner_eta) * hessian_product(task, w, third[0].batch, g)
            self.rule.step(w[:, :p], g[:, :p], rate, state, inner.active)
            set_buffers(task, w, buffers)
        return Client(count_round(store_optimizer_state(client.memory, state))), w - server.w

    def finetune(self, server: GlobalState, client: StateTree, task: Task, data: CohortData, round: Round) -> StateTree:
        next_round = round._replace(t=round.t + 1)
        work: JsonObject = {"batch": self.batch or None, "steps": self.tune_steps, "draws": self.draws}
        return Tuned(sgd(task, server.w, data, next_round, as_number(self.inner_eta), **work))

    def personal_model(self, server: GlobalState, client: StateTree) -> Tensor:
        return client.v

    @property
    def slots(self) -> int:
        """Minibatches a step takes."""
        return 3 if self.variant == "hessian-free" else 2


def hessian_product(task: Task, w: Tensor, batch: Condensed, g: Tensor) -> Tensor:
    """[C, d]: the Hessian of L_i at w times g, by a central difference along g."""
    length = g.norm(dim=1, keepdim=True)
    unit = g / length.clamp(min=torch.finfo(g.dtype).tiny)
    h = torch.finfo(g.dtype).eps ** 0.25 * (1 + w.square().mean(1, keepdim=True).sqrt())
    return length * (task.grad(w + h * unit, batch) - task.grad(w - h * unit, batch)) / (2 * h)
