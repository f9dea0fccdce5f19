"""lam from data: every rule side by side, each with where it came from.

    one                     the single lam with the least expected risk under the estimated spread
    client                  lam_i  = sigma^2 / (n_i tau^2)
    coefficient             lam_j  = sigma^2 S1 / tau_j^2            S1 = sum_i p_i/n_i
    client and coefficient  lam_ij = sigma^2 / (n_i tau_j^2)
    aer, ier                alternative, Theorems 4.4 and 4.5 at the estimated radii
    theory                  effect, Theorem 1 at the estimated R_max
    shrinkage               noise^2 S1 / (mu R^2), and with each client's own noise_i, n_i and R_i

The first four are empirical Bayes (`spread.py`): right for coefficients that are spread normally, close to right for
others. The theorems' constants are worst cases: expect them off by orders of magnitude. lam = inf stands for one common
model, lam = 0 for everyone alone.
"""

from __future__ import annotations

from math import inf, isfinite, nan
from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from mooring.theory.constants import assumption_warnings, gradient_noise, smoothness, strong_convexity
from mooring.theory.heterogeneity import client_radii, client_weights, radius, radius_max
from mooring.theory.heterogeneity_likelihood import radius_likelihood
from mooring.theory.lambda_aer import lambda_aer
from mooring.theory.lambda_ier import lambda_ier
from mooring.theory.lambda_one_stage import lambda_one_stage, lambda_shrinkage
from mooring.theory.spread import Spread, spread_fits, spread_likelihood
from mooring.theory.summaries import LinearStats, LocalFits, fits_from_stats, trace
from mooring.theory.weights import s1

CAP = 1e4  # lam of `effect` is cut at so many times the smoothness


class Rule(NamedTuple):
    lam: float | Tensor  # one number, [m], [d] or [m, d]
    source: str
    warnings: tuple[str, ...] = ()


def lambda_rules(
    summary: LinearStats | LocalFits,
    p: Tensor | None = None,
    scalar: Spread | None = None,
    diagonal: Spread | None = None,
) -> dict[str, Rule]:
    """All rules from the clients' summaries; nan where a rule has no value. Spreads may be given (`spread_laplace`)."""
    fits = fits_from_stats(summary) if isinstance(summary, LinearStats) else summary
    n, p = fits.n, client_weights(p, fits.n)
    find = spread_likelihood if isinstance(summary, LinearStats) else spread_fits
    scalar = find(summary, "scalar") if scalar is None else scalar
    diagonal = find(summary, "diagonal") if diagonal is None else diagonal
    source = f"empirical Bayes, {scalar.method}"
    table = {
        "one": Rule(best_single(scalar, fits.hessian, n, p), source, scalar.warnings),
        "client": Rule(scalar.noise / n / scalar.variance[0], source, scalar.warnings),
        "coefficient": Rule((p * diagonal.noise / n).sum() / diagonal.variance, source, diagonal.warnings),
        "client and coefficient": Rule((diagonal.noise / n)[:, None] / diagonal.variance, source, diagonal.warnings),
    }
    return table | _theorems(fits, p, scalar)


def best_single(spread: Spread, hessian: Tensor, n: Tensor, p: Tensor) -> float:
    """The lam that minimises sum_i p_i E[L_i(v_i) - L_i(w*_i)], to second order and with w known.

    Along an eigenvector of H_i with curvature h and spread tau^2 the expected risk is
    h (lam^2 tau^2 + h sigma^2/n_i) / (2 (h + lam)^2), least at sigma^2/(n_i tau^2): lam lies between the clients' own.
    """
    if not bool((spread.variance > 0).any()):
        return inf
    h, vectors = torch.linalg.eigh(hessian)
    h = h.clamp(min=0)
    along = torch.einsum("mjk,j->mk", vectors**2, spread.variance)
    own = (spread.noise / n)[:, None]
    ends = (own / along).log()

    def risk(log_lam: float) -> float:
        lam = np.exp(log_lam)
        part = h * (lam**2 * along + h * own) / (h + lam) ** 2
        return float((p[:, None] * part).sum())

    low, high = float(ends.min()), float(ends.max())
    if high - low < 1e-9:
        return float(np.exp(low))
    return float(np.exp(minimize_scalar(risk, bounds=(low, high), method="bounded", options={"xatol": 1e-6}).x))


def _theorems(fits: LocalFits, p: Tensor, spread: Spread) -> dict[str, Rule]:
    """The rules of `alternative` and `effect` at the estimated constants."""
    n = fits.n
    mu, smooth = strong_convexity(fits.hessian, n), smoothness(fits.hessian, n)
    noise, rms = gradient_noise(fits), radius(fits, p)
    if not isfinite(rms.value):
        rms = radius_likelihood(spread, n, p)
    most, each = radius_max(fits, p), client_radii(fits, p)
    known = {"mu": mu, "noise": noise, "R": rms, "R_max": most}

    def rule(source: str, value, *needs: str) -> Rule:
        if missing := [name for name in needs if not isfinite(known[name].value) or known["mu"].value <= 0]:
            return Rule(nan, source, (f"{', '.join(missing)}: not available here.", *mu.warnings))
        lam = value()
        notes = tuple(w for name in needs for w in known[name].warnings)
        one = lam if isinstance(lam, float) and isfinite(lam) else None
        return Rule(lam, source, (*notes, *assumption_warnings(mu.value, smooth.value, n, p, one)))

    def one_stage() -> float:
        return lambda_one_stage(most.value, mu.value, smooth.value, noise.value, p, n, cap=CAP).lam

    def shrunk() -> float:
        return float(lambda_shrinkage(rms.value, mu.value, noise.value, 1 / s1(p, n)))

    def shrunk_each() -> Tensor:
        own = trace(fits.gradient_cov).sqrt().numpy()
        return torch.from_numpy(lambda_shrinkage(each.value.numpy(), mu.value, own, n.numpy()))

    return {
        "aer": rule("alternative, Theorem 4.4", lambda: lambda_aer(rms.value, mu.value, p, n).lam, "mu", "R"),
        "ier": rule("alternative, Theorem 4.5", lambda: lambda_ier(most.value, mu.value, p, n).lam, "mu", "R_max"),
        "theory": rule("effect, Theorem 1", one_stage, "mu", "noise", "R_max"),
        "shrinkage": rule("noise^2 S1 / (mu R^2)", shrunk, "mu", "noise", "R"),
        "shrinkage per client": rule("noise_i^2 / (n_i mu R_i^2)", shrunk_each, "mu", "noise", "R_max"),
    }
