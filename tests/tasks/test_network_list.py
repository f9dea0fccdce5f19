"""A list of models, losses, data and optimizers as people bring them: each equals a plain torch loop, or is refused in
one sentence."""
# ruff: noqa: E501

import random
from collections import OrderedDict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

import mooring
from mooring.algorithms.base import build
from mooring.core.cohort import CohortData, Round, Rows
from mooring.core.errors import RequestError
from mooring.core.items import DatasetItems, TensorItems
from mooring.core.minibatches import count_local_steps, draw_rows, forward_keys, minibatches
from mooring.engines import local_update
from mooring.tasks.network import NetworkTask
from tests.tasks.test_network_training import NETWORKS, SmallResNet

ROWS, BATCH, ETA = (9, 12), 4, 0.05
RNG = torch.Generator().manual_seed(0)


def normal(*shape):
    return torch.randn(sum(ROWS), *shape, generator=RNG)


def whole(top, *shape):
    return torch.randint(0, top, (sum(ROWS), *shape), generator=RNG)


class Text(nn.Module):
    """A bag of embedded words, a recurrent network or a Transformer; the last state or every token."""

    def __init__(self, kind="mean", tokens=False, dropout=0.0):
        super().__init__()
        self.embed, self.kind, self.tokens = nn.Embedding(11, 8), kind, tokens
        if kind in ("LSTM", "GRU", "RNN"):
            self.body = getattr(nn, kind)(8, 8, batch_first=True)
        elif kind == "transformer":
            self.body = nn.TransformerEncoderLayer(8, 2, 16, dropout, batch_first=True)
        else:
            self.body = nn.Identity()
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        out = self.body(self.embed(x))
        out = out[0] if isinstance(out, tuple) else out
        return self.head(out if self.tokens else out.mean(1))


class PackedText(nn.Module):
    """A recurrent network on packed sequences, which end at the first word 0."""

    def __init__(self):
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(11, 8), nn.GRU(8, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x):
        lengths = (x != 0).long().cumprod(1).sum(1).clamp(min=1)
        packed = nn.utils.rnn.pack_padded_sequence(self.embed(x), lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.body(packed)[1][0])


class UNet(nn.Module):
    """A contracting and an expanding path with a skip connection: classes of pixels."""

    def __init__(self):
        super().__init__()
        self.down, self.inner, self.norm = (
            nn.Conv2d(1, 4, 3, padding=1),
            nn.Conv2d(4, 8, 3, padding=1),
            nn.BatchNorm2d(8),
        )
        self.up, self.out = nn.ConvTranspose2d(8, 4, 2, 2), nn.Conv2d(8, 3, 1)

    def forward(self, x):
        a = torch.relu(self.down(x))
        b = torch.relu(self.norm(self.inner(functional.max_pool2d(a, 2))))
        return self.out(torch.cat([self.up(b), a], 1))


class Returns(nn.Module):
    """A linear model that returns more than a tensor, or takes more than one."""

    def __init__(self, form, outputs=3):
        super().__init__()
        self.form, self.linear = form, nn.Linear(5, outputs)

    def forward(self, x):
        out = self.linear(x)
        forms = {"tuple": (out, x), "dict": {"logits": out, "hidden": x}, "object": SimpleNamespace(logits=out)}
        return forms.get(self.form, out)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(5, 3), nn.Linear(2, 3)

    def forward(self, x, z):
        return self.a(x) + self.b(z)


class Masked(nn.Module):
    """Ragged sequences, padded, with a mask."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 3)

    def forward(self, input_ids, attention_mask):
        mask = attention_mask[..., None].to(self.head.weight.dtype)
        out = self.head((self.embed(input_ids) * mask).sum(1) / mask.sum(1).clamp(min=1))
        return OrderedDict(logits=out)


class Adapter(nn.Module):
    """Low-rank adapters on a frozen body, as LoRA has them."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(5, 8).requires_grad_(False)
        self.lora_a, self.lora_b = nn.Linear(5, 2, bias=False), nn.Linear(2, 8, bias=False)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x) + self.lora_b(self.lora_a(x))))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(5, 5)

    def forward(self, x):
        return self.a(torch.tanh(self.a(x)))[:, :3]


