"""Rounds of training, compared with other libraries on the same batches."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.network_training import resnet18
from benchmarks.peers.protocol import BATCH, ETA, loss_of
from benchmarks.speed_measure import Contest, Times, timed
from mooring.algorithms.apfl import APFL
from mooring.algorithms.fedavg import FedAvg
from mooring.algorithms.fedprox_personal import FedProxPersonal
from mooring.core.aggregation import average
from mooring.core.cohort import Round
from mooring.core.minibatches import draw_rows
from mooring.core.task import Task
from mooring.data.clients import Clients, from_arrays
from mooring.engines.simulator import Simulator
from mooring.tasks.compiled_steps import compile_steps, is_numba_available
from mooring.tasks.logistic import Logistic
from mooring.tasks.network import NetworkTask

ROWS, SIDE, CLASSES, STEPS = 600, 28, 10, 20
FEATURES = SIDE**2
# relative to the distance moved: in single precision, rounding may decide a maximum of pooling or the side of a kink
SAME = 1e-2
SAME_NORMALIZED = 2e-2  # of a network with batch normalization, which magnifies rounding


def softmax_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, CLASSES))


def deep_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, CLASSES))


def convolutional_net() -> nn.Sequential:
    first = (nn.Unflatten(1, (1, SIDE, SIDE)), nn.Conv2d(1, 8, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2))
    second = (nn.Conv2d(8, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    return nn.Sequential(*first, *second, nn.Linear(16 * (SIDE // 4) ** 2, CLASSES))


def some_clients(count: int, rows: int = ROWS, shape: tuple[int, ...] = (FEATURES,)) -> Clients:
    rng = np.random.default_rng(0)
    xs = rng.standard_normal((count, rows, *shape), dtype=np.float32)
    ys = rng.integers(0, CLASSES, size=(count, rows))
    return from_arrays(list(xs), list(ys), kind="classes", dtype=torch.float32)


class Training:
    """A round of an algorithm in the simulator, from the same start each time, and the inputs that rivals need for
    the same work."""

    def __init__(self, task: Any, algorithm: Any, clients: Clients, net: nn.Sequential):
        self.clients, self.algorithm, self.net = clients, algorithm, net
        linear = isinstance(task, Logistic)  # whose slopes are [features, scores]
        parts = [(p.mT if linear and p.ndim == 2 else p).detach().reshape(-1) for p in net.parameters()]
        self.start = torch.cat(parts).clone()
        if len(self.start) < task.dim:  # behind the parameters: running statistics
            self.start = torch.cat([self.start, task.start()[len(self.start) :]])
        self.exchange = Simulator(task, clients, clients.weights())
        self.turn = Round(1, 100, len(clients), len(clients), 1.0, 0)
        self.server = algorithm.init(task, self.start)[0]
        self.task, self.linear, self.ended = task, linear, self.start

    def round(self) -> None:
        self.exchange.begin(self.algorithm, self.start)
        all_clients = torch.arange(len(self.clients))
        replies = self.exchange.ask(self.server, all_clients, self.turn)
        mean = average(replies.message, self.exchange.p[replies.clients], "mean")
        self.ended = self.algorithm.server_update(self.server, mean, self.turn).w

    def places(self) -> Tensor:
        """Return [C, S, B]: the rows of every batch of the round."""
        data = self.clients.cohort()
        counts = torch.full((len(data),), self.algorithm.steps)
        batches = draw_rows(data, self.turn, batch=BATCH, counts=counts)
        return torch.from_numpy(np.stack([batch.row_index for batch in batches], 1))

    def layers(self, w: Tensor) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the perceptron with parameters w, matrices as [in, out]."""
        if self.linear:
            return [(w[: FEATURES * CLASSES].view(FEATURES, CLASSES).numpy(), w[FEATURES * CLASSES :].numpy())]
        parts = self.task.layers(w[None])
        shaped = [part[0] for part in parts.values()]
        return [(a.mT.numpy(), b.numpy()) for a, b in zip(shaped[::2], shaped[1::2])]

    def save(self, path: Path) -> Path:
        at = self.places().flatten(1)
        layers = {
            f"{kind}{i}": part for i, pair in enumerate(self.layers(self.start)) for kind, part in zip("wb", pair)
        }
        x, y = self.clients.train.x[at], self.clients.train.y[at]
        np.savez(path, x=x.numpy(), y=y.numpy(), **layers)
        return path

    def loss(self, w: Tensor) -> float:
        at = self.places().flatten(1)[:10]
        return loss_of(self.layers(w), self.clients.train.x[at].numpy(), self.clients.train.y[at].numpy())


