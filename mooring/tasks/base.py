"""What every task offers: losses, gradients and predictions of a cohort of parameter vectors.

Only a task knows how the vector w splits into layers. Shapes: w [C, d], batch.x [C, B, ...], batch.y [C, B].
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from mooring.core.cohort import Batch


class Constants(NamedTuple):
    """What theory asks of a client's risk L_i, each [C]."""

    smooth: Tensor  # largest curvature; nan where the loss has kinks
    convex: Tensor  # smallest curvature: mu; 0 or below where L_i is not strongly convex
    noise: Tensor  # rho: root mean square of a record's gradient at the client's own fit (kinks: a bound on it)
    trace: Tensor  # mean curvature of single rows summed over coordinates: what small batches add to `smooth`
    dispersion: Tensor  # phi in "gradient covariance = phi * Hessian": residual variance, or 1 for a likelihood


class Task:
    """The contract. Optional parts (`solve`, `prox`, `condense`) are None where a task has none."""

    name: ClassVar[str]
    metric: ClassVar[str]  # what `row_risk` measures, as a user calls it
    unit_power: ClassVar[int] = 0  # how the metric grows with the unit of a regression target: squared, or as it is
    kinds: ClassVar[tuple[str, ...]]  # the targets it fits: "regression", "binary", "classes", "count"
    smooth_loss: ClassVar[bool] = True
    condense: Any = None  # condense(batch) -> a summary that stands for the batch in full passes
    solve: Any = None  # solve(batch) -> [C, d], the exact minimiser of each L_i
    prox: Any = None  # prox(center, lam, batch, start=None) -> [C, d], exact arg min L_i(v) + lam/2 |v - center|^2

    dim: int
    dtype: torch.dtype = torch.float64

    def start(self, seed: int = 0) -> Tensor:
        """The first parameters [d] of every run."""
        return torch.zeros(self.dim, dtype=self.dtype)

    def loss(self, w: Tensor, batch: Any) -> Tensor:
        """[C]: the objective, penalties included."""
        raise NotImplementedError

    def grad(self, w: Tensor, batch: Any) -> Tensor:
        """[C, d]: the gradient of `loss`, or a sub-gradient."""
        raise NotImplementedError

    def predict(self, w: Tensor, x: Tensor) -> Tensor:
        """The model's answer at x [C, B, ...]: values, or probabilities of the classes."""
        raise NotImplementedError

    def row_risk(self, w: Tensor, batch: Batch) -> Tensor:
        """[C, B]: what a user is told about each row, without penalties, in the unit that `metric` names."""
        raise NotImplementedError

    def score(self, w: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Further measures a user of this task expects, each [C]; nan where undefined."""
        return {}

    def constants(self, batch: Any, w: Tensor | None = None) -> Constants:
        """Curvature and gradient noise of each L_i (near w, where they depend on it)."""
        raise NotImplementedError

    def risk(self, w: Tensor, batch: Batch) -> Tensor:
        """[C]: the mean of `row_risk` over each client's rows; nan for a client without rows."""
        mean = (batch.weight * self.row_risk(w, batch)).sum(1)
        return torch.where(batch.weight.sum(1) > 0, mean, torch.full_like(mean, torch.nan))

    def count(self, batch: Any) -> int:
        """How many rows a batch or a summary stands for."""
        return int((batch.weight > 0).sum() if isinstance(batch, Batch) else batch.n.sum())

    def drawn(self, batch: Any) -> None:
        """Told of every draw; a metered task counts it."""
