"""Localized FedAvg and SCAFFOLD: what is fine-tuned, with which draws, and that training does not notice."""

import pytest
import torch

from mooring.algorithms.base import build
from mooring.core.cohort import Round
from mooring.engines import local_update
from tests.support.problems import PROBLEMS, simulate


@pytest.mark.parametrize("fields", [{"batch": 4, "decay": 0.2}, {"batch": 4, "epochs": 2, "tune_epochs": 2}])
def test_tuning_is_the_clients_copy_in_the_next_round(fields):
    """apfl, Section 5: the localized model is the client's copy of the global model just before it is averaged."""
    task, clients = PROBLEMS["logistic"]()
    algorithm = build("fedavg_finetune", {"eta": 0.1, "steps": 3, "tune_steps": 3, **fields})
    server, models, exchange = simulate(algorithm, task, clients, rounds=2)
    _, change = local_update.client_update(
        algorithm, task, server, exchange.states.take(torch.arange(5)), exchange.data, Round(3, 3, 5, 5, 1.0, 0)
    )
    torch.testing.assert_close(models, server.w + change, rtol=1e-13, atol=1e-13)


def test_the_own_copy_is_that_of_the_last_stay():
    """apfl, Section 5: evaluated right after the local steps of a round, from the global model before it."""
    task, clients = PROBLEMS["logistic"]()
    fields = {"eta": 0.1, "batch": 4, "steps": 3, "decay": 0.2}
    before, _, _ = simulate(build("fedavg", fields), task, clients, rounds=2)
    algorithm = build("fedavg_finetune", {**fields, "output": "own"})
    _, models, exchange = simulate(algorithm, task, clients, rounds=3)
    _, change = local_update.client_update(
        algorithm, task, before, exchange.states.take(torch.arange(5)), exchange.data, Round(3, 3, 5, 5, 1.0, 0)
    )
    torch.testing.assert_close(models, before.w + change, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("name,plain", [("fedavg_finetune", "fedavg"), ("scaffold_finetune", "scaffold")])
def test_tuning_does_not_change_the_training(name, plain):
    task, clients = PROBLEMS["logistic"]()
    fields = {"eta": 0.1, "batch": 4, "steps": 3}
    tuned, models, _ = simulate(build(name, {**fields, "tune_steps": 4}), task, clients)
    common, _, _ = simulate(build(plain, fields), task, clients)
    assert torch.equal(tuned.w, common.w)
    rows = clients.train.full(task)
    assert (task.loss(models, rows) < task.loss(common.w.expand(5, -1), rows)).all()


def test_many_steps_forget_the_common_model():
    task, clients = PROBLEMS["linear"]()
    _, models, exchange = simulate(build("fedavg_finetune", {"tune_steps": 3000}), task, clients)
    torch.testing.assert_close(models, task.solve(exchange.data.train.full(task)), rtol=1e-6, atol=1e-8)
