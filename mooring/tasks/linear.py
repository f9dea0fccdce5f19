"""Linear regression: half the squared loss, with an optional ridge.

    L_i(w) = 1/(2 n_i) sum_j (x_ij'w - y_ij)^2 + ridge/2 |w|^2

The rows of a client enter only through X'X/n, X'y/n and y'y/n. They are kept as one symmetric eigendecomposition,
which serves every step and every scalar lam; a diagonal lam takes a Cholesky factorisation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from mooring.core.cohort import Batch, broadcast_per_client
from mooring.core.sgd_step import StepTerms
from mooring.core.task import Constants, InPlaceStep, Layout, Task, score_layout

UNSEEN = 4096  # units of rounding, of a client's largest eigenvalue, up to which an eigenvalue is 0


class Quadratic(NamedTuple):
    """L_i up to the ridge: 1/2 w' V diag(values) V' w - moment'w + square/2."""

    n: Tensor  # [C] rows
    values: Tensor  # [C, d] eigenvalues of X'X/n, 0 in directions that no row sees
    vectors: Tensor  # [C, d, d] eigenvectors, in columns
    moment: Tensor  # [C, d]
    square: Tensor  # [C]
    longest: Tensor  # [C] largest |x|^2 of a row


@dataclass(frozen=True)
class Linear(Task):
    """Linear regression on `features` columns; the intercept, if any, is the last coefficient."""

    features: int
    intercept: bool = True
    ridge: float = 0.0
    dtype: torch.dtype = torch.float64

    name: ClassVar[str] = "linear"
    metric = "mse"
    risk_per_loss = 2.0
    kinds: ClassVar[tuple[str, ...]] = ("regression",)

    @property
    def dim(self) -> int:  # type: ignore[override]
        return self.features + self.intercept

    @property
    def layout(self) -> Layout:
        return score_layout(self.dim - self.intercept, 1, self.intercept)

    def design(self, x: Tensor) -> Tensor:
        """x with a column of ones, if there is an intercept."""
        return torch.cat([x, torch.ones_like(x[..., :1])], -1) if self.intercept else x

    def predict(self, w: Tensor, x: Tensor) -> Tensor:
        value = torch.einsum("cbq,cq->cb", x, w[:, : self.features])
        return value + w[:, -1:] if self.intercept else value

    def condense(self, batch: Batch) -> Quadratic:
        x = self.design(batch.x)
        weighted = batch.weight[..., None] * x
        values, vectors = torch.linalg.eigh(torch.einsum("cbi,cbj->cij", weighted, x))
        lengths = (x**2).sum(-1) * (batch.weight > 0)
        return Quadratic(
            (batch.weight > 0).sum(1),
            torch.where(_seen(values), values, 0.0),
            vectors,
            torch.einsum("cbi,cb->ci", weighted, batch.y),
            (batch.weight * batch.y**2).sum(1),
            lengths.amax(1) if x.shape[1] else lengths.sum(1),
        )

    def loss(self, w: Tensor, batch: Batch | Quadratic) -> Tensor:
        penalty = self.ridge / 2 * (w**2).sum(1)
        if isinstance(batch, Batch):
            return 0.5 * (batch.weight * (self.predict(w, batch.x) - batch.y) ** 2).sum(1) + penalty
        z = torch.einsum("cji,cj->ci", batch.vectors, w)
        return 0.5 * (batch.values * z**2).sum(1) - (batch.moment * w).sum(1) + 0.5 * batch.square + penalty

    def grad(self, w: Tensor, batch: Batch | Quadratic) -> Tensor:
        if isinstance(batch, Quadratic):
            return _spectral(batch, batch.values, w) - batch.moment + self.ridge * w
        residual = batch.weight * (self.predict(w, batch.x) - batch.y)
        slope = torch.einsum("cbq,cb->cq", batch.x, residual)
        data = torch.cat([slope, residual.sum(1, keepdim=True)], 1) if self.intercept else slope
        return data + self.ridge * w

    def step_in_place(self) -> InPlaceStep | None:
        return self._step

    def _step(self, v: Tensor, batch: Batch, move: StepTerms) -> None:
        residual = (batch.weight * move.rate) * (self.predict(v, batch.x) - batch.y)
        factor = move.shrink(v, self.ridge)
        v[:, None, : self.features].baddbmm_(residual[:, None], batch.x, beta=factor, alpha=-1)
        if self.intercept:
            v[:, -1].mul_(factor).sub_(residual.sum(1))
        move.add(v)

    def solve(self, batch: Batch | Quadratic) -> Tensor:
        """The minimiser; the one of least norm where a client's rows do not determine it."""
        q = self._condensed(batch)
        return self.prox(torch.zeros_like(q.moment), 0.0, q)

    def prox(
        self, center: Tensor, lam: Tensor | float, batch: Batch | Quadratic, start: Tensor | None = None
    ) -> Tensor:
        """arg min L_i(v) + lam/2 |v - center|^2 = (H_i + lam)^-1 (moment_i + lam center).

        Where neither rows nor ridge nor lam hold a direction, the model has nothing of it: the minimiser of least norm,
        which is the limit of a vanishing ridge.
        """
        q = self._condensed(batch)
        pull = broadcast_per_client(lam, q.moment)
        # What is left of the moment in unseen directions is rounding.
        moment = _across(q, q.moment) * (q.values > 0)
        if pull.ndim < 2 or pull.shape[1] == 1:
            return _along(
                q, _over(moment + pull * _across(q, center.expand_as(q.moment)), q.values + self.ridge + pull)
            )
        system = self.hessian(center, q) + torch.diag_embed(pull)
        target = _along(q, moment) + pull * center
        if bool((pull + self.ridge > 0).all()):
            return torch.cholesky_solve(target[..., None], torch.linalg.cholesky(system))[..., 0]
        values, vectors = torch.linalg.eigh(system)
        mixed = q._replace(values=torch.where(_seen(values), values, 0.0), vectors=vectors)
        return _along(mixed, _over(_across(mixed, target), mixed.values))

    def hessian(self, w: Tensor, batch: Batch | Quadratic) -> Tensor:
        """[C, d, d], the same everywhere."""
        q = self._condensed(batch)
        gram = torch.einsum("cik,ck,cjk->cij", q.vectors, q.values, q.vectors)
        return gram + self.ridge * torch.eye(self.dim, dtype=gram.dtype)

    def row_risk(self, w: Tensor, batch: Batch) -> Tensor:
        return (self.predict(w, batch.x) - batch.y) ** 2

    def row_divergence(self, w: Tensor, reference: Tensor, batch: Batch) -> Tensor:
        return self.predict(w - reference, batch.x) ** 2

    def constants(self, batch: Batch | Quadratic, w: Tensor | None = None) -> Constants:
        """rho^2 = sigma^2 tr(X'X/n), with sigma^2 the residual variance of each client's own fit."""
        q = self._condensed(batch)
        fit = self.solve(q)
        residual = 2 * (self.loss(fit, q) - self.ridge / 2 * (fit**2).sum(1))
        rank = (q.values > 0).sum(1)
        freedom = q.n / (q.n - rank).clamp(min=1)
        dispersion = residual.clamp(min=0) * freedom
        trace = q.values.sum(1)
        noise = (dispersion * trace).sqrt()
        low, high = q.values[:, 0] + self.ridge, q.values[:, -1] + self.ridge
        return Constants(high, low, noise, trace, dispersion, q.longest + self.ridge)

    def _condensed(self, batch: Batch | Quadratic) -> Quadratic:
        return self.condense(batch) if isinstance(batch, Batch) else batch


def _spectral(q: Quadratic, values: Tensor, w: Tensor) -> Tensor:
    """V diag(values) V' w for every client."""
    return _along(q, values * _across(q, w))


def _across(q: Quadratic, w: Tensor) -> Tensor:
    """V' w: the coordinates of w along the eigenvectors."""
    return torch.einsum("cji,cj->ci", q.vectors, w)


def _along(q: Quadratic, z: Tensor) -> Tensor:
    """V z."""
    return torch.einsum("cij,cj->ci", q.vectors, z)


def _over(z: Tensor, curvature: Tensor) -> Tensor:
    """z / curvature, and 0 where there is no curvature."""
    return torch.where(curvature > 0, z / curvature, 0.0)


def _seen(values: Tensor) -> Tensor:
    """Which eigenvalues [C, d], in rising order, are more than rounding of the largest."""
    return values > UNSEEN * torch.finfo(values.dtype).eps * values[:, -1:].clamp(min=torch.finfo(values.dtype).tiny)