class Noise(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(5, 3)

    def forward(self, x):
        return self.a(x + 0.1 * torch.randn_like(x)) if self.training else self.a(x)


def stack(*layers):
    return lambda: nn.Sequential(*[layer() for layer in layers])


def image(*layers):
    return lambda: nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), *[make() for make in layers], nn.Flatten(), nn.LazyLinear(3)
    )


X, IMAGES, WORDS = normal(5), normal(1, 4, 4), whole(11, 6)
CLASSES, NUMBERS = whole(3), normal()
CE = functional.cross_entropy
CASES = {
    # models on rows of numbers; one line per case
    "linear": (stack(lambda: nn.Linear(5, 3)), X, CLASSES, "cross_entropy", CE),
    "perceptron": (stack(lambda: nn.Linear(5, 8), nn.ReLU, lambda: nn.Linear(8, 3)), X, CLASSES, "cross_entropy", CE),
    "gelu": (stack(lambda: nn.Linear(5, 8), nn.GELU, lambda: nn.Linear(8, 3)), X, CLASSES, "cross_entropy", CE),
    "layer norm": (
        stack(lambda: nn.Linear(5, 8), lambda: nn.LayerNorm(8), nn.ReLU, lambda: nn.Linear(8, 3)), X, CLASSES, "cross_entropy", CE,
    ),
    "batch norm 1d": (
        stack(lambda: nn.Linear(5, 8), lambda: nn.BatchNorm1d(8), lambda: nn.Linear(8, 3)), X, CLASSES, "cross_entropy", CE,
    ),
    "batch norm without weights": (
        stack(lambda: nn.BatchNorm1d(5, affine=False), lambda: nn.Linear(5, 3)), X, CLASSES, "cross_entropy", CE,
    ),
    "dropout": (stack(nn.Dropout, lambda: nn.Linear(5, 3)), X, CLASSES, "cross_entropy", CE),
    "alpha dropout": (stack(nn.AlphaDropout, lambda: nn.Linear(5, 3)), X, CLASSES, "cross_entropy", CE),
    "rrelu": (stack(lambda: nn.Linear(5, 8), nn.RReLU, lambda: nn.Linear(8, 3)), X, CLASSES, "cross_entropy", CE),
    "noise in forward": (Noise, X, CLASSES, "cross_entropy", CE),
    "tied weights": (Tied, X, CLASSES, "cross_entropy", CE),
    "frozen body with adapters": (Adapter, X, CLASSES, "cross_entropy", CE),
    "weight norm": (
        stack(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(5, 3))), X, CLASSES, "cross_entropy", CE,
    ),
    "lazy linear": (stack(lambda: nn.LazyLinear(8), nn.ReLU, lambda: nn.LazyLinear(3)), X, CLASSES, "cross_entropy", CE),
    "embedding bag": (stack(lambda: nn.EmbeddingBag(11, 8), lambda: nn.Linear(8, 3)), WORDS, CLASSES, "cross_entropy", CE),
    # images
    "convolution": (image(nn.ReLU, lambda: nn.MaxPool2d(2)), IMAGES, CLASSES, "cross_entropy", CE),
    "convolution, batch norm": (image(lambda: nn.BatchNorm2d(4), nn.ReLU), IMAGES, CLASSES, "cross_entropy", CE),
    "convolution, group norm": (image(lambda: nn.GroupNorm(2, 4), nn.ReLU), IMAGES, CLASSES, "cross_entropy", CE),
    "convolution, dropout 2d": (image(nn.Dropout2d), IMAGES, CLASSES, "cross_entropy", CE),
    "convolution, instance norm": (image(lambda: nn.InstanceNorm2d(4)), IMAGES, CLASSES, "cross_entropy", CE),
    "transposed convolution": (image(lambda: nn.ConvTranspose2d(4, 2, 2)), IMAGES, CLASSES, "cross_entropy", CE),
    "depthwise convolution": (image(lambda: nn.Conv2d(4, 4, 3, groups=4)), IMAGES, CLASSES, "cross_entropy", CE),
    "adaptive pooling": (image(lambda: nn.AdaptiveAvgPool2d(2)), IMAGES, CLASSES, "cross_entropy", CE),
    "convolution 1d": (
        stack(lambda: nn.Conv1d(1, 4, 3), nn.Flatten, lambda: nn.LazyLinear(3)), normal(1, 6), CLASSES, "cross_entropy", CE,
    ),
    "resnet": (SmallResNet, IMAGES, CLASSES, "cross_entropy", CE),
    # text
    "bag of words": (Text, WORDS, CLASSES, "cross_entropy", CE),
    "lstm": (lambda: Text("LSTM"), WORDS, CLASSES, "cross_entropy", CE),
    "gru": (lambda: Text("GRU"), WORDS, CLASSES, "cross_entropy", CE),
    "packed gru": (PackedText, WORDS, CLASSES, "cross_entropy", CE),
    "rnn": (lambda: Text("RNN"), WORDS, CLASSES, "cross_entropy", CE),
    "transformer": (lambda: Text("transformer"), WORDS, CLASSES, "cross_entropy", CE),
    "transformer, dropout": (lambda: Text("transformer", dropout=0.3), WORDS, CLASSES, "cross_entropy", CE),
    "token classes": (
        lambda: Text("LSTM", tokens=True), WORDS, whole(3, 6), "cross_entropy", lambda out, y: CE(out.movedim(-1, 1), y),
    ),
    "masked token classes": (
        lambda: Text(tokens=True), WORDS, torch.where(whole(2, 6) > 0, whole(3, 6), -100), "cross_entropy",
        lambda out, y: CE(out.movedim(-1, 1), y),
    ),
    "u-net": (UNet, IMAGES, whole(3, 4, 4), "cross_entropy", CE),
    "pixel classes": (stack(lambda: nn.Conv2d(1, 3, 3, padding=1)), IMAGES, whole(3, 4, 4), "cross_entropy", CE),
    # several inputs, structured outputs
    "two inputs": (TwoInputs, (X, normal(2)), CLASSES, "cross_entropy", CE),
    "dictionary with a mask": (
        Masked, {"input_ids": WORDS, "attention_mask": whole(2, 6)}, CLASSES, "cross_entropy", lambda out, y: CE(out["logits"], y),
    ),
    "returns a tuple": (lambda: Returns("tuple"), X, CLASSES, "cross_entropy", lambda out, y: CE(out[0], y)),
    "returns a dictionary": (lambda: Returns("dict"), X, CLASSES, "cross_entropy", lambda out, y: CE(out["logits"], y)),
    "returns an object": (lambda: Returns("object"), X, CLASSES, "cross_entropy", lambda out, y: CE(out.logits, y)),
    "a loss of the whole output": (
        lambda: Returns("tuple"), X, CLASSES, lambda out, y: CE(out[0], y) + out[0].pow(2).mean(),
        lambda out, y: CE(out[0], y) + out[0].pow(2).mean(),
    ),
    # losses
    "regression": (stack(lambda: nn.Linear(5, 1)), X, NUMBERS, "half_square", lambda o, y: 0.5 * functional.mse_loss(o[:, 0], y)),
    "several numbers": (stack(lambda: nn.Linear(5, 2)), X, normal(2), "half_square", lambda o, y: 0.5 * functional.mse_loss(o, y)),
    "labels": (
        stack(lambda: nn.Linear(5, 4)), X, whole(2, 4).float(), "binary_cross_entropy",
        functional.binary_cross_entropy_with_logits,
    ),
    "one logit": (
        stack(lambda: nn.Linear(5, 1)), X, whole(2).float(), "binary_cross_entropy",
        lambda o, y: functional.binary_cross_entropy_with_logits(o[:, 0], y),
    ),
    "a loss per row": (
        stack(lambda: nn.Linear(5, 1)), X, NUMBERS, lambda o, y: (o[:, 0] - y).abs(), lambda o, y: (o[:, 0] - y).abs().mean(),
    ),
    "a loss per batch": (
        stack(lambda: nn.Linear(5, 1)), X, NUMBERS, lambda o, y: (o[:, 0] - y).pow(2).mean().sqrt(),
        lambda o, y: (o[:, 0] - y).pow(2).mean().sqrt(),
    ),
}  # fmt: skip
MODULES = {
    "CrossEntropyLoss": nn.CrossEntropyLoss(),
    "class weights": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 4.0, 0.3])),
    "label smoothing": nn.CrossEntropyLoss(label_smoothing=0.1),
    "sum": nn.CrossEntropyLoss(reduction="sum"),
    "multi margin": nn.MultiMarginLoss(),
}
CASES |= {f"loss: {name}": (CASES["linear"][0], X, CLASSES, loss, loss) for name, loss in MODULES.items()}
NUMBER_LOSSES = {
    "MSELoss": nn.MSELoss(),
    "L1Loss": nn.L1Loss(),
    "HuberLoss": nn.HuberLoss(),
    "SmoothL1Loss": nn.SmoothL1Loss(),
}
CASES |= {
    f"loss: {name}": (stack(lambda: nn.Linear(5, 2)), X, normal(2), loss, loss) for name, loss in NUMBER_LOSSES.items()
}
OPTIMIZERS = {
    "sgd": ({}, lambda p: torch.optim.SGD(p, ETA)),
    "nesterov": ({"momentum": 0.9, "nesterov": True}, lambda p: torch.optim.SGD(p, ETA, 0.9, nesterov=True)),
    "weight decay": ({"weight_decay": 0.1}, lambda p: torch.optim.SGD(p, ETA, weight_decay=0.1)),
    "adam": ({"optimizer": "adam", "epsilon": 1e-3}, lambda p: torch.optim.Adam(p, ETA, eps=1e-3)),
    "adamw": (
        {"optimizer": "adamw", "weight_decay": 0.1, "epsilon": 1e-3},
        lambda p: torch.optim.AdamW(p, ETA, eps=1e-3, weight_decay=0.1),
    ),
}


