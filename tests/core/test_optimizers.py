"""Local optimizers: every client's steps are those of torch.optim on a model of its own."""

import math

import pytest
import torch

from mooring.algorithms.base import build
from mooring.core.cohort import Round
from mooring.core.errors import RequestError
from mooring.core.local_training import schedule
from mooring.core.optimizers import Optimizer
from mooring.engines import local_update
from mooring.tasks.linear import Linear
from tests.support.problems import linear_clients

RULES = {
    "momentum": ({"momentum": 0.9}, lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9)),
    "nesterov": ({"momentum": 0.8, "nesterov": True}, lambda p, lr: torch.optim.SGD(p, lr, 0.8, nesterov=True)),
    "weight decay": ({"weight_decay": 0.1}, lambda p, lr: torch.optim.SGD(p, lr, weight_decay=0.1)),
    "adam": ({"optimizer": "adam"}, lambda p, lr: torch.optim.Adam(p, lr)),
    "adam decayed": (
        {"optimizer": "adam", "weight_decay": 0.1, "beta1": 0.8, "beta2": 0.99, "epsilon": 1e-4},
        lambda p, lr: torch.optim.Adam(p, lr, betas=(0.8, 0.99), eps=1e-4, weight_decay=0.1),
    ),
    "adamw": ({"optimizer": "adamw", "weight_decay": 0.1}, lambda p, lr: torch.optim.AdamW(p, lr, weight_decay=0.1)),
    "clipped": ({"clip_grad": 0.05, "momentum": 0.5}, lambda p, lr: torch.optim.SGD(p, lr, momentum=0.5)),
}
ETA = 0.03


def plain_loop(make, clip, w, rows, batches, optimizer=None):
    """A naive loop of torch.optim over batches of places of the rows (x, y) of a client."""
    v = torch.nn.Parameter(w.clone())
    optimizer = make([v], ETA) if optimizer is None else optimizer
    if optimizer.param_groups[0]["params"][0] is not v:
        v = optimizer.param_groups[0]["params"][0]
        with torch.no_grad():
            v.copy_(w)
    x, y = rows
    for places in batches:
        optimizer.zero_grad()
        residual = x[places] @ v[:-1] + v[-1] - y[places]
        (0.5 * (residual**2).mean()).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_([v], clip)
        optimizer.step()
    return v.detach().clone(), optimizer


@pytest.mark.parametrize("name", RULES)
def test_steps_of_a_cohort_are_those_of_torch(name):
    settings, make = RULES[name]
    fields = {"name": settings.get("optimizer", "sgd")} | {k: v for k, v in settings.items() if k != "optimizer"}
    rule = Optimizer(**fields)
    rng = torch.Generator().manual_seed(0)
    v, state = torch.randn(3, 5, generator=rng), None
    expected = [torch.nn.Parameter(row.clone()) for row in v]
    optimizers = [make([row], ETA) for row in expected]
    state = rule.init(3, 5, v)
    for k in range(6):
        g, active = torch.randn(3, 5, generator=rng), torch.tensor([True, k < 4, k % 2 == 0])
        for c in range(3):
            if active[c]:
                expected[c].grad = g[c].clone()
                if rule.clip_grad:
                    torch.nn.utils.clip_grad_norm_([expected[c]], rule.clip_grad)
                optimizers[c].step()
        rule.step(v, g, torch.full((3, 1), ETA), state, active)
    torch.testing.assert_close(v, torch.stack([row.detach() for row in expected]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kept", ["reset", "keep"])
@pytest.mark.parametrize("name", RULES)
def test_two_rounds_of_fedavg_are_plain_loops(name, kept):
    settings, make = RULES[name]
    clients, task = linear_clients(), Linear(3, ridge=0.0)
    data = clients.cohort()
    fields = {"eta": ETA, "steps": 5, "batch": 0, "optimizer_state": kept, **settings}
    algorithm = build("fedavg", fields)
    server, first = local_update.first_states(algorithm, task, task.start())
    states = type(first)(*(part.expand(len(data), *part.shape) for part in first))
    own = [None] * len(data)
    for t in (1, 2):
        states, change = local_update.client_update(algorithm, task, server, states, data, Round(t, 2, 5, 5, 1.0, 0))
        for c in range(len(data)):
            x, y = data.train.of(c)
            places = [torch.arange(len(y))] * 5
            old = own[c] if kept == "keep" else None
            expected, own[c] = plain_loop(make, settings.get("clip_grad"), server.w, (x, y), places, old)
            torch.testing.assert_close(server.w + change[c], expected, rtol=1e-9, atol=1e-10)
        server = algorithm.server_update(server, change.mean(0), Round(t, 2, 5, 5, 1.0, 0))


def rates(rounds=4, **settings):
    """The step sizes of every local step of a run of `rounds` rounds with 3 steps each."""
    data, out = linear_clients().cohort(), []
    algorithm = build("fedavg", {"eta": 0.5, "steps": 3, "batch": 2, **settings})
    for t in range(1, rounds + 1):
        _, _, eta = schedule(algorithm, data, Round(t, rounds, 5, 5, 1.0, 0))
        out += [float(torch.as_tensor(eta(k) if callable(eta) else eta).flatten()[0]) for k in range(3)]
    return out


def test_schedules_over_steps_and_rounds():
    cosine = [0.25 * (1 + math.cos(math.pi * k / 12)) for k in range(12)]
    assert rates(eta_schedule="cosine") == pytest.approx(cosine)
    slow = [0.25 * (1 + math.cos(math.pi * t / 4)) for t in range(4) for _ in range(3)]
    assert rates(eta_schedule="cosine_rounds") == pytest.approx(slow)
    halved = [0.5 * 0.5 ** (t // 2) for t in range(4) for _ in range(3)]
    assert rates(eta_schedule="rounds", decay=0.5, decay_every=2) == pytest.approx(halved)
    assert rates(eta_schedule="steps", decay=0.5, decay_every=5) == pytest.approx([0.5] * 5 + [0.25] * 5 + [0.125] * 2)
    assert rates(warmup=2) == pytest.approx([0.5 * min(1, (k + 1) / 6) for k in range(12)])
    assert rates(warmup=1, eta_schedule="cosine")[3:] == pytest.approx(cosine[3:])


def test_what_does_not_go_together_is_refused():
    for name, settings, sentence in (
        ("fedavg", {"optimizer": "lamb"}, "FedAvg: optimizer must be one of 'sgd', 'adam', 'adamw', got 'lamb'."),
        ("fedavg", {"optimizer": "adam", "momentum": 0.9}, "set beta1 for 'adam'"),
        ("fedavg", {"nesterov": True}, "FedAvg: nesterov needs momentum > 0."),
        ("scaffold", {"optimizer": "adamw"}, "control variates are mean gradients, which steps show only if they are"),
        ("fedavg", {"weight_decay": -1.0}, "FedAvg: weight_decay must be >= 0, got -1.0."),
    ):
        with pytest.raises(RequestError) as error:
            build(name, settings)
        assert sentence in str(error.value)
