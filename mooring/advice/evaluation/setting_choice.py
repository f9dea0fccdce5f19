"""Which plan: chosen on rows that were held out inside the clients (`cross_fitting.py`).

1. The prior proposes: lam_i (or lam_ij) of empirical Bayes, with one or another ridge on the global model, has half of
   the belief before any row was held out, all other settings together have the other half.
2. Held-out rows weigh the settings by their likelihoods, and personal models are the weighted average: where rows do
   not tell settings apart, the loss of their average is at most the average of their losses. New clients get the same
   average (`model_average.py`). The heaviest setting is called the plan; reported lambdas are the plan's. Without a
   prior (nonsmooth losses, very many parameters, networks) the best single lam is the plan, or a setting whose held-out
   loss is lower by more than 2.5 standard errors of the paired difference.
3. A client has another setting than the plan only where its own held-out rows make that nearly certain, all clients'
   choices being the prior of each one's (empirical Bayes again), and only if such choices, made on some folds, are
   better on the others by more than three standard errors. For a client of few rows the prior decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from mooring.advice.candidates.families import (
    FAMILY_OF_PRIOR,
    GLOBAL,
    LAMBDA,
    LOCAL,
    MIXTURE,
    Setting,
)
from mooring.advice.evaluation.held_out_losses import HeldOutLosses
from mooring.core.client_functions import ClientRows
from mooring.core.task import Task
from mooring.core.types import NamedValues
from mooring.estimates.client_statistics import RIDGE_GRID
from mooring.partial_pooling.client_prior import Prior, estimate_global_ridge
from mooring.partial_pooling.end_models import has_free_intercept
from mooring.partial_pooling.lambda_path import LAMBDA_SCALES, initial_curvature
from mooring.shapes.column_sets import ColumnSets, on_columns
from mooring.shapes.columns import LINEAR
from mooring.tasks.linear import Linear
from mooring.tasks.proximal import is_dense

PRIOR_FACTORS = (16.0, 4.0, 2.0, 1.0, 0.5, 0.25, 0.0625)  # on the lambda that the prior proposes
NEARBY_FACTORS, SINGLE_FACTOR = (2.0, 1.0, 0.5), (1.0,)
RIDGE_FACTORS = {
    0.0: NEARBY_FACTORS,
    1.0: PRIOR_FACTORS,
    4.0: NEARBY_FACTORS,
    16.0: NEARBY_FACTORS,
}  # on the global model's ridge that the prior proposes
COARSE_RIDGE_FACTORS = {1.0: (4.0, 1.0, 0.25), 4.0: SINGLE_FACTOR, 16.0: SINGLE_FACTOR}  # where fits take iterations
MIN_RIDGE_CURVATURE_SHARE = 3e-4  # a smaller ridge on the global model changes nothing: no others are tried
ALPHAS = (0.25, 0.5, 0.75)  # 0 and 1 are the global and the local model
LOCAL_RIDGES = RIDGE_GRID[::2].tolist()
MIXTURE_RIDGES = LOCAL_RIDGES[4:9:2]
GLOBAL_RIDGES = [0.0, *RIDGE_GRID[4:18:4].tolist()]
MAX_CHOOSING_CLIENTS = 2_000  # clients that choose the plan; the others follow
SWITCH_STANDARD_ERRORS, EXCEPTION_STANDARD_ERRORS = 2.5, 3.0  # by which another plan, and exceptions, must be better
PROPOSED_PROBABILITY = 0.5  # in what the prior proposes, before any row was held out
MIN_WEIGHT = 0.01  # of a setting in the average: less is left out, and need not be fitted again
MIN_EXCEPTION_PROBABILITY = 0.8  # that another setting than the plan is the right one of a client


class Choice(NamedTuple):
    plan: Setting  # the heaviest in the mix
    mix: dict[Setting, float]  # settings and their weights: personal models are the average of their models
    default: Setting  # what the prior, or the best single lam, proposed
    local: Setting  # the best of its family
    global_: Setting
    own: dict[int, Setting]  # client -> its setting, where that is not the plan
    table: pd.DataFrame  # of every candidate its numbers, held-out loss, how much worse than the plan, error, weight
    priors: list[Prior]  # the preferred one first
    losses: Tensor  # [clients, candidates], mean held-out losses; nan without rows
    latest_share: float = 0.0  # of each client's latest target in its local and personal models (`latest_target.py`)
    local_training: NamedValues = {}  # of networks: step size, batch and the like, given or chosen


def list_candidates(
    task: Task,
    rows: ClientRows,
    priors: Sequence[Prior],
    weights: str | Tensor,
    total: int,
    sets: ColumnSets | None = None,
) -> tuple[list[Setting], list[Setting]]:
    """All settings to compare, and those that the priors propose; of further column `sets` a part of them."""

    def list_on(name: str) -> list[list[Setting]]:
        own_priors = [prior for prior in priors if prior.columns == name]
        at = on_columns(task, rows, sets, name)
        lists = _settings_on(at.task, at.rows, own_priors, weights, total, few=name != LINEAR)
        return [[setting._replace(columns=name) for setting in part] for part in lists]

    settings: list[Setting] = []
    proposed: list[Setting] = []
    for own_settings, own_proposed in rows.map_independent(list_on, [LINEAR] if sets is None else sets.names()):
        settings += own_settings
        proposed += own_proposed
    return settings, proposed


def _settings_on(
    task: Task, rows: ClientRows, priors: Sequence[Prior], weights: str | Tensor, total: int, few: bool
) -> tuple[list[Setting], list[Setting]]:
    """The settings of one set of columns: a fine grid where fits are a matrix product, coarser ones otherwise, and
    `few` on extra columns."""
    unit = initial_curvature(task, rows, client_weights(rows, weights))
    ridge = estimate_global_ridge(task, priors[0], total) if priors else 0.0
    cheap, step = is_dense(task), (1 if isinstance(task, Linear) else 2) * (2 if few else 1)
    settings = [Setting(GLOBAL, r) for r in (GLOBAL_RIDGES[::step] if cheap else GLOBAL_RIDGES[:1])]
    if not few:
        settings += [Setting(LOCAL, r) for r in (LOCAL_RIDGES[::step] if cheap else MIXTURE_RIDGES)]
    settings += [Setting(LOCAL, r, free=True) for r in (LOCAL_RIDGES[::step] if has_free_intercept(task) else ())]
    settings += [Setting(LAMBDA, float(s) * unit, ridge) for s in LAMBDA_SCALES[:: 2 * step]]
    proposed = []
    for k, prior in enumerate(priors):
        own_ridge = estimate_global_ridge(task, prior, total)
        grid = RIDGE_FACTORS if isinstance(task, Linear) and not few and k == 0 else COARSE_RIDGE_FACTORS
        ridges = grid if own_ridge >= MIN_RIDGE_CURVATURE_SHARE * unit else {1.0: grid[1.0]}
        pulled = [
            Setting(FAMILY_OF_PRIOR[prior.kind], f, r * own_ridge) for r, factors in ridges.items() for f in factors
        ]
        settings += pulled
        proposed += [setting for setting in pulled if setting.value == 1.0]
    if not few:
        settings += [Setting(MIXTURE, a, ridge, r) for r in MIXTURE_RIDGES[:: min(step, 2)] for a in ALPHAS]
    return settings, proposed


def client_weights(rows: ClientRows, weights: str | Tensor) -> Tensor:
    """The weights of clients with these rows, up to a factor; who has none counts for nothing."""
    if isinstance(weights, Tensor):
        return torch.where(rows.size > 0, weights, 0.0)
    return rows.size.double() if weights == "size" else (rows.size > 0).double()


def choose_settings(
    task: Task,
    settings: list[Setting],
    losses: HeldOutLosses,
    proposed: Sequence[Setting],
    priors: Sequence[Prior] = (),
    belief: Tensor | None = None,
) -> Choice:
    """The choice from held-out losses; their folds split the rows for the clients' own choices.

    `proposed` are the settings of the priors, or the default unless another is clearly better. `belief` [settings]
    is that before any row was held out, where `settings` are only a part of those that were tried.
    """
    rows = int(losses.count.sum())
    mean = losses.sums.sum((0, 1)) / rows
    scale = mean_dispersion(task, priors)

    def best_of(*families: str) -> int:
        return min((k for k, s in enumerate(settings) if s.family in families), key=lambda k: float(mean[k]))

    def pairs_with(setting: int, others: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Pairs [pairs, folds, m] of other settings with one."""
        first = torch.tensor(others)[:, None, None].expand(-1, *losses.count.shape)
        return first, torch.full_like(first, setting)

    places = [settings.index(setting) for setting in proposed]
    default = min(places, key=lambda k: float(mean[k])) if places else best_of(LAMBDA)
    if priors:
        belief = prior_probabilities(settings, proposed) if belief is None else belief
        weight = posterior_weights(losses, belief, loss_temperature(task, float(mean[default]), scale))
        plan = int(weight.argmax())
    else:
        plan, least = default, int(mean.argmin())
        error = standard_error(rows, *losses.apart(*pairs_with(least, [default])))
        if float(mean[default] - mean[least]) > SWITCH_STANDARD_ERRORS * float(error[0]):
            plan = least
        weight = (torch.arange(len(settings)) == plan).double()
    local, global_ = best_of(LOCAL), best_of(GLOBAL)
    options = list(dict.fromkeys([plan, *same_family_indices(settings, plan), local, global_]))
    heat = loss_temperature(task, float(mean[plan]), scale)
    to_plan, to_exceptions = pairs_with(plan, range(len(settings))), exception_pairs(losses, options, heat)
    gaps = losses.apart(*(torch.cat(pair) for pair in zip(to_plan, to_exceptions)))
    errors, last = standard_error(rows, *gaps), [float(part[-1]) for part in gaps]
    exception_indices = choose_exceptions(losses, options, heat, *last)
    table = pd.DataFrame(
        [{"family": s.family, "columns": s.columns, "value": s.value, "ridge": s.ridge} for s in settings]
    )
    table["loss"] = mean.numpy()
    table["worse"] = (mean - mean[plan]).numpy()
    table["error"] = errors[:-1].numpy()
    table["plan"] = np.arange(len(settings)) == plan
    table["weight"] = weight.numpy()
    mix = {settings[k]: float(weight[k]) for k in torch.nonzero(weight)[:, 0].tolist()}
    exceptions = {i: settings[options[k]] for i, k in exception_indices.items()}
    seen = losses.sums.sum(0) / losses.count.sum(0)[:, None]
    chosen = (settings[plan], mix, settings[default], settings[local], settings[global_])
    return Choice(*chosen, exceptions, table, list(priors), seen)


