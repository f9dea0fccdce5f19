"""Networks, losses and data that do more than map rows to answers: each is trained as a plain loop of torch's would, by
FedAvg with full batches through `mooring.fit`, or is refused in one sentence."""
# ruff: noqa: E501

import copy
import threading
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint
from torch.utils.data import (
    DataLoader,
    Dataset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

import mooring
from mooring.core.errors import RequestError
from mooring.engines.export import as_torch

SIZES, OTHERS, ETA, STEPS, ROUNDS = (12, 18), 6, 0.05, 3, 2
SETTINGS = {"eta": ETA, "steps": STEPS, "batch": 0}
OPTIONS = {"rounds": ROUNDS, "baselines": False, "checkpoint": "last", "threads": 1}
CE = functional.cross_entropy
RNG = torch.Generator().manual_seed(0)


def normal(*shape):
    return lambda n: torch.randn(n, *shape, generator=RNG)


def integers(top, *shape):
    return lambda n: torch.randint(0, top, (n, *shape), generator=RNG)


def take(values, rows):
    return {name: part[rows] for name, part in values.items()} if isinstance(values, dict) else values[rows]


def federation(inputs, targets, sizes=SIZES):
    out = {}
    for i, n in enumerate(sizes):
        x, y = inputs(n + 2 * OTHERS), targets(n + 2 * OTHERS)
        cuts = {"train": slice(0, n), "validation": slice(n, n + OTHERS), "test": slice(n + OTHERS, n + 2 * OTHERS)}
        out[f"site {i}"] = {part: (take(x, rows), y[rows]) for part, rows in cuts.items()}
    return out


def plain_loop(module, data, loss, ridge=0.0):
    """FedAvg, written out: full batches in training mode, then the mean of parameters and buffers by rows."""
    model = copy.deepcopy(module).train()
    for _ in range(ROUNDS):
        states = []
        for parts in data.values():
            net, (x, y) = copy.deepcopy(model), parts["train"]
            optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], ETA, weight_decay=ridge)
            for _ in range(STEPS):
                optimizer.zero_grad()
                rows = {name: part.clone() for name, part in x.items()} if isinstance(x, dict) else x.clone()
                loss(net(**rows) if isinstance(rows, dict) else net(rows), y).backward()
                optimizer.step()
            states.append(net.state_dict())
        shares = [n / sum(SIZES) for n in SIZES]
        mean = {k: sum(p * state[k] for p, state in zip(shares, states)) for k in states[0]}
        model.load_state_dict({k: v.to(states[0][k].dtype) for k, v in mean.items()})
    return model


class Net(nn.Module):
    """Layers by name, and what to do with them."""

    def __init__(self, answer, **layers):
        super().__init__()
        self.answer = answer
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x):
        return self.answer(self, x)


class Mean(nn.Module):
    """A running mean of its own in a buffer, changed in place or replaced."""

    def __init__(self, in_place):
        super().__init__()
        self.in_place, self.linear = in_place, nn.Linear(5, 3)
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x):
        if self.training and self.in_place:
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        elif self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.linear(x - self.mean)


