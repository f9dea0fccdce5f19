"""FedProx: clients return a proximal step from the global model, the server averages.

mspp, Eq. 1.3; kernel, Eq. 6 (there eta = 1/lam).

    w_i ~ arg min_v  L_i(v) + lam/2 |v - w|^2
    w  <- sum_i p_i w_i                                over the cohort

    growth = "smooth"   lam max{T^(1/3), (T/I)^(1/2)} is used, I clients a round for T rounds (mspp, Theorem 1: lam =
                        3L); lam T^(1/3) with every client in every round (Remark 2)
    growth = "kinked"   lam sqrt(T)                       (mspp, Theorem 2: exact solves, lam > 2 x weak convexity)
    lam = "theory"      sets growth and lam as those theorems do, and certifies each solve
    output = "random"   deploys w_t*, t* drawn uniformly from 0..T-1: what the theorems speak about

Symbols  w: Server.w    lam: the papers' 1/eta    eta: the inner step size    lipschitz: G    w_t*: Server.drawn
Limits   lam -> 0 with SGD is FedAvg; lam -> infinity stands still; the fixed point minimizes sum_i p_i F_i, F_i the
         Moreau envelope of L_i, not sum_i p_i L_i
Departs  inner = "descent" stops at a gradient certificate |grad| <= tol, at most `steps` steps; with growth = "smooth"
         tol is mspp's min{G/sqrt(I), 2LG/(lam I)}, or L^2 G/lam^2 with every client: bounds on the gradient, which one
         full gradient checks after SGD's steps. What was promised and reached is counted. The theorems bound the
         mean over rounds, so output = "last" has no guarantee. growth = "smooth" takes G, unless given, from the
         clients' fits; lam = "theory" takes 1/lam of Theorem 2 from the rows' lengths; w sums by p, not 1/I
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf, sqrt
from typing import TYPE_CHECKING, ClassVar, NamedTuple, TypeVar

from torch import Tensor

from mooring.algorithms.base import Algorithm, NoState
from mooring.algorithms.hyperparameters import (
    batch_smoothness,
    check_ranges,
    choose_inner_solver,
    parse_lam_field,
    resolve_auto,
)
from mooring.algorithms.server_optimizers import ServerOptimizer, apply_change, init_moments
from mooring.core.cohort import Round
from mooring.core.errors import RequestError
from mooring.core.local_training import LocalTraining
from mooring.core.local_work import LocalWork
from mooring.core.penalty import PenaltyOrRule, PerClientPenalty, uniform_lam
from mooring.core.seeds import uniforms
from mooring.core.solvers import record_tolerance
from mooring.core.task import HasProx, Task
from mooring.core.types import as_number
from mooring.estimates.client_statistics import ClientStatistics
from mooring.theory import fedprox_shared_rate as rate

if TYPE_CHECKING:
    from mooring.algorithms.fedmspp import FedMSPP

MAX_CERTIFIED_STEPS = 200  # steps that a certified solve may take: lam_T >= 3L at least halves its error with each


F = TypeVar("F", "FedProx", "FedMSPP")


class Server(NamedTuple):
    w: Tensor  # [d]
    moments: Tensor  # [k, d], of the server's optimizer
    drawn: Tensor | None  # [d], w_t for t up to t*, then w_t*; None for output = "last"


@dataclass(frozen=True)
class FedProx(LocalWork, ServerOptimizer, Algorithm[Server, NoState, Tensor]):
    lam: PenaltyOrRule = "auto"
    growth: str = "none"
    inner: str = "auto"  # "exact", "descent" or "sgd"; auto: exact where the task has a prox, sgd elsewhere
    tol: float = 1e-6
    lipschitz: float = 0.0  # 0: unknown
    output: str = "last"  # or "random"

    paper: ClassVar[str] = "mspp, Eq. 1.3; kernel, Eq. 6"
    group: ClassVar[str] = "global"
    reveals: ClassVar[str] = "each client's proximal step from the global model"
    server_only: ClassVar[tuple[str, ...]] = ("moments", "drawn")

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_lam_field(self, ("auto", "theory"))
        check_ranges(self, growth=("none", "smooth", "kinked"), inner=("auto", "exact", "descent", "sgd"))
        check_ranges(self, tol=(0, None), lipschitz=(0, None), output=("last", "random"))
        check_growth(self)

    def resolve(self, task: Task, statistics: ClientStatistics) -> FedProx:
        ready = set_by_theorem(self, task, statistics, factor=3) if self.lam == "theory" else self
        ready = replace(ready, inner=choose_inner_solver(ready, task))
        return resolve_auto(resolve_lipschitz(ready, task, statistics), task, statistics)

    def init(self, task: Task, w0: Tensor) -> tuple[Server, NoState]:
        return Server(w0, init_moments(self, w0), w0 if self.output == "random" else None), NoState()

    def client_update(self, server: Server, client: NoState, local: LocalTraining) -> tuple[NoState, Tensor]:
        w, now = server.w, self.at(local.round)
        lam = local.penalty(now.lam)
        v = local.minimize(w, self.inner, pull=(lam, w), eta=now.eta, tol=now.tol)
        if self.inner == "sgd" and self.growth == "smooth":
            record_tolerance(local.task, v, local.rows, lam, w, now.tol)
        return client, v - w

    def at(self, round: Round) -> FedProx:
        """The settings for this horizon and cohort."""
        if self.growth == "none":
            return self
        if self.growth == "kinked":
            return scale_to_horizon(self, uniform_lam(self.lam) * sqrt(round.rounds), self.tol)
        smooth, sampled = uniform_lam(self.lam) / 3, round.cohort
        if sampled == round.clients:
            step = rate.full_participation_step(smooth, round.rounds)
            return scale_to_horizon(self, 1 / step, rate.full_participation_tolerance(self.lipschitz, smooth, step))
        step = rate.step_size(smooth, round.rounds, sampled)
        return scale_to_horizon(self, 1 / step, rate.gradient_tolerance(self.lipschitz, smooth, step, sampled))

    def server_update(self, server: Server, mean: Tensor, round: Round) -> Server:
        w, moments = apply_change(self, server.w, server.moments, mean)
        return Server(w, moments, track_drawn(w, server.drawn, round))

    def personal_model(self, server: Server, client: NoState) -> Tensor:
        return self.global_model(server)

    def global_model(self, server: Server) -> Tensor:
        return server.w if server.drawn is None else server.drawn


def track_drawn(w: Tensor, drawn: Tensor | None, round: Round) -> Tensor | None:
    """w_t up to the drawn round t*, then w_t*; None where nothing is drawn."""
    if drawn is None:
        return None
    return w if round.t <= draw_output_round(round) else drawn


def draw_output_round(round: Round) -> int:
    """t*, uniform on 0..T-1: a function of the seed and the horizon alone."""
    return int(uniforms(round.seed, "algorithm", round.rounds)[0] * round.rounds)


def check_growth(algorithm: FedProx | FedMSPP) -> None:
    """A lam that grows with the horizon is one number, and never 0."""
    lam, owner = algorithm.lam, type(algorithm).__name__
    if algorithm.growth != "none" and (isinstance(lam, PerClientPenalty) or lam == 0):
        raise RequestError(f"{owner}: growth = '{algorithm.growth}' needs lam as one number > 0, got {lam}.")


def set_by_theorem(algorithm: F, task: Task, statistics: ClientStatistics, factor: float, batch: int = 0) -> F:
    """lam = factor x L with certified solves (smooth losses), or 1/rho with exact ones (kinked: rho < 1/(2 weak)).

    L bounds the curvature of what is solved: of all rows, or of minibatches.
    """
    owner = type(algorithm).__name__
    if task.smooth_loss:
        smooth = batch_smoothness(statistics, batch, getattr(algorithm, "replacement", False))
        if not 0 < smooth < inf:
            raise RequestError(
                f"{owner}: lam = 'theory' needs the loss's smoothness, which is {smooth:.3g} for task '{task.name}'; "
                "give lam a number."
            )
        inner = choose_inner_solver(algorithm, task, otherwise="descent")
        steps = max(algorithm.steps, MAX_CERTIFIED_STEPS)
        return replace(algorithm, lam=factor * smooth, growth="smooth", inner=inner, steps=steps, batch=batch)
    if not isinstance(task, HasProx):
        raise RequestError(f"{owner}: lam = 'theory' needs exact solves, and task '{task.name}' has no exact prox.")
    weak = max(0.0, -float(statistics.convex.min()))
    return replace(algorithm, lam=max(float(statistics.noise.max()) ** 2, 4 * weak), growth="kinked", inner="exact")


def resolve_lipschitz(algorithm: F, task: Task, statistics: ClientStatistics) -> F:
    """The algorithm with G where inexact solves must keep a tolerance that is proportional to it."""
    if algorithm.growth != "smooth" or algorithm.inner == "exact" or algorithm.lipschitz > 0:
        return algorithm
    lipschitz = float(statistics.noise.max())
    if not 0 < lipschitz < inf:
        raise RequestError(
            f"{type(algorithm).__name__}: growth = 'smooth' promises gradients in proportion to the loss's Lipschitz "
            f"constant, which is {lipschitz:.3g} for task '{task.name}'; set lipschitz, or inner = 'exact'."
        )
    return replace(algorithm, lipschitz=lipschitz)


def scale_to_horizon(algorithm: F, lam: float, tol: float) -> F:
    """The algorithm at the lam of this horizon; its step size, resolved for the smaller lam, gives way."""
    eta = 1 / (1 / as_number(algorithm.eta) + lam - uniform_lam(algorithm.lam))
    return replace(algorithm, lam=lam, tol=tol, eta=eta)
