"""What no algorithm can beat: minimax lower bounds on the excess risk.

For some problem with heterogeneity R every algorithm suffers, up to an absolute constant,

    average excess risk      >=  mu ( min(smooth m/N, R^2) + smooth/N )        R = R_rms
    client i's excess risk   >=  mu ( min(smooth/n_i, R^2) + smooth/N )        R = R_max

and in squared distance to the truth, with d in place of smooth and without mu (logistic regression),

    sum_i n_i/N E|w_i - w*_i|^2  >=  min(d m/N, R^2) + d/N          E|w_i - w*_i|^2  >=  min(d/n_i, R^2) + d/N

Assumes  sample sizes of one order, n_i >= C smooth, m at most polynomial in N/m.
Reads    For R^2 below m/N the bound is R^2 + 1/N (Eq. 1.4), not 1/N alone as one bullet of Section 3.1 has it.
Reads    In Appendix A the prior's scale is c <= 1/(2 sqrt2 c_X), and its second case compares R^2 (not R) with d m/N.

Source   alternative, Theorem 3.1 (Eqs. 3.1, 3.2) and Theorem 4.1 (Eqs. 4.3, 4.4).
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray


def aer_lower(radius: float, mu: float, smooth: float, n: ArrayLike) -> float:
    """Order of the smallest average excess risk (Eq. 3.1); n per client."""
    return mu * estimation_aer_lower(radius, smooth, n)


def ier_lower(radius: float, mu: float, smooth: float, n: ArrayLike) -> NDArray:
    """Order of the smallest excess risk of each client (Eq. 3.2)."""
    return mu * estimation_ier_lower(radius, smooth, n)


def estimation_aer_lower(radius: float, dim: float, n: ArrayLike) -> float:
    """Order of the smallest average squared distance to the truths (Eq. 4.3)."""
    n = np.asarray(n, dtype=float)
    return float(min(dim * n.size / n.sum(), radius**2) + dim / n.sum())


def estimation_ier_lower(radius: float, dim: float, n: ArrayLike) -> NDArray:
    """Order of each client's smallest squared distance to its truth (Eq. 4.4)."""
    n = np.asarray(n, dtype=float)
    return np.minimum(dim / n, radius**2) + dim / n.sum()
