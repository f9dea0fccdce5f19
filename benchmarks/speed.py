"""How fast Mooring is: one table, each row against what a user would run instead, all measured in one run.

    python -m benchmarks.speed [--repeats 5] [--threads 1] [--rows softmax,mlp,...] [--peers FOLDER] [--write]

Repetitions are interleaved: each does Mooring's work once and then every rival's. Times are medians, of processor time
(all threads and processes of a rival) and of the clock. Ratios are of processor times, rival over Mooring. "Of the
limit" is a round's arithmetic over Mooring's processor time, divided by what `torch.matmul` reaches on large matrices
in the same repetitions. Rivals that train get the same rows, batches, start and steps, and must end at the same loss.
FOLDER holds environments with `fedjax`, `pfl` and `flower` (`benchmarks/peers/environments.sh` makes them); without
it, or without one of them, its rows say so. With --write the table goes to docs/performance.md, with a plot beside it.
Ten minutes on two idle cores. The rows:

    softmax, mlp, cnn   a round of FedAvg: 100 clients (30 for cnn), 20 steps, batches of 20
    fedprox             the same for one-stage FedProx with 20 local steps, against FedAvg
    apfl                a round of APFL on the same network, against fedjax's, which has a mixture per layer
    exact               1,000 clients of 50 rows and 20 features: one-stage FedProx until w moves by less than 1e-8,
                        against the same rounds with a `Ridge` of scikit-learn for every client
    path                25 lambdas against one, on the same clients
    advise              `advise` on Exam, against statsmodels' MixedLM with uncorrelated random slopes
    population          a round with cohorts of 1,000 out of 1,000,000 clients, against out of 10,000
    sweep               8 lambdas x 5 seeds of softmax regression as one cohort, against 40 runs
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.peers.protocol import BATCH, ETA, loss_of
from mooring.advice.path import SCALES, path
from mooring.algorithms.apfl import APFL
from mooring.algorithms.fedavg import FedAvg
from mooring.algorithms.fedprox_one_stage import FedProxOneStage
from mooring.core.averages import average
from mooring.core.batches import drawings
from mooring.core.cohort import Round, Rows
from mooring.data.clients import Clients, from_arrays
from mooring.engines.loop import Plan
from mooring.engines.simulate import simulate
from mooring.engines.simulator import Simulator
from mooring.engines.sweep import Variant, sweep
from mooring.tasks.compiled import available
from mooring.tasks.linear import Linear
from mooring.tasks.logistic import Logistic
from mooring.tasks.module import Module

ROWS, SIDE, CLASSES, STEPS = 600, 28, 10, 20
FEATURES = SIDE**2
SAME = 5e-3  # of the way: single precision, where rounding may decide a maximum of pooling or the side of a kink
LARGE = 2000  # the side of the matrices whose product is the limit
PEERS = ("pfl", "fedjax", "flower")
Times = tuple[float, float]  # of the processor, of the clock


@dataclass
class Contest:
    """A row or several: Mooring's work, and each rival's with the ratio that is wanted (None: none was set)."""

    name: str
    ours: Callable[[], Times]
    rivals: dict[str, Callable[[], Times]]
    wanted: dict[str, float | None]
    operations: float = 0.0  # multiplications and additions of Mooring's work
    least_share: float | None = None  # of the limit
    at_most: bool = False  # whether ratios are wanted below the number: Mooring's own time over the other's
    warm: bool = False  # whether all of it ran before: else the first repetition does not count
    missing: dict[str, str] = field(default_factory=dict)  # rivals that cannot run, and why
    note: Callable[[], str] = lambda: ""


class Row(NamedTuple):
    """A line of the table."""

    work: str
    mine: Times  # medians, in milliseconds
    rival: str
    theirs: Times | None  # None: it cannot run
    ratios: list[float]
    of_limit: str
    wanted: float | None
    at_most: bool
    remark: str = ""  # instead of a rival's time

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def held(self) -> bool | None:
        if self.wanted is None or self.theirs is None:
            return None
        return self.ratio <= self.wanted if self.at_most else self.ratio >= self.wanted

    def line(self, before: str) -> str:
        """In Markdown; `before` is the work of the line above, which is not said again."""
        same = self.work == before
        mine = "" if same else "{:.0f} ({:.0f})".format(*self.mine)
        cells = ["" if same else self.work, mine, self.rival]
        if self.theirs is None:
            cells += [self.remark, "", "", "" if same else self.of_limit, ""]
        else:
            wanted = ""
            if self.wanted is not None:
                wanted = f"{'at most' if self.at_most else 'at least'} {self.wanted:g}: {verdict(bool(self.held))}"
            cells += [
                "{:.0f} ({:.0f})".format(*self.theirs),
                f"{self.ratio:.2f}",
                f"{min(self.ratios):.2f}-{max(self.ratios):.2f}",
                "" if same else self.of_limit,
                wanted,
            ]
        return "| " + " | ".join(cells) + " |"


HEAD = "| work | Mooring | rival | its time | ratio | spread | of the limit | wanted |\n" + "|---" * 8 + "|"


def table(rows: list[Row]) -> str:
    return "\n".join([HEAD, *(row.line(before.work) for before, row in zip([rows[0]._replace(work=""), *rows], rows))])


def timed(work: Callable[[], Any]) -> Times:
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    return time.process_time() - cpu, time.perf_counter() - wall


def medians(times: list[Times]) -> Times:
    """In milliseconds."""
    cpu, wall = (1000 * statistics.median(column) for column in zip(*times))
    return cpu, wall


def measure(contest: Contest, repeats: int) -> Iterator[Row]:
    """The contest's rows."""
    square = torch.randn(LARGE, LARGE)
    limits, ours = [], []
    theirs: dict[str, list[Times]] = {name: [] for name in contest.rivals}
    for repetition in range(contest.warm, repeats + 1):
        now = contest.ours()
        found = {name: rival() for name, rival in contest.rivals.items()}
        limit = timed(lambda: square @ square)[0]
        if repetition:  # the first warms up
            ours.append(now)
            limits.append(limit)
            for name, times in found.items():
                theirs[name].append(times)
    mine = medians(ours)
    share = contest.operations / (mine[0] / 1000) / (2 * LARGE**3 / statistics.median(limits))
    told = f"{100 * share:.0f} %" if contest.operations else ""
    if contest.least_share is not None:
        told += f" (at least {100 * contest.least_share:.0f} %: {verdict(share >= contest.least_share)})"
    for name, times in theirs.items():
        ratios = [(a[0] / b[0] if contest.at_most else b[0] / a[0]) for a, b in zip(ours, times)]
        wanted = contest.wanted.get(name)
        yield Row(contest.name, mine, name, medians(times), ratios, told, wanted, contest.at_most)
    remarks = contest.missing | ({"": contest.note()} if contest.note() else {})
    for name, why in remarks.items():
        yield Row(contest.name, mine, name, None, [], told, None, contest.at_most, why)


