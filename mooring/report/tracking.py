"""`--track`: log a finished run to MLflow or TensorBoard, from its directory.

Parameters are those of run.toml, metrics the losses by round and the losses at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mooring.report.report_contents import ReportContents, collect_contents
from mooring.runs.directory import REPORT_FILE, RUN_FILE, open_run
from mooring.runs.trackers import open_tracker


def log_run(run: str | Path, to: str) -> str:
    """Log a run to a tracker; return its location."""
    contents = collect_contents(run)
    tracker = open_tracker(to, contents.name, open_run(run).run.model_dump(exclude_none=True))
    for name, step, value in iterate_losses(contents):
        tracker.log(name, value, step)
    for name, value in collect_final_losses(contents).items():
        tracker.log(name, value)
    for file in (REPORT_FILE, RUN_FILE):
        if (Path(run) / file).is_file():
            tracker.log_file(Path(run) / file)
    tracker.close()
    return tracker.location


def iterate_losses(contents: ReportContents) -> Iterator[tuple[str, int, float]]:
    """Yield (metric, round, value) of every evaluation; a comparison's metrics begin with the method."""
    for history in contents.rounds:
        before = f"{history['name']}/" if len(contents.rounds) > 1 else ""
        table = history["table"]
        for column in ("train_loss", "validation_loss", "test_loss"):
            for step, value in table[["round", column]].dropna().itertuples(index=False):
                yield f"{before}{column}", int(step), float(value)


def collect_final_losses(contents: ReportContents) -> dict[str, float]:
    """Return the final test loss of every model."""
    return {f"final_{row['name'].replace(' ', '_')}": float(row["loss"]) for row in contents.models}
