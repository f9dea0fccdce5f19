"""The exchange in one process: all clients are here, and a cohort is worked on in chunks that fit the cache."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mooring.core.cohort import Round
from mooring.core.costs import Meter, Metered, Solves
from mooring.core.errors import RequestError
from mooring.data.clients import PARTS, Clients
from mooring.estimates.facts import Facts, gather

CACHE_BYTES = 20_000_000  # parameters of one chunk: above this the cohort's matrix no longer fits the cache


class Replies(NamedTuple):
    """What came back from a cohort: stacked messages in cohort order, and who is missing and why."""

    message: Any  # NamedTuple of [C, ...], a tensor [C, ...], or None
    present: Tensor  # [C] bool
    missing: dict[int, str]  # place in the federation -> reason
    samples: int
    gradients: int
    solves: Solves = Solves()


class Simulator:
    """All clients in this process. States of clients change only when a round accepts their replies."""

    def __init__(self, algorithm: Any, task: Any, clients: Clients, p: Tensor, w0: Tensor, chunk: int = 0):
        self.algorithm, self.task, self.clients = algorithm, task, clients
        self.data = clients.cohort(p)
        self.chunk = chunk or chunk_size(task)
        self.states = States(algorithm.start(task, w0)[1], len(clients))
        self._pending: Any = None

    @property
    def sizes(self) -> dict[str, Tensor]:
        """Rows of each client, per part."""
        return {part: getattr(self.clients, part).size for part in PARTS}

    def facts(self, w0: Tensor) -> Facts:
        """What all clients tell before the first round."""
        return gather(self.task, self.data, w0, self.algorithm.asks)

    def ask(self, server: Any, cohort: Tensor, round: Round) -> Replies:
        """Visit the clients at `cohort` (places in the federation); their new states wait for `accept`."""
        meter = Meter()
        task = Metered(self.task, meter)
        data = self.data.select(cohort)
        visible = server._replace(**dict.fromkeys(self.algorithm.kept)) if self.algorithm.kept else server
        blocks = [torch.arange(len(cohort))] if self.algorithm.pooled else data.train.blocks(self.chunk)
        parts = []
        for block in blocks:
            client = self.states.take(cohort[block])
            parts.append(self.algorithm.visit(visible, client, task, data.select(block), round))
        order = torch.argsort(torch.cat(blocks))
        self._pending = (cohort, stacked([state for state, _ in parts], order))
        message = stacked([message for _, message in parts], order)
        present = torch.ones(len(cohort), dtype=torch.bool)
        return Replies(message, present, {}, meter.samples, meter.gradients, meter.solves)

    def accept(self, accepted: Tensor, round: Round) -> None:
        """The replies of these members of the last cohort ([C] bool) were merged: their new states count."""
        cohort, states = self._pending
        self.states.put(cohort[accepted], select(states, accepted), round.t)
        self._pending = None

    def models(self, server: Any, position: Tensor, round: Round) -> Tensor:
        """[C, d]: what the clients at `position` would deploy now; who was never asked deploys the common model."""
        data = self.data.select(position)
        client = self.algorithm.finish(server, self.states.take(position), self.task, data, round)
        deployed = self.algorithm.deploy(server, client).expand(len(position), -1)
        never = self.states.merged[position] == 0
        return torch.where(never[:, None], server.w, deployed)

    def evaluate(self, server: Any, round: Round, parts: tuple[str, ...]) -> dict[str, Tensor]:
        """Each client's risk [m] of the model it would deploy, per part; states and draws stay untouched."""
        order = torch.argsort(torch.cat(self.blocks()))
        columns: dict[str, list[Tensor]] = {part: [] for part in parts}
        for block in self.blocks():
            w = self.models(server, block, round)
            for part in parts:
                rows = getattr(self.clients, part).select(block)
                columns[part].append(mean_risk(self.task, w, rows))
        return {part: torch.cat(values)[order] for part, values in columns.items()}

    def all_models(self, server: Any, round: Round) -> Tensor:
        """[m, d]: what every client deploys."""
        found = torch.cat([self.models(server, block, round) for block in self.blocks()])
        return found[torch.argsort(torch.cat(self.blocks()))]

    def blocks(self) -> list[Tensor]:
        return self.data.train.blocks(self.chunk)


def settle(algorithm: Any, task: Any, clients: Clients, *, weights: str = "size", seed: int = 0, chunk: int = 0):
    """The algorithm in numbers, its clients ready to be asked, and the server's first state."""
    for need in algorithm.needs:
        if not getattr(task, need):
            raise RequestError(f"{algorithm.name} needs a task with {need!r}, and task '{task.name}' has none.")
    w0 = task.start(seed)
    exchange = Simulator(algorithm, task, clients, clients.weights(weights), w0, chunk)
    ready = algorithm.settle(task, exchange.facts(w0))
    server, first = ready.start(task, w0)
    exchange.algorithm, exchange.states.first = ready, first
    return ready, exchange, server


def mean_risk(task: Any, w: Tensor, rows: Any) -> Tensor:
    """[C] in float64: the mean reported loss of each client's model on its rows; nan for a client without rows."""
    out = torch.full((len(rows),), torch.nan, dtype=torch.float64)
    for block in rows.blocks():
        part = rows.select(block)
        if int(part.size.max()) > 0:
            out[block] = task.risk(w[block], part.padded()).double()
    return out


def chunk_size(task: Any) -> int:
    """How many clients are worked on at once: a formula of the model's size alone, so that it cannot change bytes."""
    itemsize = torch.empty(0, dtype=task.dtype).element_size()
    return max(1, CACHE_BYTES // (task.dim * itemsize))


class States:
    """Every client's state, stacked; those that were never merged still have the first state."""

    def __init__(self, first: Any, clients: int):
        self.first = first
        self.merged = torch.zeros(clients, dtype=torch.long)  # the round of each client's last merged reply
        self.fields: Any = None  # allocated when the first reply is merged

    def take(self, position: Tensor) -> Any:
        if self.fields is None:
            return type(self.first)(*(part.expand(len(position), *part.shape).clone() for part in self.first))
        return type(self.first)(*(part[position] for part in self.fields))

    def put(self, position: Tensor, states: Any, t: int) -> None:
        if self.fields is None:
            m = len(self.merged)
            self.fields = type(self.first)(*(part.expand(m, *part.shape).clone() for part in self.first))
        for whole, part in zip(self.fields, states):
            whole[position] = part
        self.merged[position] = t

    def copy(self) -> States:
        twin = States(self.first, len(self.merged))
        twin.merged = self.merged.clone()
        twin.fields = None if self.fields is None else type(self.fields)(*(part.clone() for part in self.fields))
        return twin


def stacked(parts: list[Any], order: Tensor) -> Any:
    """Chunks of NamedTuples, tensors or None as one, in cohort order."""
    first = parts[0]
    if first is None:
        return None
    if isinstance(first, Tensor):
        return torch.cat(parts)[order]
    return type(first)(*(stacked(list(column), order) for column in zip(*parts)))


def select(tree: Any, which: Tensor) -> Any:
    """The rows `which` of every tensor."""
    if tree is None:
        return None
    if isinstance(tree, Tensor):
        return tree[which]
    return type(tree)(*(select(part, which) for part in tree))
