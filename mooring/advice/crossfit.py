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
from mooring.advice.families import ALONE, Models, Setting, fitted
from mooring.advice.folds import FOLDS, Held, compact, cross, deal, owners, row_losses
from mooring.advice.gain import Gain, at_future, at_rows, gains, joined_gains
from mooring.advice.path import BLOCK, Shape, path
from mooring.advice.posterior import Truths, generalised_truths, has_posterior, linear_truths
from mooring.advice.prior import Prior, likely_variance, preferred, priors
from mooring.advice.tally import PAIRS, Tally, Trio, mean_losses, tally_of, total, witnesses_of
from mooring.core.cohort import Rows
from mooring.tasks.linear import Linear
from mooring.tasks.proximal import is_dense


class Fold(NamedTuple):
    """What one fold found out; without a prior the last three are empty."""

    place: Tensor  # [rows of the fold], places among all rows
    loss: Tensor  # [settings, rows of the fold], float32
    variance: Tensor  # [d], the prior's tau^2
    noise: Tensor  # [m], the prior's
    unit: Tensor  # [d], the posterior's unit of tau^2


class Evidence(NamedTuple):
    """Everyone's models on all rows, and for each pair what was predicted and seen."""

    trio: Trio
    gain: dict[str, Gain] | None  # at full size, on rows to come; None without a posterior
    seen: dict[str, Witness]  # on held-out rows, predictions nan without a posterior
    losses: dict[str, Tensor]  # [k] mean held-out loss of alone, common and personal; nan without rows
    asked: Tensor  # [k], the clients that were held against each other: all, unless they are very many


def cross_fit(
    task: Any,
    rows: Rows,
    keys: np.ndarray,
    weights: str | Tensor = "size",
    seed: int = 0,
    folds: int | None = None,
    done: Mapping[int, Fold] | None = None,
    save: Callable[[int, Fold], None] | None = None,
) -> tuple[Choice, Evidence]:
    """Choose on all rows by folds, predict and observe gains on them, refit on all rows.

    `done` are folds of an interrupted run, and `save(number, fold)` keeps a new one. Where fits are dear (very many
    parameters) and nobody says how many folds, one fold of five is held out.
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
    if folds is None and not is_dense(task):
        parts = parts[:1]
    kept = []
    for k, part in enumerate(parts):
        fold = (done or {}).get(k)
        if fold is None:
            fold = fit_fold(task, part, settings, near, few)
            if save is not None:
                save(k, fold)
        kept.append(fold)
    owner, number = owners(some), [torch.full((len(fold.place),), k) for k, fold in enumerate(kept)]
    if (
        len(kept) == 1
    ):  # clients' own choices are still tried on some of the rows that are held out, and judged on others
        number = [deal(parts[0].held, keys[asked.numpy()], FOLDS, seed)]
    here = decide(
        task,
        settings,
        torch.cat([fold.loss for fold in kept], 1),
        torch.cat(number),
        owner[torch.cat([fold.place for fold in kept])],
        len(some),
        default,
    )._replace(prior=prior)
    choice = here._replace(own={int(asked[i]): s for i, s in here.own.items()})
    trio = trio_of(task, rows, choice, prior_of(prior, torch.arange(len(rows))), weights)
    seen, losses = witnesses(task, some, parts, kept, here, few)
    gain = None
    if prior is not None and has_posterior(task):
        gain = future_gains(task, rows, prior.noise, likely_variance(found), trio)
    return choice, Evidence(trio, gain, seen, losses, asked)


def future_gains(task: Any, rows: Rows, noise: Tensor, unit: Tensor, trio: Trio) -> dict[str, Gain]:
    """By pair, at rows to come. Of very many clients each BLOCK has its own centre, which it knows well enough."""
    told = []
    for block in torch.arange(len(rows)).split(BLOCK):
        some = compact(rows.select(block))
        mine = trio._replace(alone=trio.alone[block], personal=trio.personal[block])
        known = posterior_of(task, some, noise[block], unit)
        told.append(gains(task, known, at_future(task, some), pairs_of(mine), shares(rows)[block]))
    return dict(zip(PAIRS, (joined_gains(parts) for parts in zip(*told))))


def of_tally(trio: Trio, tally: Tally) -> Evidence:
    """Evidence without a posterior: held-out rows alone."""
    return Evidence(trio, None, witnesses_of(tally), mean_losses(tally), torch.arange(len(tally.rows)))


def held_rows(evidence: Evidence) -> Tensor:
    """[k]: each asked client's held-out rows."""
    return next(iter(evidence.seen.values())).rows


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
    wanted = {choice.alone, choice.common, choice.plan, *choice.own.values()}
    models = {m.setting: m for m in fitted(task, rows, weights_of(rows, weights), sorted(wanted), found)}
    return trio_from(choice, models)


def trio_from(choice: Choice, models: Mapping[Setting, Models]) -> Trio:
    """The models of a choice's settings: each client's personal one is the plan's, or that of its own choice."""
    personal = models[choice.plan].v.clone()
    for i, setting in choice.own.items():
        personal[i] = models[setting].v[i]
    common = models[choice.common].w
    centre = common if choice.plan.family == ALONE else models[choice.plan].w
    return Trio(models[choice.alone].v, common, personal, centre)


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
    m, has = len(rows), choice.prior is not None and has_posterior(task)
    told = []
    forecast = {name: torch.zeros(3, m, dtype=torch.float64) for name in PAIRS}  # mean, sd and noise, times rows
    for part, fold in zip(parts, kept):
        own = [choice.prior._replace(variance=fold.variance, noise=fold.noise)] if choice.prior is not None else []
        trio = trio_of(task, part.train, choice, own, weights)
        told.append(tally_of(task, part.held, trio))
        if not has:
            continue
        share = part.held.size.double()
        known = posterior_of(task, part.train, fold.noise, fold.unit)
        for name, gain in zip(PAIRS, gains(task, known, at_rows(task, part.held), pairs_of(trio), shares(rows))):
            forecast[name] += torch.stack([share * gain.expected, share * gain.spread, share**2 * gain.noise])
    seen, losses = witnesses_of(total(told)), mean_losses(total(told))
    if has:
        for name, (mean, sd, noise) in forecast.items():
            n = seen[name].rows
            seen[name] = seen[name]._replace(error=noise.sqrt() / n, predicted=mean / n, sd=sd / n)
    return seen, losses
