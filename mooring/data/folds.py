"""Cross-validation inside clients: every client's rows are dealt into folds, and each fold is held out once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mooring.core.client_functions import ClientRows
from mooring.core.cohort import Batch, Rows, padded_batches
from mooring.core.seeds import uniforms
from mooring.core.task import Task
from mooring.data.clients import PARTS, Clients
from mooring.data.splits import number_groups as of_units

DEFAULT_FOLDS = 5
TIME_FOLDS = 2  # each a quarter of a client's rows: models are compared that far ahead
FEW_ROWS_FOLDS, MAX_FEW_ROWS = 10, 1_000  # where rows are few in all
MAX_FOLDS, SMALL_CLIENT_ROWS = 20, 16  # where clients are small: those of up to 20 rows leave out one row at a time
SMALL_CLIENTS_SHARE = 0.1  # of the clients, from which on they count
MAX_ROWS_FOR_MAX_FOLDS = 20_000  # and up to so many rows in all


class FoldSplit(NamedTuple):
    """One way to hold rows out: what is fitted, and what is predicted."""

    train: Rows
    held: Rows
    place: Tensor  # [rows of held], places among all rows, client after client; empty for remote rows


def concatenate_rows(first: Rows, second: Rows) -> Rows:
    """The rows of two parts of the same clients, client after client."""
    if int(second.size.sum()) == 0:
        return first.compact()
    owner = torch.cat([row_clients(first), row_clients(second)])
    order = torch.argsort(owner, stable=True)
    x, y = (torch.cat([getattr(part.compact(), name) for part in (first, second)])[order] for name in ("x", "y"))
    size = first.size + second.size
    return Rows(x, y, torch.cumsum(size, 0) - size, size)


def usable_rows(clients: Clients) -> Rows:
    """The rows that advice uses: all, but for the test rows of a table with its own split."""
    rows = concatenate_rows(clients.train, clients.validation)
    return concatenate_rows(rows, clients.test) if clients.has_random_parts else rows


def row_clients(rows: ClientRows) -> Tensor:
    """[N]: each row's client, client after client."""
    return torch.repeat_interleave(torch.arange(len(rows)), rows.size)


def filter_rows(rows: Rows, keep: Tensor) -> Rows:
    """The rows of a compact pool that `keep` [N] marks."""
    size = torch.bincount(row_clients(rows)[keep], minlength=len(rows))
    return Rows(rows.x[keep], rows.y[keep], torch.cumsum(size, 0) - size, size)


def row_groups(clients: Clients) -> Tensor | None:
    """[N]: the units of `usable` rows, in their order; None where every row stands for itself."""
    return None if clients.units is None else _usable_order(clients, clients.units)


def row_times(clients: Clients) -> Tensor | None:
    """[N]: the times of `usable` rows, in their order; None where they are not ordered in time."""
    return None if clients.times is None else _usable_order(clients, clients.times)


def _usable_order(clients: Clients, by_part: Mapping[str, Tensor]) -> Tensor:
    parts = PARTS if clients.has_random_parts else PARTS[:2]
    owner = torch.cat([row_clients(getattr(clients, part)) for part in parts])
    return torch.cat([by_part[part] for part in parts])[torch.argsort(owner, stable=True)]


def number_distinct_rows(rows: Rows) -> Tensor | None:
    """[N]: a number for each distinct row of a compact pool, by which equal rows of a client stay in one fold.

    None where no row is repeated. Where a client's rows repeat by nature, without a column that takes many values,
    equal rows are different observations: each has a number of its own.
    """
    if rows.x.ndim != 2 or len(rows.y.unique()) == len(rows.y):
        return None
    table = torch.cat(
        [row_clients(rows)[:, None].double(), rows.x.double(), rows.y.double().reshape(len(rows.y), -1)], 1
    )
    distinct, number = torch.unique(table, dim=0, return_inverse=True)
    if len(distinct) == len(table):
        return None
    owner = distinct[:, 0].long()
    values = [torch.unique(distinct[:, [0, j]], dim=0)[:, 0].long() for j in range(1, distinct.shape[1])]
    widest = torch.stack([torch.bincount(column, minlength=len(rows)) for column in values]).amax(0)
    by_nature = (2 * widest < torch.bincount(owner, minlength=len(rows)))[row_clients(rows)]
    number = torch.where(by_nature, len(distinct) + torch.arange(len(number)), number)
    return number if len(number.unique()) < len(number) else None


