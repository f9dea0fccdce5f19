"""Step sizes, averaging weights and round lengths that APFL's theorems prescribe.

Strongly convex   eta_t = 16/(mu (t + a)), a = max{128 cond, tau}, weights p_t = (t + a)^2, t = 1..T local iterations
                  alpha >= max{1 - 1/(4 sqrt(6) cond), 1 - 1/(4 sqrt(6) cond sqrt(mu))};   tau = sqrt(T/K)
Any alpha         eta_t = 8/(mu (t + a)), a = max{64 cond, tau}, gradients bounded by G on a bounded W
Non-convex        full gradients, all n clients: eta = 1/(2 sqrt(5) L sqrt(T)), tau = n^(-1/4) T^(1/4)

Symbols  cond: smooth/mu   tau: local steps per round   K: sampled   n: clients   T: iterations, not rounds
Reads    Appendix E prints the alpha condition once with cond under the root; the proof needs the form above.
Reads    The non-convex schedule costs T/tau = n^(1/4) T^(3/4) rounds, not n^(3/4) T^(3/4), and needs tau <= sqrt(T).
Reads    S_T >= T^3/3; the S_T > T^3 of the proofs holds only up to T of about 2a.
Reads    Theorem 2's proof divides by 1 - 8 (alpha - alpha^2 K/n), negative for alpha near 1 and K/n < 7/8: with sampled
         clients its schedule is a heuristic (`sampled_proof_holds`).

Source   apfl, Theorems 2, 4, 5, 6 (strongly convex), 7 (any alpha), 3 and 8 (non-convex).
"""

import math

import numpy as np

from mooring.core.errors import RequestError
from mooring.theory.weights import require_positive


def shift(mu: float, smooth: float, local_steps: int, any_alpha: bool = False) -> float:
    """a, the offset of the iteration counter."""
    require_positive("APFL schedule", mu=mu, smooth=smooth)
    return max((64 if any_alpha else 128) * smooth / mu, float(local_steps))


def step_size(iteration: float | np.ndarray, mu: float, shift: float, any_alpha: bool = False) -> float | np.ndarray:
    """eta_t at the local iteration t = 1..T."""
    return (8 if any_alpha else 16) / (mu * (iteration + shift))


def weights(iterations: int, shift: float) -> np.ndarray:
    """p_1..p_T, with which the iterates are averaged."""
    return (np.arange(1, iterations + 1) + shift) ** 2


def weight_sum(iterations: int, shift: float) -> float:
    """S_T = sum of `weights`, in closed form."""
    t = iterations
    return t * (t + 1) * (2 * t + 1) / 6 + shift * t * (t + 1) + shift**2 * t


def least_alpha(mu: float, smooth: float) -> float:
    """The smallest mixture that Theorems 2, 4, 5 cover."""
    require_positive("APFL schedule", mu=mu, smooth=smooth)
    root = 4 * math.sqrt(6) * smooth / mu
    return max(1 - 1 / root, 1 - 1 / (root * math.sqrt(mu)))


def participation_factor(sampled: int, clients: int) -> float:
    """b = min{K/n, 1/2}, by which sampling clients slows the personal model."""
    return min(sampled / clients, 0.5)


def sampled_proof_holds(alpha: float, sampled: int, clients: int) -> bool:
    """Whether Theorem 2's proof goes through: 1 - 8 (alpha - alpha^2 K/n) > 0."""
    return 1 - 8 * (alpha - alpha**2 * sampled / clients) > 0


def local_steps(iterations: int, sampled: int) -> float:
    """tau = sqrt(T/K), which costs sqrt(K T) rounds."""
    return math.sqrt(iterations / sampled)


def rounds(iterations: int, sampled: int) -> float:
    """T/tau = sqrt(K T)."""
    return math.sqrt(iterations * sampled)


def nonconvex_step_size(smooth: float, iterations: int, local_steps: float) -> float:
    """eta of Theorems 3 and 8."""
    if local_steps > math.sqrt(iterations):
        raise RequestError(
            f"APFL non-convex schedule: local steps must be at most sqrt(iterations) = {math.sqrt(iterations):.4g}, "
            f"got {local_steps:.4g}."
        )
    return 1 / (2 * math.sqrt(5) * smooth * math.sqrt(iterations))


def nonconvex_local_steps(iterations: int, clients: int) -> float:
    """tau = (T/n)^(1/4)."""
    return (iterations / clients) ** 0.25


def nonconvex_rounds(iterations: int, clients: int) -> float:
    """T/tau = n^(1/4) T^(3/4)."""
    return clients**0.25 * iterations**0.75
