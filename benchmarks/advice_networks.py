"""Advice for networks, compared with its baselines: FedAvg, fine-tuned FedAvg and Local.

    python -m benchmarks.advice_networks [--data-dir FOLDER] [--seeds 10] [--first 0] [--sets digits,mnist,groups]
                                         [--writers 40] [--rounds 30]

Digits, two classes per client (a perceptron 64-32-10), and with --data-dir MNIST by its true writers (784-50-10): one
writer per client ("mnist"), or five ("groups"), which leaves large test sets. All methods are trained on the same rows
and scored on rows that advice does not see: 40% of all rows, for groups 72%. On digits, where a client's rows depend on
its classes only, every client is scored on all withheld rows of its classes, each class weighted by its share at the
client; writers are scored on their own rows. Differences are of the mean client's log-loss and of the worst decile's
(mean of the worst tenth), averaged over seeds, advised minus the baseline, with the standard error over seeds.
Calls (the recommended model is better, or worse, than the local or global one) and probabilities are scored as
`advice_calibration.py` describes.
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

BASELINES = ("FedAvg", "localized FedAvg", "Local")
SHRINKAGE_ROWS = 20
GROUP = 5  # writers per client


def net(features: int, classes: int) -> nn.Module:
    hidden = 32 if features < 100 else 50
    return nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, classes))


class LossesBySeed(NamedTuple):
    """One federation's recommendation and its losses on withheld rows."""

    loss: dict[str, np.ndarray]  # every client's loss on withheld rows, by method
    plan: str
    stated: dict[str, StatedGains]  # against the local and the global model


class TestRows(NamedTuple):
    """Withheld rows, and the weight of each in its client's loss."""

    rows: Rows
    weight: torch.Tensor  # [N], sums to 1 for each client

    def mean(self, loss: torch.Tensor) -> np.ndarray:
        """Return [m]: each client's weighted mean of the row losses."""
        return np.bincount(row_clients(self.rows).numpy(), (self.weight * loss).numpy(), len(self.rows))

    def error(self, loss: torch.Tensor) -> np.ndarray:
        """Return [m]: the mean's standard error, with variances shrunken to the pooled one by SHRINKAGE_ROWS rows."""
        owner, m, n = row_clients(self.rows).numpy(), len(self.rows), self.rows.size.numpy()
        first, second = (np.bincount(owner, loss.numpy() ** k, m) for k in (1, 2))
        squares = second - first**2 / np.maximum(n, 1)
        pooled = squares.sum() / max((n - 1).clip(0).sum(), 1)
        return np.sqrt((squares + SHRINKAGE_ROWS * pooled) / np.maximum(n - 1 + SHRINKAGE_ROWS, 1) / np.maximum(n, 1))


def rows_by_client(withheld: Rows) -> TestRows:
    return TestRows(withheld, 1 / withheld.size.double()[row_clients(withheld)])


def rows_of_class(withheld: Rows, share: torch.Tensor) -> TestRows:
    """Return all rows for every client that has their class, weighted by `share` [m, classes] of the clients."""
    parts = [share[i][withheld.y] > 0 for i in range(len(share))]
    rows = Rows.stack([withheld.x[part] for part in parts], [withheld.y[part] for part in parts])
    count = torch.bincount(withheld.y, minlength=share.shape[1]).double()
    return TestRows(rows, torch.cat([(share[i] / count)[withheld.y[part]] for i, part in enumerate(parts)]))


def class_shares(clients: Clients) -> torch.Tensor:
    """[m, classes]"""
    count = torch.zeros(len(clients), len(clients.classes), dtype=torch.float64)
    for name in PARTS:
        part = getattr(clients, name).compact()
        count.index_put_((row_clients(part), part.y), torch.ones(len(part.y), dtype=torch.float64), accumulate=True)
    return count / count.sum(1, keepdim=True)


