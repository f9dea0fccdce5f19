"""Linear and tree baselines on grouped tables: test losses of each row, stored for comparison with Mooring.

    python -m benchmarks.table_baselines --tables FOLDER --out FOLDER [--part PART] [--splits 2] [--by-time]
                                --peers FOLDER [--only NAME,NAME] [--baselines NAME,NAME] [--limit SECONDS] [--show]

Tables come from `benchmarks.tables_fetch`, splits from `benchmarks.tables.split_of`. Every baseline is fitted on train
and validation rows (hyperparameters are chosen by validation rows, then the model is refitted on both) and scored on
test rows with the loss that Mooring uses for the kind of target. OUT/NAME/SPLIT.npz has the arrays test_row_index,
client and one array of losses per baseline (`linear.*`, `trees.*`); OUT/NAME/SPLIT.json has times, chosen
hyperparameters and failures. Finished splits are skipped, so that an interrupted run can be resumed. The baselines run
in the environment `trees` of benchmarks/peers/environments.sh, one process and one thread at a time. --show prints the
stored mean losses and runs nothing.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import time
from pathlib import Path

import numpy as np

from benchmarks.tables import Entry, list_tables, splits_of
from benchmarks.tables_catalog import DESIGN, PARTS

REPOSITORY = Path(__file__).resolve().parent.parent
INDEX_ARRAYS = ("test_row_index", "client")


def read_losses(out: Path, name: str, split: int | str) -> dict[str, np.ndarray]:
    """Arrays of one table and split: test_row_index, client, and losses by baseline."""
    with np.load(out / name / f"{split}.npz") as stored:
        return dict(stored)


def fit_baselines(options: argparse.Namespace, entry: Entry, split: int | str) -> str:
    """Run the baselines of one table and split in their environment; return "" or the end of the error output."""
    output = options.out.resolve() / entry["name"] / f"{split}.npz"
    python = options.peers.resolve() / "trees" / "bin" / "python"
    command = [python, "-m", "benchmarks.peers.with_baselines", options.tables.resolve(), entry["name"], split, output]
    command += [options.limit, *filter(None, options.baselines.split(","))]
    threads = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")}
    process = subprocess.run(
        [str(argument) for argument in command],
        cwd=REPOSITORY,
        env=os.environ | threads,
        capture_output=True,
        text=True,
    )
    return process.stderr.strip()[-500:] if process.returncode else ""


def describe(out: Path, name: str, split: int | str) -> str:
    """The best baseline of each group with its mean test loss."""
    means = {key: losses.mean() for key, losses in read_losses(out, name, split).items() if key not in INDEX_ARRAYS}
    parts = []
    for group in ("linear", "trees"):
        mean, best = min(((mean, key) for key, mean in means.items() if key.startswith(group)), default=(np.nan, "-"))
        parts.append(f"{best} {mean:.5g}")
    return ", ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--peers", type=Path, required=True, help="folder with the environment `trees`")
    parser.add_argument("--part", choices=PARTS, default=DESIGN)
    parser.add_argument("--splits", type=int, default=2, help="number of random splits")
    parser.add_argument("--by-time", action="store_true", help="also split by time where there is a time column")
    parser.add_argument("--only", default="", help="names of tables, separated by commas")
    parser.add_argument("--baselines", default="", help="fit these again and keep the others")
    parser.add_argument("--limit", type=float, default=600, help="seconds for one baseline")
    parser.add_argument("--show", action="store_true", help="print stored results only")
    options = parser.parse_args()
    selected = set(filter(None, options.only.split(",")))
    for entry in list_tables(options.tables, options.part):
        if selected and entry["name"] not in selected:
            continue
        for split in splits_of(entry, options.splits, options.by_time):
            stored = (options.out / entry["name"] / f"{split}.npz").exists()
            started, problem = time.monotonic(), ""
            if not options.show and (not stored or options.baselines):
                problem = fit_baselines(options, entry, split)
                stored = not problem
            label = f"{entry['name']:22} {entry['kind']:10} {split!s:>4} {time.monotonic() - started:6.0f} s"
            if stored:
                print(label, describe(options.out, entry["name"], split), flush=True)
            elif problem:
                print(label, "failed:", problem, flush=True)


if __name__ == "__main__":
    main()
