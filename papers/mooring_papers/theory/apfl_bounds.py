"""How far APFL's global and personal models are from their optima.

With the schedule of `apfl_schedule`, K clients averaged every tau steps:

Lemma 4/7     E|w_{T+1} - w*|^2 <= a^3/(T+a)^3 |w_1 - w*|^2
                  + (T + 16 (1/(a+1) + ln(T+a))) 24576 a^2 tau (sgd_var + 2 tau zeta/K) L^2 / ((a-1)^2 mu^4 (T+a)^3)
                  + 128 sgd_var T (T + 2a + 1) / (K mu^2 (T+a)^3)
Theorem 4/6   F(weighted mean of w_t) - F* <= the same right side times mu (T+a)^3 / (16 S_T)
Theorem 2/5/7 orders of f_i(personal) - f_i*, returned term by term with unit constants
Theorem 3/8   mean squared gradients of the personal and the global model, with the proof's constants

Symbols  zeta_i: sup over W of |grad F - grad f_i|^2   zeta: their *sum* over clients   delta_i: |w_i* - w*|^2
         domain_sq: D_W, squared diameter of W   start_sq: |w_1 - w*|^2
Assumes  clients mu-strongly convex and L-smooth, gradient variance <= sgd_var (Theorems 2, 4-7); L-smooth, f >= 0, full
         gradients of all clients, no active projection (Theorems 3, 8).
Reads    Lemma 4/7 prints 1536 for 24576 (the 16 of eta_T/p_T is lost) and T + 2a for T + 2a + 1.
Reads    D_W bounds the squared distance, so it enters once, not squared as in Lemma 8. zeta_i is a sup over W: over all
         of R^d it is infinite for quadratics with different Hessians.
Reads    Theorem 5's proof telescopes with 1 - mu eta_t/8, which needs eta_t = 24/(mu (t+a)); what 16 leaves over is at
         most mu p_t/16 |.|^2 and is absorbed by strong convexity (4/3 becomes 8/5), so the order stands.
Reads    With sampled clients the orders are heuristics: the proof divides by a number that can be negative.

Source   apfl, Definitions 2 and 3, Lemmas 4, 7-10, Theorems 2-8.
"""

import math
from typing import NamedTuple

from mooring.theory.apfl_schedule import participation_factor, weight_sum


class PersonalOrder(NamedTuple):
    """Terms of a personal model's excess risk, each up to a constant."""

    start: float
    local_noise: float
    global_noise: float
    drift: float
    residual: float  # stays for T -> infinity

    @property
    def total(self) -> float:
        return sum(self)


class GlobalBounds(NamedTuple):
    distance: float  # E|w_{T+1} - w*|^2
    risk: float  # E F(weighted mean) - F*


def global_bounds(
    start_sq: float,
    mu: float,
    smooth: float,
    sgd_var: float,
    zeta: float,
    averaged: int,
    local_steps: int,
    iterations: int,
    shift: float,
) -> GlobalBounds:
    """Lemma 4 and Theorem 4 (averaged = n clients), Lemma 7 and Theorem 6 (averaged = K), with the proof's constants.

    Both are the right side of Eq. 16, p_0/eta_0 |w_1 - w*|^2 + drift + noise, in two units.
    """
    logarithm = 1 / (shift + 1) + math.log(iterations + shift)
    drift_var = local_steps * (sgd_var + 2 * local_steps * zeta / averaged)
    drift = 1536 * (iterations + 16 * logarithm) * drift_var * smooth**2 / mu**3 * (shift / (shift - 1)) ** 2
    noise = 8 * sgd_var * iterations * (iterations + 2 * shift + 1) / (averaged * mu)
    total = mu * shift**3 / 16 * start_sq + drift + noise
    return GlobalBounds(16 / (mu * (iterations + shift) ** 3) * total, total / weight_sum(iterations, shift))


def personal_residual(
    alpha: float,
    mu: float,
    smooth: float,
    zeta_i: float,
    delta_i: float,
    zeta: float = 0.0,
    sampled: int = 1,
    factor: float = 1.0,
) -> float:
    """(1-alpha)^2 ((zeta_i + zeta/K)/(mu b) + cond L delta_i/b): what no number of iterations removes (Theorem 2).

    With full participation (Theorem 5) the sum zeta drops and b = 1: the defaults.
    """
    return (1 - alpha) ** 2 * ((zeta_i + zeta / sampled) / mu + smooth**2 / mu * delta_i) / factor


