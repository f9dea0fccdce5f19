"""The contract between the round loop and the clients, wherever these are.

An exchange only carries: who is there, what clients tell before the first round, a question to a cohort and its
replies, whose replies were merged, which round is the best so far, how deployed models do, and the models. The loop,
`fit` and the algorithms reach for nothing else, so that a federation in one process and one across machines run the
same lines. A run goes

    client_statistics -> resolve -> init -> begin -> (ask -> accept -> evaluate -> mark_best)* -> models

A client's state lives with the client. It has a generation for each round whose reply was merged, 0 being the first
state. An ask names the generation to start from (the client's last merged round), so a reply that was lost, came late
or was refused never happened, and an interrupted round may be asked again. `LAST` is that generation; `BEST` is the one
that was the last at the marked round. A snapshot pins the generations it speaks of: whoever restores one of the two
latest finds them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from mooring.algorithms.base import AnyAlgorithm
from mooring.core.cohort import Round, StateTree
from mooring.core.costs import CostMeter
from mooring.estimates.client_statistics import ClientStatistics
from mooring.runs.tensor_files import StoredTensor

LAST, BEST = "last", "best"


@dataclass(frozen=True, eq=False)
class ClientRoster:
    """Who is there. A client's place in these is its number everywhere in the engine."""

    names: tuple[str, ...]
    keys: np.ndarray  # [m] uint64, each client's number in its random draws
    p: Tensor  # [m] float64, client weights
    sizes: dict[str, Tensor]  # rows of each client [m], by part: "train", "validation", "test"

    def __len__(self) -> int:
        return len(self.names)


class Replies(NamedTuple):
    """What a cohort answered in time: messages of those who did, in the order of their places, and why others did not.

    At most one reply of each client, to this very ask: late, repeated and stale ones never come up to here.
    """

    who: Tensor  # [R], places in the roster, ascending
    message: StateTree  # NamedTuple of [R, ...], a tensor [R, ...], None where nothing is sent; or a list, as it came
    missing: dict[int, str]  # place in the roster -> why there is no reply
    meter: CostMeter  # the work behind the replies, added up
    elsewhere: float = 0.0  # seconds of the clock that went by for other runs meanwhile
    refused: dict[int, str] = {}  # place in the roster -> why its reply is not used


class Scores(NamedTuple):
    """How deployed models do at home: the mean loss over each client's rows [m], and over how many rows [m].

    A client that has no rows, or did not answer, has nan and 0. Measures of all rows together, such as accuracy, are
    there where the rows are in one place. Where only a sum over all clients is known, `mean` is their mean loss and
    nobody has rows.
    """

    risk: Tensor
    rows: Tensor
    measures: Mapping[str, float] = {}
    mean: float | None = None


class Exchange(Protocol):
    """A way to exchange messages with clients."""

    @property
    def roster(self) -> ClientRoster: ...

    @property
    def pattern(self) -> Any:
        """One client's message [1, ...] as it must look, where messages are handed up as a list of what came
        (`guard.pattern_of` makes it after `begin`); None where they are made here, and so of one shape."""
        ...

    def client_statistics(self, w0: Tensor, asks: tuple[str, ...]) -> ClientStatistics:
        """What all clients tell before the first round, stacked in roster order; optional facts as `asks` names."""
        ...

    def begin(self, algorithm: AnyAlgorithm, w0: Tensor) -> None:
        """The resolved algorithm and the first model: every client makes its first state of them.

        Refuses an algorithm that it cannot run, such as a pooled one where rows are not in one place.
        """
        ...

    def ask(self, server: StateTree, cohort: Tensor, round: Round, deadline: float | None = None) -> Replies:
        """Let the clients at these places (ascending) visit; wait at most `deadline` seconds.

        The messages are good until the next ask, which may use their memory again. Their new states count only once
        `accept` names them. What `Algorithm.server_only` names of the server's state is not sent.
        """
        ...

    def accept(self, who: Tensor, round: Round) -> None:
        """The replies of these clients to the last ask were merged: their new states count from now on."""
        ...

    def mark_best(self, round: Round) -> None:
        """The states of now are those of the best round so far: keep them, whatever comes."""
        ...

    def evaluate(self, server: StateTree, round: Round, parts: tuple[str, ...], at: str = LAST) -> dict[str, Scores]:
        """Scores of the models that clients would deploy, by part of their rows; states and draws stay untouched."""
        ...

    def models(self, server: StateTree, round: Round, at: str = LAST) -> Tensor | None:
        """[m, d]: the model that every client deploys; None where each client keeps its own."""
        ...

    def numbers(self, field: str, at: str = LAST) -> Tensor | None:
        """[m]: a number that is part of each client's state, such as alpha, nan for those that were never merged; None
        where the state has no such part, or clients keep it to themselves."""
        ...

    def snapshot(self) -> Mapping[str, StoredTensor]:
        """What a checkpoint must hold of the clients, by name; `restore` takes it back, after `begin`."""
        ...

    def restore(self, snapshot: dict[str, Tensor]) -> None: ...

    def beside(self, algorithm: AnyAlgorithm) -> Exchange | None:
        """An exchange of its own with the same clients, for a referee; None where it cannot be run here."""
        ...


def visible_state(algorithm: AnyAlgorithm, server: StateTree) -> StateTree:
    """The server's state as clients see it: the parts that visits do without are not sent."""
    return server._replace(**dict.fromkeys(algorithm.server_only)) if algorithm.server_only else server
