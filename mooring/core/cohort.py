"""A cohort: the clients of one round, their rows ragged, their parameters a matrix [C, d].

Rows of all clients lie one after another in a pool; a cohort is only where each client starts and how many rows it
has. Minibatches are gathered by index, so no client is padded to the largest one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock, RLock
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from mooring.core.client_functions import ClientFunction
    from mooring.core.task import Task

S = TypeVar("S")
T = TypeVar("T")
MAX_PADDED_BYTES = 64_000_000  # features that one padded block of clients may hold: bounds memory
SUMMARY_LOCK = RLock()  # summaries of a federation are computed once, by the first thread
CHUNK_CACHE_BYTES = 20_000_000  # parameters of one chunk: above this the cohort's matrix no longer fits the cache
MAX_NUMBERS_IN_ONE_BATCH = 100_000  # numbers up to which all clients are padded into one batch, whatever their sizes
CACHED_BLOCK_SHARE = 1 / 64  # of MAX_PADDED_BYTES: blocks whose rows stay in the processor's cache
KEPT_BATCHES = "batches"  # where rows keep their padded batches while several client functions use them


class Batch(NamedTuple):
    """Rows of each client of a cohort, padded to the longest, with weights that sum to 1 over a client's rows."""

    x: Tensor  # [C, B, ...]
    y: Tensor  # [C, B]
    weight: Tensor  # [C, B], 0 on padding
    key: Any = None  # [C] uint64, seeds of the forward passes of a local step; None in evaluation


StateTree = Any  # a state or message of an algorithm: a NamedTuple of tensors [C, ...], a tensor, or None
Condensed = Any  # a Batch, or what a task with `HasSummary` makes of it, which only that task reads


