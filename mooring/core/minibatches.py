"""Minibatches of a cohort: shuffled passes over each client's rows, replayable from (seed, client, round, slot)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mooring.core.cohort import Batch, CohortData, Condensed, Round, Rows
from mooring.core.errors import RequestError
from mooring.core.seeds import add_counter, random_words, uniforms
from mooring.core.task import Task

DRAWS = ("passes", "independent", "replacement")
ROW_BITS = np.uint64(24)  # of a word that orders rows, those that number the row
MAX_PADDING_FACTOR = 4  # padded places per row up to which the orders of several clients are drawn in one table
MAX_WORDS_AT_ONCE = 1 << 14  # of the orders of several passes, which stay in the processor's cache


def without_finished_clients(batch: Condensed, done: Tensor) -> Condensed:
    """The batch without the rows of the clients that are `done` [C]: they neither move nor cost."""
    if isinstance(batch, Batch):
        return batch._replace(weight=batch.weight * ~done[:, None])
    return batch._replace(n=batch.n * ~done)


class Step(NamedTuple):
    """The k-th local step (from 0): its rows, and which clients still have steps (None: all)."""

    k: int
    batch: Condensed  # a Batch, or the task's summary of all rows
    active: Tensor | None  # [C] bool


class RowDraw(NamedTuple):
    """The rows of a step: row_index[c, : n[c]] of the pool for client c; the other numbers are padding."""

    row_index: np.ndarray  # [C, B]
    n: np.ndarray  # [C]


def batches_per_epoch(size: Tensor, batch: int | None) -> Tensor:
    """How many minibatches one pass takes, the last one possibly short; 1 for full batches."""
    return torch.ones_like(size) if batch is None else ((size + batch - 1) // batch).clamp(min=1)


def check_draws(draws: str) -> None:
    if draws not in DRAWS:
        raise RequestError(f"draws must be one of {', '.join(map(repr, DRAWS))}, got {draws!r}.")


def count_local_steps(size: Tensor, batch: int | None, steps: int | Tensor | None, epochs: int | None) -> Tensor:
    """How many local steps each client [C] takes, given either `steps` or `epochs`."""
    if (steps is None) == (epochs is None):
        raise RequestError(f"Local work is given by steps or by epochs, got steps = {steps} and epochs = {epochs}.")
    if epochs is not None:
        return epochs * batches_per_epoch(size, batch)
    return torch.as_tensor(steps).expand(len(size))


def minibatches(
    task: Task,
    data: CohortData,
    round: Round,
    *,
    batch: int | None,
    steps: int | Tensor | None = None,
    epochs: int | None = None,
    slot: int = 0,
    draws: str = "passes",
    part: str = "train",
    trains_buffers: bool = False,
) -> Iterator[Step]:
    """The steps of a local update.

    `batch = None` gives every step all rows. Otherwise `batch` rows at a time, by `draws`:

        "passes"        each client runs through its rows, in a fresh random order per pass
        "independent"   every step draws afresh from all rows, without replacement
        "replacement"   every step draws afresh from all rows, with replacement

    A client with fewer rows uses them all, unless it draws with replacement. Different `slot`s give independent draws
    in the same round. A network with buffers is refused unless the caller trains them (`Task.train_grad`).
    """
    rows: Rows = getattr(data, part)
    counts = count_local_steps(rows.size, batch, steps, epochs)
    most = int(counts.max()) if len(counts) else 0
    ragged = bool((counts != most).any())

    def step(k: int, batch: Condensed) -> Step:
        """Clients that are done carry no rows, so that they neither move nor cost."""
        active = counts > k if ragged else None
        if active is not None:
            batch = without_finished_clients(batch, ~active)
        if (task.is_random or has_buffers) and isinstance(batch, Batch):
            batch = batch._replace(key=forward_keys(data, round, slot, k))
        task.record_draw(batch)
        return Step(k, batch, active)

    check_draws(draws)
    has_buffers = task.gradient_dim < task.dim
    if has_buffers and not trains_buffers:
        raise RequestError(
            "this algorithm takes gradients of its own, which leave the running statistics of normalization layers "
            "untrained; set buffers = 'frozen', or use fedavg, fedprox, ditto or another algorithm of local SGD."
        )
    if uses_all_rows(rows, batch, draws):
        all_rows = rows.full(task) if batch is None else rows.padded()
        for k in range(most):
            yield step(k, all_rows)
        return
    for k, drawn in enumerate(draw_rows(data, round, batch=batch, counts=counts, slot=slot, draws=draws, part=part)):
        valid = torch.from_numpy(np.arange(drawn.row_index.shape[1]) < drawn.n[:, None])
        yield step(k, rows.take(torch.from_numpy(drawn.row_index), valid))


def forward_keys(data: CohortData, round: Round, slot: int, steps: int | np.ndarray) -> np.ndarray:
    """Seeds of the clients' forward passes in a local step, [C], or in `steps` [S, 1], [S, C]."""
    seeds = np.full(len(data), round.seed, dtype=np.uint64) if data.seeds is None else data.seeds
    return random_words(seeds, "forward", data.keys, round.t, slot, steps)


def uses_all_rows(rows: Rows, batch: int | None, draws: str) -> bool:
    """Whether every step takes all rows of every client."""
    return batch is None or (draws != "replacement" and batch >= int(rows.size.max()))


