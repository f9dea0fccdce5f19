"""Choice and evidence from the same folds: every row is held out once, and the prior is fitted anew without it.

In each fold of the clients' rows the prior and every candidate are fitted on the other folds and judged on this one.
The losses choose the plan; the plan's, alone's and common's own losses are what predictions of gains are held against
(`calibrate.py`), since a prior that saw the held-out rows would overstate what the plan gains over one common model.
All that is deployed is then fitted on all rows.

A fold's result is a few tensors (`Fold`), so a run that was interrupted need not repeat it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mooring.advice.calibrate import Witness
from mooring.advice.choice import MOST_CLIENTS, Choice, candidates, decide, prior_of, weights_of
from mooring.advice.families import Models, Setting, fitted
from mooring.advice.folds import Held, compact, cross, owners, row_losses
from mooring.advice.gain import Gain, at_future, at_rows, gains
from mooring.advice.path import Shape, path
from mooring.advice.posterior import Truths, generalised_truths, has_posterior, linear_truths
from mooring.advice.prior import Prior, likely_variance, preferred, priors
from mooring.core.cohort import Rows
from mooring.tasks.linear import Linear

PAIRS = {
    "personal over alone": ("alone", "personal"),
    "personal over common": ("common", "personal"),
    "common over alone": ("alone", "common"),
}


class Fold(NamedTuple):
    """What one fold found out; without a prior the last three are empty."""

    place: Tensor  # [rows of the fold], places among all rows
    loss: Tensor  # [settings, rows of the fold], float32
    variance: Tensor  # [d], the prior's tau^2
    noise: Tensor  # [m], the prior's
    unit: Tensor  # [d], the posterior's unit of tau^2


class Trio(NamedTuple):
    """The models that are compared, of every client."""

    alone: Tensor  # [m, d]
    common: Tensor  # [d]
    personal: Tensor  # [m, d]
    models: dict[Setting, Models]


class Evidence(NamedTuple):
    """The plan, everyone's models on all rows, and for each pair what was predicted and seen."""

    choice: Choice
    trio: Trio
    gain: dict[str, Gain] | None  # at full size, on rows to come; None without a posterior
    seen: dict[str, Witness]  # on held-out rows, predictions nan without a posterior
    losses: dict[str, Tensor]  # [m] mean held-out loss of alone, common and personal; nan without rows
    asked: Tensor  # the clients that the folds were made of: all, unless they are very many


def cross_fit(
    task: Any,
    rows: Rows,
    keys: np.ndarray,
    weights: str | Tensor = "size",
    seed: int = 0,
    folds: int | None = None,
    done: Mapping[int, Fold] | None = None,
    save: Callable[[int, Fold], None] | None = None,
) -> Evidence:
    """Choose on all rows by folds, predict and observe gains on them, refit on all rows.

    `done` are folds of an interrupted run, and `save(number, fold)` keeps a new one.
    """
    rows = compact(rows)
    asked = torch.arange(len(rows))
    if len(asked) > MOST_CLIENTS:
        asked = torch.linspace(0, len(rows) - 1, MOST_CLIENTS).long()
    few = weights if isinstance(weights, str) else weights[asked]
    some = compact(rows.select(asked))
    found = priors(task, rows)
    prior = preferred(found) if found else None
    settings, default = candidates(task, some, prior, few, int(rows.size.sum()))
    near = prior_of(prior, asked)[0] if prior is not None else None
    parts = list(cross(some, keys[asked.numpy()], seed, folds))
    kept = []
    for k, part in enumerate(parts):
        fold = (done or {}).get(k)
        if fold is None:
            fold = fit_fold(task, part, settings, near, few)
            if save is not None:
                save(k, fold)
        kept.append(fold)
    loss = torch.full((len(settings), len(some.y)), torch.nan, dtype=torch.float32)
    number = torch.zeros(len(some.y), dtype=torch.long)
    for k, fold in enumerate(kept):
        loss[:, fold.place], number[fold.place] = fold.loss, k
    choice = decide(task, settings, loss, number, owners(some), default)
    here = choice._replace(prior=prior)
    choice = here._replace(own={int(asked[i]): s for i, s in choice.own.items()})
    trio = trio_of(task, rows, choice, prior_of(prior, torch.arange(len(rows))), weights)
    seen, losses = witnesses(task, some, parts, kept, here, few)
    gain = None
    if prior is not None and has_posterior(task):
        known = posterior_of(task, rows, prior.noise, likely_variance(found))
        gain = dict(zip(PAIRS, gains(task, known, at_future(task, rows), pairs_of(trio), shares(rows))))
    return Evidence(choice, trio, gain, seen, losses, asked)


