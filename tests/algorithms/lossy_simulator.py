"""A simulator that loses replies, and a run over it."""

import torch

from mooring.core.cohort import select
from mooring.engines.loop import resolve, run
from mooring.engines.simulator import Simulator
from mooring.engines.training_state import TrainingPlan, TrainingState


class LossySimulator(Simulator):
    """Loses a third of the replies, at random but the same ones in every run."""

    def ask(self, server, cohort, round, deadline=None):
        replies = super().ask(server, cohort, round)
        return replies._replace(
            clients=cohort[here := self.came(cohort, round.t)], message=select(replies.message, here)
        )

    def came(self, cohort, t):
        """[C]: whose replies come."""
        return torch.rand(len(cohort), generator=torch.Generator().manual_seed(t)) >= 1 / 3


def train(algorithm, task, clients, exchange_of, rounds, participation=1.0):
    """(the final server state, the exchange) of a run with resolved fields."""
    exchange = exchange_of(task, clients, clients.weights())
    algorithm, server = resolve(algorithm, task, exchange)
    plan = TrainingPlan(rounds=rounds, participation=participation, evaluate_every=rounds)
    return run(algorithm, exchange, plan, TrainingState(server)).state.server, exchange
