"""Table 2, equations: a few rounds of every algorithm equal a naive, loop-only transcription of its paper.

The transcriptions use numpy, one client and one row at a time, full batches and full participation, on half squared
losses with a ridge: L(w) = 1/(2n) sum_j (x_j'w + b - y_j)^2 + ridge/2 |w|^2.
"""

import numpy as np
import pytest
import torch

from mooring.algorithms.base import build, names
from tests.algorithms.naive import ETA, LAM, RIDGE, ROUNDS, STEPS, problem
from tests.problems import simulate


def naive_local(clients, p):
    return np.zeros(4), [c.prox(np.zeros(4), 0.2) for c in clients]


def naive_local_sgd(clients, p):
    models = [np.zeros(4) for _ in clients]
    for _ in range(ROUNDS * STEPS):
        models = [v - ETA * (c.grad(v) + 0.2 * v) for c, v in zip(clients, models)]
    return np.zeros(4), models


def naive_global(clients, p):
    h = sum(q * c.x.T @ c.x / len(c.y) for q, c in zip(p, clients)) + RIDGE * np.eye(4)
    w = np.linalg.solve(h, sum(q * c.x.T @ c.y / len(c.y) for q, c in zip(p, clients)))
    return w, [w] * len(clients)


def naive_fedavg(clients, p):
    w = np.zeros(4)
    for _ in range(ROUNDS):
        total = np.zeros(4)
        for q, c in zip(p, clients):
            v = w.copy()
            for _ in range(STEPS):
                v = v - ETA * c.grad(v)
            total += q * (v - w)
        w = w + 0.9 * total
    return w, [w] * len(clients)


def naive_fedprox_shared(clients, p):
    w = np.zeros(4)
    for _ in range(ROUNDS):
        w = sum(q * c.prox(w, LAM) for q, c in zip(p, clients))
    return w, [w] * len(clients)


def naive_one_stage(clients, p, gamma=2.0):
    w = np.zeros(4)
    models = [np.zeros(4) for _ in clients]
    for _ in range(ROUNDS):
        pull = np.zeros(4)
        for i, (q, c) in enumerate(zip(p, clients)):
            for _ in range(STEPS):
                models[i] = models[i] - ETA * (c.grad(models[i]) + LAM * (models[i] - w))
            pull += q * LAM * (w - models[i])
        w = w - gamma * pull
    return w, models


MOOR = {"per_client": [0.1, 0.2, 0.3, 0.4, 0.5], "per_coefficient": [1.0, 2.0, 3.0, 4.0]}


def naive_one_stage_moor(clients, p, gamma=0.8):
    """Stationarity of the objective with lam_i: w = sum p_i lam_i v_i / sum p_i lam_i, relaxed by gamma."""
    lam = [a * np.array(MOOR["per_coefficient"]) for a in MOOR["per_client"]]
    w = np.zeros(4)
    for _ in range(ROUNDS):
        models = [c.prox(w, stiff) for c, stiff in zip(clients, lam)]
        target = sum(q * s * v for q, s, v in zip(p, lam, models)) / sum(q * s for q, s in zip(p, lam))
        w = w + gamma * (target - w)
    return w, models


# name, fields, transcription -> (common model, every client's deployed model)
EQUATIONS = [
    ("local", {"ridge": 0.2}, naive_local),
    ("local", {"ridge": 0.2, "inner": "sgd", "eta": ETA, "steps": STEPS}, naive_local_sgd),
    ("global", {}, naive_global),
    ("fedavg", {"eta": ETA, "steps": STEPS, "server_step": 0.9}, naive_fedavg),
    ("fedavg", {"eta": ETA, "steps": STEPS, "server_step": 0.9, "aggregation": "elastic"}, naive_fedavg),
    ("fedprox_shared", {"lam": LAM}, naive_fedprox_shared),
    ("fedprox_one_stage", {"lam": LAM, "gamma": 2.0, "inner": "sgd", "eta": ETA, "steps": STEPS}, naive_one_stage),
    ("fedprox_one_stage", {"lam": MOOR, "gamma": 0.8}, naive_one_stage_moor),
]


def test_every_algorithm_has_a_row():
    assert {name for name, _, _ in EQUATIONS} == set(names())


@pytest.mark.parametrize("name,fields,transcription", EQUATIONS, ids=lambda v: v if isinstance(v, str) else "")
def test_equals_the_papers_equations(name, fields, transcription):
    task, clients, naive, p = problem()
    server, models, _ = simulate(build(name, fields), task, clients, rounds=ROUNDS)
    w, expected = transcription(naive, p)
    torch.testing.assert_close(server.w, torch.from_numpy(w), rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(models, torch.from_numpy(np.stack(expected)), rtol=1e-9, atol=1e-10)
