"""How many communication rounds each method needs to reach accuracy eps.

Orders without constants, for mean_t |grad F(w_t)|^2 <= eps on non-convex problems (FCO: convex composite).

Symbols  eps: accuracy   I: sampled clients per round   b: batch   M: clients
Flags    any_heterogeneity: no bound on how unlike the clients' gradients are
         non_smooth: covers non-smooth losses     sampling: covers rounds with some of the clients

Source   mspp, Table 1 and Remark 2.
"""

from collections.abc import Callable
from typing import NamedTuple

from mooring.core.errors import RequestError


class Complexity(NamedTuple):
    order: Callable[[float, int, int, int], float]  # (eps, I, b, M) -> rounds
    any_heterogeneity: bool
    non_smooth: bool
    sampling: bool
    source: str


COMPLEXITIES: dict[str, Complexity] = {
    "fedprox": Complexity(lambda e, i, b, m: 1 / (i * e**2) + e**-1.5, True, False, True, "mspp, Theorem 1"),
    "fedprox non-smooth": Complexity(lambda e, i, b, m: e**-2, True, True, True, "mspp, Theorem 2"),
    "fedprox, all clients": Complexity(lambda e, i, b, m: e**-1.5, True, False, False, "mspp, Remark 2"),
    "fedprox, gradients (B,0)-similar": Complexity(lambda e, i, b, m: 1 / e, False, False, True, "Li et al. 2020"),
    "fedmspp": Complexity(lambda e, i, b, m: 1 / (b * i * e**2) + e**-1.5, True, False, True, "mspp, Theorem 3"),
    "fedmspp non-smooth": Complexity(lambda e, i, b, m: e**-2, True, True, True, "mspp, Theorem 4"),
    "fedavg": Complexity(
        lambda e, i, b, m: 1 / (b * i * e**2) + e**-1.5 + 1 / e, False, False, True, "Karimireddy et al. 2020"
    ),
    "fedavg, all clients (Yu)": Complexity(
        lambda e, i, b, m: 1 / (b * m * e**2) + m * b / e, False, False, False, "Yu et al. 2019"
    ),
    "fedavg, all clients (Khanduri)": Complexity(
        lambda e, i, b, m: e**-1.5, False, False, False, "Khanduri et al. 2021"
    ),
    "scaffold": Complexity(
        lambda e, i, b, m: 1 / (b * i * e**2) + (m / i) ** (2 / 3) / e, True, False, True, "Karimireddy et al. 2020"
    ),
    "fedpd": Complexity(lambda e, i, b, m: 1 / e, False, False, False, "Zhang et al. 2020"),
    "stem": Complexity(lambda e, i, b, m: 1 / e, False, False, False, "Khanduri et al. 2021"),
    "fco": Complexity(lambda e, i, b, m: 1 / (b * m * e**2) + 1 / e, True, True, False, "Yuan et al. 2021"),
}


def rounds_order(method: str, accuracy: float, sampled: int = 1, batch: int = 1, clients: int | None = None) -> float:
    """Rounds to reach `accuracy`, up to a constant. `clients` defaults to `sampled` (every client takes part)."""
    if method not in COMPLEXITIES:
        raise RequestError(f"Communication: unknown method {method!r}; known: {', '.join(COMPLEXITIES)}.")
    if not accuracy > 0:
        raise RequestError(f"Communication: accuracy must be > 0, got {accuracy}.")
    return COMPLEXITIES[method].order(accuracy, sampled, batch, clients if clients is not None else sampled)
