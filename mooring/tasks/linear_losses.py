"""Losses of one linear score z = x'w per row, with a ridge:

    L_i(w) = 1/n_i sum_j ell(z_ij, y_ij) + ridge/2 |w|^2

Each class states its ell; s = +1 for y = 1 and -1 for y = 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log, sqrt
from typing import ClassVar

import torch
from torch import Tensor

from mooring.core.cohort import Batch
from mooring.core.errors import RequestError
from mooring.core.types import JsonObject
from mooring.tasks.linear_score import (
    ConvexScoreTask,
    PiecewiseLinearTask,
    SmoothScoreTask,
    margin_probabilities,
    signs,
)

MIN_POISSON_MEAN = 1e-6  # of a count, where residuals are divided by it
MAX_MEAN_FACTOR = 2.0  # on the largest count of training rows: no larger mean is predicted


@dataclass(frozen=True)
class Absolute(PiecewiseLinearTask):
    """Absolute regression: the mean absolute error, whose minimiser is the median of y at x, with a ridge.

    ell = |y - z|, twice the pinball loss at tau = 1/2
    """

    name: ClassVar[str] = "absolute"
    metric = "mae"
    kinds: ClassVar[tuple[str, ...]] = ("regression",)

    @property
    def box(self) -> tuple[float, float]:
        return -1.0, 1.0

    def residual(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return y - z, -torch.ones_like(z)


@dataclass(frozen=True)
class Quantile(PiecewiseLinearTask):
    """Quantile regression: the pinball loss, whose minimiser is the tau-quantile of y at x, with a ridge.

    ell = max(tau r, (tau - 1) r),   r = y - z
    """

    tau: float = 0.5

    name: ClassVar[str] = "quantile"
    metric = "pinball loss"
    kinds: ClassVar[tuple[str, ...]] = ("regression",)

    def __post_init__(self) -> None:
        if not 0 < self.tau < 1:
            raise RequestError(f"task 'quantile': tau must lie between 0 and 1, got {self.tau}.")

    @property
    def box(self) -> tuple[float, float]:
        return self.tau - 1, self.tau

    def residual(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return y - z, -torch.ones_like(z)


@dataclass(frozen=True)
class Hinge(PiecewiseLinearTask):
    """Linear support vector machine: hinge loss on two classes, with a ridge.

    ell = max(0, 1 - s z); ridge = 1/(C n_i) in the usual notation
    """

    name: ClassVar[str] = "hinge"
    metric = "hinge loss"
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


@dataclass(frozen=True)
class SquaredHinge(ConvexScoreTask):
    """Linear support vector machine with the squared hinge loss: smooth, on two classes, with a ridge.

    ell = max(0, 1 - s z)^2
    """

    name: ClassVar[str] = "squared_hinge"
    metric = "squared hinge loss"
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


@dataclass(frozen=True)
class Poisson(ConvexScoreTask):
    """Poisson regression: counts with a log link, with a ridge.

    ell = exp(z) - y z, the likelihood without its constant log y!
    deviance of a row = 2 (y log(y / mu) - (y - mu)),   mu = exp(z)

    The curvature has no bound over all w: `constants` has the larger of those at 0 and at the client's own fit.

    No prediction exceeds twice `max_count`, the largest count of all clients' training rows: exp of an extrapolated
    score can be larger than any count by orders of magnitude. Fits do not depend on it.
    """

    max_count: float | None = None

    name: ClassVar[str] = "poisson"
    metric = "deviance"
    likelihood = True
    overdispersed: ClassVar[bool] = True
    risk_per_loss = 2.0
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
        return self._limit(self.scores(w, x)).exp()

    def _limit(self, z: Tensor) -> Tensor:
        """Scores of means up to the largest that is predicted."""
        return z if self.max_prediction is None else z.clamp(max=log(self.max_prediction))

    @property
    def max_prediction(self) -> float | None:
        """The largest mean that is predicted; None without a limit."""
        return None if self.max_count is None else MAX_MEAN_FACTOR * max(self.max_count, 1.0)

    def describe(self) -> JsonObject:
        return {"max_count": self.max_count}

    def row_risk(self, w: Tensor, batch: Batch) -> Tensor:
        z = self._limit(self.scores(w, batch.x))
        return 2 * (torch.xlogy(batch.y, batch.y) - batch.y * z - batch.y + z.exp())

    def dispersion_sums(self, w: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """[C] each: squares (y - mu)^2 / mu and scales y / mu, which correct for small means (Fletcher, Biometrika
        2012)."""
        mu = self.predict(w, batch.x).clamp(min=MIN_POISSON_MEAN)
        real = batch.weight > 0
        return torch.where(real, (batch.y - mu) ** 2 / mu, 0.0).sum(1), torch.where(real, batch.y / mu, 0.0).sum(1)

    def row_divergence(self, w: Tensor, reference: Tensor, batch: Batch) -> Tensor:
        z, true = self._limit(self.scores(w, batch.x)), self._limit(self.scores(reference, batch.x))
        return (2 * (z.exp() - true.exp() - true.exp() * (z - true))).clamp(min=0)


@dataclass(frozen=True)
class Sigmoid(SmoothScoreTask):
    """Sigmoid loss: a smooth, bounded and non-convex stand-in for the classification error, on two classes.

    ell = 1 / (1 + exp(s z)); its second derivative in z lies in [-1/(6 sqrt 3), 1/(6 sqrt 3)]

    There is no exact solver.
    """

    name: ClassVar[str] = "sigmoid"
    metric = "sigmoid loss"
    kinds: ClassVar[tuple[str, ...]] = ("binary",)
    bend: ClassVar[float] = 1 / (6 * sqrt(3))
    convex_loss: ClassVar[bool] = False

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
