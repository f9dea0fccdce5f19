"""The exchange in one process: all clients are here, and a cohort is worked on in chunks that fit the cache."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mooring.algorithms.base import AnyAlgorithm
from mooring.core.cohort import Round, StateTree, chunk_size, map_blocks, select
from mooring.core.costs import CostMeter
from mooring.core.task import Task
from mooring.core.threads import map_threads
from mooring.data.clients import PARTS, Clients
from mooring.engines import local_update, loop, metrics
from mooring.engines.client_states import ClientStates
from mooring.engines.exchange import BEST, LAST, ClientRoster, Replies, Scores, visible_state
from mooring.estimates.client_statistics import ClientStatistics, collect_statistics
from mooring.runs.tensor_files import StoredTensor
from mooring.tasks.compiled_steps import is_compiled

MAX_REUSED_BYTES = 1_000_000_000  # bytes of replies up to which their memory waits for the next round's
UNPADDED_BLOCK_FACTOR = (
    4  # times as large blocks where compiled steps read rows where they lie: padding is then for other work
)
StatisticsCache = dict[
    tuple[str, ...], tuple[Tensor, ClientStatistics]
]  # by what was asked: the model that facts are about, and the facts


class Simulator:
    """All clients in this process. States of clients change only when a round accepts their replies."""

    pattern = None  # messages are made here

    def __init__(self, task: Task, clients: Clients, p: Tensor, chunk: int = 0, known: StatisticsCache | None = None):
        """`known` are the clients' facts as far as another run at them has asked."""
        self.task, self.clients, self.p = task, clients, p
        self.known: StatisticsCache = {} if known is None else known
        self.data = clients.cohort(p)
        self.chunk = chunk or chunk_size(task)
        self.algorithm: AnyAlgorithm  # set by `begin`
        self.states: ClientStates
        self.best: ClientStates | None = None
        self._pending: Any = None
        self._used: Any = None  # the last round's states and messages, whose memory is used again

    @cached_property
    def roster(self) -> ClientRoster:
        sizes = {part: getattr(self.clients, part).size for part in PARTS}
        return ClientRoster(self.clients.names, self.data.keys, self.p, sizes)

    def client_statistics(self, w0: Tensor, asks: tuple[str, ...] = ("fit", "alone")) -> ClientStatistics:
        if asks not in self.known or not torch.equal(self.known[asks][0], w0):
            self.known[asks] = w0, collect_statistics(self.task, self.data, w0, asks)
        return self.known[asks][1]

    def begin(self, algorithm: AnyAlgorithm, w0: Tensor) -> None:
        self.algorithm = algorithm
        self.states, self.best = ClientStates(algorithm.init(self.task, w0)[1], len(self.clients)), None

    def ask(self, server: StateTree, cohort: Tensor, round: Round, deadline: float | None = None) -> Replies:
        """Everyone answers at once, so that there is nothing to wait for."""
        meters: dict[int, CostMeter] = {}
        meter, data, visible = CostMeter(), self.data.select(cohort), visible_state(self.algorithm, server)

        def stay(block: Tensor) -> Any:
            own, client = CostMeter(), self.states.take(cohort[block])
            try:
                return local_update.client_update(
                    self.algorithm, self.task, visible, client, data.select(block), round, own
                )
            finally:
                meters[int(block[0])] = own

        in_place = is_compiled(self.task) and self.task.local_steps(data.train) is not None
        blocks = data.train.blocks(self.chunk, UNPADDED_BLOCK_FACTOR if in_place else 1)
        together = [torch.arange(len(cohort))] if self.algorithm.pooled else blocks
        states, message = map_blocks(together, stay, map_threads, self._used)
        small = len(together) > 1 and loop.count_bytes(states) + loop.count_bytes(message) <= MAX_REUSED_BYTES
        self._used = (states, message) if small else None
        for _, own in sorted(meters.items()):
            meter.add(own)
        return self.replied(cohort, states, message, meter)

    def replied(self, cohort: Tensor, states: StateTree, message: StateTree, meter: CostMeter) -> Replies:
        """What a visit to the cohort came to, the new states waiting to be accepted."""
        self._pending = (cohort, states)
        good = local_update.finite_states(states) if len(states) else torch.ones(len(cohort), dtype=torch.bool)
        if bool(good.all()):
            return Replies(cohort, message, {}, meter)
        lost = dict.fromkeys(cohort[~good].tolist(), local_update.NOT_FINITE)
        return Replies(cohort[good], select(message, good), lost, meter)

    def accept(self, who: Tensor, round: Round) -> None:
        cohort, states = self._pending
        accepted = torch.isin(cohort, who)
        self.states.put(who, states if bool(accepted.all()) else select(states, accepted), round.t)
        self._pending = None

    def mark_best(self, round: Round) -> None:
        self.best = self.states.copy()

    def evaluate(self, server: StateTree, round: Round, parts: tuple[str, ...], at: str = LAST) -> dict[str, Scores]:
        rows = {part: getattr(self.clients, part) for part in parts}
        classes = "test" in parts and self.clients.kind in metrics.CLASS_TARGETS
        answers: list[metrics.Predictions] = []

        def risks(block: Tensor) -> tuple[Tensor, ...]:
            w = self._deployed(server, round, at, block)
            if classes:
                answers.extend(metrics.predict_blocks(self.task, w, rows["test"].select(block)))
            return tuple(local_update.mean_risk(self.task, w, rows[part].select(block)) for part in parts)

        losses = map_blocks(self._blocks(), risks)
        overall = {"test": metrics.overall_class_metrics(self.task, self.clients.kind, answers)} if answers else {}
        return {part: Scores(risk, rows[part].size, overall.get(part, {})) for part, risk in zip(parts, losses)}

    def models(self, server: StateTree, round: Round, at: str = LAST) -> Tensor:
        if not self.algorithm.finetunes:
            first = self.algorithm.personal_model(server, self._states(at).take(torch.zeros(1, dtype=torch.long)))
            shared = self.algorithm.global_model(server)
            if first is shared:  # the same for all: a view, not a copy for everyone
                return shared.expand(len(self.clients), -1)
        return map_blocks(self._blocks(), lambda block: self._deployed(server, round, at, block))

    def numbers(self, field: str, at: str = LAST) -> Tensor | None:
        states = self._states(at)
        if not hasattr(states.first, field):
            return None
        return torch.where(states.merged > 0, states.field(field).double(), torch.nan)

    def snapshot(self) -> dict[str, StoredTensor]:
        return self.states.named(LAST) | ({} if self.best is None else self.best.named(BEST))

    def restore(self, snapshot: dict[str, Tensor]) -> None:
        first = self.states.first
        self.states = ClientStates.found(first, LAST, snapshot)
        self.best = ClientStates.found(first, BEST, snapshot) if f"{BEST}_merged" in snapshot else None

    def beside(self, algorithm: AnyAlgorithm) -> Simulator:
        return Simulator(self.task, self.clients, self.p, self.chunk, self.known)

    def _deployed(self, server: StateTree, round: Round, at: str, block: Tensor) -> Tensor:
        states = self._states(at)
        client, merged = states.take(block), states.merged[block]
        return local_update.personal_models(
            self.algorithm, self.task, server, client, merged, self.data.select(block), round
        )

    def _states(self, at: str) -> ClientStates:
        return self.best if at == BEST and self.best is not None else self.states

    def _blocks(self) -> list[Tensor]:
        return self.data.train.blocks(self.chunk)


def resolve(
    algorithm: AnyAlgorithm, task: Task, clients: Clients, *, weights: str = "size", seed: int = 0, chunk: int = 0
) -> tuple[Any, Simulator, Any]:
    """The algorithm in numbers, these clients ready to be asked in this process, and the server's first state."""
    exchange = Simulator(task, clients, clients.weights(weights), chunk)
    ready, server = loop.resolve(algorithm, task, exchange, seed)
    return ready, exchange, server
