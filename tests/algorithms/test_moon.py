"""MOON on a network equals a plain torch loop with the paper's loss."""

import copy

import pytest
import torch
from torch import nn

import mooring
from mooring.algorithms.base import build
from mooring.core.cohort import Round
from mooring.engines import local_update
from mooring.tasks.memory import represent
from mooring.tasks.network import NetworkTask
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
    after, change = local_update.client_update(algorithm, task, server, client, exchange.data, turn)
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


class Tokens(nn.Module):
    """An embedding, and a dictionary as output."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, ids):
        z = torch.tanh(self.words(ids)).mean(1)
        return {"logits": self.head(z), "hidden": z}


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow, self.head = nn.Linear(4, 3), nn.Linear(2, 3), nn.Linear(3, 3)

    def forward(self, wide, narrow):
        return self.head(torch.tanh(self.wide(wide) + self.narrow(narrow)))


def answer(model, x):
    """The model's scores and the input of its last layer."""
    seen = []
    handle = model.head.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    out = model(**x) if isinstance(x, dict) else model(x)
    handle.remove()
    return out["logits"] if isinstance(out, dict) else out, seen[0]


def plain_rounds(net, data, rounds):
    """The global network after rounds of MOON with equal clients (x, y), by module, loss and optimizer of torch."""
    last = [net] * len(data)
    for _ in range(rounds):
        for i, (x, y) in enumerate(data):
            local, far = copy.deepcopy(net), last[i]
            optimizer = torch.optim.SGD(local.parameters(), lr=ETA)
            for _ in range(STEPS):
                optimizer.zero_grad()
                scores, z = answer(local, x)
                near, apart = (torch.cosine_similarity(z, answer(m, x)[1].detach()) / TAU for m in (net, far))
                contrast = -torch.log_softmax(torch.stack([near, apart], 1), 1)[:, 0].mean()
                (nn.functional.cross_entropy(scores, y) + MU * contrast).backward()
                optimizer.step()
            last[i] = local
        net = copy.deepcopy(net)
        states = [local.state_dict() for local in last]
        net.load_state_dict({name: torch.stack([state[name] for state in states]).mean(0) for name in states[0]})
    return net


@pytest.mark.parametrize("kind", [Tokens, TwoInputs])
def test_tokens_and_several_inputs_equal_a_torch_loop(kind):
    rng, y = torch.Generator().manual_seed(0), torch.arange(8) % 3
    data = []
    for _ in range(2):
        ids = torch.randint(0, 9, (8, 5), generator=rng)
        both = {"wide": torch.randn(8, 4, generator=rng), "narrow": torch.randn(8, 2, generator=rng)}
        data.append((ids if kind is Tokens else both, y))
    torch.manual_seed(0)
    net = kind()
    settings = {"eta": ETA, "mu": MU, "tau": TAU, "steps": STEPS, "batch": 0}
    options = {"settings": settings, "rounds": 2, "baselines": False, "checkpoint": "last"}
    clients = {f"c{i}": dict.fromkeys(("train", "validation", "test"), pair) for i, pair in enumerate(data)}
    result = mooring.fit(net, clients, algorithm="moon", **options)
    expected = plain_rounds(net, data, 2).state_dict()
    for name, part in result.module().state_dict().items():
        torch.testing.assert_close(part, expected[name], rtol=1e-5, atol=1e-6)
