"""MOON on a network equals a plain torch loop with the paper's loss."""

import torch
from torch import nn

from mooring.algorithms.base import build
from mooring.core.cohort import Round
from mooring.tasks.network import NetworkTask
from mooring.tasks.representation import represent
from tests.support.problems import logistic_clients, settled_simulator

ETA, MU, TAU, STEPS = 0.1, 2.0, 0.3, 3


def make():
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def plain_update(w, last, x, y):
    """The client's parameters after its steps: module, loss and optimizer of torch."""
    nets = [make() for _ in range(3)]
    for net, values in zip(nets, (w, w, last)):
        nn.utils.vector_to_parameters(values.clone(), net.parameters())
    net, near, far = nets
    optimizer = torch.optim.SGD(net.parameters(), lr=ETA)
    for _ in range(STEPS):
        optimizer.zero_grad()
        z, z_near, z_far = (one[:2](x) for one in (net, near, far))
        similar = torch.exp(torch.cosine_similarity(z, z_near.detach()) / TAU)
        apart = torch.exp(torch.cosine_similarity(z, z_far.detach()) / TAU)
        contrast = -torch.log(similar / (similar + apart)).mean()
        (nn.functional.cross_entropy(net[2](z), y) + MU * contrast).backward()
        optimizer.step()
    return nn.utils.parameters_to_vector(net.parameters()).detach()


def test_local_updates_equal_a_torch_loop():
    task, clients = NetworkTask(make), logistic_clients(classes=3)
    fields = {"eta": ETA, "mu": MU, "tau": TAU, "steps": STEPS, "batch": 0}
    algorithm, exchange, server = settled_simulator(build("moon", fields), task, clients)
    last = torch.stack([task.start(seed) for seed in range(1, len(clients) + 1)])
    client = exchange.states.take(torch.arange(len(clients)))._replace(v=last)
    turn = Round(2, 3, len(clients), len(clients), 1.0, 0)
    after, change = algorithm.client_update(server, client, task, exchange.data, turn)
    for i in range(len(clients)):
        x, y = clients.train.of(i)
        right = plain_update(server.w, last[i], x, y.long())
        torch.testing.assert_close(after.v[i], right, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(change[i], right - server.w, rtol=1e-9, atol=1e-12)


def test_the_representation_is_the_input_of_the_last_layer():
    task, x = NetworkTask(make), torch.randn(4, 3, dtype=torch.float64)
    net, w = make(), task.start(3)
    nn.utils.vector_to_parameters(w.clone(), net.parameters())
    torch.testing.assert_close(represent(task, w, x), net[:2](x).detach())
