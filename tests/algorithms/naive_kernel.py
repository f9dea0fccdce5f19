"""Transcriptions of `kernel`'s recursions: rounds one by one, minibatches row by row, Eq. 23 round by round."""

import math

import numpy as np

from tests.algorithms.naive import ETA, LAM, RIDGE, ROUNDS, STEPS

BATCH = 3
SIGMA, NORM = 0.3, 1.5
MANY = 4000  # rounds that stand for infinity


def everyone(w, clients):
    return w, [w] * len(clients)


def averaged(stay, rounds):
    """The transcription of `rounds` rounds in which client c takes the global model w to stay(c, w)."""

    def run(clients, p):
        w = np.zeros(4)
        for _ in range(rounds):
            w = sum(q * stay(c, w) for q, c in zip(p, clients))
        return everyone(w, clients)

    return run


def gradient_steps(c, w):
    for _ in range(STEPS):
        w = w - ETA * c.grad(w)
    return w


def one_step(c, w):
    return w - ETA * c.grad(w)


def prox(c, w):
    return c.prox(w, LAM)


def batches(c):
    return [list(range(a, min(a + BATCH, len(c.y)))) for a in range(0, len(c.y), BATCH)]


def minibatch_steps(per):
    """STEPS passes; a batch's loss is its sum over 2 n_i (client) or 2 BATCH (batch), with its share of the ridge."""

    def stay(c, w):
        divisor = len(c.y) if per == "client" else min(BATCH, len(c.y))
        for _ in range(STEPS):
            for batch in batches(c):
                g = sum(((c.x[j] @ w - c.y[j]) * c.x[j] + RIDGE * w) / divisor for j in batch)
                w = w - ETA * g
        return w

    return stay


def minibatch_prox(per):
    """One pass; every solve is centred at the last one's solution."""

    def stay(c, w):
        divisor = len(c.y) if per == "client" else min(BATCH, len(c.y))
        for batch in batches(c):
            left, right = LAM * np.eye(4), LAM * w
            for j in batch:
                left = left + (np.outer(c.x[j], c.x[j]) + RIDGE * np.eye(4)) / divisor
                right = right + c.x[j] * c.y[j] / divisor
            w = np.linalg.solve(left, right)
        return w

    return stay


def stopped(stay, eta, steps):
    """Rounds while Eq. 23, corrected, holds."""

    def run(clients, p):
        x = np.concatenate([c.x for c in clients])
        eigenvalues = np.linalg.eigvalsh(x @ x.T / len(x))
        w, t = np.zeros(4), 0
        while True:
            u = eta * (t + 1) * steps
            rad = math.sqrt(sum(min(max(v, 0), 1 / u) for v in eigenvalues) / len(x))
            if rad > NORM / (math.sqrt(2 * math.e) * SIGMA * u):
                return everyone(w, clients)
            w, t = sum(q * stay(c, w) for q, c in zip(p, clients)), t + 1

    return run


FEDAVG = {"eta": ETA, "steps": STEPS}
STOP = {"rounds_exact": "stop", "sigma": SIGMA, "norm": NORM}

EQUATIONS = [
    ("kernel_fedavg", {**FEDAVG, "rounds_exact": ROUNDS}, averaged(gradient_steps, ROUNDS)),
    ("kernel_fedavg", {**FEDAVG, "rounds_exact": "limit"}, averaged(gradient_steps, MANY)),
    ("kernel_fedavg", {"eta": ETA, "steps": 1, "rounds_exact": 7}, averaged(one_step, 7)),
    ("kernel_fedavg", {**FEDAVG, **STOP}, stopped(gradient_steps, ETA, STEPS)),
    ("kernel_fedprox", {"lam": LAM, "rounds_exact": ROUNDS}, averaged(prox, ROUNDS)),
    ("kernel_fedprox", {"lam": LAM, "rounds_exact": "limit"}, averaged(prox, MANY)),
    ("kernel_fedprox", {"lam": LAM, **STOP}, stopped(prox, 1 / LAM, 1)),
]
for per in ("client", "batch"):
    small = {"batch": BATCH, "per": per}
    for rounds, count in ((ROUNDS, ROUNDS), ("limit", MANY // 4)):
        exact = {**small, "rounds_exact": rounds}
        EQUATIONS.append(("kernel_fedavg", {**FEDAVG, **exact}, averaged(minibatch_steps(per), count)))
        EQUATIONS.append(("kernel_fedprox", {"lam": LAM, **exact}, averaged(minibatch_prox(per), count)))
