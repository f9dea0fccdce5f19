"""How much faster a stacked cohort trains than a plain PyTorch loop over clients: the same work, timed in one run.

    python -m benchmarks.speed

100 clients of 600 rows, 20 local steps with batches of 20, one round of FedAvg. The loop is what most libraries do:
copy the model, make an SGD optimiser and a DataLoader-like index per client, step, collect the parameters.
"""

from __future__ import annotations

import statistics
import time

import numpy as np
import torch
from torch import nn

from mooring.algorithms.fedavg import FedAvg
from mooring.core.cohort import Round
from mooring.data.clients import from_arrays
from mooring.engines.simulator import Simulator
from mooring.tasks.logistic import Logistic
from mooring.tasks.module import Module

CLIENTS, ROWS, FEATURES, CLASSES, STEPS, BATCH, ETA = 100, 600, 784, 10, 20, 20, 0.05
REPEATS = 5


def softmax_net() -> nn.Module:
    return nn.Linear(FEATURES, CLASSES)


def deep_net() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, CLASSES))


def looped(make, clients) -> float:
    """Seconds of one round, client after client."""
    begin = time.perf_counter()
    common = make()
    results = []
    for i in range(CLIENTS):
        x, y = clients.train.of(i)
        model = make()
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
    return time.perf_counter() - begin


def stacked(task, clients, t: int) -> float:
    """Seconds of one round in the simulator."""
    algorithm = FedAvg(eta=ETA, steps=STEPS, batch=BATCH)
    w0 = task.start()
    exchange = Simulator(task, clients, clients.weights())
    exchange.begin(algorithm, w0)
    server, _ = algorithm.start(task, w0)
    begin = time.perf_counter()
    exchange.ask(server, torch.arange(CLIENTS), Round(t, REPEATS, CLIENTS, CLIENTS, 1.0, 0))
    return time.perf_counter() - begin


def main() -> None:
    rng = np.random.default_rng(0)
    xs = rng.normal(size=(CLIENTS, ROWS, FEATURES)).astype(np.float32)
    ys = rng.integers(0, CLASSES, size=(CLIENTS, ROWS))
    clients = from_arrays(list(xs), list(ys), kind="classes", dtype=torch.float32)
    jobs = [
        ("softmax regression", softmax_net, Logistic(FEATURES, CLASSES, ridge=0.0, dtype=torch.float32)),
        ("784-200-200-10 network", deep_net, Module(deep_net)),
    ]
    threads = torch.get_num_threads()
    print(f"{CLIENTS} clients, {STEPS} steps, batch {BATCH}; median of {REPEATS} rounds, {threads} threads")
    for name, make, task in jobs:
        loop, stack = [], []
        for t in range(1, REPEATS + 1):  # interleaved, so that a busy machine slows both alike
            loop.append(looped(make, clients))
            stack.append(stacked(task, clients, t))
        a, b = statistics.median(loop), statistics.median(stack)
        print(f"{name:24s} loop {1000 * a:7.0f} ms   cohort {1000 * b:7.0f} ms   ratio {a / b:5.1f}x")


if __name__ == "__main__":
    main()
