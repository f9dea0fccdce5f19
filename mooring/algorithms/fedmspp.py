"""FedMSPP: shared-model FedProx on a fresh minibatch a round; clients and records both speed it up.

mspp, Algorithm 1 (minibatch stochastic proximal points).

    B_i  `batch` fresh records of client i
    w_i ~ arg min_v  1/b sum_{z in B_i} l(v; z) + lam/2 |v - w|^2
    w  <- sum_i p_i w_i                                over the cohort

    growth = "smooth"   lam max{T^(1/3), (T/(bI))^(1/2)} is used, I clients a round for T rounds (mspp, Theorem 3: 8L)
    growth = "kinked"   lam sqrt(T)                       (mspp, Theorem 4: exact solves, lam > 2 x weak convexity)
    lam = "theory"      sets growth and lam as those theorems do, and certifies each solve; L bounds the curvature of
                        any batch: the steepest row's, or n/b times all rows' where that is less and rows are not drawn
                        twice
    output = "random"   deploys w_t*, t* drawn uniformly from 0..T-1: what the theorems speak about

Symbols  w: Server.w    lam: the paper's 1/eta_t    eta: the inner step size    b: batch    lipschitz: G
         w_t*: Server.drawn
Limits   batch = 0 (all records) is shared-model FedProx; lam -> infinity stands still
Departs  a batch is drawn without replacement; replacement = true draws with, as the theorems for given data ask.
         inner = "descent" takes gradient steps on the minibatch until |grad| <= tol, at most `steps`; with growth =
         "smooth" tol is mspp's, in gradient units. What was promised and reached is counted. The theorems bound the
         mean over rounds, so output = "last" has no guarantee. growth = "smooth" takes G, unless given, from the
         clients' fits; w sums by p, not 1/I. batch = "auto" is half the median client's rows, at most 32;
         lam = "auto" is scaled up by the median client's rows over the batch
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import sqrt
from typing import ClassVar, Literal, NamedTuple

from torch import Tensor

from mooring.algorithms.base import Algorithm, NoState
from mooring.algorithms.fedprox import (
    check_growth,
    resolve_lipschitz,
    scale_to_horizon,
    set_by_theorem,
    track_drawn,
)
from mooring.algorithms.hyperparameters import (
    DEFAULT_BATCH_ROWS,
    auto_lam,
    check_ranges,
    choose_inner_solver,
    parse_lam_field,
    resolve_auto,
)
from mooring.core.cohort import Round
from mooring.core.errors import RequestError
from mooring.core.local_training import LocalTraining
from mooring.core.penalty import PenaltyOrRule, uniform_lam
from mooring.core.task import Task
from mooring.core.types import Auto, as_number
from mooring.estimates.client_statistics import ClientStatistics
from mooring.theory.fedmspp_rate import gradient_tolerance, step_size


class Server(NamedTuple):
    w: Tensor  # [d]
    drawn: Tensor | None  # [d], w_t for t up to t*, then w_t*; None for output = "last"


@dataclass(frozen=True)
class FedMSPP(Algorithm[Server, NoState, Tensor]):
    lam: PenaltyOrRule = "auto"
    growth: str = "none"
    batch: int | Literal["auto"] = "auto"  # records a round; 0: all
    replacement: bool = False
    inner: str = "auto"  # "exact" or "descent"; auto: exact where the task has a prox
    eta: Auto = "auto"
    steps: int = 10
    tol: float = 1e-6
    lipschitz: float = 0.0  # 0: unknown
    output: str = "last"  # or "random"

    paper: ClassVar[str] = "mspp, Algorithm 1"
    group: ClassVar[str] = "global"
    reveals: ClassVar[str] = "each client's proximal step on its minibatch"
    fixed_steps: ClassVar[str] = "a local update is one proximal step, solved exactly or by descent"
    server_only: ClassVar[tuple[str, ...]] = ("drawn",)

    def __post_init__(self) -> None:
        parse_lam_field(self, ("auto", "theory"))
        check_ranges(
            self, growth=("none", "smooth", "kinked"), batch=(0, None, "auto"), inner=("auto", "exact", "descent")
        )
        check_ranges(self, eta=(0, None, "auto"), steps=(1, None), tol=(0, None), lipschitz=(0, None))
        check_ranges(self, output=("last", "random"))
        check_growth(self)
        if self.batch == 0 and (self.growth == "smooth" or self.lam == "theory"):
            raise RequestError("FedMSPP: theory's lam needs batch > 0; with all records use fedprox.")

    def resolve(self, task: Task, statistics: ClientStatistics) -> FedMSPP:
        batch = max(1, min(DEFAULT_BATCH_ROWS, int(statistics.n.median()) // 2)) if self.batch == "auto" else self.batch
        ready = set_by_theorem(self, task, statistics, factor=8, batch=batch) if self.lam == "theory" else self
        if self.lam == "auto" and batch:
            # The lam that fits n rows is n/b times too loose for b of them.
            ready = replace(self, lam=auto_lam(task, statistics) * max(1.0, float(statistics.n.median()) / batch))
        ready = replace(ready, batch=batch, inner=choose_inner_solver(ready, task, "descent"))
        return resolve_auto(resolve_lipschitz(ready, task, statistics), task, statistics)

    def init(self, task: Task, w0: Tensor) -> tuple[Server, NoState]:
        return Server(w0, w0 if self.output == "random" else None), NoState()

    def client_update(self, server: Server, client: NoState, local: LocalTraining) -> tuple[NoState, Tensor]:
        w, now, draws = server.w, self.at(local.round), "replacement" if self.replacement else "passes"
        drawn = local.minibatches(batch=as_number(self.batch), steps=1, draws=draws, trains_buffers=False)
        rows, pull = next(drawn).batch, (local.penalty(now.lam), w)
        v = local.minimize(w, self.inner, pull=pull, rows=rows, eta=now.eta, steps=self.steps, tol=now.tol)
        return client, v - w

    def at(self, round: Round) -> FedMSPP:
        """The settings for this horizon and cohort."""
        if self.growth == "none":
            return self
        if self.growth == "kinked":
            return scale_to_horizon(self, uniform_lam(self.lam) * sqrt(round.rounds), self.tol)
        smooth, sampled = uniform_lam(self.lam) / 8, round.cohort
        batch = as_number(self.batch)
        step = step_size(smooth, round.rounds, sampled, batch)
        return scale_to_horizon(self, 1 / step, gradient_tolerance(self.lipschitz, smooth, step, sampled, batch))

    def server_update(self, server: Server, mean: Tensor, round: Round) -> Server:
        w = server.w + mean
        return Server(w, track_drawn(w, server.drawn, round))

    def personal_model(self, server: Server, client: NoState) -> Tensor:
        return self.global_model(server)

    def global_model(self, server: Server) -> Tensor:
        return server.w if server.drawn is None else server.drawn
