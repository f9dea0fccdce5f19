"""FedRoD on networks equals a plain torch loop with two heads; one pass through the body serves both where it can."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mooring.algorithms.base import build
from mooring.core.cohort import Round
from mooring.core.costs import CostMeter, count_costs
from mooring.data.clients import from_arrays
from mooring.engines import local_update
from mooring.tasks.network import NetworkTask
from mooring.tasks.two_heads import add_personal_head
from tests.support.problems import settled_simulator

ETA, STEPS, CLASSES, M = 0.2, 3, 4, 3


def perceptron():
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 5), nn.Tanh(), nn.Linear(5, CLASSES)).double()


def convolution():
    body = (nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    return nn.Sequential(*body, nn.Linear(8, CLASSES)).double()


def scaled():
    """The network's output is not the last layer's: both heads need a pass of their own."""
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 5), nn.Tanh(), nn.Linear(5, CLASSES), nn.Hardtanh(-9, 9)).double()


class Dropped(nn.Module):
    """Dropout in front of the head, which both heads see alike."""

    def __init__(self):
        super().__init__()
        self.body, self.drop, self.head = nn.Linear(36, 5), nn.Dropout(0.5), nn.Linear(5, CLASSES)

    def forward(self, x):
        return self.head(self.drop(torch.tanh(self.body(x.flatten(1)))))


def clients():
    generator = torch.Generator().manual_seed(1)
    sizes = [9, 12, 7]
    xs = [torch.randn(n, 1, 6, 6, generator=generator, dtype=torch.float64).numpy() for n in sizes]
    ys = [(torch.arange(n) % (CLASSES - (i == 0))).numpy() for i, n in enumerate(sizes)]
    return from_arrays(xs, ys, kind="classes", dtype=torch.float64)


def plain_update(make, w, h, x, y, balanced):
    """The change of w and the personal head after the steps of torch on all rows."""
    net, own = make(), make()
    nn.utils.vector_to_parameters(w.clone(), net.parameters())
    nn.utils.vector_to_parameters(h.clone(), own.parameters())
    place = next(i for i in reversed(range(len(net))) if isinstance(net[i], nn.Linear))
    body, generic, tail, personal = net[:place], net[place], net[place + 1 :], own[place]
    prior = torch.bincount(y, minlength=CLASSES).double().clamp(min=1e-9).log() if balanced else torch.zeros(CLASSES)
    for _ in range(STEPS):
        z = body(x)
        F.cross_entropy(tail(generic(z) + prior), y).backward()
        F.cross_entropy(tail(generic(z).detach() + personal(z.detach())), y).backward()
        with torch.no_grad():
            for part in (*net.parameters(), *personal.parameters()):
                part -= ETA * part.grad
                part.grad = None
    return nn.utils.parameters_to_vector(net.parameters()).detach() - w, nn.utils.parameters_to_vector(
        personal.parameters()
    ).detach()


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("make", [perceptron, convolution, scaled])
def test_local_updates_equal_a_torch_loop(make, balanced):
    task, federation = NetworkTask(make), clients()
    fields = {"eta": ETA, "steps": STEPS, "batch": 0, "balanced": balanced}
    algorithm, exchange, server = settled_simulator(build("fedrod", fields), task, federation)
    size = 8 * CLASSES + CLASSES if make is convolution else 5 * CLASSES + CLASSES
    h = torch.zeros(M, task.dim, dtype=torch.float64)
    h[:, -size:] = torch.randn(M, size, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    state = exchange.states.take(torch.arange(M))._replace(v=h)
    assert (add_personal_head(task, federation.train) is None) == (make is scaled)
    after, change = local_update.client_update(algorithm, task, server, state, exchange.data, Round(2, 3, M, M, 1.0, 0))
    for i in range(M):
        x, y = federation.train.of(i)
        expected, personal = plain_update(make, server.w, h[i], x, y.long(), balanced)
        torch.testing.assert_close(change[i], expected, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(after.v[i, -size:], personal, rtol=1e-9, atol=1e-12)
        assert not after.v[i, :-size].any()


def test_dropout_is_the_same_for_both_heads():
    """With equal losses (no prior, h = 0 at the start) both heads move alike in the first step."""
    task, federation = NetworkTask(lambda: Dropped().double()), clients()
    fields = {"eta": ETA, "steps": 1, "batch": 0, "balanced": False}
    algorithm, exchange, server = settled_simulator(build("fedrod", fields), task, federation)
    state = exchange.states.take(torch.arange(M))
    after, change = local_update.client_update(algorithm, task, server, state, exchange.data, Round(1, 3, M, M, 1.0, 0))
    size = 5 * CLASSES + CLASSES
    torch.testing.assert_close(after.v[:, -size:], change[:, -size:], rtol=1e-9, atol=1e-12)


def test_the_work_of_one_pass_is_counted_once():
    federation, meter = clients(), CostMeter()
    task = count_costs(NetworkTask(convolution), meter)
    algorithm, exchange, server = settled_simulator(
        build("fedrod", {"eta": ETA, "steps": STEPS, "batch": 0}), NetworkTask(convolution), federation
    )
    local_update.client_update(
        algorithm, task, server, exchange.states.take(torch.arange(M)), exchange.data, Round(1, 1, M, M, 1.0, 0)
    )
    assert meter.gradients == meter.samples == STEPS * len(federation.train.y)


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("make", [perceptron, convolution])
def test_a_loss_of_ones_own_is_taken_of_both_heads(make, reduction):
    def loss(output, y):
        return F.cross_entropy(output, y, reduction=reduction)

    fields = {"eta": ETA, "steps": STEPS, "batch": 0, "balanced": False}
    changes = []
    for task in (NetworkTask(make, loss), NetworkTask(make)):
        federation = clients()
        algorithm, exchange, server = settled_simulator(build("fedrod", fields), task, federation)
        fresh = NetworkTask(make, loss) if task.has_own_loss else task  # its first rows are those of this update
        assert add_personal_head(fresh, federation.train) is not None
        state = exchange.states.take(torch.arange(M))
        changes.append(
            local_update.client_update(algorithm, fresh, server, state, exchange.data, Round(1, 1, M, M, 1.0, 0))
        )
    torch.testing.assert_close(changes[0][1], changes[1][1], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(changes[0][0].v, changes[1][0].v, rtol=1e-9, atol=1e-12)
