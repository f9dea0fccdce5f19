"""Which plan: chosen on rows that were held out inside the clients (`crossfit.py`).

1. The prior proposes: lam_i (or lam_ij) of empirical Bayes, with one or another ridge on the common model, has half of
   the belief before any row was held out, all other settings together have the other half.
2. Held-out rows weigh the settings by their likelihoods, and everyone's model is the weighted average: where rows
   cannot tell settings apart, their average loses less than the one that happens to look best (its loss is at most the
   average of theirs). Newcomers get the same average (`mix.py`). The heaviest setting is called the plan: what is told
   of stiffness is its. Without a prior (kinked losses, very many parameters, networks, whose average is none of them)
   the best single lam is the plan, or a setting whose held-out loss is lower by more than 2.5 standard errors of the
   paired difference.
3. A client leaves the shared plan (looser, tighter, alone, common) only where its own held-out rows make that nearly
   sure, all clients' choices together being the prior of each one's (empirical Bayes again), and only if such choices,
   made on some folds, pay on the others by more than three standard errors. A client of few rows cannot: for it the
   prior decides.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from mooring.advice.families import ALONE, COMMON, LAMBDA, MIXTURE, OF_PRIOR, Setting, has_free_intercept
from mooring.advice.losses import Losses
from mooring.advice.path import SCALES, curvature, is_dense
from mooring.advice.prior import Prior, centre_ridge
from mooring.core.cohort import Rows
from mooring.estimates.facts import RIDGES

FACTORS = (16.0, 4.0, 2.0, 1.0, 0.5, 0.25, 0.0625)  # on the stiffness that the prior proposes
NEAR = (2.0, 1.0, 0.5)
RIDGE_FACTORS = {0.0: NEAR, 1.0: FACTORS, 4.0: NEAR, 16.0: NEAR}  # on the common model's ridge that the prior proposes
NO_RIDGE = 3e-4  # a ridge on the common model so far below the curvature changes nothing: no others are tried
ALPHAS = (0.25, 0.5, 0.75)  # 0 and 1 are `common` and `alone`
OWN_RIDGES = RIDGES[::2].tolist()
MIXED_RIDGES = OWN_RIDGES[4:9:2]
COMMON_RIDGES = [0.0, *RIDGES[4:18:4].tolist()]
MOST_CLIENTS = 2_000  # clients that choose the plan; the others follow
TO_SWITCH, TO_LEAVE = 2.5, 3.0  # standard errors that another plan, and choices of clients' own, must win by
BELIEF = 0.5  # in what the prior proposes, before any row was held out
LEAST_WEIGHT = 0.01  # of a setting in the average: less is left out, and need not be fitted again
SURE = 0.8  # a client leaves the plan only for what is likelier than this


class Choice(NamedTuple):
    plan: Setting  # the heaviest in the mix
    mix: dict[Setting, float]  # settings and their weights: the average of their models is everyone's
    default: Setting  # what the prior, or the best single lam, proposed
    alone: Setting  # the best of its family, as the plan's referees
    common: Setting
    own: dict[int, Setting]  # client -> where it leaves the plan
    table: pd.DataFrame  # of every candidate its numbers, held-out loss, how much worse than the plan, error, weight
    prior: Prior | None
    losses: Tensor  # [clients, candidates], mean held-out losses; nan without rows


def candidates(
    task: Any, rows: Rows, prior: Prior | None, weights: str | Tensor, total: int
) -> tuple[list[Setting], Setting | None]:
    """All settings to compare, and the prior's own."""
    unit = curvature(task, rows, weights_of(rows, weights))
    ridge = 0.0 if prior is None else centre_ridge(task, prior, total)
    cheap = is_dense(task)
    settings = [Setting(COMMON, r) for r in (COMMON_RIDGES if cheap else COMMON_RIDGES[:1])]
    settings += [Setting(ALONE, r) for r in (OWN_RIDGES if cheap else MIXED_RIDGES)]
    settings += [Setting(ALONE, r, free=True) for r in (OWN_RIDGES if has_free_intercept(task) else ())]
    settings += [Setting(LAMBDA, float(s) * unit, ridge) for s in SCALES[::2]]
    default = None
    if prior is not None:
        family = OF_PRIOR[prior.kind]
        ridges = RIDGE_FACTORS if ridge >= NO_RIDGE * unit else {1.0: FACTORS}
        settings += [Setting(family, f, r * ridge) for r, factors in ridges.items() for f in factors]
        default = Setting(family, 1.0, ridge)
    settings += [Setting(MIXTURE, a, ridge, r) for r in MIXED_RIDGES for a in ALPHAS]
    return settings, default


def prior_of(prior: Prior | None, asked: Tensor) -> list[Prior]:
    """The prior for some of the clients."""
    return [] if prior is None else [prior._replace(noise=prior.noise[asked])]


def weights_of(rows: Rows, weights: str | Tensor) -> Tensor:
    """The weights of clients with these rows, up to a factor; who has none counts for nothing."""
    if isinstance(weights, Tensor):
        return torch.where(rows.size > 0, weights, 0.0)
    return rows.size.double() if weights == "size" else (rows.size > 0).double()


