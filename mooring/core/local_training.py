"""A local update as an algorithm writes it: one round of work of a cohort of clients on its own rows.

    w = local.train(server.w)                                  the local steps that the hyperparameters set, from w
    v = local.train(client.v, eta=..., pull=(lam, w))          the same on L_i(v) + lam/2 |v - w|^2
    v = local.minimize(client.v, "exact", pull=(lam, w))       its minimizer, or steps towards it

    for step in local.steps():                                 local steps of the algorithm's own
        g = step.grad(u)                                       [C, d]: the gradients at u on the step's minibatches
        w = step.move(w, g)                                    [C, d]: w after the optimizer's step along g

The optimizers' states, the count of rounds, running statistics of networks and clients whose steps are used up are
kept here. The n-th model that an update trains has the n-th optimizer; `LocalWork.trained_models` is their number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypedDict, Unpack

import torch
from torch import Tensor

from mooring.core.cohort import CohortData, Condensed, Round, broadcast_per_client
from mooring.core.errors import RequestError
from mooring.core.local_work import LocalWork
from mooring.core.minibatches import Step, batches_per_epoch, count_local_steps, minibatches
from mooring.core.optimizers import Optimizer
from mooring.core.penalty import PenaltyOrRule, penalty_rows
from mooring.core.sgd_step import Pull
from mooring.core.solvers import (
    Region,
    StepSize,
    TrainTerms,
    descend_to_tolerance,
    geometric_decay,
    inverse_decay,
    project,
    run_mixture_steps,
    set_buffers,
    sgd,
    train,
)
from mooring.core.task import HasProx, Task, require
from mooring.core.types import as_number

Eta = float | Tensor | str  # of a hyperparameter: a number or, where runs are trained together, one per client


class Schedule(NamedTuple):
    """The work of a round: rows of a minibatch, each client's number of steps [C], and the size of the k-th step."""

    batch: int | None  # None: all rows
    steps: Tensor
    eta: StepSize


class MixtureRule(TypedDict):
    """How APFL's mixtures move: see `run_mixture_steps`."""

    moves_in_step: Callable[[int], bool]
    on_validation: bool
    pull: float
    by_parts: bool


