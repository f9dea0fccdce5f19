"""What the Moreau envelope inherits from the loss.

L_i is mu-strongly convex and smooth-smooth, lam >= 0,

    F_i(w)    = min_v  L_i(v) + lam/2 |v - w|^2         h_i(v) = L_i(v) + lam/2 |v - w|^2
    prox_i(w) = argmin_v h_i(v)                         grad F_i(w) = lam (w - prox_i(w))

Then F_i is mu_g-strongly convex and smooth_g-smooth, h_i is mu_l-strongly convex and smooth_l-smooth, and prox_i is
lip_prox-Lipschitz:

    mu_g = lam mu / (lam + mu)       smooth_g = lam smooth / (lam + smooth)       lip_prox = lam / (lam + mu)
    mu_l = mu + lam                  smooth_l = smooth + lam                      cond_g = smooth_g / mu_g

`alternative` states only the weaker smoothness lam of F_i. cond_g is written as cond (lam + mu) / (lam + smooth), so
that its limit 1 at lam = 0 is finite.

Source   effect, Lemma 2 (and Lemma 3 for the gradient); alternative, Lemma B.3.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from mooring.core.errors import RequestError
from mooring.theory.weights import require_nonnegative, require_positive


class MoreauConstants(NamedTuple):
    mu_g: float
    smooth_g: float
    mu_l: float
    smooth_l: float
    lip_prox: float
    cond_g: float


def moreau(mu: float, smooth: float, lam: float) -> MoreauConstants:
    """The constants of F_i, h_i and prox_i for a loss with constants mu <= smooth and the pull lam."""
    require_positive("moreau", mu=mu, smooth=smooth)
    require_nonnegative("moreau", lam=lam)
    if mu > smooth:
        raise RequestError(f"moreau: mu must be at most smooth, got mu = {mu} and smooth = {smooth}.")
    return MoreauConstants(
        mu_g=lam * mu / (lam + mu),
        smooth_g=lam * smooth / (lam + smooth),
        mu_l=mu + lam,
        smooth_l=smooth + lam,
        lip_prox=lam / (lam + mu),
        cond_g=smooth / mu * (lam + mu) / (lam + smooth),
    )


def mixed_strong_convexity(mu: float, lam: ArrayLike, p: ArrayLike) -> float:
    """Strong convexity of sum_i p_i F_i when every client has its own pull lam_i: sum_i p_i lam_i mu / (lam_i + mu)."""
    require_positive("mixed_strong_convexity", mu=mu)
    lam, p = np.asarray(lam, dtype=float), np.asarray(p, dtype=float)
    return float(np.sum(p * lam * mu / (lam + mu)))
