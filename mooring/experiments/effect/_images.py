"""Image classes partitioned to clients as in effect, Appendix C.1: one training run, judged under both test protocols.

    P1   on rows like the client's own: the common test rows, each class weighing as in the client's training rows
    P2   on the common test rows, all classes

Both use rows that nobody trains on. "P1" and "P2" are accuracies of the models that clients deploy, averaged over
clients, on PERSONAL of the common test rows; "common P1" and "common P2" of the server's model on all of them; "loss"
and "common loss" are losses on the clients' training rows by round "t", "test loss" is that of the deployed models
under P1.
"""

from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import nll_loss, one_hot

from mooring.algorithms.dichotomous import split_rows
from mooring.algorithms.fedavg import FedAvg
from mooring.algorithms.fedprox_personal import FedProxPersonal
from mooring.algorithms.local import Local
from mooring.algorithms.pfedme import PFedMe
from mooring.core.cohort import Rows
from mooring.core.seeds import generator
from mooring.core.task import Task
from mooring.data.clients import Clients
from mooring.data.generators import Prototypes
from mooring.data.image_datasets import interleave_classes, load_image_dataset
from mooring.engines.local_update import mean_risk
from mooring.engines.loop import TrainingSteps
from mooring.engines.simulate import RoundSnapshot, simulation_steps
from mooring.engines.training_state import TrainingPlan
from mooring.experiments.networks import mlp, softmax
from mooring.tasks.network import NetworkTask

WIDTHS = {2: (16, 32), 3: (16, 32, 64), 5: (16, 16, 32, 32, 64)}  # channels of each layer; the paper names none
HIDDEN = 50
TINY = 1e-9  # a probability below this counts as this in a test loss
PERSONAL = 2000  # test rows of personal models, at most: there are many of them
FOLLOWED = 1000  # and of curves


class Federation(NamedTuple):
    clients: Clients  # without test rows
    x: Tensor  # the common test rows
    y: Tensor
    shares: Tensor  # [m, classes], of each client's training rows


@lru_cache(maxsize=4)  # all methods see the same data one after another
def federation(
    seed: int, data: str, classes: int, clients: int, samples: int, tested: int, flat: bool, validation: float = 0.15
) -> Federation:
    """`classes` classes for each client, `samples` rows, a share of them for validation."""
    if data == "proto":
        made = Prototypes(
            clients, samples, classes_per_client=classes, distance=4.0, validation=validation, test=0
        ).make(seed)
        test = Prototypes(1, 1, distance=4.0, test=tested).make(seed).test  # the same prototypes, all classes
    else:
        made = load_image_dataset(
            data, partition="classes", clients=clients, classes_per_client=classes, protocol="P2",
            samples_per_client=samples, validation=validation, test_samples=tested, seed=seed, flat=flat,
        )  # fmt: skip
        test = made.test
    x, y = test.of(0)
    order = torch.from_numpy(
        interleave_classes(y.numpy(), generator(seed, "split"))
    )  # any stretch of them has all classes
    x, y = x[order], y[order]
    labels = [one_hot(made.train.of(i)[1], len(made.classes)).double().mean(0) for i in range(len(made))]
    none = Rows(x[:0], y[:0], torch.zeros(len(made), dtype=torch.long), torch.zeros(len(made), dtype=torch.long))
    plain = [_single(rows) for rows in (made.train, made.validation)]
    return Federation(replace(made, train=plain[0], validation=plain[1], test=none), x.float(), y, torch.stack(labels))


def _single(rows: Rows) -> Rows:
    return replace(rows, x=rows.x.float(), cache={})


def make_task(model: str, given: Federation) -> Any:
    """softmax, mlp, or cnn2, cnn3, cnn5: as many convolutions; one object for all methods, which train together."""
    return _task(model, tuple(given.x.shape[1:]), len(given.clients.classes))


@lru_cache(maxsize=4)
def _task(model: str, shape: tuple[int, ...], classes: int) -> Any:
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


def algorithm(method: str, lam: float, clients: Clients, eta: float, epochs: int, batch: int) -> Any:
    """Local work is `epochs` passes; pFedMe takes as many gradients: so many on each batch of one pass."""
    work: dict[str, Any] = {"eta": eta, "batch": batch, "epochs": epochs}
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
    algorithm: Any, task: Task, given: Federation, rounds: int, seed: int, followed: int = 0
) -> TrainingSteps[Trained]:
    """The models after so many rounds; curves where rows to follow them on are asked for."""
    clients = given.clients
    curves: dict[str, list[float]] = {"t": [], "loss": [], "common loss": [], "test loss": []}
    seen = first(given, followed)

    def watch(now: RoundSnapshot) -> None:
        v = now.models()
        p = clients.weights()
        w = p.float() @ v if isinstance(algorithm, Local) else now.server.w
        curves["t"].append(now.t)
        curves["loss"].append(float(p @ mean_risk(task, v, clients.train)))
        curves["common loss"].append(float(p @ mean_risk(task, w.expand_as(v), clients.train)))
        curves["test loss"].append(own(by_class(task, v, seen).loss, seen))

    plan = TrainingPlan(rounds=rounds, seed=seed, evaluate_every=rounds)
    seeing = watch if followed else lambda _: None
    done = yield from simulation_steps(algorithm, task, clients, plan, resolved=True, watch=seeing)
    v = done.models()
    return Trained(clients.weights().float() @ v if isinstance(algorithm, Local) else done.server.w, v, curves)


