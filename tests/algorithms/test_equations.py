"""Table 2, equations: a few rounds of every algorithm equal a naive, loop-only transcription of its paper.

The transcriptions use numpy, one client and one row at a time, full batches and full participation, on half squared
losses with a ridge: L(w) = 1/(2n) sum_j (x_j'w + b - y_j)^2 + ridge/2 |w|^2.
"""

import numpy as np
import pytest
import torch

from mooring.algorithms.base import build, names
from tests.algorithms import naive_fedprox as fedprox
from tests.algorithms import naive_kernel as kernel
from tests.algorithms import naive_personal as personal
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
    ("apfl", {"eta": ETA, "steps": STEPS, **personal.APFL_ADAPTIVE}, personal.naive_apfl),
    ("apfl", {"eta": ETA, "steps": STEPS, **personal.APFL_AVERAGE}, personal.naive_apfl_average),
    ("scaffold", {"eta": ETA, "steps": STEPS, "server_step": 0.9}, personal.naive_scaffold),
    (
        "fedavg_localized",
        {"eta": ETA, "steps": STEPS, "server_step": 0.9, "tune_steps": 2},
        personal.tuned(naive_fedavg, 2),
    ),
    (
        "scaffold_localized",
        {"eta": ETA, "steps": STEPS, "server_step": 0.9, "tune_epochs": 5},
        personal.tuned(personal.naive_scaffold, 5),
    ),
    ("ditto", {"lam": LAM, "eta": ETA, "personal_eta": 0.04, "steps": STEPS}, personal.naive_ditto),
    ("pfedme", personal.PFEDME, personal.naive_pfedme),
    ("pfedme", {**personal.PFEDME, "inner": "exact"}, personal.naive_pfedme_exact),
    ("per_fedavg", {"inner_eta": 0.03, "eta": ETA, "steps": STEPS, "tune_steps": 2}, personal.naive_per_fedavg),
    (
        "per_fedavg",
        {"inner_eta": 0.03, "eta": ETA, "steps": STEPS, "tune_steps": 2, "variant": "first-order"},
        personal.naive_per_fedavg_first_order,
    ),
    ("l2gd", {"lam": LAM, "q": personal.Q, "eta": ETA}, personal.naive_l2gd),
    ("fedprox_two_stage", fedprox.TWO_STAGE, fedprox.naive_two_stage),
    ("fedprox_two_stage", fedprox.INVERSE, fedprox.naive_two_stage_inverse),
    ("fedprox_shared", fedprox.SHARED_THEORY | {"eta": ETA}, fedprox.naive_shared_theory),
    ("fedmspp", {"lam": LAM, "batch": 0}, naive_fedprox_shared),
    (
        "fedmspp",
        {"lam": LAM, "batch": 0, "inner": "descent", "eta": ETA, "steps": STEPS, "tol": 0.4},
        fedprox.naive_mspp,
    ),
    ("dichotomous", {**fedprox.KNOWN_R, "radius": 0.5}, fedprox.naive_common),
    ("dichotomous", {**fedprox.KNOWN_R, "radius": 2.0}, fedprox.naive_alone),
    *kernel.EQUATIONS,
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
