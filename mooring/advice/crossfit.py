"""Choice and evidence from the same folds: every row is held out once, and the prior is fitted anew without it.

In each fold of the clients' rows the prior and every candidate are fitted on the other folds and judged on this one.
The losses choose the plan; the plan's, alone's and common's own losses are what predictions of gains are held against
(`calibrate.py`), since a prior that saw the held-out rows would overstate what the plan gains over one common model.
All that is deployed is then fitted on all rows.

A fold's result is a few tensors (`Fold`), so a run that was interrupted need not repeat it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mooring.advice.asking import at_hand, doing
from mooring.advice.bends import Bent, bent_gains, bent_of, everyones_moments, total_bends, with_bends
from mooring.advice.calibrate import Witness
from mooring.advice.choice import MOST_CLIENTS, Choice, candidates, decide, prior_of, weights_of
from mooring.advice.families import ALONE, Models, Setting, fitted
from mooring.advice.folds import FOLDS, Held, compact, cross, deal, owners, row_losses
from mooring.advice.gain import Gain, at_future, at_rows, gains, joined_gains
from mooring.advice.heldout import at_full_size
from mooring.advice.losses import ByModel, ByRow, Losses
from mooring.advice.path import BLOCK, Shape, path
from mooring.advice.posterior import Truths, generalised_truths, has_posterior, linear_truths, own_noise
from mooring.advice.prior import Prior, likely_variance, preferred, priors
from mooring.advice.tally import PAIRS, Tally, Trio, mean_losses, tally_of, total, witnesses_of
from mooring.core.cohort import Rows
from mooring.engines.fit import Tell, silent
from mooring.tasks.linear import Linear
from mooring.tasks.proximal import DENSE, is_dense

CHOOSING = 1  # folds in which candidates are compared where fits are rather dear,
DEAR = 5e7  # rows times squared parameters from which they are: thousands of held-out rows are enough to choose by
ENOUGH = 500  # rows to choose by where fits are dear on few rows, too: losses with kinks


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
    gain: dict[str, Gain] | None  # at full size, on rows to come; None for networks and newcomers
    seen: dict[str, Witness]  # on held-out rows, predictions nan without `gain`
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
    tell: Tell = silent,
    units: Tensor | None = None,
) -> tuple[Choice, Evidence]:
    """Choose on all rows by folds, predict and observe gains on them, refit on all rows.

    `done` are folds of an interrupted run, and `save(number, fold)` keeps a new one. Where fits are dear (very many
    parameters) and nobody says how many folds, one fold of five is held out; where they are rather dear, the candidates
    are compared in some folds only, and in the others what they chose is judged. No fold tears rows of one of the
    `units` [N] apart.
    """
    tell("seeing how clients vary", 0, 1)
    asked = torch.arange(len(rows))
    some = rows = compact(rows) if isinstance(rows, Rows) else rows
    if len(asked) > MOST_CLIENTS:
        asked = torch.linspace(0, len(rows) - 1, MOST_CLIENTS).long()
        some = compact(rows.select(asked))
    few = weights if isinstance(weights, str) else weights[asked]
    found = priors(task, rows)
    prior = with_own_noise(task, rows, found) if found else None
    settings, default = candidates(task, some, prior, few, int(rows.size.sum()))
    near = prior_of(prior, asked)[0] if prior is not None else None
    if units is not None and some is not rows:
        units = units[torch.isin(owners(rows), asked)]
    parts = list(cross(some, keys[asked.numpy()], seed, folds if is_dense(task) else folds or FOLDS, units))
    if folds is None and task.dim > DENSE:
        parts = parts[:1]
    choosing = folds_to_choose(task, some, len(parts))
    tried = [settings if k < choosing else [] for k in range(len(parts))]
    if isinstance(some, Rows):
        kept = []
        for k, part in enumerate(parts):
            fold = (done or {}).get(k)
            before, steps = sum(map(len, tried[:k])) + k, sum(map(len, tried)) + len(tried)
            tell("holding rows out", before, steps)
            if fold is None:

                def told(more: int, before: int = before, steps: int = steps) -> None:
                    tell("holding rows out", before + more, steps)

                def lost(v: Tensor, held: Rows = part.held) -> Tensor:
                    return row_losses(task, v, held).float()

                fold, loss = fit_fold(task, part, tried[k], near, found, few, lost, told)
                fold = fold._replace(loss=torch.stack(loss) if loss else torch.empty(0, len(part.place)))
                if save is not None:
                    save(k, fold)
            kept.append(fold)
        losses: Losses = by_row(some, parts[:choosing], kept[:choosing], keys[asked.numpy()], seed)
    else:

        def apart(k: int) -> list[tuple[Fold, Tensor]]:
            fold, models = fit_fold(task, parts[k], tried[k], near, found, few, lambda v: v)
            return [(fold, torch.stack(models, 1) if models else torch.empty(0))]

        kept, models = zip(*(one for (one,) in doing(some)(apart, range(len(parts)))))  # type: ignore[assignment]
        losses = ByModel(task, [part.held for part in parts[:choosing]], models[:choosing])
    here = decide(task, settings, losses, default)._replace(prior=prior)
    choice = here._replace(own={int(asked[i]): s for i, s in here.own.items()})
    trio = trio_of(task, rows, choice, prior_of(prior, torch.arange(len(rows))), weights)
    judge = partial(judged_folds, task, some, parts, kept, here, few, tell)
    if prior is not None and has_posterior(task):
        seen, judged = foreseen(task, some, parts, judge)
        gain = future_gains(task, rows, prior.noise, likely_variance(found), trio)
    else:
        x = everyones_moments(task, rows)
        seen, judged, bent = foretold(task, x, judge)
        gain = bent_gains(bent, asked, trio, x, rows.size)
    return choice, Evidence(trio, gain, seen, judged, asked)


def folds_to_choose(task: Any, rows: Rows, folds: int) -> int:
    """In how many of the folds candidates are compared: all of them, unless every candidate takes seconds."""
    total = int(rows.size.sum())
    if isinstance(task, Linear) or (is_dense(task) and total * task.dim**2 <= DEAR):
        return folds
    return CHOOSING if is_dense(task) else min(folds, max(CHOOSING, -(-ENOUGH * folds // max(total, 1))))


def by_row(rows: Rows, parts: list[Held], kept: list[Fold], keys: np.ndarray, seed: int) -> ByRow:
    """The losses of all folds. Of a single one, clients' own choices are tried on some of its rows and judged on
    others."""
    number = [torch.full((len(fold.place),), k) for k, fold in enumerate(kept)]
    if len(kept) == 1:
        number = [deal(parts[0].held, keys, FOLDS, seed)]
    owner = owners(rows)[torch.cat([fold.place for fold in kept])]
    return ByRow(torch.cat([fold.loss for fold in kept], 1), torch.cat(number), owner, len(rows))


def future_gains(task: Any, rows: Rows, noise: Tensor, unit: Tensor, trio: Trio) -> dict[str, Gain]:
    """By pair, at rows to come. Of very many clients each BLOCK has its own centre, which it knows well enough."""
    told = []
    for block in torch.arange(len(rows)).split(BLOCK):
        some = rows if len(block) == len(rows) else compact(rows.select(block))
        mine = trio._replace(alone=trio.alone[block], personal=trio.personal[block])
        with at_hand(some):
            known = posterior_of(task, some, noise[block], unit)
            told.append(gains(task, known, at_future(task, some), pairs_of(mine), shares(rows)[block]))
    return dict(zip(PAIRS, (joined_gains(parts) for parts in zip(*told))))


def of_tally(trio: Trio, tally: Tally, share: Tensor | float = 1.0) -> Evidence:
    """Evidence without a posterior: held-out rows alone, judging models of a `share` of each client's rows.

    Networks could fit any rows: all that they lose alone counts as what more rows would save.
    """
    alone, _, personal = tally.losses.sum(1).tolist()
    seen = at_full_size(witnesses_of(tally), share, min(max(1 - personal / alone, 0.0), 1.0) if alone > 0 else 0.0)
    return Evidence(trio, None, seen, mean_losses(tally), torch.arange(len(tally.rows)))


def held_rows(evidence: Evidence) -> Tensor:
    """[k]: each asked client's held-out rows."""
    return next(iter(evidence.seen.values())).rows


