"""What a PyTorch user does, by the documentation alone: own networks, losses and data, resumed, predicted, exported."""

import copy
import warnings

import numpy as np
import pytest
import torch
from safetensors.torch import load
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import mooring
from mooring.core.errors import RequestError
from mooring.engines.export import export
from mooring.engines.fit import resume_fit
from mooring.runs import checkpoint
from mooring.runs.directory import MODELS_FILE
from mooring.tasks.network import NetworkTask

CLIENTS, ROWS = 4, 60
QUICK = {"threads": 1, "baselines": False}


class Recurrent(nn.Module):
    def __init__(self, kind="GRU"):
        super().__init__()
        self.embed, self.body = nn.Embedding(12, 6), getattr(nn, kind)(6, 6, batch_first=True)
        self.out = nn.Linear(6, 2)

    def forward(self, x):
        return self.out(self.body(self.embed(x))[0].mean(1))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.body = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.out = nn.Linear(8, 2)

    def forward(self, x):
        return self.out(self.body(self.embed(x)).mean(1))


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag, self.out = nn.EmbeddingBag(12, 6), nn.Linear(6, 2)

    def forward(self, x):
        return self.out(self.bag(x))


class Plain(Bag):
    def __init__(self):
        super().__init__()
        self.bag = nn.Embedding(12, 6)

    def forward(self, x):
        return self.out(self.bag(x).mean(1))


SEQUENCES = {"gru": Recurrent, "lstm": lambda: Recurrent("LSTM"), "transformer": Transformer, "bag": Bag}


def sentences():
    """Whether a sentence of tokens 0..11 has more high tokens than low ones."""
    rng = torch.Generator().manual_seed(0)
    xs = [torch.randint(0, 12, (ROWS, 5), generator=rng) for _ in range(CLIENTS)]
    return {f"site {i}": (x, (x.float().mean(1) > 5.5).long()) for i, x in enumerate(xs)}


def numbers(level=942.0, outputs=None):
    """Regressions whose slopes differ by client, around a level."""
    rng = torch.Generator().manual_seed(1)
    out = {}
    for i in range(CLIENTS):
        x = torch.randn(ROWS, 3, generator=rng)
        slopes = torch.tensor([[30.0, -10.0 + 5 * i, 4.0]] * (outputs or 1)).T
        y = level + x @ slopes
        out[f"site {i}"] = (x, y if outputs else y[:, 0])
    return out


@pytest.mark.parametrize("make", SEQUENCES.values(), ids=SEQUENCES)
def test_sequence_networks_train_resume_predict_and_export(tmp_path, make):
    data = sentences()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = mooring.fit(data, model=make, rounds=8, evaluate_every=4, out=tmp_path / "run", **QUICK)
    slow = [str(warning.message) for warning in caught if "one after another" in str(warning.message)]
    assert len(slow) <= 1, "one warning"
    if make is Recurrent:
        assert len(slow) == 1
    assert result.summary["personal"] < np.log(2)  # better than a coin
    x = data["site 1"][0]
    net = result.module("site 1")
    torch.testing.assert_close(torch.softmax(net(x), -1), result.predict(x, "site 1"))
    (tmp_path / "run" / MODELS_FILE).unlink()  # as if killed before the end
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again, _ = resume_fit(tmp_path / "run", source=data, model=make)
    assert torch.equal(again.models["site 1"], result.models["site 1"])


def test_a_networks_module_speaks_the_targets_units_and_is_ready():
    data = numbers()
    result = mooring.fit(
        data,
        model=lambda: nn.Sequential(nn.Linear(3, 16), nn.Dropout(), nn.Tanh(), nn.Linear(16, 1)),
        rounds=40,
        **QUICK,
    )
    net, (x, y) = result.module("site 2"), data["site 2"]
    assert not net.training and not any(part.training for part in net.modules())
    torch.testing.assert_close(net(x)[:, 0], result.predict(x, "site 2"))
    assert float((net(x)[:, 0].detach() - y).square().mean()) < 0.2 * float(y.var())


def test_a_reopened_run_gives_the_same_module(tmp_path):
    data = numbers()
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    result = mooring.fit(data, model=model, rounds=5, out=tmp_path / "run", **QUICK)
    x = data["site 3"][0]
    again = mooring.open(tmp_path / "run", model=model)
    assert not again.module("site 3").training
    torch.testing.assert_close(again.module("site 3")(x), result.module("site 3")(x))
    torch.testing.assert_close(again.predict(x, "site 3"), result.predict(x, "site 3"))
    with pytest.raises(RequestError, match=r"its model was in memory; pass it again"):
        mooring.open(tmp_path / "run").module("site 3")


def test_an_advice_gives_the_network_that_a_client_should_deploy():
    data = numbers()
    advice = mooring.advise(data, model=lambda: nn.Linear(3, 1), rounds=10, threads=1)
    net, x = advice.module("site 2"), data["site 2"][0]
    w = advice.models.recommended[2]
    torch.testing.assert_close(net(x).detach()[:, 0], 942 + 0 * x[:, 0], atol=200, rtol=0)  # in the target's units
    assert not net.training and torch.equal(net.net.weight.flatten(), w[:3])
    with pytest.raises(RequestError, match="unknown client 'nobody'"):
        advice.module("nobody")


