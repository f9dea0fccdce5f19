"""The exchange in one process: all clients are here, and a cohort is worked on in chunks that fit the cache."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mooring.core.cohort import Round, chunk_size, in_order, select
from mooring.core.costs import Meter
from mooring.core.task import Task
from mooring.core.threads import side_by_side
from mooring.data.clients import PARTS, Clients
from mooring.engines import loop, scores, visits
from mooring.engines.exchange import BEST, LAST, Replies, Roster, Scores, sent
from mooring.engines.states import States
from mooring.estimates.facts import Facts, gather
from mooring.runs.tensors import Stored

KEPT = 1_000_000_000  # bytes of replies up to which their memory waits for the next round's
UNPADDED = 4  # times as large blocks where compiled steps read rows where they lie: padding is then for other work
Known = dict[tuple[str, ...], tuple[Tensor, Facts]]  # by what was asked: the model that facts are about, and the facts


class Simulator:
    """All clients in this process. States of clients change only when a round accepts their replies."""

    pattern = None  # messages are made here

    def __init__(self, task: Task, clients: Clients, p: Tensor, chunk: int = 0, known: Known | None = None):
        """`known` are the clients' facts as far as another run at them has asked."""
        self.task, self.clients, self.p = task, clients, p
        self.known: Known = {} if known is None else known
        self.data = clients.cohort(p)
        self.chunk = chunk or chunk_size(task)
        self.algorithm: Any = None  # until `begin`
        self.states: States
        self.best: States | None = None
        self._pending: Any = None
        self._used: Any = None  # the last round's states and messages, whose memory is used again

    @cached_property
    def roster(self) -> Roster:
        sizes = {part: getattr(self.clients, part).size for part in PARTS}
        return Roster(self.clients.names, self.data.keys, self.p, sizes)

    def facts(self, w0: Tensor, asks: tuple[str, ...] = ("fit", "alone")) -> Facts:
        if asks not in self.known or not torch.equal(self.known[asks][0], w0):
            self.known[asks] = w0, gather(self.task, self.data, w0, asks)
        return self.known[asks][1]

    def begin(self, algorithm: Any, w0: Tensor) -> None:
        self.algorithm = algorithm
        self.states, self.best = States(algorithm.start(self.task, w0)[1], len(self.clients)), None

    def ask(self, server: Any, cohort: Tensor, round: Round, deadline: float | None = None) -> Replies:
        """Everyone answers at once, so that there is nothing to wait for."""
        meters: dict[int, Meter] = {}
        meter, data, visible = Meter(), self.data.select(cohort), sent(self.algorithm, server)

        def stay(block: Tensor) -> Any:
            own, client = Meter(), self.states.take(cohort[block])
            try:
                return visits.visit(self.algorithm, self.task, visible, client, data.select(block), round, own)
            finally:
                meters[int(block[0])] = own

        in_place = getattr(self.task, "kernels", None) == "numba" and self.task.reads(data.train)
        blocks = data.train.blocks(self.chunk, UNPADDED if in_place else 1)
        together = [torch.arange(len(cohort))] if self.algorithm.pooled else blocks
        states, message = in_order(together, stay, side_by_side, self._used)
        small = len(together) > 1 and loop.nbytes(states) + loop.nbytes(message) <= KEPT
        self._used = (states, message) if small else None
        for _, own in sorted(meters.items()):
            meter.add(own)
        return self.replied(cohort, states, message, meter)

    def replied(self, cohort: Tensor, states: Any, message: Any, meter: Meter) -> Replies:
        """What a visit to the cohort came to, the new states waiting to be accepted."""
        self._pending = (cohort, states)
        good = visits.sound(states) if len(states) else torch.ones(len(cohort), dtype=torch.bool)
        if bool(good.all()):
            return Replies(cohort, message, {}, meter)
        lost = dict.fromkeys(cohort[~good].tolist(), visits.UNSOUND)
        return Replies(cohort[good], select(message, good), lost, meter)

    def accept(self, who: Tensor, round: Round) -> None:
        cohort, states = self._pending
        kept = torch.isin(cohort, who)
        self.states.put(who, states if bool(kept.all()) else select(states, kept), round.t)
        self._pending = None

    def mark_best(self, round: Round) -> None:
        self.best = self.states.copy()

    def evaluate(self, server: Any, round: Round, parts: tuple[str, ...], at: str = LAST) -> dict[str, Scores]:
        rows = {part: getattr(self.clients, part) for part in parts}
        classes = "test" in parts and self.clients.kind in scores.WITH_CLASSES
        answers: list[scores.Answers] = []

        def risks(block: Tensor) -> tuple[Tensor, ...]:
            w = self._deployed(server, round, at, block)
            if classes:
                answers.extend(scores.answers(self.task, w, rows["test"].select(block)))
            return tuple(visits.mean_risk(self.task, w, rows[part].select(block)) for part in parts)

        found = in_order(self._blocks(), risks)
        told = {"test": scores.of_all(self.task, self.clients.kind, answers)} if answers else {}
        return {part: Scores(risk, rows[part].size, told.get(part, {})) for part, risk in zip(parts, found)}

    def models(self, server: Any, round: Round, at: str = LAST) -> Tensor:
        if not self.algorithm.last_stage:
            one = self.algorithm.deploy(server, self._states(at).take(torch.zeros(1, dtype=torch.long)))
            shared = self.algorithm.global_model(server)
            if one is shared:  # the same for all: a view, not a copy for everyone
                return shared.expand(len(self.clients), -1)
        return in_order(self._blocks(), lambda block: self._deployed(server, round, at, block))

    def numbers(self, field: str, at: str = LAST) -> Tensor | None:
        states = self._states(at)
        if not hasattr(states.first, field):
            return None
        return torch.where(states.merged > 0, states.field(field).double(), torch.nan)

    def snapshot(self) -> dict[str, Stored]:
        return self.states.named(LAST) | ({} if self.best is None else self.best.named(BEST))

    def restore(self, snapshot: dict[str, Tensor]) -> None:
        first = self.states.first
        self.states = States.found(first, LAST, snapshot)
        self.best = States.found(first, BEST, snapshot) if f"{BEST}_merged" in snapshot else None

    def beside(self, algorithm: Any) -> Simulator:
        return Simulator(self.task, self.clients, self.p, self.chunk, self.known)

    def _deployed(self, server: Any, round: Round, at: str, block: Tensor) -> Tensor:
        states = self._states(at)
        client, merged = states.take(block), states.merged[block]
        return visits.deployed(self.algorithm, self.task, server, client, merged, self.data.select(block), round)

    def _states(self, at: str) -> States:
        return self.best if at == BEST and self.best is not None else self.states

    def _blocks(self) -> list[Tensor]:
        return self.data.train.blocks(self.chunk)


def settle(
    algorithm: Any, task: Task, clients: Clients, *, weights: str = "size", seed: int = 0, chunk: int = 0
) -> tuple[Any, Simulator, Any]:
    """The algorithm in numbers, these clients ready to be asked in this process, and the server's first state."""
    exchange = Simulator(task, clients, clients.weights(weights), chunk)
    ready, server = loop.settle(algorithm, task, exchange, seed)
    return ready, exchange, server
