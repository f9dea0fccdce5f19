"""How fast one-stage FedProx converges, and what it costs.

Algorithm 1 of `effect`: in every round each client takes `steps` gradient steps of size eta on h_i from where it
stopped, and the server takes one step of size gamma on the envelope F = sum_i p_i F_i. With the constants of
`moreau.py`, if

    gamma < 1/smooth_g,   eta <= 1/smooth_l,
    (2 + 64 lip_prox^2 lam^2 / mu_g^2) (1 - eta mu_l)^steps <= (1 - gamma smooth_g)^4                  (Eq. 12)

then |w_t - w~|^2 and |w_i,t - w~_i|^2 vanish linearly with the factor r = 1 - gamma mu_g/2 - (gamma mu_g)^2/2 per
round.

Corollary 1: eta = 1/smooth_l, gamma = 1/(2 smooth_g) and steps = ceil(2 + (lam + smooth)/(lam + mu) log(1056 cond^2))
(Eq. 118) satisfy Eq. 12; then 4 cond_g log(1/eps) rounds suffice, and rounds x steps does not depend on lam (Eq. 14).

Assumes  every L_i mu-strongly convex and smooth-smooth; all clients take part; full gradients.
Reads    The proof also needs Eq. 109, which Eq. 12 does not imply; it is automatic at gamma = 1/(2 smooth_g).
Reads    At gamma = 1/smooth_g, which `effect`'s experiments use, Eq. 12 has right side 0 and no number of steps
         qualifies.
Reads    The factor r holds for a Lyapunov sum with the inner error, so eps is relative to its first value, and the
         first rounds of |w_t - w~|^2 alone may contract less.

Source   effect, Theorem 2, Corollary 1, Table 2, Eqs. 105-118.
"""

from math import ceil, log, log1p
from typing import NamedTuple

from mooring.core.errors import RequestError
from mooring.theory.moreau import moreau
from mooring.theory.weights import require_positive


class StepSizes(NamedTuple):
    eta: float
    gamma: float
    steps: int


class Cost(NamedTuple):
    """Orders without constants; computation is None where `effect`'s Table 2 gives none."""

    computation: float | None  # gradient evaluations of a client in one round
    rounds: float


def eq12_holds(mu: float, smooth: float, lam: float, eta: float, gamma: float, steps: int) -> bool:
    """Whether the step sizes and the number of local steps satisfy the conditions of Theorem 2."""
    c = moreau(mu, smooth, lam)
    if gamma * c.smooth_g >= 1 or eta > 1 / c.smooth_l:
        return False
    # lip_prox lam / mu_g = lam / mu
    return (2 + 64 * (lam / mu) ** 2) * (1 - eta * c.mu_l) ** steps <= (1 - gamma * c.smooth_g) ** 4


def eq109_holds(mu: float, smooth: float, lam: float, gamma: float) -> bool:
    """gamma (2 + 1/zeta) mu_g / 2 <= 1 with zeta = 1 - gamma smooth_g (Eq. 109)."""
    c = moreau(mu, smooth, lam)
    zeta = 1 - gamma * c.smooth_g
    return zeta > 0 and gamma * (2 + 1 / zeta) * c.mu_g / 2 <= 1


def least_steps(mu: float, smooth: float, lam: float, eta: float, gamma: float) -> int:
    """The smallest number of local steps that satisfies Eq. 12 for given step sizes."""
    require_positive("least_steps", lam=lam)
    c = moreau(mu, smooth, lam)
    if gamma * c.smooth_g >= 1 or not 0 < eta <= 1 / c.smooth_l:
        raise RequestError(
            f"least_steps: gamma must be below 1/smooth_g = {1 / c.smooth_g:g} and eta in (0, {1 / c.smooth_l:g}], "
            f"got gamma = {gamma:g} and eta = {eta:g}."
        )
    left = 1 - eta * c.mu_l
    if left <= 0:
        return 1
    return max(1, ceil((4 * log1p(-gamma * c.smooth_g) - log(2 + 64 * (lam / mu) ** 2)) / log(left)))


def corollary_step_sizes(mu: float, smooth: float, lam: float) -> StepSizes:
    """eta, gamma and the number of local steps of Corollary 1 (Eq. 118)."""
    require_positive("preset", lam=lam)
    c = moreau(mu, smooth, lam)
    steps = ceil(2 + c.smooth_l / c.mu_l * log(1056 * (smooth / mu) ** 2))
    return StepSizes(eta=1 / c.smooth_l, gamma=1 / (2 * c.smooth_g), steps=steps)


def rate(gamma: float, mu_g: float) -> float:
    """The factor r by which the squared error shrinks per round (Eq. 106)."""
    x = gamma * mu_g
    return 1 - x / 2 - x**2 / 2


def rounds_for(eps: float, factor: float) -> int:
    """Rounds until factor^rounds <= eps."""
    _require_accuracy(eps)
    return ceil(log(1 / eps) / -log(factor)) if factor > 0 else 1


def rounds_bound(mu: float, smooth: float, lam: float, eps: float) -> int:
    """ceil(4 cond_g log(1/eps)): rounds that suffice with the preset of Corollary 1 (Eq. 13)."""
    _require_accuracy(eps)
    return ceil(4 * moreau(mu, smooth, lam).cond_g * log(1 / eps))


def cost_one_stage(eps: float, mu: float, smooth: float, lam: float) -> Cost:
    """One-stage FedProx: (lam + L)/(lam + mu) per round, cond (lam + mu)/(lam + L) log(1/eps) rounds."""
    _require_accuracy(eps)
    c = moreau(mu, smooth, lam)
    return Cost(c.smooth_l / c.mu_l, c.cond_g * log(1 / eps))


def cost_two_stage(eps: float, lam: float) -> Cost:
    """Two-stage FedProx of `alternative`: lam/eps per round, max(lam, 1)/eps rounds."""
    _require_accuracy(eps)
    return Cost(lam / eps, max(lam, 1.0) / eps)


def cost_fedprox_shared(eps: float, gap: float, accuracy: float) -> Cost:
    """Shared-model FedProx: gap/(accuracy eps) rounds; gap of the first objective, accuracy of the local solves."""
    _require_accuracy(eps)
    return Cost(None, gap / (accuracy * eps))


def cost_pfedme(eps: float, clients: int, inner: int) -> Cost:
    """pFedMe: 1/(m R eps) rounds with R inner iterations."""
    _require_accuracy(eps)
    return Cost(None, 1 / (clients * inner * eps))


def cost_ditto(eps: float) -> Cost:
    """Ditto: 1 per round, 1/eps rounds."""
    _require_accuracy(eps)
    return Cost(1.0, 1 / eps)


def cost_l2gd(eps: float, mu: float, smooth: float, lam: float) -> Cost:
    """L2GD: 1 + L/lam per round, 2 lam cond/(lam + L) log(1/eps) rounds."""
    _require_accuracy(eps)
    require_positive("cost_l2gd", mu=mu, smooth=smooth, lam=lam)
    return Cost(1 + smooth / lam, 2 * lam * smooth / mu / (lam + smooth) * log(1 / eps))


def _require_accuracy(eps: float) -> None:
    if not 0 < eps < 1:
        raise RequestError(f"accuracy: eps must lie between 0 and 1, got {eps}.")
