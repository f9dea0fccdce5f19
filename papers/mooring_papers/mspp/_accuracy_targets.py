"""Data points and rounds until a test accuracy: FedMSPP with three minibatches against FedProx and FedAvg.

Figures 1 and 2 of `mspp` share these runs. Local work follows Table 3: FedProx and FedAvg take epochs of SGD over a
device's rows, FedMSPP as many full steps on its minibatch. A data point is one row's gradient in one local step; rows
drawn per round are that number divided by the epochs, for all methods alike.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from mooring.algorithms.base import AnyAlgorithm
from mooring.algorithms.fedavg import FedAvg
from mooring.algorithms.fedmspp import FedMSPP
from mooring.algorithms.fedprox import FedProx
from mooring.core.cohort import Rows
from mooring.core.types import JsonObject
from mooring.data.clients import Clients
from mooring.data.image_datasets import load_image_dataset
from mooring.engines.simulate import RoundSnapshot, simulate
from mooring.engines.training_state import TrainingPlan
from mooring.tasks.network import NetworkTask
from mooring_papers.generators import BagOfWords
from mooring_papers.networks import MakeNetwork, cnn, lstm, mlp
from mooring_papers.training_curves import measure_accuracy, to_single_precision

FEDAVG, FEDPROX = "FedAvg", "FedProx"
MINIBATCHES = ("FedMSPP, large b", "FedMSPP, middle b", "FedMSPP, small b")
METHODS = (FEDAVG, FEDPROX, *MINIBATCHES)
FINAL = 0.1  # share of the last rounds whose mean accuracy is FedProx's final one
ROWS = 1000  # test rows evaluated at once


class Problem(NamedTuple):
    make: Callable[[int], Clients]
    net: MakeNetwork
    rounds: int
    epochs: int
    batch: int
    eta: float
    mu: float  # 1/eta_t of the paper: the pull
    minibatches: tuple[int, int, int]
    targets: tuple[float, float, float]  # accuracies, or shares of FedProx's final one
    relative: bool
    sampled: int = 10


def images(name: str, clients: int, classes: int, **load_options: Any) -> Callable[[int], Clients]:
    """Test rows are a tenth of every device's."""
    return lambda seed: load_image_dataset(
        name, clients=clients, partition="classes", classes_per_client=classes, test=0.1, seed=seed, **load_options
    )


def roles(seed: int) -> Clients:
    """261 roles of Shakespeare's with the paper's mean of 83 rows; letters are coded from 1, since 0 is padding."""
    clients = load_image_dataset("shakespeare", clients=261, least=83, samples_per_client=83, test=0.2, seed=seed)
    parts = {name: getattr(clients, name) for name in ("train", "validation", "test")}
    return replace(clients, **{name: replace(rows, x=rows.x + 1, cache={}) for name, rows in parts.items()})


LETTERS = 77  # different characters
SHARES = (0.7, 0.8, 0.9)
USERS = tuple(int(10 * 1.06**k) for k in range(50))  # rows of the generated users: 46 for training on average
PROBLEMS = {
    "small": {
        "a": Problem(images("digits", 30, 2), mlp(64, 32, 10), 200, 2, 0, 0.25, 0.1, (8, 6, 1), SHARES, True, 5),
        "b": Problem(images("digits", 15, 3), mlp(64, 32, 10), 200, 5, 0, 0.06, 0.1, (14, 7, 2), SHARES, True, 5),
        "c": Problem(
            lambda seed: to_single_precision(BagOfWords(50, USERS, signal=1.0).make(seed)),
            mlp(200, 16, 2), 100, 10, 0, 0.1, 0.001, (52, 35, 14), (0.9, 0.93, 0.97), True, 5,
        ),
    },
    "large": {
        "a": Problem(
            images("mnist", 100, 2, samples_per_client=630, flat=False),
            cnn(1, 28, 10, (32, 64)), 200, 2, 567, 0.25, 0.1, (81, 63, 10), (0.8, 0.9, 0.95), False,
        ),
        "b": Problem(
            images("fashion_mnist", 50, 3, samples_per_client=1101, flat=False),
            cnn(1, 28, 10, (32, 64)), 300, 5, 512, 0.06, 0.1, (128, 64, 16), SHARES, True,
        ),
        "c": Problem(roles, lstm(LETTERS + 1, LETTERS), 300, 10, 100, 0.1, 0.001, (75, 50, 20), SHARES, True),
    },
}  # fmt: skip
PROBLEMS["tiny"] = {panel: problem._replace(rounds=8) for panel, problem in PROBLEMS["small"].items()}


