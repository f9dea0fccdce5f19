"""Absolute regression: the mean absolute error, whose minimiser is the median of y at x, with a ridge.

    ell(w; x, y) = |y - x'w|,   twice the pinball loss at tau = 1/2
    L_i(w) = 1/n_i sum_j ell(w; x_ij, y_ij) + ridge/2 |w|^2

Not smooth: gradients are sub-gradients; minimiser and prox are exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mooring.core.cohort import Batch
from mooring.tasks.linear_score import NonsmoothScoreTask


@dataclass(frozen=True)
class Absolute(NonsmoothScoreTask):
    name: ClassVar[str] = "absolute"
    metric: ClassVar[str] = "mae"
    kinds: ClassVar[tuple[str, ...]] = ("regression",)

    @property
    def box(self) -> tuple[float, float]:
        return -1.0, 1.0

    def residual(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return y - z, -torch.ones_like(z)

    def score(self, w: Tensor, batch: Batch) -> dict[str, Tensor]:
        error = (batch.weight * (self.predict(w, batch.x) - batch.y) ** 2).sum(1)
        return {"rmse": torch.where(batch.weight.sum(1) > 0, error, torch.full_like(error, torch.nan)).sqrt()}
