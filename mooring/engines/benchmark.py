"""`benchmark`: methods on several data sets under several seeds, each tuned on validation rows and compared by ranks.

    out/DATA/seed-K/METHOD   a comparison of the method's settings (`compare.py`); those that exist are not run again
    results.csv              one row per data set, seed and method: the setting with the least validation loss
    ranks.csv                one row per method: mean rank, wins, ties, and a paired test against the best
    table.csv, table.tex     mean test loss and its deviation over seeds, one column per data set
    benchmark.json           all of it, the tests included

Losses that agree to SIGNIFICANT_DIGITS digits are ties and share their rank. Friedman's test asks whether mean ranks
differ; Nemenyi's critical difference is how far two mean ranks must be apart; Wilcoxon's signed-rank tests compare each
method with the one of the best mean rank, adjusted by Holm (Demsar, JMLR 2006). Blocks are data sets, with losses
averaged over seeds; of fewer than MIN_DATA_SETS data sets they are data sets and seeds, which are not independent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy.stats import friedmanchisquare, rankdata, studentized_range, wilcoxon

from mooring.algorithms.base import GROUPS, algorithm_names, find
from mooring.core.errors import RequestError
from mooring.core.types import JsonObject, NamedValues
from mooring.core.user_code import is_spec
from mooring.engines.compare import Comparison, compare, resume_comparison
from mooring.engines.progress import OnProgress, ignore_progress
from mooring.runs.atomic_files import csv_bytes, write_atomically, write_json
from mooring.runs.directory import COMPARISON_FILE, open_run

SIGNIFICANT_DIGITS = 4
ALPHA = 0.05  # level of all tests
MIN_DATA_SETS = 3  # to be the blocks of tests
LAM_GRID = (0.01, 0.1, 1.0)  # beside the default, of methods with a lambda
RESULTS_CSV, RANKS_CSV, TABLE_CSV, TABLE_TEX = "results.csv", "ranks.csv", "table.csv", "table.tex"
BENCHMARK_FILE = "benchmark.json"


class BenchmarkTests(NamedTuple):
    """Tests of mean ranks."""

    friedman: float  # the statistic; NaN of fewer than three methods
    p_value: float
    critical_difference: float  # Nemenyi's, of mean ranks
    blocks: int
    block: str  # "data sets", or "data sets and seeds"


class BenchmarkResult(NamedTuple):
    results: pd.DataFrame
    ranks: pd.DataFrame
    table: pd.DataFrame
    tests: BenchmarkTests
    notes: list[str]
    out: Path


def benchmark(
    sources: Sequence[str],
    methods: Sequence[str],
    out: str | Path,
    *,
    seeds: int = 3,
    tune: bool = True,
    grids: Mapping[str, Mapping[str, Sequence[object]]] | None = None,
    progress: OnProgress = ignore_progress,
    trust_code: bool = False,
    **options: Any,
) -> BenchmarkResult:
    """Run or resume a benchmark. `methods` are names, groups (`global`, `personal`, `clustered`, `baseline`) or `all`;
    `grids` are settings to try by method and hyperparameter. `options` are those of `compare`, for every source."""
    if seeds < 1:
        raise RequestError(f"seeds must be a whole number >= 1, got {seeds}.")
    out, names = Path(out), expand_methods(methods)
    titles = _title_sources(sources)
    notes, rows = list[str](), list[JsonObject]()
    first, total = int(options.pop("seed", 0) or 0), len(sources) * seeds * len(names)
    skipped: dict[str, str] = {}
    for title, source in titles.items():
        for seed in range(first, first + seeds):
            for name in names:
                if name in skipped:
                    continue
                progress(f"{title}, seed {seed}: {name}", len(rows), total)
                settings = list_settings(name, (grids or {}).get(name), tune)
                place = out / title / f"seed-{seed}" / name.replace("/", "_").replace(":", "-")
                try:
                    comparison = _run_method(source, settings, place, seed, trust_code, options)
                except RequestError as error:
                    if name in methods:
                        raise
                    skipped[name] = str(error)
                    continue
                rows.append(
                    {"data": title, "seed": seed, "method": name, "metric": comparison.metric} | choose(comparison)
                )
    notes += [f"{name} was left out: {reason}" for name, reason in skipped.items()]
    results = pd.DataFrame([row for row in rows if row["method"] not in skipped])
    if results.empty or results["method"].nunique() < 2:
        raise RequestError(
            "a benchmark compares two methods or more; " + "; ".join(notes or ["name them by --methods."])
        )
    ranks, tests = rank_methods(results)
    if tests.block != "data sets":
        notes.append(f"With fewer than {MIN_DATA_SETS} data sets, tests use data sets and seeds as blocks.")
    table = tabulate(results)
    result = BenchmarkResult(results, ranks, table, tests, notes, out)
    write_benchmark(result)
    return result


def expand_methods(methods: Sequence[str]) -> list[str]:
    """Return the names of methods, with groups replaced by their methods."""
    names: list[str] = []
    for method in methods:
        if method == "all" or method in GROUPS:
            names += [name for name in algorithm_names() if method == "all" or find(name).group == method]
        else:
            if not is_spec(method):
                find(method.split()[0])
            names.append(method)
    return list(dict.fromkeys(names))


def list_settings(name: str, grid: Mapping[str, Sequence[object]] | None, tune: bool) -> list[str]:
    """The settings of a method that validation rows choose from, as `compare` takes them; its defaults come first."""
    settings = [name]
    if grid is None and tune and not is_spec(name) and " " not in name:
        has_lam = "lam" in {field.name for field in fields(find(name))}  # type: ignore[arg-type]
        grid = {"lam": LAM_GRID} if has_lam else {}
    for field, values in (grid or {}).items():
        settings += [f"{name} {field}={value}" for value in values]
    return settings


def choose(comparison: Comparison) -> JsonObject:
    """Return the setting with the least validation loss; without validation rows the first one."""
    table = comparison.methods.reset_index(drop=True)
    losses = table["validation_loss"].to_numpy(float)
    best = int(np.nanargmin(losses)) if np.isfinite(losses).any() else 0
    row = table.iloc[best]
    return {
        "setting": row["method"],
        **{name: float(row[name]) for name in ("validation_loss", "test_loss", "seconds")},
    }


def _title_sources(sources: Sequence[str]) -> dict[str, str]:
    titles = {Path(source).stem: str(source) for source in sources}
    if len(titles) < len(sources):
        raise RequestError("two data sets have the same name; a benchmark names its folders after them.")
    return titles


def _run_method(
    source: str, settings: list[str], place: Path, seed: int, trust_code: bool, options: NamedValues
) -> Comparison:
    """Run a method's settings on one data set with one seed: start, resume, or read a finished comparison."""
    if (place / COMPARISON_FILE).is_file():
        stored = open_run(place).comparison
        empty = pd.DataFrame()
        return Comparison(stored["metric"], pd.DataFrame(stored["methods"]), empty, place, [], empty, empty)
    if place.exists():
        return resume_comparison(place, trust_code=trust_code)
    place.parent.mkdir(parents=True, exist_ok=True)
    return compare(source, settings, out=place, seed=seed, trust_code=trust_code, **options)  # type: ignore[arg-type]


