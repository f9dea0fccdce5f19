"""Recommendations on grouped tables, with test rows withheld, against baselines that were fitted to the same rows.

    python -m benchmarks.advice_tables --tables FOLDER --out FOLDER [--part PART] [--splits 2] [--by-time]
                                       [--shape SHAPE] [--baselines FOLDER] [--only NAME,NAME] [--show]

Tables come from `benchmarks.tables_fetch`, splits from `benchmarks.tables.split_of`, baselines (--baselines) from
`benchmarks.table_baselines`. `advise` sees train and validation rows only; OUT/NAME/SPLIT.npz has its test losses
row by row,
and what it stated about every client. Finished splits are skipped, so that an interrupted run can be resumed. --show
runs nothing and prints, over all tables that are there:

    excess        of the recommended and of the personal models over the best linear baseline, and over the best of all
                  baselines, picked in hindsight on the test rows; and of each single baseline over the latter
    recommended   the share of clients with each model
    coverage      of the federation's 95% interval: how often it contains what test rows show, whose own error counts
    calibration   of the probability that a client's personal model is better than its local and than the global one, by
                  test rows, whose error counts: differences between stated and seen shares, over ten groups. The error
                  of a mean over few test rows is taken as normal, and, resampled, as a mean of deviations of the
                  table's test rows: one row shows the sign of a median, and losses are skewed. "by chance" is the
                  calibration error that probabilities which are exactly right would have
"""

from __future__ import annotations

import argparse
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy.special import stdtr

from benchmarks.tables import Entry, list_tables, read_table, split_of, splits_of
from benchmarks.tables_catalog import DESIGN, PARTS
from mooring.advice.advise import run_advice
from mooring.advice.evaluation.loss_sums import ALTERNATIVES, MODEL_KINDS, LossSums
from mooring.advice.inference.improvements import compare_models, estimate_improvements, estimate_unit_variances
from mooring.advice.inference.recommendation import recommend
from mooring.data.folds import row_losses
from mooring.engines.prepare import prepare
from mooring.engines.request import request

KINDS = {"regression": "regression", "binary": "binary", "count": "count", "multiclass": "classes"}
MIN_ROWS = 3
GROUPS = 10  # of stated probabilities
RESAMPLES = 200  # means over as many test rows as a client has
SIZES = ((1, 7), (8, 15), (16, 39), (40, 10**9))  # rows of a client


def advise_table(folder: Path, entry: Entry, split: int | str, shape: str | None) -> dict[str, np.ndarray]:
    """Test losses by row with each model, the recommendation, and the sums behind it."""
    frame = read_table(folder, entry)
    columns = [entry["client"], entry["target"], *entry["features"]]
    table = frame[columns].assign(split=split_of(frame, entry, split))
    text = [name for name in entry["features"] if table[name].dtype == object or table[name].dtype == "string"]
    table = table.astype(dict.fromkeys(text, "category"))  # codes of levels, as the baselines take them
    options: dict[str, Any] = {} if shape is None else {"shape": shape}
    if split == "time":
        options |= {"time_column": entry["time"], "features": entry["features"]}
        table = table.assign(**{entry["time"]: frame[entry["time"]]})
    advice_request = request(
        table,
        purpose="advise",
        client=entry["client"],
        target=entry["target"],
        target_type=KINDS[entry["kind"]],
        split="split",
        min_rows=MIN_ROWS,
        drop_small=True,
        theory=False,
        threads=1,
        **options,
    )
    job = prepare(advice_request, table)
    began = time.process_time()
    advice = run_advice(job)
    seconds = time.process_time() - began
    clients, task = advice.job.clients, advice.job.task
    unit = clients.target_scale**task.unit_power
    models = advice.evidence.models
    models_by_name = dict(zip(MODEL_KINDS, models.each())) | {"recommended": advice.models.recommended}
    place = clients.placement[clients.placement["part"] == "test"]
    code = pd.Index(clients.names).get_indexer(place["client"])
    place = place.iloc[np.argsort(code, kind="stable")]
    out = {name: row_losses(task, w, clients.test, unit).numpy() for name, w in models_by_name.items()}
    out |= {f"held_{k}": v.numpy() for k, v in advice.evidence.held._asdict().items()}
    out |= {f"own_{k}": v.numpy() for k, v in advice.evidence.own._asdict().items()}
    assert advice.evidence.fitted is not None
    out |= {f"fitted_{k}": v.numpy() for k, v in advice.evidence.fitted._asdict().items()}
    sizes = {"test_size": clients.test.size.numpy(), "unit": np.array(unit), "seconds": np.array(seconds)}
    return out | sizes | {"row": place["row"].to_numpy(), "recommendation": advice.clients["recommended"].to_numpy(str)}


