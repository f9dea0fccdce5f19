"""Choice and evidence from the same folds: every row is held out once, and the prior is estimated again without it.

The candidates' losses on held-out rows (`fold_fits.py`) choose how candidates are averaged (`setting_choice.py`); the
local, global and personal models that follow are then evaluated fold by fold (`loss_sums.py`). All models that clients
will use are fitted to all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mooring.advice.candidates.families import LAMBDA, LOCAL, MIXTURE, Setting, SettingModels, fit_settings
from mooring.advice.candidates.shaper import Shaper
from mooring.advice.evaluation.fold_fits import (
    FoldedRows,
    FoldResult,
    NearbyPriors,
    combine_priors,
    estimate_all_priors,
    fit_folds,
    fold_priors,
)
from mooring.advice.evaluation.held_out_predictions import (
    HeldOutPredictions,
    join_predictions,
    predict_held_out,
    predict_new_clients,
)
from mooring.advice.evaluation.latest_target import fit_latest_targets, latest_target_share
from mooring.advice.evaluation.loss_sums import LossSums, ModelTriple, add_sums, sum_losses, zero_sums
from mooring.advice.evaluation.row_access import UsableRows
from mooring.advice.evaluation.setting_choice import (
    MAX_CHOOSING_CLIENTS,
    Choice,
    choose_settings,
    client_weights,
    list_candidates,
    prior_probabilities,
)
from mooring.core.client_functions import ClientRows
from mooring.core.errors import RequestError
from mooring.core.task import Task
from mooring.data.folds import DEFAULT_FOLDS, FEW_ROWS_FOLDS, MAX_FOLDS, count_folds, iterate_folds, row_clients
from mooring.engines.progress import OnProgress, ignore_progress
from mooring.partial_pooling.client_prior import Prior, select_priors
from mooring.shapes.column_sets import ColumnSets
from mooring.shapes.columns import ShapedColumns
from mooring.tasks.linear import Linear
from mooring.tasks.proximal import MAX_DENSE_PARAMETERS, is_dense

CHOOSING_FOLDS = 1  # in which candidates are compared where fits are slow,
SLOW_FIT_OPERATIONS = 5e7  # rows times squared parameters: thousands of held-out rows are enough to choose by
MIN_CHOOSING_ROWS = 500  # to choose by where fits are slow on few rows, too: nonsmooth losses


FITTED_SETTINGS = "fitted settings"  # key in the cache of rows whose models by setting were stored


class Evidence(NamedTuple):
    """All clients' models, fitted to all rows, and what rows show of them."""

    models: ModelTriple
    held: LossSums  # over held-out rows, with models that have not seen them; 0 rows for clients that do not choose
    own: LossSums  # over all rows, with `models`
    fitted: LossSums | None = None  # over the rows that the folds' models were fitted to; None: not evaluated
    shape: ShapedColumns | None = None  # the extra columns that the models use
    predictions: HeldOutPredictions | None = None  # of held-out rows; None where rows stay with their clients


class SplitRows(NamedTuple):
    """All rows with the columns of all candidates, and the folds of the clients that choose."""

    rows: ClientRows
    choosers: Tensor  # [k], which clients choose; the others follow
    folded: FoldedRows
    shape: ShapedColumns | None


