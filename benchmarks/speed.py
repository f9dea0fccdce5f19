"""How fast a cohort trains: the same work as a plain PyTorch loop over clients, timed in one run, as one table.

    python -m benchmarks.speed [--repeats 5] [--threads 2] [--rows softmax,mlp,...]

100 clients of 600 rows, 20 local steps with batches of 20, one round of FedAvg. The loop is what most libraries do:
copy the model, make an SGD optimiser and an order of the rows per client, step, collect the parameters. Repetitions
are interleaved; times are medians, of processor time (all threads) and of the clock. "of the limit" is the arithmetic
of the round over processor time, divided by what `torch.matmul` reaches on large matrices in the same run. Before
anything is timed, cohort and loop take one step along all rows, and must reach the same parameters.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from mooring.algorithms.fedavg import FedAvg
from mooring.algorithms.fedprox_one_stage import FedProxOneStage
from mooring.core.cohort import Round, weighted_mean
from mooring.data.clients import from_arrays
from mooring.engines.simulator import Simulator
from mooring.tasks.compiled import available
from mooring.tasks.logistic import Logistic
from mooring.tasks.module import Module

CLIENTS, ROWS, SIDE, CLASSES, STEPS, BATCH, ETA = 100, 600, 28, 10, 20, 20, 0.05
FEATURES = SIDE**2
SAMPLES = CLIENTS * STEPS * BATCH  # rows that a round works on


def softmax_net() -> nn.Module:
    return nn.Linear(FEATURES, CLASSES)


def deep_net() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, CLASSES))


def convolutional_net() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, SIDE, SIDE)),
        nn.Conv2d(1, 8, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * (SIDE // 4) ** 2, CLASSES),
    )


@dataclass(frozen=True)
class Work:
    """A row of the table; `operations` are multiplications and additions per sample, forward and back."""

    name: str
    make: Callable[[], nn.Module]
    task: Any
    algorithm: Any
    operations: float
    target: float | None  # times the loop


def works() -> dict[str, Work]:
    fedavg = FedAvg(eta=ETA, steps=STEPS, batch=BATCH)
    fedprox = FedProxOneStage(lam=0.1, gamma=1.0, inner="sgd", eta=ETA, steps=STEPS, batch=BATCH)
    wide, deep = FEATURES * CLASSES, 200 * 200 + 200 * CLASSES
    first, second = 8 * 25 * SIDE**2, 16 * 8 * 25 * (SIDE // 2) ** 2
    convolutions = 4 * first + 6 * (second + 16 * (SIDE // 4) ** 2 * CLASSES)

    def softmax(kernels: str) -> Logistic:
        return Logistic(FEATURES, CLASSES, ridge=0.0, dtype=torch.float32, kernels=kernels)

    rows = {
        "softmax": Work("softmax, compiled", softmax_net, softmax("numba"), fedavg, 4 * wide, 18),
        "softmax-torch": Work("softmax, PyTorch", softmax_net, softmax("torch"), fedavg, 4 * wide, None),
        "fedprox": Work("the same, FedProx by SGD", softmax_net, softmax("numba"), fedprox, 4 * wide, None),
        "mlp": Work("784-200-200-10", deep_net, Module(deep_net), fedavg, 4 * FEATURES * 200 + 6 * deep, 4),
        "cnn": Work("two convolutions", convolutional_net, Module(convolutional_net), fedavg, convolutions, 1.2),
    }
    return (
        rows if available() else {name: row for name, row in rows.items() if row.task.name == "module" or "-" in name}
    )


def looped(work: Work, clients, t: int = 0) -> None:
    """One round, client after client."""
    common = work.make()
    results = []
    for i in range(CLIENTS):
        x, y = clients.train.of(i)
        model = work.make()
        model.load_state_dict(common.state_dict())
        optimiser = torch.optim.SGD(model.parameters(), lr=ETA)
        order = torch.randperm(len(y))
        for k in range(STEPS):
            rows = order[k * BATCH : (k + 1) * BATCH]
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimiser.step()
        results.append([p.detach().clone() for p in model.parameters()])
    [torch.stack(parts).mean(0) for parts in zip(*results)]


def stacked(work: Work, clients) -> Callable[[int], Any]:
    """A function that takes round t in the simulator, averages and merges."""
    w0 = work.task.start()
    exchange = Simulator(work.task, clients, clients.weights())
    exchange.begin(work.algorithm, w0)
    server, _ = work.algorithm.start(work.task, w0)

    def take(t: int) -> Any:
        turn = Round(t + 1, 100, CLIENTS, CLIENTS, 1.0, 0)
        replies = exchange.ask(server, torch.arange(CLIENTS), turn)
        return work.algorithm.merge(server, weighted_mean(replies.message, exchange.p), turn)

    return take


def check(work: Work, clients) -> None:
    """One step along all rows of the first client, in the cohort and by an optimiser, ends at the same parameters."""
    few = clients.cohort().select(torch.arange(3))
    model = work.make()
    optimiser = torch.optim.SGD(model.parameters(), lr=ETA)
    parts = [p.detach().clone() for p in model.parameters()]
    linear = isinstance(work.task, Logistic)  # slopes are [features, scores] there
    start = torch.cat([(p.mT if linear and p.ndim == 2 else p).reshape(-1) for p in parts])
    step = FedAvg(eta=ETA, steps=1, batch=ROWS)
    server, _ = step.start(work.task, start)
    nobody = torch.zeros(3, 0, dtype=torch.long)
    _, change = step.visit(
        server, type(step.start(work.task, start)[1])(nobody), work.task, few, Round(1, 1, 3, 3, 1.0, 0)
    )
    x, y = clients.train.of(0)
    nn.functional.cross_entropy(model(x), y).backward()
    optimiser.step()
    moved = torch.cat(
        [(p.detach().mT if linear and p.ndim == 2 else p.detach()).reshape(-1) for p in model.parameters()]
    )
    torch.testing.assert_close(start + change[0], moved, rtol=1e-4, atol=1e-5)


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """Processor seconds of all threads, and seconds of the clock."""
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    return time.process_time() - cpu, time.perf_counter() - wall


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rows", default="")
    asked = parser.parse_args()
    if asked.threads:
        torch.set_num_threads(asked.threads)
    rng = np.random.default_rng(0)
    xs = rng.normal(size=(CLIENTS, ROWS, FEATURES)).astype(np.float32)
    ys = rng.integers(0, CLASSES, size=(CLIENTS, ROWS))
    clients = from_arrays(list(xs), list(ys), kind="classes", dtype=torch.float32)
    large = torch.randn(2000, 2000)
    print(f"{CLIENTS} clients, {STEPS} steps, batch {BATCH}; medians of {asked.repeats} interleaved rounds, ", end="")
    print(f"{torch.get_num_threads()} threads; milliseconds of processor time (of the clock)\n")
    print("| work | loop | cohort | ratio | spread | of the limit | target |\n|---|---|---|---|---|---|---|")
    if not available():
        print("| softmax, compiled | - | - | - | - | - | numba is not installed |")
    for name, work in works().items():
        if asked.rows and name not in asked.rows.split(","):
            continue
        check(work, clients)
        parts = (partial(looped, work, clients), stacked(work, clients), lambda t=0: large @ large)
        found = [[timed(partial(part, t)) for part in parts] for t in range(asked.repeats + 1)][
            1:
        ]  # the first warms up
        (loop, loop_wall), (cohort, wall), (limit, _) = (
            [statistics.median(times) for times in zip(*column)] for column in zip(*found)
        )
        ratios = sorted(a[0] / b[0] for a, b, _ in found)
        share = work.operations * SAMPLES / cohort / (2 * 2000**3 / limit)
        held = (
            "" if work.target is None else f"{work.target:g}x: {'held' if loop / cohort >= work.target else 'MISSED'}"
        )
        print(
            f"| {work.name} | {1000 * loop:.0f} ({1000 * loop_wall:.0f}) | {1000 * cohort:.0f} ({1000 * wall:.0f}) "
            f"| {loop / cohort:.1f}x | {ratios[0]:.1f}-{ratios[-1]:.1f} | {100 * share:.0f} % | {held} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
