"""Advice on planted federations: the risk of its models, and the truth of its recommendations and probabilities.

    python -m benchmarks.advice_planted [--quick] [--part risks|calls] [--repeats 10] [--federations 300] [--seed 0]
                                        [--kinked] [--cache FOLDER]

Risks: each client's truth is drawn from N(w, spread^2), its rows have noise 1. For every setting the mean excess risk
of the personal models over that of central empirical Bayes (restricted likelihood, one spread), of the Bayes oracle
(which knows w, spread and noise) and of the better of local models and the global one.

Calls: over the federations of `planted.py`, a third of them well specified, a third wrong in eight ways, a third with
two classes, and against local and global models: the share of clients about which a call is made (the recommended model
is better, or worse, at a mean probability of error of 3.5%), the share of false calls (the true risks have the other
order) averaged over the federations that have any, and over all calls; the shares of clients with high, and with high
or moderate confidence, and of those that are false; Brier's score and the expected calibration error of the
probabilities; how often the federation's 95% interval contains the true mean improvement of its personal models:
that of held-out rows (covered), and that expected of models fitted to all rows (full). The last line has the share of
clients with each recommendation, and the excess risk of the recommended models over that of the personal ones.
With --kinked all federations have absolute losses and noise with heavy tails.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import numpy as np
import torch

from benchmarks.advice_calibration import calibration_error, select_calls
from benchmarks.planted import ABSOLUTE, LOGISTIC, MISSPECIFIED, WELL, planted
from mooring.advice.evaluation.cross_fitting import cross_fit
from mooring.advice.evaluation.loss_sums import ALTERNATIVES, MODEL_KINDS
from mooring.advice.folds import concatenate_rows
from mooring.advice.inference.recommendation import recommend
from mooring.data.generators import LinearFederation
from mooring.estimates.client_summaries import compute_linear_stats
from mooring.estimates.random_effects import fit_reml
from mooring.tasks.linear import Linear

GRID = {"clients": (50, 200), "dim": (3, 10, 20), "samples": (5, 20, 100, 500), "spread": (0.0, 0.1, 0.3, 1.0, 3.0)}
QUICK = {"clients": (50,), "dim": (3, 10), "samples": (5, 20, 100), "spread": (0.0, 0.3, 1.0)}
SIZES = ("equal", "powerlaw")
MEASURES = ("personal", "bayes", "oracle", "local", "global")


def excess_risks(clients, dim: int) -> list[float]:
    """Mean excess risks of the advised models and of those they are measured by."""
    task, rows, truth = Linear(dim, intercept=False), concatenate_rows(clients.train, clients.validation), clients.truth
    found = cross_fit(task, rows, clients.keys)[1].models
    stats = compute_linear_stats(rows)
    bayes = fit_reml(stats, "scalar").models
    models = [found.personal, bayes, oracle_models(stats, truth), found.local, found.global_.expand_as(bayes)]
    return [float(truth.excess_risk(v).mean()) for v in models]


def oracle_models(stats, truth) -> torch.Tensor:
    """The posterior means under the true prior."""
    s = truth.spread
    inner = truth.noise**2 * torch.eye(len(s), dtype=s.dtype) + s[:, None] * (stats.n[:, None, None] * stats.gram) * s
    residual = stats.n[:, None] * (stats.moment - stats.gram @ truth.centre)
    return truth.centre + s * torch.linalg.solve(inner, (s * residual)[..., None])[..., 0]


def print_risks(grid: dict, repeats: int) -> None:
    print(
        f"{'m':>4} {'d':>3} {'n':>4} {'sizes':>9} {'spread':>6} {'n s^2':>7}  over bayes  over oracle  over better end"
    )
    worst = {"bayes": (0.0, ""), "oracle": (0.0, ""), "end": (0.0, "")}
    for m, d, n, spread, sizes in itertools.product(*grid.values(), SIZES):
        made = [LinearFederation(m, n, d, spread, sizes=sizes).make(seed) for seed in range(repeats)]
        found = dict(zip(MEASURES, np.mean([excess_risks(clients, d) for clients in made], 0)))
        signal = n * spread**2
        over = {
            "bayes": found["personal"] / found["bayes"],
            "oracle": found["personal"] / found["oracle"] if signal >= 0.3 else np.nan,
            "end": found["personal"] / min(found["local"], found["global"]),
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


class CallTotals:
    """What was stated about one group of federations against one other model, and what was true."""

    def __init__(self) -> None:
        self.shares: dict[str, list[float]] = {name: [] for name in ("called", "high", "moderate")}
        self.false: dict[str, list[float]] = {name: [] for name in self.shares}
        self.counts = np.zeros(2)
        self.probability: list[np.ndarray] = []
        self.truth: list[np.ndarray] = []
        self.covered: list[bool] = []
        self.full: list[bool] = []

    def add(self, stated: dict[str, np.ndarray]) -> None:
        """One federation's record, as `state` makes it."""
        gain, probability, shown = stated["gain"], stated["probability"], ~stated["same"]
        better, worse = select_calls(np.where(shown, probability, 0.5))
        sets = {
            "called": (better & shown, worse & shown),
            "high": (shown & (probability >= 0.95), shown & (probability <= 0.05)),
            "moderate": (shown & (probability >= 0.8), shown & (probability <= 0.2)),
        }
        for name, (above, below) in sets.items():
            chosen, wrong = above | below, (above & (gain < 0)) | (below & (gain > 0))
            self.shares[name].append(chosen.mean())
            if name == "called":
                self.counts += wrong.sum(), chosen.sum()
            if chosen.any():
                self.false[name].append(wrong[chosen].mean())
        self.probability.append(probability[shown])
        self.truth.append(gain[shown] > 0)
        if stated["low"] < stated["high"]:
            self.covered.append(bool(stated["low"] <= stated["mean"] <= stated["high"]))
            self.full.append(bool(stated["full"][0] <= stated["mean"] <= stated["full"][1]))

    def describe(self) -> str:
        probability, truth = np.concatenate(self.probability), np.concatenate(self.truth)
        ece = calibration_error(probability, truth)
        parts = [f"{np.mean(self.shares[k]):6.3f} {np.mean(self.false[k] or [0.0]):6.3f}" for k in self.shares]
        of_all = self.counts[0] / max(self.counts[1], 1)
        return (
            f"{len(self.covered):4} {parts[0]} {of_all:9.3f} {parts[1]} {parts[2]} "
            f"{np.mean((probability - truth) ** 2):8.3f} {ece:8.3f} "
            f"{np.mean(self.covered):8.3f} {np.mean(self.full):8.3f}"
        )


