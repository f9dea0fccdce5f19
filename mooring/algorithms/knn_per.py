"""kNN-Per: FedAvg's global model, mixed with the nearest of a client's own rows, which it remembers.

Marfoq, Neglia, Kameni, Vidal. Personalized federated learning through local memorization. ICML 2022, Algorithm 1.

    w        by FedAvg
    M_i      = (z_j, y_j) of client i's training rows: z_j is what enters the last linear layer of w at row j
    q_i(y|x) = sum of exp(-|z - z_j| / sigma) over the `neighbors` nearest z_j with y_j = y, divided by the sum over all
    p_i(y|x) = alpha_i q_i(y|x) + (1 - alpha_i) p(y|x; w)                              what client i deploys

Only the change of w is sent: M_i and alpha_i stay with the client.

Symbols  w: Server.w    (w, alpha_i, M_i): Remembered.v    alpha_i: the paper's lambda_i    neighbors: the paper's k
Limits   alpha = 0 is FedAvg; alpha = 1 with as many neighbors as rows and sigma = inf is the client's share of each
         class, but for the global model's share of 1e-6
Departs  alpha_i has the lowest mean loss on the client's validation rows among 0, 0.1, ..., 0.9, where the paper
         compares accuracies; a client without such rows chooses on its stored ones, none being its own neighbor. With
         alpha = 1 the global model keeps a share of 1e-6, so that no probability is 0. Memories have room for the
         training rows of the largest client, or for `capacity`; of more rows, evenly spread ones are stored. A table's
         representation is the row itself. Numbers are mixed, too: the neighbors' weighted mean and the model's own. The
         loss on training rows has each row among its own neighbors
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple

from torch import Tensor

from mooring.algorithms.fedavg import FedAvg
from mooring.algorithms.hyperparameters import check_ranges, resolve_auto
from mooring.algorithms.server_optimizers import GlobalState
from mooring.core.cohort import StateTree
from mooring.core.local_training import LocalTraining
from mooring.core.task import Task
from mooring.estimates.client_statistics import ClientStatistics
from mooring.tasks.memory import MemoryTask, Recall, add_memory

BY_VALIDATION = "validation"


class Remembered(NamedTuple):
    v: Tensor  # [C, d], the global model with the client's memory


@dataclass(frozen=True)
class KnnPer(FedAvg):
    neighbors: int = 10
    sigma: float = 1.0
    alpha: float | str = BY_VALIDATION  # weight of the neighbors: a number, or "validation": chosen by each client
    capacity: int | Literal["auto"] = "auto"  # stored rows: a number, or "auto": all of every client's training rows

    paper: ClassVar[str] = "knnper, Algorithm 1"
    group: ClassVar[str] = "personal"
    reveals: ClassVar[str] = "each client's change of the global model; the rows that it remembers stay with it"
    finetunes: ClassVar[bool] = True
    keeps_models: ClassVar[bool] = True
    new_client_method: ClassVar[str] = "finetune"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, neighbors=(1, None), sigma=(1e-6, None), alpha=(0, 1, BY_VALIDATION))
        check_ranges(self, capacity=(1, None, "auto"))

    @property
    def is_resolved(self) -> bool:
        """Whether no constants of the clients' losses are needed: alpha is chosen by clients, and capacity by sizes."""
        return super(KnnPer, replace(self, alpha=0.0, capacity=1)).is_resolved

    def resolve(self, task: Task, statistics: ClientStatistics) -> KnnPer:
        capacity = statistics.n.max() if isinstance(self.capacity, str) else self.capacity
        ready = replace(resolve_auto(self, task, statistics), capacity=max(int(capacity), 1))
        ready.deployed_task(task)  # refuses tasks without probabilities or numbers
        return ready

    def finetune(self, server: GlobalState, client: StateTree, local: LocalTraining) -> StateTree:
        alpha, task = None if isinstance(self.alpha, str) else self.alpha, self.deployed_task(local.task)
        return Remembered(task.remember(local.expand(server.w), local.data.train, local.data.validation, alpha))

    def personal_model(self, server: GlobalState, client: StateTree) -> Tensor:
        return client.v

    def deployed_task(self, task: Task) -> MemoryTask:
        return add_memory(task, Recall(int(self.capacity), self.neighbors, self.sigma), self.name)