def pairs_of(trio: Trio) -> list[tuple[Tensor, Tensor]]:
    return [(getattr(trio, o), getattr(trio, p)) for o, p in PAIRS.values()]


def shares(rows: Rows) -> Tensor:
    """[m]: each client's share of the rows."""
    return rows.size.double() / rows.size.sum()


def fit_fold(
    task: Any,
    part: Held,
    settings: list[Setting],
    prior: Prior | None,
    near: Sequence[Prior],
    weights: str | Tensor,
    judge: Callable[[Tensor], Tensor],
    told: Callable[[int], None] = lambda done: None,
) -> tuple[Fold, list[Tensor]]:
    """All candidates on the fold's training rows, with a prior of its own: what `judge` makes of their models [m, d].

    `told` hears how many of them are done, the prior included.
    """
    fold = prior_of_fold(task, part, prior, near)
    told(1)
    found = {}
    for one in fitted(task, part.train, weights_of(part.train, weights), settings, own_prior(prior, fold)):
        found[one.setting] = judge(one.v)
        told(1 + len(found))
    return fold, [found[setting] for setting in settings]


def prior_of_fold(task: Any, part: Held, prior: Prior | None, near: Sequence[Prior]) -> Fold:
    """The prior of the fold's training rows, of the kind that all rows prefer; `near` are those of all rows."""
    empty = torch.empty(0, dtype=torch.float64)
    if prior is None:
        return Fold(part.place, empty, empty, empty, empty)
    again = priors(task, part.train, near)
    if not again:
        return Fold(part.place, empty, prior.variance, prior.noise, prior.variance)
    own = with_own_noise(task, part.train, again)
    return Fold(part.place, empty, own.variance, own.noise, likely_variance(again))


