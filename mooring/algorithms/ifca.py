"""IFCA: several global models, each client trains the one that fits its rows best.

Ghosh, Chung, Yin, Ramchandran. An efficient framework for clustered federated learning. NeurIPS 2020, Algorithm 1,
model averaging.

    j_i  = arg min_j L_i(w_j)                             on the client's training rows
    w_i  = w_j after `steps` local SGD steps on L_i       j = j_i
    w_j <- sum_{i: j_i = j} p_i w_i / sum_{i: j_i = j} p_i    over the cohort; unchanged if no client chose j

Symbols  w_j: Server.clusters    j_i: Client.cluster    w: Server.w, the model of the largest cluster (by p)
Limits   clusters = 1 is FedAvg
Departs  all models start from the same w0, and in the first round the clients are split among them evenly at random;
         the paper starts from random models. A message has room for all models, of which one is not zero
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mooring.algorithms.base import Algorithm
from mooring.algorithms.hyperparameters import check_ranges
from mooring.core.cohort import Round
from mooring.core.local_training import LocalTraining
from mooring.core.local_work import LocalWork
from mooring.core.seeds import uniforms
from mooring.core.task import Task


class Server(NamedTuple):
    w: Tensor  # [d]
    clusters: Tensor  # [K, d]
    share: Tensor  # [K], the weight of the clients that chose each model in the last round


class Client(NamedTuple):
    cluster: Tensor  # [C]


class Message(NamedTuple):
    change: Tensor  # [C, K, d], w_i - w_j at j = j_i, 0 elsewhere
    choice: Tensor  # [C, K], 1 at j = j_i, 0 elsewhere


@dataclass(frozen=True)
class IFCA(LocalWork, Algorithm[Server, Client, Message]):
    clusters: int = 2

    paper: ClassVar[str] = "ifca, Algorithm 1"
    group: ClassVar[str] = "clustered"
    reveals: ClassVar[str] = "each client's cluster and its change of that cluster's model"
    server_only: ClassVar[tuple[str, ...]] = ("w", "share")
    finetunes: ClassVar[bool] = True  # chooses a model, also at clients that never took part
    new_client_method: ClassVar[str] = "finetune"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, clusters=(1, None))

    @property
    def additive(self) -> bool:
        return False  # the step is a ratio of two means

    def init(self, task: Task, w0: Tensor) -> tuple[Server, Client]:
        share = torch.zeros(self.clusters, dtype=w0.dtype)
        return Server(w0, w0.repeat(self.clusters, 1), share), Client(torch.tensor(0))

    def client_update(self, server: Server, client: Client, local: LocalTraining) -> tuple[Client, Message]:
        if local.round.t == 1:
            cluster = _random_split(local.round, self.clusters)[local.data.index]
        else:
            cluster = _best_cluster(server, local)
        start = server.clusters[cluster]
        w = local.train(start)
        choice = torch.nn.functional.one_hot(cluster, self.clusters).to(w.dtype)
        return Client(cluster), Message(choice[:, :, None] * (w - start)[:, None], choice)

    def server_update(self, server: Server, mean: Message, round: Round) -> Server:
        chosen = (mean.choice > 0)[:, None]
        step = mean.change / torch.where(chosen, mean.choice[:, None], 1.0)
        clusters = server.clusters + step
        return Server(clusters[mean.choice.argmax()], clusters, mean.choice)

    def finetune(self, server: Server, client: Client, local: LocalTraining) -> Client:
        return Client(_best_cluster(server, local))

    def personal_model(self, server: Server, client: Client) -> Tensor:
        return server.clusters[client.cluster]


def _best_cluster(server: Server, local: LocalTraining) -> Tensor:
    """[C]: the model of least training loss."""
    return torch.stack([local.loss(w) for w in server.clusters]).argmin(0)


def _random_split(round: Round, clusters: int) -> Tensor:
    """[m]: a cluster for each of the m clients, all equally large up to one."""
    order = np.argsort(uniforms(round.seed, "algorithm", np.arange(round.clients)), kind="stable")
    cluster = np.empty(round.clients, dtype=np.int64)
    cluster[order] = np.arange(round.clients) % clusters
    return torch.from_numpy(cluster)
