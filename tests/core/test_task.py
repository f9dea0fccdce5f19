"""Layouts tell where the parts of w lie; metrics tell their unit and direction."""

import pytest
import torch
from torch import nn

from mooring.core.cohort import Batch
from mooring.core.task import find_metric, head_mask, layer_mask, layout_of
from mooring.tasks.linear import Linear
from mooring.tasks.linear_losses import Poisson
from mooring.tasks.logistic import Logistic
from mooring.tasks.network import NetworkTask

TASKS = {
    "linear": Linear(3),
    "no intercept": Linear(3, intercept=False),
    "two classes": Logistic(3),
    "three classes": Logistic(3, classes=3),
    "counts": Poisson(3),
    "network": NetworkTask(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()),
}


@pytest.mark.parametrize("name", TASKS)
def test_the_parts_cover_w_once_and_in_order(name):
    layout = TASKS[name].layout
    assert [part.start for part in layout] == [sum(p.size for p in layout[:k]) for k in range(len(layout))]
    assert sum(part.size for part in layout) == TASKS[name].dim


@pytest.mark.parametrize(("name", "size"), [("linear", 1), ("three classes", 3), ("network", 10)])
def test_the_head_is_the_last_layer(name, size):
    mask = head_mask(TASKS[name].layout)
    assert int(mask.sum()) == size and bool(mask[-size:].all())
    assert bool(head_mask(TASKS[name].layout, 99).all()) and not bool(head_mask(TASKS[name].layout, 0).any())


@pytest.mark.parametrize("name", ["linear", "two classes", "three classes", "counts"])
def test_the_part_called_intercept_shifts_the_answer_at_zero(name):
    task = TASKS[name]
    x = torch.zeros(1, 1, 3, dtype=torch.float64)
    intercept = layer_mask(task.layout, ("intercept",))
    w = torch.arange(1.0, task.dim + 1, dtype=torch.float64)[None]
    at_zero = task.predict(w * intercept, x)
    torch.testing.assert_close(task.predict(w, x), at_zero)
    assert not torch.allclose(at_zero, task.predict(torch.zeros_like(w), x))


def test_a_network_is_rebuilt_from_its_layout():
    task = TASKS["network"]
    w = task.start(1)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    net.load_state_dict({part.name: w[part.place].view(part.shape) for part in task.layout})
    x = torch.randn(5, 3, dtype=torch.float64)
    torch.testing.assert_close(torch.softmax(net(x), -1), task.predict(w[None], x[None])[0])


@pytest.mark.parametrize("name", ["linear", "two classes", "counts"])
def test_risk_per_loss_is_how_the_reported_risk_follows_the_loss(name):
    task = TASKS[name]
    g = torch.Generator().manual_seed(0)
    x = torch.randn(1, 6, 3, generator=g, dtype=torch.float64)
    y = torch.tensor([[0.0, 1, 0, 1, 1, 0]], dtype=torch.float64)
    batch = Batch(x, y if name != "two classes" else y.long(), torch.full((1, 6), 1 / 6, dtype=torch.float64))
    a, b = (torch.randn(1, task.dim, generator=g, dtype=torch.float64) for _ in range(2))
    penalty = task.ridge / 2 * ((a**2).sum() - (b**2).sum())
    change = task.loss(a, batch) - task.loss(b, batch) - penalty
    torch.testing.assert_close(task.risk(a, batch) - task.risk(b, batch), task.risk_per_loss * change)


def test_metrics_know_their_unit_and_direction():
    assert (
        find_metric("mse").unit_power == 2
        and find_metric("rmse").unit_power == 1
        and find_metric("log-loss").unit_power == 0
    )
    assert find_metric("accuracy").better == "higher" and find_metric("something new").better == "lower"


def test_parts_of_one_layer_go_together():
    layout = layout_of({"a.weight": (2, 2), "a.bias": (2,), "b.weight": (1, 2)}, {"a.weight": "a", "a.bias": "a"})
    assert layer_mask(layout, ("a",)).tolist() == [True] * 6 + [False] * 2


class Doubled(Logistic):
    """Twice the loss of its parent."""

    def loss(self, w, batch):
        return 2 * super().loss(w, batch)

    def grad(self, w, batch):
        return 2 * super().grad(w, batch)

    def hessian(self, w, batch):
        return 2 * super().hessian(w, batch)


def test_a_task_that_changes_the_loss_inherits_no_shortcut_of_its_parent():
    torch.manual_seed(0)
    batch = Batch(torch.randn(2, 7, 3).double(), torch.randint(0, 2, (2, 7)), torch.full((2, 7), 1 / 7).double())
    task, w = Doubled(3), torch.randn(2, 4).double()
    for part, own in zip(task.derivatives(w, batch), (task.loss, task.grad, task.hessian)):
        torch.testing.assert_close(part, own(w, batch))
    assert task.step_in_place() is None and Logistic(3).step_in_place() is not None
