"""How much the clients' coefficients vary: the empirical-Bayes prior that proposes each client's stiffness.

    v_i ~ N(w, diag(tau^2))   ->   lam_ij = noise_i / (n_i tau_j^2)

The estimates are those of `estimates/task_random_effects.py`, which settings such as lam = "auto" use as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mooring.advice.candidates.column_sets import LINEAR
from mooring.advice.candidates.lambda_path import PullShape, ridge_mask
from mooring.core.client_functions import ClientRows
from mooring.estimates.random_effects import RandomEffects, deviance_gain
from mooring.estimates.task_random_effects import SampledRandomEffects, available_forms, estimate_random_effects

SPREAD_DEVIANCE = 4.0  # deviance that a spread must win
DIAGONAL_DEVIANCE, FURTHER_SPREAD_DEVIANCE = (
    2.0,
    1.5,
)  # deviance that one spread per coefficient must win, and each further one
MIN_DIAGONAL_WEIGHT = 0.05  # weight below which the richer kind is left out


class Prior(NamedTuple):
    kind: str  # "scalar": one spread for all coefficients, "diagonal": one each, "intercept": the intercept's alone
    variance: Tensor  # [d], tau^2
    noise: Tensor  # [m]
    spread: RandomEffects  # the whole estimate, of the clients it was made from
    clients: Tensor  # [k], who they are
    columns: str = LINEAR  # the set of columns that it is of (`column_sets.py`)
    law: Any = None  # how the clients' noises vary (`noise.NoiseLaw`); None: they have the same

    def shape(self, n: Tensor) -> PullShape:
        """The stiffness that this prior proposes, at scale 1."""
        return PullShape(self.noise / n.double().clamp(min=1), self.variance)


def estimate_priors(task: Any, rows: ClientRows, near: Sequence[Prior] = ()) -> list[Prior]:
    """Both kinds, the simpler first; none where the task has no Hessian or the rows are too few.

    Of very many coefficients (features of a kernel) only the simpler one. Approximations start from `near`, the priors
    of much the same rows.
    """
    known = {prior.kind: prior.spread for prior in near}

    def of_kind(kind: Any) -> list[SampledRandomEffects | None]:
        return [estimate_random_effects(task, rows, kind, known.get(kind))]

    told = []
    for (found,) in rows.map_independent(of_kind, available_forms(task)):
        if found is None:
            break
        told.append(found)
    return make_priors(told, len(rows))


def make_priors(told: list[SampledRandomEffects], m: int) -> list[Prior]:
    """The priors behind estimated spreads, for m clients; those that were not asked have the others' mean noise."""
    out = []
    for spread, asked in told:
        noise = torch.full((m,), float(spread.noise.mean()), dtype=torch.float64)
        noise[asked] = spread.noise
        out.append(Prior(spread.form, spread.variance, noise, spread, asked))
    return out


def average_kinds(found: list[Prior]) -> list[Prior]:
    """No spread, one for all coefficients, or one each: their mean, weighed by how well each fits; then the
    intercept's alone, where it was estimated.

    Estimates of a spread are above 0 half of the time when there is none; their weight then keeps the harm small.
    """
    if not found:
        return []
    simple, rich, intercept = split_kinds(found)
    _, one, each = kind_weights(found)
    share = each / max(one + each, 1e-300)
    if share < MIN_DIAGONAL_WEIGHT:
        first = simple._replace(variance=(one + each) * simple.variance)
    else:
        first = (rich if share > 0.5 else simple)._replace(
            kind=rich.kind,
            variance=one * simple.variance + each * rich.variance,
            noise=(1 - share) * simple.noise + share * rich.noise,
        )
    return [first] if intercept is None else [first, intercept]


def split_kinds(found: list[Prior]) -> tuple[Prior, Prior, Prior | None]:
    """The simplest prior, the richest of the others (or the same), and that of the intercept alone."""
    kinds = {prior.kind: prior for prior in found}
    return kinds["scalar"], kinds.get("diagonal", kinds["scalar"]), kinds.get("intercept")


def kind_weights(found: list[Prior]) -> tuple[float, float, float]:
    """The weights of no spread, of one for all coefficients and of one each, by their likelihoods.

    To have a spread at all costs ENTRY of the deviance; to have one each costs EACH and FURTHER for every further
    spread above 0: at 0 they are free, unless the likelihood is an approximation, which knows a 0 from a little only
    roughly.
    """
    simple, rich, _ = split_kinds(found)
    gain, more = deviance_gain(simple.spread) - SPREAD_DEVIANCE, -torch.inf
    if rich is not simple:
        free = int((rich.variance > 0).sum()) if rich.spread.data.rows is not None else len(rich.variance)
        further = free - int((simple.variance > 0).any())
        more = (
            simple.spread.deviance
            - rich.spread.deviance
            - DIAGONAL_DEVIANCE
            - FURTHER_SPREAD_DEVIANCE * max(further, 0)
        )
    # A deviance that ran out of numbers speaks for nothing.
    gain, more = gain if isfinite(gain) else 0.0, more if isfinite(more) else -torch.inf
    none, one, each = torch.softmax(torch.tensor([0.0, gain / 2, (gain + more) / 2], dtype=torch.float64), 0).tolist()
    return none, one, each


def positive_variance(found: list[Prior]) -> Tensor:
    """[d]: the spread that a posterior takes for its unit: not weighed down by the chance that there is none.

    Where one spread for all is estimated as 0, its standard error stands in: 0 is an estimate, too.
    """
    simple, rich, _ = split_kinds(found)
    _, one, each = kind_weights(found)
    share = each / max(one + each, 1e-300)
    least = simple.spread.variance_cov[0, 0].clamp(min=0).sqrt()
    plain = torch.where(torch.isfinite(least), torch.maximum(simple.variance, least), simple.variance)
    return plain if share < MIN_DIAGONAL_WEIGHT else (1 - share) * plain + share * rich.variance


def estimate_global_ridge(task: Any, prior: Prior, rows: int) -> float:
    """The ridge on the common model: its own coefficients as draws from N(0, kappa^2), kappa by marginal likelihood.

    ridge = noise / (rows kappa^2); with many rows per coefficient it is next to nothing.
    """
    kept = ridge_mask(task) > 0
    w, cov = prior.spread.center[kept], prior.spread.center_cov[kept][:, kept]
    values, vectors = torch.linalg.eigh(cov)
    seen = values > 0  # a direction that no client's rows see says nothing
    if not bool(seen.any()):
        return 0.0
    square, values = (vectors.T @ w)[seen] ** 2, values[seen]
    unit = float(square.mean()) + float(values.min())
    kappa2 = unit * torch.logspace(-4, 2, 241, dtype=torch.float64)
    deviance = torch.stack([((k + values).log() + square / (k + values)).sum() for k in kappa2])
    return float(prior.noise.mean() / (rows * kappa2[deviance.argmin()]))
