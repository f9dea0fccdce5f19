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
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mooring.advice.candidates.column_sets import ColumnSets
from mooring.core.client_functions import ClientRows
from mooring.core.cohort import HasSummary, Rows
from mooring.core.task import HasColumns, HasProx, Task, require
from mooring.data.folds import filter_rows, row_clients
from mooring.partial_pooling.client_fits import fit_ridge
from mooring.partial_pooling.client_prior import Prior
from mooring.partial_pooling.lambda_path import (
    MAX_CLIENTS_PER_BLOCK,
    PathPoint,
    cached_moments,
    eigen_moments,
    minimize_global_loss,
    ridge_mask,
    solve_path,
)
from mooring.shapes.columns import LINEAR
from mooring.tasks.linear import Linear
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
    groups = [list(group) for _, group in groupby(sorted(settings, key=_by_columns), _by_columns)]

    def solve(group: list[Setting]) -> Iterator[SettingModels]:
        name = group[0].columns
        own_priors = [prior for prior in priors if prior.columns == name]
        for fit in _fit_columns(sets.task_on(name), sets.rows_on(rows, name), p, group, own_priors):
            yield SettingModels(fit.setting, sets.embed(name, fit.w), sets.embed(name, fit.v))

    for models in rows.map_independent(solve, groups):
        yield from models


def _by_columns(setting: Setting) -> str:
    return setting.columns


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


def fit_global_model(task: Task, rows: ClientRows, p: Tensor, ridge: float, start: Tensor | None = None) -> Tensor:
    """[d]: one model for all rows, client i's rows weighing p_i; `start` is where iterations begin."""
    if isinstance(task, Linear) or not is_dense(task):
        return next(solve_path(task, rows, p, [torch.inf], ridge=ridge)).w
    return minimize_global_loss(task, rows, p, ridge * ridge_mask(task), start)


def fit_local_models(
    task: Task, rows: ClientRows, ridge: float, free: bool = False, start: Tensor | None = None
) -> Tensor:
    """[m, d]: local models with a ridge, which leaves the intercept out if `free`; a client without rows gets 0.

    `start` [m, d] is where iterations begin.
    """
    out = torch.zeros(len(rows), task.dim, dtype=task.dtype)
    if isinstance(task, Linear) and len(rows) > MAX_CLIENTS_PER_BLOCK and ridge > 0:
        for block in torch.arange(len(rows)).split(MAX_CLIENTS_PER_BLOCK):
            some = rows.select(block)
            h, moment, *means = centered_moments(task, some) if free else cached_moments(task, some)
            fit = torch.linalg.solve(h + ridge * torch.eye(h.shape[-1], dtype=h.dtype), moment)
            out[block] = (append_intercept(fit, *means) if free else fit).to(task.dtype)
        return out
    if isinstance(task, Linear) and free:
        return fit_centered_models(task, rows, ridge)
    if isinstance(task, Linear) and ridge > 0:
        e, u, _, moment = eigen_moments(task, rows, None)
        return (u @ (moment / (e + ridge))[..., None])[..., 0].to(task.dtype)
    if isinstance(task, HasSummary):
        return (
            require(task, HasProx)
            .prox(torch.zeros(1, task.dim, dtype=task.dtype), ridge, rows.full(task))
            .to(task.dtype)
        )
    pull = ridge * ridge_mask(task) if free else torch.tensor(ridge, dtype=task.dtype)
    return fit_ridge(task, rows, out if start is None else start, pull=pull)


def fit_centered_models(task: Linear, rows: ClientRows, ridge: float) -> Tensor:
    """[m, d]: ridge regression on centered rows, then the intercept; one eigendecomposition serves all ridges."""
    name = ("centred", task)
    if name not in rows.cache:
        spread, *others = centered_moments(task, rows)
        rows.cache[name] = (*torch.linalg.eigh(spread), *others)
    values, vectors, cross, mean, target = rows.cache[name]
    inverse = 1 / (values.clamp(min=0) + ridge)
    slopes = (vectors @ (inverse * (vectors.mT @ cross[..., None])[..., 0])[..., None])[..., 0]
    return append_intercept(slopes, mean, target).to(task.dtype)


def centered_moments(task: Linear, rows: ClientRows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Covariances of x [m, d-1, d-1] and with y [m, d-1], means of x [m, d-1] and of y [m]."""
    h, moment = cached_moments(task, rows)
    mean, target = h[:, :-1, -1], moment[:, -1]
    return h[:, :-1, :-1] - mean[..., None] * mean[:, None], moment[:, :-1] - mean * target[:, None], mean, target


def append_intercept(slopes: Tensor, mean: Tensor, target: Tensor) -> Tensor:
    return torch.cat([slopes, (target - (mean * slopes).sum(1))[:, None]], 1)


def has_free_intercept(task: Task) -> bool:
    """Whether local models come with and without a ridge on the intercept."""
    return bool(getattr(task, "intercept", False)) and is_dense(task) and not (isinstance(task, Linear) and task.ridge)


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


def score_linear(x: Tensor, v: Tensor, features: int, has_intercept: bool) -> Tensor:
    """[N, K]: the scores of rows x [N, features] by models [N, d], each row's own."""
    slopes = v[:, : v.shape[1] - v.shape[1] // (features + 1) if has_intercept else None]
    z = torch.einsum("nf,nfk->nk", x, slopes.reshape(len(v), features, -1))
    return z + v[:, slopes.shape[1] :] if has_intercept else z
