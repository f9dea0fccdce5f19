"""Functions of clients' rows: the one way to compute on rows that may be in memory or with their clients.

A client function takes a task, rows and arguments: positional arguments have one row per client, keyword arguments are
the same for all clients. It returns a tensor [C, ...] or a NamedTuple of such tensors: sums, fits or losses, never
rows. Its return annotation is what may leave a client. Where it is called does not depend on where the rows are:

    derivatives = differentiate_losses(task, rows, v)      # rows: `Rows` in memory, or rows of remote clients
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, get_args, get_type_hints

import torch
from torch import Tensor

from mooring.core.cohort import (
    CACHED_BLOCK_SHARE,
    Batch,
    Condensed,
    Rows,
    StateTree,
    is_ordered,
    padded_batches,
    stack_states,
)

if TYPE_CHECKING:
    from mooring.core.task import Task

CLIENT_FUNCTIONS: dict[str, ClientFunction] = {}
S = TypeVar("S")
T = TypeVar("T")


class ClientRows(Protocol):
    """The rows of some clients, wherever they are."""

    @property
    def cache(self) -> dict[object, Any]: ...

    @property
    def size(self) -> Tensor: ...

    def __len__(self) -> int: ...

    def select(self, position: Tensor) -> ClientRows:
        """The rows of some of the clients, in that order."""
        ...

    def compact(self) -> ClientRows:
        """The same rows in a pool of their own, client after client."""
        ...

    def map(
        self, function: ClientFunction, task: Task | None, *per_client: Tensor, **shared: Tensor | None
    ) -> StateTree:
        """The results of a client function, stacked over the clients."""
        ...

    def map_independent(self, work: Callable[[S], Iterable[T]], items: Iterable[S]) -> Iterator[Iterable[T]]:
        """`map`, for work whose items do not need one another's results: their calls may travel together."""
        ...

    def split_chain(self, items: list[S], numbers: int) -> list[list[S]]:
        """Items of which each starts from the result of the one before, in parts that do not; `numbers` of each are
        exchanged at a time."""
        ...

    def keep_batches(self) -> AbstractContextManager[None]:
        """Pad the rows once for all client functions that are called inside."""
        ...

    def full(self, task: Task) -> Condensed:
        """All rows in the form that makes the task's full passes cheap."""
        ...


class ClientFunction:
    """A function of a task, rows in memory and arguments, which can be called for the rows of any clients."""

    def __init__(self, function: Callable[..., StateTree], on_rows: Callable[..., StateTree]):
        self.function, self.on_rows, self.__doc__ = function, on_rows, function.__doc__
        self.name = self.__name__ = function.__name__

    def __call__(self, task: Task | None, rows: ClientRows, *per_client: Tensor, **shared: Tensor | None) -> StateTree:
        return rows.map(self, task, *per_client, **shared)

    @cached_property
    def result_types(self) -> tuple[type, ...]:
        """What the function may return: one type, or several where it depends on the task."""
        annotation = get_type_hints(self.function)["return"]
        return get_args(annotation) or (annotation,)


def client_function(function: Callable[..., StateTree]) -> ClientFunction:
    """Make a client function of a function (task, padded rows, *per_client, **shared)."""

    def on_rows(task: Task | None, rows: Rows, *per_client: Tensor, **shared: Tensor | None) -> StateTree:
        blocks, parts = [], []
        for block, batch in rows.kept_batches or _iterate_batches(rows):
            blocks.append(block)
            is_complete = len(block) == len(rows) and is_ordered(block)
            arguments = per_client if is_complete else [part[block] for part in per_client]
            parts.append(function(task, batch, *arguments, **shared))
        return stack_states(parts, None if is_complete else torch.argsort(torch.cat(blocks)))

    return _register(function, on_rows)


def rows_function(function: Callable[..., StateTree]) -> ClientFunction:
    """Make a client function of a function (task, rows, *per_client, **shared) that pads the rows itself."""
    return _register(function, function)


def _register(function: Callable[..., StateTree], on_rows: Callable[..., StateTree]) -> ClientFunction:
    if function.__name__ in CLIENT_FUNCTIONS:
        raise ValueError(f"there is a client function {function.__name__!r} already.")
    CLIENT_FUNCTIONS[function.__name__] = ClientFunction(function, on_rows)
    return CLIENT_FUNCTIONS[function.__name__]


def _iterate_batches(rows: Rows) -> Iterable[tuple[Tensor, Batch]]:
    """All rows in padded blocks of clients, one block at a time where there are several."""
    blocks = rows.blocks(times=CACHED_BLOCK_SHARE)
    if len(blocks) == 1:
        return padded_batches(rows)
    return ((block, rows.select(block).padded()) for block in blocks)
