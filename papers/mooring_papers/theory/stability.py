"""Federated stability: how much one record of client i can move client i's loss.

gamma_i bounds the sup-norm change of the loss at client i's model when one of its records is replaced. With
E = E(lam, i) = 0 for exact minimizers,

    FedAvg    gamma_i <= 32 smooth ell_max p_i / (mu n_i)
              if n_i >= 4 smooth p_i / mu
    FedProx   gamma_i <= 160 smooth ell_max / (n_i (mu + lam)) + sqrt(2 smooth ell_max) E + smooth E^2
              if n_i >= 4 smooth / mu and p_i lam <= mu/16                                      (Eq. C.5)

Stable models do not overfit (Proposition 4.1):

    AER_p <= E_OPT     + 2 sum_i p_i gamma_i + lam/2 R_rms^2
    IER_i <= E_OPT/p_i + 2 gamma_i           + lam/2 E|w - w*_i|^2        w the fitted global model

Assumes  every L_i mu-strongly convex, every record's loss smooth-smooth with values in [0, ell_max].
Reads    Lemma C.2's deltas need squared errors, and the first error term of Proposition C.1 is the personal model's:
         E = 8 (smooth+lam)/(mu+lam) e_i + sqrt(4 (smooth+lam)/(mu+lam)) e_i
             + 8/mu (2 lam e + 4 p_i lam e_i + lam sqrt(mu/(mu+lam)) e),
         with e >= |w - w~| and e_i >= |w_i - prox_i(w)|.
Reads    Eq. 4.12 lacks p_s before lam/2; Eq. 4.10, used here, has it right.

Source   alternative, Definition 4.3, Theorem 4.3 (proof, Appendix C.1), Proposition 4.1, Proposition C.1, Lemmas C.1,
         C.2.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mooring.theory.weights import check_weights, require_positive


def fedavg_condition(smooth: float, mu: float, p: ArrayLike, n: ArrayLike) -> NDArray:
    """Per client: whether the FedAvg bound applies."""
    p, n = check_weights(p, n)
    return n >= 4 * smooth * p / mu


def fedprox_condition(smooth: float, mu: float, lam: float, p: ArrayLike, n: ArrayLike) -> NDArray:
    """Per client: whether the FedProx bound applies (Eq. C.5)."""
    p, n = check_weights(p, n)
    # lambda_aer and lambda_ier return lam = mu/(16 p_max) at the border: allow for rounding.
    return (n >= 4 * smooth / mu) & (p * lam <= mu / 16 * (1 + 1e-12))


def fedavg_stability(smooth: float, ell_max: float, mu: float, p: ArrayLike, n: ArrayLike) -> NDArray:
    """gamma_i of the exact global model argmin sum_i p_i L_i."""
    require_positive("fedavg_stability", mu=mu)
    p, n = check_weights(p, n)
    return 32 * smooth * ell_max * p / (mu * n)


def fedprox_stability(
    smooth: float,
    ell_max: float,
    mu: float,
    lam: float,
    p: ArrayLike,
    n: ArrayLike,
    *,
    global_error: float = 0.0,
    local_error: ArrayLike = 0.0,
) -> NDArray:
    """gamma_i of FedProx's personal models; global_error e and local_error e_i are 0 for exact minimizers."""
    require_positive("fedprox_stability", mu=mu)
    p, n = check_weights(p, n)
    local_error = np.asarray(local_error, dtype=float)
    ratio = (smooth + lam) / (mu + lam)
    error = (8 * ratio + np.sqrt(4 * ratio)) * local_error + 8 / mu * (
        (2 * lam + lam * np.sqrt(mu / (mu + lam))) * global_error + 4 * p * lam * local_error
    )
    return 160 * smooth * ell_max / (n * (mu + lam)) + np.sqrt(2 * smooth * ell_max) * error + smooth * error**2


def aer_from_stability(opt_error: float, gamma: ArrayLike, lam: float, radius: float, p: ArrayLike) -> float:
    """Bound on the average excess risk from stability (Eq. 4.9); radius is R_rms."""
    return float(opt_error + 2 * np.sum(np.asarray(p, float) * gamma) + lam / 2 * radius**2)


def ier_from_stability(opt_error: float, gamma: ArrayLike, lam: float, distance2: ArrayLike, p: ArrayLike) -> NDArray:
    """Bound on each client's excess risk (Eq. 4.10); distance2 is E|w - w*_i|^2."""
    return opt_error / np.asarray(p, float) + 2 * np.asarray(gamma, float) + lam / 2 * np.asarray(distance2, float)
