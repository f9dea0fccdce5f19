"""Step sizes, work and guarantees of two-stage FedProx.

Algorithm 3 of `alternative`: sampled clients run K_t projected SGD steps on L_i + lam/2 |. - w|^2 from their own model,
the server steps along lam m/B sum p_i (w - w_i); last, every client runs K_T more steps. With diameter D of W and
losses in [0, ell_max],

    G2 = min(smooth^2 D^2, 2 lam ell_max, lam^2 D^2) >= |grad F_i(w)|^2                             (Lemma B.4)
    eta_k = 1/((mu + lam)(k + 1))       gamma_t = 2 (mu + lam)/(lam mu (t + 1))
    K_t + 1 >= (4t + 20) lam^2 smooth^2 D^2 / (mu^2 G2)                                             (Eq. B.4)

Then, in expectation over batches and sampled clients,

    |w_i,k - prox_i(w)|^2  <=  8 smooth^2 D^2 / (mu^2 (k + 1))                                      (Lemma B.1)
    |w_t - w~|^2           <=  12 (lam + mu)^2 m |p|^2 G2 / (lam^2 mu^2 (t + 1))                    (Lemma B.2)
    E_OPT                  <=  4 (smooth + lam) smooth^2 D^2 / (mu^2 (K_T + 1)) + lam/2 x (B.2 at T)   (Proposition B.1)

Assumes  `alternative`'s Assumption A(a, b), and what its proofs use beyond it: every record's loss, and so every L_i,
         has its minimizer in W (only then |grad l| <= smooth D on W).
Reads    Sampled clients train and the others wait; the listing has it the other way round.
Reads    The server's gamma_t lam exceeds 1 at first: w is projected onto W after each server step, or Lemma B.4 fails.
Reads    Theorem 4.4's K_t + 1 >= C_1 (lam^2 v 1) t is empty at t = 0; Lemma B.2's condition is used.
Reads    The induction of Lemma B.2 multiplies an upper bound by -1 at t = 0; its recursion proves t = 1 with twice the
         value, and the stated one from t = 2 on. `global_guarantee` returns the doubled value at t = 1.

Source   alternative, Lemmas B.1, B.2, B.4, Proposition B.1, Theorems 4.4 and 4.5 (schedules).
"""

from math import ceil

import numpy as np
from numpy.typing import ArrayLike

from mooring.theory.weights import check_weights, require_positive, s1


def local_step(k: int, mu: float, lam: float) -> float:
    """eta_k of the k-th local step, k = 0, 1, ..., in both stages."""
    return 1 / ((mu + lam) * (k + 1))


def server_step(t: int, mu: float, lam: float) -> float:
    """gamma_t of round t = 0, 1, ...; the weight of the average in w is lam gamma_t."""
    require_positive("server_step", mu=mu, lam=lam)
    return 2 * (mu + lam) / (lam * mu * (t + 1))


def gradient_bound(smooth: float, lam: float, ell_max: float, diameter: float) -> float:
    """G2, the bound on |grad F_i|^2 over W."""
    return min((smooth * diameter) ** 2, 2 * lam * ell_max, (lam * diameter) ** 2)


def inner_steps(t: int, mu: float, smooth: float, lam: float, ell_max: float, diameter: float) -> int:
    """The fewest local steps K_t that Lemma B.2 allows in round t."""
    require_positive("inner_steps", mu=mu, smooth=smooth, lam=lam, ell_max=ell_max, diameter=diameter)
    need = (lam * smooth * diameter / mu) ** 2 / gradient_bound(smooth, lam, ell_max, diameter)
    return ceil((4 * t + 20) * need) - 1


def local_guarantee(k: int, mu: float, smooth: float, diameter: float) -> float:
    """E|w_i,k - prox_i(w)|^2 after k local steps is at most this (Lemma B.1)."""
    return 8 * (smooth * diameter / mu) ** 2 / (k + 1)


def global_guarantee(
    t: int, mu: float, smooth: float, lam: float, ell_max: float, diameter: float, p: ArrayLike
) -> float:
    """E|w_t - w~|^2 after t rounds is at most this (Lemma B.2)."""
    require_positive("global_guarantee", mu=mu, lam=lam)
    p = np.asarray(p, dtype=float)
    spread = p.size * float(np.sum(p**2))
    bound = 12 * ((lam + mu) / (lam * mu)) ** 2 * spread * gradient_bound(smooth, lam, ell_max, diameter)
    return bound if t == 1 else bound / (t + 1)


def objective_guarantee(
    rounds: int,
    final_steps: int,
    mu: float,
    smooth: float,
    lam: float,
    ell_max: float,
    diameter: float,
    p: ArrayLike,
) -> float:
    """E[E_OPT], the objective's excess over its minimum after both stages, is at most this (Proposition B.1)."""
    personal = (smooth + lam) / 2 * local_guarantee(final_steps, mu, smooth, diameter)
    return personal + lam / 2 * global_guarantee(rounds, mu, smooth, lam, ell_max, diameter, p)


def rounds_aer(lam: float, p: ArrayLike, n: ArrayLike, *, constant: float = 1.0) -> float:
    """Order of T in Theorem 4.4; the constant depends on mu, smooth, ell_max and D and is not given."""
    p, n = check_weights(p, n)
    reach = lam * max(lam, 1.0)
    return float(constant * reach * p.size * np.sum(p**2) * max(1 / s1(p, n), reach * n.max() ** 2))


def final_steps_aer(lam: float, p: ArrayLike, n: ArrayLike, *, constant: float = 1.0) -> float:
    """Order of K_T in Theorem 4.4."""
    p, n = check_weights(p, n)
    return float(constant * (lam + 1) ** 2 * max(1 / s1(p, n), lam**2 * np.max(p * n) ** 2))


def rounds_ier(lam: float, p: ArrayLike, n: ArrayLike, *, constant: float = 1.0) -> float:
    """Order of T in Theorem 4.5; every p_i > 0."""
    p, n = check_weights(p, n)
    reach = lam * max(lam, 1.0)
    return float(constant * reach * np.max(n * np.maximum(1 / p, reach * n)))


def final_steps_ier(lam: float, p: ArrayLike, n: ArrayLike, *, constant: float = 1.0) -> float:
    """Order of K_T in Theorem 4.5; every p_i > 0."""
    p, n = check_weights(p, n)
    return float(constant * (lam + 1) ** 2 * np.max(n * np.maximum(1 / p, lam**2 * p**2 * n)))
