"""What work costs and what it reached, counted by a wrapper around the task.

Costs are rows drawn and per-row gradients evaluated. An inexact solve that promises a gradient no larger than some
number tells what it ended at, so that a promise that was not kept is on the record.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from math import inf, isnan, nan
from typing import Any, NamedTuple

from torch import Tensor

from mooring.core.task import Task


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
    """Counters of a stay at a cohort. An exact solve or prox counts as one gradient per row."""

    samples: int = 0  # rows drawn into minibatches
    gradients: int = 0  # per-row gradient evaluations
    solves: SolveTolerances = field(default_factory=SolveTolerances)

    def add(self, other: CostMeter) -> None:
        """Count another stay's work on top."""
        for part in fields(self):
            setattr(self, part.name, getattr(self, part.name) + getattr(other, part.name))

    def counts(self) -> dict[str, Any]:
        """Every count by its name, as the record of a round holds it."""
        out: dict[str, Any] = {}
        for part in fields(self):
            value = getattr(self, part.name)
            out |= value._asdict() if hasattr(value, "_asdict") else {part.name: value}
        return out


class MeteredTask:
    """A task that counts; everything else is the task's own."""

    def __init__(self, task: Task, meter: CostMeter):
        self._task = task
        self._meter = meter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def __hash__(self) -> int:
        return hash(self._task)

    def __eq__(self, other: object) -> bool:
        return self._task == (other._task if isinstance(other, MeteredTask) else other)

    def drawn(self, batch: Any) -> None:
        self._meter.samples += self._task.count(batch)

    def solved(self, norm: Tensor, promise: float) -> None:
        self._meter.solves += compare_with_tolerance(norm, promise)

    def grad(self, w: Any, batch: Any) -> Any:
        self._meter.gradients += self._task.count(batch)
        return self._task.grad(w, batch)

    @property
    def step(self) -> Any:
        """The task's step in place, counted; None where it has none."""
        return None if self._task.step is None else self._step

    def _step(self, v: Any, batch: Any, move: Any) -> None:
        self._meter.gradients += self._task.count(batch)
        self._task.step(v, batch, move)

    @property
    def stay(self) -> Any:
        """The task's steps all at once, counted; None where it has none."""
        return None if self._task.stay is None else self._stay

    def _stay(self, v: Any, begin: Any, rows: Any, place: Any, n: Any, *how: Any) -> None:
        self._meter.samples += int(n.sum())
        self._meter.gradients += int(n.sum())
        self._task.stay(v, begin, rows, place, n, *how)

    def train_clients(self, v: Any, begin: Any, rows: Any, place: Any, n: Any, *how: Any) -> None:
        self._meter.samples += int(n.sum())
        self._meter.gradients += int(n.sum())
        self._task.train_clients(v, begin, rows, place, n, *how)

    @property
    def mix(self) -> Any:
        """The task's steps with a mixture, counted; None where it has none."""
        return None if self._task.mix is None else self._mix

    def _mix(self, w: Any, v: Any, alpha: Any, begin: Any, rows: Any, place: Any, n: Any, *how: Any) -> None:
        felt = how[1]
        apart = 0 if felt.rows is None else int(felt.n.sum())
        self._meter.samples += int(n.sum()) + apart
        self._meter.gradients += 2 * int(n.sum()) + apart
        self._task.mix(w, v, alpha, begin, rows, place, n, *how)

    def prox(self, center: Any, lam: Any, batch: Any, start: Any = None) -> Any:
        self._meter.gradients += self._task.count(batch)
        return self._task.prox(center, lam, batch, start)

    def solve(self, batch: Any) -> Any:
        self._meter.gradients += self._task.count(batch)
        return self._task.solve(batch)
