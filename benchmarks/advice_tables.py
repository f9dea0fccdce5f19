"""Advice on four tables against what a statistician or an engineer would do with the same rows.

    python -m benchmarks.advice_tables --data-dir FOLDER [--quick] [--splits 10] [--mixed]

For the split that each table comes with, and for random ones, the test loss of: training alone with a validated ridge,
one common model, the best single lambda and the best shrinkage by c/n_i, both chosen on the test rows (no method could
do that), with --mixed a mixed-effects model with diagonal random slopes (regression only, statsmodels), and the advised
plan. All are fitted on train and validation rows. "excess" is the advised loss over the best of the others.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from mooring.advice.advise import deploy, refitted
from mooring.advice.choice import choose
from mooring.advice.folds import joined, owners, row_losses
from mooring.advice.path import Shape, curvature, path
from mooring.data.clients import REGRESSION
from mooring.data.sources import load
from mooring.tasks.catalog import build

TABLES = ("exam", "hsb82", "contraception", "heart4")
SCALES = np.logspace(3, -3, 49)


def table(folder: Path, name: str, seed: int | None):
    """A table's clients, with its own split or a random one."""
    source = folder / f"tab_{name}.npz"
    if seed is None:
        return load(source)
    with np.load(source) as held:
        frame = pd.DataFrame(held["X"], columns=held["feature_names"].astype(str))
        frame = frame.assign(y=held["y"], client=held["group"].astype(str))
        kind = REGRESSION if held["y"].dtype.kind == "f" else "binary"
    return load(frame, client="client", target="y", kind=kind, seed=seed, drop_small=True)


def losses(clients, mixed: bool) -> dict[str, torch.Tensor]:
    """Every method's loss on each test row."""
    task = build("auto", clients.kind, clients.train.x.shape[1], len(clients.classes))
    rows, test = joined(clients.train, clients.validation), clients.test
    choice = choose(task, clients)
    found = deploy(choice, refitted(task, rows, choice, "size"), len(clients))
    out = {name: row_losses(task, getattr(found, name), test) for name in ("alone", "common", "shared", "personal")}
    p, unit = rows.size.double(), curvature(task, rows, rows.size.double())
    by_size = Shape(tight=float(p.mean()) / p)
    for name, shape in (("best lambda", None), ("best c/n", by_size)):
        points = path(task, rows, p, SCALES * unit, shape)
        out[name] = min((row_losses(task, point.v, test) for point in points), key=lambda loss: float(loss.mean()))
    if mixed and clients.kind == REGRESSION:
        out["mixed"] = mixed_model(rows, test)
    return {"advised": out.pop("personal"), **out}, choice


def mixed_model(rows, test) -> torch.Tensor:
    """statsmodels' MixedLM with a random intercept and slopes, uncorrelated, on train and validation rows."""
    from statsmodels.regression.mixed_linear_model import MixedLM, MixedLMParams

    def design(x):
        return np.column_stack([x.numpy(), np.ones(len(x))])

    x, group = design(rows.x), owners(rows).numpy()
    seen = np.linalg.matrix_rank(x)
    keep = [j for j in range(x.shape[1]) if np.linalg.matrix_rank(x[:, : j + 1]) > np.linalg.matrix_rank(x[:, :j])]
    assert len(keep) == seen
    model = MixedLM(rows.y.numpy(), x[:, keep], group, exog_re=x[:, keep])
    diagonal = MixedLMParams.from_components(np.ones(seen), cov_re=np.eye(seen))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # statsmodels warns of every variance at 0
        found = model.fit(free=diagonal, method="lbfgs", maxiter=200)
        effects = found.random_effects
    w = np.stack([found.fe_params + effects[i].to_numpy() for i in range(len(rows))])
    answer = (design(test.x)[:, keep] * w[owners(test).numpy()]).sum(1)
    return (torch.from_numpy(answer) - test.y) ** 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--splits", type=int, default=10)
    parser.add_argument("--tables", default=",".join(TABLES))
    parser.add_argument("--quick", action="store_true", help="the given split only")
    parser.add_argument("--mixed", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    every = []
    for name in asked.tables.split(","):
        for seed in [None, *range(1, 1 + (0 if asked.quick else asked.splits))]:
            found, choice = losses(table(asked.data_dir, name, seed), asked.mixed)
            mean = {k: float(v.mean()) for k, v in found.items()}
            best = min((k for k in mean if k != "advised"), key=mean.get)
            difference = found["advised"] - found[best]
            error = float(difference.std()) / len(difference) ** 0.5
            excess = mean["advised"] / mean[best] - 1
            every.append(excess)
            shown = " ".join(f"{k} {v:.4f}" for k, v in mean.items())
            off = f"excess {excess:+.2%} over {best} ({float(difference.mean()) / max(error, 1e-12):+.1f} se)"
            plan = f"plan {choice.plan.family} x{choice.plan.value:.3g}, {len(choice.own)} leave"
            print(f"{name:14} {'given' if seed is None else seed!s:>5}  {shown}  {off}  {plan}", flush=True)
    print(f"mean excess over the best of the others, {len(every)} splits: {np.mean(every):+.2%}")


if __name__ == "__main__":
    main()
