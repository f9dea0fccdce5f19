"""A client of the naive transcriptions: numpy, one row at a time, half squared loss with a ridge and an intercept.

A story is what a transcription tells: who takes part in which round, and which rows each local step sees.
"""

from typing import NamedTuple

import numpy as np
import torch

from mooring.core.cohort import CohortData, Round
from mooring.core.minibatches import minibatches
from mooring.engines.participation import sample_cohort
from mooring.engines.training_state import TrainingPlan
from mooring.tasks.linear import Linear
from tests.support.problems import linear_clients

RIDGE, ETA, LAM, STEPS, ROUNDS = 0.1, 0.05, 0.3, 4, 3
D = 4
BATCH, SAMPLED = 4, 3  # of a story with minibatches and sampled clients


class Naive:
    """A client written out by hand."""

    def __init__(self, x, y):
        self.x = np.hstack([x, np.ones((len(x), 1))])
        self.y = y

    def grad(self, w):
        g = np.zeros_like(w)
        for row, y in zip(self.x, self.y):
            g += (row @ w - y) * row / len(self.y)
        return g + RIDGE * w

    def loss(self, w):
        return ((self.x @ w - self.y) ** 2).mean() / 2 + RIDGE / 2 * w @ w

    def bend(self):
        return self.x.T @ self.x / len(self.y) + RIDGE * np.eye(D)

    def prox(self, center, lam):
        """(X'X/n + ridge + lam)^-1 (X'y/n + lam center), lam a number or one per coefficient."""
        n, d = self.x.shape
        pull = np.diag(np.broadcast_to(lam, d))
        return np.linalg.solve(self.x.T @ self.x / n + RIDGE * np.eye(d) + pull, self.x.T @ self.y / n + pull @ center)


class NaiveRun(NamedTuple):
    clients: list[Naive]  # with all their training rows
    p: np.ndarray
    cohorts: list[list[int]]  # who takes part, a list a round
    data: CohortData
    batch: int | None
    seed: int

    def rows(self, i, t, steps=STEPS, slot=0):
        """What client i sees in round t = 0, 1, ...: a client for each step, with the rows of its minibatch."""
        turn = Round(t + 1, ROUNDS, len(self.p), len(self.p), 1.0, self.seed)
        mine = self.data.select(torch.tensor([i]))
        if self.batch is None:
            return [self.clients[i]] * steps
        seen = [step.batch for step in minibatches(Linear(3), mine, turn, batch=self.batch, steps=steps, slot=slot)]
        return [Naive(b.x[0, b.weight[0] > 0].numpy(), b.y[0, b.weight[0] > 0].numpy()) for b in seen]

    def share(self, t):
        """p_i / sum p over the cohort of round t, by client."""
        cohort = self.cohorts[t]
        return {i: self.p[i] / sum(self.p[j] for j in cohort) for i in cohort}

    def elastic(self, t):
        """(m / cohort) p_i over the cohort of round t, by client."""
        cohort = self.cohorts[t]
        return {i: len(self.p) / len(cohort) * self.p[i] for i in cohort}


def problem():
    clients = linear_clients()
    naive = [Naive(*(part.numpy() for part in clients.train.of(i))) for i in range(len(clients))]
    return Linear(3, ridge=RIDGE), clients, naive, clients.weights().numpy()


def everyone(weights="size"):
    """All clients in all rounds, all rows in every step."""
    _, clients, naive, _ = problem()
    p = clients.weights(weights).numpy()
    return NaiveRun(naive, p, [list(range(len(p)))] * ROUNDS, clients.cohort(), None, 0)


def sampled():
    """Three of five clients a round, unequal weights, minibatches of four; everybody comes at least once."""
    _, clients, naive, p = problem()
    for seed in range(100):
        plan = TrainingPlan(participation=SAMPLED, seed=seed)
        cohorts = [sample_cohort(plan, clients.cohort().keys, t + 1).tolist() for t in range(ROUNDS)]
        if set().union(*cohorts) == set(range(len(p))):
            return NaiveRun(naive, p, cohorts, clients.cohort(), BATCH, seed)
    raise AssertionError("no seed samples everybody")
