"""Planted true models of a generator's clients, and their risks in closed form.

    w_i    the minimiser of client i's population risk         Truth.w
    w_avg  sum_i p_i w_i                                       Truth.average
    R_rms  sqrt(sum_i p_i |w_i - w_avg|^2)                     Truth.r_rms
    R_max  max_i |w_i - w_avg|                                 Truth.r_max
    Gamma  max_ij |w_i - w_j|                                  Truth.diameter

Sources  alternative, Assumptions B and C (R_rms, R_max); effect, Assumption 1 (R_max); kernel, Section 7.2 (Gamma).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import softplus

from mooring.core.newton import damped_newton


@dataclass(frozen=True, eq=False)
class Truth:
    """Per-client parameters and the client weights p that the average and the radii use (training sizes)."""

    w: Tensor  # [m, d]
    p: Tensor  # [m]

    @property
    def average(self) -> Tensor:
        return self.p @ self.w

    @property
    def r_rms(self) -> float:
        return float((self.p @ (self.w - self.average).square().sum(1)).sqrt())

    @property
    def r_max(self) -> float:
        return float((self.w - self.average).norm(dim=1).max())

    @property
    def diameter(self) -> float:
        exact = "donot_use_mm_for_euclid_dist"  # the product form would lose half of the digits for close truths
        return float(torch.cdist(self.w, self.w, compute_mode=exact).max())


@dataclass(frozen=True, eq=False)
class LinearTruth(Truth):
    """y = x'w_i + noise * N(0, 1)."""

    second_moment: Tensor  # [m, d, d], E[x x'] of each client
    noise: float  # standard deviation of the response noise
    centre: Tensor | None = None  # [d] and
    spread: Tensor | None = None  # [d]: w_i ~ N(centre, diag(spread^2)), where truths were drawn like that

    def excess_risk(self, v: Tensor) -> Tensor:
        """[m]: 1/2 (v_i - w_i)' E[x x'] (v_i - w_i), the loss being half the squared error; v is [m, d] or [d]."""
        gap = v - self.w
        return 0.5 * torch.einsum("mi,mij,mj->m", gap, self.second_moment, gap)


class Inputs(Protocol):
    """The distribution of each client's x, as far as logistic risks need it; v is [m, d]."""

    def expect(self, v: Tensor) -> tuple[Tensor, Tensor]: ...  # E softplus(x'v) [m] and E x sigmoid(x'v) [m, d]

    def hessian(self, v: Tensor) -> Tensor: ...  # E x x' sigmoid'(x'v) [m, d, d]


@dataclass(frozen=True, eq=False)
class LogisticTruth(Truth):
    """P(y = 1 | x) = sigmoid(x'planted_i); w_i minimises the population log-loss + ridge/2 |w|^2."""

    planted: Tensor  # [m, d]
    ridge: float
    inputs: Inputs
    label_moment: Tensor  # [m, d], E[x y]

    @staticmethod
    def solve(planted: Tensor, p: Tensor, ridge: float, inputs: Inputs) -> LogisticTruth:
        """The truth with w_i found by Newton's method; without a ridge it is the planted vector itself."""
        moment = inputs.expect(planted)[1]
        truth = LogisticTruth(planted, p, planted, ridge, inputs, moment)
        if ridge == 0:
            return truth
        eye = torch.eye(planted.shape[1], dtype=planted.dtype)

        def grad(v: Tensor) -> Tensor:
            return inputs.expect(v)[1] - moment + ridge * v

        def direction(v: Tensor, g: Tensor) -> Tensor:
            return torch.linalg.solve(inputs.hessian(v) + ridge * eye, g)

        return replace(truth, w=damped_newton(truth.risk, grad, direction, planted))

    def risk(self, v: Tensor) -> Tensor:
        """[m]: E[softplus(x'v) - y x'v] + ridge/2 |v|^2; v is [m, d] or [d]."""
        v = v.expand_as(self.planted)
        return self.inputs.expect(v)[0] - (v * self.label_moment).sum(1) + self.ridge / 2 * v.square().sum(1)

    def excess_risk(self, v: Tensor) -> Tensor:
        return self.risk(v) - self.risk(self.w)


