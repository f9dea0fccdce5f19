"""`simulate`: one algorithm on clients in this process, start to end, for experiments, estimators and tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

from torch import Tensor

from mooring.core.task import Task
from mooring.data.clients import Clients
from mooring.engines.exchange import LAST
from mooring.engines.loop import Asking, Outcome, Plan, Progress, answered, deployed, everyones, rounds_of, settle
from mooring.engines.simulator import Simulator


class Simulated(NamedTuple):
    """What a simulation leaves."""

    algorithm: Any  # settled
    exchange: Simulator
    outcome: Outcome
    plan: Plan

    @property
    def server(self) -> Any:
        """The server's state after the last round."""
        return self.outcome.progress.server

    def models(self, which: str = LAST) -> Tensor:
        """[m, d]: what every client deploys after the last or the best round."""
        found = deployed(self.outcome, self.exchange, self.plan, which)
        assert found is not None  # the simulator has them all
        return found


class Moment(NamedTuple):
    """A simulation after round t, for whoever watches it."""

    t: int
    server: Any
    exchange: Simulator
    plan: Plan

    def models(self) -> Tensor:
        """[m, d]: what every client would deploy now."""
        roster = self.exchange.roster
        return self.exchange.models(self.server, everyones(self.t, self.plan.rounds, roster, self.plan))


def simulating(
    algorithm: Any,
    task: Task,
    clients: Clients,
    plan: Plan,
    *,
    weights: str = "size",
    settled: bool = False,
    watch: Callable[[Moment], bool | None] = lambda moment: None,
    chunk: int = 0,
    w0: Tensor | None = None,
) -> Asking[Simulated]:
    """Train on clients in this process; whoever drives it answers each round's question. `watch` sees every round; a
    round after which it says True is the last.

    `settled` says that the algorithm's fields are numbers already: then no facts are gathered. `w0` takes the place of
    the task's own start.
    """
    exchange = Simulator(task, clients, clients.weights(weights), chunk)
    if settled:
        begin = task.start(plan.seed) if w0 is None else w0
        ready, server = algorithm, algorithm.start(task, begin)[0]
        exchange.begin(ready, begin)
    else:
        ready, server = settle(algorithm, task, exchange, plan.seed, w0)

    def tell(progress: Progress, _: int) -> None:
        if watch(Moment(progress.t, progress.server, exchange, plan)):
            progress.stopped = True

    outcome = yield from rounds_of(ready, exchange, plan, Progress(server), tell=tell)
    return Simulated(ready, exchange, outcome, plan)


@wraps(simulating)
def simulate(*given: Any, **more: Any) -> Simulated:
    return answered(simulating(*given, **more))


simulate.__doc__ = "`simulating`, every question answered by the run's own clients."
