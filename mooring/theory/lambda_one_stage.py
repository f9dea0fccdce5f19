"""Which lam makes the exact FedProx minimizer optimal, and the error it then has.

Let w~ minimise sum_i p_i (L_i(w_i) + lam/2 |w - w_i|^2), R >= max_i |w*_i - w*_avg|, cond = smooth/mu. If

    R >  1/sqrt(n):   lam <= noise^2 / (n mu R^2)
    R <= 1/sqrt(n):   lam >= max{64 cond^2 smooth, max(2 cond, 5) mu (2 L^2 R^2 + noise^2/n)/(L^2 R^2 + noise^2/N)} - mu

(L = smooth), then

    E|w~   - w*_avg|^2 <= C1/N + C2 min(1/n, R^2)
    E|w~_i - w*_i  |^2 <= C3/N + C4 min(1/n, R^2)

    C1 = 32 noise^2/mu^2         C2 = max{((1 + sqrt3) noise/mu)^2, 32 cond^2}
    C3 = 192 noise^2/mu^2        C4 = max{(noise (1 + sqrt(4 C2 + 5))/mu)^2, 198 cond^2}

Assumes  every record's loss mu-strongly convex and smooth-smooth, E|grad l(w*_i, z)|^2 <= noise^2 (rho in `effect`),
         n_i = n, p_i = 1/m.
Departs  The theorem gives ranges; equality is taken. Other p and n enter through 1/n -> S1 (Eq. 34) and 1/N -> S2
         (Lemma 5): the proof of the global bound covers that, the local one needs equal n.
Departs  lam is capped at cap x smooth (there the minimizer is the global model to about four digits) and `capped` says
         so; large="inf" returns lam = inf instead, which stands for training one global model.
Departs  scale_free=True compares R mu/noise, not R, with 1/sqrt(n): the printed border changes with the units of w. The
         two error bounds are for the printed border.
Reads    Eq. 73 drops cond^2 from Eq. 72; `lambda_floor_local` is the a_2 of Eq. 81 with it. The rule above still
         implies it.
Reads    Eq. 50 adds two squared distances without the factor 2 and Lemma 5 bounds a first moment, so the constants hold
         up to a factor of about 2.

Source   effect, Theorem 1, Lemmas 1, 4, 5, Eqs. 34, 54, 75, 81, 82.
"""

from math import inf, sqrt
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mooring.core.errors import RequestError
from mooring.theory.weights import require_nonnegative, require_positive, s1, s2


class OneStageLambda(NamedTuple):
    lam: float
    case: Literal["small", "large"]  # small: near local training; large: near one global model
    capped: bool  # the theorem asks for more than the cap


class ErrorConstants(NamedTuple):
    c1: float
    c2: float
    c3: float
    c4: float


def regime_border(mu: float, noise: float, p: ArrayLike, n: ArrayLike, *, scale_free: bool = False) -> float:
    """The R at which the rule jumps: sqrt(S1), or noise sqrt(S1)/mu when scale_free."""
    return sqrt(s1(p, n)) * (noise / mu if scale_free else 1.0)


def lambda_one_stage(
    radius: float,
    mu: float,
    smooth: float,
    noise: float,
    p: ArrayLike,
    n: ArrayLike,
    *,
    scale_free: bool = False,
    large: Literal["floor", "inf"] = "floor",
    cap: float = 1e4,
) -> OneStageLambda:
    """The lam of Theorem 1 for the heterogeneity radius R_max; p and n per client."""
    require_positive("lambda_one_stage", mu=mu, smooth=smooth, cap=cap)
    require_nonnegative("lambda_one_stage", radius=radius, noise=noise)
    if large not in ("floor", "inf"):
        raise RequestError(f"lambda_one_stage: large must be 'floor' or 'inf', got {large!r}.")
    if radius > regime_border(mu, noise, p, n, scale_free=scale_free):
        lam = noise**2 * s1(p, n) / (mu * radius**2)  # Eq. 34
        case: Literal["small", "large"] = "small"
    elif large == "inf":
        return OneStageLambda(inf, "large", False)
    else:
        lam = float(lambda_floor(radius, mu, smooth, noise, s1(p, n), s2(p, n)))
        case = "large"
    return OneStageLambda(min(lam, cap * smooth), case, lam > cap * smooth)


