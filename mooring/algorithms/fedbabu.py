"""FedBABU: only the body is trained with the others, the head stays as it started until each client fine-tunes.

Oh, Kim, Yun. FedBABU: towards enhanced representation for federated image classification. ICLR 2022, Algorithm 1.

    w_i = w after `steps` local SGD steps on L_i(., h0)
    w  <- sum_i p_i w_i / sum_i p_i                       over the cohort; h0, the head, is fixed and not sent
    v_i = (w, h0) after `tune_steps` local SGD steps on L_i    what client i deploys; `tune` names the part that moves

Symbols  w: Server.w but for the head    h0: the head of Server.w    v_i: Client.v    personal: which part h is
Limits   tune_steps = 0 deploys (w, h0)
Departs  fine-tuning takes the draws and step sizes of the round that would come next
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from mooring.algorithms.base import Algorithm
from mooring.algorithms.hyperparameters import (
    check_local_work,
    check_ranges,
    count_round,
    finetune_global,
    init_memory,
    resolve_auto,
    train_locally,
)
from mooring.algorithms.parts import (
    PersonalPart,
    find_ranges,
    parse_personal,
    range_mask,
    split_model,
    update_shared,
)
from mooring.algorithms.server_optimizers import GlobalServer, GlobalState, check_server_optimizer, init_moments
from mooring.core.cohort import CohortData, Round
from mooring.core.local_work import LocalWork
from mooring.core.solvers import Fixed
from mooring.core.task import Task
from mooring.estimates.client_statistics import ClientStatistics


class Client(NamedTuple):
    v: Tensor  # [C, d], once fine-tuned; [C, 0] before
    memory: Tensor  # [C, s], what local training keeps between rounds


@dataclass(frozen=True)
class FedBABU(LocalWork, GlobalServer, Algorithm[GlobalState, Client, Tensor]):
    personal: PersonalPart = "head"  # a name (`parts.py`), resolved to ranges of coefficients
    tune: str = "all"  # or "head", "body"
    tune_steps: int = 10
    tune_epochs: int = 0  # passes over the data instead of steps, when > 0

    paper: ClassVar[str] = "fedbabu, Algorithm 1"
    reveals: ClassVar[str] = "each client's change of the body"
    finetunes: ClassVar[bool] = True
    new_client_method: ClassVar[str] = "finetune"

    def __post_init__(self) -> None:
        check_local_work(self)
        check_server_optimizer(self)
        check_ranges(self, tune=("all", "head", "body"), tune_steps=(0, None), tune_epochs=(0, None))
        parse_personal(self)

    def resolve(self, task: Task, statistics: ClientStatistics) -> FedBABU:
        ranges = find_ranges(task, self.personal)
        return resolve_auto(replace(self, personal=ranges), task, statistics)

    def init(self, task: Task, w0: Tensor) -> tuple[GlobalState, Client]:
        moments = init_moments(self, split_model(w0, self.personal)[0])
        return GlobalState(w0, moments), Client(w0[:0], init_memory(self, task, w0))

    def client_update(
        self, server: GlobalState, client: Client, task: Task, data: CohortData, round: Round
    ) -> tuple[Client, Tensor]:
        head = range_mask(self.personal, server.w.shape[-1])
        w, memory = train_locally(self, task, server.w, data, round, client.memory, region=Fixed(head, server.w))
        return Client(client.v, count_round(memory)), (w - server.w)[:, ~head]

    def server_update(self, server: GlobalState, mean: Tensor, round: Round) -> GlobalState:
        return update_shared(self, server, mean, self.personal)

    def finetune(self, server: GlobalState, client: Client, task: Task, data: CohortData, round: Round) -> Client:
        head = range_mask(self.personal, server.w.shape[-1])
        fixed = {"all": torch.zeros_like(head), "head": ~head, "body": head}[self.tune]
        region = Fixed(fixed, server.w) if bool(fixed.any()) else None
        v = finetune_global(self, task, server.w, data, round, client.memory, region=region)
        return Client(v, client.memory)

    def personal_model(self, server: GlobalState, client: Client) -> Tensor:
        return client.v
