"""Algorithms with a named personal part, on a network with batch normalization."""

import pytest
import torch
from torch import nn

from mooring.algorithms.base import build
from mooring.core.errors import RequestError
from mooring.tasks.network import NetworkTask
from tests.support.problems import logistic_clients, simulate

WORK = {"eta": 0.1, "batch": 4, "epochs": 1}


def make():
    return nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3)).double()


PARTS = {"fedper": ("3.",), "lg_fedavg": ("0.", "1."), "fedbn": ("1.",)}


@pytest.mark.parametrize("name", PARTS)
def test_the_named_part_differs_by_client_and_the_others_are_shared(name):
    task, clients = NetworkTask(make), logistic_clients(classes=3)
    server, models, _ = simulate(build(name, WORK), task, clients, rounds=3)
    for block in task.layout:
        own, shared = models[:, block.place], server.w[block.place]
        if block.name.startswith(PARTS[name]):
            assert block.name.endswith("num_batches_tracked") or not torch.isclose(own[0], own[1]).all(), block.name
        else:
            assert torch.equal(own, shared.expand_as(own)), block.name
    moved = ~torch.isclose(server.w, task.start(0))
    personal = torch.zeros_like(moved)
    for block in task.layout:
        personal[block.place] = block.name.startswith(PARTS[name])
    assert bool(moved[~personal].any()) and not bool(moved[personal].any())


def test_a_model_without_normalization_has_no_use_for_fedbn():
    task = NetworkTask(lambda: nn.Linear(3, 3).double())
    with pytest.raises(RequestError, match="has no normalization layer to stay with clients"):
        simulate(build("fedbn", WORK), task, logistic_clients(classes=3))


def test_bodies_and_heads_that_are_trained_in_turn():
    task = NetworkTask(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double())
    clients = logistic_clients(classes=3)
    server, models, _ = simulate(build("fedrep", {**WORK, "head_epochs": 2}), task, clients, rounds=3)
    body = torch.zeros(task.dim, dtype=torch.bool)
    body[: 3 * 4 + 4] = True
    assert torch.equal(models[:, body], server.w[body].expand(len(models), -1))
    assert not torch.isclose(models[0, ~body], models[1, ~body]).any()
    babu, tuned, _ = simulate(build("fedbabu", {**WORK, "tune": "body"}), task, clients, rounds=3)
    assert torch.equal(babu.w[~body], task.start(0)[~body]) and torch.equal(
        tuned[:, ~body], babu.w[~body].expand(len(tuned), -1)
    )