def lambda_shrinkage(radius: ArrayLike, mu: float, noise: ArrayLike, n: ArrayLike) -> NDArray:
    """noise_i^2 / (n_i mu R_i^2), elementwise: the rule's first case for every R, one lam per client if asked.

    mu times the ratio of sampling variance, noise^2/(mu^2 n), to squared distance from the others; inf where R_i = 0.
    Not a theorem: `effect` leaves one lam per client (Eq. 18) open.
    """
    require_positive("lambda_shrinkage", mu=mu)
    radius, variance = np.broadcast_arrays(np.asarray(radius, float), np.square(noise) / np.asarray(n, float))
    lam = np.full(radius.shape, inf)
    return np.divide(variance, mu * radius**2, out=lam, where=radius**2 > 0)


def lambda_floor(radius, mu, smooth, noise, s1_, s2_):
    """The sufficient lower bound on lam of Theorem 1 (Eq. 82); s1_ = S1 = 1/n, s2_ = S2 = 1/N."""
    cond = smooth / mu
    by_noise = np.maximum(2 * cond, 5) * mu * _ratio(radius, smooth, noise, s1_, s2_)
    return np.maximum(64 * cond**2 * smooth, by_noise) - mu


def lambda_floor_global(radius, mu, smooth, noise, s1_, s2_):
    """a_1 of Eq. 81: what the global bound needs."""
    cond = smooth / mu
    return 8 * cond / mu * np.maximum(8 * smooth**2, mu**2 / 4 * _ratio(radius, smooth, noise, s1_, s2_)) - mu


def lambda_floor_local(radius, mu, smooth, noise, s1_, s2_):
    """a_2 of Eq. 81 with the cond^2 of Eq. 72 restored: what the local bound needs."""
    cond = smooth / mu
    above = 64 * cond**2 * noise**2 * s2_ + 66 * cond**2 * smooth**2 * radius**2 + noise**2 * s1_
    below = 32 * noise**2 * s2_ / mu**2 + 33 * cond**2 * radius**2
    return np.sqrt(8 * above / below) - mu


def _ratio(radius, smooth, noise, s1_, s2_):
    above, below = 2 * smooth**2 * radius**2 + noise**2 * s1_, smooth**2 * radius**2 + noise**2 * s2_
    # 0/0 when there is neither spread nor noise: its limit along R -> 0 without noise is 2.
    return np.where(below > 0, above / np.where(below > 0, below, 1.0), 2.0)


def error_constants(mu: float, smooth: float, noise: float) -> ErrorConstants:
    """C1..C4 of Theorem 1."""
    require_positive("error_constants", mu=mu, smooth=smooth)
    cond, signal = smooth / mu, noise / mu
    c2 = max(((1 + sqrt(3)) * signal) ** 2, 32 * cond**2)
    c4 = max((signal * (1 + sqrt(4 * c2 + 5))) ** 2, 198 * cond**2)
    return ErrorConstants(32 * signal**2, c2, 192 * signal**2, c4)


def global_error_bound(radius: float, mu: float, smooth: float, noise: float, p: ArrayLike, n: ArrayLike) -> float:
    """C1 S2 + C2 min(S1, R^2) >= E|w~ - w*_avg|^2 (Eq. 6, Eq. 56)."""
    c = error_constants(mu, smooth, noise)
    return c.c1 * s2(p, n) + c.c2 * min(s1(p, n), radius**2)


def local_error_bound(radius: float, mu: float, smooth: float, noise: float, p: ArrayLike, n: ArrayLike) -> float:
    """C3 S2 + C4 min(S1, R^2) >= E|w~_i - w*_i|^2 for every client (Eq. 7)."""
    c = error_constants(mu, smooth, noise)
    return c.c3 * s2(p, n) + c.c4 * min(s1(p, n), radius**2)


def distance_to_global(mu: float, smooth: float, lam: float, p: ArrayLike, grad_norms: ArrayLike) -> float:
    """Bound on |w~ - w_GT|^2, w_GT = argmin sum_i p_i L_i, from the norms |grad L_i(w~)| (Lemma 1, Eq. 4)."""
    mean_square = np.sum(np.asarray(p, float) * np.square(grad_norms))
    return float(4 * (1 + smooth / mu) / (mu * (mu + lam)) * mean_square)


def distance_to_personal(mu: float, lam: float, grad_norms: ArrayLike) -> NDArray:
    """Bound on |w~ - w~_i| per client from the norms |grad L_i(w~)| (Lemma 4)."""
    return 2 * np.asarray(grad_norms, float) / (mu + lam)


def global_error(mu: float, smooth: float, noise: float, radius: float, p: ArrayLike, n: ArrayLike) -> float:
    """Bound on E|w_GT - w*_avg|: (noise sqrt(S2) + smooth R) 2/mu (Lemma 5)."""
    return (noise * sqrt(s2(p, n)) + smooth * radius) * 2 / mu
