"""Time of a path of 25 lambdas, and time and memory of advice for very many clients.

    python -m benchmarks.advice_scale [--data-dir FOLDER] [--clients 10000,100000] [--tables 1128x73000x8x5,...]

The path on Exam (64 schools), and with --data-dir on MNIST with 100 clients of two classes each (softmax regression,
every point to a gradient of 1e-3 relative to the initial one). Then advice for clients of 20 rows and 20 features, each
number of clients in a process of its own, with its peak memory and the memory used when the clients were made; and for
planted tables of clients x rows x features x classes, with the longest time between two progress reports.
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
    clients_made = LinearFederation(clients, 20, 20, 0.3, validation=0.2, test=0.3).make(0)
    before, begin, work = peak_memory(), time.perf_counter(), time.process_time()
    advice = advise(clients_made)
    took, worked = time.perf_counter() - begin, time.process_time() - work
    losses = {name: round(advice.summary[name], 3) for name in ("local", "global", "recommended")}
    print(
        f"advice for {clients} clients of 20 rows and features: {took:.0f} s ({worked:.0f} s of CPU), "
        f"{peak_memory():.2f} GB at most ({before:.2f} GB to make the clients), {losses}",
        flush=True,
    )


def peak_memory() -> float:
    """Return the peak memory of this process, in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def planted_table(clients: int, rows: int, features: int, classes: int, seed: int = 0) -> pd.DataFrame:
    """Return rows of clients of very different sizes, with varying intercepts and effects."""
    rng = np.random.default_rng(seed)
    size = rng.lognormal(0, 1, clients)
    owner = np.repeat(np.arange(clients), np.maximum((rows * size / size.sum()).astype(int), 5))
    x = rng.normal(size=(len(owner), features))
    w = rng.normal(0, 0.5, (features + 1, classes))
    deviations = rng.normal(0, 0.4, (clients, features + 1, classes)) * np.array([1.0] + [0.3] * features)[:, None]
    scores = np.einsum("nf,nfk->nk", np.column_stack([np.ones(len(x)), x]), (w + deviations)[owner])
    y = (scores + rng.gumbel(size=scores.shape)).argmax(1)
    table = pd.DataFrame(x, columns=[f"x{j}" for j in range(features)])
    return table.assign(client=[f"client {i}" for i in owner], y=[f"class {k}" for k in y])


def time_table_advice(shape: str) -> None:
    """Print time and memory of advice on a planted table, and the longest time between two progress reports."""
    clients, rows, features, classes = map(int, shape.split("x"))
    table = planted_table(clients, rows, features, classes)
    begin, work, report_times, waits = time.perf_counter(), time.process_time(), [time.perf_counter()], [0.0]

    def record_progress(label: str, done: int, steps: int) -> None:
        waits.append(time.perf_counter() - report_times[-1])
        report_times.append(time.perf_counter())

    advice = advise(table, client="client", target="y", progress=record_progress)
    print(
        f"advice for {clients} clients, {len(table)} rows, {features} features, {classes} classes: "
        f"{time.perf_counter() - begin:.0f} s ({time.process_time() - work:.0f} s of CPU), "
        f"{peak_memory():.2f} GB at most, {max(waits):.0f} s without a word at most. {advice.headline}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--clients", default="10000,100000")
    parser.add_argument("--tables", default="1128x73000x8x5,2000x20000x4x2")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        time_table_advice(options.only) if "x" in options.only else time_advice(int(options.only))
        return
    print(f"{torch.get_num_threads()} threads")
    exam = load(EXAM.path, **EXAM.columns)
    task = build("auto", exam.kind, exam.train.x.shape[1], len(exam.classes))
    time_path("Exam", task, concatenate_rows(exam.train, exam.validation))
    if options.data_dir:
        mnist = load_image_dataset(
            "mnist", options.data_dir, clients=100, partition="classes", classes_per_client=2, protocol="P1", seed=0
        )
        time_path("MNIST softmax", Logistic(784, 10, ridge=1e-4, dtype=torch.float32), mnist.train)
    for size in [*options.clients.split(","), *options.tables.split(",")]:
        if size:
            subprocess.run([sys.executable, "-m", "benchmarks.advice_scale", "--only", size], check=True)


if __name__ == "__main__":
    main()
