"""Choice and evidence from the same folds: every row is held out once, and the prior is estimated again without it.

In each fold the prior and every candidate are fitted on the other folds' rows and evaluated on this fold's. The losses
choose how candidates are averaged; the local, global and personal models that follow are then evaluated fold by fold
(`loss_sums.py`). All models that clients will use are fitted on all rows.

A fold's result is a few tensors (`Fold`), so an interrupted run need not repeat it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mooring.advice.candidates.client_noise import estimate_noise
from mooring.advice.candidates.client_prior import Prior, average_kinds, estimate_priors, positive_variance
from mooring.advice.candidates.column_sets import LINEAR, ColumnSets, Shaper, on_columns
from mooring.advice.candidates.families import GLOBAL, LAMBDA, LOCAL, Setting, SettingModels, fit_settings
from mooring.advice.client_functions import independent_map
from mooring.advice.evaluation.held_out_losses import HeldOutLosses, LossesByModel, LossesByRow
from mooring.advice.evaluation.loss_sums import LossSums, ModelTriple, add_sums, sum_losses, zero_sums
from mooring.advice.evaluation.setting_choice import (
    MAX_CHOOSING_CLIENTS,
    Choice,
    choose_settings,
    client_weights,
    list_candidates,
    loss_temperature,
    mean_dispersion,
    prior_probabilities,
    select_priors,
)
from mooring.advice.folds import (
    DEFAULT_FOLDS,
    FEW_ROWS_FOLDS,
    MAX_FOLDS,
    FoldSplit,
    assign_folds,
    compact_rows,
    count_folds,
    iterate_folds,
    row_clients,
    row_losses,
)
from mooring.core.cohort import Rows
from mooring.engines.fit import OnProgress, ignore_progress
from mooring.estimates.task_random_effects import MAX_DIAGONAL_COEFFICIENTS
from mooring.shapes.columns import ShapedColumns
from mooring.tasks.linear import Linear
from mooring.tasks.proximal import MAX_DENSE_PARAMETERS, is_dense

CHOOSING_FOLDS = 1  # in which candidates are compared where fits are slow,
SLOW_FIT_OPERATIONS = (
    5e7  # rows times squared parameters from which they are: thousands of held-out rows are enough to choose by
)
SCREENING_FOLDS = 2  # after which candidates without a chance are dropped:
MAX_LOG_LIKELIHOOD_DEFICIT = 20.0  # log-likelihood on these folds by which they are behind,
REPORTED_SETTINGS = 3  # but for so many of the best local ones, and all global ones, which take one fit each
MIN_CHOOSING_ROWS = 500  # to choose by where fits are slow on few rows, too: losses with kinks


class FoldResult(NamedTuple):
    """The result of one fold; without a prior the last two are empty."""

    place: Tensor  # [rows of the fold], places among all rows
    loss: Tensor  # [settings, rows of the fold], float32
    variance: Tensor  # [priors, d], tau^2; 0 beyond a prior's own columns
    noise: Tensor  # [priors, m]


class NearbyPriors(NamedTuple):
    """The priors of all rows: what those of a fold are near to."""

    combined: Sequence[Prior]
    raw: Sequence[Prior]


class Evidence(NamedTuple):
    """Everyone's models, fitted on all rows, and what rows show of them."""

    models: ModelTriple
    held: LossSums  # over held-out rows, with models that have not seen them; 0 rows for clients that were not asked
    own: LossSums  # over all rows, with `models`
    fitted: LossSums | None = None  # over the rows that the folds' models were fitted to; None: not evaluated
    shape: ShapedColumns | None = None  # the extra columns that the models use


