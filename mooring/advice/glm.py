"""Scores and their responses where a score is uncertain: what posteriors and gains of canonical likelihoods share.

A row's score is z = x'v, its response A'(z): the value (linear), the probabilities (logistic) or the mean count
(Poisson). For z ~ N(z, blur) the mean response is A'(z / (1 + pi blur / 8)^1/2) for probabilities (the logistic curve
taken for a normal one) and exp(z + blur / 2) for counts; the mean curvature is its derivative in z.
"""

from __future__ import annotations

from math import pi
from typing import Any

import torch
from torch import Tensor

from mooring.tasks.linear import Linear
from mooring.tasks.poisson import Poisson

LARGEST = 30.0  # log of a count, at most


def design(task: Any, x: Tensor) -> Tensor:
    """What the coefficients multiply, in float64."""
    if isinstance(task, Linear):
        return task.design(x).double()
    return torch.cat([x, torch.ones_like(x[..., :1])], -1).double() if task.intercept else x.double()


def scores(x: Tensor, v: Tensor) -> Tensor:
    """[c, b, k]: coefficients run over inputs first and scores second, intercepts last."""
    return x @ v.view(len(v), x.shape[-1], -1)


def blurs(x: Tensor, cov: Tensor) -> Tensor:
    """[c, b, k]: the variance of every score; of several, around their mean, which no probability knows."""
    width = x.shape[-1]
    k = cov.shape[-1] // width
    own = cov.view(len(cov), width, k, width, k)
    if k > 1:
        own = own - own.mean(2, keepdim=True)
        own = own - own.mean(4, keepdim=True)
    own = own.diagonal(dim1=2, dim2=4)  # [c, width, width, k]
    return torch.stack([((x @ own[..., j]) * x).sum(-1) for j in range(k)], -1)


def potential(task: Any, z: Tensor) -> Tensor:
    """A, [c, b]."""
    if isinstance(task, Poisson):
        return z[..., 0].clamp(max=LARGEST).exp()
    return torch.nn.functional.softplus(z[..., 0]) if z.shape[-1] == 1 else torch.logsumexp(z, -1)


def response(task: Any, z: Tensor, blur: Tensor) -> tuple[Tensor, Tensor]:
    """The mean response [c, b, k], and how much the blur flattens it [c, b, k]."""
    if isinstance(task, Poisson):
        return (z + blur / 2).clamp(max=LARGEST).exp(), torch.ones_like(z)
    flat = (1 + pi * blur / 8).rsqrt()
    return torch.sigmoid(flat * z) if z.shape[-1] == 1 else torch.softmax(flat * centred(z), -1), flat


def bent(task: Any, mean: Tensor, flat: Tensor, change: Tensor) -> Tensor:
    """[c, b, k]: how the mean response answers a small change of the scores."""
    if isinstance(task, Poisson):
        return mean * change
    if mean.shape[-1] == 1:
        return flat * mean * (1 - mean) * change
    pushed = flat.sqrt() * centred(change)
    return centred(flat.sqrt() * mean * (pushed - (mean * pushed).sum(-1, keepdim=True)))


def centred(z: Tensor) -> Tensor:
    """Scores around their mean over the classes: a shift of all changes nothing."""
    return z - z.mean(-1, keepdim=True)


def targets(task: Any, y: Tensor, k: int) -> Tensor:
    """[c, b, k]: y as a response."""
    if k == 1:
        return y[..., None].double()
    return torch.nn.functional.one_hot(y, k).double()
