"""What work costs: rows drawn and per-row gradients evaluated, counted by a wrapper around the task."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass
class Meter:
    """Counters of a stay at a cohort. An exact solve or prox counts as one gradient per row."""

    samples: int = 0  # rows drawn into minibatches
    gradients: int = 0  # per-row gradient evaluations

    def add(self, other: Meter) -> None:
        """Count another stay's work on top."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    def counts(self) -> dict[str, Any]:
        """Every count by its name, as the record of a round holds it."""
        out: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            out |= value._asdict() if hasattr(value, "_asdict") else {field.name: value}
        return out


class Metered:
    """A task that counts; everything else is the task's own."""

    def __init__(self, task: Any, meter: Meter):
        self._task = task
        self._meter = meter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def __hash__(self) -> int:
        return hash(self._task)

    def __eq__(self, other: object) -> bool:
        return self._task == (other._task if isinstance(other, Metered) else other)

    def drawn(self, batch: Any) -> None:
        self._meter.samples += self._task.count(batch)

    def grad(self, w: Any, batch: Any) -> Any:
        self._meter.gradients += self._task.count(batch)
        return self._task.grad(w, batch)

    def prox(self, center: Any, lam: Any, batch: Any, start: Any = None) -> Any:
        self._meter.gradients += self._task.count(batch)
        return self._task.prox(center, lam, batch, start)

    def solve(self, batch: Any) -> Any:
        self._meter.gradients += self._task.count(batch)
        return self._task.solve(batch)
