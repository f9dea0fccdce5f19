"""FedALA: before training, each client mixes its last model and the global one, weight by weight.

Zhang, Hua, Wang, Song, Xue, Ma, Guan. FedALA: adaptive local aggregation for personalized federated learning. AAAI
2023, Algorithm 1.

    u_i  = v_i + (w - v_i) * a_i                          a_i = 1 but for the last `layers` layers
    a_i <- clip( a_i - weight_eta grad L_i(u_i) * (w - v_i), 0, 1 )    on minibatches, for `sample` of a pass
    v_i  = u_i after `steps` local SGD steps on L_i
    w   <- sum_i p_i v_i / sum_i p_i                      over the cohort

Symbols  w: Server.w    v_i, a_i: Client.v, Client.weights, the paper's Theta_i and W_i    layers: p    sample: s/100
         weight_eta: eta
Limits   layers = 0 is FedAvg, whose clients deploy their own copies
Departs  a_i is learnt for `first_passes` passes in a client's second update, where the paper waits for the loss to
         converge; the minibatches of a part of a pass stand for a sample of the rows
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from mooring.algorithms.base import Algorithm
from mooring.algorithms.hyperparameters import check_ranges
from mooring.algorithms.server_optimizers import GlobalServer, GlobalState
from mooring.core.local_training import LocalTraining
from mooring.core.local_work import LocalWork
from mooring.core.minibatches import batches_per_epoch
from mooring.core.task import Task, head_coefficients

WEIGHT_SLOT = 1  # the weights are learnt on other minibatches than the model


class Client(NamedTuple):
    v: Tensor  # [C, d]
    weights: Tensor  # [C, d]
    updates: Tensor  # [C], local updates so far


@dataclass(frozen=True)
class FedALA(LocalWork, GlobalServer, Algorithm[GlobalState, Client, Tensor]):
    layers: int = 1
    sample: float = 0.8
    weight_eta: float = 1.0
    first_passes: int = 10

    paper: ClassVar[str] = "fedala, Algorithm 1"
    reveals: ClassVar[str] = "each client's personal model: w + message; use secure aggregation"
    new_client_method: ClassVar[str] = "local"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, layers=(0, None), sample=(0, 1), weight_eta=(0, None), first_passes=(1, None))

    def init(self, task: Task, w0: Tensor) -> tuple[GlobalState, Client]:
        return self.init_server(w0), Client(w0, torch.ones_like(w0), torch.tensor(0))

    def client_update(self, server: GlobalState, client: Client, local: LocalTraining) -> tuple[Client, Tensor]:
        weights = self._learn_weights(server, client, local)
        v = local.train(client.v + (server.w - client.v) * weights)
        return Client(v, weights, client.updates + 1), v - server.w

    def _learn_weights(self, server: GlobalState, client: Client, local: LocalTraining) -> Tensor:
        """[C, d]: a_i for this round; a client's first update takes the global model as it is."""
        passes = torch.where(client.updates == 1, self.first_passes, 1) * (client.updates > 0)
        steps = (self.sample * batches_per_epoch(local.data.train.size, local.schedule.batch)).ceil().long() * passes
        moving = head_coefficients(local.task, self.layers)
        a, gap = client.weights[:, moving], (server.w - client.v)[:, moving]
        u = torch.where(moving, client.v, server.w)
        top = local.task.freeze(~moving) or local.task  # the body below costs no gradient
        for step in local.minibatches(steps=steps, slot=WEIGHT_SLOT):  # running statistics are left to the training
            u[:, moving] = client.v[:, moving] + gap * a
            slope = top.grad(u, step.batch)[:, moving] * gap
            moved = (a - self.weight_eta * slope).clamp(0, 1)
            a = moved if step.active is None else torch.where(step.active[:, None], moved, a)
        weights = client.weights.clone()
        weights[:, moving] = a
        return weights

    def personal_model(self, server: GlobalState, client: Client) -> Tensor:
        return client.v
