"""A plan in a word, in numbers, and as an algorithm that can be run again."""

from __future__ import annotations

from typing import Any

import numpy as np

from mooring.advice.choice import Choice
from mooring.advice.families import ALONE, COMMON, DIAGONAL, LAMBDA, MIXTURE, SIZE, TUNED, Setting
from mooring.advice.prior import Prior
from mooring.core.cohort import Rows

TAUT = 1e6  # a finite stiffness that stands for infinity, relative to the curvature 1 of standardised inputs
LISTED = 10_000  # clients up to which a run file lists every stiffness


def kind_of(setting: Setting, prior: Prior | None) -> str:
    """A client's plan in a word; a moor without slack is the common model."""
    if setting.family in (SIZE, DIAGONAL) and prior is not None and not bool((prior.variance > 0).any()):
        return COMMON
    return setting.family


def stiffnesses(plan: list[Setting], prior: Prior | None, n: np.ndarray) -> np.ndarray:
    """[m]: lambda of every client with its plan and its rows n [m]."""
    each = {setting: stiffness_of(setting, prior, n) for setting in set(plan)}
    return np.array([each[setting][i] for i, setting in enumerate(plan)])


def stiffness_of(setting: Setting, prior: Prior | None, n: np.ndarray) -> np.ndarray:
    """[m]: lambda of clients of n rows: one number also where each coefficient has its own (their geometric mean).

    0 for training alone, infinity for the common model, nan for a mixture or fine-tuning.
    """
    kind = kind_of(setting, prior)
    if kind in (SIZE, DIAGONAL) and prior is not None:
        free = prior.variance.clamp(min=float(prior.variance.max()) / TAUT)
        return setting.value * prior.noise.numpy() / np.maximum(n, 1) * float((-free.log()).mean().exp())
    known = {COMMON: np.inf, ALONE: 0.0, LAMBDA: setting.value}
    return np.full(len(n), known.get(kind, np.nan))


def alpha_of(setting: Setting) -> float:
    return setting.value if setting.family == MIXTURE else float("nan")


def as_algorithm(choice: Choice, rows: Rows) -> dict[str, Any]:
    """The shared plan as the section [algorithm] of a run file.

    Newcomers to an advice on networks get their models by it; others get the average of all settings (`mix.py`).
    """
    plan, prior = choice.plan, choice.prior
    kind = kind_of(plan, prior)
    if kind == ALONE:
        return {"name": "local", "ridge": plan.value}
    if kind == MIXTURE:
        return {"name": "apfl", "alpha": plan.value, "adapt": "no"}
    if kind == TUNED:
        return {"name": "fedavg_localized", "tune_steps": int(10 * plan.value)}
    if kind in (SIZE, DIAGONAL) and prior is not None:
        own = plan.value * prior.noise / rows.size.double().clamp(min=1)
        own = own if len(own) <= LISTED else own.median().expand(1)
        each = 1 / prior.variance.clamp(min=float(prior.variance.max()) / TAUT)
        if len(own) == 1:
            return {"name": "fedprox_one_stage", "lam": {"per_coefficient": (float(own[0]) * each).tolist()}}
        return {
            "name": "fedprox_one_stage",
            "lam": {"per_client": own.tolist(), "per_coefficient": each.tolist()},
        }
    return {"name": "fedprox_one_stage", "lam": TAUT if kind == COMMON else plan.value}
