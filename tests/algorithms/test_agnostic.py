"""Agnostic APFL (Eq. 8): a global model for the worst mixture of clients."""

import numpy as np
import pytest
import torch

from mooring.algorithms.apfl import APFL, project_simplex
from mooring.core.errors import RequestError
from mooring.data.clients import from_arrays
from mooring.engines.simulate import simulate
from mooring.engines.training_state import TrainingPlan
from mooring.tasks.linear import Linear
from tests.support.problems import PROBLEMS

STEPS, ETA, ASCENT = 2, 0.05, 0.4


def clients_at(centers, sizes):
    """Local means: L_i(w) = 1/2 (w - c_i)^2 plus a constant."""
    ys = [c + np.tile([-1.0, 1.0], n // 2) for c, n in zip(centers, sizes)]
    return from_arrays([np.ones((n, 1)) for n in sizes], ys, kind="regression")


def run(clients, rounds, task=None, **fields):
    task = task or Linear(1, intercept=False)
    work = {"alpha": 0.5, "adapt": "no", "eta": ETA, "decay": 0.0, "steps": STEPS, "batch": 0}
    return simulate(APFL(**work | fields), task, clients, TrainingPlan(rounds, evaluate_every=rounds), resolved=True)


def test_rounds_equal_a_transcription_in_loops():
    centers, sizes = (0.0, 1.0, 5.0), (8, 4, 4)
    done = run(clients_at(centers, sizes), 5, agnostic=ASCENT)
    p = np.array(sizes) / sum(sizes)
    w, q = 0.0, None
    for _ in range(5):
        weight = p if q is None else q
        losses = np.array([np.mean((w - (c + np.array([-1, 1]))) ** 2) / 2 for c in centers])
        changes = []
        for c in centers:
            own = w
            for _ in range(STEPS):
                own -= ETA * (own - c)
            changes.append(own - w)
        w += weight @ np.array(changes) / weight.sum()
        q = brute_projection((np.full(3, 1 / 3) if q is None else q) + ASCENT * losses)
    assert float(done.server.w) == pytest.approx(w)
    np.testing.assert_allclose(done.server.q, q, atol=1e-12)


def brute_projection(values):
    """By bisection on the shift."""
    low, high = values.min() - 1, values.max()
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.maximum(values - middle, 0).sum() > 1 else (low, middle)
    return np.maximum(values - low, 0)


def test_the_worst_client_is_better_off():
    """Nine clients at 0 and one at 4: the mean risk is least at 0.4, the worst one at 2, where all losses are equal."""
    clients = clients_at((0.0,) * 9 + (4.0,), (4,) * 10)
    plain, agnostic = run(clients, 400), run(clients, 400, agnostic=0.02)
    assert float(plain.server.w) == pytest.approx(0.4, abs=1e-3)
    assert float(agnostic.server.w) == pytest.approx(2.0, abs=0.1)
    assert float(agnostic.server.q[-1]) == pytest.approx(0.5, abs=0.05)


def test_without_ascent_it_is_apfl():
    task, clients = PROBLEMS["softmax"]()
    plan = TrainingPlan(3, 0.6, evaluate_every=3)
    plain, same = (simulate(APFL(eta=0.1, batch=4, **more), task, clients, plan) for more in ({}, {"agnostic": 0.0}))
    assert torch.equal(plain.models(), same.models()) and same.server.q is None


def test_sampled_clients():
    task, clients = PROBLEMS["logistic"]()
    done = simulate(APFL(eta=0.1, batch=4, agnostic=0.5), task, clients, TrainingPlan(6, 0.4, evaluate_every=6))
    assert float(done.server.q.sum()) == pytest.approx(1) and bool((done.server.q >= 0).all())
    assert bool(torch.isfinite(done.models()).all())


def test_averages_are_refused():
    with pytest.raises(RequestError, match="set agnostic = 0"):
        APFL(adapt="no", output="average", agnostic=0.1)


@pytest.mark.parametrize("values", [[0.2, 0.3, 0.5], [3.0, 1.0, 0.0], [-1.0, -1.0, -1.0, 2.5], [0.4]])
def test_projection_onto_the_simplex(values):
    found = project_simplex(torch.tensor(values, dtype=torch.float64)).numpy()
    np.testing.assert_allclose(found, brute_projection(np.array(values)), atol=1e-12)
