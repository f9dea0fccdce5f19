"""SCAFFOLD: FedAvg whose local steps are corrected for each client's drift by control variates.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh. SCAFFOLD: stochastic controlled averaging for federated learning. ICML
2020, Algorithm 1, option II.

    y_i <- y_i - eta (grad L_i(y_i) - c_i + c)            `steps` times from w
    c_i <- c_i - c + (w - y_i) / (steps eta)              kept from round to round
    w   <- w + server_step * sum_i p_i (y_i - w) / sum_i p_i
    c   <- c + sum_i p_i (change of c_i)                  so that c = sum_i p_i c_i over all clients

Symbols  w, c: Server    c_i: Client.c
Limits   the first round, with zero variates, is FedAvg's; with full gradients the fixed point is the minimizer of
         sum_i p_i L_i, whatever `steps` is
Departs  sums weigh by p (uniform p: |S|/m and the mean over the cohort S); steps eta is the sum of the step sizes; the
         server's step may fade by server_decay; weight_decay is that of the loss L_i + weight_decay/2 |w|^2
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from mooring.algorithms.base import Algorithm
from mooring.algorithms.hyperparameters import check_ranges, server_step_factor
from mooring.algorithms.server_optimizers import ServerOptimizer, apply_change, init_moments
from mooring.core.cohort import Round
from mooring.core.errors import RequestError
from mooring.core.local_training import LocalTraining
from mooring.core.local_work import LocalWork
from mooring.core.task import Task


class Server(NamedTuple):
    w: Tensor  # [d]
    c: Tensor  # [d]
    moments: Tensor  # [k, d], of the server's optimizer


class Client(NamedTuple):
    c: Tensor  # [C, d]


class Message(NamedTuple):
    w: Tensor  # [C, d]  y_i - w
    c: Tensor  # [C, d]  the change of c_i


@dataclass(frozen=True)
class Scaffold(LocalWork, ServerOptimizer, Algorithm[Server, Client, Message]):
    server_step: float = 1.0
    server_decay: float = 0.0  # the server's step is divided by 1 + server_decay (t - 1)

    paper: ClassVar[str] = "scaffold, Algorithm 1"
    group: ClassVar[str] = "global"
    server_only: ClassVar[tuple[str, ...]] = ("moments",)
    reveals: ClassVar[str] = "each client's change of the global model and its mean gradient on the way"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, server_step=(0, None), server_decay=(0, None))
        if not replace(self.rule, weight_decay=0.0).is_plain or self.optimizer != "sgd":
            raise RequestError(
                f"{type(self).__name__}: its control variates are mean gradients, which steps show only if they are "
                "plain SGD; use optimizer = 'sgd' without momentum and clip_grad, or fedavg or feddyn, which take any "
                "optimizer."
            )

    def init(self, task: Task, w0: Tensor) -> tuple[Server, Client]:
        zero = torch.zeros_like(w0)
        return Server(w0, zero, init_moments(self, w0)), Client(zero)

    def client_update(self, server: Server, client: Client, local: LocalTraining) -> tuple[Client, Message]:
        y = local.train(server.w, shift=server.c - client.c)
        c = client.c - server.c + (server.w - y) / local.total_step_size(y)
        return Client(c), Message(y - server.w, c - client.c)

    def server_update(self, server: Server, mean: Message, round: Round) -> Server:
        decay = server_step_factor(self, round)
        w, moments = apply_change(self, server.w, server.moments, mean.w, self.server_step, decay)
        return Server(w, server.c + round.weight * mean.c, moments)

    def personal_model(self, server: Server, client: Client) -> Tensor:
        return server.w
