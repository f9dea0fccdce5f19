"""SCAFFOLD: the exact global minimiser, also when few take part and replies get lost."""

import pytest
import torch

from mooring.algorithms.base import build
from mooring.engines.simulator import Simulator
from mooring.tasks.linear import Linear
from tests.algorithms.lossy_simulator import LossySimulator, train
from tests.support.problems import linear_clients, simulate


def problem():
    """(task, clients, the minimiser of sum_i p_i L_i): clients of unequal curvature whose truths lie far apart."""
    task, clients = Linear(3, ridge=0.1), linear_clients(spread=2.0)
    rows, p = clients.train.full(task), clients.weights()
    hessian = torch.einsum("c,cij->ij", p, task.hessian(torch.zeros(5, 4, dtype=p.dtype), rows))
    return task, clients, torch.linalg.solve(hessian, p @ rows.moment)


def test_fedavg_with_local_steps_misses_the_minimiser():
    task, clients, best = problem()
    server, _ = train(build("fedavg", {"steps": 10}), task, clients, Simulator, 100)
    assert float((server.w - best).norm()) > 0.01


@pytest.mark.parametrize("exchange_of", [Simulator, LossySimulator])
@pytest.mark.parametrize("participation,rounds", [(1.0, 200), (0.4, 400)])
def test_reaches_the_minimiser(exchange_of, participation, rounds):
    task, clients, best = problem()
    server, _ = train(build("scaffold", {"steps": 10}), task, clients, exchange_of, rounds, participation)
    torch.testing.assert_close(server.w, best, rtol=0, atol=1e-5)
    torch.testing.assert_close(server.c, torch.zeros_like(server.c), rtol=0, atol=1e-5)


@pytest.mark.parametrize("exchange_of", [Simulator, LossySimulator])
def test_the_common_variate_is_the_mean_of_all_clients(exchange_of):
    task, clients, _ = problem()
    server, exchange = train(build("scaffold", {"steps": 10}), task, clients, exchange_of, 7, 0.6)
    own = exchange.states.take(torch.arange(5)).c
    torch.testing.assert_close(server.c, exchange.data.p @ own)
    assert float(own.norm()) > 0.1


def test_variates_are_mean_gradients_on_the_way():
    """With zero variates, (w - y)/(sum of steps) is the mean gradient, weighted by the decaying step sizes."""
    task, clients = Linear(3, ridge=0.1), linear_clients()
    fields = {"eta": 0.05, "decay": 0.5, "steps": 3}
    _, _, exchange = simulate(build("scaffold", fields), task, clients, rounds=1)
    rows, w = clients.train.full(task), torch.zeros(5, 4, dtype=torch.float64)
    total = 0.0
    mean = torch.zeros_like(w)
    for k in range(3):
        eta, g = 0.05 / (1 + 0.5 * k), task.grad(w, rows)
        mean, total, w = mean + eta * g, total + eta, w - eta * g
    torch.testing.assert_close(exchange.states.take(torch.arange(5)).c, mean / total)