def run_loop(training: Training, places: Tensor) -> None:
    """Run a round as most libraries write it: a copy of the model and an optimiser per client, step, collect,
    average."""
    results = []
    for i in range(len(training.clients)):
        model = deepcopy(training.net)
        optimiser = torch.optim.SGD(model.parameters(), lr=training.algorithm.eta)
        for rows in places[i]:
            x, y = training.clients.train.x[rows], training.clients.train.y[rows]
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimiser.step()
        results.append([p.detach().clone() for p in model.parameters()])
    mean = [torch.stack(parts).mean(0) for parts in zip(*results)]
    w_loop = torch.cat([(p.mT if training.linear and p.ndim == 2 else p).reshape(-1) for p in mean])
    ended, start = training.ended[: len(w_loop)], training.start[: len(w_loop)]
    distance, moved = (w_loop - ended).norm(), (ended - start).norm()
    same = SAME if len(training.start) == len(w_loop) else SAME_NORMALIZED
    assert distance <= same * moved, f"the loop ends {float(distance / moved):.1e} of the way apart"


class Peer:
    """Another library in its own process and environment."""

    def __init__(self, stack: ExitStack, folder: Path, name: str, work: Path, threads: int, method: str = "fedavg"):
        script = Path(__file__).parent / "peers" / f"with_{name}.py"
        command = [str(folder / name / "bin" / "python"), str(script), str(work), str(threads), method]
        stack.enter_context(errors := tempfile.TemporaryFile("w+"))  # noqa: SIM115
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=limited(threads)
        )
        stack.callback(self.close)
        self.loss: float | None = None
        self.read()

    def read(self) -> dict[str, Any]:
        for line in self.process.stdout or ():
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError("it ended without an answer")

    def round(self) -> Times:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        answer = self.read()
        self.loss = answer["loss"]
        return answer["cpu"], answer["wall"]

    def close(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()


def limited(threads: int) -> dict[str, str]:
    return os.environ | dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))


def with_peers(
    contest: Contest, training: Training, stack: ExitStack, options: argparse.Namespace, names: dict[str, float | None],
    method: str = "fedavg", same_loss: bool = True,
) -> Contest:  # fmt: skip
    """Return the contest with every peer that can be started and reaches the same loss."""
    work = training.save(Path(stack.enter_context(tempfile.TemporaryDirectory())) / "work.npz")
    training.round()
    expected = training.loss(training.ended)
    for name, target in names.items():
        if options.peers is None or not (options.peers / name).is_dir():
            contest.missing[name] = "not installed"
            continue
        try:
            peer = Peer(stack, options.peers, name, work, options.threads, method)
            peer.round()
        except (OSError, RuntimeError) as problem:
            contest.missing[name] = f"failed: {problem}"
            continue
        if same_loss and not np.isclose(peer.loss, expected, rtol=1e-4):
            contest.missing[name] = f"another loss: {peer.loss:.5f}, not {expected:.5f}"
            continue
        contest.rivals[name], contest.targets[name] = peer.round, target
    contest.warm = True
    return contest


