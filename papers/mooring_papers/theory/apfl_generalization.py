"""How well a mixture of the local and the global model generalizes, and the mixture that the bound prefers.

With probability 1 - delta the mixture alpha * local + (1 - alpha) * global has on client i

    risk <= 2 alpha^2 local_term + 2 (1 - alpha)^2 global_term
    local_term  = best_local_risk + 2 C sqrt((d + log 1/delta)/n_i) + G disagreement
    global_term = global_risk + B |D_mean - D_i|_1 + C sqrt((d + log 1/delta)/N)
    alpha*      = global_term / (global_term + local_term)          minimizes it over alpha

Corollary 1: the local ERM's risk is at least best_local_risk + C2 sqrt((d + log 1/delta)/n_i) on some distribution; the
bound on the difference to it has both leading terms <= 0 for alpha <= min{1/sqrt(2), sqrt(C2/(4 C1))}.

Symbols  C, C1: constant (unknown, so alpha* is a diagnostic and no training rule)   B: loss_max   d: vc_dim   N: total
         disagreement: lambda_H(S_i), distance: |D_mean - D_i|_1, both in `diversity`
Assumes  loss G-Lipschitz, in [0, B], squared error or squared hinge; models from a class of finite VC dimension.
Reads    Corollary 1 prints 2 alpha^2 C1 - C2, hence sqrt(C2/(2 C1)); inserting Theorem 1 gives 4 alpha^2 C1 - C2.
Reads    B multiplies the distance, as in the theorem (the proof has B^2 once).
Reads    `disagreement` does not shrink with n_i, so alpha* does not tend to 1 for large n_i as the text says; at
         alpha = 1 the bound is twice the local one.

Source   apfl, Theorem 1, the optimal mixing parameter after it, Corollary 1.
"""

import math

import numpy as np

from mooring.core.errors import RequestError


def deviation(vc_dim: float, samples: int, delta: float) -> float:
    """sqrt((d + log 1/delta) / samples)."""
    return math.sqrt((vc_dim + math.log(1 / delta)) / samples)


def local_term(
    best_local_risk: float,
    vc_dim: float,
    samples: int,
    delta: float,
    lipschitz: float,
    disagreement: float,
    constant: float,
) -> float:
    """What alpha^2 weighs in Theorem 1."""
    return best_local_risk + 2 * constant * deviation(vc_dim, samples, delta) + lipschitz * disagreement


def global_term(
    global_risk: float, loss_max: float, distance: float, vc_dim: float, total: int, delta: float, constant: float
) -> float:
    """What (1 - alpha)^2 weighs in Theorem 1; `distance` is |D_mean - D_i|_1 in [0, 2]."""
    return global_risk + loss_max * distance + constant * deviation(vc_dim, total, delta)


def mixture_bound(alpha: float | np.ndarray, local: float, global_: float) -> float | np.ndarray:
    """Theorem 1 for the two terms above."""
    return 2 * alpha**2 * local + 2 * (1 - alpha) ** 2 * global_


def best_alpha(local: float, global_: float) -> float:
    """alpha*: the minimizer of `mixture_bound`; undefined, hence refused, where both terms vanish."""
    if not (local >= 0 and global_ >= 0 and local + global_ > 0):
        raise RequestError(f"APFL alpha*: terms must be >= 0 and not both 0, got local {local}, global {global_}.")
    return global_ / (global_ + local)


def improvement_over_local(
    alpha: float,
    best_local_risk: float,
    local_deviation: float,
    lipschitz: float,
    disagreement: float,
    global_: float,
    upper_constant: float,
    lower_constant: float,
    printed: bool = False,
) -> float:
    """Corollary 1's bound on risk(mixture) - risk(local ERM); negative certifies that mixing helps.

    `local_deviation` is `deviation(...)` at n_i; `global_` the global term with C = C1 = upper_constant; C2 is
    lower_constant. `printed=True` gives the paper's 2 alpha^2 C1 - C2.
    """
    factor = 2 if printed else 4
    return (
        (2 * alpha**2 - 1) * best_local_risk
        + (factor * alpha**2 * upper_constant - lower_constant) * local_deviation
        + 2 * alpha**2 * lipschitz * disagreement
        + 2 * (1 - alpha) ** 2 * global_
    )


def largest_helpful_alpha(upper_constant: float, lower_constant: float, printed: bool = False) -> float:
    """Corollary 1: up to this alpha neither leading term speaks against mixing.

    As C2 <= 2 C1, alpha above 1/sqrt(2) can never be certified to beat the local ERM.
    """
    factor = 2 if printed else 4
    return min(1 / math.sqrt(2), math.sqrt(lower_constant / (factor * upper_constant)))
