"""Ditto: a personal model pulled towards the FedAvg model.

Li, Hu, Beirami, Smith. Ditto: fair and robust federated learning through personalization. ICML 2021, Algorithm 1.

    w_i  = w after `steps` local SGD steps on L_i
    v_i <- v_i - personal_eta (grad L_i(v_i) + lam (v_i - w))        `steps` times, w as it was sent
    w   <- sum_i p_i w_i / sum_i p_i                                 over the cohort

Symbols  w: Server.w    v_i: Client.v    lam, eta, personal_eta, steps: fields
Limits   lam = 0 is Local; lam -> infinity deploys the common model; at convergence v_i = prox_i(w)
Departs  w_i and v_i see the same minibatches and take equally many steps
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

from torch import Tensor

from mooring.algorithms.base import Algorithm, Auto
from mooring.algorithms.hyperparameters import (
    auto_eta,
    check_local_work,
    check_ranges,
    init_update_count,
    local_sgd,
    parse_lam_field,
    resolve_auto,
    tracked_updates,
)
from mooring.core.penalty import penalty_rows


class Server(NamedTuple):
    w: Tensor  # [d]


class Client(NamedTuple):
    v: Tensor  # [C, d]
    visits: Tensor  # [C], its own visits so far; [C, 0] where the step size does not depend on it


@dataclass(frozen=True)
class Ditto(Algorithm):
    lam: Auto = "auto"
    eta: Auto = "auto"
    personal_eta: Auto = "auto"
    decay: float = 0.0
    fading: str = "inverse"  # what decay does: see settings.schedule
    steps: int = 10
    epochs: int = 0  # passes over the data instead of steps, when > 0
    batch: Auto = "auto"  # 0: all rows
    draws: str = "passes"  # of minibatches; or "independent", "replacement"

    paper: ClassVar[str] = "ditto, Algorithm 1"
    reveals: ClassVar[str] = "each client's change of the common model; its personal model stays with it"
    new_client_method: ClassVar[str] = "prox"

    def __post_init__(self) -> None:
        parse_lam_field(self, ("auto",))
        check_ranges(self, personal_eta=(0, None, "auto"))
        check_local_work(self)

    def resolve(self, task, statistics):
        ready = resolve_auto(self, task, statistics)
        eta = auto_eta(task, statistics, ready.batch) if self.eta == "auto" else self.eta
        personal = (
            auto_eta(task, statistics, ready.batch, ready.lam) if self.personal_eta == "auto" else self.personal_eta
        )
        return replace(ready, eta=eta, personal_eta=personal)

    def init(self, task, w0):
        return Server(w0), Client(w0, init_update_count(self))

    def client_update(self, server, client, task, data, round):
        lam = penalty_rows(self.lam, data.index, client.v)
        personal = replace(self, eta=self.personal_eta)
        visits = tracked_updates(client.visits)
        w = local_sgd(self, task, server.w, data, round, visits)
        v = local_sgd(personal, task, client.v, data, round, visits, pull=(lam, server.w))
        return Client(v, client.visits + 1), w - server.w

    def server_update(self, server, mean, round):
        return Server(server.w + mean)

    def personal_model(self, server, client):
        return client.v