def prior_probabilities(settings: list[Setting], proposed: Sequence[Setting]) -> Tensor:
    """[settings]: before any row was held out. The proposed ones share PROPOSED_PROBABILITY, the others 1 less it."""
    is_proposed = torch.tensor([setting in proposed for setting in settings])
    other = (1 - PROPOSED_PROBABILITY) / max(len(settings) - int(is_proposed.sum()), 1)
    return torch.where(is_proposed, PROPOSED_PROBABILITY / max(int(is_proposed.sum()), 1), other).double()


def posterior_weights(losses: HeldOutLosses, belief: Tensor, heat: float) -> Tensor:
    """[settings]: their weights after held-out rows, by their `belief` before; `heat` turns losses into
    log-likelihoods."""
    sums, best = losses.sums.sum((0, 1)), int(losses.sums.sum((0, 1)).argmin())
    first = torch.arange(len(sums))[:, None, None].expand(-1, *losses.count.shape)
    total, square = losses.apart(first, torch.full_like(first, best))
    deficit = log_likelihood_deficits(total, square, int(losses.count.sum()), heat)
    weight = torch.softmax(belief.log() - deficit, 0)
    weight = torch.where(weight < MIN_WEIGHT, 0.0, weight)
    return weight / weight.sum()


def log_likelihood_deficits(total: Tensor, square: Tensor, rows: int, heat: float) -> Tensor:
    """[settings]: log-likelihoods by which settings are behind the best one, from sums of the differences of losses
    and of their squares.

    At most twice the squared number of standard errors: of a likelihood that is right both are alike, and where a few
    rows have very large losses the sum of these shows little.
    """
    variance = (square - total**2 / max(rows, 1)).clamp(min=torch.finfo(total.dtype).tiny)
    return torch.minimum(total / heat, 2 * total**2 / variance).clamp(min=0)


