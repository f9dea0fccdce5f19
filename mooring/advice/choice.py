"""Which plan: chosen on rows that were held out inside the clients (`crossfit.py`).

1. The prior proposes: lam_i (or lam_ij) of empirical Bayes, with the ridge on the common model that does best, is the
   plan unless held-out rows speak against it. Without a prior (kinked losses, very many parameters, networks) the best
   single lam takes its place.
2. Another setting becomes the plan only if its held-out loss is lower by more than 2.5 standard errors of the paired
   difference: noise does not unseat the prior.
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
from mooring.advice.path import SCALES, curvature, is_dense
from mooring.advice.prior import Prior, centre_ridge
from mooring.core.cohort import Rows
from mooring.estimates.facts import RIDGES

FACTORS = (16.0, 4.0, 2.0, 1.0, 0.5, 0.25, 0.0625)  # on the stiffness that the prior proposes
NEAR = (2.0, 1.0, 0.5)
RIDGE_FACTORS = {0.0: NEAR, 1.0: FACTORS, 4.0: NEAR, 16.0: NEAR}  # on the common model's ridge that the prior proposes
ALPHAS = (0.25, 0.5, 0.75)  # 0 and 1 are `common` and `alone`
OWN_RIDGES = RIDGES[::2].tolist()
MIXED_RIDGES = OWN_RIDGES[4:9:2]
COMMON_RIDGES = [0.0, *RIDGES[4:18:4].tolist()]
MOST_CLIENTS = 2_000  # clients that choose the plan; the others follow
TO_SWITCH, TO_LEAVE = 2.5, 3.0  # standard errors that another plan, and choices of clients' own, must win by
SURE = 0.8  # a client leaves the plan only for what is likelier than this


class Choice(NamedTuple):
    plan: Setting
    default: Setting  # what the prior, or the best single lam, proposed
    alone: Setting  # the best of its family, as the plan's referees
    common: Setting
    own: dict[int, Setting]  # client -> where it leaves the plan
    table: pd.DataFrame  # every candidate: family, value, ridge, held-out loss, how much worse than the plan, its error
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
        settings += [Setting(family, f, r * ridge) for r, factors in RIDGE_FACTORS.items() for f in factors]
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


def decide(
    task: Any, settings: list[Setting], loss: Tensor, fold: Tensor, owner: Tensor, clients: int, default: Setting | None
) -> Choice:
    """The choice from held-out losses [settings, N] of so many clients' rows; `fold` splits them for clients' own."""
    mean = loss.double().mean(1)

    def best(*families: str) -> int:
        return min((k for k, s in enumerate(settings) if s.family in families), key=lambda k: float(mean[k]))

    if default is None:
        first = best(LAMBDA)
    else:  # its ridge on the common model is the data's choice; with many rows all of them are next to nothing
        same = [k for k, s in enumerate(settings) if s[:2] == default[:2]]
        first = min(same, key=lambda k: float(mean[k]))
    plan, least = first, int(mean.argmin())
    if float(mean[first] - mean[least]) > TO_SWITCH * error(loss[first] - loss[least]):
        plan = least
    alone, common = best(ALONE), best(COMMON)
    options = list(dict.fromkeys([plan, *family_of(settings, plan), alone, common]))
    own = leavers(loss[options], fold, owner, temperature(task, loss[plan]))
    table = pd.DataFrame([{"family": s.family, "value": s.value, "ridge": s.ridge} for s in settings])
    table["loss"] = mean.numpy()
    table["worse"] = (mean - mean[plan]).numpy()
    table["error"] = [error(row - loss[plan]) for row in loss]
    table["plan"] = np.arange(len(settings)) == plan
    chosen, default, by_itself, one = (settings[k] for k in (plan, first, alone, common))
    mine = {i: settings[options[k]] for i, k in own.items()}
    losses = by_client(loss, owner, clients) / torch.bincount(owner, minlength=clients)[:, None]
    return Choice(chosen, default, by_itself, one, mine, table, None, losses)


def error(difference: Tensor) -> float:
    """The standard error of a mean over rows."""
    return float(difference.double().std() / max(len(difference), 1) ** 0.5) if len(difference) > 1 else float("inf")


def family_of(settings: list[Setting], plan: int) -> list[int]:
    """The settings that differ from the plan in their value only."""
    mine = settings[plan]
    if mine.family in (COMMON, ALONE):
        return [plan]
    return [k for k, s in enumerate(settings) if s._replace(value=0.0) == mine._replace(value=0.0)]


def temperature(task: Any, loss: Tensor) -> float:
    """What a sum of losses is divided by to be a negative log-likelihood."""
    dispersion = 1.0 if task.likelihood else float(loss.mean())
    return max(task.risk_per_loss * dispersion, 1e-12)


def leavers(loss: Tensor, fold: Tensor, owner: Tensor, heat: float) -> dict[int, int]:
    """Which clients leave option 0, the plan, and for which one; loss is [options, N]."""
    clients, folds = int(owner.max()) + 1, int(fold.max()) + 1
    sums = torch.stack([by_client(loss[:, fold == k], owner[fold == k], clients) for k in range(folds)])
    total = sums.sum(0)
    tried = loss[0].clone()
    for k in range(folds):
        pick, here = likely(-(total - sums[k]) / heat), fold == k
        tried[here] = loss[:, here].gather(0, pick[owner[here]][None])[0]
    saved = loss[0] - tried
    if not float(saved.mean()) > TO_LEAVE * error(saved):
        return {}
    return {i: int(k) for i, k in enumerate(likely(-total / heat)) if int(k) != 0}


def by_client(loss: Tensor, owner: Tensor, clients: int) -> Tensor:
    """[clients, options]: sums over rows."""
    return torch.zeros(clients, len(loss), dtype=torch.float64).index_add_(0, owner, loss.T.double())


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