def cohort(x, y):
    rows = Rows(x, y, torch.tensor([0, ROWS[0]]), torch.tensor(ROWS))
    keys = np.arange(2, dtype=np.uint64)
    return CohortData(
        keys, torch.arange(2), torch.full((2,), 0.5, dtype=torch.float64), rows, rows.select(torch.arange(0))
    )


def beside_a_plain_loop(make, inputs, y, loss, torch_loss, optimizer="sgd", items=None):
    """Local updates of FedAvg at two clients of unequal sizes, beside a loop of torch's own."""
    settings, rule = OPTIMIZERS[optimizer]
    structured = items is not None or not isinstance(inputs, torch.Tensor)
    items = TensorItems(inputs) if items is None and structured else items
    x = torch.arange(sum(ROWS)) if structured else inputs
    task = NetworkTask(make, loss, items=items, sample=x[:2])
    data, turn = cohort(x, y), Round(1, 2, 2, 2, 1.0, 0)
    algorithm = build("fedavg", {"eta": ETA, "epochs": 2, "batch": BATCH, **settings})
    server, first = local_update.first_states(algorithm, task, task.start(1))
    states = type(first)(*(part.expand(2, *part.shape) for part in first))
    _, change = local_update.client_update(algorithm, task, server, states, data, turn)
    counts = count_local_steps(data.train.size, BATCH, None, 2)
    draws = list(draw_rows(data, turn, batch=BATCH, counts=counts))
    for c in range(2):
        net = task._made(1).train()
        for part, fixed in zip(net.parameters(), task.module.parameters()):
            if not part.requires_grad:
                part.data.copy_(fixed)
        stepper = rule([p for p in net.parameters() if p.requires_grad])
        for s in range(int(counts[c])):
            places = torch.from_numpy(draws[s].row_index[c, : draws[s].n[c]])
            for layer in net.modules():
                if isinstance(layer, nn.modules.batchnorm._NormBase) and layer.track_running_stats:
                    layer.train(len(places) > 1)
            torch.manual_seed(int(forward_keys(data, turn, 0, s)[c]) >> 1)
            batch = inputs[places] if not structured else items.take(places)
            stepper.zero_grad()
            out = net(**batch) if isinstance(batch, dict) else net(*batch) if isinstance(batch, tuple) else net(batch)
            torch_loss(out, y[places]).backward()
            stepper.step()
        expected = dict(net.named_parameters()) | dict(net.named_buffers())
        for part in task.layout:
            found = (server.w + change[c])[part.place].view(part.shape)
            torch.testing.assert_close(found, expected[part.name].detach().to(found.dtype), rtol=1e-3, atol=2e-5)
    risk = task.row_risk(server.w.expand(2, -1), data.train.padded())
    assert risk.shape == (2, max(ROWS)) and bool(torch.isfinite(risk).all())


