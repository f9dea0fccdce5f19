"""Advice for networks against what a plan must not lose to: FedAvg, localized FedAvg and Local.

    python -m benchmarks.advice_networks [--data-dir FOLDER] [--seeds 10] [--first 0] [--sets digits,mnist]
                                         [--writers 100] [--rounds 50]

Digits, two classes a client (a perceptron 64-32-10), and with --data-dir MNIST by its true writers (784-50-10). All
methods are trained on the same rows and judged on 40 % of all rows that advice does not see. On digits, where what a
client sees depends on its classes alone, every client is judged on all of these rows that have one of its classes,
each class with its share at the client; a writer only on its own. Differences are of the mean client's log-loss and of
the worst decile's (mean of the worst tenth), averaged over seeds, advised less the other, with the standard error over
seeds. A call (the deployed model is better than alone or common, or worse) is false where the rows held aside say the
opposite, and surely false where they say so by more than two standard errors of theirs. These are still few rows:
"their error taken out" is the share of false calls that is left if gains over errors are normal, of whose variance
errors make up 1.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from scipy.stats import norm
from torch import nn

from mooring.advice.advise import advised
from mooring.advice.calibrate import calls
from mooring.advice.families import TUNED
from mooring.advice.folds import compact, deal, joined, owners, row_losses, subset
from mooring.advice.networks import tuned, with_rows
from mooring.core.cohort import Rows
from mooring.data.clients import PARTS, Clients
from mooring.data.images import named_images
from mooring.engines.prepare import prepare
from mooring.engines.request import request

REFEREES = ("FedAvg", "localized FedAvg", "Local")


def net(features: int, classes: int) -> nn.Module:
    hidden = 32 if features < 100 else 50
    return nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, classes))


class Found(NamedTuple):
    """One federation's answer, and what rows that were held aside say of it."""

    loss: dict[str, np.ndarray]  # every client's loss on the rows held aside, by method
    plan: str
    calls: dict[str, np.ndarray]  # over alone and common: gains by the rows aside, over their errors, as called


class Judge(NamedTuple):
    """Rows that were held aside, and what each of them counts for each client's loss."""

    rows: Rows
    weight: torch.Tensor  # [N], by client summing to 1

    def mean(self, loss: torch.Tensor) -> np.ndarray:
        """[m]: each client's mean of a number per row."""
        return np.bincount(owners(self.rows).numpy(), (self.weight * loss).numpy(), len(self.rows))

    def error(self, loss: torch.Tensor) -> np.ndarray:
        """[m]: its standard error."""
        owner = owners(self.rows)
        away = loss - torch.from_numpy(self.mean(loss))[owner]
        n = self.rows.size.numpy()
        return np.sqrt(
            np.bincount(owner.numpy(), ((self.weight * away) ** 2).numpy(), len(n)) * n / np.maximum(n - 1, 1)
        )


def own_rows(aside: Rows) -> Judge:
    return Judge(aside, 1 / aside.size.double()[owners(aside)])


def rows_of_class(aside: Rows, share: torch.Tensor) -> Judge:
    """Everyone's rows judge every client that has their class; `share` [m, classes] are the clients' own."""
    parts = [share[i][aside.y] > 0 for i in range(len(share))]
    rows = Rows.stack([aside.x[part] for part in parts], [aside.y[part] for part in parts])
    count = torch.bincount(aside.y, minlength=share.shape[1]).double()
    return Judge(rows, torch.cat([(share[i] / count)[aside.y[part]] for i, part in enumerate(parts)]))


def class_shares(clients: Clients) -> torch.Tensor:
    """[m, classes]"""
    count = torch.zeros(len(clients), len(clients.classes), dtype=torch.float64)
    for name in PARTS:
        part = compact(getattr(clients, name))
        count.index_put_((owners(part), part.y), torch.ones(len(part.y), dtype=torch.float64), accumulate=True)
    return count / count.sum(1, keepdim=True)


