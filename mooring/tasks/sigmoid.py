"""Sigmoid loss: a smooth, bounded and non-convex stand-in for the classification error, on two classes.

    ell(w; x, y) = 1 / (1 + exp(s x'w)),   s = +1 for y = 1, -1 for y = 0
    L_i(w) = 1/n_i sum_j ell(w; x_ij, y_ij) + ridge/2 |w|^2

Its second derivative in x'w lies in [-1/(6 sqrt 3), 1/(6 sqrt 3)]. There is no exact solver.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import ClassVar

import torch
from torch import Tensor

from mooring.core.cohort import Batch
from mooring.tasks.linear_score import SmoothScoreTask, accuracy, signs


@dataclass(frozen=True)
class Sigmoid(SmoothScoreTask):
    name: ClassVar[str] = "sigmoid"
    metric: ClassVar[str] = "sigmoid loss"
    kinds: ClassVar[tuple[str, ...]] = ("binary",)
    bend: ClassVar[float] = 1 / (6 * sqrt(3))
    convex_loss: ClassVar[bool] = False
    solve = None  # type: ignore[assignment]
    prox = None  # type: ignore[assignment]

    def row_loss(self, z: Tensor, y: Tensor) -> Tensor:
        return torch.sigmoid(-signs(y, z) * z)

    def row_slope(self, z: Tensor, y: Tensor) -> Tensor:
        s, q = signs(y, z), torch.sigmoid(-signs(y, z) * z)
        return -s * q * (1 - q)

    def row_bend(self, z: Tensor, y: Tensor) -> Tensor:
        q = torch.sigmoid(-signs(y, z) * z)
        return q * (1 - q) * (1 - 2 * q)

    def predict(self, w: Tensor, x: Tensor) -> Tensor:
        z = self.scores(w, x)
        return torch.stack([torch.sigmoid(-z), torch.sigmoid(z)], -1)

    def score(self, w: Tensor, batch: Batch) -> dict[str, Tensor]:
        return accuracy(self.scores(w, batch.x), batch)
