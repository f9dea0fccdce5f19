"""An exchange that loses replies, and a run over it."""

import torch

from mooring.engines.loop import Plan, Progress, run
from mooring.engines.simulator import Simulator


class Lossy(Simulator):
    """Loses a third of the replies, at random but the same ones in every run."""

    def ask(self, server, cohort, round):
        replies = super().ask(server, cohort, round)
        lost = torch.rand(len(cohort), generator=torch.Generator().manual_seed(round.t)) < 1 / 3
        return replies._replace(present=~lost)


def train(algorithm, task, clients, exchange_of, rounds, participation=1.0):
    """(the final server state, the exchange) of a run with settled fields."""
    w0 = task.start()
    exchange = exchange_of(algorithm, task, clients, clients.weights(), w0)
    exchange.algorithm = algorithm = algorithm.settle(task, exchange.facts(w0))
    server, exchange.states.first = algorithm.start(task, w0)
    plan = Plan(rounds=rounds, participation=participation, evaluate_every=rounds, keep="last")
    return run(algorithm, exchange, plan, Progress(server)).progress.server, exchange