def measure_losses(clients: Clients, seed: int, rounds: int, by_class: bool, parts: int) -> LossesBySeed:
    """Return the losses of one federation: advice sees one of `parts` of the test rows, the others are withheld."""
    test = clients.test.compact()
    is_seen = assign_folds(test, clients.keys, parts, seed) == 0
    withheld, visible = filter_rows(test, ~is_seen), replace(clients, test=filter_rows(test, is_seen))
    job = prepare(request(visible, purpose="advise", model=net, seed=seed, rounds=rounds, threads=1), visible, net)
    advice = run_advice(job)
    models, choice = advice.models, advice.choice
    refit_job = replace_rows(job, concatenate_rows(visible.train, visible.validation))
    by_name = {
        "advised": models.personal,
        "recommended": models.recommended,
        "FedAvg": models.global_,
        "localized FedAvg": finetune_locally(refit_job, models.global_, 1),
        "Local": models.local,
    }
    scored = rows_of_class(withheld, class_shares(clients)) if by_class else rows_by_client(withheld)
    losses = {k: row_losses(job.task, v, scored.rows) for k, v in by_name.items()}
    stated = {}
    for alternative, name in (("local", "Local"), ("global", "FedAvg")):
        frame = advice.clients
        probability = frame[f"probability_better_than_{alternative}"].to_numpy()
        low, high = (frame[f"improvement_over_{alternative}_ci_{end}"].to_numpy() for end in ("low", "high"))
        better, worse = select_calls(probability)
        gain = losses[name] - losses["recommended"]
        has_interval = (low < high) & (scored.rows.size > 0).numpy()
        columns = (probability, high - low, better.astype(int) - worse, scored.mean(gain), scored.error(gain))
        stated[alternative] = StatedGains(*(column[has_interval] for column in columns))
    steps = " rounds' worth of steps" if choice.plan.family == TUNED else ""
    plan = f"{choice.plan.family} {choice.plan.value:.3g}{steps}, {len(choice.own)} clients leave it"
    mean = {k: scored.mean(v)[scored.rows.size > 0] for k, v in losses.items() if k != "recommended"}
    return LossesBySeed(mean, plan, stated)


def worst_decile(loss: np.ndarray) -> float:
    return float(np.sort(loss)[-max(1, len(loss) // 10) :].mean())


def group_by_five(clients: Clients) -> Clients:
    """Return clients that each consist of GROUP consecutive clients."""

    def merge(rows: Rows) -> Rows:
        rows = rows.compact()
        size = rows.size.view(-1, GROUP).sum(1)
        return Rows(rows.x, rows.y, torch.cumsum(size, 0) - size, size)

    parts = {part: merge(getattr(clients, part)) for part in PARTS}
    return replace(clients, names=clients.names[::GROUP], **parts)


def compare(name: str, make, seeds: range, rounds: int, by_class: bool = False, parts: int = 3) -> None:
    gaps: dict[tuple[str, str], list[float]] = defaultdict(list)
    stated_by_alternative: dict[str, list[StatedGains]] = defaultdict(list)
    for seed in seeds:
        losses, plan, stated = measure_losses(make(seed), seed, rounds, by_class, parts)
        for alternative, gains in stated.items():
            stated_by_alternative[alternative].append(gains)
        loss_texts = ", ".join(f"{k} {v.mean():.3f} / {worst_decile(v):.3f}" for k, v in losses.items())
        counts = "; ".join(
            f"over {alternative} {(gains.call != 0).sum()} calls, {(gains.call * gains.seen < 0).sum()} denied"
            for alternative, gains in stated.items()
        )
        print(f"{name}, seed {seed}: mean / worst decile: {loss_texts}; plan {plan}; {counts}", flush=True)
        for baseline in BASELINES:
            for statistic, measure in (("mean", np.mean), ("worst decile", worst_decile)):
                gaps[baseline, statistic].append(float(measure(losses["advised"]) - measure(losses[baseline])))
    for alternative, all_gains in stated_by_alternative.items():
        print(f"{name}, over {alternative}: {describe(all_gains)}", flush=True)
    for (baseline, statistic), values in gaps.items():
        error = np.std(values, ddof=1) / len(values) ** 0.5 if len(values) > 1 else np.nan
        verdict = "MISSED" if np.mean(values) > 2 * error else "held"
        print(
            f"{name}, {statistic}: advised - {baseline} = {np.mean(values):+.4f} (error {error:.4f})  {verdict}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--sets", default="digits,mnist,groups")
    parser.add_argument("--writers", type=int, default=40, help="clients of MNIST")
    parser.add_argument("--rounds", type=int, help="50 on digits, 30 on MNIST")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sets, seeds = options.sets.split(","), range(options.first, options.first + options.seeds)

    def digits(seed: int) -> Clients:
        return load_image_dataset("digits", clients=20, classes_per_client=2, seed=seed, test=0.6, validation=0.1)

    def writers(seed: int, writers_per_client: int = 1, test: float = 0.6, validation: float = 0.1) -> Clients:
        dataset_options = {
            "clients": writers_per_client * options.writers,
            "test": test,
            "validation": validation,
            "seed": seed,
        }
        return load_image_dataset("mnist_writers", options.data_dir, partition="group", **dataset_options)

    if "digits" in sets:
        compare("digits", digits, seeds, options.rounds or 50, by_class=True)
    if options.data_dir and "mnist" in sets:
        compare("MNIST writers", writers, seeds, options.rounds or 30)
    if options.data_dir and "groups" in sets:

        def groups(seed: int) -> Clients:
            return group_by_five(writers(seed, GROUP, 0.8, 0.08))

        compare("MNIST writers in fives", groups, seeds, options.rounds or 30, parts=10)


if __name__ == "__main__":
    main()
