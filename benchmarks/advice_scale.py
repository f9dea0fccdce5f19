"""CPU time and memory of advice, each case in a process of its own, with one thread.

    python -m benchmarks.advice_scale [--cases heart,five,long] [--profile FILE]

    heart      the command `mooring advise heart`, imports included
    parkinsons the same of `mooring advise parkinsons`
    quantile   480 rows, 70 columns, 8 clients, absolute loss
    wide       4,000 rows, 2,000 columns of 0 and 1, 20 clients
    two        3,200 rows, 6 columns, 2 classes, 300 clients of very different sizes
    five       the same with 5 classes
    classes    73,000 rows, 8 columns, 5 classes, 1,128 clients of very different sizes
    long       200,000 rows, 50 columns, 500 clients
    many       10,000 clients of 20 rows and 20 columns
    path       25 lambdas on Exam (64 schools), the path alone

Silence is the longest time in which no progress was reported. --profile writes cProfile's table of one case.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from mooring import advise
from mooring.data.folds import concatenate_rows
from mooring.data.loading import load
from mooring.partial_pooling.lambda_path import LAMBDA_SCALES, initial_curvature, solve_path
from mooring.tasks.catalog import build
from mooring_papers.generators import LinearFederation
from tests.support.tables import EXAM

COMMANDS = ("heart", "parkinsons")
CASES = (*COMMANDS, "quantile", "wide", "two", "five", "classes", "long", "many", "path")


def plant_classes(clients: int, rows: int, features: int, classes: int, seed: int = 0) -> pd.DataFrame:
    """Clients of very different sizes, whose intercepts and effects vary."""
    rng = np.random.default_rng(seed)
    size = rng.lognormal(0, 1, clients)
    owner = np.repeat(np.arange(clients), np.maximum((rows * size / size.sum()).astype(int), 5))
    x = rng.normal(size=(len(owner), features))
    w = rng.normal(0, 0.5, (features + 1, classes))
    away = rng.normal(0, 0.4, (clients, features + 1, classes)) * np.array([1.0] + [0.3] * features)[:, None]
    scores = np.einsum("nf,nfk->nk", np.column_stack([np.ones(len(x)), x]), (w + away)[owner])
    y = (scores + rng.gumbel(size=scores.shape)).argmax(1)
    return make_table(x, [f"class {k}" for k in y], owner)


def plant_numbers(clients: int, rows: int, features: int, tails: float = np.inf, seed: int = 0) -> pd.DataFrame:
    """Clients of equal sizes whose intercepts and effects vary; noise of Student's t with `tails` degrees."""
    rng = np.random.default_rng(seed)
    x, owner = rng.normal(size=(rows, features)), np.arange(rows) % clients
    effects = rng.normal(0, 0.5, features) + rng.normal(0, 0.1, (clients, features))
    noise = rng.normal(size=rows) if np.isinf(tails) else rng.standard_t(tails, size=rows)
    return make_table(x, (x * effects[owner]).sum(1) + rng.normal(size=clients)[owner] + noise, owner)


def plant_levels(clients: int, rows: int, levels: int, seed: int = 0) -> pd.DataFrame:
    """One column per level of a category, 1 in the rows of that level."""
    rng = np.random.default_rng(seed)
    level, owner = rng.integers(0, levels, rows), np.arange(rows) % clients
    x = (level[:, None] == np.arange(levels)).astype(float)
    y = rng.normal(size=levels)[level] + rng.normal(size=clients)[owner] + rng.normal(size=rows)
    return make_table(x, y, owner)


def make_table(x: np.ndarray, y: object, owner: np.ndarray) -> pd.DataFrame:
    table = pd.DataFrame(x, columns=[f"x{j}" for j in range(x.shape[1])])
    return table.assign(client=[f"client {i}" for i in owner], y=y)


def time_path() -> str:
    exam = load(EXAM.path, **EXAM.columns)
    task = build("auto", exam.kind, exam.train.x.shape[1], len(exam.classes))
    rows = concatenate_rows(exam.train, exam.validation)
    p, begin = rows.size.double(), time.process_time()
    unit = initial_curvature(task, rows, p)
    for _ in solve_path(task, rows, p, LAMBDA_SCALES * unit):
        pass
    return f"{time.process_time() - begin:.2f} s for {len(LAMBDA_SCALES)} lambdas, {len(rows)} clients"


def time_command(name: str) -> str:
    """`mooring advise NAME`, with imports."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "mooring", "advise", name], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    work = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return f"{work:.1f} s of CPU with imports, {after.ru_maxrss / 1e6:.2f} GB at most"


def time_case(name: str, profile: Path | None) -> str:
    """What advice for a case took, without making its rows."""
    if name == "path":
        return time_path()
    if name in COMMANDS:
        return time_command(name)
    options = {"client": "client", "target": "y"}
    if name == "quantile":
        data, options = plant_numbers(8, 480, 70, tails=3), options | {"task": "absolute"}
    elif name == "wide":
        data = plant_levels(20, 4_000, 2_000)
    elif name in ("two", "five"):
        data = plant_classes(300, 3_000, 6, {"two": 2, "five": 5}[name])
    elif name == "classes":
        data = plant_classes(1_128, 73_000, 8, 5)
    elif name == "long":
        data = plant_numbers(500, 200_000, 50)
    else:
        data, options = LinearFederation(10_000, 20, 20, 0.3, validation=0.2, test=0.3).make(0), {}
    before, begin, work = peak_memory(), time.perf_counter(), time.process_time()
    reported, silence = [begin], [0.0]

    def report(step: str, done: int, total: int) -> None:
        silence.append(time.perf_counter() - reported[-1])
        reported.append(time.perf_counter())

    recorder = cProfile.Profile()
    advice = recorder.runcall(advise, data, progress=report, **options) if profile else None
    advice = advice or advise(data, progress=report, **options)
    if profile:
        with profile.open("w") as stream:
            table = pstats.Stats(recorder, stream=stream)
            table.sort_stats("cumtime").print_stats(80)
            table.sort_stats("tottime").print_stats(40)
    memory = f"{peak_memory():.2f} GB at most ({before:.2f} GB before)"
    losses = {key: round(advice.summary[key], 3) for key in ("local", "global", "recommended")}
    return f"{time.process_time() - work:.1f} s of CPU, {memory}, silence {max(silence):.0f} s, {losses}"


def peak_memory() -> float:
    """The most memory that this process has had, in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--only", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        torch.set_num_threads(1)
        print(f"{options.only}: {time_case(options.only, options.profile)}", flush=True)
        return
    for name in options.cases.split(","):
        command = [sys.executable, "-m", "benchmarks.advice_scale", "--only", name]
        command += ["--profile", str(options.profile)] if options.profile else []
        subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


if __name__ == "__main__":
    main()
