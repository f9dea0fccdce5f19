"""The constants of logistic regression on bounded features.

l(w; x, y) = log(1 + exp(-y x'w)), y = +-1, every coordinate of x at most bound in size, 0 in W, diameter D of W. With
a = bound D sqrt(d):

    ell_max = log(1 + e^a)         smooth = noise^2 = bound^2 d/4         mu0 = (e^{a/2} + e^{-a/2})^-2

grad^2 l >= mu0 x x' on W, so L_i is strongly convex with mu0 times the smallest eigenvalue of (1/n_i) sum_j x_j x_j'.

Assumes  the model is true (y is drawn with head probability 1/(1 + e^{-x'w*_i})): only then noise^2 <= smooth.
Reads    Eq. 4.1 lacks /2 in its second exponent; mu0 is 1/(x^{1/2} + x^{-1/2})^2 at x = e^a, that is sigmoid'(a).
Reads    The lemma's ell_max = a drops an additive term of at most log 2, without which the bound can fail.

Source   alternative, Lemma 4.1 (Eqs. 4.1, 4.2).
"""

from math import sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import expit

from mooring.theory.weights import require_positive


class LogisticConstants(NamedTuple):
    ell_max: float
    smooth: float
    noise: float
    mu0: float


def logistic_constants(bound: float, dim: int, diameter: float) -> LogisticConstants:
    """ell_max, smooth, noise and mu0 for features bounded by `bound` in R^dim and a domain of that diameter."""
    require_positive("logistic_constants", bound=bound, dim=dim, diameter=diameter)
    reach = bound * diameter * sqrt(dim)
    smooth = bound**2 * dim / 4
    return LogisticConstants(
        ell_max=float(np.logaddexp(0.0, reach)),
        smooth=smooth,
        noise=sqrt(smooth),
        mu0=float(expit(reach) * expit(-reach)),
    )


def logistic_strong_convexity(x: ArrayLike, bound: float, diameter: float) -> float:
    """A lower bound on the strong convexity of one client's L_i over W, from its features x [n, d]."""
    x = np.asarray(x, dtype=float)
    smallest = np.linalg.eigvalsh(x.T @ x / x.shape[0])[0]
    return float(logistic_constants(bound, x.shape[1], diameter).mu0 * max(smallest, 0.0))
