"""FedProx, personal: personal models pulled towards a global one, both trained in one loop with warm starts.

effect, Algorithm 1, Eqs. 8-11.

    v_i <- K steps on  h_i(v) = L_i(v) + lam/2 |v - w|^2   from the last v_i      (exact: v_i = prox_i(w))
    g_i  = lam (w - v_i)
    w   <- w - gamma sum_i p_i g_i                          over the cohort

    lam per client or per coefficient:  w <- w - gamma (sum_i p_i lam_i)^-1 sum_i p_i lam_i (w - v_i)

    preset = "theory"   inner = "descent" with eta, gamma and steps of effect, Corollary 1
    lam = "auto", "one", "client", "coefficient", "client_and_coefficient" (empirical Bayes), "theory" (effect, Theorem
    1),
          "aer", "ier" (alternative, Theorems 4.4, 4.5), "shrinkage", "shrinkage_of_all": `mooring theory` prints each

Symbols  w: Server.w    v_i: Client.v    K: steps    gamma: server step (with lam per client, relative to plain
         averaging)
Limits   lam = 0 is Local; lam -> infinity is Global; gamma = 1/lam averages the personal models; exact prox is
         gradient descent on sum_i p_i F_i
Departs  the printed 1/m is p_i; w_{T+1} is returned, not w_T; clients may be sampled, the paper has all of
         them; gamma = "auto" is 1/L_g = 1/lam + 1/L with exact inner solves, half of it otherwise. inner = "sgd" is
         stochastic; inner = "descent" takes K full gradients; with tol > 0 it stops once |grad h_i| <= tol, which puts
         v_i within tol / (mu + lam) of prox_i(w), and counts the solves that did not get there
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from mooring.algorithms.base import Algorithm
from mooring.algorithms.hyperparameters import (
    check_ranges,
    choose_inner_solver,
    parse_lam_field,
    resolve_auto,
    server_step_factor,
)
from mooring.core.cohort import Round
from mooring.core.errors import RequestError
from mooring.core.local_training import LocalTraining
from mooring.core.local_work import LocalWork
from mooring.core.penalty import PenaltyOrRule, PerClientPenalty, is_uniform, penalty_rows, uniform_lam
from mooring.core.task import HasSolve, Task
from mooring.core.types import Auto
from mooring.estimates.client_statistics import ClientStatistics
from mooring.estimates.lambda_from_statistics import bound_curvature, resolve_lam_rule
from mooring.estimates.lambda_rules import LAMBDA_RULES
from mooring.theory.one_stage_rate import corollary_step_sizes


class Server(NamedTuple):
    w: Tensor  # [d]


class Client(NamedTuple):
    v: Tensor  # [C, d]


class Message(NamedTuple):
    pull: Tensor  # [C, d]  lam (w - v_i)
    lam: Tensor | None  # [C, 1] or [C, d]; None when one number serves all


class SendsPull(LocalWork):
    """What one-stage and two-stage FedProx share: clients send lam (w - v_i)."""

    lam: PenaltyOrRule

    @property
    def additive(self) -> bool:
        return is_uniform(self.lam)  # otherwise lam is sent, too, and the step is a ratio of two means

    def init(self, task: Task, w0: Tensor) -> tuple[Server, Client]:
        return Server(w0), Client(w0)


@dataclass(frozen=True)
class FedProxPersonal(SendsPull, Algorithm[Server, Client, Message]):
    lam: PenaltyOrRule = "auto"
    gamma: Auto | tuple[float, ...] = "auto"  # a tuple, one step per coefficient, is what "auto" gives for many lam
    server_decay: float = 0.0  # the server's step is divided by 1 + server_decay (t - 1)
    inner: str = "auto"  # "exact", "descent" or "sgd"; auto: exact where the task has a prox, sgd elsewhere
    tol: float = 0.0  # of inner = "descent"; 0: all steps are taken and nothing is promised
    warm: bool = True  # start from the client's last model; False: from the global one
    aggregation: str = "average"  # "elastic": unbiased under partial participation
    preset: str = "none"  # "theory": Corollary 1

    paper: ClassVar[str] = "effect, Algorithm 1"
    reveals: ClassVar[str] = "each client's personal model: w - message / lam; use secure aggregation"
    per_client_fields: ClassVar[tuple[str, ...]] = ("lam", "eta")
    server_fields: ClassVar[tuple[str, ...]] = ("gamma", "server_decay", "aggregation")
    new_client_method: ClassVar[str] = "prox"

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_lam_field(self, ("auto", *LAMBDA_RULES))
        check_ranges(self, inner=("auto", "exact", "descent", "sgd"), server_decay=(0, None), tol=(0, None))
        if not isinstance(self.gamma, tuple):
            check_ranges(self, gamma=(0, None, "auto"))
        check_ranges(self, aggregation=("average", "elastic"), preset=("none", "theory"))
        if self.preset == "theory":
            for field, free in (("gamma", "auto"), ("eta", "auto"), ("inner", "auto")):
                if getattr(self, field) != free:
                    value = getattr(self, field)
                    raise RequestError(f"FedProxPersonal: preset = 'theory' sets {field}; leave it out, got {value!r}.")

    @property
    def required_statistics(self) -> tuple[str, ...]:
        return ("rules",) if self.lam in LAMBDA_RULES else super().required_statistics

    def resolve(self, task: Task, statistics: ClientStatistics) -> FedProxPersonal:
        ready = self
        if ready.lam in LAMBDA_RULES:
            owner = f"FedProxPersonal: lam = '{ready.lam}'"
            ready = replace(ready, lam=resolve_lam_rule(owner, ready.lam, task, statistics))
        if ready.preset == "theory":
            ready = replace(ready, batch=0, inner="descent", eta=0.0, gamma=0.0, preset="none")
            return set_by_corollary(resolve_auto(ready, task, statistics), task, statistics)
        ready = resolve_auto(replace(ready, inner=choose_inner_solver(ready, task)), task, statistics)
        return ready if ready.gamma != "auto" else replace(ready, gamma=auto_gamma(ready, task, statistics))

    def client_update(self, server: Server, client: Client, local: LocalTraining) -> tuple[Client, Message]:
        w, lam = server.w, local.penalty(self.lam)
        v = local.minimize(client.v if self.warm else w, self.inner, pull=(lam, w), tol=self.tol)
        return Client(v), Message((w - v).mul_(lam), None if is_uniform(self.lam) else lam)

    def server_update(self, server: Server, mean: Message, round: Round) -> Server:
        gamma = torch.as_tensor(self.gamma, dtype=server.w.dtype) * server_step_factor(self, round)
        return Server(server.w - gamma * server_direction(mean, round, self.aggregation))

    def personal_model(self, server: Server, client: Client) -> Tensor:
        return client.v


def server_direction(mean: Message, round: Round, aggregation: str) -> Tensor:
    """The server's direction: sum_i p_i lam (w - v_i), or with lam_i its ratio to sum_i p_i lam_i, over the cohort."""
    step = mean.pull
    if mean.lam is not None:
        step = step / mean.lam.clamp(min=torch.finfo(step.dtype).tiny)
    return step * (round.clients / round.cohort * round.weight) if aggregation == "elastic" else step


