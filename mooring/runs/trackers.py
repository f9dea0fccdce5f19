"""Trackers of experiments: MLflow and TensorBoard.

MLflow writes to MLFLOW_TRACKING_URI (without it, to `mlruns` in this folder), TensorBoard's events are in
`tensorboard/NAME`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from mooring.core.errors import RequestError
from mooring.core.types import NamedValues

EXPERIMENT, EVENTS = "mooring", "tensorboard"
MAX_PARAMETER_CHARACTERS = 200  # characters of a parameter


class Tracker(Protocol):
    """One run in a tracker."""

    location: str

    def log_parameters(self, parameters: Mapping[str, str]) -> None: ...
    def log(self, name: str, value: float, step: int = 0) -> None: ...
    def log_file(self, path: Path) -> None: ...
    def close(self, failed: bool = False) -> None: ...


class MLflow:
    """A run of MLflow, written through its client: a run that the user has active stays untouched."""

    def __init__(self, name: str):
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # newer versions require a database otherwise
        import mlflow

        self.location = os.environ.get("MLFLOW_TRACKING_URI") or Path("mlruns").resolve().as_uri()
        self.client = mlflow.MlflowClient(self.location)
        experiment = self.client.get_experiment_by_name(EXPERIMENT)
        number = self.client.create_experiment(EXPERIMENT) if experiment is None else experiment.experiment_id
        self.run = self.client.create_run(number, run_name=name).info.run_id

    def log_parameters(self, parameters: Mapping[str, str]) -> None:
        for name, value in parameters.items():
            self.client.log_param(self.run, name, value)

    def log(self, name: str, value: float, step: int = 0) -> None:
        self.client.log_metric(self.run, name, value, step=step)

    def log_file(self, path: Path) -> None:
        self.client.log_artifact(self.run, str(path))

    def close(self, failed: bool = False) -> None:
        self.client.set_terminated(self.run, "FAILED" if failed else "FINISHED")


class TensorBoard:
    """Events of TensorBoard."""

    def __init__(self, name: str):
        from torch.utils.tensorboard import SummaryWriter

        self.location = str(Path(EVENTS) / name)
        self.writer: Any = SummaryWriter(self.location)  # type: ignore[no-untyped-call]

    def log_parameters(self, parameters: Mapping[str, str]) -> None:
        self.writer.add_text("run.toml", "\n".join(f"    {k} = {v}" for k, v in parameters.items()))

    def log(self, name: str, value: float, step: int = 0) -> None:
        self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def log_file(self, path: Path) -> None:
        """Files are not among its events."""

    def close(self, failed: bool = False) -> None:
        self.writer.close()


TRACKERS: dict[str, Callable[[str], Tracker]] = {"mlflow": MLflow, "tensorboard": TensorBoard}


def check_tracker(to: str) -> None:
    """Refuse an unknown tracker, or one whose package is not installed."""
    if to not in TRACKERS:
        raise RequestError(f"--track takes {' or '.join(TRACKERS)}, got {to!r}.")
    if find_spec(to) is None:
        raise RequestError(f"--track {to} needs the package {to}: pip install 'mooring-fl[{to}]'.")


def open_tracker(to: str, name: str, settings: NamedValues) -> Tracker:
    """A new run in a tracker, with its parameters."""
    check_tracker(to)
    tracker = TRACKERS[to](name)
    tracker.log_parameters(dict(flatten_parameters(settings)))
    return tracker


def flatten_parameters(table: NamedValues, before: str = "") -> Iterator[tuple[str, str]]:
    """Yield the settings of a run by their dotted names."""
    for key, value in table.items():
        name = f"{before}{key}"
        if isinstance(value, Mapping):
            yield from flatten_parameters(value, f"{name}.")
        elif name != "mooring.seal":
            yield name, str(value)[:MAX_PARAMETER_CHARACTERS]
