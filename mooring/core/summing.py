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
steps count against a budget, `nonlinear_budget`: few numbers cannot determine what each client's rows look like.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

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
    """Return [k]: the cohort's part as whole numbers modulo 2^64, added over its clients."""
    values = np.atleast_2d(np.asarray(part.values, dtype=np.float64))
    scaled = np.rint(values / part.step.quantum)
    if not np.isfinite(scaled).all() or (np.abs(scaled) > LARGEST).any():
        raise RequestError(f"step '{part.step.name}' has a number that is not finite or too large to be added.")
    return scaled.astype(np.int64).view(np.uint64).sum(0, dtype=np.uint64)


def to_values(total: np.ndarray, step: Step) -> np.ndarray:
    """Return [k]: a total of whole numbers modulo 2^64 as values."""
    return total.astype(np.uint64).view(np.int64).astype(np.float64) * step.quantum


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
        values, ended = to_values(total, step), 0
        for i, program in enumerate(programs):
            try:
                parts[i] = program.send(values.copy())
            except StopIteration as end:
                results[i], parts[i], ended = end.value, None, ended + 1
        if ended == len(programs):
            return results  # type: ignore[return-value]


def nonlinear_budget(clients: int, coefficients: int) -> int:
    """Return how many numbers that are not linear in rows a run may add up: a quarter of what describes the moments of
    all clients but one, each with a symmetric matrix and a vector of its coefficients."""
    return max(clients - 1, 0) * (coefficients + 1) * (coefficients + 2) // 8


def count_nonlinear(steps: Iterable[tuple[Step, int]]) -> int:
    """Return how many numbers of these steps count against the budget."""
    return sum(numbers for step, numbers in steps if not step.linear)
