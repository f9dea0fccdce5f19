"""Tasks whose local steps are compiled by numba: the same numbers up to rounding, faster once they are compiled.

`has_compiled_steps`, `compile_steps` and `is_compiled` are all that the rest of the package uses of `tasks/fused/`.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

from mooring.core.cohort import Rows
from mooring.core.task import LocalSteps, Task
from mooring.tasks.fused import linear_numba
from mooring.tasks.fused.linear_numba import is_numba_available
from mooring.tasks.linear import Linear
from mooring.tasks.logistic import Logistic
from mooring.tasks.network import NetworkTask

__all__ = ["compile_steps", "has_compiled_steps", "is_compiled", "is_numba_available"]


@dataclass(frozen=True)
class _CompiledLinear(Linear):
    def local_steps(self, rows: Rows) -> LocalSteps | None:
        return linear_numba.local_steps(self, rows, linear_numba.SQUARE)


@dataclass(frozen=True)
class _CompiledLogistic(Logistic):
    def local_steps(self, rows: Rows) -> LocalSteps | None:
        link = linear_numba.SIGMOID if self.scores == 1 else linear_numba.SOFTMAX
        return linear_numba.local_steps(self, rows, link, self.scores)


_COMPILED: dict[type[Task], type[Task]] = {Linear: _CompiledLinear, Logistic: _CompiledLogistic}


def has_compiled_steps(task: Task) -> bool:
    """Whether `compile_steps` makes a difference to this task."""
    return task.compiles if isinstance(task, NetworkTask) else type(task) in _COMPILED


def is_compiled(task: Task) -> bool:
    """Whether the task takes its local steps by compiled code."""
    return task.kernels == "numba" if isinstance(task, NetworkTask) else type(task) in _COMPILED.values()


def compile_steps(task: Task) -> Task:
    """The task with its local steps compiled; the task itself where there are none for it."""
    if isinstance(task, NetworkTask):
        task = copy.copy(task)
        task.kernels = "numba"
        return task
    compiled = _COMPILED.get(type(task))
    return task if compiled is None else compiled(**vars(task))
