"""Random effects: the clients' coefficients are w_i ~ N(w, diag(tau^2)), with tau and w estimated from all clients.

With half the squared loss and noise sigma^2 this distribution implies lam_ij = sigma^2/(n_i tau_j^2), and
the models v_i = arg min L_i(v) + 1/2 sum_j lam_ij (v_j - w_j)^2 are the posterior means: empirical Bayes.

    fit_reml            from sufficient statistics of a linear task, by restricted maximum likelihood (`reml.py`)
    fit_reml_to_fits    the same with each local fit as one observation of known covariance, for any convex task
    fit_laplace         the same with a Gaussian approximation at penalized fits, repeated until it converges

`form` is "scalar" (one tau), "diagonal" (one per coefficient), "intercept" (only the last coefficients vary, as many
as there are scores) or "auto": diagonal where its likelihood is better by more than its number of further parameters
(Akaike). A variance of exactly 0 is possible and means one global model.
"""

from __future__ import annotations

from collections.abc import Callable
from math import log1p
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from mooring.core.errors import RequestError
from mooring.estimates.client_summaries import LinearStats, LocalFits, fit_covariance, inverse
from mooring.estimates.reml import (
    MAX_ITERATIONS,
    GaussianLikelihoods,
    RemlState,
    evaluate_deviance,
    factor_likelihoods,
    maximize_likelihood,
    project_on_pattern,
    score_terms,
    tilt_deviance,
)

VarianceFormOrAuto = Literal["scalar", "diagonal", "intercept", "auto"]
VARIANCE_FORMS = ("scalar", "diagonal", "intercept", "auto")
Refit = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
MIN_VARIANCE_SHARE = 1e-8  # smallest tau^2 handed to a refit, as a share of its start, so that lam stays finite
WARM_START_MIN_GAIN = 1e-2  # deviance that a step must gain with a warm start: far below a relevant difference
MAX_LAPLACE_ROUNDS = 100
VARIANCE_PROBE_SHARE = 0.1  # relative change of tau^2 by which the fits' answer to it is measured
STEPS_PER_REFIT = (
    4  # of the likelihood's maximisation between two refits: more steps would follow an approximation that changes
)
LAPLACE_TOLERANCE = 1e-4  # relative change of spread and center at which Laplace's approximation has converged,
GAIN_TOLERANCE_FACTOR = 1.0  # and deviance that a round gains, as a multiple of it: far below a relevant difference
MIN_STEP_GAIN_SHARE = 0.1  # the same of a step within a round, as a share of it
NEGLIGIBLE_SHARE = 1e-3  # a spread below this share of the largest is as good as 0; a deviance per client below it, too


class RandomEffects(NamedTuple):
    center: Tensor  # [d], w
    center_cov: Tensor  # [d, d]
    variance: Tensor  # [d], tau^2
    variance_cov: Tensor  # [d, d], sampling covariance of tau^2, from the expected information
    noise: Tensor  # [m], sigma^2: the factor between n_i L_i and a log-likelihood
    models: Tensor  # [m, d], posterior means v_i
    covs: Tensor  # [m, d, d], posterior covariances given w
    data: GaussianLikelihoods  # the clients' log-likelihoods that this was estimated from
    deviance: float  # -2 restricted log-likelihood up to a constant (Laplace: less that of one tau)
    form: str
    method: str
    warnings: tuple[str, ...]


def fit_reml(
    stats: LinearStats,
    form: VarianceFormOrAuto = "scalar",
    near: RandomEffects | None = None,
    data: GaussianLikelihoods | None = None,
) -> RandomEffects:
    """Restricted maximum likelihood for a linear task; any n_i >= 1, also below d.

    `near`, the spread of similar clients, is a warm start; iterations then end once the deviance hardly changes.
    `data` is what `factor_stats` makes of the same `stats`, if it is known.
    """
    _check_form(form, VARIANCE_FORMS)
    d, total = stats.moment.shape[1], float(stats.n.sum())
    if len(stats.n) < 2 or total <= d:
        raise RequestError(
            f"fit_reml: at least 2 clients and more than d = {d} rows in all are needed, "
            f"got {len(stats.n)} clients with {total:g} rows."
        )
    data = factor_stats(stats) if data is None else data
    if near is None:
        at, chosen_form, warnings = _best(data, form)
    else:
        start = near.variance / near.noise.mean()
        at, chosen_form, warnings = _best(
            data, form, start.clamp(min=MIN_VARIANCE_SHARE * start.max()), least_gain=WARM_START_MIN_GAIN
        )
    if not bool((stats.n > 1).any()):
        warnings += ("Every client has one row: spread and noise are separated by the rows' lengths only.",)
    return _spread(at, data, torch.full_like(stats.n, at.noise), chosen_form, "restricted likelihood", warnings)


