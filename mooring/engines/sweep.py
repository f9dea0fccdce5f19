"""Many runs as one: variants of an algorithm, and seeds, trained on the same clients as a single larger cohort.

Where models are small, a round's cost is calls of PyTorch and not arithmetic: forty runs cost little more than one if
all their clients are updated together. Clients of a variant start from that variant's server, with its numbers and its
seed, and everything but the local update is each run's own: each variant gives the result that it would give alone, up
to rounding. A run's last digits depend on the number of runs and on its position among them, as PyTorch processes the
last few numbers of a tensor differently. Where runs that were interrupted at different rounds must resume to the same
bytes, the position of a run without a request is therefore filled.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Generic, NamedTuple, TypeVar, cast

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

T = TypeVar("T")


class Variant(NamedTuple):
    """A run of a sweep."""

    algorithm: AnyAlgorithm
    seed: int


class VariantResult(NamedTuple):
    """The result of a variant."""

    algorithm: AnyAlgorithm  # resolved
    seed: int
    server: StateTree
    exchange: Simulator
    last: Evaluation


def sweep(
    variants: Sequence[Variant], task: Task, clients: Clients, plan: TrainingPlan, weights: str = "size"
) -> list[VariantResult]:
    """Return every variant after all rounds of `plan`, with the variants' seeds; they need not have anything in common.

    Variants that differ only in seeds and in `per_client_fields` are trained as one cohort.
    """
    statistics: StatisticsCache = {}
    runs = [_run(variant, task, clients, plan, weights, statistics) for variant in variants]
    return [swept for swept, _ in run_together(runs)]


def _run(
    variant: Variant, task: Task, clients: Clients, plan: TrainingPlan, weights: str, statistics: StatisticsCache
) -> TrainingSteps[VariantResult]:
    exchange = Simulator(task, clients, clients.weights(weights), statistics_cache=statistics)
    algorithm, server = loop.resolve(variant.algorithm, task, exchange, variant.seed)
    outcome = yield from loop.training_steps(
        algorithm, exchange, replace(plan, seed=variant.seed), TrainingState(server)
    )
    return VariantResult(algorithm, variant.seed, outcome.state.server, exchange, outcome.last)


def max_runs_per_cohort(task: Task, clients: Clients, cohort: int, chunk: int = 0) -> int:
    """Return the number of runs with cohorts of this size that are worth training as one cohort: as many as fit one
    chunk with all their models and rows. Beyond that arithmetic counts, and memory."""
    rows = clients.train
    models = (chunk or chunk_size(task)) // cohort
    return max(1, min(models, MAX_PADDED_BYTES // max(len(rows.y) * rows.x[:1].numel() * rows.x.element_size(), 1)))


def group_methods(methods: NamedValues, max_size: int) -> list[list[str]]:
    """The names of algorithms in groups of at most `max_size` that may be trained together."""
    groups: dict[object, list[str]] = {}
    for name, algorithm in methods.items():
        groups.setdefault(_likeness(algorithm), []).append(name)
    return [group[k : k + max_size] for group in groups.values() for k in range(0, len(group), max_size)]


def run_together(runs: Sequence[TrainingSteps[T]], filled: bool = False) -> list[tuple[T, float]]:
    """Return the result of each of several runs, and its seconds; local updates of similar runs are one.

    Runs in earlier rounds go first. A run that fails stops those after it; those before it are finished. `filled`: a
    local update has positions for all runs, so that a run's bytes do not depend on the progress of the others.
    """
    clocks = [_Clocked(run, place) for place, run in enumerate(runs)]
    going, failure = list(clocks), None
    replies: list[tuple[_Clocked[T], Replies | None, float]] = [(clock, None, 0.0) for clock in clocks]
    while replies:
        for clock, reply, share in replies:
            try:
                if clock in going:
                    clock.advance(reply, share)
            except Exception as error:
                going, failure = going[: going.index(clock)], error
        going = [clock for clock in going if not clock.finished]
        groups, places = _next_groups(going), len(runs) if filled else 0
        replies = [answer for group in groups for answer in _collect_replies(group, len(runs) == 1, places)]
    if failure is not None:
        raise failure
    return [(clock.result, clock.seconds) for clock in clocks]


class _Clocked(Generic[T]):
    """A run, its next request if it is not finished, and its own seconds, without those of other runs."""

    def __init__(self, run: TrainingSteps[T], place: int):
        self.run, self.place = run, place
        self.result: T  # once it is finished
        self.request: RoundRequest  # until it is finished
        self.finished = False
        self.seconds, self.since = 0.0, time.perf_counter()

    def advance(self, replies: Replies | None, share: float) -> None:
        """Run to the next request or the end; `share` are its seconds of the local update of the replies."""
        begin = time.perf_counter()
        try:
            if replies is None:
                self.request = next(self.run)
            else:
                self.request = self.run.send(replies._replace(elsewhere=begin - self.since - share))
        except StopIteration as end:
            self.finished, self.result = True, end.value
        self.since = time.perf_counter()
        self.seconds += share + self.since - begin


def _next_groups(runs: list[_Clocked[T]]) -> list[list[_Clocked[T]]]:
    """Return the runs in the earliest round, grouped by what can be trained together."""
    first = min((run.request.round.t for run in runs), default=0)
    similar: dict[object, list[_Clocked[T]]] = {}
    for run in runs:
        if run.request.round.t == first:
            at = _simulator(run.request)
            similar.setdefault((_likeness(at.algorithm), id(at.task), id(at.clients.train)), []).append(run)
    groups = []
    for group in similar.values():
        max_runs = _max_runs(group[0].request)
        groups += [group[k : k + max_runs] for k in range(0, len(group), max_runs)]
    return groups


def _max_runs(request: RoundRequest) -> int:
    at = _simulator(request)
    return max_runs_per_cohort(at.task, at.clients, len(request.cohort), at.chunk)


def _simulator(request: RoundRequest) -> Simulator:
    return cast(Simulator, request.exchange)  # runs that are trained together are in this process


def _collect_replies(
    group: list[_Clocked[T]], is_single: bool, places: int
) -> list[tuple[_Clocked[T], Replies, float]]:
    """Return each run's replies, and its share of the seconds; a group of one run is updated as others are, unless the
    run is single (`is_single`). Of the `places`, those without a run are filled."""
    begin = time.perf_counter()
    requests = [run.request for run in group]
    if is_single or not _sweepable(_simulator(requests[0]).algorithm) or _max_runs(requests[0]) == 1:
        replies = [request.answer() for request in requests]
    elif places:
        request_at = {run.place: run.request for run in group}
        replies = update_cohorts_together(
            [request_at.get(place, requests[0]) for place in range(places)], sorted(request_at)
        )
    else:
        replies = update_cohorts_together(requests)
    share = (time.perf_counter() - begin) / len(group)
    return [(run, reply, share) for run, reply in zip(group, replies)]


def update_cohorts_together(requests: Sequence[RoundRequest], selected: Sequence[int] | None = None) -> list[Replies]:
    """Return the replies of similar runs' simulators to their requests, by one local update of all cohorts; only the
    replies to the `selected` requests count.

    Blocks are those of one cohort, for all runs at once, if all cohorts are equal: a client is then padded as it always
    is, independently of other clients. Costs are divided equally.
    """
    exchanges = [_simulator(request) for request in requests]
    cohorts, first = [request.cohort for request in requests], exchanges[0]
    owner = torch.repeat_interleave(torch.arange(len(requests)), len(cohorts[0]))
    seeds = np.array([request.round.seed for request in requests], dtype=np.uint64)[owner.numpy()]
    data = replace(first.data.select(torch.cat(cohorts)), seeds=seeds)
    servers = stack_states(
        [_row(visible_state(exchange.algorithm, request.server)) for exchange, request in zip(exchanges, requests)]
    )
    states = stack_states([exchange.states.take(cohort) for exchange, cohort in zip(exchanges, cohorts)])
    numbers = {
        name: torch.tensor(
            [float(getattr(each_exchange.algorithm, name)) for each_exchange in exchanges], dtype=torch.float64
        )
        for name in first.algorithm.per_client_fields
    }
    meters: list[CostMeter] = []

    def update_block(block: Tensor) -> tuple[StateTree, StateTree]:
        owners, meter = owner[block], CostMeter()
        meters.append(meter)
        algorithm = _with(first.algorithm, {name: values[owners] for name, values in numbers.items()})
        clients, server = select(states, block), select(servers, owners)
        return local_update.client_update(
            algorithm, first.task, server, clients, data.select(block), requests[0].round, meter
        )

    if all(torch.equal(cohort, cohorts[0]) for cohort in cohorts):
        run = torch.arange(len(requests))[:, None] * len(cohorts[0])
        blocks = [(run + block).flatten() for block in first.data.train.select(cohorts[0]).blocks(first.chunk)]
    else:
        blocks = data.train.blocks(first.chunk)
    new_states, message = map_blocks(blocks, update_block, map_threads)
    total_cost = CostMeter()
    for meter in meters:
        total_cost.add(meter)
    run_meter = CostMeter(total_cost.samples // len(requests), total_cost.gradients // len(requests))
    return [
        exchanges[r].make_replies(cohorts[r], select(new_states, owner == r), select(message, owner == r), run_meter)
        for r in (range(len(requests)) if selected is None else selected)
    ]


def _sweepable(algorithm: AnyAlgorithm) -> bool:
    """Return whether clients of several runs of the algorithm can be one cohort; tolerances of solves are reported by
    run."""
    free = [getattr(algorithm, name) for name in algorithm.per_client_fields]
    is_simple = not algorithm.pooled and not algorithm.one_shot and not getattr(algorithm, "tol", 0)
    return bool(free) and is_simple and not any(isinstance(value, PerClientPenalty) for value in free)


def _likeness(algorithm: AnyAlgorithm) -> object:
    """Return a key that is equal for algorithms whose local updates can be one."""
    if not _sweepable(algorithm):
        return id(algorithm)
    shared = (
        {field.name for field in fields(algorithm)} - set(algorithm.per_client_fields) - set(algorithm.server_fields)
    )
    return type(algorithm), tuple((name, repr(getattr(algorithm, name))) for name in sorted(shared))


def _row(server: StateTree) -> StateTree:
    """Return a server's state with a leading dimension."""
    return type(server)(*(None if part is None else part[None] for part in server))


def _with(algorithm: AnyAlgorithm, numbers: dict[str, Tensor]) -> AnyAlgorithm:
    """Return the algorithm with a number per row in these fields, without the checks of user input."""
    twin = object.__new__(type(algorithm))
    for field in fields(algorithm):
        object.__setattr__(twin, field.name, getattr(algorithm, field.name))
    for name, values in numbers.items():
        object.__setattr__(twin, name, PerRow(values) if name == "lam" else values)
    return twin
