"""Advice for networks against what a plan must not lose to: FedAvg, localized FedAvg and Local.

    python -m benchmarks.advice_networks [--data-dir FOLDER] [--seeds 10] [--writers 100] [--rounds 50]

Digits, two classes a client (a perceptron 64-32-10), and with --data-dir MNIST by its true writers (784-50-10). All
methods are trained on the same train and validation rows and judged on the same test rows, half of which advice does
not see. Differences are of the mean client's log-loss and of the worst decile's (mean of the worst tenth), averaged
over seeds, advised less the other, with the standard error over seeds. A call (the deployed model is better than alone
or common, or worse) is false where the rows held aside say the opposite.
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

from mooring.advice.advise import advised
from mooring.advice.calibrate import calls
from mooring.advice.families import TUNED
from mooring.advice.folds import compact, deal, joined, owners, row_losses, subset
from mooring.advice.networks import tuned, with_rows
from mooring.data.clients import Clients
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
    called: int  # clients called better or worse than alone, and than common
    false: int  # those of them whose rows aside say the opposite


def losses(clients: Clients, seed: int, rounds: int) -> Found:
    """Half of the test rows are held aside; the rest is what advice sees."""
    test = compact(clients.test)
    seen = deal(test, clients.keys, 2, seed) == 0
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
    owner, n = owners(aside).numpy(), aside.size.numpy()
    each = {k: row_losses(job.task, v, aside).numpy() for k, v in by_name.items()}
    mean = {k: np.bincount(owner, v, len(n)) / np.maximum(n, 1) for k, v in each.items()}
    called = false = 0
    for other, name in (("alone", "Local"), ("common", "FedAvg")):
        better, worse = calls(torch.tensor(advice.clients[f"chance_over_{other}"].to_numpy()))
        told, gain = (
            (advice.clients[f"sure_over_{other}"] != "same").to_numpy() & (n > 0),
            mean[name] - mean["deployed"],
        )
        called += int((told & (better | worse)).sum())
        false += int((told & ((better & (gain < 0)) | (worse & (gain > 0)))).sum())
    steps = " rounds' worth of steps" if choice.plan.family == TUNED else ""
    plan = f"{choice.plan.family} {choice.plan.value:.3g}{steps}, {len(choice.own)} clients leave it"
    return Found({k: v[n > 0] for k, v in mean.items() if k != "deployed"}, plan, called, false)


def worst_decile(loss: np.ndarray) -> float:
    return float(np.sort(loss)[-max(1, len(loss) // 10) :].mean())


def compare(name: str, make, seeds: int, rounds: int) -> None:
    gaps: dict[tuple[str, str], list[float]] = defaultdict(list)
    called = false = 0
    for seed in range(seeds):
        found, plan, made, wrong = losses(make(seed), seed, rounds)
        called, false = called + made, false + wrong
        shown = ", ".join(f"{k} {v.mean():.3f} / {worst_decile(v):.3f}" for k, v in found.items())
        print(
            f"{name}, seed {seed}: mean / worst decile: {shown}; plan {plan}; calls {made}, false {wrong}", flush=True
        )
        for other in REFEREES:
            for what, measure in (("mean", np.mean), ("worst decile", worst_decile)):
                gaps[other, what].append(float(measure(found["advised"]) - measure(found[other])))
    print(f"{name}: {called} calls, {false} false ({false / max(called, 1):.1%})", flush=True)
    for (other, what), values in gaps.items():
        error = np.std(values, ddof=1) / len(values) ** 0.5 if len(values) > 1 else np.nan
        word = "held" if np.mean(values) <= 2 * error else "MISSED"
        print(f"{name}, {what}: advised - {other} = {np.mean(values):+.4f} (error {error:.4f})  {word}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--writers", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=50)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    more = {"test": 0.5, "validation": 0.1}
    compare(
        "digits",
        lambda seed: named_images("digits", clients=20, classes_per_client=2, seed=seed, **more),
        asked.seeds,
        asked.rounds,
    )
    if asked.data_dir:
        compare(
            "MNIST writers",
            lambda seed: named_images(
                "mnist_writers", asked.data_dir, partition="group", clients=asked.writers, seed=seed, **more
            ),
            asked.seeds,
            asked.rounds,
        )


if __name__ == "__main__":
    main()
