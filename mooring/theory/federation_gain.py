"""What a client gains by joining: the error of the best local model over that of the federated one.

    FG_j = R_j^Loc / R_j^Fed,   squared estimation errors of theta_j* (Definition 15)

Theorem 16   random designs of bounded moments, truths at most Gamma apart:
             FG_j >= (c_1 min{sigma^2 d/n_j, B^2} + max{1 - n_j/d, 0} B^2) / (kappa (sigma^2 d/N + Gamma^2))
Theorem 17   one truth, client i's rows in a random subspace of dimension r_i, N >= C nu d log d, nu = max n_i/r_i:
             FG_j >= (c_1 min{sigma^2 d/n_j, B^2} + (1 - r_j/d) B^2) / (kappa sigma^2 d/N)
Break-even   FG_j = 1 near Gamma = B sqrt(1 - n_j/d) for n_j < d, else Gamma = min{sigma sqrt(d/n_j), B}
Coverage     m clients that each see r of d directions see all of them from m r = d log d on (coupon collector)

Held out     where no truth is known, losses on rows that took no part in training stand for the two risks, as in
             `risk_ratio`. They contain the noise of the responses: the ratio is nearer to 1 than that of Definition 15

Symbols  Gamma: spread, the largest distance of two truths   B: radius >= |theta_j*|   sigma: noise std of the responses
Assumes  Gaussian noise; c_1 depends on the designs and is unknown: an argument.
Reads    Eq. 34 omits the kappa that its proof carries.
Reads    Definition 15 has squared norms, but the plateau "around 107" of Figure 5 is the ratio of plain norms: `Gain`
         holds both.

Source   kernel, Definition 15, Theorems 16 and 17, Sections 7.2 and 7.3.
"""

import math
from typing import NamedTuple

import numpy as np

from mooring.core.errors import RequestError


class Gain(NamedTuple):
    """Above 1, joining helps."""

    squared: float  # Definition 15
    plain: float  # as plotted in Figure 5


def least_squares(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The local referee: (X'X)^+ X'y, the minimum-norm least squares solution."""
    return np.linalg.lstsq(x, y, rcond=None)[0]


def federation_gain(local: np.ndarray, federated: np.ndarray, truth: np.ndarray) -> Gain:
    """Empirical gain of one client; `federated` is [d], or [rounds, d] of which the best round counts (Eq. 33)."""
    own = float(np.linalg.norm(np.asarray(local) - truth))
    joint = float(np.linalg.norm(np.atleast_2d(federated) - truth, axis=1).min())
    if joint == 0:
        raise RequestError("federation gain: the federated model equals the truth, so the ratio is undefined.")
    return Gain((own / joint) ** 2, own / joint)


class RatioInterval(NamedTuple):
    value: float
    low: float
    high: float


def risk_ratio(local: np.ndarray, federated: np.ndarray, width: float = 1.96) -> RatioInterval:
    """Definition 15 on held-out rows: mean loss of the local model over that of the federated one, with Fieller's
    interval.

    It contains every r for which mean(local - r federated) is within `width` standard errors of 0, rows [n] being
    paired; so it contains 1 exactly when the interval of the difference of losses contains 0. Its end is infinite where
    the federated loss itself is within `width` standard errors of 0.
    """
    pair = np.stack([local, federated]).astype(float)
    top, bottom = pair.mean(1)
    if len(pair[0]) < 2 or not bottom > 0:
        return RatioInterval(top / bottom if bottom > 0 else math.nan, 0.0, math.inf)
    spread = np.cov(pair) * (width**2 / pair.shape[1])
    # (bottom^2 - s_ff) r^2 - 2 (top bottom - s_af) r + (top^2 - s_aa) <= 0
    square, middle, constant = bottom**2 - spread[1, 1], top * bottom - spread[0, 1], top**2 - spread[0, 0]
    root = math.sqrt(max(middle**2 - square * constant, 0.0))
    if square > 0:
        return RatioInterval(top / bottom, max((middle - root) / square, 0.0), (middle + root) / square)
    # The set is all numbers, or all outside an interval whose upper part is returned.
    low = constant / (middle + root) if constant > 0 and middle + root > 0 else 0.0
    return RatioInterval(top / bottom, low, math.inf)


def local_risk_floor(
    samples: int, dim: int, sigma: float, radius: float, rank: int | None = None, c1: float = 1.0
) -> float:
    """The numerator of Theorems 16 (rank absent) and 17: no local estimator has a smaller worst-case squared error."""
    unseen = max(1 - (samples if rank is None else rank) / dim, 0.0)
    return c1 * min(sigma**2 * dim / samples, radius**2) + unseen * radius**2


def gain_under_model_heterogeneity(
    samples: int,
    total: int,
    dim: int,
    sigma: float,
    radius: float,
    spread: float,
    kappa: float = 1.0,
    c1: float = 1.0,
) -> float:
    """Theorem 16's lower bound for a client with `samples` of the `total` rows."""
    return local_risk_floor(samples, dim, sigma, radius, c1=c1) / (kappa * (sigma**2 * dim / total + spread**2))


def gain_under_covariate_heterogeneity(
    samples: int,
    total: int,
    dim: int,
    rank: int,
    sigma: float,
    radius: float,
    kappa: float = 1.0,
    c1: float = 1.0,
) -> float:
    """Theorem 17's lower bound for a client whose rows span `rank` directions."""
    return local_risk_floor(samples, dim, sigma, radius, rank, c1) / (kappa * sigma**2 * dim / total)


def break_even_heterogeneity(samples: int, dim: int, sigma: float, radius: float) -> float:
    """The Gamma at which joining stops paying, as predicted after Theorem 16."""
    if samples < dim:
        return radius * math.sqrt(1 - samples / dim)
    return min(sigma * math.sqrt(dim / samples), radius)


def covering_rank(clients: int, dim: int) -> float:
    """r = d log d/m, where the federation starts to see every direction and gains jump."""
    return dim * math.log(dim) / clients


def unseen_share(clients: int, dim: int, rank: int) -> float:
    """Expected share of directions that no client sees when each sees `rank` of `dim` at random: (1 - r/d)^m."""
    return (1 - rank / dim) ** clients