def fit_reml_to_fits(fits: LocalFits, form: VarianceFormOrAuto = "scalar") -> RandomEffects:
    """Fit by restricted maximum likelihood, with each local fit as one Gaussian observation."""
    _check_form(form, VARIANCE_FORMS)
    if int((fits.freedom > 0).sum()) < 2:
        raise RequestError("fit_reml_to_fits: at least 2 clients need rows that determine their fit; use fit_laplace.")
    data = _normal_of(fits)
    at, chosen_form, warnings = _best(data, form)
    return _spread(at, data, pooled_dispersion(fits), chosen_form, "restricted likelihood of local fits", warnings)


def fit_laplace(
    n: Tensor,
    refit: Refit,
    center: Tensor,
    form: VarianceFormOrAuto = "scalar",
    variance: float | Tensor = 1.0,
    tolerance: float = LAPLACE_TOLERANCE,
    intercepts: int = 1,
) -> RandomEffects:
    """Laplace's approximation, for losses that are negative log-likelihoods; separable or tiny clients included.

    `refit(center [d], lam [m, k, d])` returns, for each client and k, the minimizer of L_i(v) + 1/2 sum_j lam_ikj
    (v_j - center_j)^2 and the Hessian of L_i there. Each round replaces n_i L_i by its quadratic at the penalized fit
    and estimates w and tau^2 as for a linear task with noise 1. That is penalized quasi-likelihood, which halves tau^2
    of binary targets at 4 rows per coefficient; the deviance of Laplace's approximation also counts how the Hessians
    change with tau (`_tilt`), which takes a second fit per round. What remains is about -20% at 4 rows per coefficient.
    It starts from `variance`, one or [d], and ends when the relative change of a round is below `tolerance`.
    """
    _check_form(form, VARIANCE_FORMS)
    n = n.double()
    first = torch.as_tensor(variance, dtype=torch.float64).expand(len(center))
    if form != "auto":
        return _laplace(n, refit, center.double(), form, first, tolerance, intercepts)
    rich = _laplace(n, refit, center.double(), "diagonal", first, tolerance)
    if -rich.deviance > 2 * (len(first) - 1):
        return rich
    common = rich.variance.mean().expand_as(first).clamp(min=MIN_VARIANCE_SHARE)
    return _laplace(n, refit, rich.center, "scalar", common, tolerance)


def _laplace(
    n: Tensor, refit: Refit, center: Tensor, form: str, t: Tensor, tolerance: float, intercepts: int = 1
) -> RandomEffects:
    """Run the rounds of `fit_laplace`, from spread t."""
    floor, pattern = MIN_VARIANCE_SHARE * t.mean(), _pattern(form, len(t), intercepts)
    t = project_on_pattern(t, pattern)
    for _ in range(MAX_LAPLACE_ROUNDS):
        now = torch.maximum(t, floor)
        lam = 1 / (n[:, None] * now)
        modes, hessians = refit(center, torch.stack([lam, lam / (1 + VARIANCE_PROBE_SHARE)], 1))
        hessians = hessians.double()
        data = _quadratic(n, modes[:, 0].double(), hessians[:, 0], lam, center)
        state = evaluate_deviance(data, project_on_pattern(now, pattern))
        tilt = _tilt(state, n, hessians[:, 0], hessians[:, 1])
        data = data._replace(tilt=tilt, near=now)
        state = state._replace(deviance=state.deviance + tilt_deviance(data, state.t))
        at, _, warnings = _best(data, form, state, STEPS_PER_REFIT, intercepts, MIN_STEP_GAIN_SHARE * tolerance)
        # A coefficient whose spread converges to 0 need not converge fully.
        moved = (at.t - t).abs() / (at.t + t + 2 * floor + NEGLIGIBLE_SHARE * at.t.max())
        shift = (at.w - center).abs() / (at.t + floor + NEGLIGIBLE_SHARE * at.t.max()).sqrt()
        gained = state.deviance - at.deviance
        t, center = at.t, at.w
        # Where the rows are uninformative, spreads keep moving while the likelihood is constant.
        if gained < GAIN_TOLERANCE_FACTOR * tolerance or (
            float(moved.max()) < tolerance and float(shift.max()) < tolerance
        ):
            break
    else:
        warnings += (f"Laplace's approximation still moved after {MAX_LAPLACE_ROUNDS} rounds.",)
    effects = _spread(at, data, torch.ones_like(n), form, "Laplace approximation", warnings)
    if form != "diagonal":
        return effects._replace(deviance=0.0)
    common, _ = maximize_likelihood(data, torch.ones_like(t), at.t, least_gain=MIN_STEP_GAIN_SHARE * tolerance)
    return effects._replace(deviance=at.deviance - common.deviance)


