"""`--track`: a finished run told to MLflow or TensorBoard, from its directory alone.

MLflow goes where MLFLOW_TRACKING_URI says (without it, `mlruns` in this folder), TensorBoard's events into
`tensorboard/NAME`. Parameters are those of run.toml, metrics the losses by round and the losses at the end.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mooring.core.errors import RequestError
from mooring.report.contents import Contents, contents
from mooring.runs.directory import REPORT, RUN, open_run

EXPERIMENT, EVENTS = "mooring", "tensorboard"
LONGEST = 200  # characters of a parameter


def track(run: str | Path, to: str) -> str:
    """Tell a run to a tracker; where it is to be seen."""
    refuse_missing(to)
    return TRACKERS[to](Path(run), contents(run))


def refuse_missing(to: str) -> None:
    """A tracker that nobody knows, or whose package is not installed."""
    if to not in TRACKERS:
        raise RequestError(f"--track takes {' or '.join(TRACKERS)}, got {to!r}.")
    if find_spec(to) is None:
        raise RequestError(f"--track {to} needs the package {to}: pip install 'mooring-fl[{to}]'.")


def to_mlflow(run: Path, told: Contents) -> str:
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # newer versions ask for a data base otherwise
    import mlflow

    where = os.environ.get("MLFLOW_TRACKING_URI") or Path("mlruns").resolve().as_uri()
    mlflow.set_tracking_uri(where)
    mlflow.set_experiment(EXPERIMENT)
    with mlflow.start_run(run_name=told.name):
        mlflow.log_params(dict(parameters(open_run(run).run.model_dump(exclude_none=True))))
        for name, step, value in curves(told):
            mlflow.log_metric(name, value, step=step)
        mlflow.log_metrics(ends(told))
        for name in (REPORT, RUN):
            if (run / name).is_file():
                mlflow.log_artifact(str(run / name))
    return where


def to_tensorboard(run: Path, told: Contents) -> str:
    from torch.utils.tensorboard import SummaryWriter

    where = Path(EVENTS) / told.name
    with SummaryWriter(str(where)) as writer:  # type: ignore[no-untyped-call]
        for name, step, value in curves(told):
            writer.add_scalar(name, value, step)  # type: ignore[no-untyped-call]
        for name, value in ends(told).items():
            writer.add_scalar(name, value)  # type: ignore[no-untyped-call]
        settings = dict(parameters(open_run(run).run.model_dump(exclude_none=True)))
        writer.add_text("run.toml", "\n".join(f"    {k} = {v}" for k, v in settings.items()))  # type: ignore[no-untyped-call]
    return str(where)


def parameters(table: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """The settings of a run by their dotted names."""
    for key, value in table.items():
        name = f"{before}{key}"
        if isinstance(value, Mapping):
            yield from parameters(value, f"{name}.")
        elif name != "mooring.seal":
            yield name, str(value)[:LONGEST]


def curves(told: Contents) -> Iterator[tuple[str, int, float]]:
    """(metric, round, value) of every evaluation; a comparison's metrics begin with the method."""
    for one in told.rounds:
        before = f"{one['name']}/" if len(told.rounds) > 1 else ""
        table = one["table"]
        for column in ("train_loss", "validation_loss", "test_loss"):
            for step, value in table[["round", column]].dropna().itertuples(index=False):
                yield f"{before}{column}", int(step), float(value)


def ends(told: Contents) -> dict[str, float]:
    """The test loss of every model in the end."""
    return {f"final_{row['name'].replace(' ', '_')}": float(row["loss"]) for row in told.models}


TRACKERS = {"mlflow": to_mlflow, "tensorboard": to_tensorboard}