def with_own_noise(task: Any, rows: Rows, found: list[Prior]) -> Prior:
    """The preferred prior, each client having its own noise where squared losses tell it."""
    prior = preferred(found)
    if not isinstance(task, Linear) or not has_posterior(task):
        return prior
    noise, law = own_noise(task, rows, likely_variance(found), prior.noise)
    return prior._replace(noise=noise, law=law)


def own_prior(prior: Prior | None, fold: Fold) -> list[Prior]:
    """The prior with a fold's own numbers."""
    return [] if prior is None else [prior._replace(variance=fold.variance, noise=fold.noise)]


def trio_of(task: Any, rows: Rows, choice: Choice, found: list[Prior], weights: str | Tensor) -> Trio:
    """Alone, common and each client's personal model, fitted on these rows."""
    wanted = {choice.alone, choice.common, *choice.mix, *choice.own.values()}
    models = {m.setting: m for m in fitted(task, rows, weights_of(rows, weights), sorted(wanted), found)}
    return trio_from(choice, models)


def trio_from(choice: Choice, models: Mapping[Setting, Models]) -> Trio:
    """The models of a choice's settings: each client's personal one is the average of the mix, or of its own choice."""
    common = models[choice.common].w
    personal = torch.zeros_like(models[choice.plan].v)
    for setting, weight in choice.mix.items():
        personal += weight * models[setting].v
    for i, setting in choice.own.items():
        personal[i] = models[setting].v[i]
    centres = [common if setting.family == ALONE else models[setting].w for setting in choice.mix]
    return Trio(models[choice.alone].v, common, personal, torch.stack(centres))


def posterior_of(task: Any, rows: Rows, noise: Tensor, unit: Tensor) -> Truths:
    """The clients' truths, the spread being `unit` [d] times an unknown scale."""
    if isinstance(task, Linear):
        return linear_truths(task, rows, unit, noise)
    shape = Shape(noise.double() / rows.size.double().clamp(min=1), unit)
    point = next(path(task, rows, rows.size.double(), [1.0], shape))
    return generalised_truths(task, rows, point.v, unit)


Foresee = Callable[[Held, Fold, Trio], Any]
Judge = Callable[[Foresee], tuple[Tally, list[Any]]]


def judged_folds(
    task: Any,
    rows: Rows,
    parts: list[Held],
    kept: list[Fold],
    choice: Choice,
    weights: str | Tensor,
    tell: Tell,
    foresee: Foresee,
) -> tuple[Tally, list[Any]]:
    """What all folds' rows say of models that have not seen them, and of each fold what `foresee` says of them."""

    def of_fold(k: int) -> list[tuple[Tally, Any]]:
        part, fold = parts[k], kept[k]
        trio = trio_of(task, part.train, choice, own_prior(choice.prior, fold), weights)
        return [(tally_of(task, part.held, trio), foresee(part, fold, trio))]

    told = []
    for (one,) in doing(rows)(of_fold, range(len(parts))):
        told.append(one)
        tell("predicting what was held out", len(told), len(parts))
    tallies, said = zip(*told)
    return total(tallies), list(said)


def foreseen(task: Any, rows: Rows, parts: list[Held], judge: Judge) -> tuple[dict[str, Witness], dict[str, Tensor]]:
    """For each pair what every client's held-out rows say and what its posterior predicts of them; mean losses."""

    def foresee(part: Held, fold: Fold, trio: Trio) -> list[Gain]:
        known = posterior_of(task, part.train, fold.noise, fold.unit)
        return gains(task, known, at_rows(task, part.held), pairs_of(trio), shares(rows))

    tally, said = judge(foresee)
    seen, share = witnesses_of(tally), [part.held.size.double() for part in parts]
    for name, found in zip(PAIRS, zip(*said)):
        n = seen[name].rows
        mean, sd = (sum(k * getattr(g, what) for k, g in zip(share, found)) for what in ("expected", "spread"))
        noise = sum(k**2 * g.noise for k, g in zip(share, found))
        seen[name] = seen[name]._replace(error=noise.sqrt() / n, predicted=mean / n, sd=sd / n)
    return seen, mean_losses(tally)


def foretold(task: Any, x: Tensor, judge: Judge) -> tuple[dict[str, Witness], dict[str, Tensor], Bent]:
    """The same without a posterior, from how losses bend, given the second moments of everybody's `x`; and that."""

    def foresee(part: Held, fold: Fold, trio: Trio) -> Bent:
        return bent_of(task, part.held, part.train.size, trio, x)

    tally, said = judge(foresee)
    bent = total_bends(said)
    return with_bends(witnesses_of(tally), bent), mean_losses(tally), bent
