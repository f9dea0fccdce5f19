"""The theorems' constants and lam, from client statistics.

    mu = min_i convex_i        smooth = max_i smooth_i        noise = max_i noise_i

These bound the curvature at all models that training may reach, which step sizes need; the rules for lam take the
curvature at the fits (`lambda_rules.py`), as `mooring theory` prints it.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from mooring.core.errors import RequestError
from mooring.core.penalty import PerClientPenalty
from mooring.core.task import Task
from mooring.estimates.federation_estimates import FederationEstimates
from mooring.estimates.lambda_rules import MAX_LAM_PER_SMOOTHNESS, lam_factors

if TYPE_CHECKING:
    from mooring.estimates.client_statistics import ClientStatistics


class CurvatureBounds(NamedTuple):
    mu: float
    smooth: float
    noise: float


def bound_curvature(owner: str, task: Task, statistics: ClientStatistics) -> CurvatureBounds:
    """mu, smooth and noise of all clients; refused unless 0 < mu <= smooth < infinity."""
    mu, smooth, noise = float(statistics.convex.min()), float(statistics.smooth.max()), float(statistics.noise.max())
    if not np.isfinite([smooth, noise]).all():
        raise RequestError(f"{owner} needs the smoothness of the loss, and task '{task.name}' does not define it.")
    if not mu > 0:
        raise RequestError(
            f"{owner} needs every client's loss to be strongly convex, but the smallest curvature is {mu:.3g}; "
            "give the task a ridge > 0."
        )
    return CurvatureBounds(mu, smooth, noise)


def require_federation(owner: str, task: Task, statistics: ClientStatistics) -> FederationEstimates:
    """Return the federation's estimates; RequestError if there are none."""
    if statistics.federation is None:
        raise RequestError(
            f"{owner} needs an estimate of how clients vary, which task '{task.name}' on these rows does not allow. "
            "It takes two clients, more rows than parameters, and a smooth convex loss that is a likelihood or has "
            "`dispersion_sums`. Set lam to a number."
        )
    return statistics.federation


def resolve_lam_rule(owner: str, rule: str, task: Task, statistics: ClientStatistics) -> float | PerClientPenalty:
    """lam as a rule gives it, in numbers that an algorithm can run with: at most CAP times the smoothness."""
    federation = require_federation(owner, task, statistics)
    lam_rule = federation.rules[rule]
    max_lam = MAX_LAM_PER_SMOOTHNESS * float(statistics.smooth[federation.clients].max())
    lam = torch.as_tensor(lam_rule.lam, dtype=torch.float64)
    if bool(lam.isnan().any()):
        raise RequestError(f"{owner} has no value here: {' '.join(lam_rule.warnings) or 'its constants are unknown.'}")
    if lam.ndim == 0:
        if lam > max_lam:
            warnings.warn(
                f"{owner}: the rule asks for more than {MAX_LAM_PER_SMOOTHNESS:g} times the smoothness; lam is "
                "cut there."
            )
        return min(float(lam), max_lam)
    if rule == "coefficient":
        return PerClientPenalty(per_coefficient=tuple(lam.clamp(max=max_lam).tolist()))
    client_lams, factor = (
        (lam, None) if lam.ndim == 1 else lam_factors(federation.diagonal or federation.scalar, federation.n)
    )
    all_lams = torch.full(
        (len(statistics.n),), max_lam, dtype=torch.float64
    )  # clients without rows use the global model
    all_lams[federation.clients] = client_lams.clamp(max=max_lam)
    per_client = tuple(all_lams.tolist())
    return PerClientPenalty(
        per_client, None if factor is None else tuple(factor.clamp(max=max_lam / float(client_lams.min())).tolist())
    )
