"""Advice on planted federations: the risk of its models, and the accuracy of its recommendations and probabilities.

    python -m benchmarks.advice_planted [--quick] [--part risks|calls] [--repeats 10] [--federations 300] [--seed 0]
                                        [--kinked] [--cache FOLDER]

Risks: each client's true model is drawn from N(w, spread^2), its rows have noise 1. For every setting the table shows
the mean excess risk of the personal models relative to that of central empirical Bayes (restricted likelihood, one
spread), of the Bayes oracle (with known w, spread and noise) and of the better of local models and the global one.

Calls: over the federations of `planted.py`, a third of them well specified, a third misspecified in eight ways, a third
with two classes, and against local and global models: the share of clients with a call (the recommended model
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
from mooring.advice.inference.recommendation import recommend
from mooring.data.folds import concatenate_rows
from mooring.estimates.client_summaries import compute_linear_stats
from mooring.estimates.random_effects import fit_reml
from mooring.tasks.linear import Linear
from mooring_papers.generators import LinearFederation

GRID = {"clients": (50, 200), "dim": (3, 10, 20), "samples": (5, 20, 100, 500), "spread": (0.0, 0.1, 0.3, 1.0, 3.0)}
QUICK = {"clients": (50,), "dim": (3, 10), "samples": (5, 20, 100), "spread": (0.0, 0.3, 1.0)}
SIZES = ("equal", "powerlaw")
MEASURES = ("personal", "bayes", "oracle", "local", "global")


def excess_risks(clients, dim: int) -> list[float]:
    """Return the mean excess risks of the models in MEASURES."""
    task, rows, truth = Linear(dim, intercept=False), concatenate_rows(clients.train, clients.validation), clients.truth
    fitted = cross_fit(task, rows, clients.keys)[1].models
    stats = compute_linear_stats(rows)
    bayes = fit_reml(stats, "scalar").models
    models = [fitted.personal, bayes, oracle_models(stats, truth), fitted.local, fitted.global_.expand_as(bayes)]
    return [float(truth.excess_risk(v).mean()) for v in models]


def oracle_models(stats, truth) -> torch.Tensor:
    """Return the posterior means under the true prior."""
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
        federations = [LinearFederation(m, n, d, spread, sizes=sizes).make(seed) for seed in range(repeats)]
        risks = dict(zip(MEASURES, np.mean([excess_risks(clients, d) for clients in federations], 0)))
        signal = n * spread**2
        ratios = {
            "bayes": risks["personal"] / risks["bayes"],
            "oracle": risks["personal"] / risks["oracle"] if signal >= 0.3 else np.nan,
            "end": risks["personal"] / min(risks["local"], risks["global"]),
        }
        print(
            f"{m:4} {d:3} {n:4} {sizes:>9} {spread:6.2f} {signal:7.2f}" + "".join(f"{ratios[k]:14.3f}" for k in ratios),
            flush=True,
        )
        for k, value in ratios.items():
            if value > worst[k][0]:
                worst[k] = value, f"m={m} d={d} n={n} {sizes} spread={spread}"
    for k, (value, setting) in worst.items():
        print(f"worst over {k}: {value:.3f} at {setting}")


class CallTotals:
    """Sums of what was stated about one group of federations, against one alternative, and of the true gains."""

    def __init__(self) -> None:
        self.shares: dict[str, list[float]] = {name: [] for name in ("called", "high", "moderate")}
        self.false: dict[str, list[float]] = {name: [] for name in self.shares}
        self.counts = np.zeros(2)
        self.probability: list[np.ndarray] = []
        self.truth: list[np.ndarray] = []
        self.covered: list[bool] = []
        self.full: list[bool] = []

    def add(self, stated: dict[str, np.ndarray]) -> None:
        """Add one federation's record, as `state_federation` returns it."""
        gain, probability, is_stated = stated["gain"], stated["probability"], ~stated["same"]
        better, worse = select_calls(np.where(is_stated, probability, 0.5))
        sets = {
            "called": (better & is_stated, worse & is_stated),
            "high": (is_stated & (probability >= 0.95), is_stated & (probability <= 0.05)),
            "moderate": (is_stated & (probability >= 0.8), is_stated & (probability <= 0.2)),
        }
        for name, (above, below) in sets.items():
            chosen, wrong = above | below, (above & (gain < 0)) | (below & (gain > 0))
            self.shares[name].append(chosen.mean())
            if name == "called":
                self.counts += wrong.sum(), chosen.sum()
            if chosen.any():
                self.false[name].append(wrong[chosen].mean())
        self.probability.append(probability[is_stated])
        self.truth.append(gain[is_stated] > 0)
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
    """Return one federation's recommendation and its true improvements, against local and global models.

    `gain` [m] is the true improvement of the recommended models, `mean` that of the personal ones over all rows.
    """
    federation = planted(kind, seed)
    clients = federation.clients
    _, evidence = cross_fit(federation.task, clients.train, clients.keys)
    recommendation = recommend(evidence.held, evidence.own, fitted=evidence.fitted)
    assert recommendation.full_line is not None
    risk = dict(zip(MODEL_KINDS, (federation.risk(w).numpy() for w in evidence.models.each())))
    recommended_risk = np.array([risk[name][i] for i, name in enumerate(recommendation.recommended)])
    share = (clients.train.size.double() / clients.train.size.sum()).numpy()
    out = {}
    for alternative in ALTERNATIVES:
        _, low, high = recommendation.personal_line[alternative]
        out[alternative] = {
            "gain": risk[alternative] - recommended_risk,
            "same": recommendation.is_same[alternative],
            "probability": recommendation.over[alternative].probability.numpy(),
            "full": np.array(recommendation.full_line[alternative][1:]),
            "low": np.array(low),
            "high": np.array(high),
            "mean": np.array(share @ (risk[alternative] - risk["personal"])),
            "recommended": recommendation.recommended == alternative,
            "over_personal": np.array(share @ recommended_risk / max(share @ risk["personal"], 1e-300) - 1),
        }
    return out