def read_result(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as stored:
        return dict(stored)


def sums_of(result: dict[str, np.ndarray], prefix: str) -> LossSums:
    return LossSums(*(torch.from_numpy(result[f"{prefix}_{name}"]) for name in LossSums._fields))


class Table:
    """What one table and split shows; averages over splits of a table count as one table."""

    def __init__(self, result: dict[str, np.ndarray], baselines: dict[str, np.ndarray] | None):
        self.result, self.held, self.own = result, sums_of(result, "held"), sums_of(result, "own")
        self.answer = recommend(self.held, self.own, fitted=sums_of(result, "fitted"))
        owner = np.repeat(np.arange(len(result["test_size"])), result["test_size"])
        rows = np.arange(len(owner))
        kinds = self.answer.recommended
        losses = np.stack([result[name] for name in MODEL_KINDS])
        pick = np.array([MODEL_KINDS.index(kind) for kind in kinds])[owner] if len(owner) else np.zeros(0, int)
        self.loss = {name: result[name] for name in MODEL_KINDS} | {"recommended": losses[pick, rows]}
        self.owner = owner
        self.baselines: dict[str, float] = {}
        if baselines is not None:
            place = pd.Series(np.arange(len(baselines["test_row_index"])), index=baselines["test_row_index"])
            at = place.reindex(result["row"])
            if at.notna().all() and len(at):
                at = at.to_numpy(int)
                names = [n for n in baselines if n.startswith(("linear.", "trees."))]
                self.baselines = {n: float(baselines[n][at].mean()) for n in names if np.isfinite(baselines[n]).all()}

    def excess(self, model: str, group: str) -> float:
        """Return the excess of a model's mean test loss over that of the best baseline of a group ("" for all), in
        percent."""
        rivals = [loss for name, loss in self.baselines.items() if name.startswith(group)]
        return 100 * (self.loss[model].mean() / min(rivals) - 1) if rivals and min(rivals) > 0 else np.nan

    def calibration(self, other: str) -> pd.DataFrame:
        """Return, per client with test rows, the stated probability that personal is better, the observed gain and
        n."""
        gains = compare_models(estimate_improvements(self.held, self.own), "personal", other)
        gap, m = self.loss[other] - self.loss["personal"], len(self.result["test_size"])
        n = np.bincount(self.owner, minlength=m)
        mean = np.bincount(self.owner, gap, minlength=m) / np.maximum(n, 1)
        unit = float(self.result["unit"])
        error = unit * np.sqrt(self.deviation_variance(ALTERNATIVES.index(other)) / np.maximum(n, 1))
        center, sd = unit * gains.mean.numpy(), unit * gains.sd.numpy()
        frame = pd.DataFrame(
            {"stated": gains.probability.numpy(), "mean": center, "sd": sd, "seen": mean, "error": error, "n": n}
        )
        total, scale = np.sqrt(np.maximum(sd**2 + error**2, 1e-300)), np.maximum(sd, 1e-300)
        freedom = gains.freedom.numpy() * np.minimum(total / scale, 1e9) ** 4  # Satterthwaite, of an exact error
        frame["expected"] = stdtr(freedom, center / total)
        row_error = error * np.sqrt(np.maximum(n, 1))
        has_error = row_error[self.owner] > 0
        pool = (gap - center[self.owner])[has_error] / row_error[self.owner][has_error]
        pool = pool / np.sqrt(np.mean(pool**2)) if len(pool) else np.zeros(1)
        rng = np.random.default_rng(0)
        draws = [rng.choice(pool, (RESAMPLES, max(k, 1))).mean(1) for k in n]
        shifted = center[:, None] + row_error[:, None] * np.array(draws)
        frame["resampled"] = stdtr(gains.freedom.numpy()[:, None], shifted / scale[:, None]).mean(1)
        return frame[(n > 0) & (np.abs(mean) > 1e-12 * np.abs(self.loss["personal"].mean()))]

    def deviation_variance(self, k: int) -> np.ndarray:
        """Return [m]: the variance of a row's difference around its mean, by held-out rows."""
        unit = estimate_unit_variances(self.held, k).value
        return (unit * self.held.divergence[:, k] / self.held.rows.clamp(min=1)).numpy()

    def covered(self, other: str) -> tuple[bool, float]:
        """Whether the federation's interval, widened by the test rows' own clustered error, contains what they show."""
        line, unit = self.answer.personal_line[other], float(self.result["unit"])
        gap = self.loss[other] - self.loss["personal"]
        m = len(self.result["test_size"])
        total, n = np.bincount(self.owner, gap, minlength=m), np.bincount(self.owner, minlength=m)
        seen = total.sum() / max(n.sum(), 1)
        has_rows = n > 0
        error = np.sqrt(((total - seen * n)[has_rows] ** 2).sum() * has_rows.sum() / max(has_rows.sum() - 1, 1)) / max(
            n.sum(), 1
        )
        half = unit * (line.high - line.low) / 2
        return abs(seen - unit * line.mean) <= np.hypot(half, 1.96 * error), float(
            half / max(self.loss["personal"].mean(), 1e-300)
        )


def calibration_error(stated: np.ndarray, seen: np.ndarray, groups: int = GROUPS) -> float:
    """The mean absolute difference of stated and seen shares over groups of equal size."""
    order = np.argsort(stated, kind="stable")
    parts = [part for part in np.array_split(order, groups) if len(part)]
    return float(sum(len(part) * abs(stated[part].mean() - seen[part].mean()) for part in parts) / max(len(stated), 1))


def chance_error(stated: np.ndarray) -> float:
    """The mean calibration error where what is seen has just the stated probabilities."""
    rng = np.random.default_rng(0)
    return float(np.mean([calibration_error(stated, rng.random(len(stated)) < stated) for _ in range(RESAMPLES)]))


def show(folder: Path, entries: list[Entry], splits: int, by_time: bool, baselines: Path | None) -> None:
    for label, is_selected in (("random splits", lambda s: s != "time"), ("split by time", lambda s: s == "time")):
        tables: dict[str, list[Table]] = {}
        for entry in entries:
            for split in splits_of(entry, splits, by_time):
                path = folder / entry["name"] / f"{split}.npz"
                rival = None if baselines is None else baselines / entry["name"] / f"{split}.npz"
                if is_selected(split) and path.exists():
                    stored = read_result(rival) if rival is not None and rival.exists() else None
                    tables.setdefault(entry["name"], []).append(Table(read_result(path), stored))
        if tables:
            print(f"\n{label}: {len(tables)} tables, {sum(map(len, tables.values()))} runs")
            describe(tables)


def describe(tables: dict[str, list[Table]]) -> None:
    rows = []
    for name, parts in tables.items():
        row: dict[str, Any] = {"table": name, "seconds": np.mean([float(p.result["seconds"]) for p in parts])}
        for model in ("recommended", "personal"):
            row[f"{model}/linear"] = np.mean([p.excess(model, "linear.") for p in parts])
            row[f"{model}/all"] = np.mean([p.excess(model, "") for p in parts])
        row["over personal"] = np.mean(
            [100 * (p.loss["recommended"].mean() / p.loss["personal"].mean() - 1) for p in parts]
        )
        for kind in MODEL_KINDS:
            row[kind] = np.mean([(p.answer.recommended == kind).mean() for p in parts])
        rows.append(row)
    frame = pd.DataFrame(rows).set_index("table")
    print(frame.round(2).to_string())
    for column in ("recommended/linear", "personal/linear", "over personal"):
        part = frame[column].dropna()
        if len(part):
            middle = f"mean {part.mean():+.2f}%, median {part.median():+.2f}%"
            print(f"{column}: {middle}, worst {part.max():+.1f}% ({part.idxmax()}), {len(part)} tables")
    for column in ("recommended/all", "personal/all"):
        part = frame[column].dropna()
        if len(part):
            mean = 100 * (np.exp(np.log1p(part / 100).mean()) - 1)
            print(f"{column}: geometric mean {mean:+.1f}%, worst {part.max():+.0f}% ({part.idxmax()})")
    describe_baselines([[part.baselines for part in parts if part.baselines] for parts in tables.values()])
    for other in ALTERNATIVES:
        describe_evidence([table for parts in tables.values() for table in parts], other)


def describe_baselines(tables: list[list[dict[str, float]]]) -> None:
    """Print how far each single baseline is from the best of all, which is picked in hindsight."""
    rows = [
        pd.DataFrame(
            [{name: np.log(loss / min(part.values())) for name, loss in part.items()} for part in parts]
        ).mean()
        for parts in tables
        if parts and min(min(part.values()) for part in parts) > 0
    ]
    frame = pd.DataFrame(rows)
    for name, mean in frame.dropna(axis=1).mean().sort_values().items():
        excess = f"geometric mean {100 * np.expm1(mean):+.1f}%, {len(frame)} tables"
        print(f"    single baseline {name} over the best of all: {excess}")


def describe_evidence(tables: list[Table], other: str) -> None:
    """Print coverage and calibration against one other model."""
    covered = [table.covered(other) for table in tables]
    half = 100 * np.median([width for _, width in covered])
    print(
        f"against {other}: covered {np.mean([hit for hit, _ in covered]):.2f} of {len(covered)}, half-width {half:.1f}%"
    )
    cal = pd.concat([table.calibration(other) for table in tables])
    for name, part in (
        ("all clients", cal),
        ("high", cal[cal["stated"] >= 0.95]),
        ("high or moderate", cal[cal["stated"] >= 0.8]),
        *((f"{a} to {b} rows", cal[(4 * cal["n"] >= a) & (4 * cal["n"] <= b)]) for a, b in SIZES),
    ):
        if len(part):
            seen = (part["seen"] > 0).to_numpy(float)
            texts = [f"    {name} ({len(part)}): seen better {seen.mean():.3f}"]
            for column in ("expected", "resampled"):
                error = calibration_error(part[column].to_numpy(), seen)
                texts.append(f"{column} {part[column].mean():.3f}, calibration error {error:.3f}")
            texts.append(f"by chance {chance_error(part['resampled'].to_numpy()):.3f}")
            print("; ".join(texts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", choices=PARTS, default=DESIGN)
    parser.add_argument("--splits", type=int, default=2)
    parser.add_argument("--by-time", action="store_true")
    parser.add_argument("--shape")
    parser.add_argument("--baselines", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--show", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    selected = [name for name in options.only.split(",") if name]
    entries = [e for e in list_tables(options.tables, options.part) if not selected or e["name"] in selected]
    for entry in [] if options.show else entries:
        for split in splits_of(entry, options.splits, options.by_time):
            path = options.out / entry["name"] / f"{split}.npz"
            if path.exists():
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    result = advise_table(options.tables, entry, split, options.shape)
            except Exception as error:
                print(f"{entry['name']} {split}: FAILED {type(error).__name__}: {str(error)[:300]}", flush=True)
                continue
            np.savez(path.with_suffix(".part.npz"), **result)
            path.with_suffix(".part.npz").rename(path)
            losses = " ".join(f"{name} {result[name].mean():.5g}" for name in (*MODEL_KINDS, "recommended"))
            print(f"{entry['name']} {split}: {losses}; {float(result['seconds']):.1f} s", flush=True)
    show(options.out, entries, options.splits, options.by_time, options.baselines)


if __name__ == "__main__":
    main()