def cross_fit(
    task: Any,
    rows: Rows,
    keys: np.ndarray,
    weights: str | Tensor = "size",
    seed: int = 0,
    folds: int | None = None,
    done: Mapping[int, FoldResult] | None = None,
    save: Callable[[int, FoldResult], None] | None = None,
    tell: OnProgress = ignore_progress,
    units: Tensor | None = None,
    time: Tensor | None = None,
    shaper: Shaper | None = None,
) -> tuple[Choice, Evidence]:
    """Choose by folds of all rows, evaluate the chosen models on them, and refit on all rows.

    `done` are folds of an interrupted run, and `save(number, fold)` stores a new one. Where fits are slow (very many
    parameters) and `folds` is not given, one fold of five is held out; where they are rather slow, the candidates are
    compared in some folds only. No fold separates rows of one of the `units` [N]; with `time` [N] each fold is
    predicted from earlier rows only. With a `shaper` models may use extra columns.
    """
    tell("seeing how clients vary", 0, 1)
    asked = torch.arange(len(rows))
    some = rows = compact_rows(rows) if isinstance(rows, Rows) else rows
    everyones_units = units
    if len(asked) > MAX_CHOOSING_CLIENTS:
        asked = torch.linspace(0, len(rows) - 1, MAX_CHOOSING_CLIENTS).long()
        some = compact_rows(rows.select(asked))
        theirs = torch.isin(row_clients(rows), asked) if isinstance(rows, Rows) else None
        units, time = (None if part is None else part[theirs] for part in (units, time))
    few = weights if isinstance(weights, str) else weights[asked]
    parts = list(iterate_folds(some, keys[asked.numpy()], seed, count_task_folds(task, some, folds, time), units, time))
    if folds is None and task.dim > MAX_DENSE_PARAMETERS:
        parts = parts[:1]
    shape, sets, everyone = None, None, len(asked) == len(rows)
    if shaper is not None:
        shape, rows = shaper.fit(rows, everyones_units)
        some = rows if everyone else compact_rows(rows.select(asked))
        task = replace(task, features=shape.width)
        sets = ColumnSets(task, shape)
        mine = shaper if everyone else replace(shaper, keys=shaper.keys[asked.numpy()])
        parts = [mine.split(part, units) for part in parts]
    raw = estimate_all_priors(task, rows, sets)
    found = combine_priors(task, rows, raw, sets)
    near = NearbyPriors(select_priors(found, asked), raw)
    settings, proposed = list_candidates(task, some, near.combined, few, int(rows.size.sum()), sets)
    choosing, belief = count_choosing_folds(task, some, len(parts)), prior_probabilities(settings, proposed)
    if isinstance(some, Rows):
        fits, kept = fit_folds_here(task, parts, settings, choosing, near, few, done or {}, save, tell, sets)
        proposed = [s for s in proposed if settings.index(s) in set(kept)]
        settings, belief = [settings[k] for k in kept], belief[kept]
        losses: HeldOutLosses = losses_by_row(some, parts[:choosing], fits[:choosing], keys[asked.numpy()], seed)
    else:
        fits, losses = fit_folds_remotely(task, some, parts, settings, choosing, near, few, sets)
    here = choose_settings(task, settings, losses, proposed, near.combined, belief)
    choice = here._replace(own={int(asked[i]): s for i, s in here.own.items()}, priors=found)
    models = fit_triple(task, rows, choice, found, weights, sets)
    held, fitted_to = evaluate_folds(task, some, parts, fits, here, few, tell, sets)
    if not everyone:
        held, fitted_to = (expand_sums(sums, asked, len(rows)) for sums in (held, fitted_to))
    return choice, Evidence(models, held, sum_losses(task, rows, models), fitted_to, shape)


def expand_sums(sums: LossSums, asked: Tensor, m: int) -> LossSums:
    """Sums of some clients as sums of all m, 0 elsewhere."""
    return LossSums(*(whole.index_copy_(0, asked, part) for whole, part in zip(zero_sums(m), sums, strict=True)))


def count_task_folds(task: Any, rows: Rows, folds: int | None, time: Tensor | None = None) -> int:
    """How many folds: as asked, else by the rows, and fewer where every fit takes iterations."""
    if folds is not None:
        return folds
    most = MAX_FOLDS if isinstance(task, Linear) else FEW_ROWS_FOLDS if is_dense(task) else DEFAULT_FOLDS
    return min(count_folds(rows, time), most)


