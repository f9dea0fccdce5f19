"""Advice for networks against what a plan must not lose to: FedAvg, localized FedAvg and Local.

    python -m benchmarks.advice_networks [--data-dir FOLDER] [--seeds 10] [--first 0] [--sets digits,mnist,groups]
                                         [--writers 40] [--rounds 30]

Digits, two classes a client (a perceptron 64-32-10), and with --data-dir MNIST by its true writers (784-50-10): each
writer a client ("mnist"), or each five of them ("groups"), which leaves large test sets. All methods are trained on the
same rows and judged on rows that advice does not see: 40 % of all, of groups 72 %. On digits, where what a client sees
depends on its classes alone, every client is judged on all of these rows that have one of its classes, each class with
its share at the client; writers only on their own. Differences are of the mean client's log-loss and of the worst
decile's (mean of the worst tenth), averaged over seeds, advised less the other, with the standard error over seeds.
Calls (the deployed model is better than alone or common, or worse) and chances are judged as `advice_calibration.py`
says.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from benchmarks.advice_calibration import StatedGains, describe, select_calls
from mooring.advice.advise import run_advice
from mooring.advice.candidates.families import TUNED
from mooring.advice.evaluation.networks import finetune_locally, replace_rows
from mooring.advice.folds import assign_folds, concatenate_rows, filter_rows, row_clients, row_losses
from mooring.core.cohort import Rows
from mooring.data.clients import PARTS, Clients
from mooring.data.image_datasets import load_image_dataset
from mooring.engines.prepare import prepare
from mooring.engines.request import request

REFEREES = ("FedAvg", "localized FedAvg", "Local")
SHRINKAGE_ROWS = 20
GROUP = 5  # writers that are one client together


def net(features: int, classes: int) -> nn.Module:
    hidden = 32 if features < 100 else 50
    return nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, classes))


class LossesBySeed(NamedTuple):
    """One federation's answer, and what rows that were held aside say of it."""

    loss: dict[str, np.ndarray]  # every client's loss on the rows held aside, by method
    plan: str
    judged: dict[str, StatedGains]  # over alone and common


class TestRows(NamedTuple):
    """Rows that were held aside, and what each of them counts for each client's loss."""

    rows: Rows
    weight: torch.Tensor  # [N], by client summing to 1

    def mean(self, loss: torch.Tensor) -> np.ndarray:
        """[m]: each client's mean of a number per row."""
        return np.bincount(row_clients(self.rows).numpy(), (self.weight * loss).numpy(), len(self.rows))

    def error(self, loss: torch.Tensor) -> np.ndarray:
        """[m]: its standard error, a client's variance shrunk to that of all by SHRINKAGE_ROWS rows."""
        owner, m, n = row_clients(self.rows).numpy(), len(self.rows), self.rows.size.numpy()
        first, second = (np.bincount(owner, loss.numpy() ** k, m) for k in (1, 2))
        own = second - first**2 / np.maximum(n, 1)
        pooled = own.sum() / max((n - 1).clip(0).sum(), 1)
        return np.sqrt((own + SHRINKAGE_ROWS * pooled) / np.maximum(n - 1 + SHRINKAGE_ROWS, 1) / np.maximum(n, 1))


def rows_by_client(aside: Rows) -> TestRows:
    return TestRows(aside, 1 / aside.size.double()[row_clients(aside)])


def rows_of_class(aside: Rows, share: torch.Tensor) -> TestRows:
    """Everyone's rows judge every client that has their class; `share` [m, classes] are the clients' own."""
    parts = [share[i][aside.y] > 0 for i in range(len(share))]
    rows = Rows.stack([aside.x[part] for part in parts], [aside.y[part] for part in parts])
    count = torch.bincount(aside.y, minlength=share.shape[1]).double()
    return TestRows(rows, torch.cat([(share[i] / count)[aside.y[part]] for i, part in enumerate(parts)]))


def class_shares(clients: Clients) -> torch.Tensor:
    """[m, classes]"""
    count = torch.zeros(len(clients), len(clients.classes), dtype=torch.float64)
    for name in PARTS:
        part = getattr(clients, name).compact()
        count.index_put_((row_clients(part), part.y), torch.ones(len(part.y), dtype=torch.float64), accumulate=True)
    return count / count.sum(1, keepdim=True)


