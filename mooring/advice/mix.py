"""What a newcomer to an advice gets: the average that the clients got, from what the run keeps of each setting.

    common           w
    alone            v, its own fit with the setting's ridge
    lambda           arg min_v L(v) + lam/2 |v - w|^2
    size, diagonal   arg min_v L(v) + 1/2 sum_j lam_j (v_j - w_j)^2,    lam_j = value noise / (n tau_j^2)
    mixture          alpha v + (1 - alpha) w

w is the setting's own common model, as the clients left it; n are the newcomer's rows, and noise is the clients'
typical one, or the newcomer's own, steadied by them, where theirs differ (`posterior.own_noise`). So a newcomer with
the very rows of a client gets the client's model, nearly so where noises differ, unless it left the shared plan.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mooring.advice.choice import Choice
from mooring.advice.families import ALONE, COMMON, LAMBDA, MIXTURE, Setting, alone_models
from mooring.advice.posterior import SLACK, Noises, eigen, powers, steadied, sums
from mooring.core.cohort import Batch, Rows
from mooring.core.newton import newton
from mooring.runs.directory import Mix


def mix_of(choice: Choice, centres: Tensor) -> Mix:
    """What a run keeps of a choice for newcomers; `centres` are those of its trio."""
    settings = [setting._asdict() | {"weight": weight} for setting, weight in choice.mix.items()]
    prior = choice.prior
    if prior is None or prior.law is None or prior.law.strength == torch.inf:
        return Mix(settings, centres, None if prior is None else prior.variance / prior.noise.mean())
    return Mix(settings, centres, prior.variance / prior.law.typical, list(prior.law))


def average_of_mix(task: Any, rows: Rows, mix: Mix) -> Tensor:
    """[C, d]: the models of newcomers with these rows."""
    out = torch.zeros(len(rows), task.dim, dtype=task.dtype)
    noise = relative_noise(task, rows, mix)
    for known, w in zip(mix.settings, mix.centres):
        about = dict(known)
        weight = about.pop("weight")
        out += weight * newcomers_models(task, rows, Setting(**about), w, mix.slack, noise)
    return out


def relative_noise(task: Any, rows: Rows, mix: Mix) -> Tensor:
    """[C]: newcomers' noises over the clients' typical one, found as theirs were, around the clients' centre."""
    if mix.noises is None or mix.slack is None:
        return torch.ones(len(rows), dtype=torch.float64)
    law = Noises(*mix.noises)
    weights = torch.tensor([known["weight"] for known in mix.settings], dtype=mix.centres.dtype)
    w, slack = weights @ mix.centres, SLACK * mix.slack
    pull = 1 / rows.size.clamp(min=1).to(task.dtype)
    fit = rows.each(lambda some, block: moored_fit(task, some.padded(), pull[block], w, slack))
    held = eigen(sums(task, rows).gram, slack.double().sqrt())[0]
    freedom = (rows.size - (held / (1 + held)).sum(1)).clamp(min=0)
    return steadied(powers(task, rows, fit.double()).square, freedom, law) / law.typical


def newcomers_models(
    task: Any, rows: Rows, setting: Setting, w: Tensor, slack: Tensor | None, noise: Tensor | float = 1.0
) -> Tensor:
    """[C, d], or [d] where all have the same: what newcomers get under one setting, whose common model is w.

    `slack` [d] is tau^2 over the typical noise, `noise` [C] their own over that.
    """
    if setting.family == COMMON:
        return w
    if setting.family == ALONE:
        return alone_models(task, rows, setting.value, setting.free)
    if setting.family == MIXTURE:
        return torch.lerp(w, alone_models(task, rows, setting.own_ridge), setting.value)
    pull = torch.full((len(rows),), setting.value, dtype=task.dtype)
    if setting.family == LAMBDA:
        slack = None
    else:
        pull = (pull * noise / rows.size.clamp(min=1)).to(task.dtype)
    return rows.each(lambda some, block: moored_fit(task, some.padded(), pull[block], w, slack))


def moored_fit(task: Any, batch: Batch, pull: Tensor, w: Tensor, slack: Tensor | None) -> Tensor:
    """v = w + S z with the least L_i(v) + pull_i/2 |z|^2, S = slack^1/2: what has no slack stays as it is in w.

    `pull` is [C], `slack` [d]; None is 1.
    """
    if slack is None:
        return task.prox(w, pull[:, None], batch, w.expand(len(pull), -1))
    s = slack.sqrt().to(task.dtype)
    eye = torch.eye(task.dim, dtype=task.dtype)

    def value(z: Tensor) -> Tensor:
        return task.loss(w + s * z, batch) + 0.5 * pull * (z**2).sum(1)

    def slope(z: Tensor) -> Tensor:
        return s * task.grad(w + s * z, batch) + pull[:, None] * z

    def step(z: Tensor, g: Tensor) -> Tensor:
        hessian = s[:, None] * task.hessian(w + s * z, batch) * s + pull[:, None, None] * eye
        return torch.cholesky_solve(g[..., None], torch.linalg.cholesky_ex(hessian)[0])[..., 0]

    return w + s * newton(value, slope, step, torch.zeros(len(pull), task.dim, dtype=task.dtype))
