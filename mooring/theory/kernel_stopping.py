"""When kernel FedAvg or FedProx must stop before it fits the noise.

    Rad(eps) = sqrt( (1/N) sum_i min{lambda_i, eps^2} )                  lambda: eigenvalues of K_x = k(x, x)/N
    T        = max{ t : Rad(1/sqrt(eta t s)) <= norm/(sqrt(2e) sigma eta t s) },    norm = 1 in the paper

Up to T the squared bias norm^2/(2 e eta t s) dominates the variance. eta t s Rad(1/sqrt(eta t s)) never decreases in t,
so T is found by bisection: 0 if not even one round passes, cap if there is no noise. For a kernel of rank d and large
t, T ~ N norm^2/(2e sigma^2 d eta s).

Assumes  gamma_K < 1 (FedAvg); sigma, the standard deviation of the response noise, known.
Reads    The right side of Eq. 23 is typeset as 1/sqrt(2e sigma eta t s); the proofs use 1/(sqrt(2e) sigma eta t s).
Departs  norm = |f_0 - f|_H is an argument: the paper's rule is this one in units where it is 1, and stops far too early
         for others: on sin(2 pi x) with the kernel min(x, z) its error is 8 to 12 times the best one.
Departs  sigma and the spectrum are estimated where they are unknown: from local residuals of an undersmoothed fit, from
         held-out rows, and from the clients' second-moment matrices of (random) features. `kernel` leaves this open.

Source   kernel, Eqs. 22 and 23, Lemmas 19 and 21.
"""

import math
from collections.abc import Sequence

import numpy as np
from scipy.optimize import brentq

from mooring.core.errors import RequestError
from mooring.theory.kernel_operator import LocalUpdate
from mooring.theory.weights import require_nonnegative, require_positive


def rademacher(eigenvalues: np.ndarray, radius: float, samples: int) -> float:
    """Rad(radius); eigenvalues that are 0 may be left out, `samples` is N all the same."""
    return math.sqrt(float(np.minimum(eigenvalues, radius**2).sum()) / samples)


def may_continue(
    rounds: int, eigenvalues: np.ndarray, samples: int, update: LocalUpdate, sigma: float, norm: float = 1.0
) -> bool:
    """Eq. 23's inequality at t = rounds."""
    progress = update.eta * rounds * update.steps
    return math.sqrt(2 * math.e) * sigma * progress * rademacher(eigenvalues, progress**-0.5, samples) <= norm


def stopping_time(
    eigenvalues: np.ndarray,
    samples: int,
    update: LocalUpdate,
    sigma: float,
    norm: float = 1.0,
    cap: int = 1_000_000,
) -> int:
    """T of Eq. 23, between 0 and cap."""
    require_positive("kernel stopping time", samples=samples, norm=norm, cap=cap)
    require_nonnegative("kernel stopping time", sigma=sigma)
    eigenvalues = np.maximum(np.asarray(eigenvalues, dtype=float), 0.0)

    def fits(rounds: int) -> bool:
        return may_continue(rounds, eigenvalues, samples, update, sigma, norm)

    if not fits(1):
        return 0
    if fits(cap):
        return cap
    low, high = 1, cap
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def rank_stopping_time(rank: int, samples: int, update: LocalUpdate, sigma: float, norm: float = 1.0) -> float:
    """N norm^2/(2 e sigma^2 d eta s): T for rank d once all d eigenvalues exceed 1/(eta T s)."""
    return samples * norm**2 / (2 * math.e * sigma**2 * rank * update.eta * update.steps)


def sigma_from_residuals(grams: Sequence[np.ndarray], responses: Sequence[np.ndarray], share: float = 0.5) -> float:
    """Noise level from each client's residuals after a local kernel ridge fit H_i with share * n_i degrees of freedom.

    sigma^2 = sum_i |(I - H_i) y_i|^2 / sum_i tr (I - H_i)^2. Undersmoothing keeps the signal out of the residuals; what
    is left of it biases the estimate upwards, hence the stop early. A kernel of lower rank is fitted exactly: residual
    variance of least squares.
    """
    if not 0 < share < 1:
        raise RequestError(f"sigma from residuals: share must be in (0, 1), got {share}.")
    squared, degrees = 0.0, 0.0
    for gram, y in zip(grams, responses):
        values, vectors = np.linalg.eigh(np.asarray(gram, dtype=float))
        left = 1 - _shrinkage(np.maximum(values, 0.0), share * len(y))
        squared += float(((left * (vectors.T @ y)) ** 2).sum())
        degrees += float((left**2).sum())
    return math.sqrt(squared / degrees)


def sigma_from_holdout(predictions: np.ndarray, responses: np.ndarray) -> float:
    """Root mean squared error on rows that took no part in the fit; holds the model's error too, hence stops early."""
    return math.sqrt(float(np.mean((np.asarray(responses) - np.asarray(predictions)) ** 2)))


def pooled_eigenvalues(moments: Sequence[np.ndarray], sizes: Sequence[int]) -> np.ndarray:
    """Non-zero eigenvalues of K_x, descending, from each client's X_i' X_i/n_i [d, d]: no row leaves its client."""
    pooled = np.average(np.stack(moments), axis=0, weights=sizes)
    return np.maximum(np.linalg.eigvalsh(pooled)[::-1], 0.0)


def _shrinkage(values: np.ndarray, degrees: float) -> np.ndarray:
    """v/(v + ridge) with sum `degrees`, or the projection on the range if that has fewer dimensions."""
    positive = values > len(values) * np.finfo(float).eps * values[-1]
    if positive.sum() <= degrees:
        return positive.astype(float)

    def excess(log_ridge: float) -> float:
        return float((values / (values + math.exp(log_ridge))).sum()) - degrees

    low, high = math.log(values[positive][0]) - 40, math.log(values.sum() / degrees)
    return values / (values + math.exp(brentq(excess, low, high)))
