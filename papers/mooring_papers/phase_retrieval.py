"""Robust phase retrieval: a signal from squared measurements, some of them wrong. Weakly convex, not smooth.

    ell(w; x, y) = |(x'w)^2 - y|
    L_i(w) = 1/n_i sum_j ell(w; x_ij, y_ij) + ridge/2 |w|^2

w and -w fit equally well. L_i + weak/2 |.|^2 is convex with weak = 2 lambda_max(X'X/n) - ridge: for lam above that, and
only there, the prox is one point and exact; `exact = true` offers it. Zero is a stationary point, so runs start at a
random unit vector.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from mooring.core.cohort import Batch, broadcast_per_client
from mooring.core.errors import RequestError
from mooring.core.nonsmooth import minimize_nonsmooth
from mooring.core.seeds import generator
from mooring.core.task import Constants
from mooring.tasks.linear_score import NonsmoothScoreTask


@dataclass(frozen=True)
class PhaseRetrieval(NonsmoothScoreTask):
    intercept: bool = False
    ridge: float = 0.0
    exact: bool = False  # offer the exact prox: every lam must then exceed the modulus of weak convexity

    name: ClassVar[str] = "phase"
    metric = "absolute error of squares"
    unit_power = 1
    kinds: ClassVar[tuple[str, ...]] = ("regression",)

    def __new__(cls, *fields: object, exact: bool = False, **named: object) -> Self:
        return object.__new__(_ExactPhaseRetrieval if exact else cls)  # type: ignore[return-value]

    @property
    def box(self) -> tuple[float, float]:
        return -1.0, 1.0

    def start(self, seed: int = 0) -> Tensor:
        w = torch.from_numpy(generator(seed, "model").normal(size=self.dim)).to(self.dtype)
        return w / w.norm()

    def residual(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return z**2 - y, 2 * z

    def predict(self, w: Tensor, x: Tensor) -> Tensor:
        """The squared measurement."""
        return self.scores(w, x) ** 2

    def weak(self, batch: Batch) -> Tensor:
        """[C]: the modulus of weak convexity of L_i, negative where the ridge makes it convex."""
        return 2 * self.top(batch) - self.ridge

    def constants(self, batch: Batch, w: Tensor | None = None) -> Constants:
        """convex is minus the modulus of weak convexity; noise is a record's sub-gradient where the fit is right."""
        noise = (batch.weight * 4 * batch.y.clamp(min=0) * self.lengths(batch)).sum(1).sqrt()
        nan = torch.full_like(noise, torch.nan)
        return Constants(nan, -self.weak(batch), noise, nan, nan, nan)


@dataclass(frozen=True)
class _ExactPhaseRetrieval(PhaseRetrieval):
    """Phase retrieval with `exact = true`."""

    def prox(self, center: Tensor, lam: Tensor | float, batch: Batch, start: Tensor | None = None) -> Tensor:
        pull = broadcast_per_client(lam, batch.weight) * torch.ones(len(batch.y), self.dim, dtype=self.dtype)
        weak = self.weak(batch)
        if bool((pull.amin(1) <= weak).any()):
            raise RequestError(
                f"task 'phase': the prox needs lam above the modulus of weak convexity, {float(weak.max()):.4g} at the "
                f"worst client, got {float(pull.min()):.4g}; raise lam or ridge, or set exact = false."
            )
        center = center.expand(len(batch.y), -1)
        x = self.design(batch.x)

        def residuals(s: Tensor) -> tuple[Tensor, Tensor]:
            r, turn = self.residual(self.scores(center + s, batch.x), batch.y)
            return batch.weight * r, (batch.weight * turn)[..., None] * x

        def curvature(a: Tensor) -> Tensor:
            return ((2 * batch.weight * a)[..., None] * x).mT @ x

        zero, quad = torch.zeros_like(center), pull + self.ridge
        real = batch.weight > 0
        return center + minimize_nonsmooth(
            residuals, *self.box, quad, self.ridge * center, zero, real, curvature=curvature
        )