@pytest.mark.filterwarnings("ignore:the clients' networks are trained one after another")
@pytest.mark.parametrize("name", CASES)
def test_local_updates_are_those_of_a_plain_loop(name):
    beside_a_plain_loop(*CASES[name])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["perceptron", "dropout", "token classes"])
@pytest.mark.filterwarnings("ignore:the clients' networks are trained one after another")
def test_optimizers_are_those_of_torch(name, optimizer):
    beside_a_plain_loop(*CASES[name], optimizer)


class Augmented(Dataset):
    """Items that are drawn anew whenever they are read, by torch, numpy and Python."""

    def __init__(self, x, y):
        self.x, self.y, self.read = x, y, 0

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        self.read += 1
        noise = torch.randn(()) + np.random.rand() + random.random()
        return self.x[i] + 0.1 * noise.float(), self.y[i]


def test_data_sets_are_read_item_by_item_in_every_epoch():
    sets = [Augmented(X[: ROWS[0]], CLASSES[: ROWS[0]]), Augmented(X[ROWS[0] :], CLASSES[ROWS[0] :])]
    beside_a_plain_loop(CASES["linear"][0], None, CLASSES, "cross_entropy", CE, items=DatasetItems(sets))
    sets[0].read = 0
    settings = {"eta": 0.1, "epochs": 2, "batch": 4}
    mooring.fit(sets, model=CASES["linear"][0], algorithm="fedavg", rounds=3, baselines=False, settings=settings)
    train = 6  # of 9 items, each read in every epoch of every round, beside what evaluation reads
    assert sets[0].read > 2 * 3 * train


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(X[:9], CLASSES[:9]))


