"""Advice on planted federations: the risk of its models, and the truth of what it says about them.

    python -m benchmarks.advice_planted [--quick] [--part risks|calls] [--repeats 10] [--federations 300] [--seed 0]
                                        [--kinked] [--cache FOLDER]

Risks: each client's truth is drawn from N(w, spread^2), its rows have noise 1. For every setting the mean excess risk
of the advised models over that of central empirical Bayes (restricted likelihood, one spread), of the Bayes oracle
(which knows w, spread and noise) and of the better of training alone and one common model.

Calls: over the federations of `planted.py`, a third of them well specified, a third wrong in eight ways, a third with
two classes, and against alone and against common: the share of clients about which a call is made (the deployed model
is better, or worse), the share of false calls (the true risks have the other order) averaged over the federations that
have any, and over all calls; Brier's score and the expected calibration error of the chances; how often the
federation's 95 % interval covers the true mean gain of its personal models. With --kinked all federations have absolute
losses and noise with heavy tails: there is no posterior, and held-out rows alone speak.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import numpy as np
import torch

from benchmarks.advice_judged import calibration_error
from benchmarks.planted import ABSOLUTE, LOGISTIC, MISSPECIFIED, WELL, planted
from mooring.advice.answer import answer
from mooring.advice.crossfit import cross_fit
from mooring.advice.folds import joined
from mooring.data.generators import LinearFederation
from mooring.estimates.spread import spread_likelihood
from mooring.estimates.summaries import linear_stats
from mooring.tasks.linear import Linear

GRID = {"clients": (50, 200), "dim": (3, 10, 20), "samples": (5, 20, 100, 500), "spread": (0.0, 0.1, 0.3, 1.0, 3.0)}
QUICK = {"clients": (50,), "dim": (3, 10), "samples": (5, 20, 100), "spread": (0.0, 0.3, 1.0)}
OTHERS = ("alone", "common")
SIZES = ("equal", "powerlaw")
MEASURES = ("advised", "bayes", "oracle", "alone", "common")


def excesses(clients, dim: int) -> list[float]:
    """Mean excess risks of the advised models and of those they are measured by."""
    task, rows, truth = Linear(dim, intercept=False), joined(clients.train, clients.validation), clients.truth
    found = cross_fit(task, rows, clients.keys)[1].trio
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


class Tally:
    """What was said about one group of federations against one other model, and what was true."""

    def __init__(self) -> None:
        self.called: list[float] = []
        self.false: list[float] = []
        self.counts = np.zeros(2)
        self.chance: list[np.ndarray] = []
        self.truth: list[np.ndarray] = []
        self.covered: list[bool] = []

    def add(self, said: dict[str, np.ndarray]) -> None:
        """One federation's record, as `said_of` makes it."""
        gain, better, worse = said["gain"], said["better"], said["worse"]
        called = better | worse
        wrong = (better & (gain < 0)) | (worse & (gain > 0))
        self.called.append(called.mean())
        self.counts += wrong.sum(), called.sum()
        if called.any():
            self.false.append(wrong[called].mean())
        told = ~said["same"]
        self.chance.append(said["chance"][told])
        self.truth.append(gain[told] > 0)
        if said["low"] < said["high"]:
            self.covered.append(bool(said["low"] <= said["mean"] <= said["high"]))

    def told(self) -> str:
        chance, truth = np.concatenate(self.chance), np.concatenate(self.truth)
        ece = calibration_error(chance, truth)
        false = np.mean(self.false) if self.false else 0.0
        of_all = self.counts[0] / max(self.counts[1], 1)
        return (
            f"{len(self.called):4} {np.mean(self.called):8.3f} {false:8.3f} {of_all:9.3f} "
            f"{np.mean((chance - truth) ** 2):8.3f} {ece:8.3f} {np.mean(self.covered):8.3f}"
        )


def said_of(kind: str, seed: int) -> dict[str, dict[str, np.ndarray]]:
    """One federation's answer beside its truth, against alone and against common.

    `gain` [m] is what the deployed models truly gain, `mean` that of the personal ones over all rows.
    """
    made = planted(kind, seed)
    clients = made.clients
    _, evidence = cross_fit(made.task, clients.train, clients.keys)
    found = answer(evidence, clients.train.size)
    risk = {name: made.risk(getattr(evidence.trio, name)).numpy() for name in ("alone", "common", "personal")}
    deployed = np.array([risk[name][i] for i, name in enumerate(found.decision.deploy)])
    share = (clients.train.size.double() / clients.train.size.sum()).numpy()
    out = {}
    for other, side in (("alone", found.decision.over_alone), ("common", found.decision.over_common)):
        _, low, high = found.lines[f"personal over {other}"]
        out[other] = {
            "gain": risk[other] - deployed,
            "better": side.better,
            "worse": side.worse,
            "same": side.sure == "same",
            "chance": side.chance,
            "low": np.array(low),
            "high": np.array(high),
            "mean": np.array(share @ (risk[other] - risk["personal"])),
        }
    return out


def recorded(kind: str, seed: int, cache: Path | None) -> dict[str, dict[str, np.ndarray]]:
    """The record of one federation, from the folder `cache` where an earlier run left it."""
    path = None if cache is None else cache / f"{kind.replace(' ', '-')}-{seed}.npz"
    if path is not None and path.exists():
        with np.load(path) as held:
            return {other: {k.split(".")[1]: held[k] for k in held if k.startswith(other)} for other in OTHERS}
    said = said_of(kind, seed)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(path, **{f"{other}.{k}": v for other, part in said.items() for k, v in part.items()})
    return said


GROUPS = {"well specified": (WELL,), "misspecified": MISSPECIFIED, "two classes": (LOGISTIC,)}
KINKED = {"absolute loss": (ABSOLUTE,)}


def calls(
    groups: dict[str, tuple[str, ...]], federations: int, seed: int, kinds: tuple[str, ...], cache: Path | None
) -> None:
    """Print the table; every group has as many federations, from `seed` on."""
    print(f"{'':16} {'against':8} feds   called    false (of all)    Brier      ECE covered", flush=True)
    for group, members in groups.items():
        wanted = [kind for kind in members if not kinds or kind in kinds]
        tallies = {other: Tally() for other in OTHERS}
        for number in range(federations // len(groups)) if wanted else ():
            for other, said in recorded(wanted[number % len(wanted)], seed + number, cache).items():
                tallies[other].add(said)
        for other, tally in tallies.items() if wanted else ():
            print(f"{group:16} {other:8} {tally.told()}", flush=True)


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
        risks(QUICK if asked.quick else GRID, asked.repeats or (3 if asked.quick else 10))
    if asked.part != "risks":
        only = tuple(name for name in asked.kinds.split(",") if name)
        federations = asked.federations or (24 if asked.quick else 300)
        calls(KINKED if asked.kinked else GROUPS, federations, asked.seed, only, asked.cache)
