"""A client of the naive transcriptions: numpy, one row at a time, half squared loss with a ridge and an intercept."""

import numpy as np

from mooring.tasks.linear import Linear
from tests.problems import linear_clients

RIDGE, ETA, LAM, STEPS, ROUNDS = 0.1, 0.05, 0.3, 4, 3


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

    def prox(self, center, lam):
        """(X'X/n + ridge + lam)^-1 (X'y/n + lam center), lam a number or one per coefficient."""
        n, d = self.x.shape
        pull = np.diag(np.broadcast_to(lam, d))
        return np.linalg.solve(self.x.T @ self.x / n + RIDGE * np.eye(d) + pull, self.x.T @ self.y / n + pull @ center)


def problem():
    clients = linear_clients()
    naive = [Naive(*(part.numpy() for part in clients.train.of(i))) for i in range(len(clients))]
    return Linear(3, ridge=RIDGE), clients, naive, clients.weights().numpy()
