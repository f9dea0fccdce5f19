"""What rows say that took no part in the fits they judge: sums over each client's rows, which it could send.

Of every client its rows, the sums of its losses with each of three models (alone, common, personal), and for each pair
of them the sums of the rows' differences of loss and of their squares. Sums of several folds add up.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mooring.advice.calibrate import Witness
from mooring.advice.folds import owners, row_losses
from mooring.core.cohort import Rows

PAIRS = {
    "personal over alone": ("alone", "personal"),
    "personal over common": ("common", "personal"),
    "common over alone": ("alone", "common"),
}
MODELS = ("alone", "common", "personal")


class Trio(NamedTuple):
    """The models that are compared, of every client."""

    alone: Tensor  # [m, d]
    common: Tensor  # [d]
    personal: Tensor  # [m, d]
    centre: Tensor  # [d], the common model inside the plan: what newcomers are moored to


class Tally(NamedTuple):
    rows: Tensor  # [m]
    losses: Tensor  # [3, m], sums with each of MODELS
    gaps: Tensor  # [3, 2, m], of each of PAIRS: sums of differences, and of their squares


def tally_of(task: Any, held: Rows, trio: Trio) -> Tally:
    """The sums of these rows, with models that have not seen them."""
    owner, m = owners(held), len(held)
    loss = {name: row_losses(task, getattr(trio, name), held) for name in MODELS}
    gaps = [torch.stack([gap, gap**2]) for gap in (loss[o] - loss[p] for o, p in PAIRS.values())]

    def by_client(values: Tensor) -> Tensor:
        return torch.zeros(len(values), m, dtype=torch.float64).index_add_(1, owner, values)

    return Tally(held.size, by_client(torch.stack(list(loss.values()))), torch.stack([by_client(g) for g in gaps]))


def total(tallies: Iterable[Tally]) -> Tally:
    """The sums of several folds."""
    return Tally(*(torch.stack(parts).sum(0) for parts in zip(*tallies)))


def mean_losses(tally: Tally) -> dict[str, Tensor]:
    """[m] by model; nan without rows."""
    return {name: part / tally.rows for name, part in zip(MODELS, tally.losses)}


def witnesses_of(tally: Tally) -> dict[str, Witness]:
    """By pair: mean differences and their errors over the rows; nothing is predicted."""
    n = tally.rows.double()
    nothing = torch.full_like(n, torch.nan)
    out = {}
    for name, (gap, square) in zip(PAIRS, tally.gaps):
        mean = gap / n
        left = ((square - n * mean**2) / (n - 1).clamp(min=1)).clamp(min=0)
        out[name] = Witness(mean, (left / n).sqrt(), nothing, nothing, tally.rows)
    return out
