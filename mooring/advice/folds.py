"""Cross-validation inside clients: every client's rows are dealt into folds, and each fold is held out once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mooring.core.cohort import Rows, batches_of
from mooring.core.seeds import uniforms
from mooring.data.clients import PARTS, Clients
from mooring.data.splits import units as of_units

FOLDS = 5
MORE_FOLDS = 10  # where rows are few
FEW_ROWS = 1_000


class Held(NamedTuple):
    """One way to hold rows out: what is trained on, and what is judged."""

    train: Rows
    held: Rows
    place: Tensor  # [rows of held], places among all rows, client after client; none of rows elsewhere


def joined(first: Rows, second: Rows) -> Rows:
    """The rows of two parts of the same clients, client after client."""
    if int(second.size.sum()) == 0:
        return compact(first)
    owner = torch.cat([owners(first), owners(second)])
    order = torch.argsort(owner, stable=True)
    x, y = (torch.cat([getattr(compact(part), name) for part in (first, second)])[order] for name in ("x", "y"))
    size = first.size + second.size
    return Rows(x, y, torch.cumsum(size, 0) - size, size)


def usable(clients: Clients) -> Rows:
    """The rows that advice is learnt from: all, but for the test rows of a table that brings its own split."""
    if not isinstance(clients.train, Rows):
        return clients.train.usable
    rows = joined(clients.train, clients.validation)
    return joined(rows, clients.test) if clients.parts_by_chance else rows


def owners(rows: Rows) -> Tensor:
    """[N]: each row's client, client after client."""
    return torch.repeat_interleave(torch.arange(len(rows)), rows.size)


def compact(rows: Rows) -> Rows:
    """The same rows in a pool of their own, client after client."""
    begin = torch.cumsum(rows.size, 0) - rows.size
    if len(rows.y) == int(rows.size.sum()) and torch.equal(begin, rows.start):
        return Rows(rows.x, rows.y, rows.start, rows.size)
    index = torch.repeat_interleave(rows.start - begin, rows.size) + torch.arange(int(rows.size.sum()))
    return Rows(rows.x[index], rows.y[index], begin, rows.size)


def subset(rows: Rows, keep: Tensor) -> Rows:
    """The rows of a compact pool that `keep` [N] marks."""
    size = torch.bincount(owners(rows)[keep], minlength=len(rows))
    return Rows(rows.x[keep], rows.y[keep], torch.cumsum(size, 0) - size, size)


def units_of(clients: Clients) -> Tensor | None:
    """[N]: the units of `usable` rows, in their order; None where every row stands for itself."""
    if clients.units is None:
        return None
    parts = PARTS if clients.parts_by_chance else PARTS[:2]
    owner = torch.cat([owners(getattr(clients, part)) for part in parts])
    return torch.cat([clients.units[part] for part in parts])[torch.argsort(owner, stable=True)]


def deal(rows: Rows, keys: np.ndarray, folds: int, seed: int, units: Tensor | None = None) -> Tensor:
    """[N]: each row's fold. A client's rows are shuffled and dealt in turn from a random fold on: sizes differ by 1.

    Of rows with `units` [N] the units are: those of one lie in one fold.
    """
    owner = owners(rows).numpy()
    place = np.arange(len(owner)) - np.repeat(np.cumsum(rows.size.numpy()) - rows.size.numpy(), rows.size.numpy())
    mine = np.arange(len(owner))
    if units is not None and len(units):  # a unit is dealt as its first row is
        mine, head = of_units(owner, units.numpy())
        owner, place = owner[head], place[head]
    lottery = uniforms(seed, "split", keys[owner], place, 2)
    order = np.lexsort((lottery, owner))
    rank = np.empty(len(owner), dtype=np.int64)
    count = np.bincount(owner, minlength=len(rows))
    rank[order] = np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
    first = np.floor(uniforms(seed, "split", keys, 3) * folds).astype(np.int64)
    return torch.from_numpy(((rank + first[owner]) % folds)[mine])


def cross(
    rows: Rows, keys: np.ndarray, seed: int = 0, folds: int | None = None, units: Tensor | None = None
) -> Iterator[Held]:
    """The folds of a compact pool, one after another; those of rows elsewhere, as their clients deal them."""
    count = folds or (MORE_FOLDS if int(rows.size.sum()) <= FEW_ROWS else FOLDS)
    if not isinstance(rows, Rows):
        yield from rows.folds(count)
        return
    fold = deal(rows, keys, count, seed, units)
    for k in range(count):
        out = fold == k
        if bool(out.any()):
            yield Held(subset(rows, ~out), subset(rows, out), torch.nonzero(out)[:, 0])


def row_losses(task: Any, models: Tensor, rows: Rows, unit: float = 1.0) -> Tensor:
    """[N] in float64: the reported loss of every row under its own client's model, client after client.

    models is [m, d], or one [d] for all.
    """
    out = torch.empty(int(rows.size.sum()), dtype=torch.float64)
    first = torch.cumsum(rows.size, 0) - rows.size
    models = models.expand(len(rows), -1) if models.ndim == 1 else models
    for block, batch in batches_of(rows) if len(out) else ():
        column = torch.arange(batch.y.shape[1])
        real = column < rows.size[block][:, None]
        out[(first[block][:, None] + column)[real]] = task.row_risk(models[block], batch)[real].double()
    return unit * out
