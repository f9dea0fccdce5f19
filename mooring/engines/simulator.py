"""The exchange in one process: all clients are in memory, and a cohort is processed in chunks that fit the cache."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

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

MAX_REUSED_BYTES = 1_000_000_000  # bytes of replies up to which their memory is reused
UNPADDED_BLOCK_FACTOR = 4  # factor of larger blocks if compiled steps read rows in place, without padding
StatisticsCache = dict[
    tuple[str, ...], tuple[Tensor, ClientStatistics]
]  # by required statistics: the model at which they were computed, and their values


class Simulator:
    """All clients in this process. States of clients change only when a round accepts their replies."""

    pattern = None  # messages are made here

    def __init__(
        self, task: Task, clients: Clients, p: Tensor, chunk: int = 0, statistics_cache: StatisticsCache | None = None
    ):
        """`statistics_cache` has the clients' statistics of other runs on the same clients."""
        self.task, self.clients, self.p = task, clients, p
        self.statistics_cache: StatisticsCache = {} if statistics_cache is None else statistics_cache
        self.data = clients.cohort(p)
        self.chunk = chunk or chunk_size(task)
        self.algorithm: AnyAlgorithm  # set by `begin`
        self.deployed_task: Task  # that of the models in use
        self.states: ClientStates
        self.best: ClientStates | None = None
        self._pending: StateTree = None  # the cohort and its new states, until they are accepted
        self.metrics: Mapping[str, metrics.Metric] = {}  # the user's, of all evaluations
        self.measures_validation = False  # whether validation rows are measured as test rows are
        self._used: StateTree = None  # the last round's states and messages, whose memory is reused

    @cached_property
    def roster(self) -> ClientRoster:
        sizes = {part: getattr(self.clients, part).size for part in PARTS}
        return ClientRoster(self.clients.names, self.data.keys, self.p, sizes)

    def client_statistics(self, w0: Tensor, required: tuple[str, ...] = ("fit", "alone")) -> ClientStatistics:
        if required not in self.statistics_cache or not torch.equal(self.statistics_cache[required][0], w0):
            self.statistics_cache[required] = w0, collect_statistics(self.task, self.data, w0, required)
        return self.statistics_cache[required][1]

    def begin(self, algorithm: AnyAlgorithm, w0: Tensor) -> None:
        self.algorithm, self.deployed_task = algorithm, algorithm.deployed_task(self.task)
        self.states, self.best = (
            ClientStates(local_update.first_states(algorithm, self.task, w0)[1], len(self.clients)),
            None,
        )

    def ask(self, server: StateTree, cohort: Tensor, round: Round, deadline: float | None = None) -> Replies:
        """Run the local updates; `deadline` does not apply."""
        meters: dict[int, CostMeter] = {}
        meter, data, visible = CostMeter(), self.data.select(cohort), visible_state(self.algorithm, server)

        def update_block(block: Tensor) -> tuple[StateTree, StateTree]:
            block_meter, client = CostMeter(), self.states.take(cohort[block])
            try:
                return local_update.client_update(
                    self.algorithm, self.task, visible, client, data.select(block), round, block_meter
                )
            finally:
                meters[int(block[0])] = block_meter

        in_place = is_compiled(self.task) and self.task.local_steps(data.train) is not None
        blocks = data.train.blocks(self.chunk, UNPADDED_BLOCK_FACTOR if in_place else 1)
        update_blocks = [torch.arange(len(cohort))] if self.algorithm.pooled else blocks
        states, message = map_blocks(update_blocks, update_block, map_threads, self._used)
        small = len(update_blocks) > 1 and loop.count_bytes(states) + loop.count_bytes(message) <= MAX_REUSED_BYTES
        self._used = (states, message) if small else None
        for _, block_meter in sorted(meters.items()):
            meter.add(block_meter)
        return self.make_replies(cohort, states, message, meter)

    def make_replies(self, cohort: Tensor, states: StateTree, message: StateTree, meter: CostMeter) -> Replies:
        """Return the replies of a local update; the new states wait to be accepted."""
        self._pending = (cohort, states)
        finite = local_update.finite_states(states) if len(states) else torch.ones(len(cohort), dtype=torch.bool)
        if bool(finite.all()):
            return Replies(cohort, message, {}, meter)
        missing = dict.fromkeys(cohort[~finite].tolist(), local_update.NOT_FINITE)
        return Replies(cohort[finite], select(message, finite), missing, meter)

    def accept(self, clients: Tensor, round: Round) -> None:
        cohort, states = self._pending
        accepted = torch.isin(cohort, clients)
        self.states.store(clients, states if bool(accepted.all()) else select(states, accepted), round.t)
        self._pending = None

    def mark_best(self, round: Round) -> None:
        self.best = self.states.copy()

    def evaluate(self, server: StateTree, round: Round, parts: tuple[str, ...], at: str = LAST) -> dict[str, Scores]:
        rows = {part: getattr(self.clients, part) for part in parts}
        measured = [part for part in parts if self._measures(part)]
        predictions: dict[str, list[metrics.Predictions]] = {part: [] for part in measured}

        def risks(block: Tensor) -> tuple[Tensor, ...]:
            w = self._personal_models(server, round, at, block)
            for part in measured:
                predictions[part].extend(metrics.predict_blocks(self.deployed_task, w, rows[part].select(block)))
            return tuple(local_update.mean_risk(self.deployed_task, w, rows[part].select(block)) for part in parts)

        losses = map_blocks(self._blocks(), risks)
        measures = {
            part: metrics.measure_predictions(
                self.deployed_task, self.clients, blocks, self.metrics, by_client=False
            ).overall
            for part, blocks in predictions.items()
            if blocks
        }
        return {part: Scores(risk, rows[part].size, measures.get(part, {})) for part, risk in zip(parts, losses)}

    def _measures(self, part: str) -> bool:
        """Whether predictions of these rows are measured."""
        if part == "validation":
            return self.measures_validation
        return part == "test" and (self.clients.kind in metrics.CLASS_TARGETS or bool(self.metrics))

    def models(self, server: StateTree, round: Round, at: str = LAST) -> Tensor:
        if not self.algorithm.finetunes:
            state = local_update.own_state(self.algorithm, self._states(at).take(torch.zeros(1, dtype=torch.long)))
            first = self.algorithm.personal_model(server, state)
            shared = self.algorithm.global_model(server)
            if first is shared:  # equal for all clients: a view, not a copy per client
                return shared.expand(len(self.clients), -1)
        return map_blocks(self._blocks(), lambda block: self._personal_models(server, round, at, block))

    def numbers(self, field: str, at: str = LAST) -> Tensor | None:
        states = self._states(at)
        if not hasattr(states.first, field):
            return None
        return torch.where(states.merged > 0, states.field(field).double(), torch.nan)

    def snapshot(self) -> dict[str, StoredTensor]:
        return self.states.to_snapshot(LAST) | ({} if self.best is None else self.best.to_snapshot(BEST))

    def restore(self, snapshot: dict[str, Tensor]) -> None:
        first = self.states.first
        self.states = ClientStates.from_snapshot(first, LAST, snapshot)
        self.best = ClientStates.from_snapshot(first, BEST, snapshot) if f"{BEST}_merged" in snapshot else None

    def beside(self, algorithm: AnyAlgorithm) -> Simulator:
        beside = Simulator(self.task, self.clients, self.p, self.chunk, self.statistics_cache)
        beside.metrics, beside.measures_validation = self.metrics, self.measures_validation
        return beside

    def _personal_models(self, server: StateTree, round: Round, at: str, block: Tensor) -> Tensor:
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
) -> tuple[AnyAlgorithm, Simulator, StateTree]:
    """Return the resolved algorithm, a simulator of these clients, and the server's first state."""
    exchange = Simulator(task, clients, clients.weights(weights), chunk)
    resolved, server = loop.resolve(algorithm, task, exchange, seed)
    return resolved, exchange, server
