"""What rows say that took no part in the fits they judge: sums over each client's rows, which it could send.

Of every client its rows, the sums of its losses with each of three models (alone, common, personal), and for each pair
of them the sums of the rows' differences of loss and of their second, third and fourth powers. Sums of several folds
add up.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mooring.advice.asking import question
from mooring.advice.calibrate import Witness
from mooring.advice.heldout import row_kurtosis, steadied_error
from mooring.core.cohort import Batch, Rows

PAIRS = {
    "personal over alone": ("alone", "personal"),
    "personal over common": ("common", "personal"),
    "common over alone": ("alone", "common"),
}
POWERS = 4
MODELS = ("alone", "common", "personal")


class Trio(NamedTuple):
    """The models that are compared, of every client."""

    alone: Tensor  # [m, d]
    common: Tensor  # [d]
    personal: Tensor  # [m, d]
    centres: Tensor  # [k, d], the common model inside each setting of the mix: what newcomers are moored to


class Tally(NamedTuple):
    rows: Tensor  # [m]
    losses: Tensor  # [3, m], sums with each of MODELS
    gaps: Tensor  # [3, 4, m], of each of PAIRS: sums of differences and of their powers, up to the fourth


def tally_of(task: Any, held: Rows, trio: Trio) -> Tally:
    """The sums of these rows, with models that have not seen them."""
    if int(held.size.sum()) == 0:
        nothing = torch.zeros(len(held), dtype=torch.float64)
        return Tally(held.size, nothing.expand(3, -1), nothing.expand(3, POWERS, -1))
    found = summed_losses(task, held, trio.alone, trio.common.expand_as(trio.alone), trio.personal)
    return Tally(held.size, found.losses.T, found.gaps.permute(1, 2, 0))


class Summed(NamedTuple):
    losses: Tensor  # [C, 3], sums with each of MODELS
    gaps: Tensor  # [C, 3, 4], of each of PAIRS: sums of differences and of their powers


@question
def summed_losses(task: Any, batch: Batch, *models: Tensor) -> Summed:
    """Sums over the rows, with each of MODELS [C, d]."""
    real = batch.weight > 0
    loss = {name: torch.where(real, task.row_risk(w, batch).double(), 0.0) for name, w in zip(MODELS, models)}
    gaps = [loss[o] - loss[p] for o, p in PAIRS.values()]
    powers = [torch.stack([(gap**k).sum(1) for k in range(1, POWERS + 1)], 1) for gap in gaps]
    return Summed(torch.stack([one.sum(1) for one in loss.values()], 1), torch.stack(powers, 1))


def total(tallies: Iterable[Tally]) -> Tally:
    """The sums of several folds."""
    return Tally(*(torch.stack(parts).sum(0) for parts in zip(*tallies)))


def mean_losses(tally: Tally) -> dict[str, Tensor]:
    """[m] by model; nan without rows."""
    return {name: part / tally.rows for name, part in zip(MODELS, tally.losses)}


def witnesses_of(tally: Tally) -> dict[str, Witness]:
    """By pair: mean differences over the rows and their errors, steadied by all clients; nothing is predicted."""
    n = tally.rows.double()
    nothing = torch.full_like(n, torch.nan)
    out = {}
    for name, sums in zip(PAIRS, tally.gaps):
        error = steadied_error(n, sums)
        out[name] = Witness(sums[0] / n, error, nothing, nothing, tally.rows, row_kurtosis(n, sums, error))
    return out