def rank_methods(results: pd.DataFrame) -> tuple[pd.DataFrame, BenchmarkTests]:
    """Mean ranks with wins, ties and paired tests, the best first; and the tests of all ranks."""
    is_few = results["data"].nunique() < MIN_DATA_SETS
    keys = ["data", "seed"] if is_few else ["data"]
    losses = results.pivot_table(index=keys, columns="method", values="test_loss", aggfunc="mean")
    losses = losses.dropna(axis=0)
    rounded = losses.map(round_loss)
    ranks = pd.DataFrame(np.apply_along_axis(rankdata, 1, rounded.to_numpy()), losses.index, losses.columns)
    count, blocks = len(ranks.columns), len(ranks)
    mean = ranks.mean().sort_values(kind="stable")
    best = str(mean.index[0])
    least = rounded.min(axis=1)
    is_least = rounded.eq(least, axis=0)
    shared = is_least.sum(axis=1) > 1
    raw = {str(name): _paired_p_value(rounded[name], rounded[best]) for name in mean.index if name != best}
    adjusted = _holm(raw)
    table = pd.DataFrame(
        {
            "method": mean.index,
            "mean_rank": mean.to_numpy(),
            "wins": [int((is_least[name] & ~shared).sum()) for name in mean.index],
            "ties": [int((is_least[name] & shared).sum()) for name in mean.index],
            "p_value_against_best": [adjusted.get(str(name), math.nan) for name in mean.index],
        }
    )
    friedman, p_value = math.nan, math.nan
    if count > 2 and blocks > 1 and bool((rounded.nunique(axis=1) > 1).any()):
        friedman, p_value = map(float, friedmanchisquare(*(rounded[name] for name in rounded)))
    quantile = float(studentized_range.ppf(1 - ALPHA, count, np.inf)) / math.sqrt(2)
    difference = quantile * math.sqrt(count * (count + 1) / (6 * blocks))
    return table, BenchmarkTests(
        friedman, p_value, difference, blocks, "data sets and seeds" if is_few else "data sets"
    )