def cross_fit(
    task: Task,
    rows: ClientRows,
    keys: np.ndarray,
    weights: str | Tensor = "size",
    seed: int = 0,
    folds: int | None = None,
    done: Mapping[int, FoldResult] | None = None,
    save: Callable[[int, FoldResult], None] | None = None,
    tell: OnProgress = ignore_progress,
    groups: Tensor | None = None,
    times: Tensor | None = None,
    shaper: Shaper | None = None,
    varying: Tensor | None = None,
    linear_priors: Sequence[Prior] = (),
) -> tuple[Choice, Evidence]:
    """Choose by folds of all rows, evaluate the chosen models on them, and refit to all rows.

    `done` are folds of an interrupted run, and `save(number, fold)` stores a new one. Where fits are slow (very many
    parameters) and `folds` is not given, one fold of five is held out; where they are rather slow, the candidates are
    compared in some folds only. Rows of one of the `groups` [N] are in one fold; with `times` [N] each fold is
    predicted from earlier rows only. With a `shaper` models may use extra columns. Coefficients that are not `varying`
    [d] are the same in all personal models. `linear_priors` are those of all rows and linear columns, if they are
    known.
    """
    tell("estimating how clients vary", 0, 1)
    usable = UsableRows(rows.compact(), groups, times)
    all_rows, choosers, data, shape = split_rows(task, usable, keys, weights, seed, folds, shaper)
    data = data._replace(varying=varying)
    task, sets = data.task, data.sets
    raw = estimate_all_priors(task, all_rows, sets, known=linear_priors)
    priors = combine_priors(task, all_rows, raw, sets, varying)
    near = NearbyPriors(select_priors(priors, choosers), raw)
    settings, proposed = list_candidates(task, data.rows, near.combined, data.weights, int(all_rows.size.sum()), sets)
    if varying is not None:
        settings = restrict_settings(settings, priors)
    belief = prior_probabilities(settings, proposed)
    if varying is not None:
        belief[[k for k, setting in enumerate(settings) if setting.family == LOCAL]] = 0.0
    choosing = count_choosing_folds(task, data.rows, len(data.parts))
    results, compared, losses = fit_folds(data, settings, choosing, near, done or {}, save, tell)
    proposed = [setting for setting in proposed if settings.index(setting) in set(compared)]
    settings, belief = [settings[k] for k in compared], belief[compared]
    choice = choose_settings(task, settings, losses, proposed, near.combined, belief)
    if varying is not None:
        own = {i: setting for i, setting in choice.own.items() if setting.family != LOCAL}
        choice = choice._replace(own=own)
    if usable.times is not None and varying is None and isinstance(task, Linear) and task.intercept:
        weight = torch.tensor([choice.mix.get(setting, 0.0) for setting in settings], dtype=torch.float64)
        choice = choice._replace(latest_share=latest_target_share(data, losses, weight))
    chosen = choice
    choice = choice._replace(own={int(choosers[i]): setting for i, setting in choice.own.items()}, priors=priors)

    held, fitted, predictions = evaluate_folds(data, results, chosen, tell)
    models = fit_triple(task, all_rows, choice, priors, weights, sets)
    own_sums = sum_losses(task, all_rows, models)
    if len(choosers) < len(all_rows):
        held, fitted = (expand_sums(sums, choosers, len(all_rows)) for sums in (held, fitted))
    known = join_predictions(predictions, choosers)
    if known is not None and known.by_model[LOCAL].ndim == 1:
        known = known._replace(new_clients=predict_new_clients(task, all_rows, choice, priors, weights, sets))
    return choice, Evidence(models, held, own_sums, fitted, shape, known)


def split_rows(
    task: Any,
    usable: UsableRows,
    keys: np.ndarray,
    weights: str | Tensor,
    seed: int,
    folds: int | None,
    shaper: Shaper | None,
) -> SplitRows:
    """The rows in folds, of very many clients those of MAX_CHOOSING_CLIENTS, with the extra columns of a `shaper`."""
    all_rows, groups, times = usable
    rows, choosers = all_rows, torch.arange(len(all_rows))
    if len(choosers) > MAX_CHOOSING_CLIENTS:
        choosers = torch.linspace(0, len(all_rows) - 1, MAX_CHOOSING_CLIENTS).long()
        rows = all_rows.select(choosers).compact()
        groups, times = (
            None if part is None else part[torch.isin(row_clients(all_rows), choosers)] for part in (groups, times)
        )
    count = count_task_folds(task, rows, folds, times is not None)
    parts = list(iterate_folds(rows, keys[choosers.numpy()], seed, count, groups, times))
    if not parts:
        raise RequestError("no client has rows of two different times, so none can be predicted from earlier ones.")
    if folds is None and task.dim > MAX_DENSE_PARAMETERS:
        parts = parts[:1]
    shape, sets = None, None
    if shaper is not None:
        few = len(choosers) < len(all_rows)
        few_shaper = replace(shaper, keys=shaper.keys[choosers.numpy()]) if few else shaper

        parts = [few_shaper.split(part, groups) for part in parts]
        shape, all_rows = shaper.fit(all_rows, usable.groups)
        rows = all_rows.select(choosers).compact() if few else all_rows
        task = replace(task, features=shape.width)
        sets = ColumnSets(task, shape)
    few_weights = weights if isinstance(weights, str) else weights[choosers]
    folded = FoldedRows(task, rows, parts, few_weights, keys[choosers.numpy()], seed, sets)
    return SplitRows(all_rows, choosers, folded, shape)


