"""Dichotomous: the global model or local models, as heterogeneity or validation rows decide.

alternative, Corollaries 3.1 and 4.1 (known_r), Section 3.3 (full_data); effect, Appendix C.3 (sample_split).

    w   = arg min_w  sum_i p_i L_i(w)                        v_i = arg min_v  L_i(v) + ridge/2 |v|^2

    inner = "exact"   both at once, by the task's solvers
    inner = "sgd"     both by local steps in every round, w by FedAvg; the choice is made after each round

    known_r        w at all clients if R^2 <= ell_max m / (mu N), else each client's v_i
    full_data      both from all training rows; the one with the smaller validation risk
    sample_split   v_i from the share `fraction` of a client's rows, w from the other rows of all clients; then as
                   full_data
    unit           "system": one choice for all, by the p-weighted risk; "client": one per client; "auto": as in the
                   papers, per client after sample splitting (`effect`), for the system otherwise (`alternative`);
                   known_r always chooses for all: R is R_rms for the system's mean risk, R_max for each client's

Symbols  w: Server.w    v_i: Client.v    radius: R    ell_max: sup of the loss
Limits   inner = "exact": known_r with radius = 0 is Pooled, with a large one Local; fraction = 1 is Local, fraction = 0
         is Pooled. inner = "sgd": FedAvg in place of Pooled
Departs  validation rows decide, never test rows; a client without any follows the system's choice. radius = "auto" is
         estimated from the clients' fits; ell_max = "auto" is noise^2/mu, which makes the threshold the variance
         noise^2/(mu^2 n) of a local fit: a squared loss has no bound. ridge as in Local; fraction = 1/2 is ours.
         Without validation rows only known_r can choose. Networks (inner = "sgd") are this package's addition
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mooring.algorithms.base import Algorithm
from mooring.algorithms.hyperparameters import (
    auto_ridge,
    check_ranges,
    choose_inner_solver,
    resolve_auto,
)
from mooring.core.cohort import CohortData, Round, Rows
from mooring.core.errors import RequestError
from mooring.core.local_training import LocalTraining
from mooring.core.local_work import LocalWork
from mooring.core.seeds import uniforms
from mooring.core.task import HasProx, HasSolve, Task, require
from mooring.core.types import Auto, as_number
from mooring.estimates.client_statistics import ClientStatistics
from mooring.estimates.lambda_from_statistics import bound_curvature, require_federation
from mooring.theory.alternative import choose_model


class Server(NamedTuple):
    w: Tensor  # [d]


class Client(NamedTuple):
    v: Tensor  # [C, d], the local models
    uses_local: Tensor  # [C] bool, the decision


@dataclass(frozen=True)
class Dichotomous(LocalWork, Algorithm[Server, Client, Tensor]):
    variant: str = "full_data"
    unit: str = "auto"
    ridge: Auto = "auto"
    fraction: float = 0.5
    radius: Auto = "auto"  # these three: known_r only
    mu: Auto = "auto"
    ell_max: Auto = "auto"
    inner: str = "auto"  # "exact" where the task has solvers and few parameters, "sgd" elsewhere

    paper: ClassVar[str] = "alternative, Corollary 3.1 and Section 3.3; effect, Appendix C.3"
    group: ClassVar[str] = "baseline"
    reveals: ClassVar[str] = "everything: all rows are pooled; a baseline for simulations"
    pooled: ClassVar[bool] = True
    full_participation: ClassVar[bool] = True
    trained_models: ClassVar[int] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, inner=("auto", "exact", "sgd"))
        check_ranges(
            self, variant=("known_r", "full_data", "sample_split"), unit=("auto", "system", "client"), fraction=(0, 1)
        )
        check_ranges(
            self, ridge=(0, None, "auto"), radius=(0, None, "auto"), mu=(0, None, "auto"), ell_max=(0, None, "auto")
        )

    @property
    def one_shot(self) -> bool:
        return self.inner == "exact"

    @property
    def required_statistics(self) -> tuple[str, ...]:
        estimate = self.variant == "known_r" and self.radius == "auto"
        return (("alone",) if self.ridge == "auto" else ()) + (("rules",) if estimate else ())

    def resolve(self, task: Task, statistics: ClientStatistics) -> Dichotomous:
        ridge = auto_ridge(statistics) if self.ridge == "auto" else self.ridge
        unit = self.unit
        if unit == "auto":
            unit = "client" if self.variant == "sample_split" else "system"
        radius, mu, ell_max = self.radius, self.mu, self.ell_max
        if self.variant != "known_r":
            radius, mu, ell_max = (0.0 if value == "auto" else value for value in (radius, mu, ell_max))
        if radius == "auto":
            radii = require_federation("Dichotomous: radius = 'auto'", task, statistics).radii
            radius = radii.rms.value if unit == "system" else radii.most.value
        if "auto" in (mu, ell_max):
            bounds = bound_curvature("Dichotomous: variant = 'known_r'", task, statistics)
            mu = bounds.mu if mu == "auto" else mu
            ell_max = bounds.noise**2 / as_number(mu) if ell_max == "auto" else ell_max
        inner = choose_inner_solver(self, task)
        ready = replace(self, unit=unit, ridge=ridge, radius=radius, mu=mu, ell_max=ell_max, inner=inner)
        return resolve_auto(ready, task, statistics)

    def init(self, task: Task, w0: Tensor) -> tuple[Server, Client]:
        return Server(w0), Client(w0, torch.zeros((), dtype=torch.bool))

    def client_update(self, server: Server, client: Client, local: LocalTraining) -> tuple[Client, Tensor]:
        data = local.data
        own, shared = data.train, data.train
        if self.variant == "sample_split":
            own, shared = split_rows(data.train, data.keys, self.fraction, local.round.seed)
        has_shared = int(shared.size.sum()) > 0
        v, w = (self._solve if self.inner == "exact" else self._train)(server, client, local, own, shared)
        uses_local = (self.choose(v, w, local.task, data) | (not has_shared)) & (own.size > 0)
        return Client(v, uses_local), local.expand(w - server.w)

    def _solve(
        self, server: Server, client: Client, local: LocalTraining, own: Rows, shared: Rows
    ) -> tuple[Tensor, Tensor]:
        task = local.task
        zero = torch.zeros(1, task.dim, dtype=task.dtype)
        v, w = local.expand(zero), server.w
        if int(own.size.sum()) > 0:
            v = own.each(lambda rows, _: require(task, HasProx).prox(zero, as_number(self.ridge), rows.full(task)))
        if int(shared.size.sum()) > 0:
            w = require(task, HasSolve).solve(shared.pooled(local.data.p))[0]
        return v, w

    def _train(
        self, server: Server, client: Client, local: LocalTraining, own: Rows, shared: Rows
    ) -> tuple[Tensor, Tensor]:
        """Local steps of both models, and w averaged as in FedAvg."""
        ridge = as_number(self.ridge), torch.zeros_like(client.v)
        w_i = local.train(server.w, data=replace(local.data, train=shared))
        v = local.train(client.v, data=replace(local.data, train=own), pull=ridge)
        p = (local.data.p / local.data.p.sum()).to(w_i.dtype)
        return v, server.w + p @ (w_i - server.w)

    def choose(self, v: Tensor, w: Tensor, task: Task, data: CohortData) -> Tensor:
        """Return [C]: whether a client should use its local model."""
        if self.variant == "known_r":
            radius, mu, ell_max = map(as_number, (self.radius, self.mu, self.ell_max))
            choice = choose_model(radius, mu, ell_max, data.train.size.numpy())
            return torch.full((len(data),), choice == "local")
        if int(data.validation.size.sum()) == 0:
            raise RequestError(
                f"Dichotomous: variant = '{self.variant}' chooses on validation rows, but there are none; "
                "reserve some, or use variant = 'known_r'."
            )
        improvement = data.validation.each(
            lambda rows, at: task.risk(w.expand(len(at), -1), rows.padded()) - task.risk(v[at], rows.padded())
        )
        system = ((data.p * improvement).nansum() > 0).expand(len(data))
        return system if self.unit == "system" else torch.where(improvement.isnan(), system, improvement > 0)

    def server_update(self, server: Server, mean: Tensor, round: Round) -> Server:
        return Server(server.w + mean)

    def personal_model(self, server: Server, client: Client) -> Tensor:
        return torch.where(client.uses_local[:, None], client.v, server.w)


def split_rows(rows: Rows, keys: np.ndarray, fraction: float, seed: int) -> tuple[Rows, Rows]:
    """Return a random share `fraction` of each client's rows, rounded, and the other rows."""
    first, second = [], []
    for c, key in enumerate(keys):
        x, y = rows.of(c)
        draw = uniforms(seed, "algorithm", key, np.arange(len(y)))
        order = torch.from_numpy(np.argsort(draw, kind="stable"))
        cut = round(fraction * len(y))
        first.append((x[order[:cut]], y[order[:cut]]))
        second.append((x[order[cut:]], y[order[cut:]]))
    return Rows.stack(*map(list, zip(*first))), Rows.stack(*map(list, zip(*second)))
