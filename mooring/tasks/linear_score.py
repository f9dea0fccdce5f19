"""Tasks on one linear score per row, z = x'w (plus an intercept): the code that they share.

    L_i(w) = 1/n_i sum_j ell(z_ij, y_ij) + ridge/2 |w|^2

Smooth convex ones find their minimiser and prox by Newton's method, piecewise linear ones by an interior point.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mooring.core.cohort import Batch, broadcast_per_client
from mooring.core.nonsmooth import Coupling, Residuals, find_shared_center, minimize_nonsmooth
from mooring.core.task import Constants, HasProx, Layout, Task, require, score_layout
from mooring.tasks.proximal import MAX_DENSE_PARAMETERS, proximal_newton

KINK_RIDGE = 1e-5  # in place of a ridge of 0: small beside 1/n, what a row may pull, and large beside rounding


@dataclass(frozen=True)
class LinearScoreTask(Task):
    """One linear score on `features` columns; the intercept, if any, is the last coefficient."""

    features: int
    intercept: bool = True
    ridge: float = 1e-4
    dtype: torch.dtype = torch.float64

    @property
    def dim(self) -> int:  # type: ignore[override]
        return self.features + self.intercept

    @property
    def layout(self) -> Layout:
        return score_layout(self.features, 1, self.intercept)

    def design(self, x: Tensor) -> Tensor:
        """x with a column of ones, if there is an intercept."""
        return torch.cat([x, torch.ones_like(x[..., :1])], -1) if self.intercept else x

    def scores(self, w: Tensor, x: Tensor) -> Tensor:
        """z [C, B]."""
        z = torch.bmm(x, w[:, : self.features, None])[..., 0]
        return z + w[:, -1:] if self.intercept else z

    def row_loss(self, z: Tensor, y: Tensor) -> Tensor:
        """ell, elementwise."""
        raise NotImplementedError

    def row_slope(self, z: Tensor, y: Tensor) -> Tensor:
        """d ell / d z, or a sub-gradient."""
        raise NotImplementedError

    def predict(self, w: Tensor, x: Tensor) -> Tensor:
        return self.scores(w, x)

    def row_risk(self, w: Tensor, batch: Batch) -> Tensor:
        return self.row_loss(self.scores(w, batch.x), batch.y)

    def row_divergence(self, w: Tensor, reference: Tensor, batch: Batch) -> Tensor:
        """By the mirror image of w behind `reference`: if the latter were true, both would add as much to the loss.

        The mean of both rises depends on the target only through the loss's curvature between them.
        """
        z, true = self.scores(w, batch.x), self.scores(reference, batch.x)
        rise = (self.row_loss(z, batch.y) + self.row_loss(2 * true - z, batch.y)) / 2 - self.row_loss(true, batch.y)
        return rise.clamp(min=0)

    def loss(self, w: Tensor, batch: Batch) -> Tensor:
        return self._loss_at(self.scores(w, batch.x), w, batch)

    def _loss_at(self, z: Tensor, w: Tensor, batch: Batch) -> Tensor:
        return (batch.weight * self.row_loss(z, batch.y)).sum(1) + self.ridge / 2 * (w**2).sum(1)

    def grad(self, w: Tensor, batch: Batch) -> Tensor:
        return self._grad_at(self.scores(w, batch.x), w, batch)

    def _grad_at(self, z: Tensor, w: Tensor, batch: Batch) -> Tensor:
        return self._pull_back(batch.x, batch.weight * self.row_slope(z, batch.y)) + self.ridge * w

    def _pull_back(self, x: Tensor, rows: Tensor) -> Tensor:
        """Sum over rows of x (and 1) times `rows` [C, B], as [C, d]."""
        slopes = torch.bmm(rows[:, None], x)[:, 0]
        return torch.cat([slopes, rows.sum(1, keepdim=True)], 1) if self.intercept else slopes

    def lengths(self, batch: Batch) -> Tensor:
        """[C, B]: each row's squared length, the intercept's 1 included."""
        return (batch.x**2).sum(-1) + float(self.intercept)

    def top(self, batch: Batch) -> Tensor:
        """[C]: the largest eigenvalue of X'X/n."""
        x = self.design(batch.x)
        return torch.linalg.matrix_norm(x * batch.weight.sqrt()[..., None], 2) ** 2


