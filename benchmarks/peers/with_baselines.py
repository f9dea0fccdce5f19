"""Fit the baselines of one table and split; runs in the environment `trees` (see environments.sh).

    python -m benchmarks.peers.with_baselines TABLES_FOLDER NAME SPLIT OUTPUT.npz SECONDS [BASELINE ...]

Writes test_row_index, client and the losses of test rows of each baseline to OUTPUT.npz, and the time and the chosen
hyperparameters of each, or why it failed, to OUTPUT.json. Each baseline has a process of its own, ended after SECONDS.
Baselines that an existing OUTPUT.npz contains are kept; only those that are named, or all, are fitted.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

import numpy as np

from benchmarks.peers.baseline_rows import Problem, read_problem, row_losses
from benchmarks.peers.linear_baselines import list_linear_baselines
from benchmarks.peers.tree_baselines import list_tree_baselines
from benchmarks.tables import list_tables, read_table


def fit_one(problem: Problem, fit, folder: str) -> None:
    """Write a baseline's losses, or the error, to files of the folder."""
    warnings.simplefilter("ignore")
    try:
        prediction, chosen = fit(problem)
        losses = row_losses(problem.kind, problem.y[problem.test], np.asarray(prediction, float))
        if not np.isfinite(losses).all():
            raise FloatingPointError("a test loss is not finite")
        Path(folder, "chosen.txt").write_text(str(chosen))
        np.save(Path(folder, "losses.npy"), losses)
    except Exception:
        Path(folder, "error.txt").write_text(traceback.format_exc()[-1500:])


def fit_in_process(problem: Problem, fit, limit: float) -> tuple[np.ndarray | None, dict]:
    """Losses, or None, and a note: a process of its own, because an alarm does not interrupt compiled code."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        process = multiprocessing.get_context("fork").Process(target=fit_one, args=(problem, fit, folder))
        process.start()
        process.join(limit)
        note = {"seconds": round(time.monotonic() - started, 2)}
        if process.is_alive():
            process.kill()
            process.join()
            return None, note | {"failed": f"not finished within {limit:.0f} seconds"}
        if not Path(folder, "losses.npy").exists():
            error = Path(folder, "error.txt")
            return None, note | {"failed": error.read_text() if error.exists() else f"exit code {process.exitcode}"}
        return np.load(Path(folder, "losses.npy")), note | {"chosen": Path(folder, "chosen.txt").read_text()}


def main() -> None:
    folder, name, split, output, limit = Path(sys.argv[1]), *sys.argv[2:4], Path(sys.argv[4]), float(sys.argv[5])
    entry = next(entry for entry in list_tables(folder) if entry["name"] == name)
    problem = read_problem(folder, entry, int(split) if split.isdigit() else split)
    notes_file = output.with_suffix(".json")
    notes = json.loads(notes_file.read_text()) if notes_file.exists() else {}
    arrays = {}
    if output.exists():
        with np.load(output) as stored:
            arrays = dict(stored)
    arrays["test_row_index"] = np.flatnonzero(problem.test)
    arrays["client"] = read_table(folder, entry)[entry["client"]].to_numpy(str)[problem.test]
    baselines = list_linear_baselines(problem) | list_tree_baselines(problem)
    for baseline, fit in baselines.items():
        if sys.argv[6:] and baseline not in sys.argv[6:]:
            continue
        losses, notes[baseline] = fit_in_process(problem, fit, limit)
        arrays.pop(baseline, None)
        if losses is not None:
            arrays[baseline] = losses
    output.parent.mkdir(parents=True, exist_ok=True)
    unfinished = output.with_name(f"unfinished-{os.getpid()}.npz")
    np.savez_compressed(unfinished, **arrays)
    notes_file.write_text(json.dumps(notes, indent=1) + "\n")
    unfinished.rename(output)


if __name__ == "__main__":
    main()
