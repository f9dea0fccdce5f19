"""The families of candidates, and the models of a setting, fitted to given rows.

    global     one model for all                               value: its ridge
    local      each client's own model                         value: its ridge, one for all; its intercept may be free
    lambda     pulled with one lam for all                     value: lam
    size       pulled with lam_i = noise_i / (n_i tau^2)       value: a factor on that lam
    diagonal   pulled with lam_ij = noise_i / (n_i tau_j^2)    value: a factor on that lam
    mixture    alpha v_local + (1 - alpha) w_global            value: alpha (APFL's, with both ends exact)

tau and the noise come from the prior (`client_prior.py`), and so does the ridge of the global model inside
pulled families.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import cache
from itertools import chain, groupby
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mooring.core.client_functions import ClientRows
from mooring.core.cohort import Rows
from mooring.core.task import HasColumns, Task, require
from mooring.data.folds import filter_rows, row_clients
from mooring.partial_pooling.client_prior import Prior
from mooring.partial_pooling.end_models import fit_global_model, fit_local_models
from mooring.partial_pooling.lambda_path import (
    PathPoint,
    solve_path,
)
from mooring.shapes.column_sets import ColumnSets
from mooring.shapes.columns import LINEAR
from mooring.tasks.linear import Linear
from mooring.tasks.linear_score import score_linear
from mooring.tasks.proximal import is_dense

GLOBAL, LOCAL, LAMBDA, SIZE, DIAGONAL, MIXTURE = "global", "local", "lambda", "size", "diagonal", "mixture"
INTERCEPT = "intercept"  # pulled as `size`, but only the intercept may differ
TUNED = "tuned"  # networks: the global model after local steps
DITTO, FEDPER, FEDROD = "ditto", "fedper", "fedrod"  # networks: trained by these algorithms
FAMILY_OF_PRIOR = {"scalar": SIZE, "diagonal": DIAGONAL, "intercept": INTERCEPT}
PULLED_FAMILIES = (LAMBDA, SIZE, DIAGONAL, INTERCEPT)


class Setting(NamedTuple):
    family: str
    value: float
    ridge: float = 0.0  # of the global model inside pulled families and mixtures
    own_ridge: float = 0.0  # of the local models inside mixtures
    free: bool = False  # local: the ridge leaves the intercept as it is
    columns: str = LINEAR  # the set of columns that the models use (`column_sets.py`)


class SettingModels(NamedTuple):
    setting: Setting
    w: Tensor  # [d], the global model of this setting
    v: Tensor  # [m, d], what each client gets


def fit_settings(
    task: Task,
    rows: ClientRows,
    p: Tensor,
    settings: Iterable[Setting],
    priors: Iterable[Prior] = (),
    sets: ColumnSets | None = None,
) -> Iterator[SettingModels]:
    """Every setting's models on these rows: first those without a pull, then path by path.

    With column `sets` each setting is fitted on its own columns.
    """
    if sets is None:
        yield from _fit_columns(task, rows, p, list(settings), list(priors))
        return
    by_columns = attrgetter("columns")
    groups = [list(group) for _, group in groupby(sorted(settings, key=by_columns), by_columns)]

    def solve(group: list[Setting]) -> Iterator[SettingModels]:
        name = group[0].columns
        own_priors = [prior for prior in priors if prior.columns == name]
        for fit in _fit_columns(sets.task_on(name), sets.rows_on(rows, name), p, group, own_priors):
            yield SettingModels(fit.setting, sets.embed(name, fit.w), sets.embed(name, fit.v))

    for models in rows.map_independent(solve, groups):
        yield from models


def _fit_columns(
    task: Task, rows: ClientRows, p: Tensor, settings: list[Setting], priors: list[Prior]
) -> Iterator[SettingModels]:
    """The models of settings on the same columns."""
    by_family = {FAMILY_OF_PRIOR[prior.kind]: prior for prior in priors}
    settings = sorted(settings, key=_from_tight_to_slack)
    unpulled = [setting for setting in settings if setting.family not in PULLED_FAMILIES]
    pulled = [setting for setting in settings if setting.family in PULLED_FAMILIES]
    fits = [
        list(group) for _, group in groupby(unpulled, lambda s: s._replace(value=0.0) if s.family == MIXTURE else s)
    ]
    paths = [
        part
        for _, path in groupby(pulled, lambda s: (s.family, s.ridge))
        for part in rows.split_chain(list(path), task.dim**2)
    ]
    chains = [*rows.split_chain(fits, task.dim**2), *rows.split_chain(paths, 1)]
    first = priors[0].start if priors else None

    def solve(groups: list[list[Setting]]) -> Iterator[SettingModels]:
        """The models of a chain of fits or of paths, each from where an earlier one ended."""
        if groups[0][0].family not in PULLED_FAMILIES:
            yield from fit_unpulled(task, rows, p, list(chain.from_iterable(groups)), first)
            return
        start = first
        near: dict[tuple[str, float], PathPoint] = {}
        for group in groups:
            prior = by_family.get(group[0].family)
            shape = None if prior is None else prior.shape(rows.size)
            start = near.get((group[0].family, group[0].value), start)
            points = solve_path(task, rows, p, [s.value for s in group], shape, group[0].ridge, start)
            for setting, point in zip(group, points):
                near[setting.family, setting.value] = start = point
                yield SettingModels(setting, point.w, point.v)

    is_iterated = is_dense(task) and not isinstance(task, Linear)
    with rows.keep_batches() if is_iterated else nullcontext():
        for models in rows.map_independent(solve, filter(None, chains)):
            yield from models


def _from_tight_to_slack(setting: Setting) -> tuple[str, float, float, float]:
    """The order in which each setting is the quickest start of the next of its family."""
    return setting.family, -setting.ridge, -setting.own_ridge, -setting.value


def fit_unpulled(
    task: Task, rows: ClientRows, p: Tensor, settings: list[Setting], start: PathPoint | None = None
) -> Iterator[SettingModels]:
    """Global models, local models, and mixtures of the two."""
    last: dict[str, Tensor] = {}  # where the next of a kind are looked for
    if start is not None:
        last = {GLOBAL: start.w.to(task.dtype), LOCAL: start.v.to(task.dtype)}

    @cache
    def global_model(ridge: float) -> Tensor:
        last[GLOBAL] = fit_global_model(task, rows, p, ridge, last.get(GLOBAL))
        return last[GLOBAL]

    @cache
    def local_models(ridge: float, free: bool = False) -> Tensor:
        last[LOCAL] = fit_local_models(task, rows, ridge, free, last.get(LOCAL))
        return last[LOCAL]

    for setting in settings:
        if setting.family == GLOBAL:
            yield SettingModels(setting, global_model(setting.value), global_model(setting.value).expand(len(rows), -1))
        elif setting.family == LOCAL:
            v = local_models(setting.value, setting.free)
            yield SettingModels(setting, (p.to(v.dtype) / p.sum()) @ v, v)
        else:
            w = global_model(setting.ridge)
            yield SettingModels(setting, w, torch.lerp(w, local_models(setting.own_ridge), setting.value))


def make_offset(task: Task, prior: Prior, ridge: float) -> Callable[[Rows, np.ndarray], np.ndarray]:
    """A function that gives rows the linear scores of personal models that have not seen their fold.

    It takes rows and their folds [N], and returns [N, scores]; the models are pulled as the prior proposes, with the
    clients' typical noise.
    """
    setting, features = Setting(FAMILY_OF_PRIOR[prior.kind], 1.0, ridge), require(task, HasColumns).features

    def score(rows: Rows, fold: np.ndarray) -> np.ndarray:
        out: np.ndarray | None = None
        owner, noise = row_clients(rows), prior.noise.mean().expand(len(rows))
        has_all = prior.models is not None and len(prior.models) == len(rows)  # of very many clients, folds have some
        own_prior = prior._replace(noise=noise, models=prior.models if has_all else None)
        for label in np.unique(fold):
            held = torch.from_numpy(fold == label)
            part = filter_rows(rows, ~held)
            (models,) = fit_settings(task, part, part.size.double(), [setting], [own_prior])
            v = models.v.double()[owner[held]]  # [rows, d]
            z = score_linear(rows.x[held].double(), v, features, task.intercept)
            out = np.zeros((len(owner), z.shape[1])) if out is None else out
            out[held.numpy()] = z.numpy()
        assert out is not None
        return out

    return score
