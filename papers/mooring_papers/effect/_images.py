"""Image classes partitioned to clients as in effect, Appendix C.1: one training run, scored under both test protocols.

  P1   on rows like the client's own: the shared test rows, each class weighted as in the client's training rows
  P2   on the shared test rows, all classes

Both use rows on which no client trains. "P1" and "P2" are accuracies of the models that clients use, averaged over
clients, on PERSONAL of the shared test rows; "common P1" and "common P2" are those of the server's model on all of
them; "loss" and "common loss" are losses on the clients' training rows by round "t", "test loss" is that of the
clients' models under P1.
"""

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import nll_loss, one_hot

from mooring.algorithms.base import AnyAlgorithm
from mooring.algorithms.dichotomous import split_rows
from mooring.algorithms.fedavg import FedAvg
from mooring.algorithms.fedprox_personal import FedProxPersonal
from mooring.algorithms.local import Local
from mooring.algorithms.pfedme import PFedMe
from mooring.core.cohort import Rows
from mooring.core.seeds import generator
from mooring.core.task import Task
from mooring.core.types import JsonObject
from mooring.data.clients import Clients
from mooring.data.image_datasets import interleave_classes, load_image_dataset
from mooring.engines.local_update import mean_risk
from mooring.engines.loop import TrainingSteps
from mooring.engines.simulate import RoundSnapshot, simulation_steps
from mooring.engines.training_state import TrainingPlan
from mooring.tasks.network import NetworkTask
from mooring_papers.generators import Prototypes
from mooring_papers.networks import mlp, softmax

WIDTHS = {2: (16, 32), 3: (16, 32, 64), 5: (16, 16, 32, 32, 64)}  # channels of each layer; the paper names none
HIDDEN = 50
TINY = 1e-9  # a probability below this counts as this in a test loss
PERSONAL = 2000  # test rows of personal models, at most: there are many of them
FOLLOWED = 1000  # test rows of curves, at most


class Federation(NamedTuple):
    clients: Clients  # without test rows
    x: Tensor  # the shared test rows
    y: Tensor
    shares: Tensor  # [m, classes], of each client's training rows


@lru_cache(maxsize=4)  # all methods see the same data one after another
def federation(
    seed: int, data: str, classes: int, clients: int, samples: int, tested: int, flat: bool, validation: float = 0.15
) -> Federation:
    """`classes` classes for each client, `samples` rows, a share of them for validation."""
    if data == "proto":
        generated = Prototypes(
            clients, samples, classes_per_client=classes, distance=4.0, validation=validation, test=0
        ).make(seed)
        test = Prototypes(1, 1, distance=4.0, test=tested).make(seed).test  # the same prototypes, all classes
    else:
        generated = load_image_dataset(
            data, partition="classes", clients=clients, classes_per_client=classes, protocol="P2",
            samples_per_client=samples, validation=validation, test_samples=tested, seed=seed, flat=flat,
        )  # fmt: skip
        test = generated.test
    x, y = test.of(0)
    order = torch.from_numpy(
        interleave_classes(y.numpy(), generator(seed, "split"))
    )  # any stretch of them has all classes
    x, y = x[order], y[order]
    labels = [one_hot(generated.train.of(i)[1], len(generated.classes)).double().mean(0) for i in range(len(generated))]
    no_rows = Rows(
        x[:0], y[:0], torch.zeros(len(generated), dtype=torch.long), torch.zeros(len(generated), dtype=torch.long)
    )
    single_precision = [_single(rows) for rows in (generated.train, generated.validation)]
    return Federation(
        replace(generated, train=single_precision[0], validation=single_precision[1], test=no_rows),
        x.float(),
        y,
        torch.stack(labels),
    )


def _single(rows: Rows) -> Rows:
    return replace(rows, x=rows.x.float(), cache={})