def standard_error(rows: int, total: Tensor, square: Tensor) -> Tensor:
    """The standard error of a mean over rows, from the sum and the sum of squares."""
    if rows < 2:
        return torch.full_like(total, torch.inf)
    return ((square - total**2 / rows).clamp(min=0) / (rows - 1) / rows).sqrt()


def same_family_indices(settings: list[Setting], plan: int) -> list[int]:
    """The settings that differ from the plan in their value only."""
    setting = settings[plan]
    if setting.family in (GLOBAL, LOCAL):
        return [plan]
    return [k for k, s in enumerate(settings) if s._replace(value=0.0) == setting._replace(value=0.0)]


def mean_dispersion(task: Task, priors: Sequence[Prior]) -> float:
    """How much more targets vary than the likelihood implies."""
    return float(priors[0].noise.mean()) if priors and task.overdispersed else 1.0


def loss_temperature(task: Task, loss: float, dispersion: float = 1.0) -> float:
    """What a sum of losses, `loss` on average, is divided by to be a negative log-likelihood."""
    return max(task.risk_per_loss * (dispersion if task.likelihood else loss), 1e-12)


def exception_pairs(losses: HeldOutLosses, options: list[int], heat: float) -> tuple[Tensor, Tensor]:
    """One pair [1, folds, m] of settings: the plan, and what each client's other folds prefer among `options`."""
    sums, which = losses.sums[..., options], torch.tensor(options)
    total = sums.sum(0)
    pick = torch.stack([most_likely_options(-(total - sums[k]) / heat) for k in range(len(sums))])
    return which[torch.zeros_like(pick)][None], which[pick][None]


