"""How much the clients' coefficients vary: the empirical-Bayes prior that proposes each client's stiffness.

    v_i ~ N(w, diag(tau^2))   ->   lam_ij = noise_i / (n_i tau_j^2)

The estimates are those of `theory/spread.py`: restricted likelihood for linear tasks, Laplace's approximation for the
other smooth ones. Where clients are very many, a part of them says how all vary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mooring.advice.path import Shape, is_dense, path
from mooring.core.cohort import Rows
from mooring.tasks.linear import Linear
from mooring.theory.spread import Spread, spread_laplace, spread_likelihood
from mooring.theory.summaries import linear_stats

MOST_CLIENTS = 4_000  # clients that the spread is estimated from; the others' rows would change little
KINDS = ("scalar", "diagonal")


class Prior(NamedTuple):
    kind: str  # "scalar": one spread for all coefficients, or "diagonal"
    variance: Tensor  # [d], tau^2
    noise: Tensor  # [m]
    spread: Spread  # the whole estimate, of the clients it was made from
    clients: Tensor  # [k], who they are

    def shape(self, n: Tensor) -> Shape:
        """The stiffness that this prior proposes, at scale 1."""
        return Shape(self.noise / n.double().clamp(min=1), self.variance)


def priors(task: Any, rows: Rows) -> list[Prior]:
    """Both kinds, the simpler first; none where the task has no Hessian or the rows are too few."""
    asked = torch.nonzero(rows.size > 0)[:, 0]
    if not is_dense(task) or len(asked) < 2 or int(rows.size.sum()) <= task.dim + 1:
        return []
    if len(asked) > MOST_CLIENTS:
        asked = asked[torch.linspace(0, len(asked) - 1, MOST_CLIENTS).long()]
    some = rows.select(asked)
    find = _linear if isinstance(task, Linear) else _laplace
    found = []
    for kind, spread in find(task, some):
        noise = torch.full((len(rows),), float(spread.noise.mean()), dtype=torch.float64)
        noise[asked] = spread.noise
        found.append(Prior(kind, spread.variance, noise, spread, asked))
    return found


def preferred(found: list[Prior]) -> Prior:
    """The kind that the clients' data ask for: more parameters must pay by log(clients) each (Schwarz)."""
    if len(found) == 1:
        return found[0]
    simple, rich = found
    price = (len(rich.variance) - 1) * float(torch.tensor(len(rich.clients)).log())
    return rich if simple.spread.deviance - rich.spread.deviance > price else simple


def _linear(task: Linear, rows: Rows):
    stats = linear_stats(rows, task.intercept)
    for kind in KINDS:
        yield kind, spread_likelihood(stats, kind)


def _laplace(task: Any, rows: Rows):
    """Fits are renewed by the task's own prox, warm started; the first centre is the common model."""
    batches = [(block, rows.select(block).padded()) for block in rows.blocks()]
    common = next(path(task, rows, rows.size.double(), [torch.inf], ridge=1e-4)).w
    hessians = torch.empty(len(rows), task.dim, task.dim, dtype=torch.float64)
    for kind in KINDS:
        modes = common.expand(len(rows), -1).clone()

        def refit(center: Tensor, lam: Tensor, modes: Tensor = modes) -> tuple[Tensor, Tensor]:
            for block, batch in batches:
                modes[block] = task.prox(center.to(task.dtype), lam[block].to(task.dtype), batch, modes[block])
                hessians[block] = task.hessian(modes[block], batch).double()
            return modes, hessians

        yield kind, spread_laplace(rows.size.double(), refit, common, kind, variance=0.1)
