"""FedProx, two stages: federated rounds find the global model, then every client fits its own near it.

alternative, Algorithms 2 and 3, with SoftLocalSGD.

    v_i <- project_W( v_i - eta_k ( grad L_B(v_i) + lam (v_i - w) ) )      K_t times, cohort only, from the last v_i
    w   <- project_W( w - gamma_t (m / cohort) sum_i p_i lam (w - v_i) )   over the cohort
    last: K_T more steps at every client, from its v_i towards the final w

    schedule = "inverse"   eta_k = 1/((mu + lam)(k + 1)),  gamma_t = 2 (mu + lam)/(lam mu (t + 1)),
                           K_t + 1 = (4t + 20) (max(lam, L)/mu)^2        (alternative, Lemma B.2)
    lam = "aer", "ier"      the rules of Theorems 4.4 and 4.5, from the clients' fits

Symbols  w: Server.w    v_i: Client.v    K_t: steps    K_T: final_steps    W: the ball of `radius` around 0    L: smooth
Limits   lam = 0 is Local; gamma = 1/lam with all clients and inner = "exact" is shared-model FedProx
Departs  sampled clients train and the others wait (the listings say the reverse); w is projected too, for early steps
         overshoot. gamma = "auto" is 1/lam; lam per client or coefficient merges as in one-stage FedProx. K_t is Lemma
         B.2's for losses up to L D^2/2, in which D cancels. radius = "auto" holds twice the farthest local fit.
         Minibatches are shuffled passes; draws = "independent" is the listing's. inner = "exact" solves without the
         bound. final_steps = "auto" is enough work to come a thousand times nearer to prox_i(w), up to the noise of
         minibatches: ln(1000)/(step (mu + lam)) steps, at most 10000; their size is eta or, where schedule = "inverse"
         would overshoot at first, 1/(L + lam). K_T of the theorems has constants that they do not give
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, inf, isfinite, log
from typing import ClassVar

from torch import Tensor

from mooring.algorithms.base import Algorithm
from mooring.algorithms.fedprox_personal import Client, Message, SendsPull, Server, server_direction
from mooring.algorithms.hyperparameters import (
    auto_eta,
    check_ranges,
    choose_inner_solver,
    parse_lam_field,
    resolve_auto,
    server_step_factor,
)
from mooring.core.cohort import Round
from mooring.core.errors import RequestError
from mooring.core.local_training import LocalTraining
from mooring.core.minibatches import batches_per_epoch
from mooring.core.penalty import PenaltyOrRule, PerClientPenalty, is_uniform, uniform_lam
from mooring.core.solvers import Ball, StepSize, TrainTerms, project
from mooring.core.task import HasSolve, Task
from mooring.core.types import Auto, as_number
from mooring.estimates.client_statistics import ClientStatistics
from mooring.estimates.lambda_from_statistics import bound_curvature, resolve_lam_rule
from mooring.theory.two_stage_rate import inner_steps, local_step, server_step

FINAL_STAGE_UPDATES = 10  # final_steps = "auto": as much work as so many local updates where the curvature is unknown
FINAL_RELATIVE_ERROR = 1e-3  # and elsewhere enough for the distance to prox_i(w) to shrink to this share
MAX_FINAL_STEPS = 10_000  # steps
FINAL_SLOT = 1  # the last stage draws apart from the round it follows
UNIT_DIAMETER = 1.0  # any: it cancels in the number of steps


@dataclass(frozen=True)
class FedProxTwoStage(SendsPull, Algorithm[Server, Client, Message]):
    lam: PenaltyOrRule = "auto"
    schedule: str = "constant"  # of step sizes and work; "inverse" is the theorems'
    inner: str = "sgd"  # or "exact"
    gamma: Auto = "auto"
    server_decay: float = 0.0  # the server's step is divided by 1 + server_decay (t - 1)
    final_steps: Auto = "auto"
    final_eta: Auto = "auto"  # "stay": as in a round; auto: that, but with final_steps = "auto" never too long
    radius: Auto = "auto"  # 0: W is all of space
    aggregation: str = "elastic"  # or "average": weights that sum to 1 over the cohort
    mu: Auto = "auto"  # used by schedule = "inverse"
    smooth: Auto = "auto"

    paper: ClassVar[str] = "alternative, Algorithms 2 and 3"
    reveals: ClassVar[str] = "each client's personal model: w + message; use secure aggregation"
    finetunes: ClassVar[bool] = True
    new_client_method: ClassVar[str] = "prox"

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_lam_field(self, ("auto", "aer", "ier"))
        check_ranges(self, schedule=("constant", "inverse"), inner=("sgd", "exact"), gamma=(0, None, "auto"))
        check_ranges(self, server_decay=(0, None), final_steps=(0, None, "auto"), final_eta=(0, None, "auto", "stay"))
        check_ranges(self, radius=(0, None, "auto"), aggregation=("elastic", "average"))
        check_ranges(self, mu=(0, None, "auto"), smooth=(0, None, "auto"))
        if self.schedule == "inverse" and (isinstance(self.lam, PerClientPenalty) or self.lam == 0):
            raise RequestError(f"FedProxTwoStage: schedule = 'inverse' needs lam as one number > 0, got {self.lam}.")

    @property
    def required_statistics(self) -> tuple[str, ...]:
        rules = ("rules",) if self.lam in ("aer", "ier") else super().required_statistics
        return rules + (("fit",) if self.radius == "auto" else ())

    def resolve(self, task: Task, statistics: ClientStatistics) -> FedProxTwoStage:
        choose_inner_solver(self, task)
        ready = self
        if self.lam in ("aer", "ier"):
            ready = replace(
                self, lam=resolve_lam_rule(f"FedProxTwoStage: lam = '{self.lam}'", self.lam, task, statistics)
            )
        ready = resolve_auto(ready, task, statistics)
        radius, mu, smooth = self.radius, self.mu, self.smooth
        if radius == "auto":
            radius = 0.0 if statistics.fit is None else 2 * float(statistics.fit.norm(dim=1).max())
        if self.schedule == "inverse" and "auto" in (mu, smooth):
            bounds = bound_curvature("FedProxTwoStage: schedule = 'inverse'", task, statistics)
            mu, smooth = bounds.mu if mu == "auto" else mu, bounds.smooth if smooth == "auto" else smooth
        gamma = self.gamma
        if gamma == "auto":
            gamma = 1.0 if not is_uniform(ready.lam) else 1 / uniform_lam(ready.lam) if ready.lam else 0.0
        ready = replace(
            ready,
            radius=radius,
            gamma=gamma,
            mu=0.0 if mu == "auto" else mu,
            smooth=0.0 if smooth == "auto" else smooth,
        )
        return resolve_final_stage(ready, task, statistics)

    def client_update(self, server: Server, client: Client, local: LocalTraining) -> tuple[Client, Message]:
        w, lam = server.w, local.penalty(self.lam)
        if self.inner == "exact":
            v = local.minimize(client.v, "exact", pull=(lam, w))
        else:
            size, steps = self.step_size(local), self.work(local)
            v = local.train(client.v, step_size=size, steps=steps, pull=(lam, w), region=self.region)
        return Client(v), Message(lam * (w - v), None if is_uniform(self.lam) else lam)

    def step_size(self, local: LocalTraining) -> StepSize:
        """eta_k of a local update."""
        if self.schedule == "inverse":
            return partial(local_step, mu=as_number(self.mu), lam=uniform_lam(self.lam))
        return local.schedule.eta

    def work(self, local: LocalTraining) -> int | Tensor:
        """K_t."""
        if self.schedule == "constant":
            return local.schedule.steps
        mu, smooth = as_number(self.mu), as_number(self.smooth)
        most = smooth * UNIT_DIAMETER**2 / 2  # how far losses in W lie above their minimum
        return inner_steps(local.round.t - 1, mu, smooth, uniform_lam(self.lam), most, UNIT_DIAMETER)

    @property
    def region(self) -> Ball | None:
        return Ball(as_number(self.radius)) if self.radius else None

    def server_update(self, server: Server, mean: Message, round: Round) -> Server:
        gamma = as_number(self.gamma)
        if self.schedule == "inverse":
            gamma = server_step(round.t - 1, as_number(self.mu), uniform_lam(self.lam))
        gamma = gamma * server_step_factor(self, round)
        return Server(project(server.w - gamma * server_direction(mean, round, self.aggregation), self.region))

    def finetune(self, server: Server, client: Client, local: LocalTraining) -> Client:
        pull, steps = (local.penalty(self.lam), server.w), int(as_number(self.final_steps))
        if self.inner == "exact":
            return Client(local.minimize(client.v, "exact", pull=pull))
        size = self.step_size(local) if self.final_eta == "stay" else as_number(self.final_eta)
        terms: TrainTerms = {"pull": pull, "region": self.region, "slot": FINAL_SLOT}
        return Client(local.train(client.v, step_size=size, steps=steps, fresh=True, **terms))

    def personal_model(self, server: Server, client: Client) -> Tensor:
        return client.v


def resolve_final_stage(algorithm: FedProxTwoStage, task: Task, statistics: ClientStatistics) -> FedProxTwoStage:
    """final_steps and final_eta as numbers (or "stay"): see the docstring."""
    if algorithm.final_steps != "auto":
        return algorithm if algorithm.final_eta != "auto" else replace(algorithm, final_eta="stay")
    eta = algorithm.final_eta
    if eta == "auto":
        inverse = algorithm.schedule == "inverse"
        eta = auto_eta(task, statistics, algorithm.batch, algorithm.lam) if inverse else algorithm.eta
    mu, lam = float(statistics.convex.min()), smallest_lam(algorithm.lam)
    if eta == "stay" or not (isfinite(mu) and isinstance(task, HasSolve) and task.smooth_loss):
        passes = batches_per_epoch(statistics.n.long(), as_number(algorithm.batch) or None).max()
        steps_of_update = algorithm.epochs * int(passes) if algorithm.epochs else algorithm.steps
        return replace(
            algorithm,
            final_eta="stay" if algorithm.final_eta == "auto" else eta,
            final_steps=FINAL_STAGE_UPDATES * steps_of_update,
        )
    pull = as_number(eta) * (max(mu, 0.0) + lam)
    need = ceil(log(1 / FINAL_RELATIVE_ERROR) / pull) if pull > 0 else inf
    if need > MAX_FINAL_STEPS and algorithm.inner != "exact":
        warnings.warn(
            f"FedProxTwoStage: final_steps = 'auto' is cut at {MAX_FINAL_STEPS}; so flat a loss asks for "
            f"{need:.3g} steps. "
            "Set inner = 'exact', a larger lam, or final_steps."
        )
    return replace(algorithm, final_eta=eta, final_steps=min(need, MAX_FINAL_STEPS))


def smallest_lam(lam: PenaltyOrRule) -> float:
    """The smallest pull of any client on any coefficient."""
    if not isinstance(lam, PerClientPenalty):
        return uniform_lam(lam)
    return min(lam.per_client or (1.0,)) * min(lam.per_coefficient or (1.0,))