def deviance_gain(spread: RandomEffects) -> float:
    """Return the decrease of the deviance from spread 0 to this spread, by the clients' log-likelihoods."""
    data, deviance = spread.data._replace(tilt=None), spread.deviance
    if data.rows is None:  # Laplace's is not that of the likelihoods; the rows were divided by the noise
        deviance = evaluate_deviance(data, spread.variance).deviance
    return evaluate_deviance(data, torch.zeros_like(spread.variance)).deviance - deviance


def choose_by_aic(scalar: RandomEffects, diagonal: RandomEffects) -> RandomEffects:
    """One spread per coefficient where its likelihood is better by more than its further parameters (Akaike)."""
    return diagonal if scalar.deviance - diagonal.deviance > 2 * (len(scalar.center) - 1) else scalar


def client_hessians(spread: RandomEffects, n: Tensor) -> Tensor:
    """[m, d, d]: the Hessians of the L_i, of n rows each, that the spread was estimated with."""
    scale = spread.noise if spread.data.rows is None else torch.ones_like(n)  # None: the rows were divided by the noise
    return (scale / n)[:, None, None] * (spread.data.c.mT @ spread.data.c)


def pooled_dispersion(fits: LocalFits) -> Tensor:
    """[m]: tr(H^-1 G)/d over the clients with a fit: sigma^2 for half the squared loss, 1 for a log-likelihood."""
    has_fit = fits.freedom > 0
    ratio = (inverse(fits.hessian, has_fit) * fits.gradient_cov).sum((1, 2)) / fits.fit.shape[1]
    weight = fits.freedom / fits.freedom.sum()
    return (weight[has_fit] * ratio[has_fit]).sum().expand(len(fits.n)).clone()


def _check_form(form: str, names: tuple[str, ...]) -> None:
    if form not in names:
        raise RequestError(f"spread: form must be one of {', '.join(map(repr, names))}, got {form!r}.")


def factor_stats(stats: LinearStats) -> GaussianLikelihoods:
    """Return the clients' log-likelihoods from their sums."""
    n = stats.n
    return factor_likelihoods(n[:, None, None] * stats.gram, n[:, None] * stats.moment, n * stats.yy, float(n.sum()))


def _normal_of(fits: LocalFits) -> GaussianLikelihoods:
    """The local fits as Gaussian observations; a client without a fit has precision 0.

    All have the clients' mean covariance, divided by their rows: a client's own depends on its own fit (a logistic fit
    is less certain the larger it is), and weights that do so would draw the spread towards 0.
    """
    has_fit, n = fits.freedom > 0, fits.n
    mean = (n[:, None, None] * fit_covariance(fits))[has_fit].mean(0)
    k = (n * has_fit)[:, None, None] * torch.linalg.inv(mean)
    fit = torch.where(has_fit[:, None], fits.fit, 0.0)
    b = (k @ fit[..., None])[..., 0]
    return factor_likelihoods(k, b, (b * fit).sum(1), None)


def _quadratic(n: Tensor, modes: Tensor, hessians: Tensor, lam: Tensor, center: Tensor) -> GaussianLikelihoods:
    """n_i L_i to second order at the mode, where grad L_i = lam (center - mode)."""
    k = n[:, None, None] * hessians
    b = (k @ modes[..., None])[..., 0] - n[:, None] * lam * (center - modes)
    return factor_likelihoods(k, b, torch.zeros_like(n), None, is_orthogonal=False)