def round_loss(value: float) -> float:
    """Return a loss with SIGNIFICANT_DIGITS digits; equal ones are ties."""
    return float(f"{value:.{SIGNIFICANT_DIGITS - 1}e}")


def _paired_p_value(first: pd.Series, second: pd.Series) -> float:
    """Wilcoxon's signed-rank test; 1 if all blocks are ties."""
    differences = (first - second).to_numpy()
    return float(wilcoxon(differences, zero_method="zsplit").pvalue) if (differences != 0).any() else 1.0


def _holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """p-values adjusted for their number."""
    adjusted, largest = dict[str, float](), 0.0
    for k, (name, value) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        largest = max(largest, min(1.0, value * (len(p_values) - k)))
        adjusted[name] = largest
    return adjusted


def tabulate(results: pd.DataFrame) -> pd.DataFrame:
    """One row per method: the mean test loss of each data set and its deviation over seeds."""
    groups = results.groupby(["method", "data"], sort=False)["test_loss"]
    table = pd.DataFrame({"mean": groups.mean(), "sd": groups.std()}).unstack("data")
    table.columns = [data if part == "mean" else f"{data}_sd" for part, data in table.columns]
    return table.reset_index()


def format_latex(result: BenchmarkResult) -> str:
    """The table for a paper: means with deviations, the best of a column in bold, ties with it as well."""
    data = list(dict.fromkeys(result.results["data"]))
    ranks = result.ranks.set_index("method")["mean_rank"]
    table = result.table.set_index("method").loc[ranks.index]
    least = {name: table[name].map(round_loss).min() for name in data}
    lines = [
        r"\begin{tabular}{l" + "r" * (len(data) + 1) + "}",
        r"\toprule",
        " & ".join(["method", *map(_escape, data), "mean rank"]) + r" \\",
        r"\midrule",
    ]
    for name, row in table.iterrows():
        cells = []
        for column in data:
            text = f"{row[column]:.4g}" + (
                "" if math.isnan(row[f"{column}_sd"]) else rf" $\pm$ {row[f'{column}_sd']:.2g}"
            )
            cells.append(rf"\textbf{{{text}}}" if round_loss(row[column]) == least[column] else text)
        lines.append(" & ".join([_escape(str(name)), *cells, f"{ranks[name]:.2f}"]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def _escape(text: str) -> str:
    return text.replace("_", r"\_").replace("%", r"\%")


def write_benchmark(result: BenchmarkResult) -> None:
    """The tables, as CSV, LaTeX and JSON."""
    for name, table in ((RESULTS_CSV, result.results), (RANKS_CSV, result.ranks), (TABLE_CSV, result.table)):
        write_atomically(result.out / name, csv_bytes(table))
    write_atomically(result.out / TABLE_TEX, format_latex(result).encode())
    write_json(result.out / BENCHMARK_FILE, as_json(result))


def as_json(result: BenchmarkResult) -> JsonObject:
    return {
        "ranks": result.ranks.to_dict("records"),
        "tests": result.tests._asdict() | {"names": "Friedman, Nemenyi, Wilcoxon with Holm's adjustment"},
        "table": result.table.to_dict("records"),
        "results": result.results.to_dict("records"),
        "notes": result.notes,
        "out": str(result.out),
    }