def count_choosing_folds(task: Any, rows: Rows, folds: int) -> int:
    """In how many of the folds candidates are compared: all of them, unless every candidate takes seconds."""
    total = int(rows.size.sum())
    if isinstance(task, Linear) or (is_dense(task) and total * task.dim**2 <= SLOW_FIT_OPERATIONS):
        return folds
    return (
        CHOOSING_FOLDS
        if is_dense(task)
        else min(folds, max(CHOOSING_FOLDS, -(-MIN_CHOOSING_ROWS * folds // max(total, 1))))
    )


def fit_folds_here(
    task: Any,
    parts: list[FoldSplit],
    settings: list[Setting],
    choosing: int,
    near: NearbyPriors,
    weights: str | Tensor,
    done: Mapping[int, FoldResult],
    save: Callable[[int, FoldResult], None] | None,
    tell: OnProgress,
    sets: ColumnSets | None,
) -> tuple[list[FoldResult], list[int]]:
    """The folds of rows in this process, with losses by row of the settings that are still compared in the end, and
    which these are: after SCREENING_FOLDS those that cannot get any weight are dropped."""
    fits: list[FoldResult] = []
    kept = list(range(len(settings)))
    steps = len(parts)
    for k, part in enumerate(parts):
        if k == SCREENING_FOLDS and k < choosing:
            kept = screen_settings(task, settings, fits, near.combined)
        tried = [settings[i] for i in kept] if k < choosing else []
        tell("holding rows out", k, steps)
        fold = done.get(k)
        if fold is None:

            def evaluate(v: Tensor, held: Rows = part.held) -> Tensor:
                return row_losses(task, v, held).float()

            fold, loss = fit_fold(task, part, tried, near, weights, sets, evaluate)
            fold = fold._replace(loss=torch.stack(loss) if loss else torch.empty(0, len(part.place)))
            if save is not None:
                save(k, fold)
        fits.append(fold)
    place = torch.tensor(kept)
    whole = [fold._replace(loss=fold.loss[place]) if len(fold.loss) == len(settings) else fold for fold in fits]
    return whole, kept


def screen_settings(task: Any, settings: list[Setting], fits: list[FoldResult], priors: Sequence[Prior]) -> list[int]:
    """The settings whose losses on the first folds leave them a chance of some weight, and the best of the families
    that are always reported."""
    total = torch.cat([fold.loss for fold in fits], 1).double()
    behind = (total.sum(1) - total.sum(1).min()) / loss_temperature(
        task, float(total.mean(1).min()), mean_dispersion(task, priors)
    )
    keep = set(torch.nonzero(behind <= MAX_LOG_LIKELIHOOD_DEFICIT)[:, 0].tolist())
    columns = {settings[k].columns for k in keep}  # the plan will have one of these, and its path is reported
    keep |= {k for k, s in enumerate(settings) if s.family == LAMBDA and s.columns in columns}
    for family in (LOCAL, GLOBAL):
        mine = sorted((k for k, s in enumerate(settings) if s.family == family), key=lambda k: float(behind[k]))
        keep |= set(mine[:REPORTED_SETTINGS] if family == LOCAL else mine)
        for name in columns:
            keep |= set([k for k in mine if settings[k].columns == name][:1])
    linear = (k for k, s in enumerate(settings) if s.columns == LINEAR)
    keep.add(min(linear, key=lambda k: float(behind[k])))  # what the gain of other columns is reported against
    return sorted(keep)


def fit_folds_remotely(
    task: Any,
    rows: Any,
    parts: list[FoldSplit],
    settings: list[Setting],
    choosing: int,
    near: NearbyPriors,
    weights: str | Tensor,
    sets: ColumnSets | None,
) -> tuple[list[FoldResult], HeldOutLosses]:
    """The same of rows that stay with their clients: all settings, folds side by side, losses as sums."""

    def fit(k: int) -> list[tuple[FoldResult, Tensor]]:
        tried = settings if k < choosing else []
        fold, models = fit_fold(task, parts[k], tried, near, weights, sets, lambda v: v)
        return [(fold, torch.stack(models, 1) if models else torch.empty(0))]

    fits, models = zip(*(one for (one,) in independent_map(rows)(fit, range(len(parts)))))
    return list(fits), LossesByModel(task, [part.held for part in parts[:choosing]], models[:choosing])


def losses_by_row(
    rows: Rows, parts: list[FoldSplit], fits: list[FoldResult], keys: np.ndarray, seed: int
) -> LossesByRow:
    """The losses of all folds. Of a single one, clients' own choices are made on some of its rows and evaluated on
    others."""
    number = [torch.full((len(fold.place),), k) for k, fold in enumerate(fits)]
    if len(fits) == 1:
        number = [assign_folds(parts[0].held, keys, DEFAULT_FOLDS, seed)]
    owner = row_clients(rows)[torch.cat([fold.place for fold in fits])]
    return LossesByRow(torch.cat([fold.loss for fold in fits], 1), torch.cat(number), owner, len(rows))


def estimate_all_priors(
    task: Any, rows: Rows, sets: ColumnSets | None, near: Sequence[Prior] = (), used: Collection[str] | None = None
) -> list[Prior]:
    """The priors of every kind, for each (or each `used`) set of columns; approximations start from `near`."""
    if sets is None:
        return estimate_priors(task, rows, near)

    def estimate(name: str) -> list[Prior]:
        mine = [prior for prior in near if prior.columns == name]
        found = estimate_priors(sets.task_on(name), sets.rows_on(rows, name), mine)
        return [prior._replace(columns=name) for prior in found]

    names = [name for name in sets.names() if used is None or name in used]
    return [prior for found in independent_map(rows)(estimate, names) for prior in found]


def combine_priors(task: Any, rows: Rows, raw: Sequence[Prior], sets: ColumnSets | None) -> list[Prior]:
    """The priors that settings go by, from those of every kind: for each set of columns the preferred one first.

    With squared losses each client has its own noise.
    """
    out: list[Prior] = []
    for name in [LINEAR] if sets is None else sets.names():
        mine = [prior for prior in raw if prior.columns == name]
        if not mine:
            continue
        at, found = on_columns(task, rows, sets, name), average_kinds(mine)
        if isinstance(at.task, Linear) and at.task.dim <= MAX_DIAGONAL_COEFFICIENTS:
            noise, law = estimate_noise(at.task, at.rows, positive_variance(mine), found[0].noise)
            found = [prior._replace(noise=noise, law=law) for prior in found]
        out += found
    return out


def fit_fold(
    task: Any,
    part: FoldSplit,
    settings: list[Setting],
    near: NearbyPriors,
    weights: str | Tensor,
    sets: ColumnSets | None,
    evaluate: Callable[[Tensor], Tensor],
) -> tuple[FoldResult, list[Tensor]]:
    """All candidates on the fold's training rows, with priors of its own: what `evaluate` makes of their models [m, d].

    Of columns that no setting uses any more, the priors are those of all rows.
    """
    own = list(near.combined)
    if own:
        used = {setting.columns for setting in settings} or {prior.columns for prior in own}
        raw = estimate_all_priors(task, part.train, sets, near.raw, used)
        again = {(p.columns, p.kind): p for p in combine_priors(task, part.train, raw, sets)}
        first = {name: next((p for p in again.values() if p.columns == name), None) for name in used}
        for k, prior in enumerate(own):
            # The preferred prior of a set may be of another kind here: it is the first of its columns.
            mine = again.get((prior.columns, prior.kind)) or (
                first.get(prior.columns) if prior.kind != "intercept" else None
            )
            if mine is not None:
                own[k] = prior._replace(variance=mine.variance, noise=mine.noise)
    empty = torch.empty(0, dtype=torch.float64)
    fold = FoldResult(part.place, empty, empty, empty)
    if own:
        padded = pad_sequence([p.variance for p in own], batch_first=True)
        fold = fold._replace(variance=padded, noise=torch.stack([p.noise for p in own]))
    found = {}
    for one in fit_settings(task, part.train, client_weights(part.train, weights), settings, own, sets):
        found[one.setting] = evaluate(one.v)
    return fold, [found[setting] for setting in settings]


def fold_priors(near: Sequence[Prior], fold: FoldResult) -> list[Prior]:
    """The priors with a fold's own numbers."""
    return [p._replace(variance=v[: len(p.variance)], noise=s) for p, v, s in zip(near, fold.variance, fold.noise)]


def fit_triple(
    task: Any,
    rows: Rows,
    choice: Choice,
    found: Sequence[Prior],
    weights: str | Tensor,
    sets: ColumnSets | None = None,
) -> ModelTriple:
    """The local, global and personal models of a choice, fitted on these rows."""
    wanted = {choice.local, choice.global_, *choice.mix, *choice.own.values()}
    models = {
        m.setting: m for m in fit_settings(task, rows, client_weights(rows, weights), sorted(wanted), found, sets)
    }
    return assemble_triple(choice, models)


def assemble_triple(choice: Choice, models: Mapping[Setting, SettingModels]) -> ModelTriple:
    """The models of a choice's settings: each client's personal one is the average of the mix, or of its own choice."""
    global_ = models[choice.global_].w
    personal = torch.zeros_like(models[choice.plan].v)
    for setting, weight in choice.mix.items():
        personal += weight * models[setting].v
    for i, setting in choice.own.items():
        personal[i] = models[setting].v[i]
    centers = [global_ if setting.family == LOCAL else models[setting].w for setting in choice.mix]
    return ModelTriple(models[choice.local].v, global_, personal, torch.stack(centers))


def evaluate_folds(
    task: Any,
    rows: Rows,
    parts: list[FoldSplit],
    fits: list[FoldResult],
    choice: Choice,
    weights: str | Tensor,
    tell: OnProgress,
    sets: ColumnSets | None = None,
) -> tuple[LossSums, LossSums]:
    """What all folds' rows show of the chosen models, fitted without them, and what the rows show that they were
    fitted to."""

    def evaluate(k: int) -> list[tuple[LossSums, LossSums]]:
        models = fit_triple(task, parts[k].train, choice, fold_priors(choice.priors, fits[k]), weights, sets)
        return [(sum_losses(task, parts[k].held, models), sum_losses(task, parts[k].train, models))]

    out = []
    for (sums,) in independent_map(rows)(evaluate, range(len(parts))):
        out.append(sums)
        tell("evaluating on held-out rows", len(out), len(parts))
    held, fitted_to = zip(*out)
    return add_sums(held), add_sums(fitted_to)