def words_of(items):
    """Ragged sequences, padded to the longest of a minibatch."""
    ids = nn.utils.rnn.pad_sequence([x for x, _ in items], batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": torch.stack([y for _, y in items])}


RAGGED = [(WORDS[i, : 2 + i % 4].clamp(min=1), CLASSES[i]) for i in range(9)]
SOURCES = {
    "tuples of arrays": (CASES["linear"][0], [(X[:9].numpy(), CLASSES[:9].numpy())] * 2),
    "tensor data sets": (CASES["linear"][0], [TensorDataset(X[:9], CLASSES[:9])] * 2),
    "several tensors": (TwoInputs, [TensorDataset(X[:9], X[:9, :2], CLASSES[:9])] * 2),
    "subsets": (CASES["linear"][0], [Subset(TensorDataset(X, CLASSES), range(9))] * 2),
    "loaders": (CASES["linear"][0], [DataLoader(Augmented(X[:9], CLASSES[:9]), batch_size=4)] * 2),
    "streams": (CASES["linear"][0], [Stream()] * 2),
    "collated": (Masked, [DataLoader(RAGGED, batch_size=4, collate_fn=words_of)] * 2),
    "parts": (
        CASES["linear"][0],
        [{part: Augmented(X[:9], CLASSES[:9]) for part in ("train", "validation", "test")}] * 2,
    ),
    "two inputs": (TwoInputs, [((X[:9], X[:9, :2]), CLASSES[:9])] * 2),
    "dictionaries": (Masked, [({"input_ids": WORDS[:9], "attention_mask": torch.ones(9, 6)}, CLASSES[:9])] * 2),
    "tokens": (lambda: Text(tokens=True), [(WORDS[:9], torch.arange(54).reshape(9, 6) % 3)] * 2),
}


@pytest.mark.parametrize("name", SOURCES)
def test_sources_of_data_train_and_can_be_used(name):
    make, data = SOURCES[name]
    result = mooring.fit(
        data, model=make, algorithm="fedavg", rounds=1, baselines=False, settings={"eta": 0.1, "steps": 2, "batch": 4}
    )
    assert len(result.models) == 2 and np.isfinite(result.summary["personal"])
    assert isinstance(result.module("client 0"), nn.Module)


REFUSED = {
    "no module": (lambda: "network", X, CLASSES, "must return a torch.nn.Module"),
    "nothing to train": (stack(nn.ReLU), X, CLASSES, "no parameters to train"),
    "wrong width": (stack(lambda: nn.Linear(4, 3)), X, CLASSES, "the model fails on rows of shape"),
    "rows of unequal lengths": (
        Masked, [({"input_ids": WORDS[:9, :4]}, CLASSES[:9]), ({"input_ids": WORDS[:9]}, CLASSES[:9])], None,
        "pad them to one length",
    ),
    "items without a target": (
        Masked, [DataLoader([{"input_ids": WORDS[0]}] * 9)] * 2, None, "a dictionary needs a target",
    ),
    "unequal counts": (TwoInputs, [((X[:9], X[:8, :2]), CLASSES[:9])] * 2, None, "must have equally many rows"),
    "batch statistics in evaluation": (
        stack(lambda: nn.BatchNorm1d(5, track_running_stats=False), lambda: nn.Linear(5, 3)), X, CLASSES,
        "without running statistics",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_trained_is_refused_in_a_sentence(name):
    make, x, y, sentence = REFUSED[name]
    data = x if y is None else [(x[:9], y[:9]), (x[9:], y[9:])]
    with pytest.raises(RequestError, match=sentence):
        mooring.fit(data, model=make, algorithm="fedavg", rounds=1, baselines=False, settings={"eta": 0.1})


def test_the_list_is_long():
    assert len(CASES) + len(SOURCES) + len(REFUSED) + len(OPTIMIZERS) + len(NETWORKS) >= 60


@pytest.mark.filterwarnings("ignore:the clients' networks are trained one after another")
def test_torchs_own_note_on_stacking_is_not_shown(capfd):
    data = {f"c{i}": (WORDS[i::2][:8], CLASSES[:8]) for i in range(2)}
    mooring.fit(PackedText, data, algorithm="fedavg", settings={"eta": 0.1, "batch": 4}, rounds=1, baselines=False)
    assert "performance drop" not in capfd.readouterr().err


WEIGHTED = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))
OF_LOSSES = {  # model, targets, loss, the same probabilities of the module's outputs
    "cross_entropy": (CASES["linear"][0], CLASSES, None, lambda o: o.softmax(1)),
    "CrossEntropyLoss": (CASES["linear"][0], CLASSES, nn.CrossEntropyLoss(), lambda o: o.softmax(1)),
    "class weights": (CASES["linear"][0], CLASSES, WEIGHTED, lambda o: o.softmax(1)),
    "NLLLoss": (stack(lambda: nn.Linear(5, 3), lambda: nn.LogSoftmax(1)), CLASSES, nn.NLLLoss(), torch.exp),
    "logit": (stack(lambda: nn.Linear(5, 1)), whole(2).float(), nn.BCEWithLogitsLoss(), lambda o: o[:, 0].sigmoid()),
    "BCELoss": (stack(lambda: nn.Linear(5, 1), nn.Sigmoid), whole(2).float(), nn.BCELoss(), lambda o: o[:, 0]),
    "label weights": (stack(lambda: nn.Linear(5, 4)), whole(2, 4), nn.BCEWithLogitsLoss(pos_weight=torch.ones(4)), torch.sigmoid),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_LOSSES)
def test_every_cross_entropy_predicts_probabilities(name):
    make, y, loss, probabilities = OF_LOSSES[name]
    options = {"rounds": 1, "baselines": False, "settings": {"eta": 0.1, "steps": 2, "batch": 0}, "loss": loss}
    result = mooring.fit([(X[:10], y[:10]), (X[10:], y[10:])], model=make, algorithm="fedavg", **options)
    expected = probabilities(result.module("client 0")(X)).detach()
    torch.testing.assert_close(result.predict(X, "client 0"), expected)
    assert "accuracy" in result.clients


@pytest.mark.parametrize("name", ["pixel classes", "token classes", "masked token classes"])
def test_classes_of_pixels_and_tokens_have_probabilities_and_accuracy(name):
    make, x, y, _, _ = CASES[name]
    dim = 1 if name == "pixel classes" else 2
    parts = {"train": (x[:9], y[:9]), "test": (x[9:], y[9:])}
    settings = {"eta": 0.1, "steps": 2, "batch": 4}
    result = mooring.fit([parts, parts], model=make, algorithm="fedavg", rounds=1, baselines=False, settings=settings)
    found = result.predict(x, "client 0")
    torch.testing.assert_close(found, result.module("client 0")(x).softmax(dim).detach())
    known = y[9:] != -100
    hits = (found[9:].argmax(dim) == y[9:])[known]
    assert result.clients["accuracy"][0] == pytest.approx(float(hits.double().mean()))
    few = result.predict(x[:, :4] if dim == 2 else x[..., :3], "client 0")  # of another length or size
    torch.testing.assert_close(few.sum(dim), torch.ones_like(few.sum(dim)))


def test_without_validation_rows_a_measure_does_not_choose_the_round():
    parts = {"train": (X[:10], CLASSES[:10]), "test": (X[10:], CLASSES[10:])}
    options = {"rounds": 2, "baselines": False, "settings": {"eta": 0.1, "steps": 2}, "select_by": "accuracy"}
    assert (
        mooring.fit([parts, parts], model=CASES["linear"][0], algorithm="fedavg", **options).summary["last_round"] == 2
    )


def whole_output(out, y):
    return CE(out, y) + out.pow(2).mean()


@pytest.mark.parametrize("algorithm,loss", [("moon", None), ("knn_per", None), ("fedavg", whole_output)])
def test_random_numbers_of_data_sets_follow_the_runs_seed_alone(algorithm, loss):
    settings = {"eta": 0.1, "steps": 2, "batch": 4}
    runs = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)
        sets = [Augmented(X[:9], CLASSES[:9]), Augmented(X[9:18], CLASSES[9:18])]
        make = CASES["perceptron"][0]
        options = {"rounds": 2, "baselines": False, "settings": settings, "loss": loss}
        runs.append(mooring.fit(sets, model=make, algorithm=algorithm, **options))
    assert torch.equal(runs[0].models["client 0"], runs[1].models["client 0"])
    assert runs[0].summary["personal"] == runs[1].summary["personal"]


