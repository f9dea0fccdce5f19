"""FedMSPP: minibatches and sampled clients both speed up shared-model FedProx linearly.

As shared-model FedProx, but each sampled client solves its subproblem Q on b fresh i.i.d. records, and F is the mean
population risk (the empirical one when records are drawn with replacement from the local data, Remark 8).

Theorem 3   eta = min{T^(-1/3), (b I/T)^(1/2)} / (8L):
            mean_{t<T} E|grad F(w_t)|^2 <= 4 gap/(eta T) + 424 L^2 G^2 eta^2 + 24 L G^2 eta / (b I)
Theorem 4   eta = rho/sqrt(T), rho < 1/(2 nu): Theorem 2's `weakly_convex_bound`, for the population risk's envelope

Symbols  L: smooth   G: lipschitz   I: sampled   b: batch   T: rounds   eta: 1/lam, the proximal step
Assumes  every loss G-Lipschitz; L-smooth and |grad Q| <= `gradient_tolerance` (Theorem 3), nu-weakly convex and exact
         solves (Theorem 4). Means over t < T, not the last iterate.
Reads    eps_t <= min{G/(2L), G^2 eta/(8 b^2), G eta/(2 b I)} mixes units: the outer terms are read as |grad Q| <= 2 L
         eps_t, the middle one as Q - min Q <= eps_t.
Reads    The proof of Theorem 3 takes 38/(1 - 1/8)^2 for 43 (the square is lost); with 50 its 376 becomes 424.
Reads    Theorem 4's left side is the population envelope; it is printed with the mark of the empirical one.

Source   mspp, Theorems 3 and 4; constants from the proofs in appendix C.
"""

import math

from mooring.core.errors import RequestError
from mooring.theory.fedprox_shared_rate import weakly_convex_bound, weakly_convex_step
from mooring.theory.weights import require_positive

__all__ = [
    "gradient_tolerance",
    "sampling_dominates",
    "smooth_bound",
    "smooth_rate",
    "step_size",
    "value_tolerance",
    "weakly_convex_bound",
    "weakly_convex_step",
]


def step_size(smooth: float, rounds: int, sampled: int, batch: int) -> float:
    """Theorem 3's proximal step."""
    require_positive("FedMSPP step", smooth=smooth, rounds=rounds, sampled=sampled, batch=batch)
    return min(rounds ** (-1 / 3), math.sqrt(batch * sampled / rounds)) / (8 * smooth)


def sampling_dominates(rounds: int, sampled: int, batch: int) -> bool:
    """True from T = (b I)^3 on, where the rate is (T b I)^(-1/2); before, it is T^(-2/3)."""
    return rounds >= (batch * sampled) ** 3


def value_tolerance(lipschitz: float, eta: float, batch: int) -> float:
    """The middle term of eps_t: Q - min Q <= G^2 eta / (8 b^2) keeps a client stable under the change of one record."""
    return lipschitz**2 * eta / (8 * batch**2)


def gradient_tolerance(lipschitz: float, smooth: float, eta: float, sampled: int, batch: int) -> float:
    """|grad Q| <= L G eta/(b I) certifies all three terms of eps_t, `value_tolerance` included, for eta <= 1/(8L)."""
    _require_step(eta, smooth)
    return smooth * lipschitz * eta / (batch * sampled)


def smooth_bound(
    gap: float, lipschitz: float, smooth: float, eta: float, rounds: int, sampled: int, batch: int
) -> float:
    """Theorem 3 before the step size is inserted; holds for any eta <= 1/(8L)."""
    _require_step(eta, smooth)
    optimisation = 4 * gap / (eta * rounds)
    drift = 424 * (smooth * lipschitz * eta) ** 2
    return optimisation + drift + 24 * smooth * lipschitz**2 * eta / (batch * sampled)


def smooth_rate(gap: float, lipschitz: float, smooth: float, rounds: int, sampled: int, batch: int) -> float:
    """Theorem 3's order: (L gap + G^2) max{T^(-2/3), (T b I)^(-1/2)}."""
    return (smooth * gap + lipschitz**2) * max(rounds ** (-2 / 3), (rounds * batch * sampled) ** -0.5)


def _require_step(eta: float, smooth: float) -> None:
    if eta > 1 / (8 * smooth) * (1 + 1e-12):
        raise RequestError(f"FedMSPP rate: eta must be at most 1/(8 smooth) = {1 / (8 * smooth):.4g}, got {eta:.4g}.")