def first(given: Federation, rows: int) -> Federation:
    """With so many of its test rows."""
    return given._replace(x=given.x[:rows], y=given.y[:rows])


class ByClass(NamedTuple):
    """Each model's accuracy and loss on the common test rows of each class, [models, classes]."""

    accuracy: Tensor
    loss: Tensor


def by_class(task: Task, models: Tensor, given: Federation) -> ByClass:
    share = one_hot(given.y, given.shares.shape[1]).double()
    share = share / share.sum(0).clamp(min=1)
    hits, losses = [], []
    for model in models:  # one at a time: all of them on all rows would not fit memory
        probability = task.predict(model[None], given.x[None])[0].double()
        hits.append((probability.argmax(1) == given.y).double() @ share)
        losses.append(nll_loss(probability.clamp(min=TINY).log(), given.y, reduction="none") @ share)
    return ByClass(torch.stack(hits), torch.stack(losses))


def own(values: Tensor, given: Federation) -> float:
    """Under P1, the mean over clients."""
    return float((values * given.shares).sum(1).mean())


def accuracies(task: Task, w: Tensor, v: Tensor, given: Federation) -> dict[str, float]:
    found: dict[str, float] = {}
    every = one_hot(given.y, given.shares.shape[1]).double().mean(0)
    for prefix, models, seen in (("", v, first(given, PERSONAL)), ("common ", w[None], given)):
        hits = by_class(task, models, seen).accuracy
        found |= {f"{prefix}P1": own(hits, given), f"{prefix}P2": float((hits @ every).mean())}
    return found


def trial(
    seed: int, data: str, model: str, method: str, classes: int, clients: int, samples: int, tested: int, rounds: int,
    epochs: int, batch: int, eta: float, lam: float = 0.0, followed: int = FOLLOWED,
) -> TrainingSteps[dict]:  # fmt: skip
    """One method on one federation; `followed` test rows are those of the curves, 0 asks for none."""
    given = federation(seed, data, classes, clients, samples, tested, not model.startswith("cnn"))
    task = make_task(model, given)
    work: dict[str, Any] = {"eta": eta, "epochs": epochs, "batch": batch}
    if method.startswith("dichotomous"):
        return (yield from dichotomous(task, given, rounds, seed, method == "dichotomous", work))
    found = yield from train(algorithm(method, lam, given.clients, **work), task, given, rounds, seed, followed)
    return accuracies(task, found.w, found.v, given) | (found.curves if followed else {})


def dichotomous(task: Task, given: Federation, rounds: int, seed: int, halves: bool, work: dict) -> TrainingSteps[dict]:
    """Alone or together, by each client's choice (effect, Appendix C.3): LocalTrain on one half of a client's rows and
    GlobalTrain on everybody's other halves, or both on all rows.

    "P1" and "P2" have the choice made on validation rows; with the word "leaky" on the test rows, as printed.
    """
    clients = given.clients
    mine, ours = split_rows(clients.train, clients.keys, 0.5, seed) if halves else (clients.train, clients.train)
    found = []
    for name, rows in (("LocalTrain", mine), ("GlobalTrain", ours)):
        theirs = given._replace(clients=replace(clients, train=rows))
        found.append((yield from train(algorithm(name, 0.0, clients, **work), task, theirs, rounds, seed)))
    alone, together = found
    shared = together.w.expand_as(alone.v)
    losses = [mean_risk(task, models, clients.validation) for models in (alone.v, shared)]
    chosen = torch.where((losses[0] < losses[1])[:, None], alone.v, shared)
    every = one_hot(given.y, given.shares.shape[1]).double().mean(0)
    seen = first(given, PERSONAL)
    hits = [by_class(task, models, seen).accuracy for models in (alone.v, together.w[None])]
    better = [torch.maximum((hits[0] * weight).sum(1), (hits[1] * weight).sum(1)) for weight in (given.shares, every)]
    leaky = {f"leaky {protocol}": float(best.mean()) for protocol, best in zip(("P1", "P2"), better)}
    return (
        accuracies(task, together.w, chosen, given) | leaky | {"alone": float((losses[0] < losses[1]).double().mean())}
    )
