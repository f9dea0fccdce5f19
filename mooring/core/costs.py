"""Costs of local work and tolerances of inexact solves, recorded by a wrapper around the task.

Costs are rows drawn and per-row gradients evaluated. An inexact solve reports the norm of its last gradient, so that
a tolerance that was not reached is recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from math import inf, isnan, nan
from typing import Any, NamedTuple, cast

import numpy as np
from torch import Tensor

from mooring.core.cohort import Batch, Condensed, Rows
from mooring.core.sgd_step import StepTerms
from mooring.core.task import InPlaceStep, LocalSteps, MixtureSteps, Task, TrainingSteps
from mooring.core.types import JsonObject


class SolveTolerances(NamedTuple):
    """Inexact solves that promised |gradient| <= some number, and what they reached."""

    promised: int = 0  # how many
    broken: int = 0  # how many of them ended above their promise
    gradient_promised: float = nan  # the promise of the worst of them, by reached / promised
    gradient_reached: float = nan  # what that one reached

    def __add__(self, other: SolveTolerances) -> SolveTolerances:  # type: ignore[override]
        """Both together."""
        worst = max(self, other, key=SolveTolerances.excess)
        return SolveTolerances(self.promised + other.promised, self.broken + other.broken, *worst[2:])

    def excess(self) -> float:
        """By what factor the worst solve missed its promise; 1 or less: it was kept."""
        if isnan(self.gradient_promised):
            return -inf
        return inf if isnan(self.gradient_reached) else self.gradient_reached / self.gradient_promised


def compare_with_tolerance(norm: Tensor, promise: float) -> SolveTolerances:
    """What a cohort's solves reached: each client's gradient norm [C] beside the promise."""
    if not len(norm):
        return SolveTolerances()
    worst = norm.nan_to_num(nan=inf).max()
    return SolveTolerances(len(norm), int((~(norm <= promise)).sum()), promise, float(worst))


@dataclass
class CostMeter:
    """Counters of a local update. An exact solve or prox counts as one gradient per row."""

    samples: int = 0  # rows drawn into minibatches
    gradients: int = 0  # per-row gradient evaluations
    solves: SolveTolerances = field(default_factory=SolveTolerances)

    def add(self, other: CostMeter) -> None:
        """Add the work of another local update."""
        for part in fields(self):
            setattr(self, part.name, getattr(self, part.name) + getattr(other, part.name))

    def counts(self) -> JsonObject:
        """Every count by its name, as the record of a round holds it."""
        out: JsonObject = {}
        for part in fields(self):
            value = getattr(self, part.name)
            out |= value._asdict() if hasattr(value, "_asdict") else {part.name: value}
        return out


def count_costs(task: Task, meter: CostMeter) -> Task:
    """The task, its work counted on the meter."""
    return cast(Task, MeteredTask(task, meter))


class MeteredTask:
    """A task that counts its work; everything else, its class included, is that of the task inside."""

    def __init__(self, task: Task, meter: CostMeter):
        self._task = task
        self._meter = meter

    def __getattr__(self, name: str) -> object:
        return getattr(self._task, name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class of the wrapped task, so that `isinstance(task, HasProx)` works."""
        return type(self._task)

    def __hash__(self) -> int:
        return hash(self._task)

    def __eq__(self, other: object) -> bool:
        return self._task == (other._task if type(other) is MeteredTask else other)

    def derive(self, build: Callable[[Task], Task]) -> Task:
        return count_costs(self._task.derive(build), self._meter)

    def freeze(self, mask: Tensor) -> Task | None:
        frozen = self._task.freeze(mask)
        return None if frozen is None else count_costs(frozen, self._meter)

    def record_draw(self, batch: Condensed) -> None:
        self._meter.samples += self._task.count(batch)

    def record_solve(self, norm: Tensor, promise: float) -> None:
        self._meter.solves += compare_with_tolerance(norm, promise)

    def grad(self, w: Tensor, batch: Batch) -> Tensor:
        self._count_gradients(batch)
        return self._task.grad(w, batch)

    def train_grad(self, w: Tensor, batch: Batch) -> tuple[Tensor, Tensor | None]:
        self._count_gradients(batch)
        return self._task.train_grad(w, batch)

    def prox(self, center: Tensor, lam: Tensor | float, batch: Batch, start: Tensor | None = None) -> Tensor:
        self._count_gradients(batch)
        return self._task.prox(center, lam, batch, start)  # type: ignore[attr-defined, no-any-return]

    def solve(self, batch: Batch) -> Tensor:
        self._count_gradients(batch)
        return self._task.solve(batch)  # type: ignore[attr-defined, no-any-return]

    def step_in_place(self) -> InPlaceStep | None:
        step = self._task.step_in_place()
        if step is None:
            return None

        def counted(v: Tensor, batch: Batch, terms: StepTerms) -> None:
            self._count_gradients(batch)
            step(v, batch, terms)

        return counted

    def local_steps(self, rows: Rows) -> LocalSteps | None:
        return self._count_steps(self._task.local_steps(rows))

    def training_steps(self, rows: Rows) -> TrainingSteps | None:
        return self._count_steps(self._task.training_steps(rows))

    def mixture_steps(self, rows: Rows) -> MixtureSteps | None:
        steps = self._task.mixture_steps(rows)
        if steps is None:
            return None

        def counted(*arguments: Any) -> None:
            n, update = arguments[6], arguments[8]
            held_out = 0 if update.rows is None else int(update.n.sum())
            self._meter.samples += int(n.sum()) + held_out
            self._meter.gradients += 2 * int(n.sum()) + held_out
            steps(*arguments)

        return counted

    def _count_gradients(self, batch: Condensed) -> None:
        self._meter.gradients += self._task.count(batch)

    def _count_steps(self, steps: LocalSteps | None) -> LocalSteps | None:
        """Many steps at once, counted: each reads and differentiates n rows."""
        if steps is None:
            return None

        def counted(v: Tensor, start: Tensor, rows: Rows, row_index: np.ndarray, n: np.ndarray, *terms: object) -> None:
            self._meter.samples += int(n.sum())
            self._meter.gradients += int(n.sum())
            steps(v, start, rows, row_index, n, *terms)

        return counted
