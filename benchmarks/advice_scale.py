"""How long a path of 25 lambdas takes, and what advice for very many clients costs.

    python -m benchmarks.advice_scale [--data-dir FOLDER] [--clients 10000,100000]

The path on Exam (64 schools), and with --data-dir on MNIST with 100 clients of two classes each (softmax regression,
every point to a gradient of 1e-3 relative to the start's). Then the whole advice for clients of 20 rows and 20
features, each number of clients in a process of its own, with its peak memory.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch

from mooring import advise
from mooring.advice.folds import joined
from mooring.advice.path import SCALES, curvature, path
from mooring.data.generators import LinearFederation
from mooring.data.images import named_images
from mooring.data.sources import load
from mooring.tasks.catalog import build
from mooring.tasks.logistic import Logistic
from tests.tables import EXAM


def timed_path(name: str, task, rows) -> None:
    p = rows.size.double()
    begin = time.perf_counter()
    unit = curvature(task, rows, p)
    for _ in path(task, rows, p, SCALES * unit):
        pass
    print(
        f"path of {len(SCALES)} lambdas, {name}, {len(rows)} clients: {time.perf_counter() - begin:.2f} s", flush=True
    )


def whole_advice(clients: int) -> None:
    made = LinearFederation(clients, 20, 20, 0.3, validation=0.2, test=0.3).make(0)
    begin = time.perf_counter()
    found = advise(made)
    took = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    told = {name: round(found.summary[name], 3) for name in ("alone", "common", "advised")}
    print(
        f"advice for {clients} clients of 20 rows and features: {took:.0f} s, {peak:.2f} GB at most, {told}", flush=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--clients", default="10000,100000")
    parser.add_argument("--only", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.only:
        whole_advice(asked.only)
        return
    print(f"{torch.get_num_threads()} threads")
    exam = load(EXAM.path, **EXAM.columns)
    task = build("auto", exam.kind, exam.train.x.shape[1], len(exam.classes))
    timed_path("Exam", task, joined(exam.train, exam.validation))
    if asked.data_dir:
        mnist = named_images(
            "mnist", asked.data_dir, clients=100, partition="classes", classes_per_client=2, protocol="P1", seed=0
        )
        timed_path("MNIST softmax", Logistic(784, 10, ridge=1e-4, dtype=torch.float32), mnist.train)
    for clients in asked.clients.split(","):
        subprocess.run([sys.executable, "-m", "benchmarks.advice_scale", "--only", clients], check=True)


if __name__ == "__main__":
    main()
