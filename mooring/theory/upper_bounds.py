"""Excess risks of FedAvg, local training, FedProx and the better of the first two.

AER is the p-weighted average over the clients, IER one client's own; R is R_rms in the former and R_max in the latter;
noise is `alternative`'s sigma; S1, S2, C_p as in `weights.py`. Up to constants,

    FedAvg    AER  smooth ell_max/mu S2 + smooth R^2                IER  smooth noise^2/mu^2 S2 + smooth^3/mu^2 R^2
    Local     AER  smooth ell_max/mu S1                             IER  smooth ell_max/(mu n_i)
    better    AER  smooth min(ell_max m/(mu N), R^2) + smooth ell_max/mu S2
              IER  smooth^3/mu^2 min(ell_max/(mu n_i), R^2) + smooth noise^2/mu^2 S2
    FedProx   AER  (mu + C_p smooth ell_max/mu) (min(R sqrt(S1), S1) + S2)                       at lam of `lambda_aer`
              IER  [(mu + 1/mu)(smooth ell_max + (noise^2 smooth^2 + smooth^2 + noise^2)/mu^2) + mu D^2]
                   x (min(R/sqrt(n_i), 1/n_i) + sqrt(m)/N)                                       at lam of `lambda_ier`
    FedProx, any lam with p_max lam <= mu/16
              AER  C smooth ell_max S1/(mu + lam) + lam/2 R^2                                    (Proposition C.3)
              IER  min of Eqs. C.20 and C.21                                                     (Proposition C.5)

`constant` scales an order. FEDAVG_AER_PROOF, FEDAVG_IER_PROOF, LOCAL_PROOF and FEDPROX_PROOF are constants that the
proofs give for exact minimizers: with them a bound can be compared with a measured risk.

Assumes  `alternative`'s Assumptions A and C; n_i >= 4 smooth/mu; sizes of one order for every IER bound of FedProx and
         `better`.
Reads    Eq. 3.9 puts mu D^2 inside the factor (mu + 1/mu); Theorem 4.5 has it outside and is used.
Reads    C_p is its smallest admissible value and >= 1, so min(1, C_p) = 1 and max(1, C_p) = C_p.
Reads    In the middle regime FedProx's AER is of order R sqrt(m/N), not m/N as a bullet of Section 3.4 has it.

Source   alternative, Theorems 3.2, 4.2-4.5, Corollary 4.1, Propositions C.3-C.5.
"""

from math import sqrt

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mooring.theory.weights import check_weights, imbalance, require_positive, s1, s2

FEDAVG_AER_PROOF = (32.0, 4.0)  # Eq. C.1 with the stability bound 32 smooth ell_max p_i/(mu n_i)
FEDAVG_IER_PROOF = (8.0, 9.0)  # Eq. C.4 with |w - w*_avg|^2 <= 8/mu^2 (...) and smooth <= smooth^3/mu^2
LOCAL_PROOF = 32.0  # FedAvg with one client
FEDPROX_PROOF = 320.0  # Proposition 4.1 with E_OPT = 0 and gamma_i <= 160 smooth ell_max/(n_i (mu + lam))


def fedavg_aer(
    radius: float,
    mu: float,
    smooth: float,
    ell_max: float,
    p: ArrayLike,
    n: ArrayLike,
    *,
    constants: tuple[float, float] = (1.0, 1.0),
) -> float:
    """FedAvg's average excess risk (Eq. 4.6); constants of the variance and of the heterogeneity."""
    require_positive("fedavg_aer", mu=mu)
    return constants[0] * smooth * ell_max / mu * s2(p, n) + constants[1] * smooth * radius**2


def fedavg_ier(
    radius: float,
    mu: float,
    smooth: float,
    noise: float,
    p: ArrayLike,
    n: ArrayLike,
    *,
    constants: tuple[float, float] = (1.0, 1.0),
) -> float:
    """FedAvg's excess risk at any client (Eq. 4.7)."""
    require_positive("fedavg_ier", mu=mu)
    return constants[0] * smooth * (noise / mu) ** 2 * s2(p, n) + constants[1] * smooth**3 / mu**2 * radius**2


def local_aer(mu: float, smooth: float, ell_max: float, p: ArrayLike, n: ArrayLike, *, constant: float = 1.0) -> float:
    """The average excess risk of local training."""
    require_positive("local_aer", mu=mu)
    return constant * smooth * ell_max / mu * s1(p, n)


