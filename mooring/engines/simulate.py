"""`simulate`: one algorithm on clients in this process, start to end, for experiments, estimators and tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

from torch import Tensor

from mooring.core.task import Task
from mooring.data.clients import Clients
from mooring.engines.exchange import LAST
from mooring.engines.loop import (
    Asking,
    TrainingOutcome,
    TrainingPlan,
    TrainingState,
    answered,
    collect_models,
    full_round,
    resolve,
    rounds_of,
)
from mooring.engines.personal_parts import keep_personal_parts
from mooring.engines.simulator import Simulator


class SimulationResult(NamedTuple):
    """What a simulation leaves."""

    algorithm: Any  # settled
    exchange: Simulator
    outcome: TrainingOutcome
    plan: TrainingPlan

    @property
    def server(self) -> Any:
        """The server's state after the last round."""
        return self.outcome.progress.server

    def models(self, which: str = LAST) -> Tensor:
        """[m, d]: what every client deploys after the last or the best round."""
        found = collect_models(self.outcome, self.exchange, self.plan, which)
        assert found is not None  # the simulator has them all
        return found


class RoundSnapshot(NamedTuple):
    """A simulation after round t, for whoever watches it."""

    t: int
    server: Any
    exchange: Simulator
    plan: TrainingPlan

    def models(self) -> Tensor:
        """[m, d]: what every client would deploy now."""
        roster = self.exchange.roster
        return self.exchange.models(self.server, full_round(self.t, self.plan.rounds, roster, self.plan))


def simulating(
    algorithm: Any,
    task: Task,
    clients: Clients,
    plan: TrainingPlan,
    *,
    weights: str = "size",
    settled: bool = False,
    watch: Callable[[RoundSnapshot], bool | None] = lambda moment: None,
    chunk: int = 0,
    w0: Tensor | None = None,
) -> Asking[SimulationResult]:
    """Train on clients in this process; whoever drives it answers each round's question. `watch` sees every round; a
    round after which it says True is the last.

    `settled` says that the algorithm's fields are numbers already: then no facts are gathered. `w0` takes the place of
    the task's own start.
    """
    exchange = Simulator(task, clients, clients.weights(weights), chunk)
    if settled:
        begin = task.start(plan.seed) if w0 is None else w0
        ready = keep_personal_parts(algorithm, task)
        server = ready.init(task, begin)[0]
        exchange.begin(ready, begin)
    else:
        ready, server = resolve(algorithm, task, exchange, plan.seed, w0)

    def tell(progress: TrainingState, _: int) -> None:
        if watch(RoundSnapshot(progress.t, progress.server, exchange, plan)):
            progress.stopped = True

    outcome = yield from rounds_of(ready, exchange, plan, TrainingState(server), tell=tell)
    return SimulationResult(ready, exchange, outcome, plan)


@wraps(simulating)
def simulate(*given: Any, **more: Any) -> SimulationResult:
    return answered(simulating(*given, **more))


simulate.__doc__ = "`simulating`, every question answered by the run's own clients."
