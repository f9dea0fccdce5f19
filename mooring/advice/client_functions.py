"""Questions to clients: all that advice learns from rows, it learns by asking.

A question is a function of the task, of a cohort's padded rows, and of what is told to the clients: positional
arguments have a row for each client, named ones are the same for all. Its answer is a tensor [C, ...] or a NamedTuple
of such: sums, fits, losses, never a row. Clients whose rows are here (`Rows`) answer all at once, others (`Elsewhere`)
each by itself, from the very same function; whoever asks cannot tell them apart but for rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from mooring.core.cohort import Batch, Rows, is_ordered, padded_batches, stack_states
from mooring.tasks.linear import Linear
from mooring.tasks.proximal import is_dense, proximal_newton

CLIENT_FUNCTIONS: dict[str, Callable[..., Any]] = {}
RELATIVE_GRADIENT_TOLERANCE = (
    1e-5  # a gradient, relative to the first one, from which Newton's next step is the last: it squares it
)
BATCHES_KEY = "batches"  # where rows keep their padded batches while they are asked again and again
S = TypeVar("S")
T = TypeVar("T")


class Elsewhere(Protocol):
    """Clients whose rows are elsewhere."""

    cache: dict[Any, Any]

    @property
    def size(self) -> Tensor: ...

    def __len__(self) -> int: ...

    def ask(self, name: str, own: tuple[Tensor, ...], shared: dict[str, Any]) -> Any:
        """Everyone's answer to one of QUESTIONS, stacked."""
        ...

    def side_by_side(self, work: Callable[[S], Iterable[T]], items: Iterable[S]) -> Iterator[Iterable[T]]:
        """`map`, whose questions may travel together."""
        ...


def client_function(answer: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function (task, batch, *own, **shared) be asked of clients, wherever they are: (task, rows, ...)."""
    CLIENT_FUNCTIONS[answer.__name__] = answer

    @wraps(answer)
    def asked(task: Any, rows: Any, *own: Tensor, **shared: Any) -> Any:
        if not isinstance(rows, Rows):
            return rows.ask(answer.__name__, own, shared)
        blocks, parts = [], []
        for block, batch in rows.cache.get(BATCHES_KEY) or each_batch(rows):
            blocks.append(block)
            mine = own if len(block) == len(rows) and is_ordered(block) else [one[block] for one in own]
            parts.append(answer(task, batch, *mine, **shared))
        return stack_states(parts, torch.argsort(torch.cat(blocks)))

    return asked


def each_batch(rows: Rows) -> Iterable[tuple[Tensor, Batch]]:
    """All rows in padded blocks of clients, one after another where they are many."""
    if len(rows.blocks()) == 1:
        return padded_batches(rows)
    return ((block, rows.select(block).padded()) for block in rows.blocks())


@contextmanager
def with_cached_batches(rows: Any) -> Iterator[None]:
    """Rows that are here are padded once for all questions inside."""
    if not isinstance(rows, Rows) or BATCHES_KEY in rows.cache:
        yield
        return
    rows.cache[BATCHES_KEY] = padded_batches(rows)
    try:
        yield
    finally:
        rows.cache.pop(BATCHES_KEY, None)


def independent_map(rows: Any) -> Callable[..., Any]:
    """`map` over work that asks these clients and does not depend on one another's outcome."""
    return map if isinstance(rows, Rows) else rows.side_by_side


class LossDerivatives(NamedTuple):
    """The clients' losses around their models."""

    loss: Tensor  # [C]
    slope: Tensor  # [C, d]
    hessian: Tensor  # [C, d, d]


@client_function
def differentiate_losses(task: Any, batch: Batch, v: Tensor) -> LossDerivatives:
    """L_i with its gradient and Hessian at v_i."""
    return LossDerivatives(task.loss(v, batch), task.grad(v, batch), task.hessian(v, batch))


@client_function
def fit_ridge(task: Any, batch: Batch, start: Tensor, *, pull: Tensor) -> Tensor:
    """arg min L_i(v) + 1/2 sum_j pull_j v_j^2, from `start`; `pull` [d], or one for all."""
    if isinstance(task, Linear) or not is_dense(task):
        return task.prox(torch.zeros_like(start[:1]), pull[None] if pull.ndim else pull, batch, start)
    return proximal_newton(
        task, pull.expand_as(start), torch.zeros_like(start), batch, start, tol=RELATIVE_GRADIENT_TOLERANCE
    )