def drop_copies(rows: Rows, units: Tensor | None) -> tuple[Rows, Tensor | None, Tensor]:
    """Rows of which every one appears equally often, or a multiple of that, are counted once.

    The rows that stay, their `units` [N], and which rows these are.
    """
    everything = torch.ones(len(rows.y), dtype=torch.bool)
    if units is None:
        return rows, units, everything
    count = torch.bincount(units)
    copies = int(np.gcd.reduce(count.numpy()))
    if copies < 2:
        return rows, units, everything
    order = torch.argsort(units, stable=True)
    first = torch.cumsum(count, 0) - count
    turn = torch.empty_like(units)
    turn[order] = torch.arange(len(units)) - first[units[order]]
    keep = turn < (count // copies)[units]
    return filter_rows(rows, keep), units[keep], keep


def assign_folds(rows: Rows, keys: np.ndarray, folds: int, seed: int, units: Tensor | None = None) -> Tensor:
    """[N]: each row's fold. A client's rows are shuffled and dealt in turn from a random fold on: sizes differ by 1.

    Of rows with `units` [N] the units are: those of one lie in one fold.
    """
    owner = row_clients(rows).numpy()
    place = np.arange(len(owner)) - np.repeat(np.cumsum(rows.size.numpy()) - rows.size.numpy(), rows.size.numpy())
    unit_of_row = np.arange(len(owner))
    if units is not None and len(units):  # a unit is dealt as its first row is
        unit_of_row, head = of_units(owner, units.numpy())
        owner, place = owner[head], place[head]
    lottery = uniforms(seed, "split", keys[owner], place, 2)
    order = np.lexsort((lottery, owner))
    rank = np.empty(len(owner), dtype=np.int64)
    count = np.bincount(owner, minlength=len(rows))
    rank[order] = np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
    first = np.floor(uniforms(seed, "split", keys, 3) * folds).astype(np.int64)
    return torch.from_numpy(((rank + first[owner]) % folds)[unit_of_row])


def count_folds(rows: Any, in_time_order: bool = False) -> int:
    """How many folds: the more, the fewer rows there are and the smaller the clients.

    A local model of a small client is much worse without a fifth of its rows.
    """
    total = int(rows.size.sum())
    if in_time_order:
        return TIME_FOLDS
    if (
        float((rows.size < SMALL_CLIENT_ROWS).double().mean()) >= SMALL_CLIENTS_SHARE
        and total <= MAX_ROWS_FOR_MAX_FOLDS
    ):
        return min(MAX_FOLDS, max(int(rows.size.max()), 2))
    return FEW_ROWS_FOLDS if total <= MAX_FEW_ROWS else DEFAULT_FOLDS


def iterate_folds(
    rows: Rows,
    keys: np.ndarray,
    seed: int = 0,
    folds: int | None = None,
    units: Tensor | None = None,
    time: Tensor | None = None,
) -> Iterator[FoldSplit]:
    """The folds of a compact pool, one after another.

    With `time` [N] the earlier half of a client's rows only train: models of a few early rows would decide about models
    of all. The later half is cut into the folds, each predicted from all earlier rows (forward chaining).
    """
    count = folds or count_folds(rows, time is not None)
    if time is not None:
        fold = assign_time_folds(rows, time, count)
        for k in range(count):
            out = fold == k
            if bool(out.any()):
                yield FoldSplit(filter_rows(rows, fold < k), filter_rows(rows, out), torch.nonzero(out)[:, 0])
        return
    fold = assign_folds(rows, keys, count, seed, units)
    for k in range(count):
        out = fold == k
        if bool(out.any()):
            yield FoldSplit(filter_rows(rows, ~out), filter_rows(rows, out), torch.nonzero(out)[:, 0])


def sort_by_time(rows: Rows, groups: Tensor | None, times: Tensor) -> tuple[Rows, Tensor | None, Tensor]:
    """A compact pool, its groups and its times, with each client's rows in the order of time."""
    order = torch.from_numpy(np.lexsort((times.numpy(), row_clients(rows).numpy())))
    sorted_rows = Rows(rows.x[order], rows.y[order], rows.start, rows.size)
    return sorted_rows, None if groups is None else groups[order], times[order]


def assign_time_folds(rows: Rows, time: Tensor, folds: int) -> Tensor:
    """[N]: each row's fold with forward chaining; negative for the rows of the earlier half, which only train."""
    return assign_time_blocks(rows, time, 2 * folds) - folds


def assign_time_blocks(rows: Rows, time: Tensor, count: int) -> Tensor:
    """[N]: each row's block, 0 the earliest: a client's rows in order of time, cut into `count` blocks alike.

    Rows of equal time share a block.
    """
    owner, when = row_clients(rows).numpy(), time.numpy()
    order = np.lexsort((when, owner))
    rank = np.empty(len(owner), dtype=np.int64)
    size = rows.size.numpy()
    rank[order] = np.arange(len(owner)) - np.repeat(np.cumsum(size) - size, size)
    pair = np.unique(np.stack([owner, when], 1), axis=0, return_inverse=True)[1].ravel()
    first = np.full(int(pair.max(initial=-1)) + 1, np.iinfo(np.int64).max)
    np.minimum.at(first, pair, rank)
    return torch.from_numpy(first[pair] * count // np.maximum(size[owner], 1))


def has_test_rows(clients: Clients) -> bool:
    """Whether the table keeps rows apart for tests."""
    return not clients.has_random_parts and int(clients.test.size.sum()) > 0


def replace_client_rows(clients: Clients, train: Rows, validation: Rows) -> Clients:
    """The same clients with these rows, and none to test."""
    none = torch.zeros(len(clients), dtype=torch.long)
    empty = Rows(train.x[:0], train.y[:0], none, none)
    return replace(clients, train=train, validation=validation, test=empty, units=None)


def iterate_client_folds(clients: Clients, seed: int) -> Iterator[tuple[Clients, Rows]]:
    """The clients without each fold of their rows, and those rows; both parts are assigned to the folds."""
    parts = [clients.train.compact(), clients.validation.compact()]
    units = [None, None] if clients.units is None else [clients.units[part] for part in PARTS[:2]]
    folds = [assign_folds(rows, clients.keys, DEFAULT_FOLDS, seed, groups) for rows, groups in zip(parts, units)]
    for k in range(DEFAULT_FOLDS):
        held = concatenate_rows(*(filter_rows(rows, fold == k) for rows, fold in zip(parts, folds)))
        if int(held.size.sum()):
            yield (
                replace_client_rows(clients, *(filter_rows(rows, fold != k) for rows, fold in zip(parts, folds))),
                held,
            )


def row_losses(task: Task, models: Tensor, rows: Rows, unit: float = 1.0) -> Tensor:
    """[N] in float64: the reported loss of every row under its own client's model, client after client.

    models is [m, d], or one [d] for all.
    """
    return unit * map_rows(task.row_risk, models, rows)


def map_rows(function: Callable[[Tensor, Batch], Tensor], models: Tensor, rows: Rows) -> Tensor:
    """[N] in float64: a number for every row, client after client; `function` has those of models [C, d] and the rows
    of these clients [C, n]."""
    out = torch.empty(int(rows.size.sum()), dtype=torch.float64)
    first = torch.cumsum(rows.size, 0) - rows.size
    models = models.expand(len(rows), -1) if models.ndim == 1 else models
    for block, batch in (rows.kept_batches or padded_batches(rows)) if len(out) else ():
        column = torch.arange(batch.y.shape[1])
        real = column < rows.size[block][:, None]
        out[(first[block][:, None] + column)[real]] = function(models[block], batch)[real].double()
    return out
