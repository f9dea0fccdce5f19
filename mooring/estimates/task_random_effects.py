"""Random effects of a task's clients: the estimator of each kind of task, and the clients that it uses.

    linear tasks          restricted likelihood of the sums that clients send once (`fit_reml`)
    other smooth convex   Laplace's approximation (`fit_laplace`): in each exchange clients get a center and two
                          pulls, and send their penalized fits and the Hessians there; some 3 to 40 exchanges. Losses
                          that are no likelihoods, and counts, are divided by their dispersion
    all others            None: nonsmooth losses, losses without a known dispersion, networks, very many parameters; one
                          client; hardly a row beyond the parameters; rows that leave noise
                          and spread unseparated

Small and separable clients need no special case: neither estimator uses their own fits. Of very many clients, an
evenly spaced sample is used.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from mooring.core.client_functions import ClientRows
from mooring.core.task import Task, has_known_dispersion, layer_mask
from mooring.estimates.client_queries import differentiate_at, fit_penalized, linear_sums, sum_for_dispersion
from mooring.estimates.random_effects import LAPLACE_TOLERANCE, RandomEffects, factor_stats, fit_laplace, fit_reml
from mooring.estimates.reml import MAX_VARIANCE_RATIO, typical_variance_ratio
from mooring.tasks.linear import Linear
from mooring.tasks.proximal import is_dense

MAX_CLIENTS_BY_SUMS = 2_000  # clients that the spread is estimated from; more clients would change little
MAX_CLIENTS_REFITTED = 1_000  # the same if each must be fitted repeatedly: tau^2 then has an error of a few percent
MAX_HESSIAN_NUMBERS = 20_000_000  # numbers in all of their Hessians,
MAX_REFITTED_HESSIAN_NUMBERS = 1_000_000  # the same if they are computed repeatedly
MIN_CLIENTS = 100  # sampled clients, however large their Hessians
MAX_DIAGONAL_COEFFICIENTS = 60  # coefficients up to which each may have a spread of its own
FIRST_RIDGE = 1e-4  # makes the global model that Laplace's approximation starts from exist
MAX_NEWTON_STEPS = 30
GRADIENT_TOLERANCE = 1e-8  # its gradient, relative to the first one
FIRST_VARIANCE = 0.1  # the spread that it starts from,
MIN_VARIANCE = 1e-3  # the smallest that a warm start may have as its largest,
MAX_DISPERSION_ROUNDS = 4  # of estimates of spread and dispersion in turn,
DISPERSION_TOLERANCE = 0.05  # which end at this relative change
MIN_DISPERSION, MAX_DISPERSION = 0.5, 1e4  # of likelihoods: counts
MIN_LOSS_DISPERSION = 1e-12  # of other losses, whose dispersion has the unit of the loss
WARM_START_TOLERANCE = 0.02  # relative change at which a warm start ends: far below the error of a spread


VarianceForm = Literal["scalar", "diagonal", "intercept"]


class SampledRandomEffects(NamedTuple):
    spread: RandomEffects  # of the sampled clients
    clients: Tensor  # [k], their positions among all clients


def has_known_noise(task: Task) -> bool:
    """Whether the noise of the targets is known from the task, or can be estimated: that of linear tasks by REML."""
    return isinstance(task, Linear) or has_known_dispersion(task)


def estimate_random_effects(
    task: Task, rows: ClientRows, form: VarianceForm = "scalar", near: RandomEffects | None = None
) -> SampledRandomEffects | None:
    """Return the variation of the clients' coefficients; None if it cannot be estimated.

    `near`, the spread of similar clients, is a warm start of Laplace's approximation, which is then less exact.
    """
    size = rows.size
    positions = torch.nonzero(size > 0)[:, 0]
    if not is_dense(task) or not has_known_noise(task):
        return None
    linear = isinstance(task, Linear)
    max_clients, cells = (
        (MAX_CLIENTS_BY_SUMS, MAX_HESSIAN_NUMBERS) if linear else (MAX_CLIENTS_REFITTED, MAX_REFITTED_HESSIAN_NUMBERS)
    )
    max_clients = min(max_clients, max(MIN_CLIENTS, cells // task.dim**2))
    if len(positions) > max_clients:
        positions = positions[torch.linspace(0, len(positions) - 1, max_clients).long()]
    if len(positions) < 2 or int(size[positions].sum()) <= task.dim + 1:
        return None
    sampled = rows if len(positions) == len(size) else rows.select(positions)
    if linear:
        effects = _linear(task, sampled, form, near)
    else:
        with sampled.keep_batches():
            effects = _laplace(task, sampled, form, near)
    return None if effects is None else SampledRandomEffects(effects, positions)


def available_forms(task: Task) -> tuple[VarianceForm, ...]:
    """Return the forms that can be estimated: one variance per coefficient up to MAX_DIAGONAL_COEFFICIENTS, and the
    intercept's only, if there is one."""
    forms: tuple[VarianceForm, ...] = ("scalar", "diagonal") if task.dim <= MAX_DIAGONAL_COEFFICIENTS else ("scalar",)
    return (*forms, "intercept") if count_intercepts(task) else forms


