"""`--track`: log a finished run to MLflow or TensorBoard, from its directory.

MLflow writes to MLFLOW_TRACKING_URI (without it, to `mlruns` in this folder), TensorBoard's events are in
`tensorboard/NAME`. Parameters are those of run.toml, metrics the losses by round and the losses at the end.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mooring.core.errors import RequestError
from mooring.report.report_contents import ReportContents, collect_contents
from mooring.runs.directory import REPORT_FILE, RUN_FILE, open_run

EXPERIMENT, EVENTS = "mooring", "tensorboard"
MAX_PARAMETER_CHARACTERS = 200  # characters of a parameter


def log_run(run: str | Path, to: str) -> str:
    """Log a run to a tracker; return its location."""
    check_tracker(to)
    return TRACKERS[to](Path(run), collect_contents(run))


def check_tracker(to: str) -> None:
    """Refuse an unknown tracker, or one whose package is not installed."""
    if to not in TRACKERS:
        raise RequestError(f"--track takes {' or '.join(TRACKERS)}, got {to!r}.")
    if find_spec(to) is None:
        raise RequestError(f"--track {to} needs the package {to}: pip install 'mooring-fl[{to}]'.")


def log_to_mlflow(run: Path, contents: ReportContents) -> str:
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # newer versions require a database otherwise
    import mlflow

    location = os.environ.get("MLFLOW_TRACKING_URI") or Path("mlruns").resolve().as_uri()
    mlflow.set_tracking_uri(location)
    mlflow.set_experiment(EXPERIMENT)
    with mlflow.start_run(run_name=contents.name):
        mlflow.log_params(dict(flatten_parameters(open_run(run).run.model_dump(exclude_none=True))))
        for name, step, value in iterate_losses(contents):
            mlflow.log_metric(name, value, step=step)
        mlflow.log_metrics(collect_final_losses(contents))
        for name in (REPORT_FILE, RUN_FILE):
            if (run / name).is_file():
                mlflow.log_artifact(str(run / name))
    return location


def log_to_tensorboard(run: Path, contents: ReportContents) -> str:
    from torch.utils.tensorboard import SummaryWriter

    location = Path(EVENTS) / contents.name
    with SummaryWriter(str(location)) as writer:  # type: ignore[no-untyped-call]
        for name, step, value in iterate_losses(contents):
            writer.add_scalar(name, value, step)  # type: ignore[no-untyped-call]
        for name, value in collect_final_losses(contents).items():
            writer.add_scalar(name, value)  # type: ignore[no-untyped-call]
        settings = dict(flatten_parameters(open_run(run).run.model_dump(exclude_none=True)))
        writer.add_text("run.toml", "\n".join(f"    {k} = {v}" for k, v in settings.items()))  # type: ignore[no-untyped-call]
    return str(location)


def flatten_parameters(table: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """Yield the settings of a run by their dotted names."""
    for key, value in table.items():
        name = f"{before}{key}"
        if isinstance(value, Mapping):
            yield from flatten_parameters(value, f"{name}.")
        elif name != "mooring.seal":
            yield name, str(value)[:MAX_PARAMETER_CHARACTERS]


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


TRACKERS = {"mlflow": log_to_mlflow, "tensorboard": log_to_tensorboard}
