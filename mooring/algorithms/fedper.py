"""FedPer: clients share the body of the model, each keeps a head of its own.

Arivazhagan, Aggarwal, Singh, Choudhary. Federated learning with personalization layers. 2019, Algorithms 1 and 2.

    (w_i, h_i) = (w, h_i) after `steps` local SGD steps on L_i
    w  <- sum_i p_i w_i / sum_i p_i                       over the cohort; h_i is not sent

Symbols  w: Server.w but for its personal part, which stays as it started    h_i: Client.v    personal: which part h is
Limits   personal = "*" is Local by SGD
Departs  the personal part may be any named part of the model
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

from torch import Tensor

from mooring.algorithms.base import Algorithm
from mooring.algorithms.hyperparameters import check_local_work, count_round, init_memory, resolve_auto, train_locally
from mooring.algorithms.parts import (
    PersonalPart,
    add_local_buffers,
    find_ranges,
    join_model,
    parse_personal,
    split_model,
    update_shared,
)
from mooring.algorithms.server_optimizers import GlobalServer, GlobalState, check_server_optimizer, init_moments
from mooring.core.cohort import CohortData, Round
from mooring.core.local_work import LocalWork
from mooring.core.task import Task
from mooring.estimates.client_statistics import ClientStatistics


class Client(NamedTuple):
    v: Tensor  # [C, number of personal coefficients]
    memory: Tensor  # [C, s], what local training keeps between rounds


@dataclass(frozen=True)
class FedPer(LocalWork, GlobalServer, Algorithm[GlobalState, Client, Tensor]):
    personal: PersonalPart = "head"  # a name (`parts.py`), resolved to ranges of coefficients

    paper: ClassVar[str] = "fedper, Algorithms 1 and 2"
    reveals: ClassVar[str] = "each client's change of the shared part; its personal part stays with it"
    new_client_method: ClassVar[str] = "local"

    def __post_init__(self) -> None:
        check_local_work(self)
        check_server_optimizer(self)
        parse_personal(self)

    def resolve(self, task: Task, statistics: ClientStatistics) -> FedPer:
        ranges = add_local_buffers(find_ranges(task, self.personal), task)
        return resolve_auto(replace(self, personal=ranges), task, statistics)

    def init(self, task: Task, w0: Tensor) -> tuple[GlobalState, Client]:
        shared, own = split_model(w0, self.personal)
        return GlobalState(w0, init_moments(self, shared)), Client(own, init_memory(self, task, w0))

    def client_update(
        self, server: GlobalState, client: Client, task: Task, data: CohortData, round: Round
    ) -> tuple[Client, Tensor]:
        shared, _ = split_model(server.w, self.personal)
        start = join_model(shared, client.v, self.personal)
        v, memory = train_locally(self, task, start, data, round, client.memory)
        trained, own = split_model(v, self.personal)
        return Client(own, count_round(memory)), trained - shared

    def server_update(self, server: GlobalState, mean: Tensor, round: Round) -> GlobalState:
        return update_shared(self, server, mean, self.personal)

    def personal_model(self, server: GlobalState, client: Client) -> Tensor:
        return join_model(split_model(server.w, self.personal)[0], client.v, self.personal)
