"""Advice for networks against the algorithms of `compare`, each with its defaults, on the same rows.

    python -m benchmarks.advice_networks [--data-dir FOLDER] [--seeds 10] [--first 0] [--rounds 30]
                                         [--sets digits,fashion,mnist,groups] [--writers 40]

Digits, two classes per client (a perceptron 64-32-10), and with --data-dir Fashion-MNIST by a Dirichlet partition
(alpha 0.1, 250 rows per client) and MNIST by its true writers (784-50-10): each writer is a client ("mnist"), or each
five of them ("groups"), which leaves large test sets. All methods are trained on the same rows and tested on rows that
no method sees: 40% of all, of groups 72%. On digits, where what a client sees depends on its classes only, every client
is tested on all of these rows that have one of its classes, each class with its share at the client; elsewhere on its
own rows.
Numbers are means over clients of the log-loss, its worst decile (mean of the worst tenth) and the accuracy. The
differences are those of the recommended models less the best single algorithm, which is chosen on the test rows; their
standard error is over seeds, and with one seed over clients. Confidence (the recommended model is better than the local
or the global one, or worse) is judged as in `advice_calibration.py`.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from benchmarks.advice_calibration import StatedGains, describe, select_calls
from mooring.advice.advise import run_advice
from mooring.advice.candidates.families import TUNED
from mooring.core.cohort import Rows
from mooring.data.clients import PARTS, Clients
from mooring.data.folds import assign_folds, filter_rows, row_clients, row_losses
from mooring.data.image_datasets import load_image_dataset
from mooring.engines.fit import fit
from mooring.engines.metrics import row_errors
from mooring.engines.prepare import prepare
from mooring.engines.request import request

SINGLE_ALGORITHMS = ("fedavg", "fedavg_finetune", "fedprox", "ditto", "apfl", "fedper", "fedrod", "local")
METHODS = ("recommended", "personal", "global", "local")  # of the advice
SHRINKAGE_ROWS = 20
GROUP = 5  # writers per client


def net(features: int, classes: int) -> nn.Module:
    hidden = 32 if features < 100 else 50
    return nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, classes))


class LossesBySeed(NamedTuple):
    """One federation's recommendation and its losses on withheld rows."""

    loss: dict[str, np.ndarray]  # every client's loss on test rows, by method
    error: dict[str, np.ndarray]  # the share of its test rows that are misclassified
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
    seen = assign_folds(test, clients.keys, parts, seed) == 0
    withheld, visible = filter_rows(test, ~seen), replace(clients, test=filter_rows(test, seen))
    job = prepare(request(visible, purpose="advise", model=net, seed=seed, rounds=rounds, threads=1), visible, net)
    advice = run_advice(job)
    models, choice = advice.models, advice.choice
    by_name = {
        "recommended": models.recommended,
        "personal": models.personal,
        "global": models.global_.expand_as(models.local),
        "local": models.local,
    }
    for name in SINGLE_ALGORITHMS:
        single = fit(visible, algorithm=name, model=net, seed=seed, rounds=rounds, threads=1, baselines=False)
        by_name[f"compare {name}"] = single.trained.models
    scored = rows_of_class(withheld, class_shares(clients)) if by_class else rows_by_client(withheld)
    each = {k: row_losses(job.task, v, scored.rows) for k, v in by_name.items()}
    wrong = {k: row_errors(job.task, v, scored.rows) for k, v in by_name.items()}
    stated = {}
    for other in ("local", "global"):
        frame = advice.clients
        probability = frame[f"probability_better_than_{other}"].to_numpy()
        low, high = (frame[f"improvement_over_{other}_ci_{end}"].to_numpy() for end in ("low", "high"))
        better, worse = select_calls(probability)
        gain = each[other] - each["recommended"]
        some = (low < high) & (scored.rows.size > 0).numpy()
        columns = (probability, high - low, better.astype(int) - worse, scored.mean(gain), scored.error(gain))
        stated[other] = StatedGains(*(column[some] for column in columns))
    steps = " rounds' worth of steps" if choice.plan.family == TUNED else ""
    plan = f"{choice.plan.family} {choice.plan.value:.3g}{steps}, {len(choice.own)} clients leave it"
    loss, error = ({k: scored.mean(v)[scored.rows.size > 0] for k, v in values.items()} for values in (each, wrong))
    return LossesBySeed(loss, error, plan, stated)


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
    """Print a table of the methods, and how the recommended models differ from the best single algorithm."""
    results = []
    for seed in seeds:
        result = measure_losses(make(seed), seed, rounds, by_class, parts)
        results.append(result)
        loss = result.loss["recommended"].mean()
        print(f"{name}, seed {seed}: recommended {loss:.4f}; plan {result.plan}", flush=True)
    print(f"{name}: {'method':24s} log-loss  worst decile  accuracy")
    for method in results[0].loss:
        columns = [np.mean([measure(r.loss[method]) for r in results]) for measure in (np.mean, worst_decile)]
        accuracy = 100 * (1 - np.mean([r.error[method].mean() for r in results]))
        print(f"{name}: {method:24s} {columns[0]:8.4f}  {columns[1]:12.4f}  {accuracy:7.2f}%", flush=True)
    for quantity in ("loss", "error"):
        values = {m: [getattr(r, quantity)[m] for r in results] for m in results[0].loss}
        singles = [m for m in values if m not in METHODS]
        best = min(singles, key=lambda m: np.mean([v.mean() for v in values[m]]))
        gaps = [
            recommended - baseline for recommended, baseline in zip(values["recommended"], values[best], strict=True)
        ]
        units = np.array([gap.mean() for gap in gaps]) if len(gaps) > 1 else gaps[0]
        error = np.std(units, ddof=1) / len(units) ** 0.5
        verdict = "held" if units.mean() <= error else "MISSED"
        print(f"{name}, {quantity}: recommended - {best} = {units.mean():+.4f} (standard error {error:.4f})  {verdict}")
    for other in results[0].stated:
        print(f"{name}, over {other}: {describe([r.stated[other] for r in results])}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--sets", default="digits,fashion,mnist,groups")
    parser.add_argument("--writers", type=int, default=40, help="clients of MNIST")
    parser.add_argument("--rounds", type=int, help="50 on digits, 30 elsewhere")
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
    if options.data_dir and "fashion" in sets:

        def fashion(seed: int) -> Clients:
            rows = {"samples_per_client": 250, "test": 0.6, "validation": 0.1, "seed": seed}
            return load_image_dataset(
                "fashion_mnist", options.data_dir, partition="dirichlet", alpha=0.1, clients=20, **rows
            )

        compare("Fashion-MNIST", fashion, seeds, options.rounds or 30)
    if options.data_dir and "mnist" in sets:
        compare("MNIST writers", writers, seeds, options.rounds or 30)
    if options.data_dir and "groups" in sets:

        def groups(seed: int) -> Clients:
            return group_by_five(writers(seed, GROUP, 0.8, 0.08))

        compare("MNIST writers in fives", groups, seeds, options.rounds or 30, parts=10)


if __name__ == "__main__":
    main()