class LocalTraining:
    """The clients of a cohort in one round: `task`, `data`, `round`, and what they do with their rows."""

    def __init__(
        self, work: LocalWork | None, task: Task, data: CohortData, round: Round, memory: Tensor | None = None
    ):
        """`work` is the algorithm, if it has the fields of `LocalWork`; `memory` [C, s] is what the clients kept of
        their last update (`init_memory`), None if nothing."""
        self._work, self.task, self.data, self.round = work, task, data, round
        self._memory = torch.zeros(len(data), 0, dtype=task.dtype) if memory is None else memory
        self._states: list[Tensor] = []  # of the optimizers of the models that this update has trained so far

    def __len__(self) -> int:
        return len(self.data)

    @property
    def work(self) -> LocalWork:
        """The hyperparameters of local steps."""
        if self._work is None:
            raise RequestError(
                "an algorithm that takes local steps must inherit from LocalWork, which has their fields."
            )
        return self._work

    @property
    def rows(self) -> Condensed:
        """All training rows, in the form that makes full passes cheap."""
        return self.data.train.full(self.task)

    @property
    def next_round(self) -> LocalTraining:
        """The same clients with the draws and step sizes of the round that would come next."""
        return LocalTraining(self._work, self.task, self.data, self.round._replace(t=self.round.t + 1), self._memory)

    @property
    def schedule(self) -> Schedule:
        """The work that the hyperparameters set for this round."""
        return schedule(self.work, self.data, self.round, self._memory)

    def expand(self, w: Tensor) -> Tensor:
        """[C, d]: a model [d] (or [C, d]) at every client."""
        return w.expand(len(self), -1)

    def penalty(self, lam: PenaltyOrRule) -> Tensor:
        """[C, 1] or [C, d]: each client's lam."""
        return penalty_rows(lam, self.data.index, torch.empty(0, dtype=self.task.dtype))

    def loss(self, w: Tensor) -> Tensor:
        """[C]: the loss L_i(w) on all training rows."""
        return self.task.loss(self.expand(w), self.rows)

    # Training by the hyperparameters

    def train(
        self,
        w: Tensor,
        *,
        eta: Eta | None = None,
        steps: int | Tensor | None = None,
        epochs: int = 0,
        step_size: StepSize | None = None,
        task: Task | None = None,
        data: CohortData | None = None,
        fresh: bool = False,
        **terms: Unpack[TrainTerms],
    ) -> Tensor:
        """[C, d]: the models after a round's local steps from `w`, [d] or [C, d].

        `eta`, `steps` and `epochs` take the places of the hyperparameters' in the schedule; `step_size` that of the
        schedule's step size. `terms` are those of `core.solvers.train`: a pull, a shift, a region, a slot. `task` and
        `data` are other losses and rows of the same clients, or of one client that stands for all of them. `fresh`: a
        new optimizer takes the steps, of which nothing is kept.
        """
        task, data = self.task if task is None else task, self.data if data is None else data
        plan = schedule(self.work, data, self.round, self._memory[: len(data)], eta=eta, steps=steps, epochs=epochs)
        state = self._fresh_state(task, data, w) if fresh else self._claim_state(task, data, w)
        v, state = train(
            task, w, data, self.round, plan.eta if step_size is None else step_size, batch=plan.batch, steps=plan.steps,
            draws=self.work.draws, rule=self.work.rule, state=state, **terms,
        )  # fmt: skip
        if not fresh:
            self._states[-1] = state
        return v

    def finetune(self, w: Tensor, steps: int, epochs: int = 0, **terms: Unpack[TrainTerms]) -> Tensor:
        """[C, d]: w after so many local steps, or `epochs` where they are > 0, of the round that would come next.

        With as many steps as a local update takes, this is what FedAvg's next local update would send back.
        """
        then = self.next_round
        return then.train(w, step_size=then.schedule.eta, steps=steps, epochs=epochs, fresh=True, **terms)

    def sgd(self, w: Tensor, eta: float, *, steps: int, batch: int, draws: str = "passes") -> Tensor:
        """[C, d]: w after so many plain steps of size `eta` on minibatches of `batch` rows (0: all rows)."""
        return sgd(self.task, w, self.data, self.round, eta, steps=steps, batch=batch or None, draws=draws)

    def minimize(
        self,
        v: Tensor,
        how: str,
        *,
        pull: Pull,
        shift: Tensor | None = None,
        eta: Eta | None = None,
        steps: int | None = None,
        tol: float = 0.0,
        rows: Condensed | None = None,
    ) -> Tensor:
        """[C, d]: L_i(u) + <shift, u> + lam/2 |u - w|^2 minimized from v, pull = (lam, w).

        "exact" by the task's proximal step; "descent" by full gradients until they are at most `tol`, in at most
        `steps`; "sgd" by `train`. `rows` are minibatches in the place of all rows.
        """
        if how == "sgd":
            return self.train(v, eta=eta, pull=pull, shift=shift)
        (lam, w), v = pull, self.expand(v)
        center = self.expand(w if shift is None else w - shift / lam)
        rows = self.rows if rows is None else rows
        if how == "exact":
            return require(self.task, HasProx).prox(center, lam, rows, v)
        size, most = self.work.eta if eta is None else eta, self.work.steps if steps is None else steps
        return descend_to_tolerance(self.task, v, rows, lam, center, resolved_eta(size), tol=tol, most=most)

    # Steps of the algorithm's own

    def steps(self, slots: int = 1, *, region: Region | None = None) -> Iterator[LocalStep]:
        """The local steps that the hyperparameters set, each with an independent minibatch in each of the slots; models
        stay in the region."""
        eta, place = self.schedule.eta, len(self._states)
        for drawn in zip(*(self.minibatches(slot=slot) for slot in range(slots))):
            yield LocalStep(self, drawn, eta, region, place)

    def minibatches(
        self,
        *,
        slot: int = 0,
        part: str = "train",
        batch: int | None = None,
        steps: int | Tensor | None = None,
        draws: str | None = None,
        trains_buffers: bool = True,
    ) -> Iterator[Step]:
        """Minibatches as the hyperparameters draw them, or as given: `batch` rows (0: all) in each of `steps`.

        `trains_buffers = False` refuses networks whose running statistics the caller would leave untrained.
        """
        size = as_number(self.work.batch) if batch is None else batch
        return minibatches(
            self.task, self.data, self.round, batch=size or None, steps=self.schedule.steps if steps is None else steps,
            slot=slot, draws=self.work.draws if draws is None else draws, part=part, trains_buffers=trains_buffers,
        )  # fmt: skip

    def total_step_size(self, like: Tensor) -> Tensor:
        """[C, 1]: the sum of each client's step sizes in this round."""
        _, count, eta = self.schedule
        if not callable(eta):
            return broadcast_per_client(eta * count.double(), like)
        return broadcast_per_client(torch.stack([eta(k) * (count > k) for k in range(int(count.max()))]).sum(0), like)

    def mix(
        self, w: Tensor, v: Tensor, alpha: Tensor, **rule: Unpack[MixtureRule]
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """w, v and alpha after all steps of APFL, by a task that can take them at once; None if it cannot."""
        steps = self.task.mixture_steps(self.data.train)
        if steps is None:
            return None
        batch, count, eta = self.schedule
        return run_mixture_steps(
            steps, w, v, alpha, self.data, self.round, eta, batch=batch, steps=count, draws=self.work.draws, **rule
        )

    # What clients keep between rounds

    def next_memory(self) -> Tensor:
        """[C, s]: what the clients keep of this update; refuses another number of trained models than declared."""
        trained, declared, keeps_states = len(self._states), self.work.trained_models, self._memory.shape[1] > 1
        if trained != declared and len(self) and (trained or keeps_states):
            raise self._wrong_number(f"{trained}")
        if not self._memory.shape[1]:
            return self._memory
        states = [state.expand(len(self), -1) for state in self._states] if keeps_states else []
        return torch.cat([self._memory[:, :1] + 1, *states], 1)

    def optimizer_state(self, place: int, like: Tensor) -> Tensor:
        """[C, 1 + moments * p]: the state of the optimizer of the model in this place, to be changed in place."""
        return self._states[place] if place < len(self._states) else self._claim_state(self.task, self.data, like)

    def _claim_state(self, task: Task, data: CohortData, like: Tensor) -> Tensor:
        """[C, 1 + moments * p]: the state of the next model's optimizer, as it was kept or fresh; a copy."""
        place, state = len(self._states), self._fresh_state(task, data, like)
        if place == self.work.trained_models:
            raise self._wrong_number("more")
        if self._memory.shape[1] > 1:
            begin = 1 + place * state.shape[1]
            state = self._memory[: len(data), begin : begin + state.shape[1]].clone()
        self._states.append(state)
        return state

    def _fresh_state(self, task: Task, data: CohortData, like: Tensor) -> Tensor:
        return self.work.rule.init(len(data), task.gradient_dim, like)

    def _wrong_number(self, trained: str) -> RequestError:
        owner, declared = type(self.work).__name__, self.work.trained_models
        return RequestError(
            f"{owner}: client_update must train {declared} model{'s' if declared > 1 else ''} in every round, as "
            f"trained_models = {declared} declares, but trains {trained}."
        )


class LocalStep:
    """One local step of a cohort: its number k from 0, its minibatches, and which clients still have steps."""

    def __init__(self, local: LocalTraining, drawn: tuple[Step, ...], eta: StepSize, region: Region | None, place: int):
        self.k, self.active = drawn[0].k, drawn[0].active  # [C] bool; None: all
        self.batches = [step.batch for step in drawn]
        self._local, self._task, self._rule = local, local.task, local.work.rule
        self._eta, self._region, self._place = eta, region, place  # that of the next model that moves
        self._buffers: Tensor | None = None

    @property
    def batch(self) -> Condensed:
        return self.batches[0]

    def rate(self, like: Tensor) -> Tensor:
        """The step size, as something that multiplies [C, d]."""
        return broadcast_per_client(self._eta(self.k) if callable(self._eta) else self._eta, like)

    def grad(self, w: Tensor, slot: int = 0, task: Task | None = None) -> Tensor:
        """[C, d]: the gradients at w on a slot's minibatches; the next `move` takes the running statistics of this
        pass."""
        g, self._buffers = (self._task if task is None else task).train_grad(w, self.batches[slot])
        return g

    def with_buffers(self, w: Tensor) -> Tensor:
        """w, changed in place: with the running statistics of the last pass."""
        return set_buffers(self._task, w, self._buffers)

    def move(self, w: Tensor, g: Tensor, share: float = 1.0) -> Tensor:
        """[C, d]: w after the optimizer's step along g, at `share` of the step size; w stays as it is."""
        state = self._next_state(w)
        moved, p = w.clone(), self._task.gradient_dim
        self._rule.step(moved[:, :p], g[:, :p], share * self.rate(w), state, self.active)
        moved, self._buffers = self.with_buffers(project(moved, self._region)), None
        return self.where_active(moved, w)

    def minimize(self, v: Tensor, how: str, *, pull: Pull, eta: float | Tensor, steps: int, tol: float = 0.0) -> Tensor:
        """[C, d]: the minibatch's loss plus lam/2 |u - w|^2 minimized from v, pull = (lam, w): "exact", or by "descent"
        in at most `steps` of the optimizer until gradients are at most `tol`."""
        lam, w = pull
        if how == "exact":
            return self.where_active(require(self._task, HasProx).prox(w, lam, self.batch, v), v)
        state = self._next_state(v)
        before = state if self.active is None else state.clone()
        moved = descend_to_tolerance(
            self._task, v, self.batch, lam, w, eta, tol=tol, most=steps, rule=self._rule, state=state
        )
        if self.active is not None:
            state.copy_(self.where_active(state, before))
        return self.where_active(moved, v)

    def where_active(self, new: Tensor, old: Tensor) -> Tensor:
        """[C, d]: the new values of clients that still have steps, the old ones of the others."""
        return new if self.active is None else torch.where(self.active[:, None], new, old)

    def _next_state(self, like: Tensor) -> Tensor:
        """The state of the optimizer of the model that moves next, to be changed in place."""
        self._place += 1
        return self._local.optimizer_state(self._place - 1, like)


def schedule(
    work: LocalWork,
    data: CohortData,
    round: Round,
    memory: Tensor | None = None,
    *,
    eta: Eta | None = None,
    steps: int | Tensor | None = None,
    epochs: int = 0,
) -> Schedule:
    """The work of a round, as the fields of `LocalWork` set it; `eta`, `steps` and `epochs` take their places.

    The k-th local step of the run (from 0, counted as if a client took part in every round) has the step size

        eta_schedule = "inverse"        eta / (1 + decay k)
                       "steps"          eta (1 - decay)^floor(k / decay_every)
                       "rounds"         eta (1 - decay)^floor((t - 1) / decay_every) in round t
                       "epochs"         the same with the whole passes that the client made over its rows so far
                       "cosine"         eta (1 + cos(pi k / K)) / 2, K the local steps of the whole run
                       "cosine_rounds"  eta (1 + cos(pi (t - 1) / rounds)) / 2
                       "horizon"        eta / sqrt(K); decay plays no part

    times (k + 1) / (steps of `warmup` rounds) while that is below 1. `memory` counts the rounds that a client took
    part in, where "epochs" needs them.
    """
    batch = as_number(work.batch) or None
    if steps is None and not epochs:
        steps, epochs = work.steps, work.epochs
    count = count_local_steps(data.train.size, batch, *((None, epochs) if epochs else (steps, None)))
    size = _step_size(work, resolved_eta(work.eta if eta is None else eta), data, round, memory, count)
    if not work.warmup or round.t > work.warmup:
        return Schedule(batch, count, size)
    before, most = (round.t - 1) * count, work.warmup * count.double()

    def warm(k: int) -> Tensor:
        return (size(k) if callable(size) else size) * ((before.double() + k + 1) / most).clamp(max=1.0)

    return Schedule(batch, count, warm)


def resolved_eta(eta: Eta) -> float | Tensor:
    """The step size of a hyperparameter that is resolved; a word is refused."""
    if isinstance(eta, str):
        raise TypeError(f"eta = {eta!r} is not resolved yet.")
    return eta


def _step_size(
    work: LocalWork, eta: float | Tensor, data: CohortData, round: Round, memory: Tensor | None, count: Tensor
) -> StepSize:
    """The step size of a round before its warm-up: see `schedule`."""
    kind, decay, every = work.eta_schedule, work.decay, work.decay_every
    before = (round.t - 1) * count
    if kind == "horizon":
        return eta / (round.rounds * count.double()).sqrt()
    if kind == "cosine":
        total = round.rounds * count.double()
        return lambda k: eta * (1 + torch.cos(math.pi * (before.double() + k) / total)) / 2
    if kind == "cosine_rounds":
        return eta * (1 + math.cos(math.pi * (round.t - 1) / round.rounds)) / 2
    if not decay:
        return eta
    if kind == "inverse":
        return inverse_decay(eta, decay, before.double())
    if kind == "steps":
        return geometric_decay(eta, decay, before, every)
    if kind == "rounds":
        return eta * (1 - decay) ** ((round.t - 1) // every)
    own = before if memory is None or not memory.shape[1] else memory[:, 0].long() * count
    passes = batches_per_epoch(data.train.size, as_number(work.batch) or None)
    return geometric_decay(eta, decay, own, every * passes)


def init_memory(work: LocalWork, task: Task, w0: Tensor) -> Tensor:
    """[s]: what a client keeps between rounds, before the first: the count of its rounds, and the optimizer's state of
    each model that it trains; [0] where nothing is asked for."""
    rule: Optimizer = work.rule
    if work.optimizer_state != "keep" or not rule.moments:
        return w0.new_zeros(int(work.eta_schedule == "epochs"))
    return w0.new_zeros(1 + work.trained_models * rule.init(1, task.gradient_dim, w0).shape[1])
