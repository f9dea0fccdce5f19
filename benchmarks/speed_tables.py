"""Exact solves, advice, large populations and sweeps compared with the same work done sequentially."""

from __future__ import annotations

import argparse
import resource
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.peers.protocol import ETA
from benchmarks.speed_measure import Contest, Times, format_verdict, timed
from mooring.algorithms.fedavg import FedAvg
from mooring.algorithms.fedprox_personal import FedProxPersonal
from mooring.core.cohort import Rows
from mooring.data.clients import Clients, from_arrays
from mooring.data.folds import row_clients
from mooring.engines.simulate import simulate
from mooring.engines.sweep import Variant, sweep
from mooring.engines.training_state import TrainingPlan
from mooring.partial_pooling.lambda_path import LAMBDA_SCALES, solve_path
from mooring.tasks.linear import Linear
from mooring.tasks.logistic import Logistic


def table_clients(count: int = 1000, rows: int = 50, features: int = 20) -> Clients:
    rng = np.random.default_rng(0)
    xs = rng.normal(size=(count, rows, features))
    ws = 1 + 0.5 * rng.normal(size=(count, features))
    ys = np.einsum("crf,cf->cr", xs, ws) + rng.normal(size=(count, rows))
    return from_arrays(list(xs), list(ys))


LAM, CLOSE = 0.5, 1e-8


def exact(options: argparse.Namespace, stack: ExitStack) -> Iterator[Contest]:
    from sklearn.linear_model import Ridge

    task = Linear(20, intercept=False)
    algorithm = FedProxPersonal(lam=LAM, inner="exact")
    pulls: list[float] = []

    def has_converged(moment: Any) -> bool:
        pulls.append(float((moment.server.w - (before[0] if before else 0)).abs().max()))
        before[:] = [moment.server.w]
        return pulls[-1] < CLOSE

    before: list[Tensor] = []

    def ours() -> Any:
        before.clear()
        pulls.clear()
        return simulate(
            algorithm, task, table_clients_once(), TrainingPlan(rounds=500, evaluate_every=500), watch=has_converged
        )

    clients = table_clients()

    def table_clients_once() -> Clients:
        """Return the same rows with an empty cache."""
        return replace(clients, train=replace(clients.train, cache={}))

    result = ours()
    rounds, gamma, end = len(pulls), float(result.algorithm.gamma), result.outcome.state.server.w

    def one_round(w: np.ndarray) -> np.ndarray:
        pull = np.zeros_like(w)
        for i in range(len(clients)):
            x, y = (part.numpy() for part in clients.train.of(i))
            off = Ridge(alpha=LAM * len(y), fit_intercept=False).fit(x, y - x @ w).coef_
            pull -= LAM * off / len(clients)
        return w - gamma * pull

    w = np.zeros(20)
    for _ in range(2):
        w = one_round(w)
    two_rounds = simulate(algorithm, task, clients, TrainingPlan(rounds=2, evaluate_every=2)).outcome.state.server.w
    np.testing.assert_allclose(two_rounds.numpy(), w, rtol=1e-6)

    def time_sklearn() -> Times:
        cpu, wall = timed(lambda: one_round(end.numpy()))
        return rounds * cpu, rounds * wall

    name = f"one-stage FedProx to 1e-8, {rounds} rounds"
    yield Contest(
        name,
        partial(timed, ours),
        {"scikit-learn, a round times rounds": time_sklearn},
        {"scikit-learn, a round times rounds": 50},
        warm=True,
    )


def lambdas(options: argparse.Namespace, stack: ExitStack) -> Iterator[Contest]:
    task, clients = Linear(20, intercept=False), table_clients()

    def solve(count: int) -> None:
        rows = replace(clients.train, cache={})
        for _ in solve_path(task, rows, clients.weights(), LAMBDA_SCALES[:count] if count > 1 else [LAM]):
            pass

    rivals = {"one lambda": partial(timed, partial(solve, 1))}
    yield Contest("path of 25 lambdas", partial(timed, partial(solve, 25)), rivals, {"one lambda": 5}, at_most=True)


def fit_mixed_model(rows: Rows, test: Rows) -> np.ndarray:
    """Return the predictions of statsmodels' MixedLM with a random intercept and random slopes, uncorrelated."""
    from statsmodels.regression.mixed_linear_model import MixedLM, MixedLMParams

    def design(part: Rows) -> np.ndarray:
        return np.column_stack([part.x.numpy(), np.ones(len(part.x))])

    x, rank = design(rows), np.linalg.matrix_rank
    columns = [j for j in range(x.shape[1]) if rank(x[:, : j + 1]) > rank(x[:, :j])]
    model = MixedLM(rows.y.numpy(), x[:, columns], row_clients(rows).numpy(), exog_re=x[:, columns])
    diagonal = MixedLMParams.from_components(np.ones(len(columns)), cov_re=np.eye(len(columns)))
    fitted = model.fit(free=diagonal, method="lbfgs", maxiter=200)
    effects = fitted.random_effects
    w = np.stack([fitted.fe_params + effects[i].to_numpy() for i in range(len(rows))])
    return (design(test)[:, columns] * w[row_clients(test).numpy()]).sum(1)


