"""Shared-model FedProx reaches a stationary point without any bound on how unlike the clients are.

    w_t = (1/I) sum_{i in I_t} w_t^i,    w_t^i ~ argmin_w Q(w) = L_i(w) + 1/(2 eta) |w - w_{t-1}|^2,    I = |I_t|

Theorem 1   eta = min{T^(-1/3), (I/T)^(1/2)} / (3L):
            mean_{t<T} E|grad F(w_t)|^2 <= 2 gap/(eta T) + 4 L^2 G^2 eta^2 + 10 L G^2 eta / I,    gap = F(w_0) - min F
Remark 2    all clients every round: the terms with I drop, eta = 1/(3 L T^(1/3)), rate T^(-2/3)
Theorem 2   eta = rho/sqrt(T), rho < 1/(2 nu):
            mean_{t<T} E|grad F_rho(w_t)|^2 <= gap/(rho T) + (2 gap + 4 rho G^2)/(rho sqrt(T)),
            F_rho the rho-Moreau envelope of F, gap = F_rho(w_0) - min F_rho

Symbols  L: smooth   G: lipschitz   I: sampled   T: rounds   nu: weak   rho: moreau   eta: 1/lam, the proximal step
Assumes  every loss G-Lipschitz; L-smooth and |grad Q| <= `gradient_tolerance` (Theorem 1), nu-weakly convex and exact
         solves (Theorem 2). The bounds are on the mean over t < T (or a uniformly drawn t), not on the last iterate.
Reads    Lemma 5 derives |grad Q| <= 2 L eps from Q - min Q <= eps, which does not imply it (eps has the unit of a
         length): the certificate here is on |grad Q|.
Reads    Theorem 2 bounds the gradient of the envelope, not the plain one that Eq. 1.5 shows.

Source   mspp, Theorem 1, Remarks 2 and 5, Theorem 2; constants from the proofs in appendix B.
"""

import math

import numpy as np

from mooring.core.errors import RequestError
from mooring.theory.weights import require_positive


def step_size(smooth: float, rounds: int, sampled: int) -> float:
    """Theorem 1's proximal step."""
    require_positive("FedProx step", smooth=smooth, rounds=rounds, sampled=sampled)
    return min(rounds ** (-1 / 3), math.sqrt(sampled / rounds)) / (3 * smooth)


def sampling_dominates(rounds: int, sampled: int) -> bool:
    """True from T = I^3 on, where the rate is (T I)^(-1/2); before, it is T^(-2/3)."""
    return rounds >= sampled**3


def printed_inexactness(lipschitz: float, smooth: float, eta: float, sampled: int) -> float:
    """eps_t of Theorem 1 as printed: a length, not a loss. Use `gradient_tolerance` to stop a solver."""
    return min(lipschitz / (2 * smooth * math.sqrt(sampled)), lipschitz * eta / sampled)


def gradient_tolerance(lipschitz: float, smooth: float, eta: float, sampled: int) -> float:
    """The largest |grad Q| with which Theorem 1's bound holds: 2 L eps_t."""
    return 2 * smooth * printed_inexactness(lipschitz, smooth, eta, sampled)


def suboptimality_from_gradient(gradient_norm: float, eta: float, smooth: float) -> float:
    """Q(w) - min Q <= |grad Q(w)|^2 / (2 (1/eta - L)), for eta < 1/L."""
    _require_convex_subproblem(eta, smooth)
    return gradient_norm**2 / (2 * (1 / eta - smooth))


def smooth_bound(gap: float, lipschitz: float, smooth: float, eta: float, rounds: int, sampled: int) -> float:
    """Theorem 1 before the step size is inserted; holds for any eta <= 1/(3L)."""
    return full_participation_bound(gap, lipschitz, smooth, eta, rounds) + 10 * smooth * lipschitz**2 * eta / sampled


def smooth_rate(gap: float, lipschitz: float, smooth: float, rounds: int, sampled: int) -> float:
    """Theorem 1's order: (L gap + G^2) max{T^(-2/3), (T I)^(-1/2)}."""
    return (smooth * gap + lipschitz**2) * max(rounds ** (-2 / 3), (rounds * sampled) ** -0.5)


def full_participation_step(smooth: float, rounds: int) -> float:
    """Remark 2's proximal step."""
    return rounds ** (-1 / 3) / (3 * smooth)


def full_participation_tolerance(lipschitz: float, smooth: float, eta: float) -> float:
    """|grad Q| <= L^2 G eta^2 keeps inexact solves inside `full_participation_bound` for eta <= 1/(3L).

    Ours, Remark 2 is silent: (1 + 1/9)^2 + 2 + 2/27 < 4 covers drift, bias and squared error of the inexact step.
    """
    return smooth**2 * lipschitz * eta**2


def full_participation_bound(gap: float, lipschitz: float, smooth: float, eta: float, rounds: int) -> float:
    """Remark 2 with Theorem 1's constants; holds for any eta <= 1/(3L)."""
    if eta > 1 / (3 * smooth) * (1 + 1e-12):
        raise RequestError(f"FedProx rate: eta must be at most 1/(3 smooth) = {1 / (3 * smooth):.4g}, got {eta:.4g}.")
    return 2 * gap / (eta * rounds) + 4 * (smooth * lipschitz * eta) ** 2


def weakly_convex_step(moreau: float, rounds: int, weak: float) -> float:
    """Theorem 2's proximal step."""
    _require_moreau(moreau, weak)
    return moreau / math.sqrt(rounds)


def weakly_convex_bound(gap: float, lipschitz: float, moreau: float, rounds: int, weak: float) -> float:
    """Theorem 2 with its step inserted."""
    _require_moreau(moreau, weak)
    return gap / (moreau * rounds) + (2 * gap + 4 * moreau * lipschitz**2) / (moreau * math.sqrt(rounds))


def moreau_gradient_norm(w: np.ndarray, prox: np.ndarray, moreau: float) -> float:
    """|grad F_rho(w)| = |w - prox_{rho F}(w)| / rho (Remark 5)."""
    return float(np.linalg.norm(np.asarray(w) - np.asarray(prox)) / moreau)


def _require_convex_subproblem(eta: float, smooth: float) -> None:
    if eta * smooth >= 1:
        raise RequestError(f"FedProx subproblem: eta must be below 1/smooth = {1 / smooth:.4g}, got {eta:.4g}.")


def _require_moreau(moreau: float, weak: float) -> None:
    if 2 * weak * moreau >= 1:
        raise RequestError(f"Moreau parameter must be below 1/(2 weak) = {1 / (2 * weak):.4g}, got {moreau:.4g}.")
