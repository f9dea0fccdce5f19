"""The interface between the round loop and the clients, local or remote.

An exchange provides the roster, the clients' statistics before the first round, requests to a cohort and its replies,
the acceptance of replies, the mark of the best round, evaluations, and the models. The loop, `fit` and the algorithms
use nothing else, so that a simulation and a deployment run the same code. The order of calls is

    client_statistics -> resolve -> init -> begin -> (ask -> accept -> evaluate -> mark_best)* -> models

A client's state lives with the client. It has a generation for each round whose reply was merged, 0 being the first
state. A request names the generation to start from (the client's last merged round), so a lost, late or refused reply
has no effect, and an interrupted round may be requested again. `LAST` is that generation; `BEST` is the one that was
the last at the marked round. A snapshot pins its generations: each of the two latest snapshots can be restored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from mooring.algorithms.base import AnyAlgorithm
from mooring.core.cohort import Round, StateTree
from mooring.core.costs import CostMeter
from mooring.core.errors import RequestError
from mooring.estimates.client_statistics import ClientStatistics
from mooring.runs.tensor_files import StoredTensor

LAST, BEST = "last", "best"


@dataclass(frozen=True, eq=False)
class ClientRoster:
    """The clients of a run. A client's position in these is its number everywhere in the engine."""

    names: tuple[str, ...]
    keys: np.ndarray  # [m] uint64, each client's number in its random draws
    p: Tensor  # [m] float64, client weights
    sizes: dict[str, Tensor]  # rows of each client [m], by part: "train", "validation", "test"

    def __len__(self) -> int:
        return len(self.names)


class Replies(NamedTuple):
    """Replies of a cohort that arrived in time, in the order of positions, and reasons for missing ones.

    At most one reply per client, to this request; late, repeated and stale ones are dropped before.
    """

    clients: Tensor  # [R], places in the roster, ascending
    message: StateTree  # NamedTuple of [R, ...], a tensor [R, ...], None if nothing is sent; or a list, as received
    missing: dict[int, str]  # place in the roster -> why there is no reply
    meter: CostMeter  # the work behind the replies, added up
    elsewhere: float = 0.0  # seconds that passed meanwhile for other runs
    refused: dict[int, str] = {}  # place in the roster -> why its reply is not used


class Scores(NamedTuple):
    """Scores of the clients' models: the mean loss over each client's rows [m], and their number [m].

    A client that has no rows, or did not answer, has nan and 0. Measures of all rows together, such as accuracy, are
    there where the rows are in one place. Where only a sum over all clients is known, `mean` is their mean loss and
    no client has rows.
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
    def pattern(self) -> StateTree:
        """The required form of one client's message [1, ...], if messages are passed on as received
        (`guard.pattern_of` makes it after `begin`); None if they are made in this process, with one shape."""
        ...

    def client_statistics(self, w0: Tensor, required: tuple[str, ...]) -> ClientStatistics:
        """Return the statistics of all clients before the first round, in roster order; `required` names optional
        ones."""
        ...

    def begin(self, algorithm: AnyAlgorithm, w0: Tensor) -> None:
        """Send the resolved algorithm and the first model, from which every client makes its initial state.

        Refuses an algorithm that it cannot run, such as a pooled one where rows are not in one place.
        """
        ...

    def ask(self, server: StateTree, cohort: Tensor, round: Round, deadline: float | None = None) -> Replies:
        """Run local updates of the clients at these positions (ascending); wait at most `deadline` seconds.

        The messages are valid until the next request, which may reuse their memory. Their new states count only once
        `accept` names them. What `Algorithm.server_only` names of the server's state is not sent.
        """
        ...

    def accept(self, clients: Tensor, round: Round) -> None:
        """Accept the new states of these clients, whose replies to the last request were merged."""
        ...

    def mark_best(self, round: Round) -> None:
        """Keep the present states as those of the best round so far."""
        ...

    def evaluate(self, server: StateTree, round: Round, parts: tuple[str, ...], at: str = LAST) -> dict[str, Scores]:
        """Return scores of the models that clients would use, by part of their rows; states do not change."""
        ...

    def models(self, server: StateTree, round: Round, at: str = LAST) -> Tensor | None:
        """[m, d]: every client's model; None if clients keep their own."""
        ...

    def numbers(self, field: str, at: str = LAST) -> Tensor | None:
        """[m]: a number that is part of each client's state, such as alpha, nan for those that were never merged; None
        if the state has no such part, or clients do not send it."""
        ...

    def snapshot(self) -> Mapping[str, StoredTensor]:
        """Return the clients' tensors for a checkpoint, by name; `restore` takes them back, after `begin`."""
        ...

    def restore(self, snapshot: dict[str, Tensor]) -> None: ...

    def beside(self, algorithm: AnyAlgorithm) -> Exchange | None:
        """Return a separate exchange with the same clients, for a baseline; None if it is not possible."""
        ...


def check_model_sharing(algorithm: AnyAlgorithm, share_models: bool) -> None:
    """Refuse to send models that contain their clients' rows."""
    if algorithm.keeps_models and share_models:
        raise RequestError(
            f"{algorithm.name}: a client's model contains representations and targets of its rows, which "
            "share_models = true would send; leave it out."
        )


def visible_state(algorithm: AnyAlgorithm, server: StateTree) -> StateTree:
    """Return the server's state as sent to clients, without the parts that local updates do not need."""
    return server._replace(**dict.fromkeys(algorithm.server_only)) if algorithm.server_only else server
