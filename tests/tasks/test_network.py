"""Networks as tasks: stacked gradients equal each network's own, and what cannot work is said."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

from mooring.core.cohort import Batch
from mooring.core.errors import RequestError
from mooring.tasks.fused.perceptron_stacked import is_perceptron
from mooring.tasks.logistic import Logistic
from mooring.tasks.network import NetworkTask
from mooring.tasks.network_curvature import curve_by_difference


def net():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def batch(c=3, b=6, classes=3):
    rng = torch.Generator().manual_seed(0)
    weight = torch.full((c, b), 1 / b)
    weight[0, 4:] = 0
    weight[0] = weight[0] / weight[0].sum()
    return Batch(torch.randn(c, b, 4, generator=rng), torch.randint(0, classes, (c, b), generator=rng), weight)


@pytest.mark.parametrize("loss", ["cross_entropy", "half_square"])
def test_gradients_equal_each_networks_own(loss):
    task, rows = NetworkTask(net if loss == "cross_entropy" else lambda: nn.Linear(4, 1), loss), batch()
    rows = rows if loss == "cross_entropy" else rows._replace(y=rows.y.float())
    w = torch.stack([task.start(seed) for seed in range(3)])
    found, losses = task.grad(w, rows), task.loss(w, rows)
    for i in range(3):
        model = task.make()
        with torch.no_grad():
            for part, value in zip(model.parameters(), task.layers(w[i : i + 1]).values()):
                part.copy_(value[0])
        real = rows.weight[i] > 0
        output = model(rows.x[i, real])
        if loss == "cross_entropy":
            expected = nn.functional.cross_entropy(output, rows.y[i, real])
        else:
            expected = 0.5 * nn.functional.mse_loss(output[:, 0], rows.y[i, real])
        expected.backward()
        torch.testing.assert_close(losses[i], expected.detach())
        torch.testing.assert_close(found[i], torch.cat([p.grad.flatten() for p in model.parameters()]))


RELU = nn.ReLU()
PERCEPTRONS = {
    "flattened": lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)),
    "without biases": lambda: nn.Sequential(nn.Linear(4, 5, bias=False), RELU, nn.Linear(5, 5), RELU, nn.Linear(5, 3)),
    "named": lambda: nn.Sequential(
        OrderedDict(a=nn.Linear(4, 5), b=nn.Dropout(0.0), c=nn.Linear(5, 3), d=nn.Softplus())
    ),
    "one layer": lambda: nn.Sequential(nn.Linear(4, 3)),
}


@pytest.mark.parametrize("make", PERCEPTRONS.values(), ids=PERCEPTRONS)
@pytest.mark.parametrize("clients", [1, 3])
def test_gradients_written_out_equal_autograds(make, clients):
    task, rows = NetworkTask(make, ridge=0.1), batch(clients)
    assert task.is_perceptron
    rows = rows._replace(x=rows.x.unflatten(2, (2, 2))) if make is PERCEPTRONS["flattened"] else rows
    w = torch.stack([task.start(seed) for seed in range(clients)])
    found = task.grad(w, rows)
    task.is_perceptron = False
    torch.testing.assert_close(found, task.grad(w, rows))


def test_only_plain_rows_of_linear_layers_are_perceptrons():
    twice = nn.Linear(4, 4)
    assert not is_perceptron(nn.Sequential(twice, nn.ReLU(), twice))
    assert not is_perceptron(nn.Sequential(nn.Conv1d(1, 2, 3), nn.Flatten(), nn.Linear(4, 3)))
    assert not is_perceptron(nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))))
    assert not is_perceptron(nn.Linear(4, 3))


def test_a_linear_network_is_softmax_regression():
    """The same model as `Logistic`, up to the order of its parameters."""
    network, exact, rows = NetworkTask(lambda: nn.Linear(4, 3)), Logistic(4, 3, ridge=0.0, dtype=torch.float32), batch()
    w = torch.stack([network.start(seed) for seed in range(3)])
    layers = network.layers(w)
    same = torch.cat([layers["weight"].transpose(1, 2).flatten(1), layers["bias"]], 1)
    torch.testing.assert_close(network.loss(w, rows), exact.loss(same, rows))
    torch.testing.assert_close(network.predict(w, rows.x), exact.predict(same, rows.x))


def test_starts_follow_the_seed():
    task = NetworkTask(net)
    assert torch.equal(task.start(1), task.start(1)) and not torch.equal(task.start(1), task.start(2))


def test_curvature_equals_the_hessian():
    task, rows = NetworkTask(net), batch(c=1)
    w = task.start()[None].double()
    task64 = NetworkTask(lambda: net().double())
    rows = rows._replace(x=rows.x.double(), weight=rows.weight.double())
    full = torch.autograd.functional.hessian(
        lambda v: (rows.weight * task64.row_losses(task64.layers(v[None]), rows)).sum(), w[0]
    )
    found = task64.constants(rows, w, rounds=200).smooth[0]
    torch.testing.assert_close(found, torch.linalg.eigvalsh(full).abs().max(), rtol=1e-3, atol=1e-6)


def test_what_is_no_network_is_refused():
    with pytest.raises(RequestError, match="no parameters"):
        NetworkTask(lambda: nn.ReLU())
    with pytest.raises(RequestError, match="loss must be one of"):
        NetworkTask(net, "hinge")


def test_a_flat_loss_has_a_step_all_the_same():
    """Of absolute errors far from zero: the first step takes a tenth of the loss away, for the loss is linear there."""
    task, rows = NetworkTask(lambda: nn.Linear(4, 1), lambda output, y: (output[:, 0] - y).abs()), batch()
    rows = rows._replace(y=torch.full_like(rows.y, 100).float())
    w = torch.stack([task.start(seed) for seed in range(3)])
    smooth = task.constants(rows, w).smooth
    after = task.loss(w - task.grad(w, rows) / smooth[:, None], rows)
    torch.testing.assert_close(after, 0.9 * task.loss(w, rows), rtol=1e-4, atol=0)


@pytest.mark.parametrize("frozen", [False, True])
def test_curvature_by_differences_is_the_curvature(frozen):
    """Central differences in double precision against autograd's Hessian of each client."""
    make = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    make[0].requires_grad_(not frozen)
    task, rows = NetworkTask(lambda: make), batch()
    rows = Batch(rows.x.double(), rows.y, rows.weight.double())
    w = task.start()[None].expand(3, -1).contiguous()
    v = torch.nn.functional.normalize(
        torch.randn(3, task.dim, dtype=w.dtype, generator=torch.Generator().manual_seed(1))
    )
    found = curve_by_difference(task, w, rows, v)
    for i in range(3):
        mine = Batch(*(part[i : i + 1] for part in rows[:3]))
        hessian = torch.autograd.functional.hessian(
            lambda u, mine=mine: (mine.weight * task.row_losses(task.layers(u[None]), mine)).sum(), w[i]
        )
        # the remainder of a central difference is of the order of the step squared
        torch.testing.assert_close(found[i], hessian @ v[i], rtol=1e-3, atol=1e-4)


def test_one_after_another_is_what_stacking_gives():
    task, rows = (
        NetworkTask(lambda: nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 2, 2), nn.Flatten(), nn.Linear(6, 3))),
        batch(),
    )
    w = torch.stack([task.start(seed) for seed in range(3)])
    together = task.grad(w, rows), task.loss(w, rows), task.predict(w, rows.x)
    assert task.stacks
    task.stacks = False
    for one, other in zip((task.grad(w, rows), task.loss(w, rows), task.predict(w, rows.x)), together):
        torch.testing.assert_close(one, other)
