"""The noise of each client's rows, shrunk to that of all clients: how far squared losses may trust its rows.

    s_i^2 = (nu s^2 + rss_i) / (nu + f_i),   f_i = n_i - degrees of freedom of client i's model

rss_i is the sum of squared residuals of a model that is only loosely pulled to the others, nu is estimated by moments,
and with heavy tails f_i rows count as fewer normal ones.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mooring.core.client_functions import ClientRows, client_function
from mooring.core.cohort import Batch
from mooring.estimates.client_queries import linear_sums
from mooring.partial_pooling.lambda_path import MAX_CLIENTS_PER_BLOCK, PullShape, solve_path
from mooring.tasks.linear import Linear

LOOSE_VARIANCE_FACTOR = 5.0  # a tighter pull would count a client's distance as noise
MIN_NOISE_SHARE = 1e-12  # share of the targets' mean square


class NoiseDistribution(NamedTuple):
    """How clients' noise variances vary."""

    typical: float
    strength: float  # rows' worth that each client's own variance is shrunk by; infinite if all have the same
    kurtosis: float = 3.0  # of residuals


class ResidualSums(NamedTuple):
    """[C] each: sums of squares and of fourth powers of residuals."""

    square: Tensor
    fourth: Tensor


@client_function
def sum_residuals(task: Linear, batch: Batch, models: Tensor) -> ResidualSums:
    x, y = task.design(batch.x).double(), batch.y.double()
    square = ((batch.weight > 0) * (y - (x @ models.double()[..., None])[..., 0])).square()
    return ResidualSums(square.sum(1), square.square().sum(1))


def estimate_noise(task: Linear, rows: ClientRows, variance: Tensor, noise: Tensor) -> tuple[Tensor, NoiseDistribution]:
    """[m]: each client's noise variance, and their law; `variance` [d] is that between clients, `noise` [m] a start.

    Of very many clients each BLOCK has its own global model.
    """
    loose, parts, least = LOOSE_VARIANCE_FACTOR * variance.double().clamp(min=0), [], 0.0
    for block in torch.arange(len(rows)).split(MAX_CLIENTS_PER_BLOCK):
        some = rows if len(block) == len(rows) else rows.select(block)
        sums, n = linear_sums(task, some), some.size.double()
        least = max(least, MIN_NOISE_SHARE * float((n @ sums.yy / n.sum()).clamp(min=1e-100)))
        first = noise[block].double().clamp(min=least)
        shape = PullShape(first / n.clamp(min=1), loose)
        models = next(solve_path(task, some, n / first, [1.0], shape)).v
        residuals = sum_residuals(task, some, models)
        used = degrees_of_freedom((n / first)[:, None, None] * sums.gram, loose)
        parts.append((residuals.square, residuals.fourth, (n - used).clamp(min=0)))
    rss, fourth, freedom = (torch.cat(column) for column in zip(*parts))
    law = estimate_noise_distribution(rss, freedom, residual_kurtosis(fourth, rss, rows.size.double()))
    return shrink_to_pooled(rss, freedom, law).clamp(min=least), law


def degrees_of_freedom(k: Tensor, variance: Tensor) -> Tensor:
    """[m]: tr (K + T^-1)^-1 K of information matrices K [m, d, d] and T = diag(variance)."""
    root = variance.double().clamp(min=0).sqrt()
    values = torch.linalg.eigvalsh(root[:, None] * k * root).clamp(min=0)
    return (values / (1 + values)).sum(1)


def residual_kurtosis(fourth: Tensor, rss: Tensor, n: Tensor) -> float:
    """Of residuals within clients, from sums of fourth powers and of squares; 3 for normal ones."""
    total = (rss**2 / (n + 2)).sum()
    return max(float(fourth.sum() / total), 1.5) if float(total) > 0 else 3.0


def estimate_noise_distribution(rss: Tensor, freedom: Tensor, tails: float = 3.0) -> NoiseDistribution:
    """From sums of squared residuals and their degrees of freedom, [m] each."""
    typical = (rss.sum() / freedom.sum().clamp(min=1e-12)).clamp(min=torch.finfo(rss.dtype).tiny)
    known = freedom > 1
    f, u = freedom[known] * 2 / (tails - 1), rss[known] / freedom[known] / typical
    # Var u = cv^2 + 2 (1 + cv^2) / f: cv^2 by weighted moments, with the weights of the case cv = 0.
    excess = float((f * ((u - 1) ** 2 - 2 / f)).sum() / (f + 2).sum()) if len(f) > 2 else 0.0
    return NoiseDistribution(float(typical), 2 / excess + 2 if excess > 1e-6 else torch.inf, tails)


def shrink_to_pooled(rss: Tensor, freedom: Tensor, law: NoiseDistribution) -> Tensor:
    """[m]: noise variances; a client of few rows, or of rows with heavy tails, has nearly the typical one."""
    if law.strength == torch.inf:
        return torch.full_like(rss, law.typical)
    worth = freedom * 2 / (law.kurtosis - 1)  # normal rows that would show the variance as well
    ratio = torch.where(freedom > 1, rss / freedom.clamp(min=1e-12) / law.typical, 1.0)
    return law.typical * (law.strength + worth * ratio) / (law.strength + worth)