def state_federation(kind: str, seed: int) -> dict[str, dict[str, np.ndarray]]:
    """One federation's answer beside its truth, against local and global models.

    `gain` [m] is the true improvement of the recommended models, `mean` that of the personal ones over all rows.
    """
    made = planted(kind, seed)
    clients = made.clients
    _, evidence = cross_fit(made.task, clients.train, clients.keys)
    found = recommend(evidence.held, evidence.own, fitted=evidence.fitted)
    assert found.full_line is not None
    risk = dict(zip(MODEL_KINDS, (made.risk(w).numpy() for w in evidence.models.each())))
    used = np.array([risk[name][i] for i, name in enumerate(found.recommended)])
    share = (clients.train.size.double() / clients.train.size.sum()).numpy()
    out = {}
    for other in ALTERNATIVES:
        _, low, high = found.personal_line[other]
        out[other] = {
            "gain": risk[other] - used,
            "same": found.is_same[other],
            "probability": found.over[other].probability.numpy(),
            "full": np.array(found.full_line[other][1:]),
            "low": np.array(low),
            "high": np.array(high),
            "mean": np.array(share @ (risk[other] - risk["personal"])),
            "recommended": found.recommended == other,
            "over_personal": np.array(share @ used / max(share @ risk["personal"], 1e-300) - 1),
        }
    return out


def cached_statement(kind: str, seed: int, cache: Path | None) -> dict[str, dict[str, np.ndarray]]:
    """The record of one federation, from the folder `cache` where an earlier run left it."""
    path = None if cache is None else cache / f"{kind.replace(' ', '-')}-{seed}.npz"
    if path is not None and path.exists():
        with np.load(path) as held:
            return {other: {k.split(".")[1]: held[k] for k in held if k.startswith(other)} for other in ALTERNATIVES}
    said = state_federation(kind, seed)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(path, **{f"{other}.{k}": v for other, part in said.items() for k, v in part.items()})
    return said


GROUPS = {"well specified": (WELL,), "misspecified": MISSPECIFIED, "two classes": (LOGISTIC,)}
KINKED = {"absolute loss": (ABSOLUTE,)}


def judge_calls(
    groups: dict[str, tuple[str, ...]], federations: int, seed: int, kinds: tuple[str, ...], cache: Path | None
) -> None:
    """Print the table; every group has as many federations, from `seed` on."""
    print(
        f"{'':16} {'against':8} feds called  false  (of all)   high  false  mod.+  false    Brier      ECE  covered"
        "     full",
        flush=True,
    )
    for group, members in groups.items():
        wanted = [kind for kind in members if not kinds or kind in kinds]
        tallies = {other: CallTotals() for other in ALTERNATIVES}
        simple: dict[str, list[float]] = {other: [] for other in ALTERNATIVES}
        over: list[float] = []
        for number in range(federations // len(groups)) if wanted else ():
            for other, said in cached_statement(wanted[number % len(wanted)], seed + number, cache).items():
                tallies[other].add(said)
                simple[other].append(float(said["recommended"].mean()))
                over.append(float(said["over_personal"]))
        for other, tally in tallies.items() if wanted else ():
            print(f"{group:16} {other:8} {tally.describe()}", flush=True)
        if wanted:
            shares = ", ".join(f"{other} {np.mean(part):.2f}" for other, part in simple.items())
            print(f"{group:16} recommended: {shares}; excess risk over personal {np.mean(over):+.3f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--federations", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default="", help="only these of planted.py, by commas")
    parser.add_argument("--cache", type=Path, help="folder of finished federations: a stopped run goes on there")
    parser.add_argument("--kinked", action="store_true", help="calls: absolute losses instead")
    parser.add_argument("--part", choices=("risks", "calls"))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.part != "calls":
        print_risks(QUICK if asked.quick else GRID, asked.repeats or (3 if asked.quick else 10))
    if asked.part != "risks":
        only = tuple(name for name in asked.kinds.split(",") if name)
        federations = asked.federations or (24 if asked.quick else 300)
        judge_calls(KINKED if asked.kinked else GROUPS, federations, asked.seed, only, asked.cache)