def test_given_weights_are_the_start_and_frozen_parts_stay():
    torch.manual_seed(3)
    body = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU())
    body(torch.randn(200, 3))  # its statistics are not those of a fresh one
    for part in body.parameters():
        part.requires_grad_(False)
    model = nn.Sequential(body, nn.Linear(8, 2))
    before = copy.deepcopy(model.state_dict())
    task = NetworkTask(lambda: copy.deepcopy(model))
    assert task.dim == 8 * 2 + 2 and [part.name for part in task.layout] == ["1.weight", "1.bias"]
    assert torch.equal(task.start(7), torch.cat([model[1].weight.flatten(), model[1].bias]).detach())
    rng = torch.Generator().manual_seed(0)
    xs = [torch.randn(ROWS, 3, generator=rng) for _ in range(CLIENTS)]
    data = [(x, (x[:, 0] > 0).long()) for x in xs]
    with pytest.warns(UserWarning, match="normalization layer '0.1' are frozen"):
        result = mooring.fit(model, data, algorithm="fedavg", rounds=20, **QUICK)
    assert int(result.rounds["bytes_up"].iloc[0]) == CLIENTS * 4 * task.dim  # frozen parts are not sent
    net = result.module("client 1")
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name]) == name.startswith("0."), name
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert result.summary["personal"] < np.log(2)  # better than a coin


def test_a_pretrained_regression_starts_from_what_it_knows():
    """Its outputs are in the target's units: the first model is the given one, not a standardised cousin of it."""
    data = numbers()
    x, y = (torch.cat([pair[k] for pair in data.values()]) for k in (0, 1))
    model = nn.Linear(3, 1)
    best = torch.linalg.lstsq(torch.cat([x, torch.ones(len(x), 1)], 1), y[:, None]).solution[:, 0]
    with torch.no_grad():
        model.weight.copy_(best[:3][None])
        model.bias.copy_(best[3:])
    result = mooring.fit(model, data, algorithm="fedavg", settings={"eta": 0.0}, rounds=1, **QUICK)
    torch.testing.assert_close(result.module()(x), model(x))
    expected = float(torch.cat([(model(x)[:, 0].detach() - y) ** 2 for x, y in data.values()]).mean())
    assert result.summary["personal"] == pytest.approx(expected, rel=0.5)  # of the test rows alone


def huber(output, y):
    return nn.functional.huber_loss(output[:, 0], y, reduction="none", delta=10.0)


def test_a_loss_of_ones_own_sees_the_targets_units():
    data = numbers()
    seen = []

    def watched(output, y):
        seen.append(float(y.detach().mean()))
        return huber(output, y)

    model = nn.Linear(3, 1)
    with torch.no_grad():
        model.bias.fill_(942.0)
    result = mooring.fit(data, model=model, loss=watched, rounds=20, **QUICK)
    assert all(600 < level < 1300 for level in seen)
    x, y = data["site 0"]
    test = result.clients.set_index("client").loc["site 0", "personal"]
    whole = float(huber(result.module("site 0")(x), y).mean().detach())
    assert result.summary["metric"] == "loss" and test == pytest.approx(whole, rel=1.0)
    assert result.summary["personal"] < float(huber(model(x), y).mean().detach())


@pytest.mark.parametrize(
    "loss", [None, nn.BCEWithLogitsLoss(), "binary_cross_entropy"], ids=["usual", "torch's", "named"]
)
def test_several_labels_per_row(loss):
    rng = torch.Generator().manual_seed(0)
    xs = [torch.randn(ROWS, 3, generator=rng) for _ in range(CLIENTS)]
    data = {f"site {i}": (x, (x[:, :2] > 0).float()) for i, x in enumerate(xs)}
    result = mooring.fit(data, model=lambda classes: nn.Linear(3, classes), loss=loss, rounds=30, **QUICK)
    assert result.job.clients.kind == "labels"
    assert result.module("site 0")(xs[0]).shape == (ROWS, 2)
    assert result.summary["personal"] < np.log(2) / 2
    if loss is None:
        predicted = result.predict(xs[0], "site 0")
        assert float(((predicted > 0.5) == (xs[0][:, :2] > 0)).float().mean()) > 0.9


def test_several_numbers_per_row():
    data = numbers(0.0, outputs=2)
    result = mooring.fit(data, model=lambda: nn.Linear(3, 2), rounds=40, **QUICK)
    x, y = data["site 1"]
    assert float((result.module("site 1")(x) - y).square().mean().detach()) < 0.05 * float(y.var())


