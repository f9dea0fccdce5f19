"""Many runs as one: variants of an algorithm, and seeds, trained on the same clients as a single larger cohort.

Where models are small, what a round costs is calls of PyTorch and not arithmetic: forty runs cost little more than one
if all their clients are visited together. Clients of a variant start from that variant's server, with its numbers and
its seed, and everything but the visit is each run's own, the common round loop: each variant ends where it would have
ended alone, up to rounding. A run's last digits depend on how many are visited with it and on its place among them, as
PyTorch works on the last few numbers of a tensor in another way than on the others. Where runs that were interrupted at
different rounds must resume to the same bytes, a place whose run does not ask is therefore filled.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mooring.algorithms.base import AnyAlgorithm
from mooring.core.cohort import MAX_PADDED_BYTES, StateTree, chunk_size, map_blocks, select, stack_states
from mooring.core.costs import CostMeter
from mooring.core.penalty import PerClientPenalty, PerRow
from mooring.core.task import Task
from mooring.core.threads import map_threads
from mooring.core.types import NamedValues
from mooring.data.clients import Clients
from mooring.engines import local_update, loop
from mooring.engines.exchange import Replies, visible_state
from mooring.engines.loop import RoundRequest, TrainingSteps
from mooring.engines.simulator import Simulator, StatisticsCache
from mooring.engines.training_state import Evaluation, TrainingPlan, TrainingState


class Variant(NamedTuple):
    """A run of a sweep."""

    algorithm: AnyAlgorithm
    seed: int


class VariantResult(NamedTuple):
    """What a variant came to."""

    algorithm: AnyAlgorithm  # resolved
    seed: int
    server: StateTree
    exchange: Simulator
    last: Evaluation


def sweep(
    variants: Sequence[Variant], task: Task, clients: Clients, plan: TrainingPlan, weights: str = "size"
) -> list[VariantResult]:
    """Every variant after all rounds of `plan`, whose seed the variants replace; they need not have anything in common.

    Variants that differ in nothing but seeds and what their algorithm lists in `swept` are trained as one cohort.
    """
    known: StatisticsCache = {}
    runs = [_run(variant, task, clients, plan, weights, known) for variant in variants]
    return [swept for swept, _ in run_together(runs)]


def _run(
    variant: Variant, task: Task, clients: Clients, plan: TrainingPlan, weights: str, known: StatisticsCache
) -> TrainingSteps[VariantResult]:
    exchange = Simulator(task, clients, clients.weights(weights), known=known)
    ready, server = loop.resolve(variant.algorithm, task, exchange, variant.seed)
    outcome = yield from loop.training_steps(ready, exchange, replace(plan, seed=variant.seed), TrainingState(server))
    return VariantResult(ready, variant.seed, outcome.state.server, exchange, outcome.last)


def max_runs_per_cohort(task: Task, clients: Clients, cohort: int, chunk: int = 0) -> int:
    """How many runs that ask so many of these clients in a round are worth training as one cohort: as many as fit one
    chunk with all their models and rows. Beyond that arithmetic counts, and memory."""
    rows = clients.train
    models = (chunk or chunk_size(task)) // cohort
    return max(1, min(models, MAX_PADDED_BYTES // max(len(rows.y) * rows.x[:1].numel() * rows.x.element_size(), 1)))


def group_methods(methods: NamedValues, most: int) -> list[list[str]]:
    """The names of algorithms in groups of at most `most` that may be visited together."""
    groups: dict[Any, list[str]] = {}
    for name, algorithm in methods.items():
        groups.setdefault(_likeness(algorithm), []).append(name)
    return [group[k : k + most] for group in groups.values() for k in range(0, len(group), most)]


def run_together(runs: Sequence[TrainingSteps[Any]], filled: bool = False) -> list[tuple[Any, float]]:
    """What each of several runs comes to, and the seconds that it took; visits of runs that are alike are one.

    Those that are behind go first. A run that fails stops those after it; the ones before it are finished. `filled`: a
    visit has places for all runs, whoever asks, so that a run's bytes do not depend on where the others are.
    """
    clocks = [_Clocked(run, place) for place, run in enumerate(runs)]
    going, failure = list(clocks), None
    replies: list[tuple[_Clocked, Replies | None, float]] = [(clock, None, 0.0) for clock in clocks]
    while replies:
        for clock, reply, share in replies:
            try:
                if clock in going:
                    clock.go_on(reply, share)
            except Exception as error:
                going, failure = going[: going.index(clock)], error
        going = [clock for clock in going if clock.ask is not None]
        groups, places = _next_groups(going), len(runs) if filled else 0
        replies = [answer for group in groups for answer in _visited(group, len(runs) == 1, places)]
    if failure is not None:
        raise failure
    return [(clock.found, clock.seconds) for clock in clocks]


class _Clocked:
    """A run, its question if it is not at its end, and its own seconds: those of other runs between them aside."""

    def __init__(self, run: TrainingSteps[Any], place: int):
        self.run, self.place, self.found = run, place, None
        self.ask: Any = None
        self.seconds, self.since = 0.0, time.perf_counter()

    def go_on(self, replies: Replies | None, share: float) -> None:
        """Up to the next question or the end; `share` are its seconds of the visit that gave the replies."""
        begin = time.perf_counter()
        try:
            if replies is None:
                self.ask = next(self.run)
            else:
                self.ask = self.run.send(replies._replace(elsewhere=begin - self.since - share))
        except StopIteration as end:
            self.ask, self.found = None, end.value
        self.since = time.perf_counter()
        self.seconds += share + self.since - begin


def _next_groups(runs: list[_Clocked]) -> list[list[_Clocked]]:
    """Those that are furthest behind, as many as are worth it of those that can be visited together in one group."""
    first = min((run.ask.round.t for run in runs), default=0)
    alike: dict[Any, list[_Clocked]] = {}
    for run in runs:
        if run.ask.round.t == first:
            at = run.ask.exchange
            alike.setdefault((_likeness(at.algorithm), id(at.task), id(at.clients.train)), []).append(run)
    groups = []
    for group in alike.values():
        most = _most(group[0].ask)
        groups += [group[k : k + most] for k in range(0, len(group), most)]
    return groups


def _most(ask: RoundRequest) -> int:
    at: Any = ask.exchange
    return max_runs_per_cohort(at.task, at.clients, len(ask.cohort), at.chunk)


def _visited(group: list[_Clocked], alone: bool, places: int) -> list[tuple[_Clocked, Replies, float]]:
    """Everyone's replies, and its share of the seconds; a lone run's visit is a common one all the same, unless it
    is `alone` from the beginning to the end. Of so many `places` those without a run are filled."""
    begin = time.perf_counter()
    asks = [run.ask for run in group]
    if alone or not _sweepable(asks[0].exchange.algorithm) or _most(asks[0]) == 1:
        replies = [ask.answer() for ask in asks]
    elif places:
        seats = {run.place: run.ask for run in group}
        replies = update_cohorts_together([seats.get(place, asks[0]) for place in range(places)], sorted(seats))
    else:
        replies = update_cohorts_together(asks)
    share = (time.perf_counter() - begin) / len(group)
    return [(run, reply, share) for run, reply in zip(group, replies)]


def update_cohorts_together(asks: Sequence[RoundRequest], wanted: Sequence[int] | None = None) -> list[Replies]:
    """What the simulators of runs that are alike reply to their asks, by one visit to all cohorts; only the replies to
    the `wanted` asks count.

    Blocks are those of one cohort, for all runs at once, where all have the same: a client is then padded as it always
    is, whoever else takes part. Costs are told in equal shares.
    """
    exchanges: list[Any] = [ask.exchange for ask in asks]
    cohorts, first = [ask.cohort for ask in asks], exchanges[0]
    owner = torch.repeat_interleave(torch.arange(len(asks)), len(cohorts[0]))
    seeds = np.array([ask.round.seed for ask in asks], dtype=np.uint64)[owner.numpy()]
    data = replace(first.data.select(torch.cat(cohorts)), seeds=seeds)
    servers = stack_states(
        [_row(visible_state(exchange.algorithm, ask.server)) for exchange, ask in zip(exchanges, asks)]
    )
    states = stack_states([exchange.states.take(cohort) for exchange, cohort in zip(exchanges, cohorts)])
    numbers = {
        name: torch.tensor(
            [float(getattr(each_exchange.algorithm, name)) for each_exchange in exchanges], dtype=torch.float64
        )
        for name in first.algorithm.per_client_fields
    }
    meters: list[CostMeter] = []

    def stay(block: Tensor) -> tuple[Any, Any]:
        owners, meter = owner[block], CostMeter()
        meters.append(meter)
        algorithm = _with(first.algorithm, {name: values[owners] for name, values in numbers.items()})
        clients, server = select(states, block), select(servers, owners)
        return local_update.client_update(
            algorithm, first.task, server, clients, data.select(block), asks[0].round, meter
        )

    if all(torch.equal(cohort, cohorts[0]) for cohort in cohorts):
        run = torch.arange(len(asks))[:, None] * len(cohorts[0])
        blocks = [(run + block).flatten() for block in first.data.train.select(cohorts[0]).blocks(first.chunk)]
    else:
        blocks = data.train.blocks(first.chunk)
    new_states, message = map_blocks(blocks, stay, map_threads)
    total_cost = CostMeter()
    for meter in meters:
        total_cost.add(meter)
    own = CostMeter(total_cost.samples // len(asks), total_cost.gradients // len(asks))
    return [
        exchanges[r].replied(cohorts[r], select(new_states, owner == r), select(message, owner == r), own)
        for r in (range(len(asks)) if wanted is None else wanted)
    ]


def _sweepable(algorithm: AnyAlgorithm) -> bool:
    """Whether clients of several runs of the algorithm can be one cohort; promises of solves are told run by run."""
    free = [getattr(algorithm, name) for name in algorithm.per_client_fields]
    plain = not algorithm.pooled and not algorithm.one_shot and not getattr(algorithm, "tol", 0)
    return bool(free) and plain and not any(isinstance(value, PerClientPenalty) for value in free)


def _likeness(algorithm: AnyAlgorithm) -> Any:
    """Equal for algorithms whose visits can be one."""
    if not _sweepable(algorithm):
        return id(algorithm)
    shared = (
        {field.name for field in fields(algorithm)} - set(algorithm.per_client_fields) - set(algorithm.server_fields)
    )
    return type(algorithm), tuple((name, repr(getattr(algorithm, name))) for name in sorted(shared))


def _row(server: StateTree) -> Any:
    """A server's state with a leading dimension."""
    return type(server)(*(None if part is None else part[None] for part in server))


def _with(algorithm: AnyAlgorithm, numbers: dict[str, Tensor]) -> Any:
    """The algorithm with a number per row in these fields; checks of fields are for what users give."""
    twin = object.__new__(type(algorithm))
    for field in fields(algorithm):
        object.__setattr__(twin, field.name, getattr(algorithm, field.name))
    for name, values in numbers.items():
        object.__setattr__(twin, name, PerRow(values) if name == "lam" else values)
    return twin
