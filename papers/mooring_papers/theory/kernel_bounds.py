"""How far kernel FedAvg and FedProx are from any global model f after t rounds.

|g|_N^2 = mean of g(x_ij)^2; gap = |Delta_f|^2/N, Delta_f = (f_1*(x_1), ..., f_m*(x_m)) - f(x), is heterogeneity.
Lambda: eigenvalues of K_x P; lambda: of K_x; kappa = kappa_P; start_sq = |f_0 - f|_H^2; s = 1 for FedProx.

Proposition 7  E|f_t - f|_N^2 <= 3 kappa (delta_1 start_sq + delta_2 sigma^2 + gap),
               delta_1 = max_i (1 - eta Lambda_i)^(2t) Lambda_i / s <= 1/(2 e eta t s)
               delta_2 = (1/N) sum_i (1 - (1 - eta Lambda_i)^t)^2   <= (1/N) sum_i min{1, eta t Lambda_i}
Theorem 8      t <= T (`kernel_stopping`):  E|f_t - f|_N^2 <= 3 kappa/(2 e eta t s) (start_sq + 1) + 3 kappa gap
Theorem 10     t < T: the same with + 3, but for a probability that vanishes with N
Theorem 11     rank d: 3 kappa/(eta s) start_sq exp(-2 eta s lambda_d t/kappa) + 3 kappa sigma^2 d/N + 3 kappa gap
Theorem 12     E|theta_t - thetabar|^2 <= (1 - s eta rho/kappa)^(2t) |theta_0 - thetabar|^2 + sigma^2 kappa d/(N rho),
               |thetabar - theta_j*| <= |Delta_{f_j*}| sqrt(kappa/(N rho)),    rho = lambda_min(X'X)/N
Corollaries    13, 14: Theorem 12 with rho = alpha/2 on random designs; 22-24, Lemma 27: new rows from the same P

Assumes  gamma_K < 1 for FedAvg; noise independent, zero mean, variance <= sigma^2; all clients, exact local solves.
Reads    Eq. 19 misses the e of its proof, 1/(2 e eta t s). Eq. 28 misses alpha in the contraction (Eq. 30 has it).
Reads    Constants that the paper leaves open (c, c_1, ...) are arguments with default 1: orders, not certificates.

Source   kernel, Proposition 7, Theorems 8, 10, 11, 12, Corollaries 13, 14, appendix B.3 and B.4.
"""

import math

import numpy as np
from scipy.optimize import brentq

from mooring.theory.kernel_operator import LocalUpdate
from mooring.theory.kernel_stopping import rademacher


def heterogeneity_gap(truth_values: np.ndarray, model_values: np.ndarray) -> float:
    """|Delta_f|^2/N (Eq. 21), from f_i*(x_i) and f(x), stacked over clients."""
    return float(np.mean((np.asarray(truth_values) - np.asarray(model_values)) ** 2))


def bias_factor(eigenvalues: np.ndarray, update: LocalUpdate, rounds: int) -> float:
    """delta_1, from the eigenvalues of K_x P."""
    return float(np.max((1 - update.eta * eigenvalues) ** (2 * rounds) * eigenvalues)) / update.steps


def bias_factor_cap(update: LocalUpdate, rounds: int) -> float:
    """Eq. 19: delta_1 <= 1/(2 e eta t s)."""
    return 1 / (2 * math.e * update.eta * rounds * update.steps)


def variance_factor(eigenvalues: np.ndarray, update: LocalUpdate, rounds: int, samples: int) -> float:
    """delta_2, from the eigenvalues of K_x P."""
    return float(((1 - (1 - update.eta * eigenvalues) ** rounds) ** 2).sum()) / samples


def variance_factor_cap(pooled_eigenvalues: np.ndarray, update: LocalUpdate, rounds: int, samples: int) -> float:
    """Lemma 21: delta_2 <= eta t s Rad(1/sqrt(eta t s))^2, from the eigenvalues of K_x."""
    progress = update.eta * rounds * update.steps
    return progress * rademacher(pooled_eigenvalues, progress**-0.5, samples) ** 2


def prediction_bound(
    eigenvalues: np.ndarray,
    update: LocalUpdate,
    rounds: int,
    samples: int,
    kappa: float,
    start_sq: float,
    sigma: float,
    gap: float,
) -> float:
    """Proposition 7, for the eigenvalues of K_x P."""
    bias = bias_factor(eigenvalues, update, rounds) * start_sq
    variance = variance_factor(eigenvalues, update, rounds, samples) * sigma**2
    return 3 * kappa * (bias + variance + gap)


def stopped_bound(
    update: LocalUpdate, rounds: int, kappa: float, start_sq: float, gap: float, norm: float = 1.0
) -> float:
    """Theorem 8, for 1 <= rounds <= T; `norm` as given to the stopping time (1 becomes norm^2)."""
    return 3 * kappa * (bias_factor_cap(update, rounds) * (start_sq + norm**2) + gap)


def likely_stopped_bound(
    update: LocalUpdate, rounds: int, kappa: float, start_sq: float, gap: float, norm: float = 1.0
) -> float:
    """Theorem 10, for 1 <= rounds < T; `norm` as given to the stopping time (3 becomes 3 norm^2)."""
    return 3 * kappa * (bias_factor_cap(update, rounds) * (start_sq + 3 * norm**2) + gap)


def failure_sub_gaussian(update: LocalUpdate, rounds: int, samples: int, sigma: float, constant: float = 1.0) -> float:
    """Theorem 10: exp(-c N/(sigma^2 eta t s)); sigma is the sub-Gaussian norm here."""
    return math.exp(-constant * samples / (sigma**2 * update.eta * rounds * update.steps))