def personal_order_sampled(
    alpha: float,
    mu: float,
    smooth: float,
    sgd_var: float,
    zeta_i: float,
    zeta: float,
    delta_i: float,
    sampled: int,
    clients: int,
    local_steps: float,
    iterations: int,
) -> PersonalOrder:
    """Theorem 2: K of n clients per round, alpha above `least_alpha`."""
    b = participation_factor(sampled, clients)
    residual = personal_residual(alpha, mu, smooth, zeta_i, delta_i, zeta, sampled, b)
    cond, mix = smooth / mu, (1 - alpha) ** 2
    drift = cond**2 * local_steps**2 * (zeta_i + cond**2 * zeta / sampled) / (mu * b * iterations**2)
    return PersonalOrder(
        0.0,
        alpha**2 * sgd_var / (mu * b * iterations),
        mix * cond**2 * sgd_var / (mu * b * sampled * iterations),
        mix * drift,
        residual,
    )


def personal_order_full(
    alpha: float,
    mu: float,
    smooth: float,
    sgd_var: float,
    zeta_i: float,
    zeta: float,
    delta_i: float,
    clients: int,
    local_steps: float,
    iterations: int,
) -> PersonalOrder:
    """Theorem 5: all n clients every round, alpha above `least_alpha`."""
    residual = personal_residual(alpha, mu, smooth, zeta_i, delta_i)
    return _personal_order(alpha, mu, smooth, sgd_var, zeta_i, zeta, clients, 1.0, local_steps, iterations, residual)


def personal_order_any_alpha(
    alpha: float,
    mu: float,
    smooth: float,
    sgd_var: float,
    zeta_i: float,
    zeta: float,
    gradient_max: float,
    sampled: int,
    clients: int,
    local_steps: float,
    iterations: int,
) -> PersonalOrder:
    """Theorem 7: any alpha, gradients bounded by `gradient_max`; the residual is (1-alpha)^2 G^2/(mu b)."""
    b = participation_factor(sampled, clients)
    residual = (1 - alpha) ** 2 * gradient_max**2 / (mu * b)
    return _personal_order(alpha, mu, smooth, sgd_var, zeta_i, zeta, sampled, b, local_steps, iterations, residual)


def nonconvex_residual(alpha: float, smooth: float, zeta_i: float, domain_sq: float) -> float:
    """48 (1-alpha^2)^2 zeta_i + 128 (1-alpha^2)^2 L^2 D_W."""
    return (1 - alpha**2) ** 2 * (48 * zeta_i + 128 * smooth**2 * domain_sq)


def nonconvex_global_bound(
    start_risk: float, smooth: float, zeta: float, clients: int, eta: float, local_steps: float, iterations: int
) -> float:
    """Theorem 8 with the constants of Lemmas 9, 10: mean_t |grad F(w_t)|^2, start_risk = F(w_1), F >= 0.

    Needs eta <= 1/(2 sqrt(5) tau L).
    """
    return 8 * start_risk / (eta * iterations) + 60 * (smooth * local_steps * eta) ** 2 * zeta / clients


def nonconvex_personal_bound(
    alpha: float,
    personal_start_risk: float,
    global_start_risk: float,
    smooth: float,
    zeta_i: float,
    zeta: float,
    domain_sq: float,
    clients: int,
    eta: float,
    local_steps: float,
    iterations: int,
) -> float:
    """Theorem 3 with the proof's constants: mean_t |grad f_i(alpha v_t + (1-alpha) w_t)|^2."""
    mix, reach = (1 - alpha) ** 2, (smooth * local_steps * eta) ** 2
    local_drift = 24 * alpha**4 * mix * (200 * reach**2 * zeta / clients + 20 * reach * zeta_i)
    global_drift = 7800 * mix * reach * zeta / clients
    start = (8 * personal_start_risk + 1024 * mix * global_start_risk) / (eta * iterations)
    return start + local_drift + global_drift + nonconvex_residual(alpha, smooth, zeta_i, domain_sq)


def _personal_order(
    alpha, mu, smooth, sgd_var, zeta_i, zeta, averaged, b, local_steps, iterations, residual
) -> PersonalOrder:
    cond, mix, zeta_mean = smooth / mu, (1 - alpha) ** 2, zeta / averaged
    local = cond**2 * local_steps * (sgd_var + local_steps * (zeta_i + zeta_mean))
    global_ = cond**4 * local_steps * (sgd_var + 2 * local_steps * zeta_mean)
    return PersonalOrder(
        mu / (b * iterations**3) + mix * cond * smooth * math.log(iterations) / (b * iterations**3),
        alpha**2 * sgd_var / (mu * b * iterations),
        mix * cond**2 * sgd_var / (mu * b * averaged * iterations),
        mix * (local + global_) / (mu * b * iterations**2),
        residual,
    )
