"""Ditto: at convergence the personal models are the proximal points of FedAvg's model."""

import pytest
import torch

from mooring.algorithms.base import build
from mooring.core.penalty import penalty_rows
from tests.support.problems import PROBLEMS, simulate


@pytest.mark.parametrize("lam", [0.2, 3.0, [0.1, 0.2, 0.5, 1.0, 2.0]])
def test_personal_models_are_proximal_points(lam):
    task, clients = PROBLEMS["linear"]()
    algorithm = build("ditto", {"lam": lam})
    server, models, exchange = simulate(algorithm, task, clients, rounds=40)
    pull = penalty_rows(algorithm.lam, torch.arange(5), server.w)
    expected = task.prox(server.w.expand(5, -1), pull, exchange.data.train.full(task))
    torch.testing.assert_close(models, expected, rtol=1e-7, atol=1e-8)
    assert float((models - server.w).norm()) > 0.1


def test_the_common_model_is_fedavgs():
    task, clients = PROBLEMS["logistic"]()
    fields = {"batch": 4, "steps": 3}
    ditto, _, _ = simulate(build("ditto", {**fields, "lam": 5.0}), task, clients, participation=0.6)
    fedavg, _, _ = simulate(build("fedavg", fields), task, clients, participation=0.6)
    assert torch.equal(ditto.w, fedavg.w)
