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
from mooring.algorithms.hyperparameters import (
    auto_eta,
    check_local_work,
    check_ranges,
    count_round,
    init_memory,
    parse_lam_field,
    resolve_auto,
    train_locally,
)
from mooring.algorithms.server_optimizers import GlobalServer, GlobalState, check_server_optimizer
from mooring.core.cohort import CohortData, Round
from mooring.core.local_work import LocalWork
from mooring.core.penalty import PenaltyOrRule, penalty_rows
from mooring.core.task import Task
from mooring.core.types import Auto
from mooring.estimates.client_statistics import ClientStatistics


class Client(NamedTuple):
    v: Tensor  # [C, d]
    memory: Tensor  # [C, s], what local training keeps between rounds


@dataclass(frozen=True)
class Ditto(LocalWork, GlobalServer, Algorithm[GlobalState, Client, Tensor]):
    lam: PenaltyOrRule = "auto"
    personal_eta: Auto = "auto"

    paper: ClassVar[str] = "ditto, Algorithm 1"
    reveals: ClassVar[str] = "each client's change of the global model; its personal model stays with it"
    new_client_method: ClassVar[str] = "prox"

    def __post_init__(self) -> None:
        parse_lam_field(self, ("auto",))
        check_ranges(self, personal_eta=(0, None, "auto"))
        check_local_work(self)
        check_server_optimizer(self)

    def resolve(self, task: Task, statistics: ClientStatistics) -> Ditto:
        ready = resolve_auto(self, task, statistics)
        eta = auto_eta(task, statistics, ready.batch) if self.eta == "auto" else self.eta
        personal = (
            auto_eta(task, statistics, ready.batch, ready.lam) if self.personal_eta == "auto" else self.personal_eta
        )
        return replace(ready, eta=eta, personal_eta=personal)

    def init(self, task: Task, w0: Tensor) -> tuple[GlobalState, Client]:
        return self.init_server(w0), Client(w0, init_memory(self, task, w0, models=2))

    def client_update(
        self, server: GlobalState, client: Client, task: Task, data: CohortData, round: Round
    ) -> tuple[Client, Tensor]:
        lam = penalty_rows(self.lam, data.index, client.v)
        personal = replace(self, eta=self.personal_eta)
        w, memory = train_locally(self, task, server.w, data, round, client.memory)
        v, memory = train_locally(personal, task, client.v, data, round, memory, 1, pull=(lam, server.w))
        return Client(v, count_round(memory)), w - server.w

    def personal_model(self, server: GlobalState, client: Client) -> Tensor:
        return client.v
