"""FedRep: each round a client first fits its own head to the shared body, then the body to its head.

Collins, Hassani, Mokhtari, Shakkottai. Exploiting shared representations for personalized federated learning. ICML
2021, Algorithm 1.

    h_i <- h_i after `head_steps` local SGD steps on L_i(w, .)
    w_i  = w after `steps` local SGD steps on L_i(., h_i)
    w   <- sum_i p_i w_i / sum_i p_i                      over the cohort; h_i is not sent
    v_i  = (w, h_i after `head_steps` more steps on L_i(w, .))     what client i deploys

Symbols  w: Server.w but for its personal part, which stays as it started    h_i: Client.v    head_steps: the paper's
         tau    personal: which part h is
Limits   head_steps = 0 leaves the heads as they started, as FedBABU does
Departs  head_epochs, where > 0, counts passes over the rows instead of steps. The listing ends with heads that were
         fitted to the body before the last average; refit = true, the default, fits them once more to the body that is
         deployed, with the draws and step sizes of the round that would come next; refit = false is the listing
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from mooring.algorithms.fedper import Client, FedPer
from mooring.algorithms.hyperparameters import check_ranges, count_round, init_memory, train_locally
from mooring.algorithms.parts import join_model, range_mask, split_model
from mooring.algorithms.server_optimizers import GlobalState
from mooring.core.cohort import CohortData, Round
from mooring.core.solvers import Fixed
from mooring.core.task import Task

HEAD_SLOT = 1  # the head is fitted on other minibatches than the body


@dataclass(frozen=True)
class FedRep(FedPer):
    head_steps: int = 10
    head_epochs: int = 0  # passes over the data instead of steps, when > 0
    refit: bool = True  # whether the head that a client deploys is fitted to the body that it deploys

    paper: ClassVar[str] = "fedrep, Algorithm 1"
    finetunes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, head_steps=(0, None), head_epochs=(0, None))

    def init(self, task: Task, w0: Tensor) -> tuple[GlobalState, Client]:
        server, client = super().init(task, w0)
        return server, client._replace(memory=init_memory(self, task, w0, models=2))

    def client_update(
        self, server: GlobalState, client: Client, task: Task, data: CohortData, round: Round
    ) -> tuple[Client, Tensor]:
        shared, _ = split_model(server.w, self.personal)
        head = range_mask(self.personal, server.w.shape[-1])
        v, memory = self._fit_heads(server, client, task, data, round)
        v, memory = train_locally(self, task, v, data, round, memory, region=Fixed(head, v))
        trained, own = split_model(v, self.personal)
        return Client(own, count_round(memory)), trained - shared

    def _fit_heads(
        self, server: GlobalState, client: Client, task: Task, data: CohortData, round: Round
    ) -> tuple[Tensor, Tensor]:
        """[C, d]: the shared body with each client's head, fitted to it; and what local training keeps."""
        v = join_model(split_model(server.w, self.personal)[0], client.v, self.personal)
        if not self.head_steps and not self.head_epochs:
            return v, client.memory
        work = replace(self, steps=max(self.head_steps, 1), epochs=self.head_epochs)
        region = Fixed(~range_mask(self.personal, server.w.shape[-1]), v)
        return train_locally(work, task, v, data, round, client.memory, 1, region=region, slot=HEAD_SLOT)

    def finetune(self, server: GlobalState, client: Client, task: Task, data: CohortData, round: Round) -> Client:
        if not self.refit:
            return client
        v, _ = self._fit_heads(server, client, task, data, round._replace(t=round.t + 1))
        return Client(split_model(v, self.personal)[1], client.memory)