def verdict(good: bool) -> str:
    return "held" if good else "**missed**"


# Rounds of training, with the same batches for everyone.


def softmax_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, CLASSES))


def deep_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, CLASSES))


def convolutional_net() -> nn.Sequential:
    first = (nn.Unflatten(1, (1, SIDE, SIDE)), nn.Conv2d(1, 8, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2))
    second = (nn.Conv2d(8, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    return nn.Sequential(*first, *second, nn.Linear(16 * (SIDE // 4) ** 2, CLASSES))


def some_clients(count: int) -> Clients:
    rng = np.random.default_rng(0)
    xs = rng.standard_normal((count, ROWS, FEATURES), dtype=np.float32)
    ys = rng.integers(0, CLASSES, size=(count, ROWS))
    return from_arrays(list(xs), list(ys), kind="classes", dtype=torch.float32)


class Training:
    """A round of an algorithm in the simulator, from the same start each time, and what rivals need to do the same."""

    def __init__(self, task: Any, algorithm: Any, clients: Clients, net: nn.Sequential):
        self.clients, self.algorithm, self.net = clients, algorithm, net
        linear = isinstance(task, Logistic)  # whose slopes are [features, scores]
        parts = [(p.mT if linear and p.ndim == 2 else p).detach().reshape(-1) for p in net.parameters()]
        self.start = torch.cat(parts).clone()
        self.exchange = Simulator(task, clients, clients.weights())
        self.turn = Round(1, 100, len(clients), len(clients), 1.0, 0)
        self.server = algorithm.start(task, self.start)[0]
        self.task, self.linear, self.ended = task, linear, self.start

    def round(self) -> None:
        self.exchange.begin(self.algorithm, self.start)
        everyone = torch.arange(len(self.clients))
        replies = self.exchange.ask(self.server, everyone, self.turn)
        mean = average(replies.message, self.exchange.p[replies.who], "mean")
        self.ended = self.algorithm.merge(self.server, mean, self.turn).w

    def places(self) -> Tensor:
        """[C, S, B]: the rows of every batch of the round."""
        data = self.clients.cohort()
        counts = torch.full((len(data),), STEPS)
        drawn = drawings(data, self.turn, batch=BATCH, counts=counts)
        return torch.from_numpy(np.stack([one.place for one in drawn], 1))

    def layers(self, w: Tensor) -> list[tuple[np.ndarray, np.ndarray]]:
        """The perceptron with parameters w, matrices as [in, out]."""
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


def looped(training: Training, places: Tensor) -> None:
    """A round as most libraries write it: a copy of the model and an optimiser per client, step, collect, average."""
    results, make = [], {1: softmax_net, 5: deep_net}.get(len(training.net), convolutional_net)
    for i in range(len(training.clients)):
        model = make()
        model.load_state_dict(training.net.state_dict())
        optimiser = torch.optim.SGD(model.parameters(), lr=ETA)
        for rows in places[i]:
            x, y = training.clients.train.x[rows], training.clients.train.y[rows]
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimiser.step()
        results.append([p.detach().clone() for p in model.parameters()])
    mean = [torch.stack(parts).mean(0) for parts in zip(*results)]
    found = torch.cat([(p.mT if training.linear and p.ndim == 2 else p).reshape(-1) for p in mean])
    apart, moved = (found - training.ended).norm(), (training.ended - training.start).norm()
    assert apart <= SAME * moved, f"the loop ends {float(apart / moved):.1e} of the way apart"


class Peer:
    """Another library in its own process and environment."""

    def __init__(self, stack: ExitStack, folder: Path, name: str, work: Path, threads: int, method: str = "fedavg"):
        script = Path(__file__).parent / "peers" / f"with_{name}.py"
        command = [str(folder / name / "bin" / "python"), str(script), str(work), str(threads), method]
        stack.enter_context(kept := tempfile.TemporaryFile("w+"))  # noqa: SIM115
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=kept, text=True, env=limited(threads)
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
    contest: Contest, training: Training, stack: ExitStack, asked: argparse.Namespace, names: dict[str, float | None],
    method: str = "fedavg", same_loss: bool = True,
) -> Contest:  # fmt: skip
    """The contest with every peer that can be started, once it has come to the same loss."""
    work = training.save(Path(stack.enter_context(tempfile.TemporaryDirectory())) / "work.npz")
    training.round()
    expected = training.loss(training.ended)
    for name, wanted in names.items():
        if asked.peers is None or not (asked.peers / name).is_dir():
            contest.missing[name] = "not installed"
            continue
        try:
            peer = Peer(stack, asked.peers, name, work, asked.threads, method)
            peer.round()
        except (OSError, RuntimeError) as problem:
            contest.missing[name] = f"failed: {problem}"
            continue
        if same_loss and not np.isclose(peer.loss, expected, rtol=1e-4):
            contest.missing[name] = f"another loss: {peer.loss:.5f}, not {expected:.5f}"
            continue
        contest.rivals[name], contest.wanted[name] = peer.round, wanted
    contest.warm = True
    return contest


FEDAVG = FedAvg(eta=ETA, steps=STEPS, batch=BATCH)
DEEP = 4 * FEATURES * 200 + 6 * (200 * 200 + 200 * CLASSES)  # of a row, forward and back
WIDE = 4 * FEATURES * CLASSES
NETWORK = "network 784-200-200-10"
CONVOLUTIONS = 4 * 8 * 25 * SIDE**2 + 6 * (16 * 8 * 25 * (SIDE // 2) ** 2 + 16 * (SIDE // 4) ** 2 * CLASSES)


def kernels_here() -> tuple[str, ...]:
    """What local steps can be taken by, the fastest first."""
    return ("numba", "torch") if available() else ("torch",)


def against_loop(name: str, training: Training, wanted: float | None, operations: float, **more: Any) -> Contest:
    places = training.places()
    samples = len(training.clients) * STEPS * BATCH
    loop_ = partial(timed, partial(looped, training, places))
    training.round()
    loop_()
    return Contest(
        name,
        partial(timed, training.round),
        {"loop": loop_},
        {"loop": wanted},
        operations * samples,
        warm=True,
        **more,
    )


def softmax(asked: argparse.Namespace, stack: ExitStack) -> Iterator[Contest]:
    clients, net = some_clients(100), softmax_net()
    for kernels in kernels_here():
        task = Logistic(FEATURES, CLASSES, ridge=0.0, dtype=torch.float32, kernels=kernels)
        training = Training(task, FEDAVG, clients, net)
        contest = against_loop(f"softmax 784-10, {kernels}", training, 18 if kernels == "numba" else None, WIDE)
        peers = {"pfl": 14.0, "fedjax": 4.0, "flower": None}
        yield with_peers(contest, training, stack, asked, peers) if kernels == "numba" else contest


def mlp(asked: argparse.Namespace, stack: ExitStack) -> Iterator[Contest]:
    clients, net = some_clients(100), deep_net()
    for kernels in kernels_here():
        training = Training(Module(deep_net, kernels=kernels), FEDAVG, clients, net)
        best = kernels == kernels_here()[0]
        least = 0.5 if best else None
        contest = against_loop(f"{NETWORK}, {kernels}", training, 4 if best else None, DEEP, least_share=least)
        peers = {"pfl": 3.0, "fedjax": 2.0, "flower": None}
        yield with_peers(contest, training, stack, asked, peers) if best else contest


def cnn(asked: argparse.Namespace, stack: ExitStack) -> Iterator[Contest]:
    training = Training(Module(convolutional_net), FEDAVG, some_clients(30), convolutional_net())
    yield against_loop("two convolutions", training, 1.2, CONVOLUTIONS)


def fedprox(asked: argparse.Namespace, stack: ExitStack) -> Iterator[Contest]:
    inexact = FedProxOneStage(lam=0.1, gamma=1.0, inner="sgd", eta=ETA, steps=STEPS, batch=BATCH)
    clients = some_clients(100)
    kernels = kernels_here()[0]
    tasks = {
        "softmax 784-10": (Logistic(FEATURES, CLASSES, ridge=0.0, dtype=torch.float32, kernels=kernels), softmax_net()),
        NETWORK: (Module(deep_net, kernels=kernels), deep_net()),
    }
    for name, (task, net) in tasks.items():
        pulled, plain = (Training(task, algorithm, clients, net) for algorithm in (inexact, FEDAVG))
        rivals = {"FedAvg": partial(timed, plain.round)}
        yield Contest(f"FedProx by SGD, {name}", partial(timed, pulled.round), rivals, {"FedAvg": 1.3}, at_most=True)


def apfl(asked: argparse.Namespace, stack: ExitStack) -> Iterator[Contest]:
    algorithm = APFL(alpha=0.5, adapt="step", adapt_on="train", eta=ETA, decay=0.0, steps=STEPS, batch=BATCH)
    task = Module(deep_net, kernels=kernels_here()[0])
    training = Training(task, algorithm, some_clients(asked.apfl_clients), deep_net())
    samples = asked.apfl_clients * STEPS * BATCH
    contest = Contest(
        f"APFL, network, {asked.apfl_clients} clients", partial(timed, training.round), {}, {}, 2 * DEEP * samples
    )
    yield with_peers(contest, training, stack, asked, {"fedjax": 3.0}, "apfl")  # the common model is FedAvg's in both


# Exact solves.


def table_clients(count: int = 1000, rows: int = 50, features: int = 20) -> Clients:
    rng = np.random.default_rng(0)
    xs = rng.normal(size=(count, rows, features))
    ws = 1 + 0.5 * rng.normal(size=(count, features))
    ys = np.einsum("crf,cf->cr", xs, ws) + rng.normal(size=(count, rows))
    return from_arrays(list(xs), list(ys))


LAM, CLOSE = 0.5, 1e-8


def exact(asked: argparse.Namespace, stack: ExitStack) -> Iterator[Contest]:
    from sklearn.linear_model import Ridge

    task = Linear(20, intercept=False)
    algorithm = FedProxOneStage(lam=LAM, inner="exact")
    pulls: list[float] = []

    def moved(moment: Any) -> bool:
        pulls.append(float((moment.server.w - (before[0] if before else 0)).abs().max()))
        before[:] = [moment.server.w]
        return pulls[-1] < CLOSE

    before: list[Tensor] = []

    def ours() -> Any:
        before.clear()
        pulls.clear()
        return simulate(algorithm, task, table_clients_once(), Plan(rounds=500, evaluate_every=500), watch=moved)

    made = table_clients()

    def table_clients_once() -> Clients:
        """The same rows without what was computed from them before."""
        return replace(made, train=replace(made.train, cache={}))

    found = ours()
    rounds, gamma, end = len(pulls), float(found.algorithm.gamma), found.outcome.progress.server.w

    def one_round(w: np.ndarray) -> np.ndarray:
        pull = np.zeros_like(w)
        for i in range(len(made)):
            x, y = (part.numpy() for part in made.train.of(i))
            off = Ridge(alpha=LAM * len(y), fit_intercept=False).fit(x, y - x @ w).coef_
            pull -= LAM * off / len(made)
        return w - gamma * pull

    w = np.zeros(20)
    for _ in range(2):
        w = one_round(w)
    few = simulate(algorithm, task, made, Plan(rounds=2, evaluate_every=2)).outcome.progress.server.w
    np.testing.assert_allclose(few.numpy(), w, rtol=1e-6)

    def theirs() -> Times:
        cpu, wall = timed(lambda: one_round(end.numpy()))
        return rounds * cpu, rounds * wall

    name = f"one-stage FedProx to 1e-8, {rounds} rounds"
    yield Contest(
        name,
        partial(timed, ours),
        {"scikit-learn, a round times rounds": theirs},
        {"scikit-learn, a round times rounds": 50},
        warm=True,
    )


def lambdas(asked: argparse.Namespace, stack: ExitStack) -> Iterator[Contest]:
    task, made = Linear(20, intercept=False), table_clients()

    def solve(count: int) -> None:
        rows = replace(made.train, cache={})
        for _ in path(task, rows, made.weights(), SCALES[:count] if count > 1 else [LAM]):
            pass

    rivals = {"one lambda": partial(timed, partial(solve, 1))}
    yield Contest("path of 25 lambdas", partial(timed, partial(solve, 25)), rivals, {"one lambda": 5}, at_most=True)


def advised(asked: argparse.Namespace, stack: ExitStack) -> Iterator[Contest]:
    from benchmarks.advice_tables import mixed_model
    from mooring import advise
    from mooring.advice.folds import joined
    from tests.tables import EXAM

    clients = advise(EXAM.path, **EXAM.columns).job.clients
    rows = joined(clients.train, clients.validation)

    def theirs() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return mixed_model(rows, clients.test)

    ours = partial(timed, partial(advise, EXAM.path, **EXAM.columns))
    yield Contest("advise exam", ours, {"MixedLM": partial(timed, theirs)}, {"MixedLM": 5}, warm=True)


# Many clients, many runs.


def many_clients(count: int, rows: int = 20, features: int = 20) -> Clients:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count * rows, features, generator=generator)
    y = torch.randint(0, 2, (count * rows,), generator=generator)
    nothing = torch.zeros(count, dtype=torch.long)
    none = Rows(x[:0], y[:0], nothing, nothing)
    train = Rows(x, y, rows * torch.arange(count), torch.full((count,), rows))
    return Clients(tuple(map(str, range(count))), train, none, none, kind="binary")


def population(asked: argparse.Namespace, stack: ExitStack) -> Iterator[Contest]:
    task, algorithm = Logistic(20, dtype=torch.float32), FedAvg(eta=0.1, steps=10, batch=10)
    plan = Plan(rounds=100, participation=1000, evaluate_every=100)

    def rounds_of(clients: Clients) -> Callable[[], Times]:
        """Rounds of the engine's own loop, without evaluations."""
        times: list[Times] = []
        last: list[Times] = []

        def watch(moment: Any) -> bool:
            now = time.process_time(), time.perf_counter()
            if last:
                times.append((now[0] - last[0][0], now[1] - last[0][1]))
            last[:] = [now]
            return moment.t >= 12

        def some() -> Times:
            times.clear()
            last.clear()
            simulate(algorithm, task, clients, plan, settled=True, watch=watch)
            return tuple(statistics.median(column) for column in zip(*times))

        return some

    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # what other rows needed is none of the peak
    small, large = many_clients(10_000), many_clients(1_000_000)
    done: list[str] = []

    def note() -> str:
        if not done:
            wall = time.perf_counter()
            simulate(algorithm, task, large, plan, settled=True)
            took, peak = time.perf_counter() - wall, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
            done.append(f"100 rounds ran in {took:.0f} s; {peak:.1f} GB at most (wanted under 6: {verdict(peak < 6)})")
        return done[0]

    yield Contest(
        "a round of 1,000,000 clients",
        rounds_of(large),
        {"10,000 clients": rounds_of(small)},
        {"10,000 clients": 1.3},
        at_most=True,
        note=note,
    )


def sweeps(asked: argparse.Namespace, stack: ExitStack) -> Iterator[Contest]:
    rng = np.random.default_rng(0)
    xs, ys = rng.normal(size=(30, 50, 20)), rng.integers(0, 5, size=(30, 50))
    parts = [np.where(np.arange(50) < 40, "train", "validation")] * 30
    clients = from_arrays(list(xs), list(ys), kind="classes", parts=parts, dtype=torch.float32)
    task, plan = Logistic(20, 5, dtype=torch.float32), Plan(rounds=20, evaluate_every=20)
    variants = [
        Variant(FedProxOneStage(lam=lam, gamma=1 / lam, inner="sgd", eta=ETA, steps=10, batch=10), seed)
        for lam in np.logspace(-2, 1, 8).tolist()
        for seed in range(5)
    ]
    lone = [simulate(one.algorithm, task, clients, replace(plan, seed=one.seed)) for one in variants[:7]]
    for one, found in zip(lone, sweep(variants[:7], task, clients, plan)):
        torch.testing.assert_close(found.server.w, one.outcome.progress.server.w, rtol=1e-4, atol=1e-6)

    def apart() -> None:
        for one in variants:
            simulate(one.algorithm, task, clients, replace(plan, seed=one.seed))

    ours = partial(timed, lambda: sweep(variants, task, clients, plan))
    rivals = {"40 runs": partial(timed, apart)}
    yield Contest("sweep of 8 lambdas x 5 seeds", ours, rivals, {"40 runs": 3}, warm=True)


CONTESTS = {
    "softmax": softmax,
    "mlp": mlp,
    "cnn": cnn,
    "fedprox": fedprox,
    "apfl": apfl,
    "exact": exact,
    "path": lambdas,
    "advise": advised,
    "population": population,
    "sweep": sweeps,
}


PAGE = Path(__file__).parent.parent / "docs" / "performance.md"
BEGIN, END = "<!-- written by python -m benchmarks.speed --write -->", "<!-- until here -->"


def write(text: str, rows: list[Row]) -> None:
    """Put the table into the page, and draw the plot beside it."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    plot = PAGE.with_suffix(".svg")
    draw(rows, plot)
    shown = f"![How many times faster, and what is wanted]({plot.name})"
    PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n\n{shown}\n\n{END}{after}")


def draw(rows: list[Row], path: Path) -> None:
    """Ratios with their spreads, against what is wanted."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    shown = [row for row in rows if row.theirs is not None][::-1]
    figure, axes = plt.subplots(figsize=(9, 0.32 * len(shown) + 1.2))
    for y, row in enumerate(shown):
        colour = {True: "tab:green", False: "tab:red", None: "tab:grey"}[row.held]
        axes.plot([min(row.ratios), max(row.ratios)], [y, y], color=colour, linewidth=2)
        axes.plot(row.ratio, y, "o", color=colour)
        if row.wanted is not None:
            axes.plot(row.wanted, y, "|", color="black", markersize=12)
    axes.set_xscale("log")
    axes.set_yticks(range(len(shown)), [f"{row.work} / {row.rival}" for row in shown], fontsize=8)
    axes.set_xlabel("ratio of processor times and its spread; black: what is wanted; red: missed", fontsize=8)
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", default=",".join(CONTESTS))
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--apfl-clients", type=int, default=340)
    parser.add_argument("--write", action="store_true", help="put the table into docs/performance.md")
    asked = parser.parse_args()
    unknown = set(asked.rows.split(",")) - set(CONTESTS)
    if unknown:
        sys.exit(f"unknown rows {', '.join(sorted(unknown))}; known: {', '.join(CONTESTS)}.")
    torch.set_num_threads(asked.threads)
    torch.manual_seed(0)
    rows: list[Row] = []
    begin = time.perf_counter()
    for name in asked.rows.split(","):
        with ExitStack() as stack:
            for contest in CONTESTS[name](asked, stack):
                found = list(measure(contest, asked.repeats))
                print(*(row.line("") for row in found), sep="\n", file=sys.stderr)  # not lost, whatever comes
                rows += found
        print(f"{time.perf_counter() - begin:4.0f} s: {name} measured", file=sys.stderr, flush=True)
    text = (
        f"Medians of {asked.repeats} interleaved repetitions, {asked.threads} thread{'s' * (asked.threads > 1)}; "
        f"milliseconds of processor time (of the clock).\n\n{table(rows)}"
    )
    print(text)
    if asked.write:
        write(text, rows)


if __name__ == "__main__":
    main()
