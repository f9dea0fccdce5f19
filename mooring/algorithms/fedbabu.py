"""FedBABU: only the body is trained with the others, the head stays as it started until each client fine-tunes.

Oh, Kim, Yun. FedBABU: towards enhanced representation for federated image classification. ICLR 2022, Algorithm 1.

    w_i = w after `steps` local SGD steps on L_i(., h0)
    w  <- sum_i p_i w_i / sum_i p_i                       over the cohort; h0, the head, is fixed and not sent
    v_i = (w, h0) after `tune_steps` local SGD steps on L_i    what client i deploys; `tune` names the part that moves

Symbols  w: Server.w but for the head    h0: the head of Server.w    v_i: Tuned.v    personal: which part h is
Limits   tune_steps = 0 deploys (w, h0)
Departs  fine-tuning takes the draws and step sizes of the round that would come next
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from mooring.algorithms.fedavg import FedAvg
from mooring.algorithms.hyperparameters import check_ranges
from mooring.algorithms.server_optimizers import GlobalState
from mooring.core.cohort import StateTree
from mooring.core.local_training import LocalTraining
from mooring.core.solvers import Fixed
from mooring.core.task import part_mask


class Tuned(NamedTuple):
    v: Tensor  # [C, d]


@dataclass(frozen=True)
class FedBABU(FedAvg):
    personal: str | tuple[str, ...] = "head"
    tune: str = "all"  # or "head", "body"
    tune_steps: int = 10
    tune_epochs: int = 0  # passes over the data instead of steps, when > 0

    paper: ClassVar[str] = "fedbabu, Algorithm 1"
    group: ClassVar[str] = "personal"
    reveals: ClassVar[str] = "each client's change of the body"
    finetunes: ClassVar[bool] = True
    new_client_method: ClassVar[str] = "finetune"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, tune=("all", "head", "body"), tune_steps=(0, None), tune_epochs=(0, None))

    def client_update(self, server: GlobalState, client: StateTree, local: LocalTraining) -> tuple[StateTree, Tensor]:
        head = part_mask(local.task, self.personal)
        return client, local.train(server.w, region=Fixed(head, server.w)) - server.w

    def finetune(self, server: GlobalState, client: StateTree, local: LocalTraining) -> StateTree:
        head = part_mask(local.task, self.personal)
        fixed = {"all": torch.zeros_like(head), "head": ~head, "body": head}[self.tune]
        region = Fixed(fixed, server.w) if bool(fixed.any()) else None
        return Tuned(local.finetune(server.w, self.tune_steps, self.tune_epochs, region=region))

    def personal_model(self, server: GlobalState, client: StateTree) -> Tensor:
        return client.v