def losses(clients: Clients, seed: int, rounds: int, by_class: bool) -> Found:
    """Two thirds of the test rows are held aside; the rest is what advice sees."""
    test = compact(clients.test)
    seen = deal(test, clients.keys, 3, seed) == 0
    aside, known = subset(test, ~seen), replace(clients, test=subset(test, seen))
    job = prepare(request(known, purpose="advise", model=net, seed=seed, rounds=rounds, threads=1), known, net)
    advice = advised(job)
    models, choice = advice.models, advice.choice
    whole = with_rows(job, joined(known.train, known.validation))
    by_name = {
        "advised": models.personal,
        "deployed": models.deployed,
        "FedAvg": models.common,
        "localized FedAvg": tuned(whole, models.common, 1),
        "Local": models.alone,
    }
    judge = rows_of_class(aside, class_shares(clients)) if by_class else own_rows(aside)
    each = {k: row_losses(job.task, v, judge.rows) for k, v in by_name.items()}
    called = {}
    for other, name in (("alone", "Local"), ("common", "FedAvg")):
        better, worse = calls(torch.tensor(advice.clients[f"chance_over_{other}"].to_numpy()))
        told = (advice.clients[f"sure_over_{other}"] != "same").to_numpy() & (judge.rows.size > 0).numpy()
        sign = (told & better).astype(int) - (told & worse)
        gain = each[name] - each["deployed"]
        z = sign * judge.mean(gain) / np.maximum(judge.error(gain), 1e-300)
        called[other] = z[sign != 0]
    steps = " rounds' worth of steps" if choice.plan.family == TUNED else ""
    plan = f"{choice.plan.family} {choice.plan.value:.3g}{steps}, {len(choice.own)} clients leave it"
    mean = {k: judge.mean(v)[judge.rows.size > 0] for k, v in each.items() if k != "deployed"}
    return Found(mean, plan, called)


def worst_decile(loss: np.ndarray) -> float:
    return float(np.sort(loss)[-max(1, len(loss) // 10) :].mean())


def compare(name: str, make, seeds: range, rounds: int, by_class: bool) -> None:
    gaps: dict[tuple[str, str], list[float]] = defaultdict(list)
    made: dict[str, list[np.ndarray]] = defaultdict(list)
    for seed in seeds:
        found, plan, called = losses(make(seed), seed, rounds, by_class)
        for other, z in called.items():
            made[other].append(z)
        shown = ", ".join(f"{k} {v.mean():.3f} / {worst_decile(v):.3f}" for k, v in found.items())
        told = said(np.concatenate([*called.values()]))
        print(f"{name}, seed {seed}: mean / worst decile: {shown}; plan {plan}; {told}", flush=True)
        for other in REFEREES:
            for what, measure in (("mean", np.mean), ("worst decile", worst_decile)):
                gaps[other, what].append(float(measure(found["advised"]) - measure(found[other])))
    made["both"] = [z for parts in made.values() for z in parts]
    for other, parts in made.items():
        print(f"{name}, over {other}: {said(np.concatenate(parts))}", flush=True)
    for (other, what), values in gaps.items():
        error = np.std(values, ddof=1) / len(values) ** 0.5 if len(values) > 1 else np.nan
        word = "MISSED" if np.mean(values) > 2 * error else "held"
        print(f"{name}, {what}: advised - {other} = {np.mean(values):+.4f} (error {error:.4f})  {word}", flush=True)


def said(z: np.ndarray) -> str:
    """Calls and the false ones among them, from the signed gains over errors of the rows aside."""
    count = max(len(z), 1)
    told = f"{len(z)} calls, {(z < 0).sum()} false ({(z < 0).sum() / count:.1%}), {(z < -2).sum()} surely"
    if len(z) < 20:
        return told
    spread = max(np.var(z, ddof=1) - 1, 1e-12) ** 0.5
    return f"{told}, their error taken out {norm.cdf(-z.mean() / spread):.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--sets", default="digits,mnist")
    parser.add_argument("--writers", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=50)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    more = {"test": 0.6, "validation": 0.1}
    seeds = range(asked.first, asked.first + asked.seeds)
    if "digits" in asked.sets:
        compare(
            "digits",
            lambda seed: named_images("digits", clients=20, classes_per_client=2, seed=seed, **more),
            seeds,
            asked.rounds,
            by_class=True,
        )
    if asked.data_dir and "mnist" in asked.sets:
        compare(
            "MNIST writers",
            lambda seed: named_images(
                "mnist_writers", asked.data_dir, partition="group", clients=asked.writers, seed=seed, **more
            ),
            seeds,
            asked.rounds,
            by_class=False,
        )


if __name__ == "__main__":
    main()
