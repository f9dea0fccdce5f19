"""`mooring watch`: the status of a running job from its directory: progress, losses, participation, remaining time.

The status is read from checkpoints, so it is at most `checkpoint_every` rounds old.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from mooring.core.errors import RequestError
from mooring.core.process import replace_control_characters
from mooring.core.types import JsonObject
from mooring.report.terminal import Display, format_cell
from mooring.runs.checkpoint import read_latest_checkpoint
from mooring.runs.directory import COMPARISON_FILE, METHODS_FOLDER, RUN_FILE, RunDirectory, open_run

MAX_NAMED_CLIENTS = 5  # clients that are named
POLL_SECONDS = 1.0  # seconds between two readings
LOSS_LABELS = {"train_loss": "train", "validation_loss": "validation", "test_loss": "test"}


class JobStatus(NamedTuple):
    """The status of a job."""

    name: str
    done: int  # rounds
    rounds: int
    finished: bool
    losses: dict[str, float]  # of the latest evaluation, as trained, of the standardized target
    cohort: int  # clients in the latest round
    accepted: int
    left_out: dict[str, str]  # client -> reason why its reply could not be used
    seconds_left: float | None  # seconds, by the rounds so far


def read_all_status(run: str | Path) -> list[JobStatus]:
    """Return the status of every job of a run: one, or one per method of a comparison."""
    directory = open_run(run)
    if directory.run.mooring.purpose == "compare":
        folders = sorted(path.parent for path in directory.path.glob(f"**/{METHODS_FOLDER}/*/{RUN_FILE}"))
        return [read_status(open_run(path))._replace(name=name_method(directory.path, path)) for path in folders]
    return [read_status(directory)]


def name_method(run: Path, folder: Path) -> str:
    """Return the name of a method of a comparison, with its repetition."""
    return " ".join(part for part in folder.relative_to(run).parts if part != METHODS_FOLDER)


def read_status(directory: RunDirectory) -> JobStatus:
    run = directory.run
    name, rounds = run.algorithm.name if run.algorithm else run.mooring.purpose, run.training.rounds or 0
    checkpoint = read_latest_checkpoint(directory.path)
    records: list[JsonObject] = checkpoint.meta["records"] if checkpoint else []
    evaluated: JsonObject = next((record for record in reversed(records) if has_loss(record)), {})
    last = records[-1] if records else {}
    done = checkpoint.round if checkpoint else 0
    spent = sum(directory.seconds.get("rounds", [])[:done])
    offenders = checkpoint.meta.get("offenders", {}) if checkpoint and not directory.finished else {}
    return JobStatus(
        name,
        done,
        max(rounds, done),
        directory.finished,
        {label: evaluated[key] for key, label in LOSS_LABELS.items() if evaluated.get(key) is not None},
        last.get("asked", 0),
        last.get("accepted", 0),
        {find_client_name(directory, int(number)): reason for number, reason in offenders.items()},
        None if not done or directory.finished else spent / done * (max(rounds, done) - done),
    )


def has_loss(record: JsonObject) -> bool:
    return any(record.get(key) is not None for key in LOSS_LABELS)


def find_client_name(directory: RunDirectory, number: int) -> str:
    """Return a client's name by its position, which is that of its first row."""
    try:
        return str(directory.split["client"].unique()[number])
    except (RequestError, IndexError):  # not made from a table
        return f"client {number}"


def describe_status(status: JobStatus) -> str:
    """Return the status in one line."""
    parts = [f"{status.name}: round {status.done:,} of {status.rounds:,}"]
    if status.losses:
        parts.append(
            "loss as trained: " + ", ".join(f"{label} {format_cell(value)}" for label, value in status.losses.items())
        )
    if status.cohort:
        parts.append(f"{status.accepted:,} of {status.cohort:,} clients answered")
    if status.left_out:
        named_clients = [f"{name} ({reason})" for name, reason in list(status.left_out.items())[:MAX_NAMED_CLIENTS]]
        remaining = len(status.left_out) - len(named_clients)
        parts.append(f"left out: {', '.join(named_clients)}{f' and {remaining:,} more' if remaining else ''}")
    if status.finished:
        parts.append("finished")
    elif status.seconds_left is not None:
        parts.append(f"about {format_duration(status.seconds_left)} left")
    return "; ".join(parts)


def format_duration(seconds: float) -> str:
    total = round(seconds)
    if total < 120:
        return f"{total} s"
    return f"{total // 60} min" if total < 7200 else f"{total // 3600} h {total % 3600 // 60} min"


def draw_status(statuses: list[JobStatus]) -> RenderableType:
    """Return the status of all jobs with a bar each, for a terminal."""
    parts: list[RenderableType] = []
    for status in statuses:
        parts += [
            Text(replace_control_characters(describe_status(status))),
            ProgressBar(total=max(status.rounds, 1), completed=status.done, width=60),
        ]
    return Group(*parts)


def watch_run(display: Display, run: str | Path, sleep: Callable[[float], None] = time.sleep) -> None:
    """Show a run until it is finished: in place on a terminal, elsewhere a line after each change."""
    if display.out.is_terminal:
        with Live(console=display.out, auto_refresh=False) as live:
            for statuses in poll_status(run, sleep):
                live.update(draw_status(statuses), refresh=True)
        return
    printed: dict[str, str] = {}
    for statuses in poll_status(run, sleep):
        for status in statuses:
            if printed.get(status.name) != (text := describe_status(status)):
                printed[status.name] = text
                display.print_line(text)


def poll_status(run: str | Path, sleep: Callable[[float], None]) -> Iterator[list[JobStatus]]:
    while True:
        is_last = is_finished(run)  # before the status is read, so that the last one is complete
        yield read_all_status(run)
        if is_last:
            return
        sleep(POLL_SECONDS)


def is_finished(run: str | Path) -> bool:
    directory = open_run(run)
    several = directory.run.mooring.purpose == "compare"
    return (directory.path / COMPARISON_FILE).is_file() if several else directory.finished