def local_ier(mu: float, smooth: float, ell_max: float, n: ArrayLike, *, constant: float = 1.0) -> NDArray:
    """Each client's excess risk of local training (Theorem 4.2)."""
    require_positive("local_ier", mu=mu)
    return constant * smooth * ell_max / (mu * np.asarray(n, dtype=float))


def better_aer(radius: float, mu: float, smooth: float, ell_max: float, p: ArrayLike, n: ArrayLike) -> float:
    """The average excess risk of the dichotomous strategy (Corollary 4.1)."""
    require_positive("better_aer", mu=mu)
    p, n = check_weights(p, n)
    return smooth * min(ell_max * n.size / (mu * n.sum()), radius**2) + smooth * ell_max / mu * s2(p, n)


def better_ier(
    radius: float, mu: float, smooth: float, ell_max: float, noise: float, p: ArrayLike, n: ArrayLike
) -> NDArray:
    """Each client's excess risk with the dichotomous strategy (Corollary 4.1)."""
    require_positive("better_ier", mu=mu)
    p, n = check_weights(p, n)
    choice = np.minimum(ell_max / (mu * n), radius**2)
    return smooth**3 / mu**2 * choice + smooth * (noise / mu) ** 2 * s2(p, n)


def fedprox_aer(
    radius: float, mu: float, smooth: float, ell_max: float, p: ArrayLike, n: ArrayLike, *, constant: float = 1.0
) -> float:
    """FedProx's average excess risk at the lam of Theorem 4.4 (Eq. 4.16)."""
    require_positive("fedprox_aer", mu=mu)
    s1_ = s1(p, n)
    rate = min(radius * sqrt(s1_), s1_) + s2(p, n)
    return constant * (mu + imbalance(p, n) * smooth * ell_max / mu) * rate


def fedprox_aer_at(
    lam: float,
    radius: float,
    mu: float,
    smooth: float,
    ell_max: float,
    p: ArrayLike,
    n: ArrayLike,
    *,
    constant: float = 1.0,
) -> float:
    """FedProx's average excess risk at a given lam (Proposition C.3); the constant scales the first term only."""
    return constant * smooth * ell_max * s1(p, n) / (mu + lam) + lam / 2 * radius**2


def fedprox_ier(
    radius: float,
    mu: float,
    smooth: float,
    ell_max: float,
    noise: float,
    diameter: float,
    n: ArrayLike,
    *,
    constant: float = 1.0,
) -> NDArray:
    """Each client's excess risk with FedProx at the lam of Theorem 4.5."""
    require_positive("fedprox_ier", mu=mu)
    n = np.asarray(n, dtype=float)
    inner = smooth * ell_max + (noise**2 * smooth**2 + smooth**2 + noise**2) / mu**2
    scale = (mu + 1 / mu) * inner + mu * diameter**2
    return constant * scale * (np.minimum(radius / np.sqrt(n), 1 / n) + sqrt(n.size) / n.sum())


def fedprox_ier_at(
    lam: float,
    radius: float,
    mu: float,
    smooth: float,
    ell_max: float,
    noise: float,
    diameter: float,
    p: ArrayLike,
    n: ArrayLike,
    *,
    constant: float = 1.0,
) -> NDArray:
    """Each client's excess risk with FedProx at a given lam: the smaller of Eqs. C.20 and C.21."""
    require_positive("fedprox_ier_at", mu=mu, lam=lam)
    p, n = check_weights(p, n)
    s2_ = s2(p, n)
    noisy = noise**2 * ((smooth / mu) ** 2 * np.sum(p / np.sqrt(n)) ** 2 + s2_)
    spread = (1 + (smooth / mu) ** 2) * radius**2 + (noise / mu) ** 2 * s2_
    by_estimate = (smooth * ell_max / n + noisy) / lam + lam * spread
    by_diameter = smooth * ell_max / (mu * n) + lam * diameter**2
    return constant * np.minimum(by_estimate, by_diameter)


def fedprox_global_error(
    lam: float, radius: float, mu: float, smooth: float, noise: float, p: ArrayLike, n: ArrayLike
) -> float:
    """E|w~ - w*_avg|^2 of FedProx's exact global model is at most this; R_max (Proposition C.4)."""
    require_positive("fedprox_global_error", mu=mu, lam=lam)
    p, n = check_weights(p, n)
    mean_noise = 48 * (smooth * noise / (mu * lam)) ** 2 * np.sum(p / np.sqrt(n)) ** 2
    return float(mean_noise + 48 * (smooth * radius / mu) ** 2 + 12 * ((mu + lam) * noise / (mu * lam)) ** 2 * s2(p, n))