@dataclass(frozen=True)
class SmoothScoreTask(LinearScoreTask):
    """A loss with a second derivative in z."""

    bend: ClassVar[float | None]  # its largest size; None where there is none
    convex_loss: ClassVar[bool] = True

    def row_bend(self, z: Tensor, y: Tensor) -> Tensor:
        """d^2 ell / d z^2."""
        raise NotImplementedError

    def hessian_product(self, w: Tensor, batch: Batch, direction: Tensor) -> Tensor:
        """[C, d]: the Hessian of L_i at w times `direction`."""
        bend = batch.weight * self.row_bend(self.scores(w, batch.x), batch.y)
        return self._pull_back(batch.x, bend * self.scores(direction, batch.x)) + self.ridge * direction

    def hessian(self, w: Tensor, batch: Batch) -> Tensor:
        """[C, d, d]."""
        return self._hessian_at(self.scores(w, batch.x), batch)

    def _hessian_at(self, z: Tensor, batch: Batch) -> Tensor:
        x, bend = self.design(batch.x), batch.weight * self.row_bend(z, batch.y)
        return (bend[..., None] * x).mT @ x + self.ridge * torch.eye(self.dim, dtype=z.dtype)

    def derivatives(self, w: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        z = self.scores(w, batch.x)
        return self._loss_at(z, w, batch), self._grad_at(z, w, batch), self._hessian_at(z, batch)

    def dispersion_sums(self, w: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """[C] each: squares (d ell / d z)^2 and scales d^2 ell / d z^2, the two halves of the sandwich estimator."""
        z, real = self.scores(w, batch.x), batch.weight > 0
        squares, scales = self.row_slope(z, batch.y) ** 2, self.row_bend(z, batch.y)
        return torch.where(real, squares, 0.0).sum(1), torch.where(real, scales, 0.0).sum(1)

    def constants(self, batch: Batch, w: Tensor | None = None) -> Constants:
        """smooth: a bound for all w, or the larger of the curvatures at 0 and at the fit where there is none."""
        fit = require(self, HasProx).prox(torch.zeros(1, self.dim, dtype=self.dtype), 1e-6, batch) if w is None else w
        lengths, top = self.lengths(batch), self.top(batch)
        bends = [self.row_bend(self.scores(v, batch.x), batch.y) for v in (torch.zeros_like(fit), fit)]
        if self.bend is None:
            smooth = torch.stack([self._steepest(batch, b) for b in bends]).amax(0) + self.ridge
            trace = torch.stack([(batch.weight * b * lengths).sum(1) for b in bends]).amax(0)
            single = torch.maximum(*bends) * lengths
        else:
            smooth, trace = self.bend * top + self.ridge, self.bend * (batch.weight * lengths).sum(1)
            single = self.bend * lengths
        largest = (single * (batch.weight > 0)).amax(1) + self.ridge
        if not self.convex_loss:
            convex = 2 * self.ridge - smooth  # the curvature of ell is as negative as it is positive
        elif self.dim <= MAX_DENSE_PARAMETERS:
            convex = torch.linalg.eigvalsh(self.hessian(fit, batch))[:, 0].clamp(min=self.ridge)
        else:
            convex = torch.full_like(smooth, self.ridge)
        slope = self.row_slope(self.scores(fit, batch.x), batch.y)
        n = (batch.weight > 0).sum(1)
        freedom = (n / (n - self.dim).clamp(min=1)).clamp(max=n.clamp(min=1))
        rho2 = (batch.weight * lengths * slope**2).sum(1) * freedom
        mean_bend = (batch.weight * lengths * bends[1]).sum(1)
        dispersion = rho2 / mean_bend.clamp(min=torch.finfo(rho2.dtype).tiny)
        return Constants(smooth, convex, rho2.sqrt(), trace, dispersion, largest)

    def _steepest(self, batch: Batch, bend: Tensor) -> Tensor:
        return self.top(batch._replace(weight=batch.weight * bend))


@dataclass(frozen=True)
class ConvexScoreTask(SmoothScoreTask):
    """A smooth convex loss: minimiser and prox by Newton's method."""

    def solve(self, batch: Batch) -> Tensor:
        """The minimiser. Without ridge it need not exist or be the only one: then the limit of a vanishing ridge, taken
        at MIN_RIDGE, which is finite (see `proximal_newton`)."""
        zero = torch.zeros(len(batch.y), self.dim, dtype=self.dtype)
        return proximal_newton(self, zero, zero, batch, zero)

    def prox(self, center: Tensor, lam: Tensor | float, batch: Batch, start: Tensor | None = None) -> Tensor:
        pull = broadcast_per_client(lam, batch.weight) * torch.ones(len(batch.y), self.dim, dtype=self.dtype)
        center = center.expand(len(batch.y), -1)
        return proximal_newton(self, pull, center, batch, center if start is None else start)


@dataclass(frozen=True)
class NonsmoothScoreTask(LinearScoreTask):
    """ell = max of low r and high r, r(z, y) a residual."""

    smooth_loss: ClassVar[bool] = False

    @property
    def box(self) -> tuple[float, float]:
        """(low, high)."""
        raise NotImplementedError

    def residual(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """r and dr/dz."""
        raise NotImplementedError

    def row_loss(self, z: Tensor, y: Tensor) -> Tensor:
        low, high = self.box
        r = self.residual(z, y)[0]
        return torch.maximum(low * r, high * r)

    def row_slope(self, z: Tensor, y: Tensor) -> Tensor:
        """The middle of the sub-gradients at a kink."""
        low, high = self.box
        r, turn = self.residual(z, y)
        return ((high + low) / 2 + (high - low) / 2 * torch.sign(r)) * turn

    def constants(self, batch: Batch, w: Tensor | None = None) -> Constants:
        """convex is the ridge; noise bounds a record's sub-gradient; a kink has no curvature (nan)."""
        steepest = max(abs(bound) for bound in self.box)
        noise = steepest * (batch.weight * self.lengths(batch)).sum(1).sqrt()
        nan = torch.full_like(noise, torch.nan)
        return Constants(nan, torch.full_like(noise, self.ridge), noise, nan, nan, nan)


@dataclass(frozen=True)
class PiecewiseLinearTask(NonsmoothScoreTask):
    """A residual that is linear in z: minimiser and prox by an interior point."""

    def solve(self, batch: Batch) -> Tensor:
        return self.prox(torch.zeros(1, self.dim, dtype=self.dtype), 0.0, batch)

    def prox(self, center: Tensor, lam: Tensor | float, batch: Batch, start: Tensor | None = None) -> Tensor:
        """Exact up to rounding; the interior point needs no start.

        Where neither lam nor ridge decides between minimisers, the one of least norm does: a ridge of KINK_RIDGE is put
        there, and a piecewise linear loss under a ridge below some threshold has that very minimiser.
        """
        pull = broadcast_per_client(lam, batch.weight) * torch.ones(len(batch.y), self.dim, dtype=self.dtype)
        center = torch.where(pull > 0, center, 0.0)  # a pull of 0 has no centre
        return center + self._step(center, torch.where(pull + self.ridge > 0, pull + self.ridge, KINK_RIDGE), batch)

    def find_center(self, lam: Tensor, p: Tensor, ridge: Tensor, batch: Batch) -> Tensor:
        """[d]: the w of min sum_i p_i [L_i(v_i) + lam_i/2 |v_i - w|^2] + 1/2 w' diag(ridge) w, for a convex loss."""
        zero = torch.zeros(len(batch.y), self.dim, dtype=self.dtype)
        quad = (lam[:, None] + self.ridge).expand_as(zero)
        residuals, real = self._residuals(zero, batch), batch.weight > 0
        return find_shared_center(residuals, *self.box, quad, zero, zero, real, Coupling(p, lam, ridge))

    def _step(self, center: Tensor, quad: Tensor, batch: Batch) -> Tensor:
        """arg min_s of the data's loss at center + s, plus ridge center's + 1/2 s' diag(quad) s."""
        return minimize_nonsmooth(
            self._residuals(center, batch),
            *self.box,
            quad,
            self.ridge * center,
            torch.zeros_like(center),
            batch.weight > 0,
        )

    def _residuals(self, center: Tensor, batch: Batch) -> Residuals:
        """Weighted residuals of a linear r at center + s, with their derivatives."""
        r, turn = self.residual(self.scores(center, batch.x), batch.y)
        u = batch.weight * r
        j = (batch.weight * turn)[..., None] * self.design(batch.x)

        def residuals(s: Tensor) -> tuple[Tensor, Tensor]:
            return u + torch.bmm(j, s[..., None])[..., 0], j

        return residuals


def signs(y: Tensor, like: Tensor) -> Tensor:
    """-1 and +1 from the classes 0 and 1."""
    return 2 * y.to(like.dtype) - 1


def margin_probabilities(z: Tensor) -> Tensor:
    """[..., 2]: the score as a share of the margin, (1 + z)/2 cut to [0, 1], and its complement."""
    share = ((1 + z) / 2).clamp(0, 1)
    return torch.stack([1 - share, share], -1)


def score_linear(x: Tensor, v: Tensor, features: int, has_intercept: bool) -> Tensor:
    """[N, K]: the scores of rows x [N, features] by models [N, d], each row's own."""
    slopes = v[:, : v.shape[1] - v.shape[1] // (features + 1) if has_intercept else None]
    z = torch.einsum("nf,nfk->nk", x, slopes.reshape(len(v), features, -1))
    return z + v[:, slopes.shape[1] :] if has_intercept else z