FEDAVG = FedAvg(eta=ETA, steps=STEPS, batch=BATCH)
DEEP = 4 * FEATURES * 200 + 6 * (200 * 200 + 200 * CLASSES)  # of a row, forward and back
WIDE = 4 * FEATURES * CLASSES
SEVERAL_THREADS, RESNET_STEPS = 2, 2
NETWORK = "network 784-200-200-10"
CONVOLUTIONS = 4 * 8 * 25 * SIDE**2 + 6 * (16 * 8 * 25 * (SIDE // 2) ** 2 + 16 * (SIDE // 4) ** 2 * CLASSES)


def kernels_here() -> tuple[str, ...]:
    """Return the available kernels of local steps, the fastest first."""
    return ("numba", "torch") if is_numba_available() else ("torch",)


def against_loop(
    name: str,
    training: Training,
    target: float | None,
    operations: float = 0.0,
    threads: int = 0,
    **contest_options: Any,
) -> Contest:
    """Return a row against the plain loop, both with `threads` threads (0: those of the run)."""
    places = training.places()
    samples = len(training.clients) * training.algorithm.steps * BATCH
    loop_ = with_threads(threads, partial(run_loop, training, places))
    ours = with_threads(threads, training.round)
    ours()
    loop_()
    return Contest(
        name + (f", {threads} threads" if threads else ""),
        ours,
        {"loop": loop_},
        {"loop": target},
        operations * samples,
        warm=True,
        **contest_options,
    )


def with_threads(threads: int, work: Callable[[], None]) -> Callable[[], Times]:
    """Return what times the work, done with so many threads (0: as many as now)."""

    def run() -> Times:
        before = torch.get_num_threads()
        torch.set_num_threads(threads or before)
        try:
            return timed(work)
        finally:
            torch.set_num_threads(before)

    return run


def softmax_task(kernels: str) -> Task:
    task = Logistic(FEATURES, CLASSES, ridge=0.0, dtype=torch.float32)
    return compile_steps(task) if kernels == "numba" else task


def softmax(options: argparse.Namespace, stack: ExitStack) -> Iterator[Contest]:
    clients, net = some_clients(100), softmax_net()
    for kernels in kernels_here():
        task = softmax_task(kernels)
        training = Training(task, FEDAVG, clients, net)
        contest = against_loop(f"softmax 784-10, {kernels}", training, 18 if kernels == "numba" else None, WIDE)
        peers = {"pfl": 14.0, "fedjax": 4.0, "flower": None}
        yield with_peers(contest, training, stack, options, peers) if kernels == "numba" else contest


def mlp(options: argparse.Namespace, stack: ExitStack) -> Iterator[Contest]:
    clients, net = some_clients(100), deep_net()
    for kernels in kernels_here():
        training = Training(NetworkTask(deep_net, kernels=kernels), FEDAVG, clients, net)
        best = kernels == kernels_here()[0]
        min_share = 0.5 if best else None
        contest = against_loop(f"{NETWORK}, {kernels}", training, 4 if best else None, DEEP, least_share=min_share)
        peers = {"pfl": 3.0, "fedjax": 2.0, "flower": None}
        yield with_peers(contest, training, stack, options, peers) if best else contest


def cnn(options: argparse.Namespace, stack: ExitStack) -> Iterator[Contest]:
    training = Training(NetworkTask(convolutional_net), FEDAVG, some_clients(30), convolutional_net())
    yield against_loop("two convolutions", training, 1.2, CONVOLUTIONS)
    yield against_loop("two convolutions", training, None, threads=SEVERAL_THREADS)


def resnet(options: argparse.Namespace, stack: ExitStack) -> Iterator[Contest]:
    algorithm = FedAvg(eta=0.01, steps=RESNET_STEPS, batch=BATCH)
    training = Training(NetworkTask(resnet18), algorithm, some_clients(10, 60, (3, 32, 32)), resnet18())
    yield against_loop("ResNet-18 with BatchNorm", training, 0.91)
    yield against_loop("ResNet-18 with BatchNorm", training, None, threads=SEVERAL_THREADS)


def fedprox(options: argparse.Namespace, stack: ExitStack) -> Iterator[Contest]:
    inexact = FedProxPersonal(lam=0.1, gamma=1.0, inner="sgd", eta=ETA, steps=STEPS, batch=BATCH)
    clients = some_clients(100)
    kernels = kernels_here()[0]
    tasks = {
        "softmax 784-10": (softmax_task(kernels), softmax_net()),
        NETWORK: (NetworkTask(deep_net, kernels=kernels), deep_net()),
    }
    for name, (task, net) in tasks.items():
        pulled, averaged = (Training(task, algorithm, clients, net) for algorithm in (inexact, FEDAVG))
        rivals = {"FedAvg": partial(timed, averaged.round)}
        yield Contest(f"FedProx by SGD, {name}", partial(timed, pulled.round), rivals, {"FedAvg": 1.3}, at_most=True)


def apfl(options: argparse.Namespace, stack: ExitStack) -> Iterator[Contest]:
    algorithm = APFL(alpha=0.5, adapt="step", adapt_on="train", eta=ETA, decay=0.0, steps=STEPS, batch=BATCH)
    task = NetworkTask(deep_net, kernels=kernels_here()[0])
    training = Training(task, algorithm, some_clients(options.apfl_clients), deep_net())
    samples = options.apfl_clients * STEPS * BATCH
    contest = Contest(
        f"APFL, network, {options.apfl_clients} clients", partial(timed, training.round), {}, {}, 2 * DEEP * samples
    )
    yield with_peers(contest, training, stack, options, {"fedjax": 3.0}, "apfl")  # the global model is FedAvg's in both
