"""Programs by which clients learn from sums over all of them, and from nothing else.

A program is a generator that every client runs on its own rows. It yields a `Sum`, the client's part of one step, and
receives the total over all clients; then it goes on to the next step. All clients run the same program, so that whoever
adds up needs no other skill: the totals are all that is ever sent to clients, and the parts all that is sent by them.
What a program returns, such as a client's personal model, never leaves the client.

    total = yield Sum(MOMENTS, values)         # values [C, k] of a cohort of C clients, total [k]

In one process the programs of all clients advance together (`run_together`); across machines each of them runs where
its rows are, and the parts are masked (`remote/transcript.py`). Both add the same whole numbers, so that they agree to
the last bit: a value is sent as a multiple of its step's quantum, modulo 2^64.

A step whose values are a sum over rows of functions of single rows (moments, histograms, gradients at a model that all
clients know) is linear in rows: it shows of a client only what it shows of a set of rows. The numbers of all other
steps count against a budget (`advice/federated/plan.py`): few numbers cannot determine what a client's rows look like.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from mooring.core.errors import RequestError

BITS = 64
LARGEST = 2.0**61  # in quanta, of one client's value: sums of some clients stay below 2^63


class Step(NamedTuple):
    """One kind of sum: what it is called, what it is for, and how its values are rounded."""

    name: str
    purpose: str
    quantum: float  # values are rounded to multiples of it
    linear: bool = True  # in rows; otherwise its numbers count against the budget
    times: int = 1  # at most, in one run


class Sum(NamedTuple):
    """A cohort's part of a step."""

    step: Step
    values: np.ndarray  # [C, k], float64


T = TypeVar("T")
Program = Generator[Sum, np.ndarray, T]


def to_integers(part: Sum) -> np.ndarray:
    """Return [k + 1]: the cohort's part as whole numbers modulo 2^64, added over its clients, whose number is last."""
    values = np.atleast_2d(np.asarray(part.values, dtype=np.float64))
    scaled = values / part.step.quantum
    np.rint(scaled, out=scaled)
    if scaled.size and not max(scaled.max(), -scaled.min()) <= LARGEST:
        raise RequestError(f"step '{part.step.name}' has a number that is not finite or too large to be added.")
    total = np.full(values.shape[1] + 1, len(values), np.uint64)
    np.sum(scaled.astype(np.int64).view(np.uint64), axis=0, dtype=np.uint64, out=total[:-1])
    return total


def to_values(total: np.ndarray, step: Step, clients: int) -> np.ndarray:
    """Return [k]: a total of whole numbers modulo 2^64 as values; one that is not of so many clients is refused."""
    if int(total[-1]) != clients:
        raise RequestError(
            f"the total of step '{step.name}' is not one of {clients} clients: one of them has sent other numbers than "
            "its part, or the server has changed the total. Masks hide which; start a new run without that client."
        )
    return total[:-1].astype(np.uint64).view(np.int64).astype(np.float64) * step.quantum


def add(step: Step, values: Tensor) -> Generator[Sum, np.ndarray, Tensor]:
    """Yield a cohort's part [C, k] and return the total [k] over all clients."""
    total = yield Sum(step, values.numpy())
    return torch.from_numpy(total)


def side_by_side(programs: Sequence[Program[T]], order: Sequence[Step]) -> Program[list[T]]:
    """Run several programs of the same cohort as one, whose steps are in `order`: parts of the same step are joined to
    one, and a program that has come further waits for the others."""
    results: list[T | None] = [None] * len(programs)
    parts: dict[int, Sum] = {}

    def go_on(k: int, total: np.ndarray | None) -> None:
        try:
            parts[k] = programs[k].send(total)  # type: ignore[arg-type]
        except StopIteration as end:
            results[k] = end.value
            parts.pop(k, None)

    for k in range(len(programs)):
        go_on(k, None)
    while parts:
        step = min((part.step for part in parts.values()), key=order.index)
        joined = {k: np.atleast_2d(part.values) for k, part in parts.items() if part.step == step}
        total = yield Sum(step, np.concatenate(list(joined.values()), 1))
        ends = np.cumsum([part.shape[1] for part in joined.values()])[:-1]
        for k, values in zip(joined, np.split(total, ends)):
            go_on(k, values)
    return results  # type: ignore[return-value]


def run_together(programs: Sequence[Program[T]], record: list[tuple[str, int]] | None = None) -> list[T]:
    """Run the programs of all clients in one process; `record` gets the name and the size of every step."""
    results: list[T | None] = [None] * len(programs)
    parts: list[Sum | None] = []
    for program in programs:
        parts.append(next(program))
    while True:
        waiting = [part for part in parts if part is not None]
        if len(waiting) != len(programs):
            raise RuntimeError("the programs of some clients ended before those of others")
        step = waiting[0].step
        sizes = {(part.step.name, np.atleast_2d(part.values).shape[1]) for part in waiting}
        if len(sizes) != 1:
            raise RuntimeError(f"the clients are at different steps: {sorted(sizes)}")
        if record is not None:
            record.append(next(iter(sizes)))
        total = np.add.reduce([to_integers(part) for part in waiting])
        values, ended = to_values(total, step, int(total[-1])), 0
        for i, program in enumerate(programs):
            try:
                parts[i] = program.send(values.copy())
            except StopIteration as end:
                results[i], parts[i], ended = end.value, None, ended + 1
        if ended == len(programs):
            return results  # type: ignore[return-value]


def run_alone(program: Program[T]) -> T:
    """Run a program whose cohort is all clients there are, without rounding."""
    try:
        part = next(program)
        while True:
            part = program.send(np.atleast_2d(np.asarray(part.values, dtype=np.float64)).sum(0))
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
