"""SCAFFOLD with fine-tuning: SCAFFOLD's global model, fine-tuned by every client before use.

apfl, Section 5.

    w   by SCAFFOLD
    v_i = w after `tune_steps` local SGD steps on L_i            what client i deploys

Symbols  w: Server.w    v_i: Tuned.v    tune_steps: the paper's tau
Limits   tune_steps = 0 is SCAFFOLD
Departs  as scaffold; fine-tuning takes plain steps, as control variates would hold a client back from its own optimum,
         with the draws and step sizes of the round that would come next
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from mooring.algorithms.hyperparameters import check_ranges
from mooring.algorithms.scaffold import Scaffold, Server
from mooring.core.cohort import StateTree
from mooring.core.local_training import LocalTraining


class Tuned(NamedTuple):
    v: Tensor  # [C, d]


@dataclass(frozen=True)
class ScaffoldFinetune(Scaffold):
    tune_steps: int = 10
    tune_epochs: int = 0  # passes over the data instead of steps, when > 0

    paper: ClassVar[str] = "apfl, Section 5"
    group: ClassVar[str] = "personal"
    finetunes: ClassVar[bool] = True
    new_client_method: ClassVar[str] = "finetune"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, tune_steps=(0, None), tune_epochs=(0, None))

    def finetune(self, server: Server, client: StateTree, local: LocalTraining) -> StateTree:
        return Tuned(local.finetune(server.w, self.tune_steps, self.tune_epochs))

    def personal_model(self, server: Server, client: StateTree) -> Tensor:
        return client.v