def restrict_settings(settings: list[Setting], priors: Sequence[Prior]) -> list[Setting]:
    """The settings that keep some coefficients the same for all clients, and local models to compare with."""
    if not priors:
        raise RequestError(
            "the formula fixes some coefficients for all clients, which needs a squared, logistic or Poisson loss and "
            "more rows than coefficients; let every term vary, as in (1 + x | client), or choose another task."
        )
    return [setting for setting in settings if setting.family not in (LAMBDA, MIXTURE)]


def expand_sums(sums: LossSums, clients: Tensor, m: int) -> LossSums:
    """Sums of some clients as sums of all m, 0 elsewhere."""
    return LossSums(*(total.index_copy_(0, clients, part) for total, part in zip(zero_sums(m), sums, strict=True)))


def count_task_folds(task: Task, rows: ClientRows, folds: int | None, in_time_order: bool = False) -> int:
    """How many folds: as asked, else by the rows, and fewer where every fit takes iterations."""
    if folds is not None:
        return folds
    most = MAX_FOLDS if isinstance(task, Linear) else FEW_ROWS_FOLDS if is_dense(task) else DEFAULT_FOLDS
    return min(count_folds(rows, in_time_order), most)


def count_choosing_folds(task: Task, rows: ClientRows, folds: int) -> int:
    """In how many of the folds candidates are compared: all of them, unless every candidate takes seconds."""
    total = int(rows.size.sum())
    if isinstance(task, Linear) or (is_dense(task) and total * task.dim**2 <= SLOW_FIT_OPERATIONS):
        return folds
    return (
        CHOOSING_FOLDS
        if is_dense(task)
        else min(folds, max(CHOOSING_FOLDS, -(-MIN_CHOOSING_ROWS * folds // max(total, 1))))
    )


def fit_triple(
    task: Task,
    rows: ClientRows,
    choice: Choice,
    priors: Sequence[Prior],
    weights: str | Tensor,
    sets: ColumnSets | None = None,
) -> ModelTriple:
    """The local, global and personal models of a choice, fitted on these rows."""
    wanted = {choice.local, choice.global_, *choice.mix, *choice.own.values()}
    models = rows.cache.get(FITTED_SETTINGS, {})
    if not wanted <= models.keys():
        fits = fit_settings(task, rows, client_weights(rows, weights), sorted(wanted), priors, sets)
        models = {fit.setting: fit for fit in fits}
    triple = assemble_triple(choice, models)
    if not choice.latest_share:
        return triple
    latest = fit_latest_targets(task, rows)
    local, personal = (torch.lerp(v, latest, choice.latest_share) for v in (triple.local, triple.personal))
    return triple._replace(local=local, personal=personal)


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
    data: FoldedRows, results: list[FoldResult], choice: Choice, tell: OnProgress
) -> tuple[LossSums, LossSums, list[HeldOutPredictions | None]]:
    """What all folds' rows show of the chosen models, fitted without them, what the rows show that they were fitted to,
    and the predictions of the former."""

    def evaluate(k: int) -> list[tuple[LossSums, LossSums, HeldOutPredictions | None]]:
        priors, part = fold_priors(choice.priors, results[k]), data.parts[k]
        models = fit_triple(data.task, part.train, choice, priors, data.weights, data.sets)
        parts = (part.held, part.train)
        sums = (
            sums for (sums,) in data.rows.map_independent(lambda rows: [sum_losses(data.task, rows, models)], parts)
        )
        predictions = predict_held_out(data.task, part.held, models)
        return [(*sums, predictions)]  # type: ignore[list-item]

    out = []
    for (sums,) in data.rows.map_independent(evaluate, range(len(data.parts))):
        out.append(sums)
        tell("evaluating on held-out rows", len(out), len(data.parts))
    held, fitted, predictions = zip(*out)
    return add_sums(held), add_sums(fitted), list(predictions)
