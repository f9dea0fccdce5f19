"""Parameters that stay as they are cost no gradient, and change nothing for the others."""

import pytest
import torch
from torch import nn

from mooring.algorithms.base import build
from mooring.core.cohort import Batch, Round
from mooring.core.optimizers import Optimizer
from mooring.core.solvers import Fixed, train
from mooring.core.task import head_coefficients
from mooring.tasks.network import NetworkTask
from tests.algorithms.test_fedrod import clients, convolution, perceptron
from tests.support.problems import settled_simulator


def normalized():
    body = (nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten())
    return nn.Sequential(*body, nn.Linear(32, 4)).double()


class Unfrozen(NetworkTask):
    """Computes all gradients and puts the fixed coefficients back."""

    def freeze(self, mask):
        return None


def cohort():
    return settled_simulator(build("fedavg", {"eta": 0.1, "batch": 0}), NetworkTask(perceptron), clients())[1].data


@pytest.mark.parametrize("rule", [Optimizer(), Optimizer("adamw", weight_decay=0.1)])
@pytest.mark.parametrize("part", ["head", "body"])
@pytest.mark.parametrize("make", [perceptron, convolution, normalized])
def test_training_with_frozen_parts_equals_putting_them_back(make, part, rule):
    data, task = cohort(), NetworkTask(make, ridge=0.1)
    mask = head_coefficients(task) if part == "head" else ~head_coefficients(task)
    mask[task.gradient_dim :] = False
    assert task.freeze(mask) is not None
    w = torch.stack([task.start(seed) for seed in range(3)])
    turn = Round(1, 1, 3, 3, 1.0, 0)
    after = [
        train(used, w, data, turn, 0.1, batch=4, steps=5, region=Fixed(mask, w), rule=rule)[0]
        for used in (task, Unfrozen(make, ridge=0.1))
    ]
    torch.testing.assert_close(after[0], after[1], rtol=1e-9, atol=1e-12)
    assert torch.equal(after[0][:, mask], w[:, mask]) and not torch.isclose(after[0], w)[:, ~mask].all()


@pytest.mark.parametrize("make", [perceptron, convolution])
def test_frozen_gradients_are_the_gradients_of_what_moves(make):
    data, task = cohort(), NetworkTask(make, ridge=0.1)
    batch, w = data.train.padded(), torch.stack([task.start(seed) for seed in range(3)])
    mask = ~head_coefficients(task)
    expected = torch.where(mask, 0.0, task.grad(w, batch))
    torch.testing.assert_close(task.freeze(mask).grad(w, batch), expected, rtol=1e-9, atol=1e-12)


def test_a_mask_that_cuts_through_a_parameter_is_not_frozen():
    task = NetworkTask(perceptron)
    mask = torch.zeros(task.dim, dtype=torch.bool)
    mask[3] = True
    assert task.freeze(mask) is None


def test_clients_without_rows_are_not_evaluated():
    data, task = cohort(), NetworkTask(convolution)
    batch, w = data.train.padded(), torch.stack([task.start(seed) for seed in range(3)])
    idle = Batch(batch.x, batch.y, batch.weight * torch.tensor([[1.0], [0.0], [1.0]]))
    expected = task.grad(w, batch)
    expected[1] = 0
    torch.testing.assert_close(task.grad(w, idle), expected, rtol=1e-9, atol=1e-12)
    idle.x[1] = torch.nan
    assert torch.equal(task.grad(w, idle)[1], torch.zeros(task.dim, dtype=torch.float64))