@dataclass(frozen=True, eq=False)
class ClassTruth(Truth):
    """A planted linear classifier: the class of x at client i is argmax_c (x'weight_i + bias_i)_c.

    It is the rule that made the labels, or Bayes' rule where labels are random.
    """

    weight: Tensor  # [m, q, c]
    bias: Tensor  # [m, c]

    def labels(self, x: Tensor, client: int) -> Tensor:
        """[n]: the planted class of the rows x [n, q]."""
        return (x.to(self.weight.dtype) @ self.weight[client] + self.bias[client]).argmax(1)


def flatten_parameters(weight: Tensor, bias: Tensor) -> Tensor:
    """[m, d]: classifiers [m, q, c] and [m, c] as parameter vectors of a logistic task with intercept.

    Slopes feature by feature, then intercepts; for two classes the differences between the second and the first.
    """
    if bias.shape[1] == 2:
        weight, bias = weight.diff(dim=2), bias.diff(dim=1)
    return torch.cat([weight.flatten(1), bias], dim=1)


@dataclass(frozen=True, eq=False)
class GaussianInputs:
    """x ~ N(mean_i, diag(variance_i)).

    By Stein's lemma every expectation needs only the scalar a = x'v, which is Gaussian. It is summed over an even
    grid: exact to rounding while the standard deviation of a stays below about 15, where Gauss-Hermite rules of any
    practical size are not.
    """

    mean: Tensor  # [m, d]
    variance: Tensor  # [m, d]

    STEP = 0.03
    REACH = 267  # steps each side: 8 standard deviations

    def _scalar(self, v: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.arange(-self.REACH, self.REACH + 1, dtype=v.dtype) * self.STEP
        weight = torch.exp(-z.square() / 2)
        centre, width = (self.mean * v).sum(1), (self.variance * v.square()).sum(1).sqrt()
        return centre[:, None] + width[:, None] * z, weight / weight.sum()

    def expect(self, v: Tensor) -> tuple[Tensor, Tensor]:
        a, weight = self._scalar(v)
        s = torch.sigmoid(a)
        slope = (s * (1 - s)) @ weight
        return softplus(a) @ weight, self.mean * (s @ weight)[:, None] + self.variance * v * slope[:, None]

    def hessian(self, v: Tensor) -> Tensor:
        a, weight = self._scalar(v)
        s = torch.sigmoid(a)
        h = s * (1 - s)
        h0, h1, h2 = (part @ weight for part in (h, h * (1 - 2 * s), h * (1 - 6 * h)))
        tilt = self.variance * v
        cross = self.mean[:, :, None] * tilt[:, None, :]
        return (
            h0[:, None, None] * (torch.diag_embed(self.variance) + self.mean[:, :, None] * self.mean[:, None, :])
            + h1[:, None, None] * (cross + cross.mT)
            + h2[:, None, None] * tilt[:, :, None] * tilt[:, None, :]
        )


@dataclass(frozen=True, eq=False)
class PointInputs:
    """x uniform on finitely many points, the same for every client."""

    x: Tensor  # [k, d]

    def expect(self, v: Tensor) -> tuple[Tensor, Tensor]:
        a = v @ self.x.T
        return softplus(a).mean(1), torch.sigmoid(a) @ self.x / len(self.x)

    def hessian(self, v: Tensor) -> Tensor:
        s = torch.sigmoid(v @ self.x.T)
        d = self.x.shape[1]
        outer = (self.x[:, :, None] * self.x[:, None, :]).reshape(-1, d * d)
        return (s * (1 - s) @ outer / len(self.x)).reshape(-1, d, d)
