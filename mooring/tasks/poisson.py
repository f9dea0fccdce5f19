"""Poisson regression: counts with a log link, with a ridge.

    ell(w; x, y) = exp(x'w) - y x'w                                    (the likelihood without its constant log y!)
    L_i(w) = 1/n_i sum_j ell(w; x_ij, y_ij) + ridge/2 |w|^2
    deviance of a row = 2 (y log(y / mu) - (y - mu)),   mu = exp(x'w)

The curvature has no bound over all w: `constants` tells the larger of those at 0 and at the client's own fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mooring.core.cohort import Batch
from mooring.tasks.scored import Smooth


@dataclass(frozen=True)
class Poisson(Smooth):
    name: ClassVar[str] = "poisson"
    metric: ClassVar[str] = "deviance"
    likelihood: ClassVar[bool] = True
    risk_per_loss: ClassVar[float] = 2.0
    kinds: ClassVar[tuple[str, ...]] = ("count",)
    bend: ClassVar[float | None] = None

    def row_loss(self, z: Tensor, y: Tensor) -> Tensor:
        return z.exp() - y * z

    def row_slope(self, z: Tensor, y: Tensor) -> Tensor:
        return z.exp() - y

    def row_bend(self, z: Tensor, y: Tensor) -> Tensor:
        return z.exp()

    def predict(self, w: Tensor, x: Tensor) -> Tensor:
        """The expected count."""
        return self.scores(w, x).exp()

    def row_risk(self, w: Tensor, batch: Batch) -> Tensor:
        z = self.scores(w, batch.x)
        return 2 * (torch.xlogy(batch.y, batch.y) - batch.y * z - batch.y + z.exp())

    def score(self, w: Tensor, batch: Batch) -> dict[str, Tensor]:
        error = (batch.weight * (self.predict(w, batch.x) - batch.y) ** 2).sum(1)
        return {"rmse": torch.where(batch.weight.sum(1) > 0, error, torch.full_like(error, torch.nan)).sqrt()}
