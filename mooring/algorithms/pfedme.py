"""pFedMe: personal models as proximal points, the global model by local steps on the Moreau envelopes.

Dinh, Tran, Nguyen. Personalized federated learning with Moreau envelopes. NeurIPS 2020, Algorithm 1.

    v_i ~ arg min_v  L_i(v; xi) + lam/2 |v - w_i|^2            `inner_steps` gradient steps on one minibatch (fewer
                                                               once |grad| <= tol), or exact
    w_i <- w_i - eta lam (w_i - v_i)                            both `steps` times, w_i from the global w
    w   <- (1 - server_step) w + server_step sum_i p_i w_i / sum_i p_i

Symbols  w: Server.w    v_i: Client.v, the paper's theta_i    w_i: during an update    eta: the paper's    steps: R
         inner_steps: K    server_step: beta
Limits   lam -> infinity is FedAvg with step size eta; lam -> 0 is Local for the v_i, and w stands still; steps = 1 with
         full batches and exact inner solves is one-stage FedProx with gamma = eta
Departs  the inner loop starts from the client's last v_i; only the cohort works, the paper lets all work and averages
         some; eta = "auto" is 1/(lam steps), a full proximal step a round. An optimizer other than plain SGD takes the
         inner steps, at inner_eta, its state lasting for a local update or kept; steps of w_i are as above
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

from torch import Tensor

from mooring.algorithms.base import Algorithm
from mooring.algorithms.hyperparameters import (
    auto_eta,
    check_ranges,
    choose_inner_solver,
    largest_lam,
    parse_lam_field,
    resolve_auto,
    server_step_factor,
)
from mooring.algorithms.server_optimizers import SERVER_FIELDS, GlobalServer, GlobalState, apply_change
from mooring.core.cohort import Round
from mooring.core.local_training import LocalTraining
from mooring.core.local_work import LocalWork
from mooring.core.penalty import PenaltyOrRule
from mooring.core.task import Task
from mooring.core.types import Auto, as_number
from mooring.estimates.client_statistics import ClientStatistics


class Client(NamedTuple):
    v: Tensor  # [C, d]


@dataclass(frozen=True)
class PFedMe(LocalWork, GlobalServer, Algorithm[GlobalState, Client, Tensor]):
    lam: PenaltyOrRule = "auto"
    inner: str = "descent"  # or "exact", where the task has a prox
    inner_eta: Auto = "auto"
    inner_steps: int = 5
    tol: float = 0.0  # of inner = "descent": the paper's nu; 0: all inner steps are taken and nothing is promised
    server_step: float = 1.0
    server_decay: float = 0.0  # the server's step is divided by 1 + server_decay (t - 1)

    paper: ClassVar[str] = "pfedme, Algorithm 1"
    reveals: ClassVar[str] = (
        "each client's change of the global model, from which its personal model follows if steps = 1"
    )
    per_client_fields: ClassVar[tuple[str, ...]] = ("lam", "eta", "inner_eta")
    server_fields: ClassVar[tuple[str, ...]] = ("server_step", "server_decay", *SERVER_FIELDS)
    new_client_method: ClassVar[str] = "prox"

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_lam_field(self, ("auto",))
        check_ranges(self, inner=("descent", "exact"), inner_eta=(0, None, "auto"), inner_steps=(1, None))
        check_ranges(self, server_step=(0, None), server_decay=(0, None), tol=(0, None))

    def resolve(self, task: Task, statistics: ClientStatistics) -> PFedMe:
        choose_inner_solver(self, task, "descent")
        ready = resolve_auto(self, task, statistics)
        if self.eta == "auto":
            pull = ready.steps * largest_lam(ready.lam)
            ready = replace(ready, eta=1 / pull if pull else 0.0)
        if self.inner_eta == "auto":
            ready = replace(ready, inner_eta=auto_eta(task, statistics, ready.batch, ready.lam))
        return ready

    def init(self, task: Task, w0: Tensor) -> tuple[GlobalState, Client]:
        return self.init_server(w0), Client(w0)

    def client_update(self, server: GlobalState, client: Client, local: LocalTraining) -> tuple[Client, Tensor]:
        w, v, lam = local.expand(server.w), client.v, local.penalty(self.lam)
        inner_eta, inner_steps = as_number(self.inner_eta), self.inner_steps
        for step in local.steps():
            v = step.minimize(v, self.inner, pull=(lam, w), eta=inner_eta, steps=inner_steps, tol=self.tol)
            w = step.where_active(w - step.rate(w) * lam * (w - v), w)
        return Client(v), w - server.w

    def server_update(self, server: GlobalState, mean: Tensor, round: Round) -> GlobalState:
        decay = server_step_factor(self, round)
        return GlobalState(*apply_change(self, server.w, server.moments, mean, self.server_step, decay))

    def personal_model(self, server: GlobalState, client: Client) -> Tensor:
        return client.v