def algorithms(problem: Problem) -> JsonObject:
    work: JsonObject = {"eta": problem.eta, "epochs": problem.epochs, "batch": problem.batch}
    return {
        FEDPROX: FedProx(lam=problem.mu, inner="sgd", **work),
        FEDAVG: FedAvg(**work),
        **{
            name: FedMSPP(lam=problem.mu, batch=b, inner="descent", eta=problem.eta, steps=problem.epochs, tol=0.0)
            for name, b in zip(MINIBATCHES, problem.minibatches)
        },
    }


class Track(NamedTuple):
    accuracy: np.ndarray  # [T], of the global model on all test rows, after each round
    points: np.ndarray  # [T], data points accessed up to then


def track(
    algorithm: AnyAlgorithm, task: NetworkTask, clients: Clients, problem: Problem, seed: int, stop_at: float
) -> Track:
    """Run the algorithm until its accuracy reaches `stop_at`."""
    plan = TrainingPlan(problem.rounds, problem.sampled, seed, evaluate_every=problem.rounds)
    test = split_rows(clients.test)
    accuracy: list[float] = []

    def watch(now: RoundSnapshot) -> bool:
        w = now.server.w[None]
        hits = [float(measure_accuracy(task, w, block.padded())) * len(block.y) for block in test]
        accuracy.append(sum(hits) / len(clients.test.y))
        return accuracy[-1] >= stop_at

    result = simulate(algorithm, task, clients, plan, weights="uniform", resolved=True, watch=watch)
    gradients = [record["gradients"] for record in result.outcome.state.records]
    return Track(np.array(accuracy), np.cumsum(gradients, dtype=float))


def split_rows(rows: Rows) -> list[Rows]:
    """Return all rows in blocks of ROWS, each as the rows of one client."""
    return [Rows.stack([x], [y]) for x, y in zip(rows.x.split(ROWS), rows.y.split(ROWS))]


def reached(track: Track, targets: np.ndarray) -> tuple[list[float], list[float]]:
    """Rounds and data points until each target; nan where it is not reached."""
    first = [np.flatnonzero(track.accuracy >= target) for target in targets]
    rounds = [float(hits[0] + 1) if len(hits) else np.nan for hits in first]
    return rounds, [float(track.points[hits[0]]) if len(hits) else np.nan for hits in first]


def trial(seed: int, panel: str, size: str) -> dict:
    """Rounds and data points of every method to the three targets, and FedMSPP's as ratios to the others'."""
    problem = PROBLEMS[size][panel]
    clients, task = problem.make(seed), NetworkTask(problem.net)
    rows = {part: len(getattr(clients, part).y) for part in ("train", "test")}
    out: dict = {
        "target": list(problem.targets),
        **{name: float(getattr(problem, name)) for name in ("rounds", "epochs", "batch", "eta", "mu")},
        "devices": len(clients),
        "samples": sum(rows.values()),
        "training samples": rows["train"],
        "training share": rows["train"] / sum(rows.values()),
    }
    stop_at = np.inf if problem.relative else max(problem.targets)
    targets = np.array(problem.targets)
    for method, algorithm in algorithms(problem).items():
        history = track(algorithm, task, clients, problem, seed, stop_at)
        if method == FEDPROX and problem.relative:
            last = max(1, round(FINAL * problem.rounds))
            targets = targets * history.accuracy[-last:].mean()
            stop_at = float(targets.max())
        out[f"rounds {method}"], out[f"points {method}"] = reached(history, targets)
    pairs = [(m, baseline) for m in MINIBATCHES for baseline in (FEDPROX, FEDAVG)] + [
        (b, a) for a, b in pairwise(MINIBATCHES)
    ]
    for kind in ("rounds", "points"):
        for compared, baseline in pairs:
            out[ratio_series(kind, compared, baseline)] = np.divide(
                out[f"{kind} {compared}"], out[f"{kind} {baseline}"]
            ).tolist()
    out["accuracies"] = targets.tolist()
    return out


def ratio_series(kind: str, method: str, baseline: str) -> str:
    """Return the name of the series of ratios."""
    return f"{kind} {method} over {baseline}"
