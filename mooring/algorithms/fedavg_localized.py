"""Localized FedAvg: FedAvg's common model, fine-tuned by every client before use.

apfl, Section 5.

    w   by FedAvg
    v_i = w after `tune_steps` local SGD steps on L_i            what client i deploys

Symbols  w: Server.w    v_i: Tuned.v    tune_steps: the paper's tau
Limits   tune_steps = 0 is FedAvg; tune_steps = steps is the client's copy of w in the next round, before it is averaged
Departs  as fedavg; fine-tuning takes the draws and step sizes of the round that would come next
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from mooring.algorithms.fedavg import FedAvg
from mooring.algorithms.settings import check, counted, tuned


class Tuned(NamedTuple):
    v: Tensor  # [C, d]


@dataclass(frozen=True)
class FedAvgLocalized(FedAvg):
    tune_steps: int = 10
    tune_epochs: int = 0  # passes over the data instead of steps, when > 0

    paper: ClassVar[str] = "apfl, Section 5"
    last_stage: ClassVar[bool] = True
    newcomer: ClassVar[str] = "finish"

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self, tune_steps=(0, None), tune_epochs=(0, None))

    def finish(self, server, client, task, data, round):
        return Tuned(tuned(self, task, server.w, data, round, counted(client.visits)))

    def deploy(self, server, client):
        return client.v