def failure_heavy_tail(
    update: LocalUpdate, rounds: int, samples: int, sigma: float, moment: float, order: float, constant: float = 1.0
) -> float:
    """Theorem 10: c_p M_p (eta t s/(N sigma^2))^(p/4), for M_p = `moment` >= E|noise|^p, p = `order` >= 4."""
    return constant * moment * (update.eta * rounds * update.steps / (samples * sigma**2)) ** (order / 4)


def finite_rank_bound(
    smallest: float,
    rank: int,
    update: LocalUpdate,
    rounds: int,
    samples: int,
    kappa: float,
    start_sq: float,
    sigma: float,
    gap: float,
) -> float:
    """Theorem 11; `smallest` is lambda_d, the smallest non-zero eigenvalue of K_x."""
    rate = update.eta * update.steps / kappa
    return 3 * (
        start_sq / rate * math.exp(-2 * rate * smallest * rounds) + kappa * sigma**2 * rank / samples + kappa * gap
    )


def coefficient_bound(
    rho: float,
    update: LocalUpdate,
    rounds: int,
    samples: int,
    dim: int,
    kappa: float,
    start_sq: float,
    sigma: float,
) -> float:
    """Theorem 12, Eq. 25: E|theta_t - thetabar|^2, start_sq = |theta_0 - thetabar|^2."""
    if rho == 0:
        return math.inf
    contraction = 1 - update.steps * update.eta * rho / kappa
    return contraction ** (2 * rounds) * start_sq + sigma**2 * kappa * dim / (samples * rho)


def random_design_bound(
    alpha: float,
    update: LocalUpdate,
    rounds: int,
    samples: int,
    dim: int,
    kappa: float,
    start_sq: float,
    sigma: float,
) -> float:
    """Corollaries 13 (Eq. 28, corrected) and 14 (Eq. 30): rho >= alpha/2 with high probability."""
    return coefficient_bound(alpha / 2, update, rounds, samples, dim, kappa, start_sq, sigma)


def balance_bound(gap: float, rho: float, kappa: float) -> float:
    """Theorem 12, Eq. 26: |thetabar - theta_j*|, for gap = |Delta_{f_j*}|^2/N."""
    return math.sqrt(gap * kappa / rho) if rho > 0 else math.inf


def moment_balance_bound(spread: float, kappa: float, constant: float = 1.0) -> float:
    """Corollary 13, Eq. 29: c_2 Gamma sqrt(kappa), spread = Gamma = max_ij |theta_i* - theta_j*|."""
    return constant * spread * math.sqrt(kappa)


def subspace_balance_bound(
    spread: float, kappa: float, alpha: float, beta: float, oversampling: float, clients: int, dim: int, samples: int
) -> float:
    """Corollary 14, Eq. 31; alpha, beta bound the spectra of F_i'F_i/n_i, oversampling = nu = max n_i/r_i."""
    return spread * math.sqrt(2 * kappa * beta * oversampling * clients * dim / (alpha * samples))


def subspace_samples(oversampling: float, dim: int, constant: float = 1.0) -> float:
    """Corollary 14 needs N >= C nu d log d."""
    return constant * oversampling * dim * math.log(dim)


def critical_radius(eigenvalues: np.ndarray, samples: int, sigma: float) -> float:
    """Appendix B.3: inf{eps : Rad(eps) <= eps^2/(sqrt(2e) sigma)}, for the eigenvalues of k in L^2(P)."""
    scale = math.sqrt(2 * math.e) * sigma
    total = float(np.sum(eigenvalues))
    if scale == 0 or total == 0:
        return 0.0

    def excess(log_radius: float) -> float:
        radius = math.exp(log_radius)
        return math.log(scale * rademacher(eigenvalues, radius, samples)) - 2 * log_radius

    # Rad(eps) <= sqrt(sum/N) bounds the root from above; Rad(eps) >= min(top, eps^2)^(1/2)/sqrt(N) from below.
    high = 0.5 * math.log(scale * math.sqrt(total / samples))
    top = float(np.max(eigenvalues))
    low = min(0.5 * math.log(top), math.log(scale / math.sqrt(samples))) - 1
    return math.exp(brentq(excess, min(low, high - 1), high + 1e-9))


def new_rows_bound(radius: float, kappa: float, start_sq: float, gap: float, constant: float = 1.0) -> float:
    """Theorem 22: E_P (f_T - f)^2 <= c kappa (radius^2 (start_sq + 1) + gap), radius = `critical_radius`."""
    return constant * kappa * (radius**2 * (start_sq + 1) + gap)


def finite_rank_rate(rank: int, samples: int, sigma: float, kappa: float = 1.0, constant: float = 1.0) -> float:
    """Corollary 23: c kappa sigma^2 r/N, one truth for all clients."""
    return constant * kappa * sigma**2 * rank / samples


def polynomial_decay_rate(decay: float, samples: int, sigma: float, kappa: float = 1.0, constant: float = 1.0) -> float:
    """Corollary 24: c kappa (sigma^2/N)^(2 beta/(2 beta + 1)) for eigenvalues of order i^(-2 beta), beta = decay."""
    return constant * kappa * (sigma**2 / samples) ** (2 * decay / (2 * decay + 1))


def rkhs_norm_bound(start: float, update: LocalUpdate, rounds: int, gap: float) -> float:
    """Lemma 27: |f_t - f|_H <= |f_0 - f|_H + 1 + sqrt(eta s t gap), t <= T, with `failure_sub_gaussian` probability."""
    return start + 1 + math.sqrt(update.eta * update.steps * rounds * gap)
