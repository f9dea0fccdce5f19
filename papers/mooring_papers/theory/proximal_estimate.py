"""How far a personal model is from its truth: around the true average, and all clients together.

    |w*_i - prox_i(w)| <= 2/(mu + lam) |grad L_i(w*_i) + lam (w*_i - w)|              Lemma C.6, w the true average
    mu/2 sum_i p_i |v_i - w*_i|^2 + sum_i p_i <grad L_i(w*_i), v_i - w*_i> <= lam/2 R^2            Eq. 5

at the minimizer v of FedProx's objective. By Cauchy-Schwarz Eq. 5 bounds s = sqrt(sum_i p_i |v_i - w*_i|^2):

    s <= (g + sqrt(g^2 + mu lam R^2))/mu,    g^2 = sum_i p_i |grad L_i(w*_i)|^2

Assumes  every L_i mu-strongly convex; R^2 = sum_i p_i |w*_i - w*_avg|^2.
Reads    Eq. 5 is printed with mu in place of mu/2, which its proof has.

Source   alternative, Lemma C.6; effect, Lemma 1, Eq. 5.
"""

import math

import numpy as np
from numpy.typing import ArrayLike

from mooring.theory.weights import require_positive


def truth_to_prox_bound(gradient: ArrayLike, offset: ArrayLike, mu: float, lam: float) -> float:
    """Lemma C.6, for gradient = grad L_i(w*_i) and offset = w*_i - w."""
    require_positive("truth_to_prox_bound", curvature=mu + lam)
    return 2 / (mu + lam) * float(np.linalg.norm(np.asarray(gradient, float) + lam * np.asarray(offset, float)))


def error_inequality(errors: ArrayLike, gradients: ArrayLike, p: ArrayLike, mu: float) -> float:
    """The left side of Eq. 5, for errors v_i - w*_i and gradients grad L_i(w*_i), both [m, d]."""
    errors, gradients, p = (np.asarray(part, float) for part in (errors, gradients, p))
    return float(p @ (mu / 2 * (errors**2).sum(1) + (gradients * errors).sum(1)))


def error_bound(gradient: float, radius: float, mu: float, lam: float) -> float:
    """What Eq. 5 leaves for s; gradient is g, radius is R."""
    require_positive("error_bound", mu=mu)
    return (gradient + math.sqrt(gradient**2 + mu * lam * radius**2)) / mu
