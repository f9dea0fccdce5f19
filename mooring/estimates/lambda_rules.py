"""lam from data: all rules in one table, each with its source.

    auto                    `one`, but at most MAX_AUTO_LAM_PER_CURVATURE times the curvature
    one                     the single lam with the least expected risk under the estimated spread
    client                  lam_i  = sigma^2 / (n_i tau^2)
    coefficient             lam_j  = sigma^2 S1 / tau_j^2            S1 = sum_i p_i/n_i
    client_and_coefficient  lam_ij = sigma^2 / (n_i tau_j^2)
    aer, ier                alternative, Theorems 4.4 and 4.5 at the estimated radii
    theory                  effect, Theorem 1 at the estimated R_max
    shrinkage               noise_i^2 / (n_i mu R_i^2), each client's own (effect, Eq. 18, leaves it open)
    shrinkage_of_all        noise^2 S1 / (mu R^2), one number

The first five are empirical Bayes (`random_effects.py`): right for coefficients that are spread normally, close to
right for others. The theorems' constants are worst cases: expect them off by orders of magnitude. lam = inf stands for
one global model, lam = 0 for local models.

One table serves all: `mooring theory` prints it, and an algorithm whose lam is one of these words resolves it here.
If no variation is estimated, `one` is inf. `auto` then stops at a multiple of the curvature, where a model follows its
own rows by less than a tenth: stronger pulls gain nothing, and methods that move the global model through the pull
would not move.
"""

from __future__ import annotations

from collections.abc import Callable
from math import exp, inf, isfinite, nan, sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from mooring.estimates.client_summaries import ClientSummary, Estimate, LinearStats, LocalFits, local_fits, trace
from mooring.estimates.constants import assumption_warnings, gradient_noise, smoothness, theorem_convexity
from mooring.estimates.heterogeneity import resolve_client_weights
from mooring.estimates.heterogeneity_likelihood import Radii, estimate_radii
from mooring.estimates.random_effects import (
    RandomEffects,
    VarianceFormOrAuto,
    choose_by_aic,
    client_hessians,
    fit_reml,
    fit_reml_to_fits,
)
from mooring.estimates.task_random_effects import SampledRandomEffects
from mooring.theory.lambda_aer import lambda_aer
from mooring.theory.lambda_ier import lambda_ier
from mooring.theory.lambda_one_stage import lambda_one_stage, lambda_shrinkage
from mooring.theory.weights import s1

LOG_LAM_TOLERANCE = 1e-9  # of the lam of least expected risk,
MAX_LOG_LAM = 200.0  # whose logarithm is at most this
LAM_DIGITS = 8  # significant digits of a lam that clients resolve
MAX_LAM_PER_SMOOTHNESS = (
    1e4  # lam of `effect` is cut at so many times the smoothness: there models are one global model to four digits
)
MAX_AUTO_LAM_PER_CURVATURE = 10.0  # lam = "auto" is at most so many times the clients' mean largest curvature
LAMBDA_RULES = (
    "one", "client", "coefficient", "client_and_coefficient", "theory", "aer", "ier", "shrinkage", "shrinkage_of_all",
)  # fmt: skip


class LambdaRule(NamedTuple):
    lam: float | Tensor  # one number, [m], [d] or [m, d]
    source: str
    warnings: tuple[str, ...] = ()


def lambda_rules(
    summary: ClientSummary,
    p: Tensor | None = None,
    scalar: SampledRandomEffects | None = None,
    diagonal: SampledRandomEffects | None = None,
    ridge: float = 0.0,
    radii: Radii | None = None,
) -> dict[str, LambdaRule]:
    """All rules from the clients' summaries; nan where a rule has no value.

    Missing spreads are estimated from the summaries, and radii from the likelier of them; `ridge` is
    the task's ridge that the summary's Hessians leave out (`omitted_ridge`).
    """
    fits = local_fits(summary)
    n, p = fits.n, resolve_client_weights(p, fits.n)
    scalar = scalar or _from_summary(summary, "scalar")
    diagonal = diagonal or _from_summary(summary, "diagonal")
    (per_client, tau), (rich_per_client, taus) = lam_factors(scalar, n), lam_factors(diagonal, n)
    source, doubts, diagonal_doubts = (
        f"empirical Bayes, {scalar.spread.method}",
        scalar.spread.warnings,
        diagonal.spread.warnings,
    )
    table = {
        "auto": LambdaRule(
            resolve_auto_lam(scalar, n, p),
            f"{source}; at most {MAX_AUTO_LAM_PER_CURVATURE:g} times the curvature",
            doubts,
        ),
        "one": LambdaRule(round_lam(compute_single_lam(scalar, n, p)), source, doubts),
        "client": LambdaRule(per_client * tau[0], source, doubts),
        "coefficient": LambdaRule((p @ rich_per_client) * taus, source, diagonal_doubts),
        "client_and_coefficient": LambdaRule(rich_per_client[:, None] * taus, source, diagonal_doubts),
    }
    best = diagonal if choose_by_aic(scalar.spread, diagonal.spread) is diagonal.spread else scalar
    return table | _theorems(fits, p, best, ridge, radii or estimate_radii(summary, best, p))


def resolve_auto_lam(among: SampledRandomEffects, n: Tensor, p: Tensor) -> float:
    """Return the value of "auto": `one`, capped at a multiple of the mean of the clients' largest curvatures."""
    spread, sampled = among
    top = torch.linalg.eigvalsh(client_hessians(spread, n[sampled]))[:, -1]
    share = p[sampled] / p[sampled].sum()
    return round_lam(min(compute_single_lam(among, n, p), MAX_AUTO_LAM_PER_CURVATURE * float(share @ top)))


