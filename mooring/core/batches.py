"""Minibatches of a cohort: shuffled passes over each client's rows, replayable from (seed, client, round, slot)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mooring.core.cohort import Batch, CohortData, Round, Rows
from mooring.core.errors import RequestError
from mooring.core.seeds import uniforms, words
from mooring.core.task import Task

DRAWS = ("passes", "independent", "replacement")


def resting(batch: Any, done: Tensor) -> Any:
    """The batch without the rows of the clients that are `done` [C]: they neither move nor cost."""
    if isinstance(batch, Batch):
        return batch._replace(weight=batch.weight * ~done[:, None])
    return batch._replace(n=batch.n * ~done)


class Step(NamedTuple):
    """The k-th local step (from 0): its rows, and who still works (None: everyone)."""

    k: int
    batch: Any  # a Batch, or the task's summary of all rows
    active: Tensor | None  # [C] bool


def batches_per_epoch(size: Tensor, batch: int | None) -> Tensor:
    """How many minibatches one pass takes, the last one possibly short; 1 for full batches."""
    return torch.ones_like(size) if batch is None else ((size + batch - 1) // batch).clamp(min=1)


def check_draws(draws: str) -> None:
    if draws not in DRAWS:
        raise RequestError(f"draws must be one of {', '.join(map(repr, DRAWS))}, got {draws!r}.")


def steps_of(size: Tensor, batch: int | None, steps: int | Tensor | None, epochs: int | None) -> Tensor:
    """How many local steps each client [C] takes, given either `steps` or `epochs`."""
    if (steps is None) == (epochs is None):
        raise RequestError(f"Local work is given by steps or by epochs, got steps = {steps} and epochs = {epochs}.")
    if epochs is not None:
        return epochs * batches_per_epoch(size, batch)
    return torch.as_tensor(steps).expand(len(size))


def _shuffle(
    data: CohortData, who: np.ndarray, sizes: np.ndarray, round: Round, slot: int, epoch: np.ndarray
) -> np.ndarray:
    """A random order of the rows of each client in `who` for its `epoch`: concatenated places 0..n_i-1."""
    n = sizes[who]
    client = np.repeat(np.arange(len(who)), n)
    row = _ramp(n)
    key = words(round.seed, "batches", data.keys[who][client], round.t, slot, epoch[client], row)
    order = np.argsort((client.astype(np.uint64) << np.uint64(40)) | (key >> np.uint64(24)), kind="stable")
    return row[order]


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
) -> Iterator[Step]:
    """The steps of a stay at a cohort.

    `batch = None` gives every step all rows. Otherwise `batch` rows at a time, by `draws`:

        "passes"        each client runs through its rows, in a fresh random order per pass
        "independent"   every step draws afresh from all rows, without replacement
        "replacement"   every step draws afresh from all rows, with replacement

    A client with fewer rows uses them all, unless it draws with replacement. Different `slot`s give independent draws
    in the same round.
    """
    rows: Rows = getattr(data, part)
    check_draws(draws)
    replace = draws == "replacement"
    counts = steps_of(rows.size, batch, steps, epochs)
    most = int(counts.max()) if len(counts) else 0
    ragged = bool((counts != most).any())

    def active(k: int) -> Tensor | None:
        return counts > k if ragged else None

    def step(k: int, batch: Any) -> Step:
        """Clients that are done carry no rows, so that they neither move nor cost."""
        busy = active(k)
        if busy is not None:
            batch = resting(batch, ~busy)
        task.drawn(batch)
        return Step(k, batch, busy)

    if batch is None or (not replace and batch >= int(rows.size.max())):
        whole = rows.full(task) if batch is None else rows.padded()
        for k in range(most):
            yield step(k, whole)
        return

    sizes = rows.size.numpy()
    column = np.arange(batch if replace else min(batch, int(sizes.max())))
    if replace:
        valid = torch.from_numpy(np.broadcast_to(sizes[:, None] > 0, (len(sizes), batch)).copy())
        for k in range(most):
            u = uniforms(round.seed, "batches", data.keys[:, None], round.t, slot, k, column)
            place = np.floor(u * sizes[:, None]).astype(np.int64)
            yield step(k, rows.take(rows.start[:, None] + torch.from_numpy(place), valid))
        return

    per_epoch = np.ones_like(sizes) if draws == "independent" else np.maximum(-(-sizes // batch), 1)
    offset = np.cumsum(sizes) - sizes
    order = np.zeros(int(sizes.sum()), dtype=np.int64)
    for k in range(most):
        fresh = np.flatnonzero((k % per_epoch == 0) & (sizes > 0))
        if len(fresh):
            spots = np.repeat(offset[fresh], sizes[fresh]) + _ramp(sizes[fresh])
            order[spots] = _shuffle(data, fresh, sizes, round, slot, k // per_epoch[fresh])
        place = (k % per_epoch * batch)[:, None] + column
        valid_np = place < sizes[:, None]
        spot = np.where(valid_np, offset[:, None] + place, 0)
        index = rows.start[:, None] + torch.from_numpy(np.where(valid_np, order[spot], 0))
        yield step(k, rows.take(index.clamp(max=len(rows.y) - 1), torch.from_numpy(valid_np)))


def _ramp(n: np.ndarray) -> np.ndarray:
    """0..n_1-1, 0..n_2-1, ... in one array."""
    return np.arange(n.sum()) - np.repeat(np.cumsum(n) - n, n)


def one_batch(
    task: Task, data: CohortData, round: Round, *, batch: int | None, slot: int, part: str = "train"
) -> Batch:
    """A single draw, for methods that need a few separate batches (one slot each)."""
    return next(minibatches(task, data, round, batch=batch, steps=1, slot=slot, part=part)).batch
