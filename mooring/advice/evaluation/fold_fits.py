"""All candidates fitted without each fold, and their losses on the rows of that fold.

In each fold the prior and every candidate are fitted to the other folds' rows and evaluated on this fold's. The result
of a fold is a few tensors (`FoldResult`), so an interrupted run need not repeat it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mooring.advice.candidates.families import (
    FAMILY_OF_PRIOR,
    GLOBAL,
    INTERCEPT,
    LAMBDA,
    LOCAL,
    Setting,
    SettingModels,
    fit_settings,
)
from mooring.advice.evaluation.held_out_losses import HeldOutLosses
from mooring.advice.evaluation.setting_choice import client_weights, loss_temperature, mean_dispersion
from mooring.core.client_functions import ClientRows
from mooring.core.task import Task
from mooring.data.folds import DEFAULT_FOLDS, FoldSplit, assign_folds, row_clients, row_losses
from mooring.engines.progress import OnProgress
from mooring.estimates.task_random_effects import MAX_DIAGONAL_COEFFICIENTS
from mooring.partial_pooling.client_noise import estimate_noise
from mooring.partial_pooling.client_prior import (
    Prior,
    average_kinds,
    estimate_priors,
    positive_variance,
    restrict_priors,
)
from mooring.shapes.column_sets import ColumnSets, on_columns
from mooring.shapes.columns import LINEAR
from mooring.tasks.linear import Linear

T = TypeVar("T")
SCREENING_FOLDS = 2  # after which candidates without a chance are dropped:
MAX_LOG_LIKELIHOOD_DEFICIT = 20.0  # on these folds, to the best candidate
REPORTED_SETTINGS = 3  # of the best local ones that are never dropped; nor are the global ones, which take one fit each


class FoldResult(NamedTuple):
    """The result of one fold; without a prior the last two are empty."""

    place: Tensor  # [rows of the fold], their positions among all rows
    loss: Tensor  # [settings, rows of the fold], float32
    variance: Tensor  # [priors, d], tau^2; 0 beyond a prior's own columns
    noise: Tensor  # [priors, m]


class NearbyPriors(NamedTuple):
    """The priors of all rows, which those of a fold are near to."""

    combined: Sequence[Prior]
    raw: Sequence[Prior]


class FoldedRows(NamedTuple):
    """The rows of the clients that choose settings, in folds."""

    task: Any  # with the columns of all candidates
    rows: ClientRows
    parts: list[FoldSplit]
    weights: str | Tensor  # of the clients
    keys: np.ndarray  # [m]
    seed: int
    sets: ColumnSets | None
    varying: Tensor | None = None  # [d], whether a coefficient may differ between clients; None: all may


class FoldFits(NamedTuple):
    """The results of all folds, and the candidates' held-out losses."""

    results: list[FoldResult]
    compared: list[int]  # the settings that are compared to the end
    losses: HeldOutLosses


def fit_folds(
    data: FoldedRows,
    settings: list[Setting],
    choosing: int,
    near: NearbyPriors,
    done: Mapping[int, FoldResult],
    save: Callable[[int, FoldResult], None] | None,
    tell: OnProgress,
) -> FoldFits:
    """Fit fold after fold; candidates are compared in the first `choosing` ones, with losses by row.

    After SCREENING_FOLDS candidates that cannot get any weight are dropped.
    """
    results: list[FoldResult] = []
    compared = list(range(len(settings)))
    for k, part in enumerate(data.parts):
        if k == SCREENING_FOLDS and k < choosing:
            compared = screen_settings(data.task, settings, results, near.combined)
        tried = [settings[i] for i in compared] if k < choosing else []
        tell("holding rows out", k, len(data.parts))
        fold = done.get(k)
        if fold is None:

            def evaluate(models: SettingModels, held: Any = part.held) -> Tensor:
                return row_losses(data.task, models.v, held).float()

            with part.held.keep_batches():
                fold, losses = fit_fold(data, part, tried, near, evaluate)
            fold = fold._replace(loss=torch.stack(losses) if losses else torch.empty(0, len(part.place)))
            if save is not None:
                save(k, fold)
        results.append(fold)
    place = torch.tensor(compared)
    results = [fold._replace(loss=fold.loss[place]) if len(fold.loss) == len(settings) else fold for fold in results]
    return FoldFits(results, compared, losses_by_row(data, results[:choosing]))


def screen_settings(task: Task, settings: list[Setting], fits: list[FoldResult], priors: Sequence[Prior]) -> list[int]:
    """The settings whose losses on the first folds leave them a chance of some weight, and the best of the families
    that are always reported."""
    total = torch.cat([fold.loss for fold in fits], 1).double()
    deficit = (total.sum(1) - total.sum(1).min()) / loss_temperature(
        task, float(total.mean(1).min()), mean_dispersion(task, priors)
    )
    keep = set(torch.nonzero(deficit <= MAX_LOG_LIKELIHOOD_DEFICIT)[:, 0].tolist())
    columns = {settings[k].columns for k in keep}  # the plan will have one of these, and its path is reported
    keep |= {k for k, s in enumerate(settings) if s.family == LAMBDA and s.columns in columns}
    for family in (LOCAL, GLOBAL):
        members = sorted((k for k, s in enumerate(settings) if s.family == family), key=lambda k: float(deficit[k]))
        keep |= set(members[:REPORTED_SETTINGS] if family == LOCAL else members)
        for name in columns:
            keep |= set([k for k in members if settings[k].columns == name][:1])
    linear = (k for k, s in enumerate(settings) if s.columns == LINEAR)
    keep.add(min(linear, key=lambda k: float(deficit[k])))  # what the improvement by other columns is reported against
    return sorted(keep)


