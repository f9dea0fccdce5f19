"""Advice for networks against what a plan must not lose to: FedAvg, localized FedAvg and Local.

    python -m benchmarks.advice_networks [--data-dir FOLDER] [--seeds 5] [--writers 100] [--rounds 50]

Digits, two classes a client (a perceptron 64-32-10), and with --data-dir MNIST by its true writers (784-50-10). All
methods are trained on the same train and validation rows and judged on the same test rows. Differences are of the mean
client's log-loss and of the worst decile's (mean of the worst tenth), averaged over seeds, advised less the other, with
the standard error over seeds.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from torch import nn

from mooring.advice.advise import deploy
from mooring.advice.families import TUNED
from mooring.advice.folds import owners, row_losses
from mooring.advice.networks import choose_network, tuned, with_all_rows
from mooring.data.clients import Clients
from mooring.data.images import named_images
from mooring.engines.prepare import prepare
from mooring.engines.request import request

REFEREES = ("FedAvg", "localized FedAvg", "Local")


def net(features: int, classes: int) -> nn.Module:
    hidden = 32 if features < 100 else 50
    return nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, classes))


def losses(clients: Clients, seed: int, rounds: int) -> tuple[dict[str, np.ndarray], str]:
    """Every client's test loss by method, and the plan."""
    asked = request(clients, purpose="advise", model=net, seed=seed, rounds=rounds, threads=1)
    job = prepare(asked, clients, net)
    choice, models = choose_network(job, lambda *_: None)
    found = deploy(choice, models, len(clients))
    fedavg = models[choice.common].w
    by_name = {
        "advised": found.personal,
        "FedAvg": fedavg,
        "localized FedAvg": tuned(with_all_rows(job), fedavg, 1),
        "Local": found.alone,
    }
    owner, n = owners(clients.test).numpy(), clients.test.size.numpy()
    each = {k: row_losses(job.task, v, clients.test).numpy() for k, v in by_name.items()}
    plan = f"{choice.plan.family} {choice.plan.value:.3g}" + (
        " rounds' worth of steps" if choice.plan.family == TUNED else ""
    )
    told = f"{plan}, {len(choice.own)} clients leave it"
    return {k: np.bincount(owner, v, len(n))[n > 0] / n[n > 0] for k, v in each.items()}, told


def worst_decile(loss: np.ndarray) -> float:
    return float(np.sort(loss)[-max(1, len(loss) // 10) :].mean())


def compare(name: str, make, seeds: int, rounds: int) -> None:
    gaps: dict[tuple[str, str], list[float]] = defaultdict(list)
    for seed in range(seeds):
        found, plan = losses(make(seed), seed, rounds)
        shown = ", ".join(f"{k} {v.mean():.3f} / {worst_decile(v):.3f}" for k, v in found.items())
        print(f"{name}, seed {seed}: mean / worst decile: {shown}; plan {plan}", flush=True)
        for other in REFEREES:
            for what, measure in (("mean", np.mean), ("worst decile", worst_decile)):
                gaps[other, what].append(float(measure(found["advised"]) - measure(found[other])))
    for (other, what), values in gaps.items():
        error = np.std(values, ddof=1) / len(values) ** 0.5 if len(values) > 1 else np.nan
        word = "held" if np.mean(values) <= 2 * error else "MISSED"
        print(f"{name}, {what}: advised - {other} = {np.mean(values):+.4f} (error {error:.4f})  {word}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--writers", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=50)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    more = {"test": 0.3, "validation": 0.2}
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
