"""Local: every client trains on its own rows only.

alternative, Eq. 1.3 (PureLocalTraining); effect, Eq. 2 (LocalTrain).

    v_i = arg min_v L_i(v) + ridge/2 |v|^2         inner = "exact"
    v_i after `steps` more local SGD steps a round  inner = "sgd"

Symbols  v_i: Client.v    ridge, eta, steps: fields
Limits   FedProx at lam = 0 and APFL at alpha = 1 are Local
Departs  ridge = "auto" is one number for all clients, chosen on their validation rows, and 0 where there are none.
         Where rows do not determine v_i and nothing else does, v_i is the limit of a vanishing ridge: of least norm,
         and finite where classes are separable (tasks/proximal.py)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from mooring.algorithms.base import Algorithm
from mooring.algorithms.hyperparameters import auto_ridge, check_ranges, choose_inner_solver, resolve_auto
from mooring.core.cohort import Round
from mooring.core.local_training import LocalTraining
from mooring.core.local_work import LocalWork
from mooring.core.task import Task
from mooring.core.types import Auto, as_number
from mooring.estimates.client_statistics import ClientStatistics


class Server(NamedTuple):
    w: Tensor  # [d], never trained


class Client(NamedTuple):
    v: Tensor  # [C, d]


@dataclass(frozen=True)
class Local(LocalWork, Algorithm[Server, Client, None]):
    ridge: Auto = "auto"
    inner: str = "auto"  # "exact" where the task has a prox and few parameters, "sgd" elsewhere

    paper: ClassVar[str] = "alternative, Eq. 1.3; effect, Eq. 2"
    group: ClassVar[str] = "baseline"
    reveals: ClassVar[str] = "nothing: no message is sent"
    new_client_method: ClassVar[str] = "local"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, ridge=(0, None, "auto"), inner=("auto", "exact", "sgd"))

    @property
    def one_shot(self) -> bool:
        return self.inner == "exact"

    @property
    def required_statistics(self) -> tuple[str, ...]:
        return ("alone",) if self.ridge == "auto" else ()

    def resolve(self, task: Task, statistics: ClientStatistics) -> Local:
        ridge = auto_ridge(statistics) if self.ridge == "auto" else self.ridge
        return resolve_auto(replace(self, ridge=ridge, inner=choose_inner_solver(self, task)), task, statistics)

    def init(self, task: Task, w0: Tensor) -> tuple[Server, Client]:
        return Server(w0), Client(w0)

    def client_update(self, server: Server, client: Client, local: LocalTraining) -> tuple[Client, None]:
        ridge = as_number(self.ridge), torch.zeros_like(client.v)
        return Client(local.minimize(client.v, self.inner, pull=ridge)), None

    def server_update(self, server: Server, mean: None, round: Round) -> Server:
        return server

    def personal_model(self, server: Server, client: Client) -> Tensor:
        return client.v
