"""Networks in training mode: local updates equal plain torch loops, with statistics, dropout, optimizers and losses."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import mooring
from mooring.algorithms.base import build
from mooring.core.cohort import Round
from mooring.core.errors import RequestError
from mooring.core.minibatches import count_local_steps, draw_rows, forward_keys
from mooring.data.clients import from_arrays
from mooring.engines import local_update
from mooring.tasks.network import NetworkTask

BATCH, EPOCHS, ETA = 5, 2, 0.05
SIZES = (11, 16)


class Block(nn.Module):
    """A residual block of a small ResNet."""

    def __init__(self, width, stride=1):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.shortcut = nn.Conv2d(width, width, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x):
        out = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(out + self.shortcut(x))


class SmallResNet(nn.Module):
    def __init__(self, width=4, classes=3):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.blocks = nn.Sequential(Block(width), Block(width, 2), Block(width), Block(width, 2))
        self.fc = nn.Linear(width, classes)

    def forward(self, x):
        return self.fc(self.blocks(self.stem(x)).mean((2, 3)))


class FunctionalDropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.b(functional.dropout(torch.relu(self.a(x.flatten(1))), 0.4, self.training))


NETWORKS = {
    "batch norm": lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)),
    "cumulative batch norm": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8, momentum=None), nn.ReLU(), nn.Linear(8, 3)
    ),
    "instance norm": lambda: nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.InstanceNorm2d(4, affine=True, track_running_stats=True), nn.Flatten(), nn.Linear(16, 3)
    ),
    "dropout": lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3)),
    "functional dropout": FunctionalDropout,
    "resnet": SmallResNet,
    "transformer": lambda: nn.Sequential(
        nn.Flatten(1, 2), nn.TransformerEncoderLayer(4, 2, 8, 0.2, batch_first=True), nn.Flatten(), nn.Linear(16, 3)
    ),
    "plain": lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3)),
}
OPTIMIZERS = {
    "sgd": ({}, lambda p: torch.optim.SGD(p, ETA)),
    "momentum": ({"momentum": 0.9}, lambda p: torch.optim.SGD(p, ETA, momentum=0.9)),
    "adamw": ({"optimizer": "adamw", "weight_decay": 0.1}, lambda p: torch.optim.AdamW(p, ETA, weight_decay=0.1)),
}


def images(sizes=SIZES, seed=0):
    rng = torch.Generator().manual_seed(seed)
    xs = [torch.randn(n, 1, 4, 4, generator=rng) for n in sizes]
    ys = [torch.randint(0, 3, (n,), generator=rng) for n in sizes]
    return from_arrays(xs, ys, kind="classes", dtype=torch.float64)


def plain_loop(net, loss, make, rows, draws, keys, pull=None):
    """A naive loop over minibatches, in training mode; draws are places of the rows (x, y)."""
    net.train()
    optimizer = make(net.parameters())
    center = [p.detach().clone() for p in net.parameters()]
    x, y = rows
    for places, key in zip(draws, keys):
        single = len(places) == 1
        for layer in net.modules():
            if isinstance(layer, nn.modules.batchnorm._NormBase):
                layer.train(not single)
        torch.manual_seed(int(key) >> 1)
        optimizer.zero_grad()
        value = loss(net(x[places]), y[places])
        if pull:
            value = value + pull / 2 * sum(((p - c) ** 2).sum() for p, c in zip(net.parameters(), center))
        value.backward()
        optimizer.step()
    return net


def compare(make_net, optimizer, loss="cross_entropy", torch_loss=functional.cross_entropy, lam=0.0, **fields):
    """The cohort's local updates beside plain loops, every client's parameters and buffers."""
    clients, task = images(), NetworkTask(lambda: make_net().double(), loss, **fields)
    settings, make = OPTIMIZERS[optimizer]
    data, turn = clients.cohort(), Round(2, 3, 2, 2, 1.0, 7)
    name = "fedprox" if lam else "fedavg"
    extra = {"lam": lam, "inner": "sgd"} if lam else {}
    algorithm = build(name, {"eta": ETA, "epochs": EPOCHS, "batch": BATCH, **settings, **extra})
    server, first = local_update.first_states(algorithm, task, task.start(3))
    states = type(first)(*(part.expand(2, *part.shape) for part in first))
    _, change = local_update.client_update(algorithm, task, server, states, data, turn)
    counts = count_local_steps(clients.train.size, BATCH, None, EPOCHS)
    draws = list(draw_rows(data, turn, batch=BATCH, counts=counts))
    for c in range(2):
        net = copy.deepcopy(task._made(3))
        steps = int(counts[c])
        places = [
            torch.from_numpy(draws[s].row_index[c, : draws[s].n[c]]) - clients.train.start[c] for s in range(steps)
        ]
        keys = [forward_keys(data, turn, 0, s)[c] for s in range(steps)]
        plain_loop(net, torch_loss, make, clients.train.of(c), places, keys, lam)
        expected = dict(net.named_parameters()) | dict(net.named_buffers())
        for part in task.layout:
            found = (server.w + change[c])[part.place].view(part.shape)
            torch.testing.assert_close(found, expected[part.name].detach().to(found.dtype), rtol=1e-7, atol=1e-8)
    return task, server, change


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", NETWORKS)
def test_local_updates_are_plain_loops(name, optimizer):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    compare(NETWORKS[name], optimizer)
    after = torch.get_rng_state()
    assert name in ("transformer", "resnet") or (torch.equal(before, before) and len(after) == len(before))


def test_a_step_size_is_found_for_statistics_and_models_are_opened_again(tmp_path):
    data = federation()
    result = mooring.fit(data, model=NETWORKS["batch norm"], rounds=2, baselines=False, out=tmp_path / "run")
    run = mooring.open(tmp_path / "run", model=NETWORKS["batch norm"])
    found = torch.as_tensor(run.predict(data["site 0"][0], "site 0")).float()
    torch.testing.assert_close(found, result.predict(data["site 0"][0], "site 0").float())


@pytest.mark.parametrize("name", ["batch norm", "dropout"])
def test_a_pull_leaves_statistics_alone(name):
    compare(NETWORKS[name], "sgd", lam=0.5)


def test_class_weights_and_sums_mean_what_torch_means():
    weight = torch.tensor([1.0, 5.0, 0.2], dtype=torch.float64)
    compare(NETWORKS["plain"], "sgd", nn.CrossEntropyLoss(weight=weight), nn.CrossEntropyLoss(weight=weight))
    compare(NETWORKS["plain"], "sgd", nn.CrossEntropyLoss(reduction="sum"), nn.CrossEntropyLoss(reduction="sum"))
    smooth = nn.CrossEntropyLoss(label_smoothing=0.2)
    compare(NETWORKS["plain"], "adamw", smooth, smooth)


def test_frozen_statistics_stay():
    task = NetworkTask(NETWORKS["batch norm"], buffers="frozen")
    assert task.dim == task.gradient_dim == sum(p.numel() for p in NETWORKS["batch norm"]().parameters())
    averaged = NetworkTask(NETWORKS["batch norm"])
    assert averaged.dim == task.dim + 8 + 8 + 1 and averaged.layout[-1].name == "2.num_batches_tracked"
    with pytest.raises(RequestError, match="buffers must be one of average, local, frozen, got 'mean'"):
        NetworkTask(NETWORKS["plain"], buffers="mean")
    with pytest.raises(RequestError, match="layer '0' is a BatchNorm1d without running statistics"):
        NetworkTask(lambda: nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 2)))


def federation(seed=0, clients=3, rows=14):
    rng = torch.Generator().manual_seed(seed)
    return {
        f"site {i}": (torch.randn(rows, 1, 4, 4, generator=rng) + i, torch.randint(0, 3, (rows,), generator=rng))
        for i in range(clients)
    }


@pytest.mark.parametrize("buffers", ["average", "local", "frozen"])
def test_statistics_are_averaged_kept_or_frozen(buffers):
    result = mooring.fit(
        federation(), model=NETWORKS["batch norm"], algorithm="fedavg", rounds=3, baselines=False, checkpoint="last",
        settings={"eta": 0.05, "epochs": 1, "batch": 4}, task={"buffers": buffers},
    )  # fmt: skip
    means = [result.module(name)[2].running_mean for name in result.models]
    counts = [int(result.module(name)[2].num_batches_tracked) for name in result.models]
    if buffers == "frozen":
        assert all(not bool(mean.any()) for mean in means) and counts == [0, 0, 0]
    else:
        assert counts == [6, 6, 6]  # of three minibatches the last has one row, which has no variance
        assert torch.equal(means[0], means[1]) == (buffers == "average")
        assert bool(means[0].any())


@pytest.mark.parametrize("name", ["batch norm", "dropout", "resnet"])
def test_runs_are_replayed_and_resumed_to_the_bit(name, tmp_path):
    options = {"model": NETWORKS[name], "algorithm": "fedavg", "rounds": 3, "baselines": False}
    options["settings"] = {"eta": 0.05, "epochs": 1, "batch": 4}
    one = mooring.fit(federation(), **options)

    def stop(what, done, total):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mooring.fit(federation(), out=tmp_path / "run", checkpoint_every=1, progress=stop, **options)
    two = mooring.resume(tmp_path / "run", data=federation(), model=NETWORKS[name])
    assert all(torch.equal(one.models[client], two.models[client]) for client in one.models)


def test_what_does_not_train_statistics_refuses_them_and_dropout_is_drawn():
    settings = {"eta": 0.05, "steps": 2, "batch": 4}
    with pytest.raises(RequestError, match="set buffers = 'frozen', or use fedavg"):
        mooring.fit(federation(), model=NETWORKS["batch norm"], algorithm="fedmspp", rounds=1)
    for algorithm, more, sentence in (
        ("feddyn", {}, "feddyn does not average running statistics; set buffers = 'frozen'"),
        ("fedavg", {"server_optimizer": "adam"}, "set buffers = 'local' or 'frozen'"),
    ):
        with pytest.raises(RequestError, match=sentence):
            mooring.fit(
                federation(),
                model=NETWORKS["batch norm"],
                algorithm=algorithm,
                rounds=1,
                settings={"eta": 0.05, **more},
            )
    for algorithm in ("apfl", "pfedme", "per_fedavg"):
        result = mooring.fit(
            federation(), model=NETWORKS["dropout"], algorithm=algorithm, rounds=1, baselines=False, settings=settings
        )
        assert len(result.models) == 3