def test_arrays_are_taken_as_they_are():
    """Constant columns stay, nothing is scaled, and classes keep their numbers."""
    rng = np.random.default_rng(0)
    x = rng.normal(5, 3, (40, 3))
    x[:, 1] = 7.0
    data = {name: (x, np.where(x[:, 0] > 5, 4, 2)) for name in ("a", "b")}
    result = mooring.fit(data, model=lambda features, classes: nn.Linear(features, classes), rounds=2, **QUICK)
    clients = result.job.clients
    assert clients.train.x.shape[1] == 3 and bool((clients.train.x[:, 1] == 7).all())
    assert set(clients.train.y.tolist()) == {2, 4} and result.module("a").out_features == 5


def test_loaders_data_sets_and_own_parts():
    data = sentences()
    sets = {name: TensorDataset(*pair) for name, pair in data.items()}
    loaders = {name: DataLoader(one, batch_size=7, shuffle=True) for name, one in sets.items()}
    ways = [data, sets, loaders, list(sets.values())]
    found = [mooring.fit(Plain, way, rounds=2, **QUICK) for way in ways[:3]]
    for one in found[1:]:
        assert torch.equal(one.models["site 0"], found[0].models["site 0"])
    assert list(mooring.fit(Plain, ways[3], rounds=1, **QUICK).models) == [f"client {i}" for i in range(CLIENTS)]
    own = {
        n: {"train": (x[:40], y[:40]), "validation": (x[40:50], y[40:50]), "test": (x[50:], y[50:])}
        for n, (x, y) in data.items()
    }
    clients = mooring.fit(Plain, own, rounds=1, **QUICK).job.clients
    assert torch.equal(clients.test.of(2)[0], data["site 2"][0][50:])
    assert clients.train.size.tolist() == [40] * CLIENTS


def test_a_device_that_is_not_there():
    if torch.cuda.is_available():
        pytest.skip("this machine has the device")
    with pytest.raises(RequestError, match="device 'cuda' is not there; this machine has cpu"):
        mooring.fit(Plain, sentences(), device="cuda")


def test_a_result_is_told_in_ten_lines():
    result = mooring.fit(Plain, sentences(), rounds=2, **QUICK)
    assert len(repr(result).splitlines()) <= 10 and "fedavg_finetune" in repr(result)


def test_without_baselines_nothing_else_is_trained():
    steps = set()
    result = mooring.fit(Plain, sentences(), rounds=2, **QUICK, progress=lambda what, *_: steps.add(what))
    assert steps == {"fedavg_finetune"} and result.clients["local"].isna().all()


def test_a_model_that_fails_says_where():
    with pytest.raises(RequestError, match=r"the model fails on rows of shape \(5,\)"):
        mooring.fit(sentences(), model=lambda: nn.Sequential(nn.Embedding(3, 4), nn.Flatten(), nn.Linear(20, 2)))


NETS = """
import torch
from torch import nn

class Gru(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.body, self.out = nn.Embedding(12, 4), nn.GRU(4, 4, batch_first=True), nn.Linear(4, 2)
    def forward(self, x):
        return self.out(self.body(self.embed(x))[0].mean(1))

class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(12, 4), nn.Linear(4, 2)
        self.body = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    def forward(self, x):
        return self.out(self.body(self.embed(x)).mean(1))

def frozen():
    torch.manual_seed(5)  # as if loaded from a file
    net = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 1))
    for part in net[:2].parameters():
        part.requires_grad_(False)
    return net

def labels():
    return nn.Linear(3, 2)

def number():
    return nn.Linear(3, 1)

def huber(output, y):
    return nn.functional.huber_loss(output[:, 0], y, reduction="none", delta=10.0)
"""


def two_labels():
    return {name: (x, (x[:, :2] > 0).float()) for name, (x, _) in numbers().items()}


@pytest.mark.parametrize(
    "make, loss, rows",
    [
        ("Gru", None, sentences),
        ("Transformer", None, sentences),
        ("frozen", None, numbers),
        ("labels", None, two_labels),
        ("number", "nets.py:huber", numbers),
    ],
)
def test_whatever_is_trained_is_resumed_predicted_and_exported(tmp_path, monkeypatch, make, loss, rows):
    """By its file alone, as another process would: to the same bytes, the same answers, the same weights."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets.py").write_text(NETS)
    data = rows()
    x = data["site 1"][0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        how = {"model": f"nets.py:{make}", "rounds": 4, "checkpoint_every": 2, "evaluate_every": 2, **QUICK}
        result = mooring.fit(data, out="run", loss=loss, **how)
        whole = (tmp_path / "run" / MODELS_FILE).read_bytes()
        (tmp_path / "run" / MODELS_FILE).unlink()  # as if killed before the end
        newest = checkpoint.list_checkpoints("run")[0][1]
        newest.unlink()
        resume_fit("run", source=data)
        assert (tmp_path / "run" / MODELS_FILE).read_bytes() == whole
        run = mooring.open("run")
        torch.testing.assert_close(run.predict(x, "site 1"), result.predict(x, "site 1"))
        weights, _ = export("run", "torch", "site 1")
    net, known = run.module("site 1"), load(weights)
    assert set(known) == set(net.state_dict()) and all(torch.equal(known[k], v) for k, v in net.state_dict().items())
    torch.testing.assert_close(net(x), result.module("site 1")(x))