def count_intercepts(task: Task) -> int:
    """Return the number of intercepts, which are the last coefficients."""
    return int(layer_mask(task.layout, ("intercept",)).sum()) if task.intercept else 0


def _linear(task: Task, rows: ClientRows, form: VarianceForm, near: RandomEffects | None) -> RandomEffects | None:
    name = ("random effects", task)
    if name not in rows.cache:  # the same for all forms
        stats = linear_sums(task, rows)
        rows.cache[name] = stats, factor_stats(stats)
    stats, data = rows.cache[name]
    effects = fit_reml(stats, form, near, data)
    ratio = float((effects.variance / effects.noise.mean()).max())
    unseparated = ratio >= MAX_VARIANCE_RATIO / 10 * typical_variance_ratio(
        effects.data
    )  # the likelihood puts the noise at 0
    return None if unseparated else effects


def _laplace(task: Task, rows: ClientRows, form: VarianceForm, near: RandomEffects | None) -> RandomEffects:
    """Return Laplace's estimate; clients refit with warm starts from the global model, or from `near`."""
    n = rows.size.double()
    common = fit_global_model(task, rows) if near is None else near.center
    first = torch.tensor(FIRST_VARIANCE).double() if near is None else near.variance
    if near is not None and float(first.max()) < MIN_VARIANCE:
        first = torch.full_like(first, MIN_VARIANCE)
    modes = [common.to(task.dtype).expand(len(n), -1)]
    if near is not None and len(near.models) == len(n):
        modes = [near.models.to(task.dtype)]

    def refit(center: Tensor, lam: Tensor) -> tuple[Tensor, Tensor]:
        fits, hessians = fit_penalized(task, rows, lam, modes[0], center=center)
        modes[0] = fits[:, -1]
        return fits, hessians

    tolerance = LAPLACE_TOLERANCE if near is None else WARM_START_TOLERANCE
    intercepts = max(count_intercepts(task), 1)
    if task.likelihood and not task.overdispersed:
        return fit_laplace(n, refit, common, form, first, tolerance, intercepts)
    if near is None:
        phi = 1.0 if task.likelihood else estimate_dispersion(task, rows, modes[0])
    else:
        phi = float(near.noise.mean())
    for _ in range(MAX_DISPERSION_ROUNDS):
        effects = fit_laplace(n / phi, refit, common, form, first, tolerance, intercepts)
        before, phi = phi, estimate_dispersion(task, rows, modes[0], effects)
        common, first = effects.center, effects.variance.clamp(min=MIN_VARIANCE)
        if abs(phi / before - 1) < DISPERSION_TOLERANCE:
            break
    return effects._replace(noise=torch.full_like(n, before))


def estimate_dispersion(task: Task, rows: ClientRows, models: Tensor, effects: RandomEffects | None = None) -> float:
    """Return how much targets vary around models [m, d], in units of what the loss implies (`HasDispersion`).

    The models are those of `effects`, or one global model.
    """
    square, scale = sum_for_dispersion(task, rows, models)
    total = float(rows.size.sum())
    freedom = total - models.shape[1]
    if effects is not None:
        root = effects.variance.clamp(min=0).sqrt()
        values = torch.linalg.eigvalsh(root[:, None] * (effects.data.c.mT @ effects.data.c) * root).clamp(min=0)
        freedom -= float((values / (1 + values)).sum())
    least = MIN_DISPERSION if task.likelihood else MIN_LOSS_DISPERSION
    mean_scale = max(float(scale.sum()) / total, least)
    return min(max(float(square.sum()) / max(freedom, 1.0) / mean_scale, least), MAX_DISPERSION)


def fit_global_model(task: Task, rows: ClientRows) -> Tensor:
    """Return an approximate minimizer [d] of sum_i n_i L_i(w) / N + FIRST_RIDGE/2 |w|^2, by Newton's method.

    A step that does not make the gradient smaller is halved; the start need not be exact.
    """
    share = rows.size.double() / rows.size.sum()
    eye = FIRST_RIDGE * torch.eye(task.dim, dtype=torch.float64)

    def at(w: Tensor) -> tuple[Tensor, Tensor]:
        slopes, hessians = differentiate_at(task, rows, w=w)
        return share @ slopes.double() + FIRST_RIDGE * w, torch.einsum("m,mij->ij", share, hessians) + eye

    w = torch.zeros(task.dim, dtype=torch.float64)
    slope, hessian = at(w)
    goal = GRADIENT_TOLERANCE * (1 + float(slope.norm()))
    for _ in range(MAX_NEWTON_STEPS):
        if float(slope.norm()) <= goal:
            break
        step = torch.linalg.solve(hessian, slope)
        for _ in range(MAX_NEWTON_STEPS):
            trial = at(w - step)
            if float(trial[0].norm()) < float(slope.norm()):
                break
            step = step / 2
        w, (slope, hessian) = w - step, trial
    return w
