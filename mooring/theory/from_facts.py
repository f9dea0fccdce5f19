"""The theorems' constants and lam, from what clients tell before the first round.

    mu = min_i convex_i        smooth = max_i smooth_i        noise = max_i noise_i
    R_i^2   = ( |v_i - avg|^2 - (1 - 2 p_i) var_i - sum_j p_j^2 var_j ) / share_i,        avg = sum_i p_i v_i
    R_rms^2 = sum_i p_i share_i R_i^2  x  sum_i p_i (1 - p_i) / sum_i p_i (1 - p_i) share_i,      R_max = max_i R_i

all at least 0. v_i is client i's fit with a ridge, which mutes what its rows leave open, var_i its sampling variance,
share_i = freedom_i / d what the ridge lets through of a spread over clients; for independent clients whose truths vary
around 0 the corrected squares have the right mean. R_max is biased upwards, being a maximum of noisy numbers.

Source   alternative, Theorems 4.4 (aer) and 4.5 (ier); effect, Theorem 1 (theory) and Eq. 18 (shrinkage, one lam per
         client).
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import numpy as np
import torch

from mooring.core.errors import RequestError
from mooring.core.moor import Moor
from mooring.theory.lambda_aer import lambda_aer
from mooring.theory.lambda_ier import lambda_ier
from mooring.theory.lambda_one_stage import lambda_one_stage, lambda_shrinkage

RULES = ("theory", "aer", "ier", "shrinkage")
CAP = 1e4  # lam is at most so many times the smoothness: there the models are one common model to four digits


class Curvature(NamedTuple):
    mu: float
    smooth: float
    noise: float


class Radii(NamedTuple):
    each: np.ndarray  # [m], R_i
    rms: float
    most: float


def curvature(owner: str, task: Any, facts: Any) -> Curvature:
    """mu, smooth and noise of all clients; refused unless 0 < mu <= smooth < infinity."""
    mu, smooth, noise = float(facts.convex.min()), float(facts.smooth.max()), float(facts.noise.max())
    if not np.isfinite([smooth, noise]).all():
        raise RequestError(f"{owner} needs the smoothness of the loss, and task '{task.name}' cannot tell it.")
    if not mu > 0:
        raise RequestError(
            f"{owner} needs every client's loss to be strongly convex, but the smallest curvature is {mu:.3g}; "
            "give the task a ridge > 0."
        )
    return Curvature(mu, smooth, noise)


def radii(facts: Any) -> Radii:
    """How far the clients' truths lie from their average, sampling error taken out."""
    p, fit, variance = facts.p.double(), facts.shrunk.double(), facts.shrunk_variance
    share, others = facts.freedom / fit.shape[1], p * (1 - p)
    square = (fit - p @ fit).square().sum(1) - (1 - 2 * p) * variance - (p**2 * variance).sum()
    rms = float(((p * square).sum() * others.sum() / (others * share).sum()).clamp(min=0).sqrt())
    each = (square / share).clamp(min=0).sqrt().numpy()
    return Radii(each, rms, float(each.max()))


def lam_by_rule(owner: str, rule: str, task: Any, facts: Any) -> float | Moor:
    """lam as a theorem gives it; `shrinkage` gives one per client."""
    known = curvature(owner, task, facts)
    if facts.shrunk is None or not bool(torch.isfinite(facts.shrunk_variance).all()):
        raise RequestError(f"{owner} needs the clients' own fits, and task '{task.name}' has none.")
    spread, p, n = radii(facts), facts.p.numpy(), facts.n.numpy()
    if rule == "aer":
        return lambda_aer(spread.rms, known.mu, p, n).lam
    if rule == "ier":
        return lambda_ier(spread.most, known.mu, p, n).lam
    if rule == "theory":
        found = lambda_one_stage(spread.most, known.mu, known.smooth, known.noise, p, n, cap=CAP)
        if found.capped:
            warnings.warn(f"{owner}: the theorem asks for more than {CAP:g} times the smoothness; lam is cut there.")
        return found.lam
    each = lambda_shrinkage(spread.each, known.mu, facts.noise.numpy(), n)
    return Moor(per_client=tuple(np.minimum(each, CAP * known.smooth).tolist()))
