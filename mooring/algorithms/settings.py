"""Checks of hyper-parameters, and the rules behind "auto", shared by the algorithms."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from mooring.core.batches import steps_of
from mooring.core.cohort import CohortData, Round
from mooring.core.errors import RequestError
from mooring.core.moor import Moor, parse_stiffness
from mooring.core.solvers import decayed, sgd

SMALL_BATCH = 32  # minibatch of tasks whose full passes are dear
PULL_OF_NETWORKS = 0.1  # lam = "auto" for a network, as a share of its curvature


def check(algorithm: Any, **rules: Any) -> None:
    """Hold fields to rules such as `steps=(1, None)` (a range, None open) or `inner=("auto", "sgd")` (choices).

    A field that is "auto" passes when its choices or the keyword `auto` allow it.
    """
    owner = type(algorithm).__name__
    for field, rule in rules.items():
        value = getattr(algorithm, field)
        if all(isinstance(choice, str) for choice in rule):
            if value not in rule:
                known = ", ".join(repr(choice) for choice in rule)
                raise RequestError(f"{owner}: {field} must be one of {known}, got {value!r}.")
            continue
        low, high, *words = rule
        if isinstance(value, str) and value in words:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            also = f" or {' or '.join(map(repr, words))}" if words else ""
            raise RequestError(f"{owner}: {field} must be a number{also}, got {value!r}.")
        if (low is not None and not value >= low) or (high is not None and not value <= high):
            bounds = f">= {low}" if high is None else f"between {low} and {high}"
            raise RequestError(f"{owner}: {field} must be {bounds}, got {value}.")


def read_lam(algorithm: Any, rules: tuple[str, ...]) -> None:
    """Parse the field `lam` of a frozen dataclass in place."""
    object.__setattr__(algorithm, "lam", parse_stiffness(type(algorithm).__name__, algorithm.lam, rules))


def settled(algorithm: Any, task: Any, facts: Any) -> Any:
    """The algorithm with "auto" in batch, lam and eta turned into numbers (in this order: later ones use earlier)."""
    changes: dict[str, Any] = {}
    have = {f.name for f in dataclasses.fields(algorithm)}
    if "batch" in have and algorithm.batch == "auto":
        changes["batch"] = auto_batch(task)
    if "lam" in have and algorithm.lam == "auto":
        changes["lam"] = auto_lam(task, facts)
    if "eta" in have and algorithm.eta == "auto":
        batch = changes.get("batch", getattr(algorithm, "batch", 0))
        changes["eta"] = auto_eta(task, facts, batch, changes.get("lam", getattr(algorithm, "lam", 0.0)))
    return dataclasses.replace(algorithm, **changes)


def auto_batch(task: Any) -> int:
    """All rows (0) where the task has an exact solver, small batches elsewhere."""
    return 0 if task.solve is not None else SMALL_BATCH


def auto_eta(task: Any, facts: Any, batch: int, lam: Any = 0.0) -> float:
    """1 / (largest curvature that a step can meet): the steepest client, small batches, and the pull."""
    pull = 0.0 if isinstance(lam, str) else _largest(lam)
    if not task.smooth_loss:
        # No curvature to go by: a unit step shrunk by the pull, to be decayed by the schedule.
        return 1.0 / (1.0 + pull)
    curvature = facts.smooth + (facts.trace / batch if batch else 0.0)
    return 1.0 / (float(curvature.max()) + pull)


def auto_lam(task: Any, facts: Any) -> float:
    """The stiffness that a Bayesian with Gaussian spread would take: dispersion / (n * spread of a coefficient).

    Spread is what the clients' own fits vary beyond their sampling error, bounded away from zero by a tenth of that
    error. Clients whose rows cannot determine a fit (fewer than twice the parameters) are left out, if others remain.
    """
    if facts.fit is None:
        curvature = facts.smooth[torch.isfinite(facts.smooth)]
        return PULL_OF_NETWORKS * float(curvature.mean()) if len(curvature) else PULL_OF_NETWORKS
    solid = facts.n >= 2 * task.dim
    keep = solid if int(solid.sum()) >= 2 else torch.ones_like(solid)
    p = facts.p[keep] / facts.p[keep].sum()
    fit, variance = facts.fit[keep].double(), facts.variance[keep]
    center = (p[:, None] * fit).sum(0)
    between = float((p * ((fit - center) ** 2).sum(1)).sum())
    sampling = float((p * (1 - p) * variance).sum())
    spread = max(between - sampling, 0.1 * sampling, torch.finfo(torch.float64).tiny)
    noise = float((p * facts.dispersion[keep] / facts.n[keep]).sum())
    return task.dim * noise / spread


def _largest(lam: Any) -> float:
    if not isinstance(lam, Moor):
        return float(lam)
    return max(lam.per_client or (1.0,)) * max(lam.per_coefficient or (1.0,))


def local_sgd(algorithm: Any, task: Any, w: Tensor, data: CohortData, round: Round, **more: Any) -> Tensor:
    """SGD as the fields eta, decay, steps, epochs and batch (0: all rows) say; decay runs on over the rounds."""
    batch = algorithm.batch or None
    work = {"epochs": algorithm.epochs} if algorithm.epochs else {"steps": algorithm.steps}
    count = steps_of(data.train.size, batch, work.get("steps"), work.get("epochs"))
    eta = decayed(algorithm.eta, algorithm.decay, (round.t - 1) * count) if algorithm.decay else algorithm.eta
    return sgd(task, w, data, round, eta, batch=batch, **work, **more)
