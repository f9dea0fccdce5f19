"""Linear support vector machine with the squared hinge loss: smooth, on two classes, with a ridge.

ell(w; x, y) = max(0, 1 - s x'w)^2,   s = +1 for y = 1, -1 for y = 0
L_i(w) = 1/n_i sum_j ell(w; x_ij, y_ij) + ridge/2 |w|^2
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mooring.core.cohort import Batch
from mooring.tasks.linear_score import SmoothScoreTask, accuracy, margin_probabilities, signs


@dataclass(frozen=True)
class SquaredHinge(SmoothScoreTask):
    name: ClassVar[str] = "squared_hinge"
    metric: ClassVar[str] = "squared hinge loss"
    kinds: ClassVar[tuple[str, ...]] = ("binary",)
    bend: ClassVar[float | None] = 2.0

    def row_loss(self, z: Tensor, y: Tensor) -> Tensor:
        return (1 - signs(y, z) * z).clamp(min=0) ** 2

    def row_slope(self, z: Tensor, y: Tensor) -> Tensor:
        s = signs(y, z)
        return -2 * s * (1 - s * z).clamp(min=0)

    def row_bend(self, z: Tensor, y: Tensor) -> Tensor:
        return torch.where(signs(y, z) * z < 1, 2.0, 0.0).to(z.dtype)

    def predict(self, w: Tensor, x: Tensor) -> Tensor:
        """[C, B, 2]: (1 + z)/2, the probability to which this loss leads with unlimited data, cut to [0, 1]."""
        return margin_probabilities(self.scores(w, x))

    def score(self, w: Tensor, batch: Batch) -> dict[str, Tensor]:
        return accuracy(self.scores(w, batch.x), batch)