def advised(options: argparse.Namespace, stack: ExitStack) -> Iterator[Contest]:
    from mooring import advise
    from mooring.data.folds import concatenate_rows
    from tests.support.tables import EXAM

    clients = advise(EXAM.path, **EXAM.columns).job.clients
    rows = concatenate_rows(clients.train, clients.validation)

    def fit_statsmodels() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # statsmodels warns of every variance at 0
            return fit_mixed_model(rows, clients.test)

    ours = partial(timed, partial(advise, EXAM.path, **EXAM.columns))
    yield Contest("advise exam", ours, {"MixedLM": partial(timed, fit_statsmodels)}, {"MixedLM": 5}, warm=True)


def many_clients(count: int, rows: int = 20, features: int = 20) -> Clients:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count * rows, features, generator=generator)
    y = torch.randint(0, 2, (count * rows,), generator=generator)
    zeros = torch.zeros(count, dtype=torch.long)
    no_rows = Rows(x[:0], y[:0], zeros, zeros)
    train = Rows(x, y, rows * torch.arange(count), torch.full((count,), rows))
    return Clients(tuple(map(str, range(count))), train, no_rows, no_rows, kind="binary")


def population(options: argparse.Namespace, stack: ExitStack) -> Iterator[Contest]:
    task, algorithm = Logistic(20, dtype=torch.float32), FedAvg(eta=0.1, steps=10, batch=10)
    plan = TrainingPlan(rounds=100, participation=1000, evaluate_every=100)

    def rounds_of(clients: Clients) -> Callable[[], Times]:
        """Return a function that times rounds of the engine's own loop, without evaluations."""
        times: list[Times] = []
        last: list[Times] = []

        def watch(moment: Any) -> bool:
            now = time.process_time(), time.perf_counter()
            if last:
                times.append((now[0] - last[0][0], now[1] - last[0][1]))
            last[:] = [now]
            return moment.t >= 12

        def time_rounds() -> Times:
            times.clear()
            last.clear()
            simulate(algorithm, task, clients, plan, resolved=True, watch=watch)
            return tuple(statistics.median(column) for column in zip(*times))

        return time_rounds

    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak, so that other rows' memory does not count
    small, large = many_clients(10_000), many_clients(1_000_000)
    notes: list[str] = []

    def note() -> str:
        if not notes:
            wall = time.perf_counter()
            simulate(algorithm, task, large, plan, resolved=True)
            took, peak = time.perf_counter() - wall, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
            notes.append(
                f"100 rounds ran in {took:.0f} s; {peak:.1f} GB at most (wanted under 6: {format_verdict(peak < 6)})"
            )
        return notes[0]

    yield Contest(
        "a round of 1,000,000 clients",
        rounds_of(large),
        {"10,000 clients": rounds_of(small)},
        {"10,000 clients": 1.3},
        at_most=True,
        note=note,
    )


def sweeps(options: argparse.Namespace, stack: ExitStack) -> Iterator[Contest]:
    rng = np.random.default_rng(0)
    xs, ys = rng.normal(size=(30, 50, 20)), rng.integers(0, 5, size=(30, 50))
    parts = [np.where(np.arange(50) < 40, "train", "validation")] * 30
    clients = from_arrays(list(xs), list(ys), kind="classes", parts=parts, dtype=torch.float32)
    task, plan = Logistic(20, 5, dtype=torch.float32), TrainingPlan(rounds=20, evaluate_every=20)
    variants = [
        Variant(FedProxPersonal(lam=lam, gamma=1 / lam, inner="sgd", eta=ETA, steps=10, batch=10), seed)
        for lam in np.logspace(-2, 1, 8).tolist()
        for seed in range(5)
    ]
    lone = [simulate(variant.algorithm, task, clients, replace(plan, seed=variant.seed)) for variant in variants[:7]]
    for single, batched in zip(lone, sweep(variants[:7], task, clients, plan)):
        torch.testing.assert_close(batched.server.w, single.outcome.state.server.w, rtol=1e-4, atol=1e-6)

    def run_separately() -> None:
        for variant in variants:
            simulate(variant.algorithm, task, clients, replace(plan, seed=variant.seed))

    ours = partial(timed, lambda: sweep(variants, task, clients, plan))
    rivals = {"40 runs": partial(timed, run_separately)}
    yield Contest("sweep of 8 lambdas x 5 seeds", ours, rivals, {"40 runs": 3}, warm=True)