def draw_rows(
    data: CohortData,
    round: Round,
    *,
    batch: int | None,
    counts: Tensor,
    slot: int = 0,
    draws: str = "passes",
    part: str = "train",
) -> Iterator[RowDraw]:
    """What `minibatches` draws for each step, before any row is gathered; `counts` [C] are the clients' steps."""
    check_draws(draws)
    rows: Rows = getattr(data, part)
    start, sizes = rows.start.numpy(), rows.size.numpy()
    seeds = np.full(len(rows), round.seed, dtype=np.uint64) if data.seeds is None else data.seeds
    most = int(counts.max()) if len(counts) else 0
    last = max(len(rows.y) - 1, 0)
    if uses_all_rows(rows, batch, draws):
        column = np.arange(min(int(sizes.max()), len(rows.y)))
        all_rows = RowDraw(np.minimum(start[:, None] + np.where(column < sizes[:, None], column, 0), last), sizes)
        yield from (all_rows for _ in range(most))
        return
    assert batch is not None  # all rows otherwise
    if draws == "replacement":
        for k in range(most):
            u = uniforms(seeds[:, None], "batches", data.keys[:, None], round.t, slot, k, np.arange(batch))
            row_index = np.floor(u * sizes[:, None]).astype(np.int64)
            yield RowDraw(np.minimum(start[:, None] + row_index, last), np.where(sizes > 0, batch, 0))
        return

    column = np.arange(min(batch, int(sizes.max())))
    per_epoch = np.ones_like(sizes) if draws == "independent" else np.maximum(-(-sizes // batch), 1)
    room = np.minimum(sizes, per_epoch * batch)  # how much of an order any pass uses
    if bool((sizes == sizes[0]).all()):
        yield from _draw_alike(data.keys, seeds, round.t, slot, batch, most, start, int(sizes[0]), int(per_epoch[0]))
        return
    offset = np.cumsum(room) - room
    order = np.zeros(int(room.sum()), dtype=np.int64)
    for k in range(most):
        fresh = np.flatnonzero((k % per_epoch == 0) & (sizes > 0))
        if len(fresh):
            used = np.minimum(room[fresh], (most - k) * batch)
            state = random_words(seeds[fresh], "batches", data.keys[fresh], round.t, slot, k // per_epoch[fresh])
            order[np.repeat(offset[fresh], used) + counts_to_positions(used)] = draw_order(state, sizes[fresh], used)
        begin = k % per_epoch * batch
        n = np.clip(sizes - begin, 0, len(column))
        position = np.where(column < n[:, None], (offset + begin)[:, None] + column, 0)
        row_index = np.where(column < n[:, None], order[position], 0)
        yield RowDraw(np.minimum(start[:, None] + row_index, last), n)


def _draw_alike(
    keys: np.ndarray,
    seeds: np.ndarray,
    t: int,
    slot: int,
    batch: int,
    most: int,
    start: np.ndarray,
    size: int,
    per_epoch: int,
) -> Iterator[RowDraw]:
    """The same draws where all clients have equally many rows: slices of an order are the steps' rows. Small passes are
    drawn several at once."""
    clients, full = len(start), np.full(len(start), min(batch, size))
    passes = -(-most // per_epoch)
    at_once = max(1, MAX_WORDS_AT_ONCE // max(clients * size, 1))
    for first in range(0, passes, at_once):
        number = np.arange(first, min(first + at_once, passes))
        used = np.minimum(size, np.minimum(most - number * per_epoch, per_epoch) * batch)  # the last may end early
        state = random_words(seeds, "batches", keys, t, slot, number[:, None])
        orders = draw_order(state.ravel(), np.full(state.size, size), np.repeat(used, clients))
        ends = np.cumsum(used * clients)
        for end, length in zip(ends.tolist(), used.tolist()):
            order = orders[end - length * clients : end].reshape(clients, length) + start[:, None]
            for begin in range(0, length, batch):
                row_index = order[:, begin : begin + batch]
                missing = min(batch, size) - row_index.shape[1]  # a last batch may be short
                if missing:
                    yield RowDraw(np.hstack([row_index, np.repeat(start[:, None], missing, 1)]), full - missing)
                else:
                    yield RowDraw(row_index, full)


def draw_order(state: np.ndarray, sizes: np.ndarray, used: np.ndarray) -> np.ndarray:
    """The first `used` places of a random order of 0..n-1 for each n in `sizes`, one client's after another's.

    Rows are ordered by 40 bits of their words, which follow from the client's words `state` and their numbers, and
    equal ones by number. Both fit one 64-bit word each, so that plain sorts do, and partial ones where few are used.
    """
    longest, longest_used = int(sizes.max()), int(used.max())
    if longest > 1 << ROW_BITS:
        tops = (
            np.argsort(add_counter(state_of_client, np.arange(n)) >> ROW_BITS, kind="stable")[:u]
            for state_of_client, n, u in zip(state, sizes, used)
        )
        return np.concatenate(list(tops))
    if len(sizes) > 1 and longest * len(sizes) > MAX_PADDING_FACTOR * sizes.sum():  # too uneven for one table
        alone = (draw_order(state[i : i + 1], sizes[i : i + 1], used[i : i + 1]) for i in range(len(sizes)))
        return np.concatenate(list(alone))
    row = np.arange(longest, dtype=np.uint64)
    table = (add_counter(state[:, None], row) >> ROW_BITS << ROW_BITS) | row
    if int(sizes.min()) < longest:
        table[row >= sizes[:, None]] = np.iinfo(np.uint64).max
    if 2 * longest_used < longest:
        table = np.partition(table, longest_used - 1, axis=1)[:, :longest_used]
    table.sort(axis=1)
    places = (table[:, :longest_used] & np.uint64((1 << ROW_BITS) - 1)).astype(np.int64)
    return places[np.arange(longest_used) < used[:, None]]


def counts_to_positions(n: np.ndarray) -> np.ndarray:
    """0..n_1-1, 0..n_2-1, ... in one array."""
    return np.arange(n.sum()) - np.repeat(np.cumsum(n) - n, n)
