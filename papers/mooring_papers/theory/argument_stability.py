"""Uniform argument stability of a regularized minimizer, and its effect on gradients.

An estimator A has stability gamma if replacing one of its N records moves A(S) by at most gamma.

    gamma <= 4 G/(lam N) + 2 sqrt(2 eps/lam)                                  Lemma 1
    |E[grad R(A(S)) - grad R_S(A(S))]|        <= L gamma                      Lemma 3
    E|grad R(A(S)) - E grad R(A(S))|^2        <= L^2 gamma^2 N                Lemma 3

Assumes  the loss G-Lipschitz (and L-smooth in Lemma 3) in w; the regularized objective lam-strongly convex for any
         records, and minimized up to eps in value.

Source   mspp, Lemmas 1 and 3.
"""

import math

from mooring.theory.weights import require_positive


def argument_stability(lipschitz: float, convexity: float, samples: int, tolerance: float = 0.0) -> float:
    """Lemma 1: how far one replaced record can move the estimator."""
    require_positive("argument_stability", convexity=convexity, samples=samples)
    return 4 * lipschitz / (convexity * samples) + 2 * math.sqrt(2 * tolerance / convexity)


def gradient_bias(smooth: float, stability: float) -> float:
    """Lemma 3: the norm of the expected difference of population and empirical gradients at the estimator."""
    return smooth * stability


def gradient_variance(smooth: float, stability: float, samples: int) -> float:
    """Lemma 3: the variance of the population gradient at the estimator."""
    return smooth**2 * stability**2 * samples
