"""Personal models of counts by quasi-Poisson and by negative binomial likelihoods, compared on test rows.

    python -m benchmarks.count_likelihoods [--tables FOLDER] [--splits 2]

Planted tables have negative binomial or lognormally mixed counts of 40 clients. FOLDER has the tables of
`benchmarks.tables_fetch`, of which the counts of the half for design are used. Both likelihoods choose, average and
fit by the same code, on linear columns. The negative binomial's variance is mu + mu^2 / theta; theta maximizes the
likelihood of held-out rows given the predictions of quasi-Poisson's personal models. Printed are mean Poisson
deviances of personal models on the 20% of the rows that were withheld, and negative binomial log scores with theta
from the training rows.

The criterion, fixed before the first run: the negative binomial becomes part of the package if it lowers the mean
deviance by at least 0.5% on average over these tables.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import torch
from scipy.optimize import minimize_scalar
from scipy.special import gammaln
from torch import Tensor

from benchmarks.tables import list_tables, read_table, split_of
from benchmarks.tables_catalog import COUNT, DESIGN
from mooring.advice.evaluation.cross_fitting import Evidence, cross_fit
from mooring.core.cohort import Batch
from mooring.data.clients import Clients
from mooring.data.folds import map_rows, usable_rows
from mooring.engines.prepare import prepare
from mooring.engines.request import request
from mooring.tasks.linear_losses import Poisson

SMALLEST_THETA, LARGEST_THETA = 1e-2, 1e4
PLANTED = {
    "negative binomial, theta 0.5": 0.5,
    "negative binomial, theta 2": 2.0,
    "lognormal, sd 1": -1.0,
    "Poisson": 0.0,
}


@dataclass(frozen=True)
class NegativeBinomial(Poisson):
    """ell = (y + theta) log(1 + exp(z) / theta) - y z."""

    theta: float = 1.0
    overdispersed: ClassVar[bool] = False

    def row_loss(self, z: Tensor, y: Tensor) -> Tensor:
        return (y + self.theta) * torch.log1p(z.exp() / self.theta) - y * z

    def row_slope(self, z: Tensor, y: Tensor) -> Tensor:
        return (y + self.theta) * z.exp() / (self.theta + z.exp()) - y

    def row_bend(self, z: Tensor, y: Tensor) -> Tensor:
        return (y + self.theta) * self.theta * z.exp() / (self.theta + z.exp()) ** 2

    def row_risk(self, w: Tensor, batch: Batch) -> Tensor:
        best = (batch.y + self.theta) * torch.log1p(batch.y / self.theta) - torch.xlogy(batch.y, batch.y)
        return 2 * (self.row_loss(self._limit(self.scores(w, batch.x)), batch.y) - best)


def log_scores(y: np.ndarray, mu: np.ndarray, theta: float) -> np.ndarray:
    """Negative log-likelihoods of counts."""
    binomial = gammaln(y + theta) - gammaln(theta) - gammaln(y + 1)
    return -(binomial + theta * np.log(theta / (theta + mu)) + y * np.log(mu / (theta + mu)))


def estimate_theta(y: np.ndarray, mu: np.ndarray) -> float:
    bounds = np.log(SMALLEST_THETA), np.log(LARGEST_THETA)
    mu = np.maximum(mu, 1e-9)
    return float(
        np.exp(minimize_scalar(lambda t: log_scores(y, mu, np.exp(t)).mean(), bounds=bounds, method="bounded").x)
    )


def plant(theta: float, seed: int, clients: int = 40, rows: int = 30) -> pd.DataFrame:
    """Counts of clients whose intercepts and effects vary: gamma (theta > 0), lognormal (theta < 0) or no mixtures."""
    rng = np.random.default_rng(seed)
    owner = np.repeat(np.arange(clients), rows)
    x = rng.normal(size=(len(owner), 3))
    effects = rng.normal(0.3, 0.2, (clients, 3))
    mean = np.exp(0.5 + rng.normal(0, 0.5, clients)[owner] + (x * effects[owner]).sum(1))
    if theta > 0:
        mean = mean * rng.gamma(theta, 1 / theta, len(owner))
    elif theta < 0:
        mean = mean * np.exp(rng.normal(theta**2 / -2, -theta, len(owner)))
    table = pd.DataFrame(x, columns=["a", "b", "c"])
    return table.assign(client=[f"client {i}" for i in owner], y=rng.poisson(mean))


def evidence_of(task: Any, clients: Clients) -> Evidence:
    return cross_fit(task, usable_rows(clients), clients.keys, clients.weighting("size"))[1]


def compare(table: pd.DataFrame, client: str, target: str) -> dict[str, float]:
    """Deviances and log scores on the test rows, and theta."""
    options = {"client": client, "target": target, "target_type": "count", "split": "split"}
    job = prepare(
        request(table, purpose="advise", **options, min_rows=3, drop_small=True, theory=False, threads=1), table
    )
    clients, poisson = job.clients, job.task
    quasi = evidence_of(poisson, clients)
    known = quasi.predictions
    assert known is not None
    theta = estimate_theta(known.y, known.by_model["personal"])
    same = {field.name: getattr(poisson, field.name) for field in fields(poisson)}
    binomial = evidence_of(NegativeBinomial(**same, theta=theta), clients)
    out = {"theta": theta}
    for name, evidence in (("quasi", quasi), ("binomial", binomial)):
        w = evidence.models.personal
        mu = map_rows(lambda v, batch: poisson.predict(v, batch.x), w, clients.test).numpy()
        y = map_rows(lambda v, batch: batch.y.double(), w, clients.test).numpy()
        out[f"{name}_deviance"] = float(map_rows(poisson.row_risk, w, clients.test).mean())
        out[f"{name}_score"] = float(log_scores(y, np.maximum(mu, 1e-9), theta).mean())
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path)
    parser.add_argument("--splits", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    changes = []
    entries = [] if options.tables is None else list_tables(options.tables, DESIGN)
    cases: list[Any] = [*PLANTED, *(entry for entry in entries if entry["kind"] == COUNT)]
    print("table                             theta  deviance: quasi  binomial  change   log score: quasi  binomial")
    for case in cases:
        found = []
        for seed in range(1, options.splits + 1):
            if isinstance(case, str):
                name, client, target = case, "client", "y"
                table = plant(PLANTED[case], seed)
                entry = {"name": case, "client": client, "time": ""}
            else:
                name, client, target, entry = case["name"], case["client"], case["target"], case
                frame = read_table(options.tables, case)
                table = frame[[client, target, *case["features"]]]
                text = [c for c in case["features"] if table[c].dtype == object or table[c].dtype == "string"]
                table = table.astype(dict.fromkeys(text, "category"))
            found.append(compare(table.assign(split=split_of(table, entry, seed)), client, target))
        mean = pd.DataFrame(found).mean()
        change = 100 * (mean["binomial_deviance"] / mean["quasi_deviance"] - 1)
        changes.append(change)
        print(
            f"{name:32s}{mean['theta']:7.2f}{mean['quasi_deviance']:17.4f}{mean['binomial_deviance']:10.4f}"
            f"{change:+7.2f}%{mean['quasi_score']:19.4f}{mean['binomial_score']:10.4f}",
            flush=True,
        )
    print(f"mean change of the deviance over {len(changes)} tables: {np.mean(changes):+.2f}%")


if __name__ == "__main__":
    main()
