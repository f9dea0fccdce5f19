"""Advice on planted Gaussian federations: the risk of its models, and the truth of its verdicts.

    python -m benchmarks.advice_planted [--quick] [--repeats 10]

Risk: each client's truth is drawn from N(w, spread^2), its rows have noise 1. For every setting the mean excess risk of
the advised models over that of central empirical Bayes (restricted likelihood, one spread), of the Bayes oracle (which
knows w, spread and noise) and of the better of training alone and one common model.

Verdicts: over 200 federations, some without any gain, the share of false ones among the verdicts "personal" (the
personal model is truly no better than alone or than common) and among the clients called helped (truly no better than
alone).
"""

from __future__ import annotations

import argparse
import itertools

import numpy as np
import torch

from mooring.advice.advise import advise, deploy, refitted
from mooring.advice.choice import choose
from mooring.advice.folds import joined
from mooring.data.generators import LinearFederation
from mooring.estimates.spread import spread_likelihood
from mooring.estimates.summaries import linear_stats
from mooring.tasks.linear import Linear

GRID = {"clients": (50, 200), "dim": (3, 10, 20), "samples": (5, 20, 100, 500), "spread": (0.0, 0.1, 0.3, 1.0, 3.0)}
QUICK = {"clients": (50,), "dim": (3, 10), "samples": (5, 20, 100), "spread": (0.0, 0.3, 1.0)}
SIZES = ("equal", "powerlaw")
MEASURES = ("advised", "bayes", "oracle", "alone", "common")


def excesses(clients, dim: int) -> list[float]:
    """Mean excess risks of the advised models and of those they are measured by."""
    task, rows, truth = Linear(dim, intercept=False), joined(clients.train, clients.validation), clients.truth
    choice = choose(task, clients)
    found = deploy(choice, refitted(task, rows, choice, "size"), len(clients))
    stats = linear_stats(rows)
    bayes = spread_likelihood(stats, "scalar").models
    models = [found.personal, bayes, oracle(stats, truth), found.alone, found.common.expand_as(bayes)]
    return [float(truth.excess_risk(v).mean()) for v in models]


def oracle(stats, truth) -> torch.Tensor:
    """The posterior means under the true prior."""
    s = truth.spread
    inner = truth.noise**2 * torch.eye(len(s), dtype=s.dtype) + s[:, None] * (stats.n[:, None, None] * stats.gram) * s
    residual = stats.n[:, None] * (stats.moment - stats.gram @ truth.centre)
    return truth.centre + s * torch.linalg.solve(inner, (s * residual)[..., None])[..., 0]


def risks(grid: dict, repeats: int) -> None:
    print(
        f"{'m':>4} {'d':>3} {'n':>4} {'sizes':>9} {'spread':>6} {'n s^2':>7}  over bayes  over oracle  over better end"
    )
    worst = {"bayes": (0.0, ""), "oracle": (0.0, ""), "end": (0.0, "")}
    for m, d, n, spread, sizes in itertools.product(*grid.values(), SIZES):
        made = [LinearFederation(m, n, d, spread, sizes=sizes).make(seed) for seed in range(repeats)]
        found = dict(zip(MEASURES, np.mean([excesses(clients, d) for clients in made], 0)))
        signal = n * spread**2
        over = {
            "bayes": found["advised"] / found["bayes"],
            "oracle": found["advised"] / found["oracle"] if signal >= 0.3 else np.nan,
            "end": found["advised"] / min(found["alone"], found["common"]),
        }
        print(
            f"{m:4} {d:3} {n:4} {sizes:>9} {spread:6.2f} {signal:7.2f}" + "".join(f"{over[k]:14.3f}" for k in over),
            flush=True,
        )
        for k, value in over.items():
            if value > worst[k][0]:
                worst[k] = value, f"m={m} d={d} n={n} {sizes} spread={spread}"
    for k, (value, where) in worst.items():
        print(f"worst over {k}: {value:.3f} at {where}")


def verdicts(federations: int) -> None:
    rng = np.random.default_rng(0)
    false = {"personal": [], "helped": []}
    told = {"identical": {}, "unrelated": {}}
    for seed in range(federations):
        spread = float(rng.choice([0.0, 0.0, 0.1, 0.3, 1.0, 5.0]))
        m, d, n = int(rng.integers(20, 60)), int(rng.integers(2, 9)), int(rng.integers(30, 100))
        clients = LinearFederation(m, n, d, spread, validation=0.2, test=0.2).make(seed)
        advice = advise(clients, threads=1)
        risk = {
            name: clients.truth.excess_risk(without_intercept(getattr(advice.models, name).expand(m, -1)))
            for name in ("alone", "common", "personal")
        }
        end = torch.minimum(risk["alone"], risk["common"])
        for name, called, wrong in (
            ("personal", (advice.clients["verdict"] == "personal").to_numpy(), (risk["personal"] >= end).numpy()),
            ("helped", advice.clients["helped"].to_numpy(), (risk["personal"] >= risk["alone"]).numpy()),
        ):
            false[name].append(wrong[called].mean() if called.any() else 0.0)
        if spread in (0.0, 5.0):
            counts = told["identical" if spread == 0 else "unrelated"]
            for verdict, count in advice.clients["verdict"].value_counts().items():
                counts[verdict] = counts.get(verdict, 0) + count
    for name, shares in false.items():
        print(f"false among '{name}': {np.mean(shares):.3f} on average over {len(shares)} federations")
    for name, counts in told.items():
        print(f"{name} clients are told: {counts}")


def without_intercept(v: torch.Tensor) -> torch.Tensor:
    return v[:, :-1]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--part", choices=("risks", "verdicts"))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.part != "verdicts":
        risks(QUICK if asked.quick else GRID, asked.repeats or (3 if asked.quick else 10))
    if asked.part != "risks":
        verdicts(20 if asked.quick else 200)
