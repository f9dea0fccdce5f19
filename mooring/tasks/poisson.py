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
from mooring.tasks.linear_score import SmoothScoreTask

LEAST_MEAN = 1e-6  # of a count, where residuals are divided by it


@dataclass(frozen=True)
class Poisson(SmoothScoreTask):
    name: ClassVar[str] = "poisson"
    metric: ClassVar[str] = "deviance"
    likelihood: ClassVar[bool] = True
    overdispersed: ClassVar[bool] = True
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

    def pearson(self, w: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """[C] each: sums over rows of (y - mu)^2 / mu and of (y - mu) / mu: what the dispersion is estimated from."""
        mu = self.predict(w, batch.x).clamp(min=LEAST_MEAN)
        away = torch.where(batch.weight > 0, batch.y - mu, 0.0)
        return (away**2 / mu).sum(1), (away / mu).sum(1)

    def row_divergence(self, w: Tensor, reference: Tensor, batch: Batch) -> Tensor:
        z, true = self.scores(w, batch.x), self.scores(reference, batch.x)
        return (2 * (z.exp() - true.exp() - true.exp() * (z - true))).clamp(min=0)

    def score(self, w: Tensor, batch: Batch) -> dict[str, Tensor]:
        error = (batch.weight * (self.predict(w, batch.x) - batch.y) ** 2).sum(1)
        return {"rmse": torch.where(batch.weight.sum(1) > 0, error, torch.full_like(error, torch.nan)).sqrt()}