def losses_by_row(data: FoldedRows, results: list[FoldResult]) -> HeldOutLosses:
    """The losses of all folds. Of a single one, clients' own choices are made on some of its rows and evaluated on
    others."""
    number = [torch.full((len(fold.place),), k) for k, fold in enumerate(results)]
    if len(results) == 1:
        number = [assign_folds(data.parts[0].held, data.keys, DEFAULT_FOLDS, data.seed)]
    owner = row_clients(data.rows)[torch.cat([fold.place for fold in results])]
    return HeldOutLosses(torch.cat([fold.loss for fold in results], 1), torch.cat(number), owner, len(data.rows))


def estimate_all_priors(
    task: Task,
    rows: ClientRows,
    sets: ColumnSets | None,
    near: Sequence[Prior] | None = None,
    known: Sequence[Prior] = (),
) -> list[Prior]:
    """The priors of every kind for each set of columns, or those of `near`, from which approximations start.

    `known` are those of linear columns, which need not be estimated again.
    """

    def estimate(name: str) -> list[Prior]:
        if name == LINEAR and known:
            return list(known)
        at, start = on_columns(task, rows, sets, name), [prior for prior in near or () if prior.columns == name]
        return [prior._replace(columns=name) for prior in estimate_priors(at.task, at.rows, start)]

    names = ([LINEAR] if sets is None else sets.names()) if near is None else {prior.columns: 0 for prior in near}
    return [prior for priors in rows.map_independent(estimate, names) for prior in priors]


def combine_priors(
    task: Task, rows: ClientRows, raw: Sequence[Prior], sets: ColumnSets | None, varying: Tensor | None = None
) -> list[Prior]:
    """The priors that settings use, from those of every kind: for each set of columns the preferred one first.

    With squared losses each client has its own noise. Coefficients that are not `varying` have the variance 0.
    """

    def combine(name: str) -> list[Prior]:
        kinds = [prior for prior in raw if prior.columns == name]
        if not kinds:
            return []
        at, priors = on_columns(task, rows, sets, name), average_kinds(kinds)
        if isinstance(at.task, Linear) and at.task.dim <= MAX_DIAGONAL_COEFFICIENTS:
            noise, law = estimate_noise(at.task, at.rows, positive_variance(kinds), priors[0].noise)
            priors = [prior._replace(noise=noise, law=law) for prior in priors]
        return priors if varying is None else restrict_priors(task, priors, varying)

    names = [LINEAR] if sets is None else sets.names()
    return [prior for priors in rows.map_independent(combine, names) for prior in priors]


def fit_fold(
    data: FoldedRows,
    part: FoldSplit,
    settings: list[Setting],
    near: NearbyPriors,
    evaluate: Callable[[SettingModels], T],
) -> tuple[FoldResult, list[T]]:
    """All candidates on the fold's training rows, with priors of its own: what `evaluate` makes of their models.

    Priors that no setting uses are those of all rows.
    """
    priors = list(near.combined)
    if priors:
        used = {(s.columns, s.family == INTERCEPT) for s in settings if s.family in FAMILY_OF_PRIOR.values()}
        used |= set() if settings else {(prior.columns, True) for prior in priors}
        repeated = [p for p in near.raw if used & {(p.columns, True), (p.columns, p.kind == INTERCEPT)}]
        raw = estimate_all_priors(data.task, part.train, data.sets, repeated)
        estimated = combine_priors(data.task, part.train, raw, data.sets, data.varying)
        for k, prior in enumerate(priors):
            # The preferred prior of a set may be of another kind here: it is the first of its columns.
            own = [p for p in estimated if p.columns == prior.columns]
            same = [p for p in own if p.kind == prior.kind]
            for again in same[:1] or (own[:1] if prior.kind != INTERCEPT else []):
                priors[k] = prior._replace(variance=again.variance, noise=again.noise)
    empty = torch.empty(0, dtype=torch.float64)
    fold = FoldResult(part.place, empty, empty, empty)
    if priors:
        padded = pad_sequence([p.variance for p in priors], batch_first=True)
        fold = fold._replace(variance=padded, noise=torch.stack([p.noise for p in priors]))
    weights = client_weights(part.train, data.weights)
    fits = fit_settings(data.task, part.train, weights, settings, priors, data.sets)
    values = {models.setting: evaluate(models) for models in fits}
    return fold, [values[setting] for setting in settings]


def fold_priors(near: Sequence[Prior], fold: FoldResult) -> list[Prior]:
    """The priors with a fold's own numbers."""
    return [p._replace(variance=v[: len(p.variance)], noise=s) for p, v, s in zip(near, fold.variance, fold.noise)]
