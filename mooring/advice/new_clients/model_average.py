"""Personal models of new clients: the average that the clients got, from what the run stores of each setting.

    global           w
    local            v, its own fit with the setting's ridge
    lambda           arg min_v L(v) + lam/2 |v - w|^2
    size, diagonal   arg min_v L(v) + 1/2 sum_j lam_j (v_j - w_j)^2,    lam_j = value noise / (n tau_j^2)
    mixture          alpha v + (1 - alpha) w

w is the setting's global model; n are the new client's rows, and noise is the clients' typical one, or its own, shrunk
to theirs, where theirs differ (`client_noise.py`). So a new client with the rows of a client gets the client's model,
nearly so where noises differ, unless that has another setting than the plan, or its latest target a share of it
(`latest_target.py`): the rows of a new client need not be in the order of time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mooring.advice.candidates.families import (
    DIAGONAL,
    FAMILY_OF_PRIOR,
    GLOBAL,
    INTERCEPT,
    LAMBDA,
    LOCAL,
    MIXTURE,
    SIZE,
    Setting,
)
from mooring.advice.evaluation.setting_choice import Choice
from mooring.core.cohort import Batch, Rows
from mooring.core.newton import damped_newton
from mooring.core.task import HasHessian, HasProx, Task, require
from mooring.estimates.client_queries import linear_sums
from mooring.partial_pooling.client_noise import (
    LOOSE_VARIANCE_FACTOR,
    NoiseDistribution,
    degrees_of_freedom,
    shrink_to_pooled,
    sum_residuals,
)
from mooring.partial_pooling.end_models import fit_local_models
from mooring.runs.directory import StoredMixture
from mooring.shapes.column_sets import ColumnSets, on_columns
from mooring.shapes.columns import ShapedColumns

FAMILIES_BY_RICHNESS = (DIAGONAL, SIZE, INTERCEPT)  # families that go by how clients vary, the richest first


def describe_average(choice: Choice, centers: Tensor) -> StoredMixture:
    """What a run keeps of a choice for new clients; `centers` are those of its models."""
    settings = [setting._asdict() | {"weight": weight} for setting, weight in choice.mix.items()]
    laws = {prior.columns: prior.law for prior in choice.priors if prior.law and prior.law.strength < torch.inf}
    slack = {
        f"{prior.columns}.{FAMILY_OF_PRIOR[prior.kind]}": prior.variance
        / (laws[prior.columns].typical if prior.columns in laws else prior.noise.mean())
        for prior in choice.priors
    }
    return StoredMixture(settings, centers, slack, {name: list(law) for name, law in laws.items()} or None)


def average_models(task: Task, rows: Rows, mix: StoredMixture, shape: ShapedColumns | None = None) -> Tensor:
    """[C, d]: the models of new clients with these rows, which have the extra columns of `shape`."""
    out = torch.zeros(len(rows), task.dim, dtype=task.dtype)
    sets = None if shape is None else ColumnSets(task, shape)
    noise: dict[str, Tensor] = {}  # by set of columns
    for known, w in zip(mix.settings, mix.centres):
        about = dict(known)
        weight = about.pop("weight")
        setting = Setting(**about)
        name = setting.columns
        at = on_columns(task, rows, sets, name)
        if name not in noise:
            noise[name] = estimate_relative_noise(*at, mix, sets, name)
        slack = mix.slack.get(f"{name}.{setting.family}")
        center = w if sets is None else sets.extract(name, w)
        v = fit_new_clients(at.task, at.rows, setting, center, slack, noise[name])
        out += weight * (v if sets is None else sets.embed(name, v))
    return out


def estimate_relative_noise(
    task: Task, rows: Rows, mix: StoredMixture, sets: ColumnSets | None, columns: str
) -> Tensor:
    """[C]: the noises of new clients over the clients' typical one, estimated as theirs, around the clients' center.

    Each set of columns has its own: `task` and `rows` are those of `columns`.
    """
    known = (mix.noises or {}).get(columns)
    slack = next((mix.slack[key] for f in FAMILIES_BY_RICHNESS if (key := f"{columns}.{f}") in mix.slack), None)
    if known is None or slack is None:
        return torch.ones(len(rows), dtype=torch.float64)
    law, slack = NoiseDistribution(*known), LOOSE_VARIANCE_FACTOR * slack
    own_weights = [setting["weight"] * (setting["columns"] == columns) for setting in mix.settings]
    weights = torch.tensor(own_weights, dtype=mix.centres.dtype)
    w = (weights / weights.sum()) @ mix.centres
    w = w if sets is None else sets.extract(columns, w)
    pull = 1 / rows.size.clamp(min=1).to(task.dtype)
    fit = rows.each(lambda some, block: fit_pulled_models(task, some.padded(), pull[block], w, slack))
    gram = rows.size.double()[:, None, None] * linear_sums(task, rows).gram
    freedom = (rows.size - degrees_of_freedom(gram, slack)).clamp(min=0)
    return shrink_to_pooled(sum_residuals(task, rows, fit.double()).square, freedom, law) / law.typical


def fit_new_clients(
    task: Task, rows: Rows, setting: Setting, w: Tensor, slack: Tensor | None, noise: Tensor | float = 1.0
) -> Tensor:
    """[C, d], or [d] where all have the same: models of new clients by one setting, whose global model is w.

    `slack` [d] is tau^2 over the typical noise, `noise` [C] their own over that.
    """
    if setting.family == GLOBAL:
        return w
    if setting.family == LOCAL:
        return fit_local_models(task, rows, setting.value, setting.free)
    if setting.family == MIXTURE:
        return torch.lerp(w, fit_local_models(task, rows, setting.own_ridge), setting.value)
    pull = torch.full((len(rows),), setting.value, dtype=task.dtype)
    if setting.family == LAMBDA:
        slack = None
    else:
        pull = (pull * noise / rows.size.clamp(min=1)).to(task.dtype)
    return rows.each(lambda some, block: fit_pulled_models(task, some.padded(), pull[block], w, slack))


def fit_pulled_models(task: Task, batch: Batch, pull: Tensor, w: Tensor, slack: Tensor | None) -> Tensor:
    """v = w + S z with the least L_i(v) + pull_i/2 |z|^2, S = slack^1/2: coefficients without slack are those of w.

    `pull` is [C], `slack` [d]; None is 1.
    """
    if slack is None:
        return require(task, HasProx).prox(w, pull[:, None], batch, w.expand(len(pull), -1))
    s = slack.sqrt().to(task.dtype)
    eye = torch.eye(task.dim, dtype=task.dtype)

    def value(z: Tensor) -> Tensor:
        return task.loss(w + s * z, batch) + 0.5 * pull * (z**2).sum(1)

    def slope(z: Tensor) -> Tensor:
        return s * task.grad(w + s * z, batch) + pull[:, None] * z

    def step(z: Tensor, g: Tensor) -> Tensor:
        hessian = s[:, None] * require(task, HasHessian).hessian(w + s * z, batch) * s + pull[:, None, None] * eye
        return torch.cholesky_solve(g[..., None], torch.linalg.cholesky_ex(hessian)[0])[..., 0]

    return w + s * damped_newton(value, slope, step, torch.zeros(len(pull), task.dim, dtype=task.dtype))
