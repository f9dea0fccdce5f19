"""A plan in a word, in numbers, and as an algorithm that can be run again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from mooring.advice.choice import Choice
from mooring.advice.families import GLOBAL, INTERCEPT, LAMBDA, LOCAL, MIXTURE, OF_PRIOR, TUNED, Setting
from mooring.advice.prior import Prior
from mooring.advice.shaping import ColumnSets
from mooring.core.cohort import Rows

TAUT = 1e6  # a finite stiffness that stands for infinity, relative to the curvature 1 of standardised inputs
LISTED = 10_000  # clients up to which a run file lists every stiffness


def prior_of_family(setting: Setting, priors: Sequence[Prior]) -> Prior | None:
    """The prior that a setting goes by; None where it goes by none."""
    mine = (p for p in priors if OF_PRIOR[p.kind] == setting.family and p.columns == setting.columns)
    return next(mine, None)


def kind_of(setting: Setting, priors: Sequence[Prior]) -> str:
    """A client's plan in a word; without any variation between clients it is the global model."""
    prior = prior_of_family(setting, priors)
    return GLOBAL if prior is not None and not bool((prior.variance > 0).any()) else setting.family


def stiffnesses(plan: list[Setting], priors: Sequence[Prior], n: np.ndarray) -> np.ndarray:
    """[m]: lambda of every client with its plan and its rows n [m]."""
    each = {setting: stiffness_of(setting, priors, n) for setting in set(plan)}
    return np.array([each[setting][i] for i, setting in enumerate(plan)])


def stiffness_of(setting: Setting, priors: Sequence[Prior], n: np.ndarray) -> np.ndarray:
    """[m]: lambda of clients of n rows: one number also where each coefficient has its own (their geometric mean, of
    those that vary).

    0 for local models, infinity for the global one, nan for a mixture or fine-tuning.
    """
    kind, prior = kind_of(setting, priors), prior_of_family(setting, priors)
    if prior is not None and kind != GLOBAL:
        varies = prior.variance > 0 if kind == INTERCEPT else torch.ones_like(prior.variance, dtype=torch.bool)
        free = prior.variance[varies].clamp(min=float(prior.variance.max()) / TAUT)
        return setting.value * prior.noise.numpy() / np.maximum(n, 1) * float((-free.log()).mean().exp())
    known = {GLOBAL: np.inf, LOCAL: 0.0, LAMBDA: setting.value}
    return np.full(len(n), known.get(kind, np.nan))


def alpha_of(setting: Setting) -> float:
    return setting.value if setting.family == MIXTURE else float("nan")


def as_algorithm(choice: Choice, rows: Rows, sets: ColumnSets | None = None) -> dict[str, Any]:
    """The shared plan as the section [algorithm] of a run file; with column `sets`, on all columns of the models.

    New clients of an advice on networks get their models by it; others get the average of all settings (`mix.py`).
    """
    plan, kind, prior = choice.plan, kind_of(choice.plan, choice.priors), prior_of_family(choice.plan, choice.priors)
    if kind == LOCAL:
        return {"name": "local", "ridge": plan.value}
    if kind == MIXTURE:
        return {"name": "apfl", "alpha": plan.value, "adapt": "no"}
    if kind == TUNED:
        return {"name": "fedavg_localized", "tune_steps": int(10 * plan.value)}
    if prior is not None and kind != GLOBAL:
        own = plan.value * prior.noise / rows.size.double().clamp(min=1)
        own = own if len(own) <= LISTED else own.median().expand(1)
        variance = prior.variance if sets is None else sets.embed(prior.columns, prior.variance)
        each = 1 / variance.clamp(min=float(variance.max()) / TAUT)
        if len(own) == 1:
            return {"name": "fedprox_one_stage", "lam": {"per_coefficient": (float(own[0]) * each).tolist()}}
        return {
            "name": "fedprox_one_stage",
            "lam": {"per_client": own.tolist(), "per_coefficient": each.tolist()},
        }
    return {"name": "fedprox_one_stage", "lam": TAUT if kind == GLOBAL else plan.value}
