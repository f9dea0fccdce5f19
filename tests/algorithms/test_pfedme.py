"""pFedMe: personal models are proximal points, and the global model moves on the Moreau envelopes."""

import pytest
import torch

from mooring.algorithms.base import build
from mooring.core.cohort import Round
from mooring.core.errors import RequestError
from mooring.engines import local_update
from mooring.tasks.network import NetworkTask
from tests.support.problems import PROBLEMS, settled_simulator, simulate


@pytest.mark.parametrize("problem", ["linear", "logistic"])
@pytest.mark.parametrize("steps", [1, 5])
def test_exact_inner_solves_are_proximal_points(problem, steps):
    """v_i = prox_i(w_i) at the w_i before the last step, which w_i - eta lam (w_i - v_i) = the copy sent tells."""
    task, clients = PROBLEMS[problem]()
    lam, eta = 0.7, 0.3
    fields = {"lam": lam, "eta": eta, "steps": steps, "inner": "exact"}
    algorithm, exchange, server = settled_simulator(build("pfedme", fields), task, clients)
    everyone = torch.arange(5)
    turn = Round(1, 1, 5, 5, 1.0, 0)
    client, change = local_update.client_update(
        algorithm, task, server, exchange.states.take(everyone), exchange.data, turn
    )
    center = (server.w + change - eta * lam * client.v) / (1 - eta * lam)
    slope = task.grad(client.v, exchange.data.train.full(task)) + lam * (client.v - center)
    assert float(slope.norm(dim=1).max()) < 1e-8


def test_closed_form_on_quadratics():
    """One local round: v_i = (H_i + lam)^-1 (X'y/n + lam w)."""
    task, clients = PROBLEMS["linear"]()
    _, models, _ = simulate(build("pfedme", {"lam": 0.7, "eta": 0.3, "steps": 1, "inner": "exact"}), task, clients, 1)
    for i in range(5):
        x, y = clients.train.of(i)
        x = torch.cat([x, torch.ones_like(x[:, :1])], 1)
        h = x.T @ x / len(y) + (task.ridge + 0.7) * torch.eye(4, dtype=x.dtype)
        torch.testing.assert_close(models[i], torch.linalg.solve(h, x.T @ y / len(y)))  # w = 0


def test_many_inner_steps_are_exact():
    task, clients = PROBLEMS["linear"]()
    fields = {"lam": 0.7, "eta": 0.3, "steps": 3}
    one, many, _ = simulate(build("pfedme", {**fields, "inner_steps": 600}), task, clients)
    other, exact, _ = simulate(build("pfedme", {**fields, "inner": "exact"}), task, clients)
    torch.testing.assert_close(many, exact, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(one.w, other.w, rtol=1e-9, atol=1e-10)


def test_single_local_rounds_minimise_the_envelopes():
    task, clients = PROBLEMS["linear"]()
    fields = {"lam": 0.7, "eta": 1 / 0.7, "steps": 1, "inner": "exact"}
    server, models, exchange = simulate(build("pfedme", fields), task, clients, rounds=200)
    torch.testing.assert_close(server.w, exchange.data.p @ models, rtol=1e-8, atol=1e-8)


def test_exact_needs_a_prox():
    _, clients = PROBLEMS["linear"]()
    network = NetworkTask(lambda: torch.nn.Linear(3, 1, dtype=torch.float64), loss="half_square")
    with pytest.raises(RequestError, match="no exact prox; set inner = 'descent'"):
        settled_simulator(build("pfedme", {"inner": "exact"}), network, clients)
