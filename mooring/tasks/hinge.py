"""Linear support vector machine: hinge loss on two classes, with a ridge.

    ell(w; x, y) = max(0, 1 - s x'w),   s = +1 for y = 1, -1 for y = 0
    L_i(w) = 1/n_i sum_j ell(w; x_ij, y_ij) + ridge/2 |w|^2            (ridge = 1/(C n_i) in the usual notation)

Not smooth: gradients are sub-gradients; minimiser and prox are exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from mooring.core.cohort import Batch
from mooring.tasks.linear_score import NonsmoothScoreTask, accuracy, margin_probabilities, signs


@dataclass(frozen=True)
class Hinge(NonsmoothScoreTask):
    name: ClassVar[str] = "hinge"
    metric: ClassVar[str] = "hinge loss"
    kinds: ClassVar[tuple[str, ...]] = ("binary",)

    @property
    def box(self) -> tuple[float, float]:
        return 0.0, 1.0

    def residual(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        s = signs(y, z)
        return 1 - s * z, -s

    def predict(self, w: Tensor, x: Tensor) -> Tensor:
        """[C, B, 2]: shares of the margin, not calibrated probabilities."""
        return margin_probabilities(self.scores(w, x))

    def score(self, w: Tensor, batch: Batch) -> dict[str, Tensor]:
        return accuracy(self.scores(w, batch.x), batch)