def cached_statement(kind: str, seed: int, cache: Path | None) -> dict[str, dict[str, np.ndarray]]:
    """Return the record of one federation, read from the folder `cache` if an earlier run wrote it there."""
    path = None if cache is None else cache / f"{kind.replace(' ', '-')}-{seed}.npz"
    if path is not None and path.exists():
        with np.load(path) as arrays:
            return {
                alternative: {k.split(".")[1]: arrays[k] for k in arrays if k.startswith(alternative)}
                for alternative in ALTERNATIVES
            }
    record = state_federation(kind, seed)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(path, **{f"{alternative}.{k}": v for alternative, part in record.items() for k, v in part.items()})
    return record


GROUPS = {"well specified": (WELL,), "misspecified": MISSPECIFIED, "two classes": (LOGISTIC,)}
KINKED = {"absolute loss": (ABSOLUTE,)}


def judge_calls(
    groups: dict[str, tuple[str, ...]], federations: int, seed: int, kinds: tuple[str, ...], cache: Path | None
) -> None:
    """Print the table; every group has the same number of federations, with seeds from `seed`."""
    print(
        f"{'':16} {'against':8} feds called  false  (of all)   high  false  mod.+  false    Brier      ECE  covered"
        "     full",
        flush=True,
    )
    for group, members in groups.items():
        selected_kinds = [kind for kind in members if not kinds or kind in kinds]
        tallies = {alternative: CallTotals() for alternative in ALTERNATIVES}
        simple: dict[str, list[float]] = {alternative: [] for alternative in ALTERNATIVES}
        excess_over_personal: list[float] = []
        for number in range(federations // len(groups)) if selected_kinds else ():
            for alternative, record in cached_statement(
                selected_kinds[number % len(selected_kinds)], seed + number, cache
            ).items():
                tallies[alternative].add(record)
                simple[alternative].append(float(record["recommended"].mean()))
                excess_over_personal.append(float(record["over_personal"]))
        for alternative, tally in tallies.items() if selected_kinds else ():
            print(f"{group:16} {alternative:8} {tally.describe()}", flush=True)
        if selected_kinds:
            shares = ", ".join(f"{alternative} {np.mean(part):.2f}" for alternative, part in simple.items())
            print(
                f"{group:16} recommended: {shares}; excess risk over personal {np.mean(excess_over_personal):+.3f}",
                flush=True,
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--federations", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default="", help="only these kinds of planted.py, separated by commas")
    parser.add_argument(
        "--cache", type=Path, help="folder of finished federations, from which an interrupted run is resumed"
    )
    parser.add_argument("--kinked", action="store_true", help="calls: absolute losses instead")
    parser.add_argument("--part", choices=("risks", "calls"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.part != "calls":
        print_risks(QUICK if options.quick else GRID, options.repeats or (3 if options.quick else 10))
    if options.part != "risks":
        kind_names = tuple(name for name in options.kinds.split(",") if name)
        federations = options.federations or (24 if options.quick else 300)
        judge_calls(KINKED if options.kinked else GROUPS, federations, options.seed, kind_names, options.cache)