def _tilt(at: RemlState, n: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """[d]: how sum_i log|1 + T n_i H_i| changes with log t because the fits, hence their Hessians, move with t.

    One difference, to the Hessians `after` a change of t by VARIANCE_PROBE_SHARE, gives the change for all t; it is
    divided in proportion to each coefficient's effect on the fits.
    """
    t = at.t
    change = float((n[:, None, None] * at.covs * (after - before)).sum()) / log1p(VARIANCE_PROBE_SHARE)
    if abs(change) < NEGLIGIBLE_SHARE * len(n):
        return torch.zeros_like(t)
    share = t * at.u.square().sum(0)
    return change * share / share.sum()


def _best(
    data: GaussianLikelihoods,
    form: str,
    start: Tensor | RemlState | None = None,
    iterations: int = MAX_ITERATIONS,
    intercepts: int = 1,
    least_gain: float = 0.0,
) -> tuple[RemlState, str, tuple[str, ...]]:
    """Return the estimate of the given form, the form (where "auto" chose it) and warnings."""
    options = {}
    for name in ("scalar", "diagonal") if form == "auto" else (form,):
        options[name] = maximize_likelihood(
            data, _pattern(name, data.c.shape[2], intercepts), start, iterations, least_gain
        )
    if form == "auto":
        gain = options["scalar"][0].deviance - options["diagonal"][0].deviance
        form = "diagonal" if gain > 2 * (data.c.shape[2] - 1) else "scalar"
    at, converged = options[form]
    warnings: tuple[str, ...] = ()
    if not converged and iterations >= MAX_ITERATIONS:
        warnings += ("The likelihood's maximum was not reached.",)
    if not bool((at.t > 0).any()):
        warnings += ("The estimated spread is 0: one global model fits as well.",)
    return at, form, warnings


def _pattern(form: str, dim: int, intercepts: int) -> Tensor | None:
    """[d]: the pattern that the spread is a multiple of; None if each coefficient has its own."""
    if form == "diagonal":
        return None
    pattern = torch.ones(dim, dtype=torch.float64)
    if form == "intercept":
        pattern[: dim - intercepts] = 0
    return pattern


def _spread(
    at: RemlState, data: GaussianLikelihoods, noise: Tensor, form: str, method: str, warnings: tuple[str, ...] = ()
) -> RandomEffects:
    information = score_terms(data, at)[2] / 2
    if form in ("scalar", "intercept"):
        pattern = (at.t / at.t.max()) if bool((at.t > 0).any()) else torch.ones_like(at.t)
        covariance = torch.outer(pattern, pattern) / (pattern @ information @ pattern)
    else:
        covariance = torch.linalg.pinv(information, hermitian=True)
    scale = at.noise
    return RandomEffects(
        at.w, scale * at.w_cov, scale * at.t, scale**2 * covariance, noise, at.models, at.covs, data, at.deviance,
        form, method, warnings,
    )  # fmt: skip


def fit_variance_prior(variance: Tensor, freedom: Tensor) -> tuple[Tensor, Tensor]:
    """Degrees of freedom and scale of the prior from the mean and variance of log s^2 (method of moments)."""
    known = torch.ones_like(variance, dtype=torch.bool)
    return variance_prior(variance_log_sums(variance, freedom, known).sum(0))


def variance_log_sums(variance: Tensor, freedom: Tensor, known: Tensor) -> Tensor:
    """[m, 4]: each client's parts of the sums that `variance_prior` needs; 0 where its variance is not known."""
    half = torch.where(known, freedom, 1.0) / 2
    e = variance.clamp(min=torch.finfo(variance.dtype).tiny).log() - torch.digamma(half) + half.log()
    parts = torch.stack([torch.ones_like(e), e, e**2, torch.polygamma(1, half)], 1)
    return torch.where(known[:, None], parts, 0.0)


def variance_prior(sums: Tensor) -> tuple[Tensor, Tensor]:
    """Degrees of freedom and scale of the prior, from the sums [4] over clients."""
    count, e, square, trigamma = sums.unbind()
    spread = (square - e**2 / count) / (count - 1)
    extra = (spread - trigamma / count).clamp(min=1e-6)
    strength = 2 * _inverse_trigamma(extra)
    return strength, (e / count + torch.digamma(strength / 2) - (strength / 2).log()).exp()


def _inverse_trigamma(value: Tensor) -> Tensor:
    """x with trigamma(x) = value, by Newton's method on 1/trigamma, which is convex and nearly linear."""
    x = 0.5 + 1 / value
    for _ in range(50):
        x = x + torch.polygamma(1, x) * (1 - torch.polygamma(1, x) / value) / torch.polygamma(2, x)
    return x
