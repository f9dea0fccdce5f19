"""Newton's method on a cohort: C smooth convex problems at once, each with its own damping and stop."""

from collections.abc import Callable

import torch
from torch import Tensor

ARMIJO_SHARE = 1e-4  # share of the predicted decrease that a step must bring
STEP_SHRINK_FACTOR = 0.5
MAX_HALVINGS = 40


def damped_newton(
    value: Callable[[Tensor], Tensor],
    grad: Callable[[Tensor], Tensor],
    direction: Callable[[Tensor, Tensor], Tensor],
    w: Tensor,
    *,
    tol: float | Tensor = 1e-10,
    most: int = 100,
) -> Tensor:
    """Minimise each of C convex functions from the rows of `w` [C, d].

    `direction(w, g)` solves (approximately) Hessian(w) s = g. A client stops once |gradient| <= tol * (1 + its first
    gradient's norm), tol a number or [C], or when no step lowers its value any more (the limit of the floating-point
    grid). One more step is taken from there: steps square the error near the end, so whether a gradient just met its
    goal or just missed it, which rounding decides, no longer shows in the answer. `grad` and `direction` are mostly
    called with the tensor that `value` was called with last, so that it may keep what it computed.
    """
    w = w.clone()
    f, g = value(w), grad(w)
    length = g.norm(dim=1)
    goal = tol * (1 + length)
    live = length > goal
    for _ in range(most):
        if not bool(live.any()):
            break
        s = direction(w, g)
        slope = (s * g).sum(1)
        uphill = ~(slope > 0) | ~torch.isfinite(slope)
        s = torch.where(uphill[:, None], g, s)
        slope = torch.where(uphill, (g * g).sum(1), slope)
        rate = torch.ones_like(f)
        trial_w, trial_f = w, f
        searching = live.clone()
        # Near the minimum the decrease is below rounding: allow for it, so that the gradient decides.
        rounding = 8 * torch.finfo(w.dtype).eps * (1 + f.abs())
        for _ in range(MAX_HALVINGS):
            candidate = torch.where(searching[:, None], w - rate[:, None] * s, trial_w)
            value_at = value(candidate)
            improves = searching & (value_at <= f - ARMIJO_SHARE * rate * slope + rounding)
            trial_w = torch.where(improves[:, None], candidate, trial_w)
            trial_f = torch.where(improves, value_at, trial_f)
            searching = searching & ~improves
            if not bool(searching.any()):
                trial_w = candidate
                break
            rate = torch.where(searching, rate * STEP_SHRINK_FACTOR, rate)
        moved = live & ~searching
        new_g = grad(trial_w)
        new_length = new_g.norm(dim=1)
        # Within rounding of the minimum: the value no longer falls, and the gradient is down to its own rounding.
        rounded = (f - trial_f <= rounding) & (new_length > 0.5 * length)
        keep = moved & ~((trial_f >= f) & (new_length >= length))
        if bool((keep | ~live).all()):  # a client that rests was not moved
            w, f, g, length = trial_w, trial_f, new_g, new_length
        else:
            w = torch.where(keep[:, None], trial_w, w)
            f = torch.where(keep, trial_f, f)
            g = torch.where(keep[:, None], new_g, g)
            length = torch.where(keep, new_length, length)
        live = live & keep & ~rounded & (length > goal)
    last = w - direction(w, g)
    closer = grad(last).norm(dim=1) <= length  # false at nan
    return torch.where(closer[:, None], last, w)


def conjugate_gradient(product: Callable[[Tensor], Tensor], b: Tensor, *, tol: float | Tensor, most: int) -> Tensor:
    """Solve C symmetric positive definite systems A_c s_c = b_c, given the products with [C, d] matrices.

    A system rests once |residual| <= tol |b_c|, tol a number or [C].
    """
    least = torch.finfo(b.dtype).tiny
    s = torch.zeros_like(b)
    r = b.clone()
    q = r.clone()
    rr = (r * r).sum(1)
    goal = tol**2 * rr
    for _ in range(most):
        live = (rr > goal) & (rr > least)
        if not bool(live.any()):
            break
        aq = product(q)
        curvature = (q * aq).sum(1)
        step = torch.where(live & (curvature > 0), rr / curvature.clamp(min=least), torch.zeros_like(rr))
        s = s + step[:, None] * q
        r = r - step[:, None] * aq
        new = (r * r).sum(1)
        q = r + (new / rr.clamp(min=least))[:, None] * q
        rr = torch.where(step > 0, new, torch.zeros_like(rr))
    return s
