"""`simulate`: one algorithm on clients in this process, start to end, for experiments, estimators and tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

from torch import Tensor

from mooring.algorithms.base import AnyAlgorithm
from mooring.core.cohort import StateTree
from mooring.core.task import Task
from mooring.data.clients import Clients
from mooring.engines.callbacks import plan_callbacks
from mooring.engines.exchange import LAST
from mooring.engines.loop import TrainingSteps, collect_models, full_round, resolve, run_steps, training_steps
from mooring.engines.personal_parts import keep_personal_parts
from mooring.engines.simulator import Simulator
from mooring.engines.training_state import TrainingOutcome, TrainingPlan, TrainingState


class SimulationResult(NamedTuple):
    """The result of a simulation."""

    algorithm: AnyAlgorithm  # resolved
    exchange: Simulator
    outcome: TrainingOutcome
    plan: TrainingPlan

    @property
    def server(self) -> StateTree:
        """The server's state after the last round."""
        return self.outcome.state.server

    def models(self, selection: str = LAST) -> Tensor:
        """[m, d]: every client's model after the last or the best round."""
        models = collect_models(self.outcome, self.exchange, self.plan, selection)
        assert models is not None  # the simulator has them all
        return models


class RoundSnapshot(NamedTuple):
    """A simulation after round t, for callbacks."""

    t: int
    server: StateTree
    exchange: Simulator
    plan: TrainingPlan

    def models(self) -> Tensor:
        """[m, d]: every client's present model."""
        roster = self.exchange.roster
        return self.exchange.models(self.server, full_round(self.t, self.plan.rounds, roster, self.plan))


def simulation_steps(
    algorithm: AnyAlgorithm,
    task: Task,
    clients: Clients,
    plan: TrainingPlan,
    *,
    weights: str = "size",
    resolved: bool = False,
    watch: Callable[[RoundSnapshot], bool | None] = lambda moment: None,
    chunk: int = 0,
    w0: Tensor | None = None,
) -> TrainingSteps[SimulationResult]:
    """`simulate` as a generator that yields each round's request and is sent the replies, for sweeps."""
    exchange = Simulator(task, clients, clients.weights(weights), chunk)
    if resolved:
        begin = task.start(plan.seed) if w0 is None else w0
        resolved_algorithm = keep_personal_parts(algorithm, task)
        server = resolved_algorithm.init(task, begin)[0]
        exchange.begin(resolved_algorithm, begin)
    else:
        resolved_algorithm, server = resolve(algorithm, task, exchange, plan.seed, w0)

    def report(state: TrainingState, _: int) -> None:
        if watch(RoundSnapshot(state.t, state.server, exchange, plan)):
            state.stopped = True

    callbacks = plan_callbacks(resolved_algorithm, plan, len(clients), report=report)
    outcome = yield from training_steps(resolved_algorithm, exchange, plan, TrainingState(server), callbacks)
    return SimulationResult(resolved_algorithm, exchange, outcome, plan)


@wraps(simulation_steps)
def simulate(*args: Any, **options: Any) -> SimulationResult:
    return run_steps(simulation_steps(*args, **options))


simulate.__doc__ = """Train on clients in this process. `watch` sees every round, and returns True to end the run.

`resolved` means that the algorithm's fields are numbers already: then no statistics are gathered. `w0` takes the
place of the task's own start.
"""