def round_lam(lam: float) -> float:
    """Return lam with LAM_DIGITS digits: remote clients and clients in memory differ in later ones."""
    return float(f"{lam:.{LAM_DIGITS}g}")


def compute_single_lam(among: SampledRandomEffects, n: Tensor, p: Tensor) -> float:
    """The rule `one`, for the clients that the spread was estimated from; n and p are those of all clients."""
    spread, sampled = among
    return minimize_expected_risk(
        spread, client_hessians(spread, n[sampled]), n[sampled], p[sampled] / p[sampled].sum()
    )


def minimize_expected_risk(spread: RandomEffects, hessian: Tensor, n: Tensor, p: Tensor) -> float:
    """The lam that minimises sum_i p_i E[L_i(v_i) - L_i(w*_i)], to second order and with w known.

    Along an eigenvector of H_i with curvature h and spread tau^2 the expected risk is
    h (lam^2 tau^2 + h sigma^2/n_i) / (2 (h + lam)^2), least at sigma^2/(n_i tau^2): lam lies between the clients' own,
    where the derivative, h^2 (lam tau^2 - sigma^2/n_i) / (h + lam)^3, changes its sign on average.
    """
    if not bool((spread.variance > 0).any()):
        return inf
    h, vectors = torch.linalg.eigh(hessian)
    h = h.clamp(min=0)
    projected_variance = torch.einsum("mjk,j->mk", vectors**2, spread.variance)
    sampling_variance = (spread.noise / n)[:, None]
    log_lams = (sampling_variance / projected_variance).log().clamp(max=MAX_LOG_LAM)

    def slope(log_lam: float) -> float:
        """The derivative with respect to log lam."""
        lam = exp(log_lam)
        part = (h / (h + lam)) ** 2 * (lam * projected_variance - sampling_variance) * (lam / (h + lam))
        return float((p[:, None] * part).sum())

    low, high = float(log_lams.min()), float(log_lams.max())
    while high - low > LOG_LAM_TOLERANCE:
        middle = (low + high) / 2
        low, high = (low, middle) if slope(middle) > 0 else (middle, high)
    return exp((low + high) / 2)


def lam_factors(among: SampledRandomEffects, n: Tensor) -> tuple[Tensor, Tensor]:
    """sigma_i^2 / n_i of all clients [m] and 1 / tau_j^2 [d]: their product is empirical Bayes' lam_ij."""
    noise = torch.full_like(n, float(among.spread.noise.mean()))
    noise[among.clients] = among.spread.noise
    return noise / n, 1 / among.spread.variance


def _from_summary(summary: ClientSummary, form: VarianceFormOrAuto) -> SampledRandomEffects:
    effects = fit_reml(summary, form) if isinstance(summary, LinearStats) else fit_reml_to_fits(summary, form)
    return SampledRandomEffects(effects, torch.arange(len(summary.n)))


def _theorems(
    fits: LocalFits, p: Tensor, spread: SampledRandomEffects, ridge: float, radii: Radii
) -> dict[str, LambdaRule]:
    """alternative's and `effect`'s rules at the estimated constants."""
    n = fits.n
    hessian = fits.hessian + ridge * torch.eye(fits.hessian.shape[1], dtype=fits.hessian.dtype)
    convexity, smooth = theorem_convexity(hessian, n, p), smoothness(hessian, n).value
    mu, rho = convexity.value, gradient_noise(fits)
    sigma2 = float(spread.spread.noise.mean())
    noise = rho.value if isfinite(rho.value) else sqrt(sigma2 * float(p @ trace(fits.hessian)))
    client_noise = torch.where(fits.freedom > 0, trace(fits.gradient_cov), sigma2 * trace(fits.hessian)).sqrt()

    def rule(source: str, value: Callable[[], float | Tensor], *inputs: Estimate) -> LambdaRule:
        doubts = tuple(dict.fromkeys(w for part in (convexity, *inputs) for w in part.warnings))
        if not mu > 0 or not all(bool(torch.as_tensor(part.value).isfinite().all()) for part in inputs):
            return LambdaRule(nan, source, doubts)
        lam = value()
        lam = round_lam(lam) if isinstance(lam, float) else lam
        single_lam = lam if isinstance(lam, float) and isfinite(lam) else None
        return LambdaRule(lam, source, (*doubts, *assumption_warnings(mu, smooth, n, p, single_lam)))

    def one_stage() -> float:
        return lambda_one_stage(radii.most.value, mu, smooth, noise, p, n, cap=MAX_LAM_PER_SMOOTHNESS).lam

    def shrink_jointly() -> float:
        return float(lambda_shrinkage(radii.rms.value, mu, noise, 1 / s1(p, n)))

    def shrink_by_client() -> Tensor:
        return torch.from_numpy(lambda_shrinkage(radii.each.value.numpy(), mu, client_noise.numpy(), n.numpy()))

    return {
        "aer": rule("alternative, Theorem 4.4", lambda: lambda_aer(radii.rms.value, mu, p, n).lam, radii.rms),
        "ier": rule("alternative, Theorem 4.5", lambda: lambda_ier(radii.most.value, mu, p, n).lam, radii.most),
        "theory": rule("effect, Theorem 1", one_stage, radii.most),
        "shrinkage": rule("noise_i^2 / (n_i mu R_i^2)", shrink_by_client, radii.each),
        "shrinkage_of_all": rule("noise^2 S1 / (mu R^2)", shrink_jointly, radii.rms),
    }
