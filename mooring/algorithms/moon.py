"""MOON: FedAvg whose local loss keeps representations near the global model's and away from the client's last ones.

Li, He, Song. Model-contrastive federated learning. CVPR 2021, Algorithm 1.

    w_i = w after `steps` local steps on  L_i(u) + mu mean_j -log( e^(sim(z_j, z_j^glob)/tau)
                                              / (e^(sim(z_j, z_j^glob)/tau) + e^(sim(z_j, z_j^last)/tau)) )
    w  <- sum_i p_i w_i / sum_i p_i                       over the cohort

z_j, z_j^glob and z_j^last are the representations of row j by u, by w and by the client's model of its last update; sim
is the cosine.

Symbols  w: Server.w    z^last: by Client.v    mu, tau: fields
Limits   mu = 0 is FedAvg. A model without a body (a table) has the row itself as representation: FedAvg, too
Departs  the representation is the input of the last layer, without a projection head; a client's first update has w0 as
         its last model; representations are taken in evaluation mode
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mooring.algorithms.base import Algorithm
from mooring.algorithms.hyperparameters import check_ranges
from mooring.algorithms.server_optimizers import GlobalServer, GlobalState
from mooring.core.cohort import Batch
from mooring.core.local_training import LocalTraining
from mooring.core.local_work import LocalWork
from mooring.core.task import Task
from mooring.tasks.memory import has_representation, represent


class Client(NamedTuple):
    v: Tensor  # [C, d], the model after the last local update


@dataclass(frozen=True)
class Moon(LocalWork, GlobalServer, Algorithm[GlobalState, Client, Tensor]):
    mu: float = 1.0
    tau: float = 0.5

    paper: ClassVar[str] = "moon, Algorithm 1"
    group: ClassVar[str] = "global"
    reveals: ClassVar[str] = "each client's change of the global model"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, mu=(0, None), tau=(1e-6, None))

    def init(self, task: Task, w0: Tensor) -> tuple[GlobalState, Client]:
        return self.init_server(w0), Client(w0)

    def client_update(self, server: GlobalState, client: Client, local: LocalTraining) -> tuple[Client, Tensor]:
        u, contrasts = local.expand(server.w), self.mu > 0 and has_representation(local.task)
        for step in local.steps():
            g = step.grad(u)
            if contrasts:
                g = g + self.mu * self._contrast_grad(local.task, u, server.w, client.v, step.batch)
            u = step.move(u, g)
        return Client(u), u - server.w

    def _contrast_grad(self, task: Task, u: Tensor, w: Tensor, last: Tensor, batch: Batch) -> Tensor:
        """[C, d]: the gradient of each client's contrastive loss, client by client."""
        rows = []
        for c in range(len(u)):
            real = batch.weight[c] > 0
            x, weight, key = batch.x[c, real], batch.weight[c, real], 0 if batch.key is None else batch.key[c]
            if not len(x):
                rows.append(torch.zeros_like(u[c]))
                continue
            with torch.no_grad():
                near, far = represent(task, w.expand_as(u)[c], x, key), represent(task, last[c], x, key)
            leaf = u[c].detach().requires_grad_()
            with torch.enable_grad():
                z = represent(task, leaf, x, key)
                scores = torch.stack([F.cosine_similarity(z, near), F.cosine_similarity(z, far)], 1) / self.tau
                loss = -(weight * torch.log_softmax(scores, 1)[:, 0]).sum()
            if loss.requires_grad:
                rows.append(torch.autograd.grad(loss, leaf)[0])
            else:  # the last layer takes inputs as they are
                rows.append(torch.zeros_like(leaf))
        return torch.stack(rows)

    def personal_model(self, server: GlobalState, client: Client) -> Tensor:
        return server.w
