"""APFL: each client mixes a model of its own with the global one, and may learn how much of each.

apfl, Section 3, Eqs. 3-6 (Local Descent APFL), Theorems 2, 3 and 7.

    u = alpha_i v_i + (1 - alpha_i) w_i                          before the step; one minibatch xi for all three
    w_i     <- project( w_i - eta_t grad L_i(w_i; xi) )          from the global w, `steps` times
    v_i     <- project( v_i - eta_ratio eta_t alpha_i grad L_i(u; xi) )          kept from round to round
    alpha_i <- clip( alpha_i - eta_t (s <v_i - w_i, grad L_i(u; xi)> + alpha_pull alpha_i), 0, 1 )    (Eq. 6: s = 1)
    w       <- sum_i p_i w_i / sum_i p_i                         over the cohort

    alpha_by = "mixture"  s = 1
    alpha_by = "parts"    s = alpha_i^2 + (1 - alpha_i)^2: the gradients of both parts, which carry their shares
                          already, are weighed by them again, as in the authors' program

    agnostic > 0          w is for the worst mixture of clients, min_w max_q sum_i q_i L_i(w) over the simplex (Eq. 8):
                          w <- w + sum_i q_i (w_i - w) / sum_i q_i  over the cohort,
                          q <- project_simplex( q + agnostic (m/cohort) L(w) ),  L_i(w) = 0 outside of the cohort

    eta = "theory"        16/(mu (t + a)) of Theorem 2, or 8/(mu (t + a)) of Theorem 7, local iterations t = 1..T
    eta = "nonconvex"     1/(2 sqrt(5) L sqrt(T)) of Theorem 3: full gradients, all clients every round, steps <= rounds

    output = "last"       client i deploys alpha_i v_i + (1 - alpha_i) w
    output = "own"        client i deploys alpha_i v_i + (1 - alpha_i) w_i, w_i its own copy after its last update: what
                          the paper's experiments evaluate, over the clients of a round, right after their local steps
    output = "average"    both averaged over the iterations t = 1..T with weights (t + shift)^2   (Theorem 2)

Symbols  w: Server.w    v_i, alpha_i: Client    alpha: one number, or a list with each client's    T: rounds * steps
         W: the ball |.| <= radius (0: all of space)
Limits   alpha = 0 is FedAvg, alpha = 1 is Local, with adapt = "no"; w does not depend on alpha; without a ball and for
         alpha > 0 the mixture tends to the client's own fit (Remark 2), so finite rounds are what regularizes
         eta_ratio other than 1: "different learning rate for local and global update" (Section 4)
Departs  alpha_i times the gradient in the step of v_i: the chain rule that Eq. 5 leaves out and Appendix E uses; alpha
         clipped to [0, 1]; the average over clients weighs by p; adapt = "round" takes Eq. 6 at the first local step;
         adapt_on = "auto" takes Eq. 6 on validation rows where there are any, the paper on the training minibatch
         (adapt_on = "train"), where alpha drifts to 1 by overfitting; alpha_pull and alpha_by = "parts" are additions;
         decay by 1% a step is read as eta/(1 + 0.01 k), other readings are eta_schedule = "steps", "rounds", "epochs";
         Theorem 2's schedule is also used with sampled clients, where its proof does not go through; running
         statistics of w_i follow its own forward passes, those of v_i the mixture's
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import inf, nan
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from mooring.algorithms.base import Algorithm
from mooring.algorithms.hyperparameters import check_ranges, resolve_auto
from mooring.core.cohort import Round, broadcast_per_client
from mooring.core.errors import RequestError
from mooring.core.local_training import LocalTraining
from mooring.core.local_work import LocalWork
from mooring.core.sgd_step import mixture_slope_factor
from mooring.core.solvers import Ball
from mooring.core.task import Task
from mooring.estimates.client_statistics import ClientStatistics
from mooring.estimates.lambda_from_statistics import bound_curvature
from mooring.theory import apfl_schedule


class Server(NamedTuple):
    w: Tensor  # [d]
    average: Tensor | None  # [d], the iterations' average; None for output = "last"
    done: Tensor | None  # how many iterations it covers
    q: Tensor | None = None  # [m], the worst mixture; [0] before the first round, where it is p; None unless agnostic


class Client(NamedTuple):
    v: Tensor  # [C, d]
    alpha: Tensor  # [C]; nan before the first update where each client has its own
    average: Tensor  # [C, d], of v; [C, 0] for output = "last"
    done: Tensor  # [C], how many iterations it covers
    own: Tensor  # [C, d], its copy of the global model after its last local update; [C, 0] but for output = "own"


class Mixture(NamedTuple):
    w: Tensor  # [C, d], each client's copy of the global model
    v: Tensor  # [C, d]
    alpha: Tensor  # [C]


class Message(NamedTuple):
    change: Tensor  # [C, d]  w_i - w
    path: Tensor | None  # [C, d]  this round's iterations of w_i, averaged, less w
    share: Tensor | None = None  # [C, 1]  q_i/p_i, with which `change` is multiplied where the run is agnostic
    losses: Tensor | None = None  # [C, m]  L_i(w)/p_i at place i: their weighted mean has every client's loss at w


@dataclass(frozen=True)
class APFL(LocalWork, Algorithm[Server, Client, Message]):
    alpha: float | tuple[float, ...] = 0.5  # the mixture, or where it starts; a list has one number per client
    adapt: str = "round"  # "no", once a "round", or every "step"
    adapt_on: str = "auto"  # "validation" where there are such rows, else "train"
    alpha_pull: float = 0.0  # draws alpha to 0, the global model
    alpha_by: str = "mixture"  # whose gradient moves alpha
    decay: float = field(default=0.01, kw_only=True)
    eta_ratio: float = 1.0  # the step size of v over that of w
    radius: float = 0.0
    output: str = "last"
    shift: float = 0.0
    agnostic: float = 0.0  # the step size of q (Eq. 8); 0: w is for the mean risk

    paper: ClassVar[str] = "apfl, Section 3"
    reveals: ClassVar[str] = "each client's change of the global model; its own model and mixture stay with it"
    server_only: ClassVar[tuple[str, ...]] = ("average", "done")
    new_client_method: ClassVar[str] = "mixture"
    trained_models: ClassVar[int] = 2
    eta_rules: ClassVar[tuple[str, ...]] = ("theory", "nonconvex")

    def __post_init__(self) -> None:
        if isinstance(self.alpha, list | tuple):
            object.__setattr__(self, "alpha", tuple(self.alpha))
            for alpha in self.alpha:
                check_ranges(replace(self, alpha=alpha), alpha=(0, 1))
        else:
            check_ranges(self, alpha=(0, 1))
        super().__post_init__()
        check_ranges(
            self, adapt=("no", "round", "step"), adapt_on=("auto", "train", "validation"), alpha_pull=(0, None)
        )
        check_ranges(self, alpha_by=("mixture", "parts"))
        check_ranges(self, radius=(0, None), output=("last", "own", "average"), shift=(0, None), eta_ratio=(0, None))
        check_ranges(self, agnostic=(0, None))
        if self.agnostic and self.output == "average":
            raise RequestError("APFL: output = 'average' is for the mean risk; set agnostic = 0 or another output.")
        if self.output == "average" and (self.adapt != "no" or self.epochs):
            raise RequestError(
                "APFL: output = 'average' is for a fixed mixture and equal numbers of steps; "
                f"set adapt = 'no' and epochs = 0, got adapt = {self.adapt!r} and epochs = {self.epochs}."
            )

    def resolve(self, task: Task, statistics: ClientStatistics) -> APFL:
        held_out = float(statistics.validation.sum()) > 0
        if self.adapt != "no" and self.adapt_on == "validation" and not held_out:
            raise RequestError("APFL: adapt_on = 'validation' needs validation rows, but no client has any.")
        if isinstance(self.alpha, tuple) and len(self.alpha) != len(statistics.n):
            raise RequestError(
                f"APFL: alpha has {len(self.alpha)} numbers, one per client, but there are {len(statistics.n)}."
            )
        rules = {"theory": set_by_theory, "nonconvex": set_for_nonconvex}
        ready = rules[self.eta](self, task, statistics) if self.eta in rules else self
        if self.adapt_on == "auto":
            ready = replace(ready, adapt_on="validation" if held_out else "train")
        return resolve_auto(ready, task, statistics)

    def init(self, task: Task, w0: Tensor) -> tuple[Server, Client]:
        alpha = torch.tensor(nan if isinstance(self.alpha, tuple) else float(self.alpha), dtype=w0.dtype)
        averages, zero, empty = self.output == "average", torch.tensor(0), w0[:0]
        q = torch.zeros_like(empty) if self.agnostic else None
        server = Server(w0, w0, zero, q) if averages else Server(w0, None, None, q)
        return server, Client(w0, alpha, w0 if averages else empty, zero, w0 if self.output == "own" else empty)

    def client_update(self, server: Server, client: Client, local: LocalTraining) -> tuple[Client, Message]:
        round = local.round
        if self.eta_schedule == "horizon" and self.steps > round.rounds:
            raise RequestError(
                "APFL: eta_schedule = 'horizon' (Theorem 3) needs steps <= rounds, "
                f"got {self.steps} and {round.rounds}."
            )
        client = self.with_alpha(client, local)
        before, average, path = (round.t - 1) * self.steps, self.caught_up(client, round.t - 1).average, server.w
        mixture = self.mix_at_once(server.w, client, local)
        if mixture is None:
            mixture = start = Mixture(local.expand(server.w), client.v, client.alpha)
            for now, mixture in enumerate(self.local_steps(start, local), start=before + 1):
                if self.output == "average":
                    average = update_mean(average, mixture.v, share(self.shift, now - 1, now))
                    path = update_mean(path, mixture.w, share(self.shift, now - 1, now, begin=before))
        done = torch.full_like(client.done, before + self.steps)
        own = mixture.w if self.output == "own" else client.own
        message = Message(mixture.w - server.w, path - server.w if self.output == "average" else None)
        return Client(mixture.v, mixture.alpha, average, done, own), self.by_worst_mixture(message, server, local)

    def local_steps(self, mixture: Mixture, local: LocalTraining, moves_w: bool = True) -> Iterator[Mixture]:
        """The models after each local step; w is fixed for clients that join after the training (Eq. 7)."""
        w, v, alpha = mixture
        on_validation = self.adapt_on == "validation"
        held_out = local.minibatches(part="validation", slot=1)
        adapts = local.data.validation.size > 0 if on_validation else torch.ones(len(local), dtype=torch.bool)
        for step in local.steps(region=Ball(self.radius) if self.radius else None):
            u, before = mix_models(alpha, v, w), alpha
            slope = step.grad(u)
            if self.adapts_in(step.k) and bool(adapts.any()):
                along = local.task.grad(u, next(held_out).batch) if on_validation else slope
                along = alpha_gradient(v, w, along) * (mixture_slope_factor(alpha) if self.alpha_by == "parts" else 1)
                moved = alpha - step.rate(v).flatten() * (along + self.alpha_pull * alpha)
                moving = adapts if step.active is None else adapts & step.active
                alpha = torch.where(moving, moved.clamp(0, 1), alpha)
            v = step.move(v, before[:, None] * slope, self.eta_ratio)
            w = step.move(w, step.grad(w)) if moves_w else w
            yield Mixture(w, v, alpha)

    def mix_at_once(self, w: Tensor, client: Client, local: LocalTraining) -> Mixture | None:
        """The models after all local steps, by a task that takes them at once; None if they are taken one by one."""
        if not self.rule.is_plain or self.radius or self.output == "average" or self.eta_ratio != 1:
            return None
        mixed = local.mix(
            w, client.v, client.alpha, moves_in_step=self.adapts_in, on_validation=self.adapt_on == "validation",
            pull=self.alpha_pull, by_parts=self.alpha_by == "parts",
        )  # fmt: skip
        return None if mixed is None else Mixture(*mixed)

    def by_worst_mixture(self, message: Message, server: Server, local: LocalTraining) -> Message:
        """The message of an agnostic run: the change weighs by q instead of p, and the loss at w goes along."""
        if server.q is None:
            return message
        index, p = local.data.index, local.data.p.to(server.w.dtype)
        share = (server.q[index] / p if len(server.q) else torch.ones_like(p))[:, None]
        losses = torch.zeros(len(local), local.round.clients, dtype=p.dtype)
        losses[torch.arange(len(local)), index] = local.loss(server.w).to(p.dtype) / p
        return message._replace(change=share * message.change, share=share, losses=losses)

    @property
    def additive(self) -> bool:
        return not self.agnostic  # otherwise messages hold losses, and the step is a ratio of two means

    def adapts_in(self, k: int) -> bool:
        """Whether the mixture moves in the k-th step of a local update."""
        return self.adapt == "step" or (self.adapt == "round" and k == 0)

    def server_update(self, server: Server, mean: Message, round: Round) -> Server:
        if mean.losses is not None:
            return self.merge_worst_mixture(server, mean, round)
        w = server.w + mean.change
        if server.average is None or server.done is None or mean.path is None:  # output is not "average"
            return Server(w, None, None)
        before, now = (round.t - 1) * self.steps, round.t * self.steps
        average = update_mean(
            server.average, server.w, share(self.shift, server.done, before)
        )  # rounds without a reply
        average = update_mean(average, server.w + mean.path, share(self.shift, before, now))
        return Server(w, average, torch.full_like(server.done, now))

    def merge_worst_mixture(self, server: Server, mean: Message, round: Round) -> Server:
        """One step down in w and one up in q; the weighted means are over the cohort."""
        assert mean.share is not None and mean.losses is not None and server.q is not None
        share = mean.share.clamp(min=torch.finfo(mean.share.dtype).tiny)
        losses = mean.losses * round.weight
        begin = server.q if len(server.q) else torch.full_like(losses, 1 / round.clients)
        q = project_simplex(begin + self.agnostic * round.clients / round.cohort * losses)
        return Server(server.w + mean.change / share, None, None, q)

    def finetune(self, server: Server, client: Client, local: LocalTraining) -> Client:
        return self.with_alpha(self.caught_up(client, local.round.t), local)

    def personal_model(self, server: Server, client: Client) -> Tensor:
        if self.output == "average":
            assert server.average is not None
            return mix_models(client.alpha, client.average, server.average)
        return mix_models(client.alpha, client.v, client.own if self.output == "own" else server.w)

    def global_model(self, server: Server) -> Tensor:
        return server.w if server.average is None else server.average

    def with_alpha(self, client: Client, local: LocalTraining) -> Client:
        """The client, before its first update with the mixture that is its own."""
        if not isinstance(self.alpha, tuple):
            return client
        own = torch.tensor(self.alpha, dtype=client.alpha.dtype)[local.data.index]
        return client._replace(alpha=torch.where(client.alpha.isnan(), own, client.alpha))

    def caught_up(self, client: Client, rounds: int) -> Client:
        """The client after so many rounds, with v standing still in those that it missed."""
        if self.output != "average":
            return client
        now = torch.full_like(client.done, rounds * self.steps)
        return client._replace(
            average=update_mean(client.average, client.v, share(self.shift, client.done, now)), done=now
        )


def project_simplex(values: Tensor) -> Tensor:
    """The nearest point with entries >= 0 that sum to 1."""
    ordered = values.sort(descending=True).values
    excess = (ordered.cumsum(0) - 1) / torch.arange(1, len(values) + 1, dtype=values.dtype)
    return (values - excess[int((ordered > excess).sum()) - 1]).clamp(min=0)


def share(shift: float, before: float | Tensor, now: float | Tensor, begin: int = 0) -> Tensor:
    """The weight of the iterations before+1..now among begin+1..now."""
    counts: Any = (torch.as_tensor(t, dtype=torch.float64) for t in (begin, before, now))
    start, middle, end = (torch.as_tensor(apfl_schedule.weight_sum(t, shift)) for t in counts)
    return (end - middle) / (end - start).clamp(min=1)


def update_mean(mean: Tensor, value: Tensor, part: Tensor) -> Tensor:
    """The running mean after `value` has come in with the weight `part` (one number, or one per client)."""
    return mean + broadcast_per_client(part, mean) * (value - mean)


def mix_models(alpha: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """alpha_i v_i + (1 - alpha_i) w, for every client."""
    return torch.lerp(w.expand_as(v), v, alpha[:, None])


def alpha_gradient(v: Tensor, w: Tensor, slope: Tensor) -> Tensor:
    """[C]: d/d alpha of L_i(alpha v + (1 - alpha) w), given the gradient of L_i at the mixture (Eq. 6)."""
    return ((v - w) * slope).sum(1)


def set_by_theory(algorithm: APFL, task: Task, statistics: ClientStatistics) -> APFL:
    """Step sizes 16/(mu (t + a)) of Theorem 2, or 8/(mu (t + a)) of Theorem 7, as eta/(1 + decay k) with k = t - 1."""
    mu, smooth, _ = bound_curvature("APFL: eta = 'theory'", task, statistics)
    least = apfl_schedule.least_alpha(mu, smooth)
    smallest = min(algorithm.alpha) if isinstance(algorithm.alpha, tuple) else algorithm.alpha
    any_alpha = algorithm.adapt != "no" or smallest < least
    if any_alpha and not algorithm.radius:
        warnings.warn(
            f"APFL: Theorem 2 covers fixed mixtures alpha >= {least:.4f}; the schedule of Theorem 7 is used, "
            "which assumes a bounded domain: set radius."
        )
    a = apfl_schedule.shift(mu, smooth, algorithm.steps, any_alpha)
    eta = float(apfl_schedule.step_size(1, mu, a, any_alpha))
    return replace(algorithm, eta=eta, decay=1 / (a + 1), eta_schedule="inverse", shift=a)


def set_for_nonconvex(algorithm: APFL, task: Task, statistics: ClientStatistics) -> APFL:
    """Theorem 3's step size, whose sqrt(T) waits for the run's horizon."""
    smooth = float(statistics.smooth.max())
    if not 0 < smooth < inf:
        raise RequestError(
            f"APFL: eta = 'nonconvex' needs the loss's smoothness, which is {smooth:.3g} for task '{task.name}'."
        )
    if algorithm.batch not in ("auto", 0):
        raise RequestError(f"APFL: eta = 'nonconvex' is for full gradients; set batch = 0, got {algorithm.batch}.")
    eta = apfl_schedule.nonconvex_step_size(smooth, 1, 1)
    return replace(algorithm, eta=eta, decay=0.0, eta_schedule="horizon", batch=0)