def test_a_gradient_of_items_draws_them_anew():
    """Algorithms with a loop of their own over minibatches, such as MOON, take gradients one by one."""
    items = DatasetItems([Augmented(X, CLASSES)])
    task = NetworkTask(CASES["perceptron"][0], items=items, sample=torch.arange(2))
    data = cohort(torch.arange(sum(ROWS)), CLASSES)
    first, second = (step.batch for step in minibatches(task, data, Round(1, 2, 2, 2, 1.0, 0), batch=None, steps=2))
    w = task.start(0).expand(2, -1)
    assert torch.equal(task.grad(w, first), task.grad(w, first))
    assert not torch.allclose(task.grad(w, first), task.grad(w, second))


def aligned(out, y):
    """Six outputs in a row stand for two classes in a row."""
    sizes = [torch.full((len(y),), n) for n in (out.shape[1], y.shape[1])]
    return functional.ctc_loss(out.transpose(0, 1).log_softmax(-1), y, *sizes)


def test_outputs_of_another_length_than_targets_have_no_accuracy():
    make, y = CASES["masked token classes"][0], 1 + CLASSES[:, None].repeat(1, 2) % 2
    options = {"rounds": 1, "baselines": False, "settings": {"eta": 0.1, "steps": 2}, "loss": aligned}
    result = mooring.fit([(WORDS[:10], y[:10]), (WORDS[10:], y[10:])], model=make, algorithm="fedavg", **options)
    assert result.summary["measures"]["personal"] == {}
