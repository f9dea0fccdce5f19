"""A plan in a word, in numbers, and as an algorithm that can be run again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mooring.advice.candidates.families import (
    DITTO,
    FAMILY_OF_PRIOR,
    FEDPER,
    FEDROD,
    GLOBAL,
    INTERCEPT,
    LAMBDA,
    LOCAL,
    MIXTURE,
    TUNED,
    Setting,
)
from mooring.advice.evaluation.setting_choice import Choice
from mooring.core.types import JsonObject
from mooring.partial_pooling.client_prior import Prior
from mooring.shapes.column_sets import ColumnSets

MAX_LAM = 1e6  # a finite lambda that stands for infinity, relative to the curvature 1 of standardized inputs
MAX_LISTED_CLIENTS = 10_000  # clients up to which a run file lists every lambda


def find_prior(setting: Setting, priors: Sequence[Prior]) -> Prior | None:
    """The prior that a setting goes by; None where it goes by none."""
    matching = (p for p in priors if FAMILY_OF_PRIOR[p.kind] == setting.family and p.columns == setting.columns)
    return next(matching, None)


def effective_family(setting: Setting, priors: Sequence[Prior]) -> str:
    """A client's plan in a word; without any variation between clients it is the global model."""
    prior = find_prior(setting, priors)
    return GLOBAL if prior is not None and not bool((prior.variance > 0).any()) else setting.family


def client_lams(plan: list[Setting], priors: Sequence[Prior], n: np.ndarray) -> np.ndarray:
    """[m]: lambda of every client with its plan and its rows n [m]."""
    each = {setting: setting_lams(setting, priors, n) for setting in set(plan)}
    return np.array([each[setting][i] for i, setting in enumerate(plan)])


def setting_lams(setting: Setting, priors: Sequence[Prior], n: np.ndarray) -> np.ndarray:
    """[m]: lambda of clients of n rows: one number also where each coefficient has its own (their geometric mean, of
    those that vary).

    0 for local models, infinity for the global one, nan for a mixture or fine-tuning.
    """
    kind, prior = effective_family(setting, priors), find_prior(setting, priors)
    if prior is not None and kind != GLOBAL:
        varies = prior.variance > 0 if kind == INTERCEPT else torch.ones_like(prior.variance, dtype=torch.bool)
        free = prior.variance[varies].clamp(min=float(prior.variance.max()) / MAX_LAM)
        return setting.value * prior.noise.numpy() / np.maximum(n, 1) * float((-free.log()).mean().exp())
    known = {GLOBAL: np.inf, LOCAL: 0.0, LAMBDA: setting.value, DITTO: setting.value}
    return np.full(len(n), known.get(kind, np.nan))


def setting_alpha(setting: Setting) -> float:
    return setting.value if setting.family == MIXTURE else float("nan")


def as_algorithm(choice: Choice, rows: Tensor, sets: ColumnSets | None = None) -> JsonObject:
    """The shared plan as the section [algorithm] of a run file, for clients of `rows` [m]; with column `sets`, on all
    columns of the models.

    New clients of an advice on networks get their models by it; others get the average of all settings.
    """
    plan, kind, prior = (
        choice.plan,
        effective_family(choice.plan, choice.priors),
        find_prior(choice.plan, choice.priors),
    )
    work = dict(choice.local_training)  # of networks
    if kind == LOCAL:
        return {"name": "local", "ridge": plan.value} | work
    if kind == MIXTURE:
        return {"name": "apfl", "alpha": plan.value, "adapt": "no"} | work
    if kind == TUNED:
        count, default = ("epochs", 0) if work.get("epochs") else ("steps", 10)
        return {"name": "fedavg_finetune", f"tune_{count}": int(work.get(count, default) * plan.value)} | work
    if kind in (FEDPER, FEDROD):
        return {"name": kind} | work
    if kind in (DITTO, LAMBDA) and work:
        return {"name": "ditto" if kind == DITTO else "fedprox_personal", "lam": plan.value} | work
    if prior is not None and kind != GLOBAL:
        own = plan.value * prior.noise / rows.clamp(min=1)
        own = own if len(own) <= MAX_LISTED_CLIENTS else own.median().expand(1)
        variance = prior.variance if sets is None else sets.embed(prior.columns, prior.variance)
        each = 1 / variance.clamp(min=float(variance.max()) / MAX_LAM)
        if len(own) == 1:
            return {"name": "fedprox_personal", "lam": {"per_coefficient": (float(own[0]) * each).tolist()}}
        return {
            "name": "fedprox_personal",
            "lam": {"per_client": own.tolist(), "per_coefficient": each.tolist()},
        }
    return {"name": "fedprox_personal", "lam": MAX_LAM if kind == GLOBAL else plan.value}
