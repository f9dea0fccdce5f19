"""The lam with which FedProx has a small average excess risk.

With S1, S2, C_p of `weights.py` and R = R_rms, R^2 = sum_i p_i |w*_i - w*_avg|^2:

    A   R >= sqrt(S1)                        lam = mu S1 / (16 R^2)
    B   S2/sqrt(S1) <= R <= sqrt(S1)         lam = mu sqrt(S1) / (16 C_p R)
    C   R <= S2/sqrt(S1)                     lam = mu S1 / (16 C_p S2) = mu / (16 p_max)

lam is continuous at the border of B and C and jumps by the factor 1/C_p at the border of A and B (A rules there). In
every case p_max lam <= mu/16, which the stability bound needs (Eq. C.5). The risk is then `upper_bounds.fedprox_aer`.

Assumes  `alternative`'s Assumptions A and C(a): bounded domain, bounded loss, every L_i mu-strongly convex, n_i >= 4
         smooth/mu.
Reads    The border of B and C is printed as S2/S1. Its units, the estimates around it and the stated regime border
         R^2 = 1/(mN) all need S2/sqrt(S1).

Source   alternative, Theorem 4.4 and its proof (Appendix C.3).
"""

from math import sqrt
from typing import Literal, NamedTuple

from numpy.typing import ArrayLike

from mooring.theory.weights import imbalance, require_nonnegative, require_positive, s1, s2


class AerLambda(NamedTuple):
    lam: float
    case: Literal["A", "B", "C"]


def regime_borders(p: ArrayLike, n: ArrayLike) -> tuple[float, float]:
    """The radii (S2/sqrt(S1), sqrt(S1)) that separate the cases C, B and A."""
    s1_ = s1(p, n)
    return s2(p, n) / sqrt(s1_), sqrt(s1_)


def lambda_aer(radius: float, mu: float, p: ArrayLike, n: ArrayLike) -> AerLambda:
    """lam and the case it falls in, for the heterogeneity radius R_rms."""
    require_positive("lambda_aer", mu=mu)
    require_nonnegative("lambda_aer", radius=radius)
    lower, upper = regime_borders(p, n)
    if radius >= upper:
        return AerLambda(mu * s1(p, n) / (16 * radius**2), "A")
    if radius >= lower:
        return AerLambda(mu * sqrt(s1(p, n)) / (16 * imbalance(p, n) * radius), "B")
    return AerLambda(mu * s1(p, n) / (16 * imbalance(p, n) * s2(p, n)), "C")
