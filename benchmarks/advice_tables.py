"""Advice on five tables against what a statistician or an engineer would do with the same rows.

    python -m benchmarks.advice_tables --data-dir FOLDER [--quick] [--splits 10] [--mixed] [--keep FOLDER]

For the split that each table comes with, and for random ones, the test loss of: training alone with a validated ridge,
one common model, the best single lambda and the best shrinkage by c/n_i, both chosen on the test rows (no method could
do that), with --mixed a mixed-effects model with diagonal random slopes (regression only, statsmodels), and the advised
plan. All are fitted on train and validation rows. "excess" is the advised loss over that of the best of the others, as
the test rows have it; "chosen" is what anyone can have of them: alone, common or a single lambda, whichever loses least
on held-out rows. z: what test rows say of each client's gain, less what was predicted of it, over the error of both;
its standard deviation should be about 1. With --keep finished splits are kept in a folder, of one version of the code,
and a run that was interrupted goes on after them.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch

from mooring.advice.calibrate import trust, trusted
from mooring.advice.choice import Choice
from mooring.advice.crossfit import Evidence, cross_fit, pairs_of, posterior_of, shares, with_own_noise
from mooring.advice.families import ALONE, COMMON, LAMBDA
from mooring.advice.folds import joined, owners, row_losses
from mooring.advice.gain import at_rows, gains
from mooring.advice.path import Shape, curvature, path
from mooring.advice.prior import likely_variance, priors
from mooring.advice.tally import MODELS, PAIRS, tally_of, witnesses_of
from mooring.core.seeds import client_key
from mooring.data.clients import PARTS, REGRESSION
from mooring.data.sources import load
from mooring.data.splits import random_split
from mooring.tasks.catalog import build

TABLES = ("exam", "hsb82", "contraception", "heart4", "parkinsons")
SCALES = np.logspace(3, -3, 49)
LEAST = 5  # rows of a client that is not left out
CHOSEN = "chosen"


def table(folder: Path, name: str, seed: int | None):
    """A table's clients, with its own split or a random one.

    Classes are not dealt out evenly, as `load` does by itself: test rows would then know the training rows' shares of
    the classes, and vary less around predictions than rows to come.
    """
    source = folder / f"tab_{name}.npz"
    if seed is None:
        return load(source)
    with np.load(source) as held:
        frame = pd.DataFrame(held["X"], columns=held["feature_names"].astype(str))
        frame = frame.assign(y=held["y"], client=held["group"].astype(str))
        kind = REGRESSION if held["y"].dtype.kind == "f" else "binary"
    frame = frame[frame.groupby("client")["y"].transform("size") >= LEAST].reset_index(drop=True)
    code, names = pd.factorize(frame["client"])
    keys = np.array([client_key(name) for name in names], dtype=np.uint64)
    part = random_split(code, keys, seed)
    return load(frame.assign(split=np.array(PARTS)[part]), client="client", target="y", kind=kind, split="split")


class Found(NamedTuple):
    loss: dict[str, torch.Tensor]  # each test row's, by method
    plan: str
    scores: dict[str, np.ndarray]  # by pair: (seen - predicted) gains of clients over their error, on test rows


def judged(clients, mixed: bool) -> Found:
    """Every method on train and validation rows, judged on test rows; and the advice's predictions beside them."""
    task = build("auto", clients.kind, clients.train.x.shape[1], len(clients.classes))
    rows, test = joined(clients.train, clients.validation), clients.test
    choice, evidence = cross_fit(task, rows, clients.keys)
    out = {name: row_losses(task, getattr(evidence.trio, name), test) for name in MODELS}
    p, unit = rows.size.double(), curvature(task, rows, rows.size.double())
    by_size = Shape(tight=float(p.mean()) / p)
    for name, shape in (("best lambda", None), ("best c/n", by_size)):
        points = path(task, rows, p, SCALES * unit, shape)
        out[name] = min((row_losses(task, point.v, test) for point in points), key=lambda loss: float(loss.mean()))
    out[CHOSEN] = row_losses(task, chosen(task, rows, choice, evidence), test)
    if mixed and clients.kind == REGRESSION:
        out["mixed"] = mixed_model(rows, test)
    plan = f"plan {choice.plan.family} x{choice.plan.value:.3g}, {len(choice.own)} leave"
    return Found({"advised": out.pop("personal"), **out}, plan, predictive(task, rows, test, evidence))


def chosen(task, rows, choice: Choice, evidence: Evidence) -> torch.Tensor:
    """The models of alone, common or a single lambda, by losses on held-out rows."""
    table = choice.table[choice.table["family"].isin((ALONE, COMMON, LAMBDA))]
    best = table.loc[table["loss"].idxmin()]
    if best["family"] == LAMBDA:
        return next(path(task, rows, rows.size.double(), [best["value"]], ridge=best["ridge"])).v
    return evidence.trio.alone if best["family"] == ALONE else evidence.trio.common