def make_task(model: str, dataset: Federation) -> Task:
    """Return softmax, mlp, or cnn2, cnn3, cnn5 (2, 3, 5 convolutions): one object for all methods, which train
    together."""
    return _task(model, tuple(dataset.x.shape[1:]), len(dataset.clients.classes))


@lru_cache(maxsize=4)
def _task(model: str, shape: tuple[int, ...], classes: int) -> Task:
    if model == "softmax":
        return softmax(shape[0], classes, ridge=0.0)
    if model == "mlp":
        return NetworkTask(mlp(shape[0], HIDDEN, classes))
    return NetworkTask(lambda: convolutions(WIDTHS[int(model.removeprefix("cnn"))], shape[0], shape[1], classes))


def convolutions(widths: tuple[int, ...], channels: int, side: int, classes: int) -> nn.Module:
    """3x3 convolutions with ReLU, 2x2 pooling before the width grows and after the last, then one linear layer."""
    layers: list[nn.Module] = []
    for k, width in enumerate(widths):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
        channels = width
        if k + 1 == len(widths) or widths[k + 1] > width:
            layers.append(nn.MaxPool2d(2))
            side //= 2
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * side**2, classes))


def algorithm(method: str, lam: float, clients: Clients, eta: float, epochs: int, batch: int) -> AnyAlgorithm:
    """Local work is `epochs` passes; pFedMe takes as many gradients: so many on each batch of one pass."""
    work: JsonObject = {"eta": eta, "batch": batch, "epochs": epochs}
    if method == "LocalTrain":
        return Local(ridge=0.0, inner="sgd", **work)
    if method == "GlobalTrain":
        return FedAvg(**work)
    if method == "FedProx":
        return FedProxPersonal(lam=lam, gamma=1 / lam, inner="sgd", **work)
    if method == "pFedMe":
        steps = -(-int(clients.train.size.max()) // batch)
        return PFedMe(lam=lam, eta=1 / (lam * steps), steps=steps, batch=batch, inner_eta=eta, inner_steps=epochs)
    raise KeyError(method)


class Trained(NamedTuple):
    w: Tensor  # [d]
    v: Tensor  # [m, d]
    curves: dict[str, list[float]]


def train(
    algorithm: AnyAlgorithm, task: Task, dataset: Federation, rounds: int, seed: int, followed: int = 0
) -> TrainingSteps[Trained]:
    """Return the models after `rounds` rounds, with curves on `followed` test rows."""
    clients = dataset.clients
    curves: dict[str, list[float]] = {"t": [], "loss": [], "common loss": [], "test loss": []}
    tested = first(dataset, followed)

    def watch(now: RoundSnapshot) -> None:
        v = now.models()
        p = clients.weights()
        w = p.float() @ v if isinstance(algorithm, Local) else now.server.w
        curves["t"].append(now.t)
        curves["loss"].append(float(p @ mean_risk(task, v, clients.train)))
        curves["common loss"].append(float(p @ mean_risk(task, w.expand_as(v), clients.train)))
        curves["test loss"].append(mean_p1(by_class(task, v, tested).loss, tested))

    plan = TrainingPlan(rounds=rounds, seed=seed, evaluate_every=rounds)
    seeing = watch if followed else lambda _: None
    result = yield from simulation_steps(algorithm, task, clients, plan, resolved=True, watch=seeing)
    v = result.models()
    return Trained(clients.weights().float() @ v if isinstance(algorithm, Local) else result.server.w, v, curves)


def first(dataset: Federation, rows: int) -> Federation:
    """Return the data set with its first `rows` test rows."""
    return dataset._replace(x=dataset.x[:rows], y=dataset.y[:rows])


class ByClass(NamedTuple):
    """Each model's accuracy and loss on the common test rows of each class, [models, classes]."""

    accuracy: Tensor
    loss: Tensor


def by_class(task: Task, models: Tensor, dataset: Federation) -> ByClass:
    share = one_hot(dataset.y, dataset.shares.shape[1]).double()
    share = share / share.sum(0).clamp(min=1)
    hits, losses = [], []
    for model in models:  # one at a time: all of them on all rows would not fit memory
        probability = task.predict(model[None], dataset.x[None])[0].double()
        hits.append((probability.argmax(1) == dataset.y).double() @ share)
        losses.append(nll_loss(probability.clamp(min=TINY).log(), dataset.y, reduction="none") @ share)
    return ByClass(torch.stack(hits), torch.stack(losses))


def mean_p1(values: Tensor, dataset: Federation) -> float:
    """Return the mean over clients under P1."""
    return float((values * dataset.shares).sum(1).mean())


def accuracies(task: Task, w: Tensor, v: Tensor, dataset: Federation) -> dict[str, float]:
    values: dict[str, float] = {}
    class_shares = one_hot(dataset.y, dataset.shares.shape[1]).double().mean(0)
    for prefix, models, tested in (("", v, first(dataset, PERSONAL)), ("common ", w[None], dataset)):
        hits = by_class(task, models, tested).accuracy
        values |= {f"{prefix}P1": mean_p1(hits, dataset), f"{prefix}P2": float((hits @ class_shares).mean())}
    return values


def trial(
    seed: int, data: str, model: str, method: str, classes: int, clients: int, samples: int, tested: int, rounds: int,
    epochs: int, batch: int, eta: float, lam: float = 0.0, followed: int = FOLLOWED,
) -> TrainingSteps[dict]:  # fmt: skip
    """Run one method on one federation; curves use `followed` test rows (0: no curves)."""
    dataset = federation(seed, data, classes, clients, samples, tested, not model.startswith("cnn"))
    task = make_task(model, dataset)
    work: JsonObject = {"eta": eta, "epochs": epochs, "batch": batch}
    if method.startswith("dichotomous"):
        return (yield from dichotomous(task, dataset, rounds, seed, method == "dichotomous", work))
    trained = yield from train(algorithm(method, lam, dataset.clients, **work), task, dataset, rounds, seed, followed)
    return accuracies(task, trained.w, trained.v, dataset) | (trained.curves if followed else {})


def dichotomous(
    task: Task, dataset: Federation, rounds: int, seed: int, halves: bool, work: dict
) -> TrainingSteps[dict]:
    """Choose the local or the global model for each client (effect, Appendix C.3): LocalTrain on one half of a client's
    rows and GlobalTrain on all clients' other halves, or both on all rows.

    "P1" and "P2" choose by validation rows, "leaky P1" and "leaky P2" by the test rows, as printed.
    """
    clients = dataset.clients
    local_rows, global_rows = (
        split_rows(clients.train, clients.keys, 0.5, seed) if halves else (clients.train, clients.train)
    )
    results = []
    for name, rows in (("LocalTrain", local_rows), ("GlobalTrain", global_rows)):
        part = dataset._replace(clients=replace(clients, train=rows))
        results.append((yield from train(algorithm(name, 0.0, clients, **work), task, part, rounds, seed)))
    local, global_ = results
    shared = global_.w.expand_as(local.v)
    losses = [mean_risk(task, models, clients.validation) for models in (local.v, shared)]
    chosen = torch.where((losses[0] < losses[1])[:, None], local.v, shared)
    class_shares = one_hot(dataset.y, dataset.shares.shape[1]).double().mean(0)
    tested = first(dataset, PERSONAL)
    hits = [by_class(task, models, tested).accuracy for models in (local.v, global_.w[None])]
    better = [
        torch.maximum((hits[0] * weight).sum(1), (hits[1] * weight).sum(1)) for weight in (dataset.shares, class_shares)
    ]
    leaky = {f"leaky {protocol}": float(best.mean()) for protocol, best in zip(("P1", "P2"), better)}
    return (
        accuracies(task, global_.w, chosen, dataset) | leaky | {"alone": float((losses[0] < losses[1]).double().mean())}
    )
