"""How much the clients' coefficients vary: the empirical-Bayes prior that proposes each client's lambda.

    v_i ~ N(w, diag(tau^2))   ->   lam_ij = noise_i / (n_i tau_j^2)

The estimates are those of `estimates/task_random_effects.py`, which settings such as lam = "auto" use as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mooring.core.client_functions import ClientRows
from mooring.core.task import Task
from mooring.estimates.random_effects import RandomEffects, deviance_gain
from mooring.estimates.task_random_effects import (
    SampledRandomEffects,
    VarianceForm,
    available_forms,
    estimate_random_effects,
)
from mooring.partial_pooling.lambda_path import PathPoint, PullShape, ridge_mask
from mooring.shapes.columns import LINEAR

SPREAD_DEVIANCE = 4.0  # deviance by which a variance must improve
DIAGONAL_DEVIANCE, FURTHER_SPREAD_DEVIANCE = 2.0, 1.5  # the same for one per coefficient, and each further one
MIN_DIAGONAL_WEIGHT = 0.05  # weight below which the diagonal kind is left out,
MIN_REPEATED_WEIGHT = 1e-4  # and below which it is not estimated again without a fold, where it would stay below that


class Prior(NamedTuple):
    kind: str  # "scalar": one variance for all coefficients, "diagonal": one each, "intercept": only the intercept's
    variance: Tensor  # [d], tau^2
    noise: Tensor  # [m]
    spread: RandomEffects  # the estimate, of the clients that it is from
    clients: Tensor  # [k], their indices
    columns: str = LINEAR  # the set of columns that it is of (`column_sets.py`)
    law: Any = None  # how the clients' noises vary (`noise.NoiseLaw`); None: they have the same
    models: Tensor | None = None  # [m, d], posterior means

    def shape(self, n: Tensor) -> PullShape:
        """The lambdas that this prior proposes, at scale 1."""
        return PullShape(self.noise / n.double().clamp(min=1), self.variance)

    @property
    def start(self) -> PathPoint | None:
        """The posterior means, from which fits to much the same rows take few steps."""
        return None if self.models is None else PathPoint(1.0, self.spread.center, self.models)


def estimate_priors(task: Task, rows: ClientRows, near: Sequence[Prior] = ()) -> list[Prior]:
    """All kinds, the simplest first; none where the task has no Hessian or the rows are too few.

    Of very many coefficients (features of a kernel) only the simplest. With `near`, the priors of much the same rows,
    only their kinds without a negligible one, and approximations start from them.
    """
    is_negligible = bool(near) and diagonal_share(list(near)) < MIN_REPEATED_WEIGHT
    known = {prior.kind: prior.spread for prior in near if prior.kind != "diagonal" or not is_negligible}

    def of_kind(kind: VarianceForm) -> list[SampledRandomEffects | None]:
        return [estimate_random_effects(task, rows, kind, known.get(kind))]

    estimates = []
    forms = [form for form in available_forms(task) if form in known or not near]
    for (effects,) in rows.map_independent(of_kind, forms):
        if effects is None:
            break
        estimates.append(effects)
    return make_priors(estimates, len(rows))


def make_priors(estimates: list[SampledRandomEffects], m: int) -> list[Prior]:
    """The priors of estimated random effects, for m clients; those not sampled have the mean noise of the others."""
    out = []
    for spread, clients in estimates:
        noise = torch.full((m,), float(spread.noise.mean()), dtype=torch.float64)
        noise[clients] = spread.noise
        models = spread.center.repeat(m, 1)
        models[clients] = spread.models
        out.append(Prior(spread.form, spread.variance, noise, spread, clients, models=models))
    return out


def average_kinds(priors: list[Prior]) -> list[Prior]:
    """The mean of no variance, one for all coefficients and one each, weighted by how well each fits; then the prior
    of the intercept only, where it was estimated.

    Estimates of a variance are above 0 half of the time when it is 0; their weight then keeps the harm small.
    """
    if not priors:
        return []
    simple, rich, intercept = split_kinds(priors)
    _, scalar, diagonal = kind_weights(priors)
    share = diagonal_share(priors)
    if share < MIN_DIAGONAL_WEIGHT:
        first = simple._replace(variance=(scalar + diagonal) * simple.variance)
    else:
        first = (rich if share > 0.5 else simple)._replace(
            kind=rich.kind,
            variance=scalar * simple.variance + diagonal * rich.variance,
            noise=(1 - share) * simple.noise + share * rich.noise,
        )
    return [first] if intercept is None else [first, intercept]


def split_kinds(priors: list[Prior]) -> tuple[Prior, Prior, Prior | None]:
    """The simplest prior, the richest of the others (or the same), and that of the intercept only."""
    kinds = {prior.kind: prior for prior in priors}
    return kinds["scalar"], kinds.get("diagonal", kinds["scalar"]), kinds.get("intercept")


def kind_weights(priors: list[Prior]) -> tuple[float, float, float]:
    """The weights of no variance, of one for all coefficients and of one each, by their likelihoods.

    A variance costs SPREAD_DEVIANCE; one per coefficient costs DIAGONAL_DEVIANCE and FURTHER_SPREAD_DEVIANCE for every
    further variance above 0. Those of 0 cost nothing, unless the likelihood is an approximation, which does not tell 0
    from a small variance.
    """
    simple, rich, _ = split_kinds(priors)
    gain, further_gain = deviance_gain(simple.spread) - SPREAD_DEVIANCE, -torch.inf
    if rich is not simple:
        free = int((rich.variance > 0).sum()) if rich.spread.data.rows is not None else len(rich.variance)
        further = free - int((simple.variance > 0).any())
        further_gain = (
            simple.spread.deviance
            - rich.spread.deviance
            - DIAGONAL_DEVIANCE
            - FURTHER_SPREAD_DEVIANCE * max(further, 0)
        )
    # A deviance that is not finite does not count.
    gain, further_gain = gain if isfinite(gain) else 0.0, further_gain if isfinite(further_gain) else -torch.inf
    none, scalar, diagonal = torch.softmax(
        torch.tensor([0.0, gain / 2, (gain + further_gain) / 2], dtype=torch.float64), 0
    ).tolist()
    return none, scalar, diagonal


def diagonal_share(priors: list[Prior]) -> float:
    """The weight of the diagonal kind, given that there is a variance."""
    _, scalar, diagonal = kind_weights(priors)
    return diagonal / max(scalar + diagonal, 1e-300)


def positive_variance(priors: list[Prior]) -> Tensor:
    """[d]: the variance given that it is not 0.

    Where one variance for all is estimated as 0, its standard error is used: 0 is an estimate, too.
    """
    simple, rich, _ = split_kinds(priors)
    share = diagonal_share(priors)
    least = simple.spread.variance_cov[0, 0].clamp(min=0).sqrt()
    plain = torch.where(torch.isfinite(least), torch.maximum(simple.variance, least), simple.variance)
    return plain if share < MIN_DIAGONAL_WEIGHT else (1 - share) * plain + share * rich.variance


def estimate_global_ridge(task: Task, prior: Prior, rows: int) -> float:
    """The ridge on the global model: its coefficients as draws from N(0, kappa^2), kappa by marginal likelihood.

    ridge = noise / (rows kappa^2); with many rows per coefficient it is nearly 0.
    """
    penalized = ridge_mask(task) > 0
    w, cov = prior.spread.center[penalized], prior.spread.center_cov[penalized][:, penalized]
    values, vectors = torch.linalg.eigh(cov)
    seen = values > 0  # other directions are seen by no client's rows
    if not bool(seen.any()):
        return 0.0
    square, values = (vectors.T @ w)[seen] ** 2, values[seen]
    unit = float(square.mean()) + float(values.min())
    kappa2 = unit * torch.logspace(-4, 2, 241, dtype=torch.float64)
    deviance = torch.stack([((k + values).log() + square / (k + values)).sum() for k in kappa2])
    return float(prior.noise.mean() / (rows * kappa2[deviance.argmin()]))


def select_priors(priors: Sequence[Prior], asked: Tensor) -> list[Prior]:
    """The priors for some of the clients."""
    return [
        prior._replace(noise=prior.noise[asked], models=None if prior.models is None else prior.models[asked])
        for prior in priors
    ]


def restrict_priors(task: Task, priors: list[Prior], varying: Tensor) -> list[Prior]:
    """The priors with a variance of 0 where coefficients do not vary: that of the intercept only where nothing else
    varies, and without it where the intercept does not vary."""
    is_intercept = ridge_mask(task) == 0
    intercept = [prior for prior in priors if prior.kind == "intercept" and bool(varying[is_intercept].all())]
    if intercept and not bool((varying & ~is_intercept).any()):
        return intercept
    others = [prior for prior in priors if prior.kind != "intercept"]
    return [prior._replace(variance=prior.variance * varying) for prior in others] + intercept
