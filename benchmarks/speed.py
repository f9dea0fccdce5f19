"""Mooring's speed: one table, each row compared with what a user would run instead, all measured in one run.

    python -m benchmarks.speed [--repeats 5] [--threads 1] [--rows softmax,mlp,...] [--peers FOLDER] [--write]

Repetitions are interleaved: each does Mooring's work once and then every rival's. Times are medians, of CPU time (all
threads and processes of a rival) and of elapsed time. Ratios are of CPU times, rival over Mooring. "Of the limit" is a
round's arithmetic over Mooring's CPU time, divided by the rate of `torch.matmul` on large matrices in the same
repetitions. Rivals that train get the same rows, batches, start and steps, and must reach the same loss. FOLDER
contains environments with `fedjax`, `pfl` and `flower` (made by `benchmarks/peers/environments.sh`); rows of a missing
environment are marked. With --write the table is written to docs/performance.md, with a plot beside it. The run takes
ten minutes on two idle cores. The rows:

    softmax, mlp, cnn   a round of FedAvg: 100 clients (30 for cnn), 20 steps, batches of 20; cnn with 2 threads, too
    resnet              the same for ResNet-18 with BatchNorm: 10 clients, 2 steps; its round is to take at most 1.1
                        times the loop's time
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
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import torch

from benchmarks.speed_measure import Row, measure, table
from benchmarks.speed_page import write
from benchmarks.speed_tables import advised, exact, lambdas, population, sweeps
from benchmarks.speed_training import apfl, cnn, fedprox, mlp, resnet, softmax

CONTESTS = {
    "softmax": softmax,
    "mlp": mlp,
    "cnn": cnn,
    "resnet": resnet,
    "fedprox": fedprox,
    "apfl": apfl,
    "exact": exact,
    "path": lambdas,
    "advise": advised,
    "population": population,
    "sweep": sweeps,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", default=",".join(CONTESTS))
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--apfl-clients", type=int, default=340)
    parser.add_argument("--write", action="store_true", help="put the table into docs/performance.md")
    options = parser.parse_args()
    unknown = set(options.rows.split(",")) - set(CONTESTS)
    if unknown:
        sys.exit(f"unknown rows {', '.join(sorted(unknown))}; known: {', '.join(CONTESTS)}.")
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    rows: list[Row] = []
    begin = time.perf_counter()
    for name in options.rows.split(","):
        with ExitStack() as stack:
            for contest in CONTESTS[name](options, stack):
                measured = list(measure(contest, options.repeats))
                print(
                    *(row.line("") for row in measured), sep="\n", file=sys.stderr
                )  # printed at once, so that a later failure loses nothing
                rows += measured
        print(f"{time.perf_counter() - begin:4.0f} s: {name} measured", file=sys.stderr, flush=True)
    text = (
        f"Medians of {options.repeats} interleaved repetitions, {options.threads} thread{'s' * (options.threads > 1)}; "
        f"milliseconds of processor time (of the clock).\n\n{table(rows)}"
    )
    print(text)
    if options.write:
        write(text, rows)


if __name__ == "__main__":
    main()
