"""Logistic regression: two classes (one score) or more (softmax), with an optional ridge.

    two classes   ell(w; x, y) = log(1 + exp(-s x'w)),   s = +1 for y = 1, -1 for y = 0
    c classes     ell(w; x, y) = log sum_k exp(x'w_k) - x'w_y
    L_i(w) = 1/n_i sum_j ell(w; x_ij, y_ij) + ridge/2 |w|^2

Minimiser and prox are found by Newton's method, with conjugate gradients above MAX_DENSE_PARAMETERS.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from mooring.core.cohort import Batch, broadcast_per_client
from mooring.core.sgd_step import StepTerms
from mooring.core.task import Constants, InPlaceStep, Layout, Task, score_layout
from mooring.tasks.proximal import MAX_DENSE_PARAMETERS, proximal_newton


def kl_divergence(z: Tensor, true: Tensor) -> Tensor:
    """[...]: sum_k p_k log(p_k / q_k) of the probabilities p and q behind two sets of logits [..., classes]."""
    p, q = torch.log_softmax(true, -1), torch.log_softmax(z, -1)
    return (p.exp() * (p - q)).sum(-1).clamp(min=0)


@dataclass(frozen=True)
class Logistic(Task):
    """Logistic regression on `features` columns for `classes` classes; w is [features, scores] then intercepts."""

    features: int
    classes: int = 2
    intercept: bool = True
    ridge: float = 1e-4
    dtype: torch.dtype = torch.float64

    name: ClassVar[str] = "logistic"
    metric = "log-loss"
    likelihood = True
    kinds: ClassVar[tuple[str, ...]] = ("binary", "classes")

    @property
    def scores(self) -> int:
        """How many linear scores a row has: one for two classes."""
        return 1 if self.classes == 2 else self.classes

    @property
    def dim(self) -> int:  # type: ignore[override]
        return (self.features + self.intercept) * self.scores

    @property
    def layout(self) -> Layout:
        return score_layout(self.features, self.scores, self.intercept)

    def logits(self, w: Tensor, x: Tensor) -> Tensor:
        """[C, B, scores]."""
        slopes = w[:, : self.features * self.scores].view(-1, self.features, self.scores)
        z = torch.bmm(x, slopes)
        return z + w[:, None, -self.scores :] if self.intercept else z

    def probabilities(self, z: Tensor) -> Tensor:
        """[..., classes] from [..., scores]."""
        if self.scores == 1:
            return torch.cat([torch.sigmoid(-z), torch.sigmoid(z)], -1)
        return torch.softmax(z, -1)

    def predict(self, w: Tensor, x: Tensor) -> Tensor:
        return self.probabilities(self.logits(w, x))

    def row_risk(self, w: Tensor, batch: Batch) -> Tensor:
        z = self.logits(w, batch.x)
        if self.scores == 1:
            return F.softplus(torch.where(batch.y == 1, -z[..., 0], z[..., 0]))
        return torch.logsumexp(z, -1) - z.gather(-1, batch.y[..., None])[..., 0]

    def row_divergence(self, w: Tensor, reference: Tensor, batch: Batch) -> Tensor:
        """Kullback and Leibler's, of the predicted probabilities."""
        z, true = self.logits(w, batch.x), self.logits(reference, batch.x)
        if self.scores == 1:
            rise = F.softplus(z) - F.softplus(true) - torch.sigmoid(true) * (z - true)
            return rise[..., 0].clamp(min=0)
        return kl_divergence(z, true)

    def loss(self, w: Tensor, batch: Batch) -> Tensor:
        return (batch.weight * self.row_risk(w, batch)).sum(1) + self.ridge / 2 * (w**2).sum(1)

    def _residual(self, z: Tensor, y: Tensor) -> Tensor:
        """d ell / d scores."""
        if self.scores == 1:
            return torch.sigmoid(z) - y[..., None].to(z.dtype)
        return torch.softmax(z, -1).scatter_add_(-1, y[..., None], z.new_full((), -1).expand_as(y)[..., None])

    def _pull_back(self, x: Tensor, scored: Tensor) -> Tensor:
        """Sum over rows of the outer products of x (and 1) with `scored` [C, B, scores], as [C, d]."""
        slopes = torch.bmm(x.transpose(1, 2), scored).flatten(1)
        return torch.cat([slopes, scored.sum(1)], 1) if self.intercept else slopes

    def grad(self, w: Tensor, batch: Batch) -> Tensor:
        scored = batch.weight[..., None] * self._residual(self.logits(w, batch.x), batch.y)
        return self._pull_back(batch.x, scored) + self.ridge * w

    def derivatives(self, w: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, gradient and Hessian from the same probabilities."""
        z, y = self.logits(w, batch.x), batch.y[..., None]
        if self.scores == 1:
            risk, prob = F.softplus(torch.where(y == 1, -z, z)), self.probabilities(z)
            residual = prob[..., 1:] - y.to(z.dtype)
        else:
            total = torch.logsumexp(z, -1, keepdim=True)
            risk, prob = total - z.gather(-1, y), (z - total).exp()  # quicker than softmax of few classes
            residual = prob.scatter_add(-1, y, z.new_full((), -1).expand_as(y))
        loss = (batch.weight * risk[..., 0]).sum(1) + self.ridge / 2 * (w**2).sum(1)
        grad = self._pull_back(batch.x, batch.weight[..., None] * residual) + self.ridge * w
        return loss, grad, self._hessian_at(prob, batch)

    def step_in_place(self) -> InPlaceStep | None:
        return self._step

    def _step(self, v: Tensor, batch: Batch, move: StepTerms) -> None:
        scored = self._residual(self.logits(v, batch.x), batch.y).mul_((batch.weight * move.rate)[..., None])
        factor = move.shrink(v, self.ridge)
        slopes = v[:, : self.features * self.scores].view(-1, self.features, self.scores)
        slopes.baddbmm_(batch.x.mT, scored, beta=factor, alpha=-1)
        if self.intercept:
            v[:, -self.scores :].mul_(factor).sub_(scored.sum(1))
        move.add(v)

    def hessian_product(self, w: Tensor, batch: Batch, direction: Tensor) -> Tensor:
        """[C, d]: the Hessian of L_i at w times `direction`."""
        prob = self.predict(w, batch.x)
        change = self.logits(direction, batch.x)
        if self.scores == 1:
            scored = prob[..., :1] * prob[..., 1:] * change
        else:
            scored = prob * (change - (prob * change).sum(-1, keepdim=True))
        return self._pull_back(batch.x, batch.weight[..., None] * scored) + self.ridge * direction

    def hessian(self, w: Tensor, batch: Batch) -> Tensor:
        """[C, d, d]."""
        return self._hessian_at(self.predict(w, batch.x), batch)

    def _hessian_at(self, prob: Tensor, batch: Batch) -> Tensor:
        x = torch.cat([batch.x, torch.ones_like(batch.x[..., :1])], -1) if self.intercept else batch.x
        if self.scores == 1:
            curvature = batch.weight * prob[..., 0] * prob[..., 1]
            h = (curvature[..., None] * x).mT @ x
        else:
            # sum of weight (diag(p) - p p') (x) x x'. Rows of w run over features first and scores second, then the
            # intercepts: the same order here.
            shape = (len(x), x.shape[2], self.scores, x.shape[2], self.scores)
            share = batch.weight[..., None] * prob
            mixed = (x[..., None] * prob[..., None, :]).flatten(2)
            h = -(batch.weight[..., None] * mixed).mT @ mixed
            own = (x[..., None] * share[..., None, :]).flatten(2).mT @ x  # [C, features and scores, features]
            h.view(shape).diagonal(dim1=2, dim2=4).add_(own.view(shape[:4]).permute(0, 1, 3, 2))
        h.diagonal(dim1=1, dim2=2).add_(self.ridge)
        return h

    def solve(self, batch: Batch) -> Tensor:
        """The minimiser. Without ridge it need not exist or be the only one: then the limit of a vanishing ridge, taken
        at MIN_RIDGE, which is finite (see `proximal_newton`)."""
        start = torch.zeros(len(batch.y), self.dim, dtype=self.dtype)
        return proximal_newton(self, torch.zeros_like(start), start, batch, start)

    def prox(self, center: Tensor, lam: Tensor | float, batch: Batch, start: Tensor | None = None) -> Tensor:
        pull = broadcast_per_client(lam, batch.weight) * torch.ones(len(batch.y), self.dim, dtype=self.dtype)
        center = center.expand(len(batch.y), -1)
        return proximal_newton(self, pull, center, batch, center if start is None else start)

    def constants(self, batch: Batch, w: Tensor | None = None) -> Constants:
        """smooth: the uniform bound lambda_max(X'X/n)/4 (softmax: /2) plus ridge; convex: at each client's own fit."""
        fit = self.prox(torch.zeros(1, self.dim, dtype=self.dtype), 1e-6, batch) if w is None else w
        top = _largest_square(batch, self.intercept)
        bend = 4 if self.scores == 1 else 2
        smooth = top / bend + self.ridge
        if self.dim <= MAX_DENSE_PARAMETERS:
            convex = torch.linalg.eigvalsh(self.hessian(fit, batch))[:, 0].clamp(min=self.ridge)
        else:
            convex = torch.full_like(smooth, self.ridge)
        residual = self._residual(self.logits(fit, batch.x), batch.y)
        length = (batch.x**2).sum(-1) + float(self.intercept)
        rho2 = (batch.weight * length * (residual**2).sum(-1)).sum(1)
        n = (batch.weight > 0).sum(1)
        freedom = n / (n - self.dim).clamp(min=1)
        noise = (rho2 * freedom.clamp(max=n.clamp(min=1))).sqrt()
        trace, largest = (batch.weight * length).sum(1) / bend, (length * (batch.weight > 0)).amax(1) / bend
        return Constants(smooth, convex, noise, trace, torch.ones_like(noise), largest + self.ridge)


def _largest_square(batch: Batch, intercept: bool, rounds: int = 50) -> Tensor:
    """[C]: the largest eigenvalue of each client's X'X/n, intercept column included, by power iteration.

    It starts at one Gaussian vector for all clients: columns that cancel each other, such as z and -z, are orthogonal
    to any start with a pattern of its own.
    """
    x = torch.cat([batch.x, torch.ones_like(batch.x[..., :1])], -1) if intercept else batch.x
    start = torch.randn(x.shape[-1], 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(x.dtype)
    v = start.expand(len(x), -1, -1)
    for _ in range(rounds):
        v = v / v.norm(dim=1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
        v = torch.bmm(x.transpose(1, 2), batch.weight[..., None] * torch.bmm(x, v))
    return v.norm(dim=1)[:, 0]