def auto_gamma(algorithm: FedProxPersonal, task: Task, statistics: ClientStatistics) -> float | tuple[float, ...]:
    """1/L_g with exact inner solves, half of that (effect, Corollary 1) otherwise; plain averaging where L is unknown.

    With lam_ij, the diagonal matrix of sum_i p_i lam_ij L / (lam_ij + L) is above the Hessian of sum_i p_i F_i, so each
    coefficient j has its own step: one step for all would be too short for those with large lam_ij.
    """
    smooth = float(statistics.smooth.max())
    is_known = smooth > 0 and task.smooth_loss and isinstance(task, HasSolve)
    share = 1.0 if algorithm.inner == "exact" else 0.5
    if not isinstance(algorithm.lam, PerClientPenalty):
        number = uniform_lam(algorithm.lam)
        return 0.0 if number == 0 else share * (1 / number + 1 / smooth) if is_known else 1 / number
    lam = penalty_rows(algorithm.lam, torch.arange(len(statistics.n)), statistics.p)
    curvature = (statistics.p[:, None] * lam * smooth / (lam + smooth)).sum(0)
    pull = (statistics.p[:, None] * lam).sum(0)
    return tuple((share * pull / curvature).where(curvature > 0, 1.0).tolist()) if is_known else 1.0


def set_by_corollary(algorithm: FedProxPersonal, task: Task, statistics: ClientStatistics) -> FedProxPersonal:
    """eta, gamma and steps of effect, Corollary 1."""
    bounds = bound_curvature("FedProxPersonal: preset = 'theory'", task, statistics)
    if isinstance(algorithm.lam, PerClientPenalty) or algorithm.lam == 0:
        raise RequestError(f"FedProxPersonal: preset = 'theory' needs lam as one number > 0, got {algorithm.lam}.")
    sizes = corollary_step_sizes(bounds.mu, bounds.smooth, uniform_lam(algorithm.lam))
    return replace(algorithm, eta=sizes.eta, gamma=sizes.gamma, steps=sizes.steps)