def choose_exceptions(
    losses: HeldOutLosses, options: list[int], heat: float, saved: float, square: float
) -> dict[int, int]:
    """Which clients have another setting than the first one, the plan: its index among `options` by client.

    `saved` and `square` are how far the losses of `exception_pairs` are apart.
    """
    rows = int(losses.count.sum())
    error = standard_error(rows, torch.tensor(saved).double(), torch.tensor(square).double())
    if not saved / rows > EXCEPTION_STANDARD_ERRORS * float(error):
        return {}
    total = losses.sums[..., options].sum(0)
    return {i: int(k) for i, k in enumerate(most_likely_options(-total / heat)) if int(k) != 0}


def most_likely_options(score: Tensor, rounds: int = 50) -> Tensor:
    """[clients]: the option of each client, 0 (the plan) unless another is likelier than SURE.

    score is [clients, options], log-likelihoods. The options' shares over all clients are fitted by EM, from a start
    and with a prior at which half of the clients keep the plan; less than half is never assumed, so that a client whose
    own rows do not decide keeps it, whatever the others do.
    """
    options = score.shape[1]
    start = torch.full((options,), 0.5 / max(options - 1, 1), dtype=score.dtype)
    start[0] = 0.5 if options > 1 else 1.0
    share = start
    for _ in range(rounds):
        posterior = torch.softmax(score + share.log(), 1)
        share = (posterior.sum(0) + options * start) / (len(score) + options)
        if float(share[0]) < float(start[0]):
            share = torch.cat([start[:1], 0.5 * share[1:] / share[1:].sum()])
    top = posterior.max(1)
    return torch.where(top.values > MIN_EXCEPTION_PROBABILITY, top.indices, 0)
