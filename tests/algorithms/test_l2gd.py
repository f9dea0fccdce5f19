"""L2GD: one coin for all, the mean in step with the clients, and the minimiser of one-stage FedProx."""

import numpy as np
import pytest
import torch

from mooring.algorithms.base import build
from mooring.core.cohort import Round
from mooring.core.errors import RequestError
from mooring.engines.simulator import Simulator
from tests.algorithms.lossy_simulator import LossySimulator, train
from tests.support.problems import PROBLEMS, settled_simulator, simulate


def test_run_lengths_are_those_of_a_coin():
    """Runs of heads end with probability 1 - q, runs of tails with probability q."""
    algorithm = build("l2gd", {"q": 0.3})
    runs = np.array([algorithm.run_lengths(Round(t, 1, 5, 5, 1.0, 0)) for t in range(1, 1501)])
    assert runs.min() == 1
    for length, stop in zip(runs.T, (0.7, 0.3)):
        assert abs(length.mean() * stop - 1) < 4 * np.sqrt((1 - stop) / len(length))  # four standard errors
        assert abs((length == 1).mean() - stop) < 4 * np.sqrt(stop * (1 - stop) / len(length))
    assert abs(np.corrcoef(runs.T)[0, 1]) < 4 / np.sqrt(len(runs))


def test_runs_follow_the_seed_and_the_round():
    algorithm = build("l2gd", {"q": 0.3})
    runs = [[algorithm.run_lengths(Round(t, 1, 5, 5, 1.0, seed)) for t in range(1, 20)] for seed in (0, 0, 1)]
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize("exchange_of", [Simulator, LossySimulator])
def test_the_common_model_is_the_mean_of_the_personal_ones(exchange_of):
    task, clients = PROBLEMS["linear"]()
    server, exchange = train(build("l2gd", {"lam": 0.5}), task, clients, exchange_of, 20)
    v = exchange.states.take(torch.arange(5)).v
    torch.testing.assert_close(server.w, exchange.data.p @ v)
    assert float((v - server.w).norm()) > 0.1


def test_hovers_around_the_minimiser_of_one_stage_fedprox():
    """The coin leaves a noise that shrinks with eta; the models of other lam lie farther away."""
    task, clients = PROBLEMS["linear"]()
    _, best, _ = simulate(build("fedprox_personal", {"lam": 0.5}), task, clients, rounds=100)
    _, other, _ = simulate(build("fedprox_personal", {"lam": 0.25}), task, clients, rounds=100)
    _, models, _ = simulate(build("l2gd", {"lam": 0.5, "q": 0.5, "eta": 0.02}), task, clients, rounds=400)
    assert float((models - best).norm()) < 0.04 * float(best.norm())
    assert float((other - best).norm()) > 0.08 * float(best.norm())


def test_auto_is_the_papers_choice():
    """q = lam/(lam + L) and eta = 1/(2 max(L/(1 - q), lam/q)) = 1/(2 (L + lam))."""
    task, clients = PROBLEMS["linear"]()
    algorithm, exchange, _ = settled_simulator(build("l2gd", {"lam": 2.0}), task, clients)
    smooth = float(exchange.client_statistics(task.start()).smooth.max())
    assert algorithm.q == pytest.approx(2 / (2 + smooth))
    assert algorithm.eta == pytest.approx(1 / (2 * (smooth + 2)))


def test_everyone_must_take_part():
    task, clients = PROBLEMS["linear"]()
    with pytest.raises(RequestError, match="needs every client"):
        simulate(build("l2gd", {}), task, clients, participation=0.5)


@pytest.mark.parametrize("fields,what", [({"q": 0}, "strictly between 0 and 1"), ({"lam": [1, 2]}, "must be a number")])
def test_wrong_fields_are_refused(fields, what):
    with pytest.raises(RequestError, match=what):
        build("l2gd", fields)
