"""FedDyn: local objectives are shifted so that their minimizers agree with the global one.

Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama. Federated learning based on dynamic regularization. ICLR 2021,
Algorithm 1.

    w_i ~ arg min_v  L_i(v) - <g_i, v> + lam/2 |v - w|^2
    g_i <- g_i - lam (w_i - w)                            kept from round to round; 0 at first
    h   <- h - lam sum_i p_i (w_i - w)                    over the cohort; 0 at first
    w   <- sum_i p_i w_i / sum_i p_i - h / lam

Symbols  w, h: Server    g_i: Client.g    lam: the paper's alpha
Limits   the fixed point is the minimizer of sum_i p_i L_i, whatever the number of local steps
Departs  sums weigh by p (uniform p: 1/m and the mean over the cohort); inner = "sgd" takes `steps` local steps from w;
         lam = "auto" is a tenth of the clients' mean curvature
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from mooring.algorithms.base import Algorithm
from mooring.algorithms.hyperparameters import check_ranges, choose_inner_solver, curvature_lam, resolve_auto
from mooring.core.cohort import Round
from mooring.core.errors import RequestError
from mooring.core.local_training import LocalTraining
from mooring.core.local_work import LocalWork
from mooring.core.task import Task
from mooring.core.types import Auto, as_number
from mooring.estimates.client_statistics import ClientStatistics


class Server(NamedTuple):
    w: Tensor  # [d]
    h: Tensor  # [d]


class Client(NamedTuple):
    g: Tensor  # [C, d]


@dataclass(frozen=True)
class FedDyn(LocalWork, Algorithm[Server, Client, Tensor]):
    lam: Auto = "auto"
    inner: str = "auto"  # "exact" or "sgd"; auto: exact where the task has a prox, sgd elsewhere

    paper: ClassVar[str] = "feddyn, Algorithm 1"
    group: ClassVar[str] = "global"
    reveals: ClassVar[str] = "each client's change of the global model"
    server_only: ClassVar[tuple[str, ...]] = ("h",)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, lam=(0, None, "auto"), inner=("auto", "exact", "sgd"))
        if self.lam == 0:
            raise RequestError("FedDyn: lam must be > 0, got 0; without it use FedAvg.")

    @property
    def required_statistics(self) -> tuple[str, ...]:
        return ()

    def resolve(self, task: Task, statistics: ClientStatistics) -> FedDyn:
        lam = curvature_lam(statistics) if self.lam == "auto" else self.lam
        return resolve_auto(replace(self, lam=lam, inner=choose_inner_solver(self, task)), task, statistics)

    def init(self, task: Task, w0: Tensor) -> tuple[Server, Client]:
        return Server(w0, torch.zeros_like(w0)), Client(torch.zeros_like(w0))

    def client_update(self, server: Server, client: Client, local: LocalTraining) -> tuple[Client, Tensor]:
        w, lam = server.w, as_number(self.lam)
        v = local.minimize(w, self.inner, pull=(lam, w), shift=-client.g)
        return Client(client.g - lam * (v - w)), v - w

    def server_update(self, server: Server, mean: Tensor, round: Round) -> Server:
        h = server.h - as_number(self.lam) * round.weight * mean
        return Server(server.w + mean - h / as_number(self.lam), h)

    def personal_model(self, server: Server, client: Client) -> Tensor:
        return server.w