def measure_losses(clients: Clients, seed: int, rounds: int, by_class: bool, parts: int) -> LossesBySeed:
    """One of `parts` of the test rows is what advice sees; the others are held aside."""
    test = clients.test.compact()
    seen = assign_folds(test, clients.keys, parts, seed) == 0
    aside, known = filter_rows(test, ~seen), replace(clients, test=filter_rows(test, seen))
    job = prepare(request(known, purpose="advise", model=net, seed=seed, rounds=rounds, threads=1), known, net)
    advice = run_advice(job)
    models, choice = advice.models, advice.choice
    whole = replace_rows(job, concatenate_rows(known.train, known.validation))
    by_name = {
        "advised": models.personal,
        "recommended": models.recommended,
        "FedAvg": models.global_,
        "localized FedAvg": finetune_locally(whole, models.global_, 1),
        "Local": models.local,
    }
    judge = rows_of_class(aside, class_shares(clients)) if by_class else rows_by_client(aside)
    each = {k: row_losses(job.task, v, judge.rows) for k, v in by_name.items()}
    judged = {}
    for other, name in (("local", "Local"), ("global", "FedAvg")):
        frame = advice.clients
        probability = frame[f"probability_better_than_{other}"].to_numpy()
        low, high = (frame[f"improvement_over_{other}_ci_{end}"].to_numpy() for end in ("low", "high"))
        better, worse = select_calls(probability)
        gain = each[name] - each["recommended"]
        some = (low < high) & (judge.rows.size > 0).numpy()
        columns = (probability, high - low, better.astype(int) - worse, judge.mean(gain), judge.error(gain))
        judged[other] = StatedGains(*(column[some] for column in columns))
    steps = " rounds' worth of steps" if choice.plan.family == TUNED else ""
    plan = f"{choice.plan.family} {choice.plan.value:.3g}{steps}, {len(choice.own)} clients leave it"
    mean = {k: judge.mean(v)[judge.rows.size > 0] for k, v in each.items() if k != "recommended"}
    return LossesBySeed(mean, plan, judged)


def worst_decile(loss: np.ndarray) -> float:
    return float(np.sort(loss)[-max(1, len(loss) // 10) :].mean())


def group_by_five(clients: Clients) -> Clients:
    """Each five clients as one."""

    def merged(rows: Rows) -> Rows:
        rows = rows.compact()
        size = rows.size.view(-1, GROUP).sum(1)
        return Rows(rows.x, rows.y, torch.cumsum(size, 0) - size, size)

    parts = {part: merged(getattr(clients, part)) for part in PARTS}
    return replace(clients, names=clients.names[::GROUP], **parts)


def compare(name: str, make, seeds: range, rounds: int, by_class: bool = False, parts: int = 3) -> None:
    gaps: dict[tuple[str, str], list[float]] = defaultdict(list)
    judged: dict[str, list[StatedGains]] = defaultdict(list)
    for seed in seeds:
        found, plan, here = measure_losses(make(seed), seed, rounds, by_class, parts)
        for other, one in here.items():
            judged[other].append(one)
        shown = ", ".join(f"{k} {v.mean():.3f} / {worst_decile(v):.3f}" for k, v in found.items())
        counts = "; ".join(
            f"over {other} {(one.call != 0).sum()} calls, {(one.call * one.seen < 0).sum()} denied"
            for other, one in here.items()
        )
        print(f"{name}, seed {seed}: mean / worst decile: {shown}; plan {plan}; {counts}", flush=True)
        for other in REFEREES:
            for what, measure in (("mean", np.mean), ("worst decile", worst_decile)):
                gaps[other, what].append(float(measure(found["advised"]) - measure(found[other])))
    for other, each in judged.items():
        print(f"{name}, over {other}: {describe(each)}", flush=True)
    for (other, what), values in gaps.items():
        error = np.std(values, ddof=1) / len(values) ** 0.5 if len(values) > 1 else np.nan
        word = "MISSED" if np.mean(values) > 2 * error else "held"
        print(f"{name}, {what}: advised - {other} = {np.mean(values):+.4f} (error {error:.4f})  {word}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--sets", default="digits,mnist,groups")
    parser.add_argument("--writers", type=int, default=40, help="clients of MNIST")
    parser.add_argument("--rounds", type=int, help="50 on digits, 30 on MNIST")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    sets, seeds = asked.sets.split(","), range(asked.first, asked.first + asked.seeds)

    def digits(seed: int) -> Clients:
        return load_image_dataset("digits", clients=20, classes_per_client=2, seed=seed, test=0.6, validation=0.1)

    def writers(seed: int, each: int = 1, test: float = 0.6, validation: float = 0.1) -> Clients:
        more = {"clients": each * asked.writers, "test": test, "validation": validation, "seed": seed}
        return load_image_dataset("mnist_writers", asked.data_dir, partition="group", **more)

    if "digits" in sets:
        compare("digits", digits, seeds, asked.rounds or 50, by_class=True)
    if asked.data_dir and "mnist" in sets:
        compare("MNIST writers", writers, seeds, asked.rounds or 30)
    if asked.data_dir and "groups" in sets:

        def groups(seed: int) -> Clients:
            return group_by_five(writers(seed, GROUP, 0.8, 0.08))

        compare("MNIST writers in fives", groups, seeds, asked.rounds or 30, parts=10)


if __name__ == "__main__":
    main()
