"""FedAvg with fine-tuning: FedAvg's global model, fine-tuned by every client before use.

apfl, Section 5.

    w   by FedAvg
    v_i = w after `tune_steps` local SGD steps on L_i            what client i deploys

    output = "tuned"      from the last global model
    output = "own"        v_i is the client's copy of w after its last update, before it was averaged: what the paper's
                          experiments evaluate, over the clients of a round, right after their local steps

Symbols  w: Server.w    v_i: Tuned.v    tune_steps: the paper's tau
Limits   tune_steps = 0 is FedAvg; tune_steps = steps is the client's copy of w in the next round, before it is averaged
Departs  as fedavg; fine-tuning takes the draws and step sizes of the round that would come next
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from mooring.algorithms.fedavg import FedAvg
from mooring.algorithms.hyperparameters import check_ranges
from mooring.algorithms.server_optimizers import GlobalState
from mooring.core.cohort import StateTree
from mooring.core.local_training import LocalTraining
from mooring.core.task import Task


class Client(NamedTuple):
    own: Tensor  # [C, d], its copy of the global model after its last local update; [C, 0] but for output = "own"


class Tuned(NamedTuple):
    v: Tensor  # [C, d]


@dataclass(frozen=True)
class FedAvgFinetune(FedAvg):
    tune_steps: int = 10
    tune_epochs: int = 0  # passes over the data instead of steps, when > 0
    output: str = "tuned"

    paper: ClassVar[str] = "apfl, Section 5"
    group: ClassVar[str] = "personal"
    finetunes: ClassVar[bool] = True
    new_client_method: ClassVar[str] = "finetune"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, tune_steps=(0, None), tune_epochs=(0, None), output=("tuned", "own"))

    def init(self, task: Task, w0: Tensor) -> tuple[GlobalState, StateTree]:
        return self.init_server(w0), Client(w0 if self.output == "own" else w0[:0])

    def client_update(self, server: GlobalState, client: StateTree, local: LocalTraining) -> tuple[StateTree, Tensor]:
        client, change = super().client_update(server, client, local)
        return Client(server.w + change) if self.output == "own" else client, change

    def finetune(self, server: GlobalState, client: StateTree, local: LocalTraining) -> StateTree:
        if self.output == "own":
            return Tuned(client.own)
        return Tuned(local.finetune(server.w, self.tune_steps, self.tune_epochs))

    def personal_model(self, server: GlobalState, client: StateTree) -> Tensor:
        return client.v