@runtime_checkable
class HasSummary(Protocol):
    """A task whose loss depends on a client's rows through a summary of fixed size, as that of linear regression."""

    def condense(self, batch: Batch) -> Condensed:
        """The summary that stands for the batch in full passes: a NamedTuple of tensors [C, ...]."""


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of a cohort inside a shared pool: client c owns `start[c] : start[c] + size[c]`."""

    x: Tensor  # [N, ...], the pool
    y: Tensor  # [N]
    start: Tensor  # [C]
    size: Tensor  # [C]
    parent: Rows | None = None  # the whole federation's rows, where per-client summaries are kept
    position: Tensor | None = None  # [C], this cohort's places in the parent
    cache: dict[object, Any] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.start)

    @staticmethod
    def stack(xs: list[Tensor], ys: list[Tensor]) -> Rows:
        """One pool from each client's arrays."""
        size = torch.tensor([len(y) for y in ys])
        return Rows(torch.cat(xs), torch.cat(ys), torch.cumsum(size, 0) - size, size)

    def select(self, position: Tensor) -> Rows:
        """The rows of some of the clients, in that order; nothing is copied."""
        root = self.parent if self.parent is not None else self
        place = position if self.position is None else self.position[position]
        return Rows(self.x, self.y, self.start[position], self.size[position], root, place)

    def map_columns(self, shape: Callable[[Tensor], Tensor]) -> Rows:
        """The rows with the columns that `shape` makes of theirs."""
        return Rows(shape(self.x), self.y, self.start, self.size)

    def select_columns(self, columns: list[int]) -> Rows:
        """The rows with some of their columns."""
        return Rows(self.x[:, columns], self.y, self.start, self.size)

    def of(self, c: int) -> tuple[Tensor, Tensor]:
        """The rows (x, y) of the c-th client of this cohort."""
        part = slice(int(self.start[c]), int(self.start[c] + self.size[c]))
        return self.x[part], self.y[part]

    def take(self, index: Tensor, valid: Tensor) -> Batch:
        """The rows at `index` [C, B] of the pool; `valid` [C, B] is False at padding."""
        weight = valid.to(self.weight_dtype)
        weight = weight / weight.sum(1, keepdim=True).clamp(min=1)
        return Batch(*self.rows_at(index), weight)

    def rows_at(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """x [C, B, ...] and y [C, B] at `index` [C, B], copied row by row: `x[index]` goes number by number."""
        flat = index.flatten()
        x, y = self.x.index_select(0, flat), self.y.index_select(0, flat)
        return x.unflatten(0, index.shape), y.unflatten(0, index.shape)

    @property
    def weight_dtype(self) -> torch.dtype:
        return self.x.dtype if self.x.dtype.is_floating_point else torch.float32

    def padded(self) -> Batch:
        """All rows of every client as one batch, of width 0 from an empty pool; a lone client's rows are a view."""
        longest = min(max(int(self.size.max()), 1), len(self.y))
        if len(self) == 1 and int(self.size[0]) > 0:
            x, y = self.of(0)
            return Batch(x[None], y[None], torch.full((1, longest), 1 / longest, dtype=self.weight_dtype))
        offset = torch.arange(longest)
        valid = offset < self.size[:, None]
        last = max(len(self.y) - 1, 0)
        return self.take((self.start[:, None] + torch.where(valid, offset, 0)).clamp(max=last), valid)

    def pooled(self, p: Tensor) -> Batch:
        """All rows as those of a single client, a row of client i weighing p_i / n_i."""
        owner = torch.repeat_interleave(torch.arange(len(self)), self.size)
        place = torch.arange(len(owner)) - torch.repeat_interleave(torch.cumsum(self.size, 0) - self.size, self.size)
        index = self.start[owner] + place
        weight = (p / self.size.clamp(min=1))[owner].to(self.weight_dtype)
        return Batch(self.x[index][None], self.y[index][None], weight[None] / weight.sum())

    def full(self, task: object) -> Condensed:
        """All rows in the form that makes the task's full passes cheap: its summary of each client, or one batch.

        Summaries are computed once per client for the whole federation and looked up afterwards.
        """
        if not isinstance(task, HasSummary):
            if "padded" not in self.cache:
                self.cache["padded"] = self.padded()
            return self.cache["padded"]
        root = self.parent if self.parent is not None else self
        with SUMMARY_LOCK:
            if task not in root.cache:
                root.cache[task] = root.each(lambda rows, _: task.condense(rows.padded()))
        summary = root.cache[task]
        return summary if self.position is None else type(summary)(*(part[self.position] for part in summary))

    def each(self, work: Callable[[Rows, Tensor], StateTree], most: int | None = None) -> StateTree:
        """`work(rows, positions)` on every block of clients, put together in the order of the clients.

        Whatever `work` gives, a tensor [C, ...], a (named) tuple of such, or None, comes back for all clients at once.
        """
        return map_blocks(self.blocks(most), lambda block: work(self.select(block), block))

    def map(self, function: ClientFunction, task: Task | None, *per_client: Tensor, **shared: object) -> StateTree:
        """The results of a client function (`client_functions.py`), stacked over the clients."""
        return function.on_rows(task, self, *per_client, **shared)

    def map_independent(self, work: Callable[[S], T], items: Iterable[S]) -> Iterator[T]:
        """`map`: in memory there is nothing to gain from independence."""
        return map(work, items)

    def split_chain(self, items: list[S], numbers: int) -> list[list[S]]:
        """The items as they are: in memory the nearest start is the quickest."""
        return [items]

    @property
    def kept_batches(self) -> list[tuple[Tensor, Batch]] | None:
        return self.cache.get(KEPT_BATCHES)

    @contextmanager
    def keep_batches(self) -> Iterator[None]:
        """Pad the rows once for all client functions that are called inside."""
        if KEPT_BATCHES in self.cache:
            yield
            return
        self.cache[KEPT_BATCHES] = padded_batches(self)
        try:
            yield
        finally:
            self.cache.pop(KEPT_BATCHES, None)

    def compact(self) -> Rows:
        """The same rows in a pool of their own, client after client."""
        begin = torch.cumsum(self.size, 0) - self.size
        if len(self.y) == int(self.size.sum()) and torch.equal(begin, self.start):
            return Rows(self.x, self.y, self.start, self.size)
        index = torch.repeat_interleave(self.start - begin, self.size) + torch.arange(int(self.size.sum()))
        return Rows(self.x[index], self.y[index], begin, self.size)

    def blocks(self, most: int | None = None, times: float = 1) -> list[Tensor]:
        """Positions of all clients in blocks of similar size, so that padding a block wastes little.

        A block holds at most `most` clients and `times` PADDED_BYTES of padded rows, and each of its clients has
        at least half of the longest client's rows (or 16). Blocks depend on the sizes only: equal data, equal blocks.
        """
        max_rows = int(times * MAX_PADDED_BYTES) // max(self.x[:1].numel() * self.x.element_size(), 1)
        order = torch.argsort(self.size, stable=True)
        sizes = self.size[order].numpy()
        blocks, begin = [], 0
        while begin < len(sizes):
            end = int(np.searchsorted(sizes, max(2 * sizes[begin], 16), side="right"))
            end = min(end, len(sizes) if most is None else begin + most)
            fits = sizes[begin:end] * np.arange(1, end - begin + 1) <= max_rows  # rising: the first ones do
            end = begin + max(int(fits.sum()), 1)
            blocks.append(order[begin:end])
            begin = end
        return blocks


@dataclass(frozen=True, eq=False)
class CohortData:
    """The data of a local update: training and validation rows, never test rows."""

    keys: np.ndarray  # [C] uint64, each client's number in its random draws
    index: Tensor  # [C], places in the federation, for hyper-parameters that differ by client
    p: Tensor  # [C], client weights
    train: Rows
    validation: Rows
    seeds: np.ndarray | None = None  # [C] uint64, where clients of several runs are one cohort; None: the round's

    def __len__(self) -> int:
        return len(self.index)

    def select(self, position: Tensor) -> CohortData:
        return CohortData(
            self.keys[position.numpy()],
            self.index[position],
            self.p[position],
            self.train.select(position),
            self.validation.select(position),
            None if self.seeds is None else self.seeds[position.numpy()],
        )

    def each(self, work: Callable[[CohortData, Tensor], StateTree], most: int | None = None) -> StateTree:
        """`work(data, positions)` on every block of clients, as `Rows.each` of the training rows."""
        return self.train.each(lambda _, block: work(self.select(block), block), most)


def map_blocks(
    blocks: list[Tensor],
    work: Callable[[Tensor], StateTree],
    doing: Callable[..., Iterable[object]] = map,
    used: StateTree = None,
) -> StateTree:
    """`work(positions)` on each of the blocks, which together hold each position once; results in that order.

    Results are written into place, so that a large federation's matrix is not in memory twice. `doing(work, blocks)`
    may run them in parallel. `used` is the result of an earlier call that is no longer needed: its memory is reused
    where it fits, since clearing fresh memory takes longer than filling it.
    """
    if len(blocks) == 1:
        return stack_states([work(blocks[0])], torch.argsort(blocks[0]))
    total, making = sum(len(block) for block in blocks), Lock()
    result: list[StateTree] = []

    def fill(block: Tensor) -> None:
        part = work(block)
        with making:
            if not result:
                result.append(used if has_room(used, part, total) else allocate_like(part, total))
        write_block(result[0], block, part)

    deque(doing(fill, blocks), 0)
    return result[0]


def chunk_size(task: Task) -> int:
    """How many clients are worked on at once: a formula of the model's size alone, so that it cannot change bytes."""
    itemsize = torch.empty(0, dtype=task.dtype).element_size()
    return max(1, CHUNK_CACHE_BYTES // (task.dim * itemsize))


def allocate_like(part: StateTree, total: int) -> StateTree:
    """Tensors [total, ...] to hold what `part` holds a piece of."""
    if part is None:
        return None
    if isinstance(part, Tensor):
        return part.new_empty(total, *part.shape[1:])
    columns = [allocate_like(column, total) for column in part]
    return type(part)(*columns) if hasattr(part, "_fields") else tuple(columns)


def has_room(used: StateTree, part: StateTree, total: int) -> bool:
    """Whether `used` is what `room_for` would make."""
    if used is None or part is None:
        return used is part
    if isinstance(part, Tensor):
        return used.shape == (total, *part.shape[1:]) and used.dtype == part.dtype and used.device == part.device
    return type(used) is type(part) and all(has_room(old, new, total) for old, new in zip(used, part, strict=True))


def write_block(target: StateTree, position: Tensor, part: StateTree) -> None:
    """Write the rows of `part` to their positions in `target`; consecutive positions are written as one slice."""
    if isinstance(target, Tensor):
        first = int(position[0])
        target[slice(first, first + len(position)) if is_ordered(position - first) else position] = part
    elif target is not None:
        for place, column in zip(target, part):
            write_block(place, position, column)


def stack_states(parts: Sequence[StateTree], order: Tensor | None = None) -> StateTree:
    """Tensors [C, ...], (named) tuples of them or None, of several cohorts, as one; its rows then in this order."""
    first = parts[0]
    if first is None:
        return None
    if isinstance(first, Tensor):
        stacked = torch.cat(list(parts)) if len(parts) > 1 else first
        return stacked if order is None or is_ordered(order) else stacked[order]
    columns = [stack_states(column, order) for column in zip(*parts)]
    return type(first)(*columns) if hasattr(first, "_fields") else tuple(columns)


def is_ordered(order: Tensor) -> bool:
    """Whether the order is 0, 1, 2, ...: then a large matrix need not be copied."""
    return bool((order == torch.arange(len(order))).all())


def select(tree: StateTree, which: Tensor) -> StateTree:
    """The rows `which` of every tensor of a state or message."""
    if tree is None:
        return None
    if isinstance(tree, Tensor):
        return tree[which]
    return type(tree)(*(select(part, which) for part in tree))


class Round(NamedTuple):
    """Where the run is: round t (from 1) of `rounds`, and who takes part."""

    t: int
    rounds: int
    clients: int  # m, the whole federation
    cohort: int  # how many take part (in `merge`: whose replies were accepted)
    weight: float  # the sum of their p_i
    seed: int


def padded_batches(rows: Rows) -> list[tuple[Tensor, Batch]]:
    """All rows in padded blocks of clients, each small enough for the processor's cache; one block where all rows are
    few: there overhead counts, not padding."""
    if len(rows) * int(rows.size.max()) * rows.x[:1].numel() <= MAX_NUMBERS_IN_ONE_BATCH:
        return [(torch.arange(len(rows)), rows.padded())]
    return [(block, rows.select(block).padded()) for block in rows.blocks(times=CACHED_BLOCK_SHARE)]


def broadcast_per_client(values: float | Tensor | np.ndarray, like: Tensor) -> Tensor:
    """A number, [C] or [C, d] as something that multiplies a [C, d] matrix."""
    tensor = torch.as_tensor(values, dtype=like.dtype)
    return tensor[:, None] if tensor.ndim == 1 else tensor


def weighted_mean(message: StateTree, p: Tensor) -> StateTree:
    """The mean of stacked messages with weights p_i / sum p, added up one client after another in cohort order.

    The sum runs over clients in a fixed order and one at a time, so arrival order and chunking cannot change a bit.
    """
    if message is None:
        return None
    weight = (p.double() / p.double().sum()).tolist()

    def mean(part: Tensor | None) -> Tensor | None:
        if part is None:
            return None
        total = weight[0] * part[0]
        for w, row in zip(weight[1:], part[1:].to(total.dtype)):
            total.add_(row, alpha=w)
        return total

    if isinstance(message, Tensor):
        return mean(message)
    return type(message)(*(mean(part) for part in message))
