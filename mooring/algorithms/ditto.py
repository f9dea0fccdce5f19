"""Ditto: a personal model pulled towards the FedAvg model.

Li, Hu, Beirami, Smith. Ditto: fair and robust federated learning through personalization. ICML 2021, Algorithm 1.

    w_i  = w after `steps` local SGD steps on L_i
    v_i <- v_i - personal_eta (grad L_i(v_i) + lam (v_i - w))        `steps` times, w as it was sent
    w   <- sum_i p_i w_i / sum_i p_i                                 over the cohort

Symbols  w: Server.w    v_i: Client.v    lam, eta, personal_eta, steps: fields
Limits   lam = 0 is Local; lam -> infinity deploys the global model; at convergence v_i = prox_i(w)
Departs  w_i and v_i see the same minibatches and take equally many steps
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

from torch import Tensor

from mooring.algorithms.base import Algorithm
from mooring.algorithms.hyperparameters import auto_eta, check_ranges, parse_lam_field, resolve_auto
from mooring.algorithms.server_optimizers import GlobalServer, GlobalState
from mooring.core.local_training import LocalTraining
from mooring.core.local_work import LocalWork
from mooring.core.penalty import PenaltyOrRule
from mooring.core.task import Task
from mooring.core.types import Auto
from mooring.estimates.client_statistics import ClientStatistics


class Client(NamedTuple):
    v: Tensor  # [C, d]


@dataclass(frozen=True)
class Ditto(LocalWork, GlobalServer, Algorithm[GlobalState, Client, Tensor]):
    lam: PenaltyOrRule = "auto"
    personal_eta: Auto = "auto"

    paper: ClassVar[str] = "ditto, Algorithm 1"
    reveals: ClassVar[str] = "each client's change of the global model; its personal model stays with it"
    new_client_method: ClassVar[str] = "prox"
    trained_models: ClassVar[int] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_lam_field(self, ("auto",))
        check_ranges(self, personal_eta=(0, None, "auto"))

    def resolve(self, task: Task, statistics: ClientStatistics) -> Ditto:
        ready = resolve_auto(self, task, statistics)
        eta = auto_eta(task, statistics, ready.batch) if self.eta == "auto" else self.eta
        personal = (
            auto_eta(task, statistics, ready.batch, ready.lam) if self.personal_eta == "auto" else self.personal_eta
        )
        return replace(ready, eta=eta, personal_eta=personal)

    def init(self, task: Task, w0: Tensor) -> tuple[GlobalState, Client]:
        return self.init_server(w0), Client(w0)

    def client_update(self, server: GlobalState, client: Client, local: LocalTraining) -> tuple[Client, Tensor]:
        w = local.train(server.w)
        v = local.train(client.v, eta=self.personal_eta, pull=(local.penalty(self.lam), server.w))
        return Client(v), w - server.w

    def personal_model(self, server: GlobalState, client: Client) -> Tensor:
        return client.v
