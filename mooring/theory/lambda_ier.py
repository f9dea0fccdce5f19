"""The lam with which FedProx has a small excess risk at every single client.

With R = R_max = max_i |w*_i - w*_avg| and N samples at m clients:

    A   R >= sqrt(m/N)      lam = c_A m / (D^2 N),               c_A = scale_a mu D^2, so lam = scale_a mu m/N
    B   R <  sqrt(m/N)      lam = c_B sqrt(m / (R^2 N + 1)),     c_B = scale_b mu

The risk is then `upper_bounds.fedprox_ier`. In case A lam is almost 0 (local training), unlike the lam for the average.

Assumes  `alternative`'s Assumptions A and C(b), n_i of one order, p_i of order 1/m, n_i >= 4 smooth/mu.
Reads    The proof says lam is of order mu D^2 in case A; it is c_A that is.
Departs  The theorem leaves c_A and c_B open up to their order: scale_a = 1 and scale_b = 1/16, and lam is then clipped
         so that p_max lam <= mu/16, which the proof asks for.

Source   alternative, Theorem 4.5 and its proof (Appendix C.4).
"""

from math import sqrt
from typing import Literal, NamedTuple

from numpy.typing import ArrayLike

from mooring.theory.weights import check_weights, require_nonnegative, require_positive


class IerLambda(NamedTuple):
    lam: float
    case: Literal["A", "B"]


def lambda_ier(
    radius: float, mu: float, p: ArrayLike, n: ArrayLike, *, scale_a: float = 1.0, scale_b: float = 1 / 16
) -> IerLambda:
    """lam and the case it falls in, for the heterogeneity radius R_max."""
    require_positive("lambda_ier", mu=mu, scale_a=scale_a, scale_b=scale_b)
    require_nonnegative("lambda_ier", radius=radius)
    p, n = check_weights(p, n)
    clients, total = n.size, n.sum()
    case: Literal["A", "B"]
    if radius >= sqrt(clients / total):
        lam, case = scale_a * mu * clients / total, "A"
    else:
        lam, case = scale_b * mu * sqrt(clients / (radius**2 * total + 1)), "B"
    return IerLambda(float(min(lam, mu / (16 * p.max()))), case)
