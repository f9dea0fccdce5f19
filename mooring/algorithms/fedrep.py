"""FedRep: each round a client first fits its own head to the shared body, then the body to its head.

Collins, Hassani, Mokhtari, Shakkottai. Exploiting shared representations for personalized federated learning. ICML
2021, Algorithm 1.

    h_i <- h_i after `head_steps` local SGD steps on L_i(w, .)
    w_i  = w after `steps` local SGD steps on L_i(., h_i)
    w   <- sum_i p_i w_i / sum_i p_i                      over the cohort; h_i is not sent
    v_i  = (w, h_i after `head_steps` more steps on L_i(w, .))     what client i deploys

Symbols  w: Server.w but for its personal part, which stays as it started    h_i: the client's copy of that part
         head_steps: the paper's tau    personal: which part h is
Limits   head_steps = 0 leaves the heads as they started, as FedBABU does
Departs  head_epochs, where > 0, counts passes over the rows instead of steps. The listing ends with heads that were
         fitted to the body before the last average; refit = true, the default, fits them once more to the body that is
         deployed, with the draws and step sizes of the round that would come next; refit = false is the listing
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from mooring.algorithms.fedper import FedPer
from mooring.algorithms.hyperparameters import check_ranges
from mooring.algorithms.server_optimizers import GlobalState
from mooring.core.cohort import StateTree
from mooring.core.local_training import LocalTraining
from mooring.core.solvers import Fixed
from mooring.core.task import personal_mask

HEAD_SLOT = 1  # the head is fitted on other minibatches than the body


class Tuned(NamedTuple):
    v: Tensor  # [C, d]


@dataclass(frozen=True)
class FedRep(FedPer):
    head_steps: int = 10
    head_epochs: int = 0  # passes over the data instead of steps, when > 0
    refit: bool = True  # whether the head that a client deploys is fitted to the body that it deploys

    paper: ClassVar[str] = "fedrep, Algorithm 1"
    finetunes: ClassVar[bool] = True
    trained_models: ClassVar[int] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, head_steps=(0, None), head_epochs=(0, None))

    def client_update(self, server: GlobalState, client: StateTree, local: LocalTraining) -> tuple[StateTree, Tensor]:
        v = self._fit_head(server.w, local)
        w = local.train(v, region=Fixed(personal_mask(local.task, self.personal), v))
        return client, w - server.w

    def _fit_head(self, w: Tensor, local: LocalTraining) -> Tensor:
        """[C, d]: the shared body with each client's head, fitted to it."""
        region = Fixed(~personal_mask(local.task, self.personal), w)
        return local.train(w, steps=self.head_steps, epochs=self.head_epochs, region=region, slot=HEAD_SLOT)

    def finetune(self, server: GlobalState, client: StateTree, local: LocalTraining) -> StateTree:
        return Tuned(self._fit_head(server.w, local.next_round) if self.refit else local.expand(server.w))

    def personal_model(self, server: GlobalState, client: StateTree) -> Tensor:
        return client.v