class Several(nn.Module):
    """Takes whatever arguments there are, by name."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, **inputs):
        return self.a(inputs["x"]) + self.b(inputs["z"])


class EvalNorm(nn.Module):
    """Keeps its batch normalization in evaluation mode, as fine-tuning codes do."""

    def __init__(self):
        super().__init__()
        self.body, self.norm, self.out = nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x):
        return self.out(torch.relu(self.norm(self.body(x))))


def recompute(reentrant):
    def answer(net, x):
        def body(z):
            return torch.tanh(net.body(z))

        if not torch.is_grad_enabled():
            return net.out(body(x))
        return net.out(checkpoint(body, x.requires_grad_() if reentrant else x, use_reentrant=reentrant))

    return lambda: Net(answer, body=nn.Linear(5, 8), out=nn.Linear(8, 3))


def change_rows(net, x):
    x[:, 0] = 0
    return net.out(x.mul_(2))


def with_hooks():
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    net[0].register_forward_hook(lambda layer, given, output: 2 * output)
    return net


def shared_layer(layer, size):
    return lambda: Net(
        lambda net, x: net.out(net.second(torch.tanh(net.first(x)))), first=layer, second=layer, out=nn.Linear(size, 3)
    )


def scale_by(factor):
    return lambda net, x: net.out(factor(net, x) * x)


X5, Y3, WORDS = normal(5), integers(3), integers(11, 6)
ONE, COLUMN = normal(), normal(1)
CASES = {
    "spectral norm": (
        lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(5, 8)), nn.ReLU(), nn.Linear(8, 3)), X5, Y3, None, CE,
    ),
    "embeddings of bounded norm": (
        lambda: nn.Sequential(nn.Embedding(11, 4, max_norm=1.0), nn.Flatten(), nn.Linear(24, 3)), WORDS, Y3, None, CE,
    ),
    "sparse embeddings": (
        lambda: nn.Sequential(nn.EmbeddingBag(11, 8, sparse=True), nn.Linear(8, 3)), WORDS, Y3, None, CE,
    ),
    "a layer in two places": (shared_layer(nn.Linear(5, 5), 5), X5, Y3, None, CE),
    "statistics in two places": (shared_layer(nn.BatchNorm1d(5), 5), X5, Y3, None, CE),
    "double precision": (lambda: nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double(), lambda n: X5(n).double(), Y3, None, CE),
    "a buffer changed in place": (lambda: Mean(True), X5, Y3, None, CE),
    "a buffer replaced": (lambda: Mean(False), X5, Y3, None, CE),
    "activations in place": (
        lambda: nn.Sequential(nn.Linear(5, 8), nn.ELU(inplace=True), nn.Linear(8, 3), nn.Hardtanh(inplace=True)), X5, Y3, None, CE,
    ),
    "large, activations in place": (
        lambda: nn.Sequential(nn.Linear(5, 300), nn.ELU(inplace=True), nn.Linear(300, 300), nn.Hardtanh(inplace=True), nn.Linear(300, 3)), X5, Y3, None, CE,
    ),
    "rows changed in place": (lambda: Net(change_rows, out=nn.Linear(5, 3)), X5, Y3, None, CE),
    "recomputed layers": (recompute(False), X5, Y3, None, CE),
    "recomputed layers, reentrant": (recompute(True), X5, Y3, None, CE),
    "forward hooks": (with_hooks, X5, Y3, None, CE),
    "control flow": (lambda: Net(lambda net, x: net.a(x) if x.sum() > 0 else net.b(x), a=nn.Linear(5, 3), b=nn.Linear(5, 3)), X5, Y3, None, CE),
    "rows centered in a batch": (lambda: Net(lambda net, x: net.out(x - x.mean(0)), out=nn.Linear(5, 3)), X5, Y3, None, CE),
    "another answer in training": (lambda: Net(scale_by(lambda net, x: 2 if net.training else 1), out=nn.Linear(5, 3)), X5, Y3, None, CE),
    "normalization kept in evaluation": (EvalNorm, X5, Y3, None, CE),
    "BCEWithLogitsLoss on [n, 1]": (
        lambda: nn.Linear(5, 1), X5, integers(2), nn.BCEWithLogitsLoss(), lambda o, y: nn.BCEWithLogitsLoss()(o[:, 0], y.float()),
    ),
    "MSELoss on [n, 1]": (lambda: nn.Linear(5, 1), X5, COLUMN, nn.MSELoss(), nn.MSELoss()),
    "MSELoss of [n, 1] and [n]": (lambda: nn.Linear(5, 1), X5, ONE, nn.MSELoss(), lambda o, y: nn.MSELoss()(o[:, 0], y)),
    "a function of [n, 1] and [n, 1]": (
        lambda: nn.Linear(5, 1), X5, COLUMN, lambda o, y: (o - y).pow(2).mean(), lambda o, y: (o - y).pow(2).mean(),
    ),
    "an ignored class": (lambda: nn.Linear(5, 3), X5, Y3, nn.CrossEntropyLoss(ignore_index=2), nn.CrossEntropyLoss(ignore_index=2)),
    "an ignored class of tokens": (
        lambda: Net(lambda net, x: net.out(net.embed(x)).movedim(-1, 1), embed=nn.Embedding(11, 4), out=nn.Linear(4, 3)),
        WORDS, integers(3, 6), nn.CrossEntropyLoss(ignore_index=0), nn.CrossEntropyLoss(ignore_index=0),
    ),
    "several positional arguments": (Several, lambda n: {"x": X5(n), "z": X5(n)}, Y3, None, CE),
    "a distribution": (
        lambda: Net(lambda net, x: torch.distributions.Normal(net.out(x)[:, 0], 1.0), out=nn.Linear(5, 1)), X5, ONE,
        lambda o, y: -o.log_prob(y).mean(), lambda o, y: -o.log_prob(y).mean(),
    ),
    "two classes of pixels": (
        lambda: nn.Conv2d(1, 2, 3, padding=1), normal(1, 4, 4), integers(2, 4, 4), nn.CrossEntropyLoss(), nn.CrossEntropyLoss(),
    ),
    "KLDivLoss by batch": (
        lambda: nn.Sequential(nn.Linear(5, 3), nn.LogSoftmax(1)), X5, lambda n: torch.softmax(normal(3)(n), 1),
        nn.KLDivLoss(reduction="batchmean"), nn.KLDivLoss(reduction="batchmean"),
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:the clients' networks are trained one after another")
@pytest.mark.parametrize("name", CASES)
def test_fedavg_is_that_of_a_plain_loop(name):
    make, inputs, targets, loss, torch_loss = CASES[name]
    torch.manual_seed(0)
    module, data = make(), federation(inputs, targets)
    kept = copy.deepcopy(data)
    options = OPTIONS | ({} if loss is None else {"loss": loss})
    result = mooring.fit(copy.deepcopy(module), data, algorithm="fedavg", settings=SETTINGS, **options)
    expected, actual = plain_loop(module, data, torch_loss).state_dict(), result.module().state_dict()
    for key, part in expected.items():
        torch.testing.assert_close(actual[key].to(part.dtype), part, rtol=1e-4, atol=1e-5)
    assert any(not torch.equal(part, module.state_dict()[key]) for key, part in actual.items())
    assert np.isfinite(result.predict(data["site 0"]["test"][0], "site 0").numpy()).all()
    before, after = (rows["site 0"]["train"][0] for rows in (kept, data))
    assert isinstance(before, dict) or torch.equal(before, after)  # rows are not changed


@pytest.mark.filterwarnings("ignore:the clients' networks are trained one after another")
@pytest.mark.parametrize("make", [recompute(False), lambda: nn.Sequential(nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 2, 3), nn.Flatten(), nn.Linear(6, 3))])  # fmt: skip
def test_a_ridge_counts_once(make):
    torch.manual_seed(0)
    module, data = make(), federation(X5, Y3)
    options = OPTIONS | {"task": {"ridge": 0.5}}
    result = mooring.fit(copy.deepcopy(module), data, algorithm="fedavg", settings=SETTINGS, **options)
    expected = plain_loop(module, data, CE, ridge=0.5).state_dict()
    for key, part in result.module().state_dict().items():
        torch.testing.assert_close(part, expected[key], rtol=1e-4, atol=1e-5)


def test_parameters_of_half_the_precision_are_trained():
    def make():
        return Net(lambda net, x: net.out(x), out=nn.Linear(5, 3)).bfloat16()

    result = mooring.fit(make, federation(X5, Y3), algorithm="fedavg", settings=SETTINGS, **OPTIONS)
    assert result.module().out.weight.dtype == torch.bfloat16 and np.isfinite(result.summary["personal"])


def test_parameters_without_a_part_in_the_loss_do_not_decay():
    net = Net(lambda net, x: net.out(x), unused=nn.Linear(7, 7), out=nn.Linear(5, 3))
    settings = SETTINGS | {"optimizer": "adamw", "weight_decay": 0.1}
    result = mooring.fit(copy.deepcopy(net), federation(X5, Y3), algorithm="fedavg", settings=settings, **OPTIONS)
    assert torch.equal(result.module().unused.weight, net.unused.weight)
    assert not torch.equal(result.module().out.weight, net.out.weight)


def test_random_numbers_of_numpy_can_be_replayed():
    def make():
        return Net(scale_by(lambda net, x: np.random.rand() if net.training else 1.0), out=nn.Linear(5, 3))

    data = federation(X5, Y3)
    first, second = (mooring.fit(make, data, algorithm="fedavg", settings=SETTINGS, **OPTIONS) for _ in range(2))
    plain = mooring.fit(lambda: Net(scale_by(lambda net, x: 1.0), out=nn.Linear(5, 3)), data, algorithm="fedavg", settings=SETTINGS, **OPTIONS)  # fmt: skip
    assert torch.equal(first.models["site 0"], second.models["site 0"])
    assert not torch.equal(first.models["site 0"], plain.models["site 0"])


@pytest.mark.parametrize("buffers", ["average", "local", "frozen"])
def test_own_buffers_are_stored_with_the_model(tmp_path, buffers):
    data = federation(lambda n: {"x": X5(n)}, Y3)
    options = OPTIONS | {"task": {"buffers": buffers}, "out": tmp_path / "run"}
    result = mooring.fit(lambda: Mean(True), data, algorithm="fedavg", settings=SETTINGS, **options)
    again = mooring.open(tmp_path / "run", model=lambda: Mean(True)).module("site 0")
    assert torch.equal(again.mean, result.module("site 0").mean)
    assert bool(again.mean.any()) == (buffers != "frozen")


def test_shared_weights_are_exported(tmp_path):
    def make():
        net = Net(lambda net, x: net.out(net.embed(x)), embed=nn.Embedding(11, 8), out=nn.Linear(8, 11, bias=False))
        net.out.weight = net.embed.weight
        return net

    data = federation(WORDS, integers(11, 6))
    mooring.fit(make, data, algorithm="fedavg", settings=SETTINGS, out=tmp_path / "run", **OPTIONS)
    assert len(as_torch(mooring.open(tmp_path / "run", model=make), "site 0")) > 2 * 11 * 8 * 4


@dataclass
class Answer:
    scores: torch.Tensor
    inputs: torch.Tensor


def test_data_classes_are_outputs():
    make = lambda: Net(lambda net, x: Answer(net.out(x), x), out=nn.Linear(5, 3))  # noqa: E731
    for loss in ({}, {"loss": lambda answer, y: CE(answer.scores, y)}):
        result = mooring.fit(make, federation(X5, Y3), algorithm="fedavg", settings=SETTINGS, **OPTIONS, **loss)
        assert np.isfinite(result.summary["personal"])


def test_targets_of_several_numbers_need_no_prediction_of_that_shape():
    def cox(output, y):  # a partial likelihood: times and events
        later = y[None, :, 0] >= y[:, None, 0]
        scores = output[:, 0]
        total = torch.logsumexp(scores[None].masked_fill(~later, -1e9), 1)
        return ((total - scores) * y[:, 1]).sum() / y[:, 1].sum().clamp(min=1)

    times = lambda n: torch.stack([normal()(n).abs(), integers(2)(n).float()], 1)  # noqa: E731
    result = mooring.fit(
        lambda: nn.Linear(5, 1), federation(X5, times), algorithm="fedavg", settings=SETTINGS, loss=cox, **OPTIONS
    )
    assert np.isfinite(result.summary["personal"])


def test_heads_of_labels_tokens_and_single_layers_are_advised():
    settings = {"eta": 0.1, "batch": 8, "steps": 2, "optimizer": "sgd", "server_optimizer": "sgd"}
    for data, make in (
        (federation(X5, integers(2, 3)), lambda: nn.Linear(5, 3)),
        (federation(WORDS, integers(3, 6)), lambda: nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 3))),
    ):
        assert mooring.advise(data, model=make, rounds=2, settings=settings, threads=1).headline


ITEMS = [(torch.randn(5, generator=RNG), i % 3) for i in range(20)]
TENSORS = TensorDataset(torch.stack([x for x, _ in ITEMS]), torch.tensor([y for _, y in ITEMS]))
TRAINED = {"model": lambda: nn.Linear(5, 3), "algorithm": "fedavg", "settings": {"eta": 0.1, "epochs": 1, "batch": 8}}


def test_a_sampler_that_selects_rows_is_heeded():
    for rows in (ITEMS, TENSORS):
        loader = DataLoader(rows, sampler=SubsetRandomSampler(range(12)))
        assert list(mooring.fit([loader, loader], **TRAINED, **OPTIONS).clients["rows"]) == [12, 12]


def test_each_part_has_its_own_collate_fn_and_loaders_are_predicted():
    seen = []

    def collate(items):
        seen.append(len(items))
        return default_collate(items)

    parts = {"train": DataLoader(TENSORS, collate_fn=collate), "test": DataLoader(TENSORS)}
    result = mooring.fit([parts, parts], **TRAINED, **OPTIONS)
    assert len(seen) > 2 * ROUNDS
    expected = result.predict(TENSORS.tensors[0], "client 0")
    torch.testing.assert_close(result.predict(DataLoader(ITEMS), "client 0"), expected)


class Broken(Dataset):
    def __init__(self, reads):
        self.reads = reads

    def __len__(self):
        return 20

    def __getitem__(self, i):
        self.reads -= 1
        if self.reads < 0:
            raise OSError("disk gone")
        return ITEMS[i]


def mixed(items):
    x, y = default_collate(items)
    return x, functional.one_hot(y, 3) / 2 + 1 / 6


def hooked():
    net = nn.Linear(5, 3)
    net.weight.register_hook(lambda slope: slope / 2)
    return net


def pruned():
    net = nn.Sequential(nn.Linear(5, 3))
    prune.random_unstructured(net[0], "weight", 0.5)
    return net


def unused_head():
    return Net(lambda net, x: net.out(x), out=nn.Linear(5, 3), last=nn.Linear(5, 3))


class Teacher(nn.Module):
    """A frozen teacher that follows the trained layer."""

    def __init__(self):
        super().__init__()
        self.out, self.teacher = nn.Linear(5, 3), nn.Linear(5, 3).requires_grad_(False)

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.teacher.weight.lerp_(self.out.weight, 0.1)
        return self.out(x) + self.teacher(x)


class Locked(nn.Linear):
    def __init__(self):
        super().__init__(5, 3)
        self.lock = threading.Lock()


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x, z):
        return self.a(x) + self.b(z)


ROWS = federation(X5, Y3)
LINEAR = {"model": lambda: nn.Linear(5, 3)}
REFUSED = {
    "scripted": (ROWS, {"model": lambda: torch.jit.trace(nn.Linear(5, 3), torch.zeros(2, 5))}, "torch.jit module"),
    "wrapped": (ROWS, {"model": lambda: nn.DataParallel(nn.Linear(5, 3))}, "give the wrapped module"),
    "gradient hook": (ROWS, {"model": hooked}, "has a gradient hook"),
    "gradient hook of an object": (ROWS, {"model": hooked()}, "has a gradient hook"),
    "pruned": (ROWS, {"model": pruned}, "keeps the computed tensor 'weight'"),
    "lazy object": (ROWS, {"model": nn.LazyLinear(3)}, "give a function that makes it"),
    "arguments": (ROWS, {"model": lambda width: nn.Linear(5, width)}, "takes 'width', which is not filled in"),
    "complex": (
        ROWS, {"model": lambda: nn.Linear(5, 3, dtype=torch.cfloat)}, "is complex",
    ),
    "several types": (ROWS, {"model": lambda: nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3).double())}, "of several types"),
    "without values": (ROWS, {"model": lambda: nn.Linear(5, 3, device="meta")}, "on the device 'meta'"),
    "too few outputs": (ROWS, {"model": lambda: nn.Linear(5, 2)}, "returns 2 numbers per row, where the targets have classes up to 2"),
    "too many outputs": (federation(X5, ONE), LINEAR, "returns 3 numbers per row, where the target has 1"),
    "a loss of a class": (ROWS, LINEAR | {"loss": nn.CrossEntropyLoss}, "give an object of it"),
    "a loss that fails": (ROWS, LINEAR | {"loss": lambda o, y: o.absent}, "the loss fails on outputs of the shape"),
    "a loss that is a number": (ROWS, LINEAR | {"loss": lambda o, y: CE(o, y).item()}, "must return a tensor, got float"),
    "a detached loss": (ROWS, LINEAR | {"loss": lambda o, y: CE(o.detach(), y)}, "is a tensor detached"),
    "a loss with parameters": (ROWS, LINEAR | {"loss": nn.Sequential(nn.Linear(3, 1))}, "the loss has parameters to train"),
    "weighted draws": ([DataLoader(TENSORS, sampler=WeightedRandomSampler(torch.ones(20), 40))] * 2, LINEAR, "WeightedRandomSampler is not used"),
    "mixed targets": ([DataLoader(TENSORS, collate_fn=mixed)] * 2, LINEAR, "collate_fn changes the targets"),
    "an item that cannot be read": ([Broken(7)] * 2, LINEAR, r"item 8\): disk gone"),
    "a data set that breaks off": ([Broken(50)] * 2, LINEAR, "cannot be read: disk gone"),
    "gaps in dictionaries": (federation(lambda n: {"x": X5(n) / 0}, Y3), {"model": lambda: Net(lambda net, x: net.out(x), out=nn.Linear(5, 3))}, "NaN or infinite inputs"),
    "a state of parameters": (ROWS, {"model": Teacher}, "changes its parameter 'teacher.weight' in a forward pass"),
    "no copies": (ROWS, {"model": Locked}, "cannot be copied for its clients"),
    "no copies of an object": (ROWS, {"model": Locked()}, "cannot be copied for its clients"),
    "an argument that is not taken": (federation(lambda n: {"x": X5(n), "z": X5(n), "id": ONE(n)}, Y3), {"model": Two}, "takes x, z, but the inputs have 'id' as well"),
    "an output without dimensions": (
        federation(X5, integers(2), (1, 18)), {"model": lambda: Net(lambda net, x: net.out(x).squeeze(), out=nn.Linear(5, 1))}, r"squeeze\(-1\)",
    ),
    "an output without predictions": (ROWS, {"model": lambda: Net(lambda net, x: {net.out(x)}, out=nn.Linear(5, 3))}, "returns a set; it must return a tensor"),
    "no normalization layers": (ROWS, LINEAR | {"algorithm": "fedbn"}, "has no normalization layer"),
    "an unused head": (ROWS, {"model": unused_head, "algorithm": "fedper"}, "'last', plays no part in the model's output"),
    "an unused head, contrastive": (ROWS, {"model": unused_head, "algorithm": "moon"}, "plays no part"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_wrong_is_refused_in_a_sentence(name):
    data, options, sentence = REFUSED[name]
    with pytest.raises(RequestError, match=sentence):
        mooring.fit(data, **({"algorithm": "fedavg", "settings": SETTINGS} | OPTIONS | options))


def test_a_head_that_runs_last_and_is_declared_first_is_named():
    make = lambda: Net(lambda net, x: net.fc(net.body(x)), fc=nn.Linear(8, 3), body=nn.Linear(5, 8))  # noqa: E731
    with pytest.warns(UserWarning, match="'fc' is the last that runs"):
        mooring.fit(make, ROWS, algorithm="fedper", settings=SETTINGS, **OPTIONS)


class Counting(nn.Module):
    """Answers by how often it was called."""

    def __init__(self):
        super().__init__()
        self.out, self.calls = nn.Linear(5, 3), 0

    def forward(self, x):
        self.calls += self.training
        return self.out(x) * (1 + 0.1 * self.calls)


def frozen_norm():
    net = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    net[1].requires_grad_(False)
    return net


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (Counting, "changes when it is repeated"),
        (lambda: Net(scale_by(lambda net, x: GENERATOR.normal()), out=nn.Linear(5, 3)), "changes when it is repeated"),
        (frozen_norm, "'1' are frozen: it uses and keeps its running statistics"),
    ],
)
def test_what_differs_from_a_plain_loop_is_said(make, sentence):
    with pytest.warns(UserWarning, match=sentence):
        mooring.fit(make, ROWS, algorithm="fedavg", settings=SETTINGS, **OPTIONS | {"rounds": 1})


GENERATOR = np.random.default_rng(0)


def test_a_loss_of_a_minibatch_is_resolved_for_perceptrons():
    """Constants of losses are taken before the first local step."""
    make = lambda: nn.Sequential(nn.Linear(5, 3), nn.Softmax(1))  # noqa: E731
    loss = lambda o, y: functional.nll_loss(o.log(), y)  # noqa: E731
    settings = {"steps": 2, "batch": 4}
    assert np.isfinite(mooring.fit(make, ROWS, settings=settings, loss=loss, rounds=1).summary["local"])


def test_a_last_layer_without_a_body_has_no_contrast():
    data = federation(lambda n: {"x": X5(n), "z": X5(n)}, Y3)
    models = [mooring.fit(Two, data, algorithm=a, settings=SETTINGS, **OPTIONS).models for a in ("moon", "fedavg")]
    torch.testing.assert_close(models[0]["site 0"], models[1]["site 0"])
