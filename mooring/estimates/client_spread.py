"""The spread of a task's clients, from their rows: which estimator serves which task, and whom it asks.

    linear tasks          restricted likelihood of the sums that clients send once (`spread_likelihood`)
    other smooth convex   Laplace's approximation (`spread_laplace`): in each exchange clients get a centre and a
                          stiffness, and send their penalised fit and its Hessian; some 5 to 40 exchanges
    the rest              None: kinked losses, networks, very many parameters; one client; hardly a row beyond the
                          parameters; rows that leave noise and spread unseparated

Tiny clients and separable ones need no care: neither estimator wants a fit of their own. Of very many clients a part,
evenly taken, says how all vary.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from mooring.core.cohort import Rows, batches_of
from mooring.estimates.reml import LARGEST, typical_spread
from mooring.estimates.spread import Spread, spread_laplace, spread_likelihood
from mooring.estimates.summaries import linear_stats
from mooring.tasks.linear import Linear
from mooring.tasks.proximal import is_dense

MOST_CLIENTS = 4_000  # clients that the spread is estimated from; the others' rows would change little
MOST_REFITTED = 1_000  # the same where each must be fitted again and again: tau^2 is then known to a few per cent
CELLS = 20_000_000  # and numbers that their Hessians may have in all
MOST_SPREADS = 60  # coefficients up to which each may have a spread of its own
FIRST_RIDGE = 1e-4  # makes the common model that Laplace's approximation starts from exist
FIRST_VARIANCE = 0.1  # the spread that it starts from


class ClientSpread(NamedTuple):
    spread: Spread  # of the clients that were asked
    clients: Tensor  # [k], their places among all


def client_spread(task: Any, rows: Rows, kind: Literal["scalar", "diagonal"] = "scalar") -> ClientSpread | None:
    """How these clients' coefficients vary; None where nothing can be said."""
    asked = torch.nonzero(rows.size > 0)[:, 0]
    if not is_dense(task):
        return None
    linear = isinstance(task, Linear)
    most = min(MOST_CLIENTS if linear else MOST_REFITTED, max(2, CELLS // task.dim**2))
    if len(asked) > most:
        asked = asked[torch.linspace(0, len(asked) - 1, most).long()]
    if len(asked) < 2 or int(rows.size[asked].sum()) <= task.dim + 1:
        return None
    found = (_linear if linear else _laplace)(task, rows.select(asked), kind)
    return None if found is None else ClientSpread(found, asked)


def kinds_of(task: Any) -> tuple[Literal["scalar", "diagonal"], ...]:
    """The kinds of spread that clients can tell: only one above MOST_SPREADS coefficients (features of a kernel)."""
    return ("scalar", "diagonal") if task.dim <= MOST_SPREADS else ("scalar",)


def _linear(task: Linear, rows: Rows, kind: Literal["scalar", "diagonal"]) -> Spread | None:
    stats = linear_stats(rows, task.intercept, task.lift)
    found = spread_likelihood(stats, kind)
    ratio = float((found.variance / found.noise.mean()).max())
    unseparated = ratio >= LARGEST / 10 * typical_spread(found.data)  # the likelihood puts the noise at 0
    return None if unseparated else found


def _laplace(task: Any, rows: Rows, kind: Literal["scalar", "diagonal"]) -> Spread:
    """Fits are renewed by the task's own prox, warm started; the first centre is the common model."""
    batches = batches_of(rows)
    zero = torch.zeros(1, task.dim, dtype=task.dtype)
    common = task.prox(zero, FIRST_RIDGE, rows.pooled(rows.size.to(task.dtype)))[0]
    modes = common.expand(len(rows), -1).clone()
    hessians = torch.empty(len(rows), task.dim, task.dim, dtype=torch.float64)

    def refit(center: Tensor, lam: Tensor) -> tuple[Tensor, Tensor]:
        for block, batch in batches:
            modes[block] = task.prox(center.to(task.dtype), lam[block].to(task.dtype), batch, modes[block])
            hessians[block] = task.hessian(modes[block], batch).double()
        return modes, hessians

    return spread_laplace(rows.size.double(), refit, common, kind, FIRST_VARIANCE)
