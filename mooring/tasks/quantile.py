"""Quantile regression: the pinball loss, whose minimiser is the tau-quantile of y at x, with a ridge.

    ell(w; x, y) = max(tau r, (tau - 1) r),   r = y - x'w
    L_i(w) = 1/n_i sum_j ell(w; x_ij, y_ij) + ridge/2 |w|^2

Not smooth: gradients are sub-gradients; minimiser and prox are exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mooring.core.cohort import Batch
from mooring.core.errors import RequestError
from mooring.tasks.linear_score import NonsmoothScoreTask


@dataclass(frozen=True)
class Quantile(NonsmoothScoreTask):
    tau: float = 0.5

    name: ClassVar[str] = "quantile"
    metric: ClassVar[str] = "pinball loss"
    kinds: ClassVar[tuple[str, ...]] = ("regression",)

    def __post_init__(self) -> None:
        if not 0 < self.tau < 1:
            raise RequestError(f"task 'quantile': tau must lie between 0 and 1, got {self.tau}.")

    @property
    def box(self) -> tuple[float, float]:
        return self.tau - 1, self.tau

    def residual(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return y - z, -torch.ones_like(z)

    def score(self, w: Tensor, batch: Batch) -> dict[str, Tensor]:
        """The share of rows at or below their prediction: tau, if the model is right."""
        below = (batch.weight * (batch.y <= self.predict(w, batch.x))).sum(1)
        return {"coverage": torch.where(batch.weight.sum(1) > 0, below, torch.full_like(below, torch.nan))}
