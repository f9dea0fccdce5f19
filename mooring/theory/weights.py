"""Client weights and the two variance sums in which the theorems of `alternative` and `effect` are written.

    S1  = sum_i p_i   / n_i      the average client's variance when every client trains locally
    S2  = sum_i p_i^2 / n_i      the global model's variance of all clients
    C_p = p_max S1 / S2          how uneven the weights are (alternative, Eq. 4.13)

With equal n and p = 1/m: S1 = 1/n = m/N, S2 = 1/N, C_p = 1. With p = n/N: S1 = m/N, S2 = 1/N, C_p = m n_max / N.
`alternative` calls C_p "some constant"; the smallest admissible value, used here, is always >= 1.

Source   alternative, Section 4.2 (Theorem 4.3) and Theorem 4.4; effect, Eq. 34.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mooring.core.errors import RequestError


def require_positive(where: str, **values: float) -> None:
    """Refuse a constant that is not a finite number > 0."""
    for name, value in values.items():
        if not (np.isfinite(value) and value > 0):
            raise RequestError(f"{where}: {name} must be a finite number > 0, got {value}.")


def require_nonnegative(where: str, **values: float) -> None:
    """Refuse a quantity that is not a finite number >= 0."""
    for name, value in values.items():
        if not (np.isfinite(value) and value >= 0):
            raise RequestError(f"{where}: {name} must be a finite number >= 0, got {value}.")


def check_weights(p: ArrayLike, n: ArrayLike) -> tuple[NDArray, NDArray]:
    """p and n as float arrays [m]: p on the simplex, every n > 0."""
    p, n = np.asarray(p, dtype=float), np.asarray(n, dtype=float)
    if p.ndim != 1 or p.shape != n.shape or p.size == 0:
        raise RequestError(f"weights: p and n need one entry per client each, got shapes {p.shape} and {n.shape}.")
    if not np.all(p >= 0) or not np.isclose(p.sum(), 1.0, rtol=0, atol=1e-8):
        raise RequestError(f"weights: p must be >= 0 and sum to 1, got the sum {p.sum()} and the minimum {p.min()}.")
    if not np.all(np.isfinite(n) & (n > 0)):
        raise RequestError(f"weights: every client needs n > 0 samples, got {n.min()} at client {n.argmin()}.")
    return p, n


def uniform_weights(clients: int) -> NDArray:
    """p_i = 1/m."""
    return np.full(clients, 1.0 / clients)


def size_weights(n: ArrayLike) -> NDArray:
    """p_i = n_i / N."""
    n = np.asarray(n, dtype=float)
    return n / n.sum()


def s1(p: ArrayLike, n: ArrayLike) -> float:
    """sum_i p_i / n_i."""
    p, n = check_weights(p, n)
    return float(np.sum(p / n))


def s2(p: ArrayLike, n: ArrayLike) -> float:
    """sum_i p_i^2 / n_i."""
    p, n = check_weights(p, n)
    return float(np.sum(p**2 / n))


def imbalance(p: ArrayLike, n: ArrayLike) -> float:
    """C_p = p_max S1 / S2 >= 1."""
    p, n = check_weights(p, n)
    # S2 <= p_max S1 holds exactly; rounding alone could give a value just below 1.
    return max(1.0, float(p.max() * s1(p, n) / s2(p, n)))
