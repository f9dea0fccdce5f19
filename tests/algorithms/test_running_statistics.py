"""Networks with BatchNorm: a local update of each algorithm equals a plain torch loop, running statistics included."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mooring
from mooring.algorithms.base import build
from mooring.core.cohort import Round, Rows
from mooring.core.errors import RequestError
from mooring.data.clients import CLASSES, Clients
from mooring.engines import local_update
from mooring.engines.model_store import build_module
from mooring.engines.personal_parts import keep_personal_parts
from mooring.tasks.network import NetworkTask

M, STEPS, ETA = 2, 3, 0.1
ROUND = Round(1, 4, M, M, 1.0, 0)


def net():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3)).double()


@pytest.fixture
def task():
    return NetworkTask(net)


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(1)
    xs = [torch.randn(7, 3, generator=generator, dtype=torch.float64) + i for i in range(M)]
    ys = [torch.randint(0, 3, (7,), generator=generator) for _ in range(M)]
    rows = Rows.stack(xs, ys)
    clients = Clients(("a", "b"), rows, rows, rows, kind=CLASSES, classes=("x", "y", "z"))
    return clients.cohort(torch.ones(M) / M)


def start(task, seed):
    return task.start(seed) + 0.01 * torch.arange(task.dim) / task.dim


def flatten(module, task):
    values = dict(module.named_parameters()) | dict(module.named_buffers())
    return torch.cat([values[n].detach().flatten().double() for n in (*task.shapes, *task.buffer_shapes)])


def gradient(task, w, x, y):
    """The gradient [d] at w in training mode, 0 for buffers; and w with the buffers after the forward pass."""
    module = build_module(task, w).train()
    F.cross_entropy(module(x), y).backward()
    g = torch.cat([p.grad.flatten() for p in module.parameters()])
    p = task.gradient_dim
    return torch.cat([g, torch.zeros(task.dim - p, dtype=g.dtype)]), torch.cat([w[:p], flatten(module, task)[p:]])


def descend(task, w, x, y, eta=ETA, steps=STEPS, fixed=None):
    for _ in range(steps):
        g, after = gradient(task, w, x, y)
        moved = after - eta * g
        w = moved if fixed is None else torch.where(fixed, w, moved)
    return w


def head(task):
    mask = torch.zeros(task.dim, dtype=torch.bool)
    for part in task.layout:
        mask[part.place] = part.layer == "3"
    return mask


def apfl(task, w, v, x, y):
    alpha, start_w = 0.3, w
    for _ in range(STEPS):
        u = alpha * v + (1 - alpha) * w
        g_u, after_u = gradient(task, u, x, y)
        g_w, after_w = gradient(task, w, x, y)
        v, p = v - ETA * alpha * g_u, task.gradient_dim
        v, w = torch.cat([v[:p], after_u[p:]]), after_w - ETA * g_w
    return w - start_w, v


def pfedme(task, w, v, x, y):
    lam, p, start_w = 0.7, task.gradient_dim, w
    for _ in range(STEPS):
        for _ in range(2):
            g, after = gradient(task, v, x, y)
            g[:p] += lam * (v - w)[:p]
            v = after - 0.05 * g
        w = w - ETA * lam * (w - v)
    return w - start_w, v


def per_fedavg(task, w, v, x, y):
    start_w, p = w, task.gradient_dim
    for _ in range(STEPS):
        g, after = gradient(task, w, x, y)
        g, after = gradient(task, after - 0.05 * g, x, y)
        w = torch.cat([(w - ETA * g)[:p], after[p:]])
    return w - start_w, None


def fedrod(task, w, v, x, y):
    start_w, mask = w, head(task)
    h = torch.where(mask, v, 0.0)
    prior = torch.zeros_like(w)
    bias = next(part.place for part in task.layout if part.name == "3.bias")
    prior[bias] = torch.bincount(y, minlength=3).double().clamp(min=1e-9).log()
    for _ in range(STEPS):
        own, _ = gradient(task, w + h, x, y)
        g, after = gradient(task, w + prior, x, y)
        w, h = after - prior - ETA * g, h - ETA * torch.where(mask, own, 0.0)
    return w - start_w, h


def fedala(task, w, v, x, y):
    a, mask = torch.ones_like(w), head(task)
    for _ in range(2):
        g, _ = gradient(task, v + (w - v) * a, x, y)
        a = (a - 0.5 * torch.where(mask, g * (w - v), 0.0)).clamp(0, 1)
    trained = descend(task, v + (w - v) * a, x, y)
    return trained - w, trained


def represent(task, w, x):
    return build_module(task, w)[:3](x)


def moon(task, w, v, x, y):
    u = w
    for _ in range(STEPS):
        g, after = gradient(task, u, x, y)
        module = build_module(task, u)
        z = module[:3](x)
        near, far = represent(task, w, x).detach(), represent(task, v, x).detach()
        scores = torch.stack([F.cosine_similarity(z, near), F.cosine_similarity(z, far)], 1) / 0.5
        (-torch.log_softmax(scores, 1)[:, 0].mean()).backward()
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in module.parameters()]
        contrast = torch.cat([part.flatten() for part in parts])
        g[: len(contrast)] += 2.0 * contrast
        u = after - ETA * g
    return u - w, u


def fedrep(task, w, v, x, y):
    mask = head(task)
    begin = torch.where(mask, v, w)
    fitted = descend(task, begin, x, y, steps=2, fixed=~mask)
    trained = descend(task, fitted, x, y, fixed=mask)
    return (trained - w)[~mask], trained[mask]


def fedbabu(task, w, v, x, y):
    mask = head(task)
    return (descend(task, w, x, y, fixed=mask) - w)[~mask], None


NAIVE = {
    "apfl": (apfl, {"alpha": 0.3, "adapt": "no", "decay": 0.0}),
    "pfedme": (pfedme, {"lam": 0.7, "inner_eta": 0.05, "inner_steps": 2}),
    "per_fedavg": (per_fedavg, {"inner_eta": 0.05, "variant": "first-order"}),
    "fedrod": (fedrod, {}),
    "fedala": (fedala, {"weight_eta": 0.5, "first_passes": 2}),
    "moon": (moon, {"mu": 2.0}),
    "fedrep": (fedrep, {"head_steps": 2}),
    "fedbabu": (fedbabu, {}),
}


@pytest.mark.parametrize("name", NAIVE)
def test_a_local_update_equals_a_plain_loop(task, data, name):
    naive, fields = NAIVE[name]
    algorithm = build(name, {"eta": ETA, "batch": 0, "steps": STEPS} | fields)
    if name in ("fedrep", "fedbabu"):
        algorithm = keep_personal_parts(replace(algorithm, personal="3"), task)
    w, v = start(task, 0), torch.stack([start(task, 1), start(task, 2)])
    server, first = local_update.first_states(algorithm, task, w)
    client = type(first)(*(part.expand(M, *part.shape).clone() for part in first))
    own_field = "own_w" if name == "fedrep" else "v"
    begin = {"fedrod": torch.where(head(task), v, 0.0), "fedrep": v[:, head(task)]}.get(name, v)
    if own_field in client._fields:
        client = client._replace(**{own_field: begin})
    if name == "fedala":
        client = client._replace(updates=torch.ones(M, dtype=torch.long))
    after, message = local_update.client_update(algorithm, task, server, client, data, ROUND)
    change = message.change if name == "apfl" else message
    for c in range(M):
        expected, own = naive(task, w, v[c], *data.train.of(c))
        torch.testing.assert_close(change[c], expected, rtol=1e-9, atol=1e-11)
        if own is not None:
            torch.testing.assert_close(getattr(after, own_field)[c], own, rtol=1e-9, atol=1e-11)


DATA = {
    f"c{i}": (torch.randn(12, 3, generator=torch.Generator().manual_seed(i)), torch.arange(12) % 3) for i in range(3)
}
EVERYWHERE = [*NAIVE, "fedavg", "fedper", "fedbn", "lg_fedavg", "ditto", "scaffold", "fedprox_personal", "local"]


@pytest.mark.parametrize("buffers", ["average", "local", "frozen"])
@pytest.mark.parametrize("name", EVERYWHERE)
def test_what_becomes_of_running_statistics(name, buffers):
    result = mooring.fit(
        DATA, model=lambda: net().float(), algorithm=name, rounds=2, threads=1, baselines=False,
        task={"buffers": buffers}, settings={"batch": 4, "eta": 0.05, "steps": 2},
    )  # fmt: skip
    task, models = result.job.task, result.trained.models
    assert bool(torch.isfinite(models).all())
    moved = (models - task.start(0))[:, task.parameter_dim :]
    assert moved.shape[1] == (0 if buffers == "frozen" else 9)
    if buffers == "frozen":
        return
    assert bool((moved.abs().sum(1) > 0.1).all())
    variance = models[:, task.layout[-2].place]
    assert task.layout[-2].name.endswith("running_var") and bool((variance > 0).all())
    if buffers == "local":
        assert not torch.allclose(moved[0], moved[1])
    elif name in ("fedavg", "fedper", "moon", "fedrep"):
        assert torch.equal(moved[0], moved[1])


def test_clusters_have_no_local_statistics():
    with pytest.raises(
        RequestError, match="ifca: clusters have no personal parts; set buffers = 'average' or 'frozen'"
    ):
        mooring.fit(DATA, model=net, algorithm="ifca", rounds=1, task={"buffers": "local"})
