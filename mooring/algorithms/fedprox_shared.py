"""FedProx, shared model: clients return a proximal step from the common model, the server averages.

mspp, Eq. 1.3; kernel, Eq. 6 (there eta = 1/lam).

    w_i ~ arg min_v  L_i(v) + lam/2 |v - w|^2
    w  <- sum_i p_i w_i                                over the cohort

    growth = "smooth"   lam max{T^(1/3), (T/I)^(1/2)} is used, I clients a round for T rounds (mspp, Theorem 1: 3L)
    growth = "kinked"   lam sqrt(T)                       (mspp, Theorem 2: exact solves, lam > 2 x weak convexity)
    lam = "theory"      sets growth and lam as those theorems do, and certifies each solve

Symbols  w: Server.w    lam: the papers' 1/eta    eta: the inner step size    lipschitz: G
Limits   lam -> 0 with SGD is FedAvg; lam -> infinity stands still; the fixed point minimises sum_i p_i F_i, F_i the
         Moreau envelope of L_i, not sum_i p_i L_i
Departs  inner = "descent" stops at a gradient certificate |grad| <= tol, at most `steps` steps; with growth = "smooth"
         tol is `mspp`'s min{G/sqrt(I), 2LG/(lam I)}, a bound on the gradient. The theorems bound the mean over rounds.
         lam = "theory" takes G, unless given, from the clients' fits, and 1/lam of Theorem 2 from the rows' lengths
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import sqrt
from typing import ClassVar, NamedTuple

from torch import Tensor

from mooring.algorithms.base import Algorithm, Setting
from mooring.algorithms.settings import check, choose_inner, local_sgd, read_lam, settled
from mooring.core.errors import RequestError
from mooring.core.moor import Moor, stiffness
from mooring.core.solvers import descend
from mooring.theory.fedprox_shared_rate import gradient_tolerance, step_size

CERTIFIED = 200  # steps that a certified solve may take: lam_T >= 3L at least halves its error with each


class Server(NamedTuple):
    w: Tensor  # [d]


class Client(NamedTuple):
    pass


@dataclass(frozen=True)
class FedProxShared(Algorithm):
    lam: Setting = "auto"
    growth: str = "none"
    inner: str = "auto"  # "exact", "descent" or "sgd"; auto: exact where the task has a prox, sgd elsewhere
    eta: Setting = "auto"
    decay: float = 0.0
    steps: int = 10
    epochs: int = 0  # passes over the data instead of steps, when > 0
    batch: Setting = "auto"  # 0: all rows
    tol: float = 1e-6
    lipschitz: float = 0.0  # 0: unknown

    paper: ClassVar[str] = "mspp, Eq. 1.3; kernel, Eq. 6"
    reveals: ClassVar[str] = "each client's proximal step from the common model"

    def __post_init__(self) -> None:
        read_lam(self, ("auto", "theory"))
        check(self, growth=("none", "smooth", "kinked"), inner=("auto", "exact", "descent", "sgd"), decay=(0, None))
        check(self, eta=(0, None, "auto"), steps=(1, None), epochs=(0, None), batch=(0, None, "auto"), tol=(0, None))
        check(self, lipschitz=(0, None))
        check_growth(self)

    def settle(self, task, facts):
        ready = by_theorem(self, task, facts, factor=3) if self.lam == "theory" else self
        return settled(replace(ready, inner=choose_inner(ready, task)), task, facts)

    def start(self, task, w0):
        return Server(w0), Client()

    def visit(self, server, client, task, data, round):
        w = server.w.expand(len(data), -1)
        now = self.at(round)
        lam = stiffness(now.lam, data.index, w)
        if self.inner == "exact":
            v = task.prox(w, lam, data.train.full(task))
        elif self.inner == "descent":
            v = descend(task, w, data.train.full(task), lam, w, now.eta, tol=now.tol, most=self.steps)
        else:
            v = local_sgd(now, task, w, data, round, pull=(lam, w))
        return client, v - w

    def at(self, round):
        """The settings for this horizon and cohort."""
        if self.growth == "none":
            return self
        if self.growth == "kinked":
            return at_horizon(self, self.lam * sqrt(round.rounds), self.tol)
        smooth, sampled = self.lam / 3, round.cohort
        step = step_size(smooth, round.rounds, sampled)
        return at_horizon(self, 1 / step, gradient_tolerance(self.lipschitz, smooth, step, sampled))

    def merge(self, server, mean, round):
        return Server(server.w + mean)

    def deploy(self, server, client):
        return server.w


def check_growth(algorithm):
    """A lam that grows with the horizon is one number, and never 0."""
    lam, owner = algorithm.lam, type(algorithm).__name__
    if algorithm.growth != "none" and (isinstance(lam, Moor) or lam == 0):
        raise RequestError(f"{owner}: growth = '{algorithm.growth}' needs lam as one number > 0, got {lam}.")


def by_theorem(algorithm, task, facts, factor, batch=0):
    """lam = factor x L with certified solves (smooth losses), or 1/rho with exact ones (kinked: rho < 1/(2 weak)).

    L bounds the curvature of what is solved: of all rows, or of minibatches.
    """
    owner = type(algorithm).__name__
    if task.smooth_loss:
        smooth = float((facts.smooth + (facts.trace / batch if batch else 0.0)).max())
        lipschitz = algorithm.lipschitz or float(facts.noise.max())
        if not smooth > 0 or not lipschitz > 0:
            raise RequestError(
                f"{owner}: lam = 'theory' needs the loss's smoothness and Lipschitz constant, and task '{task.name}' "
                f"tells {smooth:.3g} and {lipschitz:.3g}; give lam a number, or set lipschitz."
            )
        inner = choose_inner(algorithm, task, otherwise="descent")
        steps = max(algorithm.steps, CERTIFIED)
        return replace(
            algorithm, lam=factor * smooth, growth="smooth", lipschitz=lipschitz, inner=inner, steps=steps, batch=batch
        )
    if task.prox is None:
        raise RequestError(f"{owner}: lam = 'theory' needs exact solves, and task '{task.name}' has no exact prox.")
    weak = max(0.0, -float(facts.convex.min()))
    return replace(algorithm, lam=max(float(facts.noise.max()) ** 2, 4 * weak), growth="kinked", inner="exact")


def at_horizon(algorithm, lam, tol):
    """The algorithm at the lam of this horizon; its step size, settled for the smaller lam, gives way."""
    return replace(algorithm, lam=lam, tol=tol, eta=1 / (1 / algorithm.eta + lam - algorithm.lam))