def decide(task: Any, settings: list[Setting], losses: Losses, default: Setting | None) -> Choice:
    """The choice from held-out losses; their folds split the rows for the clients' own choices."""
    rows = int(losses.count.sum())
    mean = losses.sums.sum((0, 1)) / rows

    def best(*families: str) -> int:
        return min((k for k, s in enumerate(settings) if s.family in families), key=lambda k: float(mean[k]))

    def errors(pairs: list[tuple[int, int]]) -> list[float]:
        """Standard errors of the mean differences over rows."""
        first, second = (torch.tensor(side)[:, None, None].expand(-1, *losses.count.shape) for side in zip(*pairs))
        return [float(one) for one in error(rows, *losses.apart(first, second))]

    if default is None:
        first = best(LAMBDA)
    else:  # its ridge on the common model is the data's choice; with many rows all of them are next to nothing
        same = [k for k, s in enumerate(settings) if s[:2] == default[:2]]
        first = min(same, key=lambda k: float(mean[k]))
    if default is not None and default.family in OF_PRIOR.values():
        weight = weights_of_settings(losses, same, temperature(task, float(mean[first])))
        plan = int(weight.argmax())
    else:
        plan, least = first, int(mean.argmin())
        if float(mean[first] - mean[least]) > TO_SWITCH * errors([(first, least)])[0]:
            plan = least
        weight = (torch.arange(len(settings)) == plan).double()
    alone, common = best(ALONE), best(COMMON)
    options = list(dict.fromkeys([plan, *family_of(settings, plan), alone, common]))
    own = leavers(losses, options, temperature(task, float(mean[plan])))
    table = pd.DataFrame([{"family": s.family, "value": s.value, "ridge": s.ridge} for s in settings])
    table["loss"] = mean.numpy()
    table["worse"] = (mean - mean[plan]).numpy()
    table["error"] = errors([(k, plan) for k in range(len(settings))])
    table["plan"] = np.arange(len(settings)) == plan
    table["weight"] = weight.numpy()
    mix = {settings[k]: float(weight[k]) for k in torch.nonzero(weight)[:, 0].tolist()}
    chosen, default, by_itself, one = (settings[k] for k in (plan, first, alone, common))
    mine = {i: settings[options[k]] for i, k in own.items()}
    seen = losses.sums.sum(0) / losses.count.sum(0)[:, None]
    return Choice(chosen, mix, default, by_itself, one, mine, table, None, seen)


def weights_of_settings(losses: Losses, proposed: list[int], heat: float) -> Tensor:
    """[settings]: their weights after held-out rows; `heat` turns losses into log-likelihoods.

    Before, the proposed ones share BELIEF evenly, and the others the rest.
    """
    score = -losses.sums.sum((0, 1)) / heat
    belief = torch.full_like(score, (1 - BELIEF) / max(len(score) - len(proposed), 1))
    belief[proposed] = BELIEF / len(proposed)
    weight = torch.softmax(score + belief.log(), 0)
    weight = torch.where(weight < LEAST_WEIGHT, 0.0, weight)
    return weight / weight.sum()


def error(rows: int, total: Tensor, square: Tensor) -> Tensor:
    """The standard error of a mean over rows, from the sum and the sum of squares."""
    if rows < 2:
        return torch.full_like(total, torch.inf)
    return ((square - total**2 / rows).clamp(min=0) / (rows - 1) / rows).sqrt()


def family_of(settings: list[Setting], plan: int) -> list[int]:
    """The settings that differ from the plan in their value only."""
    mine = settings[plan]
    if mine.family in (COMMON, ALONE):
        return [plan]
    return [k for k, s in enumerate(settings) if s._replace(value=0.0) == mine._replace(value=0.0)]


def temperature(task: Any, loss: float) -> float:
    """What a sum of losses, `loss` on average, is divided by to be a negative log-likelihood."""
    return max(task.risk_per_loss * (1.0 if task.likelihood else loss), 1e-12)


def leavers(losses: Losses, options: list[int], heat: float) -> dict[int, int]:
    """Which clients leave the first of some settings, the plan, and for which one, by its place among them."""
    sums, rows = losses.sums[..., options], int(losses.count.sum())
    total, which = sums.sum(0), torch.tensor(options)
    pick = torch.stack([likely(-(total - sums[k]) / heat) for k in range(len(sums))])  # from the other folds
    saved, square = losses.apart(which[torch.zeros_like(pick)][None], which[pick][None])
    if not float(saved) / rows > TO_LEAVE * float(error(rows, saved, square)):
        return {}
    return {i: int(k) for i, k in enumerate(likely(-total / heat)) if int(k) != 0}


def likely(score: Tensor, rounds: int = 50) -> Tensor:
    """[clients]: the option of each client, 0 (the plan) unless another is likelier than SURE.

    score is [clients, options], log-likelihoods. The options' shares over all clients are fitted by EM, from a start
    and with a prior at which half of the clients keep the plan; less than half is never assumed, so that a client whose
    own rows cannot tell keeps it, whatever the others do.
    """
    options = score.shape[1]
    start = torch.full((options,), 0.5 / max(options - 1, 1), dtype=score.dtype)
    start[0] = 0.5 if options > 1 else 1.0
    share = start
    for _ in range(rounds):
        post = torch.softmax(score + share.log(), 1)
        share = (post.sum(0) + options * start) / (len(score) + options)
        if float(share[0]) < float(start[0]):
            share = torch.cat([start[:1], 0.5 * share[1:] / share[1:].sum()])
    top = post.max(1)
    return torch.where(top.values > SURE, top.indices, 0)