def split_judged(folder: Path, name: str, seed: int | None, mixed: bool) -> Found:
    return judged(table(folder, name, seed), mixed)


def kept(folder: Path | None, name: str, work: Callable[[], Found]) -> Found:
    """A split's figures, from the folder if an earlier run left them there."""
    if folder is None:
        return work()
    file = folder / f"{name}.npz"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        found, unfinished = work(), folder / "unfinished.npz"
        parts = {f"loss.{k}": v.numpy() for k, v in found.loss.items()} | {f"z.{k}": v for k, v in found.scores.items()}
        np.savez(unfinished, plan=found.plan, **parts)
        unfinished.rename(file)
    with np.load(file) as held:
        loss, scores = ({k.split(".")[1]: held[k] for k in held if k.startswith(f"{part}.")} for part in ("loss", "z"))
        return Found({k: torch.from_numpy(v) for k, v in loss.items()}, str(held["plan"]), scores)


def predictive(task, rows, test, evidence) -> dict[str, np.ndarray]:
    """(d - g) / sqrt(sd^2 + e^2) of every client with test rows; about standard normal if all is well."""
    found = priors(task, rows)
    if evidence.gain is None or not found:
        return {}
    known = posterior_of(task, rows, with_own_noise(task, rows, found).noise, likely_variance(found))
    seen, pairs = witnesses_of(tally_of(task, test, evidence.trio)), pairs_of(evidence.trio)
    scores = {}
    for name, gain in zip(PAIRS, gains(task, known, at_rows(task, test), pairs, shares(rows))):
        gain = trusted(gain, trust(evidence.seen[name]))
        z = (seen[name].observed - gain.expected) / (gain.spread**2 + gain.noise).sqrt()
        scores[name] = z[test.size > 0].numpy()
    return {name: z for name, z in scores.items() if name.startswith("personal")}


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


def over_each(means: list[dict[str, float]]) -> str:
    """The advised loss over each single rival's, on average over the splits, with its error over them."""
    parts = []
    for rival in (name for name in means[0] if name != "advised"):
        more = np.array([mean["advised"] / mean[rival] - 1 for mean in means])
        error = f" (error {more.std(ddof=1) / len(more) ** 0.5:.2%})" if len(more) > 1 else ""
        parts.append(f"{rival} {more.mean():+.2%}{error}")
    return ", ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--splits", type=int, default=10)
    parser.add_argument("--tables", default=",".join(TABLES))
    parser.add_argument("--quick", action="store_true", help="the given split only")
    parser.add_argument("--mixed", action="store_true")
    parser.add_argument("--keep", type=Path, help="a folder for finished splits")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    every: list[float] = []
    every_z: dict[tuple[str, str], list[np.ndarray]] = {}
    for name in asked.tables.split(","):
        means: list[dict[str, float]] = []
        chosens: list[float] = []
        for seed in [None, *range(1, 1 + (0 if asked.quick else asked.splits))]:
            split = "given" if seed is None else str(seed)
            work = partial(split_judged, asked.data_dir, name, seed, asked.mixed)
            found, plan, scores = kept(asked.keep, f"{name}_{split}{'_mixed' * asked.mixed}", work)
            mean = {k: float(v.mean()) for k, v in found.items()}
            best = min((k for k in mean if k not in ("advised", CHOSEN)), key=mean.get)
            difference = found["advised"] - found[best]
            error = float(difference.std()) / len(difference) ** 0.5
            excess = mean["advised"] / mean[best] - 1
            every.append(excess)
            chosens.append(mean[CHOSEN] / mean[best] - 1)
            means.append(mean)
            shown = " ".join(f"{k} {v:.4f}" for k, v in mean.items())
            off = f"excess {excess:+.2%} over {best} ({float(difference.mean()) / max(error, 1e-12):+.1f} se)"
            z = ", ".join(f"{pair.split()[-1]} {np.std(part):.2f}" for pair, part in scores.items())
            print(f"{name:14} {split:>5}  {shown}  {off}  {plan}  z {z}", flush=True)
            for pair, part in scores.items():
                every_z.setdefault((name, pair), []).append(part)
        print(f"{name:14} mean excess {np.mean(every[-len(means) :]):+.2%}; over {over_each(means)}", flush=True)
        print(f"{name:14} mean excess of the one chosen on training rows: {np.mean(chosens):+.2%}", flush=True)
        for (_, pair), parts in ((key, parts) for key, parts in every_z.items() if key[0] == name):
            z = np.concatenate(parts)
            print(
                f"{name:14} {pair}: predictive z has mean {z.mean():+.2f}, standard deviation {z.std():.2f}", flush=True
            )
    print(f"mean excess over the best of the others, {len(every)} splits: {np.mean(every):+.2%}")


if __name__ == "__main__":
    main()