def pairs_of(trio: Trio) -> list[tuple[Tensor, Tensor]]:
    return [(getattr(trio, o), getattr(trio, p)) for o, p in PAIRS.values()]


def shares(rows: Rows) -> Tensor:
    """[m]: each client's share of the rows."""
    return rows.size.double() / rows.size.sum()


def fit_fold(task: Any, part: Held, settings: list[Setting], prior: Prior | None, weights: str | Tensor) -> Fold:
    """All candidates on the fold's training rows, with a prior of its own, judged on its held-out rows."""
    empty = torch.empty(0, dtype=torch.float64)
    own, unit = [], empty
    if prior is not None:
        again = priors(task, part.train, prior)
        if again:
            own, unit = [preferred(again)._replace(kind=prior.kind)], likely_variance(again)
        else:
            own, unit = [prior], prior.variance
    models = fitted(task, part.train, weights_of(part.train, weights), settings, own)
    loss = torch.stack([row_losses(task, one.v, part.held).float() for one in models])
    if not own:
        return Fold(part.place, loss, empty, empty, empty)
    return Fold(part.place, loss, own[0].variance, own[0].noise, unit)


def trio_of(task: Any, rows: Rows, choice: Choice, found: list[Prior], weights: str | Tensor) -> Trio:
    """Alone, common and each client's personal model, fitted on these rows."""
    wanted = {choice.alone, choice.common, choice.shared, choice.plan, *choice.own.values()}
    models = {m.setting: m for m in fitted(task, rows, weights_of(rows, weights), sorted(wanted), found)}
    personal = models[choice.plan].v.clone()
    for i, setting in choice.own.items():
        personal[i] = models[setting].v[i]
    return Trio(models[choice.alone].v, models[choice.common].w, personal, models)


def posterior_of(task: Any, rows: Rows, noise: Tensor, unit: Tensor) -> Truths:
    """The clients' truths, the spread being `unit` [d] times an unknown scale."""
    if isinstance(task, Linear):
        return linear_truths(task, rows, unit, noise)
    shape = Shape(noise.double() / rows.size.double().clamp(min=1), unit)
    point = next(path(task, rows, rows.size.double(), [1.0], shape))
    return generalised_truths(task, rows, point.v, unit)


def witnesses(
    task: Any, rows: Rows, parts: list[Held], kept: list[Fold], choice: Choice, weights: str | Tensor
) -> tuple[dict[str, Witness], dict[str, Tensor]]:
    """For each pair what every client's held-out rows say and what was predicted of them; mean losses."""
    m, n = len(rows), rows.size.double()
    totals = {name: [torch.zeros(m, dtype=torch.float64) for _ in range(4)] for name in PAIRS}
    losses = {name: torch.zeros(m, dtype=torch.float64) for name in ("alone", "common", "personal")}
    has = choice.prior is not None and has_posterior(task)
    for part, fold in zip(parts, kept):
        own = [choice.prior._replace(variance=fold.variance, noise=fold.noise)] if choice.prior is not None else []
        trio = trio_of(task, part.train, choice, own, weights)
        owner, share = owners(part.held), part.held.size.double()
        each = {name: row_losses(task, getattr(trio, name), part.held) for name in losses}
        for name in losses:
            losses[name].index_add_(0, owner, each[name])
        for name, (o, p) in PAIRS.items():
            totals[name][0].index_add_(0, owner, each[o] - each[p])
        if not has:
            for name, (o, p) in PAIRS.items():
                totals[name][1].index_add_(0, owner, (each[o] - each[p]) ** 2)
            continue
        known = posterior_of(task, part.train, fold.noise, fold.unit)
        for name, gain in zip(PAIRS, gains(task, known, at_rows(task, part.held), pairs_of(trio), shares(rows))):
            totals[name][1] += share**2 * gain.noise
            totals[name][2] += share * gain.expected
            totals[name][3] += share * gain.spread
    seen = {}
    for name, (gap, spill, mean, sd) in totals.items():
        observed = gap / n
        if has:
            seen[name] = Witness(observed, spill.sqrt() / n, mean / n, sd / n, rows.size)
        else:
            left = ((spill - n * observed**2) / (n - 1).clamp(min=1)).clamp(min=0)
            nothing = torch.full_like(observed, torch.nan)
            seen[name] = Witness(observed, (left / n).sqrt(), nothing, nothing, rows.size)
    return seen, {name: total / n for name, total in losses.items()}
