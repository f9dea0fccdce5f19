"""Which tasks extra columns for nonlinear effects serve, and how trees are fitted for their losses."""

from __future__ import annotations

from mooring.core.task import HasProx, Task
from mooring.shapes.boosting import Boosting
from mooring.tasks.kernel_regression import KernelRegression
from mooring.tasks.linear import Linear
from mooring.tasks.linear_losses import Absolute, Hinge, Poisson, Quantile, SquaredHinge
from mooring.tasks.logistic import Logistic


def can_shape(task: Task) -> bool:
    """Whether extra columns serve the task: one that is linear in its columns and solved exactly."""
    return isinstance(task, HasProx) and hasattr(task, "features") and not isinstance(task, KernelRegression)


def boosting_of(task: Task) -> Boosting | None:
    """How trees are fitted for the task's loss; None where they are not."""
    if isinstance(task, Linear):
        return Boosting("squared")
    if isinstance(task, Logistic):
        return Boosting("logistic") if task.classes == 2 else Boosting("softmax", classes=task.classes)
    if isinstance(task, Quantile):
        return Boosting("quantile", level=task.tau)
    losses = {Poisson: "poisson", Absolute: "absolute", Hinge: "logistic", SquaredHinge: "logistic"}
    loss = next((name for kind, name in losses.items() if isinstance(task, kind)), None)
    return None if loss is None else Boosting(loss)
