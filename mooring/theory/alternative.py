"""The theorem of the alternative: one global model, or local models.

Either FedAvg or local training is minimax optimal up to constants, depending on heterogeneity (N samples, m clients):

    R^2 <= ell_max m / (mu N)    ->  "global"   every client uses the FedAvg model
    otherwise                    ->  "local"    every client uses its local model

R is R_rms for the average excess risk, R_max for each client's. The risk is then `upper_bounds.better_aer` or
`better_ier`.

FedProx has the same borders, with a slower rate between them (Section 3.4; order of the excess risk):

    average    R^2 >= S1: S1             S2^2/S1 <= R^2 <= S1: R sqrt(S1)        R^2 <= S2^2/S1: S2
    client i   R^2 >= m/N: 1/n_i         1/N <= R^2 <= m/N: R/sqrt(n_i)          R^2 <= 1/N: sqrt(m)/N

For equal sizes and weights S1 = m/N, S2 = 1/N, S2^2/S1 = 1/(mN).

Assumes  `alternative`'s Assumptions A and B or C, sizes of one order; mu, smooth, ell_max (and noise) of order 1.
Departs  The corollaries use one threshold for every p. Given p, ell_max S1/mu is used: where the risk bound of local
         training equals the heterogeneity term of FedAvg's. For p = n/N both agree.
Departs  `crossing_radius` is the border in the units of w: noise/(mu sqrt(n)). For quadratics of curvature mu the
         crossing is exactly there, but for the factor sqrt(1 - 1/m).
Reads    Remark 3.1 states that both are optimal when R is of order m/N; it is R^2.

Source   alternative, Theorem 3.3, Corollaries 3.1 and 4.1, Section 3.4.
"""

from math import sqrt
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mooring.theory.lambda_aer import regime_borders
from mooring.theory.weights import require_nonnegative, require_positive, s1, s2


class Regime(NamedTuple):
    name: Literal["local", "middle", "global"]
    order: float


def threshold_squared(mu: float, ell_max: float, n: ArrayLike, p: ArrayLike | None = None) -> float:
    """Return the R^2 up to which the global model is chosen: ell_max m/(mu N), or ell_max S1/mu if p is given."""
    require_positive("threshold_squared", mu=mu, ell_max=ell_max)
    n = np.asarray(n, dtype=float)
    inverse_size = n.size / n.sum() if p is None else s1(p, n)
    return float(ell_max * inverse_size / mu)


def choose_model(
    radius: float, mu: float, ell_max: float, n: ArrayLike, p: ArrayLike | None = None
) -> Literal["global", "local"]:
    """Return the model that the dichotomous strategy deploys at all clients."""
    require_nonnegative("decide", radius=radius)
    return "global" if radius**2 <= threshold_squared(mu, ell_max, n, p) else "local"


def crossing_radius(mu: float, noise: float, n: ArrayLike) -> NDArray:
    """Return noise/(mu sqrt(n)), elementwise: the distance from the others at which local training is as good."""
    require_positive("crossing_radius", mu=mu)
    return noise / (mu * np.sqrt(np.asarray(n, dtype=float)))


def fedprox_aer_regime(radius: float, p: ArrayLike, n: ArrayLike) -> Regime:
    """Return the regime of R_rms and the order of FedProx's average excess risk in it."""
    require_nonnegative("fedprox_aer_regime", radius=radius)
    lower, upper = regime_borders(p, n)
    if radius >= upper:
        return Regime("local", s1(p, n))
    if radius >= lower:
        return Regime("middle", radius * upper)
    return Regime("global", s2(p, n))


def fedprox_ier_regime(radius: float, n: ArrayLike) -> Regime:
    """Return the regime of R_max and the order of FedProx's excess risk in it, for a client with N/m samples."""
    require_nonnegative("fedprox_ier_regime", radius=radius)
    n = np.asarray(n, dtype=float)
    clients, total = n.size, float(n.sum())
    if radius >= sqrt(clients / total):
        return Regime("local", clients / total)
    if radius >= sqrt(1 / total):
        return Regime("middle", radius * sqrt(clients / total))
    return Regime("global", sqrt(clients) / total)
