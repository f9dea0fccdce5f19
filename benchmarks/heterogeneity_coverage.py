"""Coverage of the intervals for the heterogeneity radius R: planted clients, many repetitions.

    python -m benchmarks.heterogeneity_coverage [--repetitions 400] [--quick] [--task linear|logistic]

The clients' true models lie around a global model of length 1, scaled so that R is exactly as stated. Targets, in every
row: the 95% interval covers R in 90 to 99% of the repetitions; at R = 0 its lower end is 0 in at least 95%; the median
relative error of R is below 15% where R exceeds the noise level (the estimate of uncorrected fits at R = 0).
"""

from __future__ import annotations

import argparse
import math
from typing import NamedTuple

import numpy as np
import torch

from mooring.core.cohort import Rows
from mooring.estimates.client_summaries import (
    compute_linear_stats,
    fit_covariance,
    fit_from_stats,
    fit_logistic,
    trace,
)
from mooring.estimates.heterogeneity import estimate_radius, resolve_client_weights


class Cell(NamedTuple):
    task: str  # "linear" or "logistic"
    m: int
    d: int
    n: int  # rows of the smallest client
    uneven: bool = False  # sizes from n to 20 n by a power law, features correlated
    radii: tuple[float, ...] = (0.0, 0.3, 1.0, 3.0)


FULL = [
    Cell("linear", 10, 5, 15, radii=(0.0, 0.3, 0.7, 1.0, 2.0, 3.0)),
    Cell("linear", 10, 50, 150),
    Cell("linear", 50, 20, 60),
    Cell("linear", 200, 5, 15),
    Cell("linear", 100, 50, 150),
    Cell("linear", 30, 10, 30, uneven=True),
    Cell("logistic", 10, 5, 50, radii=(0.0, 0.5, 1.0, 2.0, 3.0)),
    Cell("logistic", 50, 5, 50, radii=(0.0, 0.5, 1.0, 2.0, 3.0)),
    Cell("logistic", 200, 5, 50),
    Cell("logistic", 200, 10, 100),
    Cell("logistic", 20, 20, 200),
    Cell("logistic", 30, 10, 100, uneven=True),
    Cell("logistic", 10, 50, 500),
    Cell("logistic", 100, 50, 500, radii=(0.0, 1.0)),
]
QUICK = [
    Cell("linear", 10, 5, 15, radii=(0.0, 1.0)),
    Cell("linear", 100, 5, 15, radii=(0.0, 1.0)),
    Cell("logistic", 10, 5, 50, radii=(0.0, 1.0, 3.0)),
    Cell("logistic", 50, 10, 100, radii=(0.0, 1.0)),
]


class Row(NamedTuple):
    cover: float
    too_high: float  # share of intervals above R
    too_low: float
    zero: float  # share of lower ends at 0
    error: float  # median relative error
    noise: float


def planted(cell: Cell, r: float, rng: np.random.Generator) -> tuple[Rows, torch.Tensor]:
    """Return rows and weights of clients whose true models have the radius r under these weights."""
    n = np.full(cell.m, cell.n)
    if cell.uneven:
        n = np.minimum(cell.n * rng.pareto(1.2, cell.m) + cell.n, 20 * cell.n).astype(int)
    p = n / n.sum()
    truth = rng.normal(size=(cell.m, cell.d))
    truth -= p @ truth
    truth *= r / math.sqrt(p @ (truth**2).sum(1))
    truth += 1 / math.sqrt(cell.d)
    rho = 0.5 if cell.uneven else 0.0
    owner = np.repeat(np.arange(cell.m), n)
    shared = rng.normal(size=(len(owner), 1))
    x = math.sqrt(1 - rho) * rng.normal(size=(len(owner), cell.d)) + math.sqrt(rho) * shared
    score = (x * truth[owner]).sum(1)
    if cell.task == "logistic":
        y = rng.random(len(owner)) < 1 / (1 + np.exp(-score))
    else:
        y = score + rng.normal(size=len(owner))
    size = torch.from_numpy(n)
    rows = Rows(torch.from_numpy(x), torch.from_numpy(y.astype(float)), torch.cumsum(size, 0) - size, size)
    return rows, torch.from_numpy(p)


def measure(cell: Cell, r: float, repetitions: int) -> Row:
    build = {
        "linear": lambda rows: fit_from_stats(compute_linear_stats(rows)),
        "logistic": fit_logistic,
    }
    estimates = []
    for repetition in range(repetitions):
        key = [
            repetition,
            int(1000 * r),
            *(ord(character) for character in cell.task),
            cell.m,
            cell.d,
            cell.n,
            cell.uneven,
        ]
        rows, p = planted(cell, r, np.random.default_rng(key))
        fits = build[cell.task](rows)
        p = resolve_client_weights(p, fits.n)
        radius = estimate_radius(fits, p)
        noise = float((p * (1 - p) * trace(fit_covariance(fits))).sum())
        estimates.append((radius.value, radius.low, radius.high, noise))
    value, low, high, noise = np.array(estimates).T
    return Row(
        float(np.mean((low <= r) & (r <= high))),
        float(np.mean(low > r)),
        float(np.mean(high < r)),
        float(np.mean(low == 0)),
        float(np.median(np.abs(value - r)) / r) if r else 0.0,
        float(np.sqrt(np.median(noise))),
    )


def failures(r: float, row: Row) -> list[str]:
    missed = []
    if not 0.90 <= row.cover <= 0.99:
        missed.append("coverage")
    if r == 0 and row.zero < 0.95:
        missed.append("zero")
    if r > row.noise and row.error > 0.15:
        missed.append("error")
    return missed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=400)
    parser.add_argument("--quick", action="store_true", help="a few small cells, 100 repetitions")
    parser.add_argument("--task", choices=("linear", "logistic"))
    options = parser.parse_args()
    repetitions = min(options.repetitions, 100) if options.quick else options.repetitions
    print(f"95 % intervals for R, {repetitions} repetitions")
    print("task      m    d    n     sizes    R    noise  cover  above  below  low=0  median error  verdict")
    missed = 0
    for cell in QUICK if options.quick else FULL:
        if options.task not in (None, cell.task):
            continue
        for r in cell.radii:
            row = measure(cell, r, repetitions)
            wrong = failures(r, row)
            missed += bool(wrong)
            print(
                f"{cell.task:8} {cell.m:4} {cell.d:4} {cell.n:4}  {'uneven' if cell.uneven else 'equal':7} {r:4.1f}  "
                f"{row.noise:6.2f}  {row.cover:5.3f}  {row.too_high:5.3f}  {row.too_low:5.3f}  {row.zero:5.3f}  "
                f"{row.error:12.3f}  {'FAILED ' + ', '.join(wrong) if wrong else 'held'}",
                flush=True,
            )
    print(f"{missed} rows missed a target." if missed else "All rows held the targets.")


if __name__ == "__main__":
    main()
