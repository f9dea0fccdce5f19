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

from mooring.algorithms.base import Algorithm, NoState
from mooring.algorithms.hyperparameters import auto_eta, check_ranges, resolve_auto
from mooring.algorithms.server_optimizers import GlobalServer, GlobalState
from mooring.core.cohort import Condensed, StateTree
from mooring.core.local_training import LocalTraining
from mooring.core.local_work import LocalWork
from mooring.core.task import Task
from mooring.core.types import Auto, as_number
from mooring.estimates.client_statistics import ClientStatistics


class Tuned(NamedTuple):
    v: Tensor  # [C, d]


@dataclass(frozen=True)
class PerFedAvg(LocalWork, GlobalServer, Algorithm[GlobalState, NoState, Tensor]):
    inner_eta: Auto = "auto"
    variant: str = "hessian-free"
    tune_steps: int = 1

    paper: ClassVar[str] = "per-fedavg, Algorithm 1"
    reveals: ClassVar[str] = "each client's change of the global model; its personal model stays with it"
    finetunes: ClassVar[bool] = True
    new_client_method: ClassVar[str] = "finetune"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, inner_eta=(0, None, "auto"), variant=("first-order", "hessian-free"), tune_steps=(0, None))

    def resolve(self, task: Task, statistics: ClientStatistics) -> PerFedAvg:
        ready = resolve_auto(self, task, statistics)
        inner = auto_eta(task, statistics, ready.batch) if self.inner_eta == "auto" else self.inner_eta
        return replace(ready, inner_eta=inner)

    def init(self, task: Task, w0: Tensor) -> tuple[GlobalState, NoState]:
        return self.init_server(w0), NoState()

    def client_update(self, server: GlobalState, client: NoState, local: LocalTraining) -> tuple[NoState, Tensor]:
        w, inner_eta = local.expand(server.w), as_number(self.inner_eta)
        for step in local.steps(slots=self.slots):
            u = step.with_buffers(w - inner_eta * step.grad(w))
            g = step.grad(u, slot=1)
            if self.slots == 3:
                g = g - inner_eta * hessian_product(local.task, w, step.batches[2], g)
            w = step.move(w, g)
        return client, w - server.w

    def finetune(self, server: GlobalState, client: NoState, local: LocalTraining) -> Tuned:
        eta, batch = as_number(self.inner_eta), as_number(self.batch)
        return Tuned(local.next_round.sgd(server.w, eta, steps=self.tune_steps, batch=batch, draws=self.draws))

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
