"""FedAvg: the global model is the average of the clients' local updates of it.

alternative, Algorithm 1 (elastic); apfl, Section 3 and mspp, Section 1.1 (plain average); kernel, Section 4 (by size).

    w_i = w after `steps` local SGD steps on L_i
    w  <- w + server_step * sum_i a_i (w_i - w)       over the cohort, with

    aggregation = "average"   a_i = p_i / sum of the cohort's p       (p uniform: mspp, apfl; p = size: kernel)
    aggregation = "elastic"   a_i = (m / cohort) p_i                  (alternative: unbiased, but need not sum to 1)

Symbols  w: Server.w    eta, steps, server_step: fields    p: the run's weights
Limits   one full-batch step is gradient descent on sum_i p_i L_i; server_step = 0 freezes the model
Departs  the server's step of round t is server_step / (1 + server_decay (t - 1)), alternative leaves eta_t open; a
         warning is given when elastic weights sum to more than 2
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from mooring.algorithms.base import Algorithm, NoState
from mooring.algorithms.hyperparameters import check_ranges, server_step_factor
from mooring.algorithms.server_optimizers import SERVER_FIELDS, GlobalServer, GlobalState, apply_change
from mooring.core.cohort import Round, StateTree
from mooring.core.local_training import LocalTraining
from mooring.core.local_work import LocalWork
from mooring.core.task import Task

MAX_ELASTIC_WEIGHT = 2.0  # an elastic step whose weights sum to more than this overshoots visibly


@dataclass(frozen=True)
class FedAvg(LocalWork, GlobalServer, Algorithm[GlobalState, StateTree, Tensor]):
    aggregation: str = "average"
    server_step: float = 1.0
    server_decay: float = 0.0  # the server's step is divided by 1 + server_decay (t - 1)

    paper: ClassVar[str] = "alternative, Algorithm 1; apfl, Section 3; kernel, Section 4"
    group: ClassVar[str] = "global"
    reveals: ClassVar[str] = "each client's change of the global model"
    per_client_fields: ClassVar[tuple[str, ...]] = ("eta",)
    server_fields: ClassVar[tuple[str, ...]] = ("aggregation", "server_step", "server_decay", *SERVER_FIELDS)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, aggregation=("average", "elastic"), server_step=(0, None), server_decay=(0, None))

    def init(self, task: Task, w0: Tensor) -> tuple[GlobalState, StateTree]:
        return self.init_server(w0), NoState()

    def client_update(self, server: GlobalState, client: StateTree, local: LocalTraining) -> tuple[StateTree, Tensor]:
        return client, local.train(server.w).sub_(server.w)

    def server_update(self, server: GlobalState, mean: Tensor, round: Round) -> GlobalState:
        if self.aggregation == "elastic":
            total = round.clients / round.cohort * round.weight
            if total > MAX_ELASTIC_WEIGHT:
                warnings.warn(f"round {round.t}: elastic weights sum to {total:.1f}; the step may overshoot.")
            mean = total * mean
        decay = server_step_factor(self, round)
        return GlobalState(*apply_change(self, server.w, server.moments, mean, self.server_step, decay))

    def personal_model(self, server: GlobalState, client: StateTree) -> Tensor:
        return server.w
