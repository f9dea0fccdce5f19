"""How long a path of 25 lambdas takes, and what advice for very many clients costs.

    python -m benchmarks.advice_scale [--data-dir FOLDER] [--clients 10000,100000] [--tables 1128x73000x8x5,...]

The path on Exam (64 schools), and with --data-dir on MNIST with 100 clients of two classes each (softmax regression,
every point to a gradient of 1e-3 relative to the start's). Then the whole advice for clients of 20 rows and 20
features, each number of clients in a process of its own, with its peak memory and what had been taken when the
clients were made; and for planted tables of clients x rows x features x classes, with the longest time in which no
progress was told.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from mooring import advise
from mooring.advice.candidates.lambda_path import LAMBDA_SCALES, initial_curvature, solve_path
from mooring.advice.folds import concatenate_rows
from mooring.data.generators import LinearFederation
from mooring.data.image_datasets import load_image_dataset
from mooring.data.loading import load
from mooring.tasks.catalog import build
from mooring.tasks.logistic import Logistic
from tests.support.tables import EXAM


def time_path(name: str, task, rows) -> None:
    p = rows.size.double()
    begin = time.perf_counter()
    unit = initial_curvature(task, rows, p)
    for _ in solve_path(task, rows, p, LAMBDA_SCALES * unit):
        pass
    print(
        f"path of {len(LAMBDA_SCALES)} lambdas, {name}, {len(rows)} clients: {time.perf_counter() - begin:.2f} s",
        flush=True,
    )


def time_advice(clients: int) -> None:
    made = LinearFederation(clients, 20, 20, 0.3, validation=0.2, test=0.3).make(0)
    before, begin, work = peak_memory(), time.perf_counter(), time.process_time()
    found = advise(made)
    took, worked = time.perf_counter() - begin, time.process_time() - work
    losses = {name: round(found.summary[name], 3) for name in ("local", "global", "recommended")}
    print(
        f"advice for {clients} clients of 20 rows and features: {took:.0f} s ({worked:.0f} s of CPU), "
        f"{peak_memory():.2f} GB at most ({before:.2f} GB to make the clients), {losses}",
        flush=True,
    )


def peak_memory() -> float:
    """The most memory that this process has had, in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def planted_table(clients: int, rows: int, features: int, classes: int, seed: int = 0) -> pd.DataFrame:
    """Clients of very different sizes, whose levels and effects vary."""
    rng = np.random.default_rng(seed)
    size = rng.lognormal(0, 1, clients)
    owner = np.repeat(np.arange(clients), np.maximum((rows * size / size.sum()).astype(int), 5))
    x = rng.normal(size=(len(owner), features))
    w = rng.normal(0, 0.5, (features + 1, classes))
    away = rng.normal(0, 0.4, (clients, features + 1, classes)) * np.array([1.0] + [0.3] * features)[:, None]
    scores = np.einsum("nf,nfk->nk", np.column_stack([np.ones(len(x)), x]), (w + away)[owner])
    y = (scores + rng.gumbel(size=scores.shape)).argmax(1)
    table = pd.DataFrame(x, columns=[f"x{j}" for j in range(features)])
    return table.assign(client=[f"client {i}" for i in owner], y=[f"class {k}" for k in y])


def time_table_advice(shape: str) -> None:
    """Advice on a planted table: time, memory, and the longest silence."""
    clients, rows, features, classes = map(int, shape.split("x"))
    table = planted_table(clients, rows, features, classes)
    begin, work, told, silence = time.perf_counter(), time.process_time(), [time.perf_counter()], [0.0]

    def tell(what: str, done: int, steps: int) -> None:
        silence.append(time.perf_counter() - told[-1])
        told.append(time.perf_counter())

    found = advise(table, client="client", target="y", progress=tell)
    print(
        f"advice for {clients} clients, {len(table)} rows, {features} features, {classes} classes: "
        f"{time.perf_counter() - begin:.0f} s ({time.process_time() - work:.0f} s of CPU), "
        f"{peak_memory():.2f} GB at most, {max(silence):.0f} s without a word at most. {found.headline}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--clients", default="10000,100000")
    parser.add_argument("--tables", default="1128x73000x8x5,2000x20000x4x2")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.only:
        time_table_advice(asked.only) if "x" in asked.only else time_advice(int(asked.only))
        return
    print(f"{torch.get_num_threads()} threads")
    exam = load(EXAM.path, **EXAM.columns)
    task = build("auto", exam.kind, exam.train.x.shape[1], len(exam.classes))
    time_path("Exam", task, concatenate_rows(exam.train, exam.validation))
    if asked.data_dir:
        mnist = load_image_dataset(
            "mnist", asked.data_dir, clients=100, partition="classes", classes_per_client=2, protocol="P1", seed=0
        )
        time_path("MNIST softmax", Logistic(784, 10, ridge=1e-4, dtype=torch.float32), mnist.train)
    for size in [*asked.clients.split(","), *asked.tables.split(",")]:
        if size:
            subprocess.run([sys.executable, "-m", "benchmarks.advice_scale", "--only", size], check=True)


if __name__ == "__main__":
    main()
