"""Random effects of a task's clients: which estimator serves which task, and which clients it uses.

    linear tasks          restricted likelihood of the sums that clients send once (`spread_likelihood`)
    other smooth convex   Laplace's approximation (`spread_laplace`): in each exchange clients get a centre and a
                          stiffness, and send their penalised fit and its Hessian; some 5 to 40 exchanges
    the rest              None: kinked losses, networks, very many parameters; one client; hardly a row beyond the
                          parameters; rows that leave noise and spread unseparated

Tiny clients and separable ones need no care: neither estimator wants a fit of their own. Of very many clients a part,
evenly taken, says how all vary.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from mooring.core.client_functions import ClientRows
from mooring.core.task import Task, layer_mask
from mooring.estimates.client_queries import differentiate_at, fit_penalized, sum_pearson_residuals, summarize_rows
from mooring.estimates.client_summaries import LinearStats
from mooring.estimates.random_effects import LAPLACE_TOLERANCE, RandomEffects, fit_laplace, fit_reml
from mooring.estimates.reml import MAX_VARIANCE_RATIO, typical_variance_ratio
from mooring.tasks.linear import Linear
from mooring.tasks.proximal import is_dense

MAX_CLIENTS_BY_SUMS = 2_000  # clients that the spread is estimated from; the others' rows would change little
MAX_CLIENTS_REFITTED = (
    1_000  # the same where each must be fitted again and again: tau^2 is then known to a few per cent
)
MAX_HESSIAN_NUMBERS = 20_000_000  # and numbers that their Hessians may have in all,
MAX_REFITTED_HESSIAN_NUMBERS = 1_000_000  # the same where they are computed again and again
MIN_CLIENTS = 100  # that are asked, however large their Hessians
MAX_DIAGONAL_COEFFICIENTS = 60  # coefficients up to which each may have a spread of its own
FIRST_RIDGE = 1e-4  # makes the global model that Laplace's approximation starts from exist
MAX_NEWTON_STEPS = 30
GRADIENT_TOLERANCE = 1e-8  # its gradient, relative to the first one
FIRST_VARIANCE = 0.1  # the spread that it starts from,
MIN_VARIANCE = 1e-3  # and the least mean that it starts from where it has a near one,
MAX_DISPERSION_ROUNDS = 4  # of estimates of spread and dispersion in turn,
DISPERSION_TOLERANCE = 0.05  # which end at such a relative change
MIN_DISPERSION, MAX_DISPERSION = 0.5, 1e4
WARM_START_TOLERANCE = 0.02  # where it may end sooner: such a change is far below what a spread is known to


VarianceForm = Literal["scalar", "diagonal", "intercept"]


class SampledRandomEffects(NamedTuple):
    spread: RandomEffects  # of the clients that were asked
    clients: Tensor  # [k], their places among all


def estimate_random_effects(
    task: Task, rows: ClientRows, form: VarianceForm = "scalar", near: RandomEffects | None = None
) -> SampledRandomEffects | None:
    """How these clients' coefficients vary; None where nothing can be said.

    `near`, the spread of much the same clients, is where Laplace's approximation starts; it then need not be as exact.
    """
    size = rows.size
    asked = torch.nonzero(size > 0)[:, 0]
    if not is_dense(task):
        return None
    linear = isinstance(task, Linear)
    most, cells = (
        (MAX_CLIENTS_BY_SUMS, MAX_HESSIAN_NUMBERS) if linear else (MAX_CLIENTS_REFITTED, MAX_REFITTED_HESSIAN_NUMBERS)
    )
    most = min(most, max(MIN_CLIENTS, cells // task.dim**2))
    if len(asked) > most:
        asked = asked[torch.linspace(0, len(asked) - 1, most).long()]
    if len(asked) < 2 or int(size[asked].sum()) <= task.dim + 1:
        return None
    some = rows if len(asked) == len(size) else rows.select(asked)
    if linear:
        found = _linear(task, some, form, near)
    else:
        with some.keep_batches():
            found = _laplace(task, some, form, near)
    return None if found is None else SampledRandomEffects(found, asked)


def available_forms(task: Task) -> tuple[VarianceForm, ...]:
    """The forms of spread that can be estimated: one per coefficient up to MOST_SPREADS of them, the intercept's alone
    where there is one."""
    forms: tuple[VarianceForm, ...] = ("scalar", "diagonal") if task.dim <= MAX_DIAGONAL_COEFFICIENTS else ("scalar",)
    return (*forms, "intercept") if count_intercepts(task) else forms


def count_intercepts(task: Task) -> int:
    """How many of the last coefficients are intercepts."""
    return int(layer_mask(task.layout, ("intercept",)).sum()) if task.intercept else 0


def _linear(task: Task, rows: ClientRows, form: VarianceForm, near: RandomEffects | None) -> RandomEffects | None:
    stats = summarize_rows(task, rows)
    assert isinstance(stats, LinearStats)
    found = fit_reml(stats, form, near=near)
    ratio = float((found.variance / found.noise.mean()).max())
    unseparated = ratio >= MAX_VARIANCE_RATIO / 10 * typical_variance_ratio(
        found.data
    )  # the likelihood puts the noise at 0
    return None if unseparated else found


def _laplace(task: Task, rows: ClientRows, form: VarianceForm, near: RandomEffects | None) -> RandomEffects:
    """Fits are renewed by the clients, warm started; the first centre is the global model, or the near one."""
    n = rows.size.double()
    common = fit_global_model(task, rows) if near is None else near.center
    first = torch.tensor(FIRST_VARIANCE).double() if near is None else near.variance
    if near is not None and (form == "scalar" or float(first.mean()) < MIN_VARIANCE):
        first = first.mean().clamp(min=MIN_VARIANCE)
    modes = [common.to(task.dtype).expand(len(n), -1)]

    def refit(center: Tensor, lam: Tensor) -> tuple[Tensor, Tensor]:
        modes[0], hessians = fit_penalized(task, rows, lam, modes[0], center=center)
        return modes[0], hessians

    settled = LAPLACE_TOLERANCE if near is None else WARM_START_TOLERANCE
    intercepts = max(count_intercepts(task), 1)
    if not task.overdispersed:
        return fit_laplace(n, refit, common, form, first, settled, intercepts)
    phi = 1.0 if near is None else float(near.noise.mean())
    for _ in range(MAX_DISPERSION_ROUNDS):
        found = fit_laplace(n / phi, refit, common, form, first, settled, intercepts)
        before, phi = phi, estimate_dispersion(task, rows, found, modes[0])
        common, first = found.center, found.variance.clamp(min=MIN_VARIANCE)
        if abs(phi / before - 1) < DISPERSION_TOLERANCE:
            break
    return found._replace(noise=torch.full_like(n, before))


def estimate_dispersion(task: Task, rows: ClientRows, found: RandomEffects, models: Tensor) -> float:
    """How much more counts vary than Poisson's around the clients' models: Pearson's estimate with Fletcher's
    correction for small means (Biometrika 2012)."""
    square, ratio = sum_pearson_residuals(task, rows, models)
    root = found.variance.clamp(min=0).sqrt()
    values = torch.linalg.eigvalsh(root[:, None] * (found.data.c.mT @ found.data.c) * root).clamp(min=0)
    total = float(rows.size.sum())
    freedom = max(total - float((values / (1 + values)).sum()) - len(found.center), 1.0)
    sparse = max(1 + float(ratio.sum()) / total, MIN_DISPERSION)
    return min(max(float(square.sum()) / freedom / sparse, MIN_DISPERSION), MAX_DISPERSION)


def fit_global_model(task: Task, rows: ClientRows) -> Tensor:
    """About the minimizer [d] of sum_i n_i L_i(w) / N + FIRST_RIDGE/2 |w|^2, by Newton's method: a place to start from.

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
            ahead = at(w - step)
            if float(ahead[0].norm()) < float(slope.norm()):
                break
            step = step / 2
        w, (slope, hessian) = w - step, ahead
    return w
