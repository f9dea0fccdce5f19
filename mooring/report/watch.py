"""`mooring watch`: a running job from its directory: how far it is, its losses, who takes part, what is left to do.

A run tells of itself by its checkpoints, so what is seen is at most `checkpoint_every` rounds old.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from mooring.core.errors import RequestError
from mooring.report.terminal import Display, format_cell, replace_control_characters
from mooring.runs.checkpoint import read_latest_checkpoint
from mooring.runs.directory import COMPARISON_FILE, METHODS_FOLDER, RUN_FILE, RunDirectory, open_run

MAX_NAMED_CLIENTS = 5  # clients that are named
POLL_SECONDS = 1.0  # seconds between looks
LOSS_LABELS = {"train_loss": "train", "validation_loss": "validation", "test_loss": "test"}


class JobStatus(NamedTuple):
    """A job at a glance."""

    name: str
    done: int  # rounds
    rounds: int
    finished: bool
    losses: dict[str, float]  # of the latest evaluation, as training sees them: of the standardised target
    asked: int  # clients in the latest round
    accepted: int
    left_out: dict[str, str]  # client -> why its reply could not be used
    left: float | None  # seconds, by the rounds so far


def read_all_status(run: str | Path) -> list[JobStatus]:
    """Every job of a run: one, or one a method of a comparison; none where the work leaves no trace on its way."""
    directory = open_run(run)
    if directory.run.mooring.purpose == "compare":
        begun = sorted(path.parent for path in directory.path.glob(f"**/{METHODS_FOLDER}/*/{RUN_FILE}"))
        return [read_status(open_run(path))._replace(name=name_method(directory.path, path)) for path in begun]
    return [read_status(directory)]


def name_method(run: Path, folder: Path) -> str:
    """A method of a comparison, and which repetition it belongs to."""
    return " ".join(part for part in folder.relative_to(run).parts if part != METHODS_FOLDER)


def read_status(directory: RunDirectory) -> JobStatus:
    run = directory.run
    name, rounds = run.algorithm.name if run.algorithm else run.mooring.purpose, run.training.rounds or 0
    found = read_latest_checkpoint(directory.path)
    records: list[dict[str, Any]] = found.meta["records"] if found else []
    told: dict[str, Any] = next((record for record in reversed(records) if has_loss(record)), {})
    last = records[-1] if records else {}
    done = found.round if found else 0
    spent = sum(directory.seconds.get("rounds", [])[:done])
    offenders = found.meta.get("offenders", {}) if found and not directory.finished else {}
    return JobStatus(
        name,
        done,
        max(rounds, done),
        directory.finished,
        {word: told[key] for key, word in LOSS_LABELS.items() if told.get(key) is not None},
        last.get("asked", 0),
        last.get("accepted", 0),
        {find_client_name(directory, int(number)): why for number, why in offenders.items()},
        None if not done or directory.finished else spent / done * (max(rounds, done) - done),
    )


def has_loss(record: dict[str, Any]) -> bool:
    return any(record.get(key) is not None for key in LOSS_LABELS)


def find_client_name(directory: RunDirectory, number: int) -> str:
    """A client by its place, which is that of its first row."""
    try:
        return str(directory.split["client"].unique()[number])
    except (RequestError, IndexError):  # not made from a table
        return f"client {number}"


def describe_status(look: JobStatus) -> str:
    """A look in one line."""
    parts = [f"{look.name}: round {look.done:,} of {look.rounds:,}"]
    if look.losses:
        parts.append(
            "loss as trained: " + ", ".join(f"{word} {format_cell(value)}" for word, value in look.losses.items())
        )
    if look.asked:
        parts.append(f"{look.accepted:,} of {look.asked:,} clients answered")
    if look.left_out:
        named = [f"{name} ({why})" for name, why in list(look.left_out.items())[:MAX_NAMED_CLIENTS]]
        more = len(look.left_out) - len(named)
        parts.append(f"left out: {', '.join(named)}{f' and {more:,} more' if more else ''}")
    if look.finished:
        parts.append("finished")
    elif look.left is not None:
        parts.append(f"about {format_duration(look.left)} left")
    return "; ".join(parts)


def format_duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    return f"{whole // 60} min" if whole < 7200 else f"{whole // 3600} h {whole % 3600 // 60} min"


def draw_status(found: list[JobStatus]) -> RenderableType:
    """Looks with a bar each, for a terminal."""
    parts: list[RenderableType] = []
    for one in found:
        parts += [
            Text(replace_control_characters(describe_status(one))),
            ProgressBar(total=max(one.rounds, 1), completed=one.done, width=60),
        ]
    return Group(*parts)


def watch_run(display: Display, run: str | Path, sleep: Callable[[float], None] = time.sleep) -> None:
    """Show a run until it is finished: in place on a terminal, elsewhere a line whenever something has changed."""
    if display.out.is_terminal:
        with Live(console=display.out, auto_refresh=False) as live:
            for found in poll_status(run, sleep):
                live.update(draw_status(found), refresh=True)
        return
    said: dict[str, str] = {}
    for found in poll_status(run, sleep):
        for one in found:
            if said.get(one.name) != (text := describe_status(one)):
                said[one.name] = text
                display.say(text)


def poll_status(run: str | Path, sleep: Callable[[float], None]) -> Iterator[list[JobStatus]]:
    while True:
        over = is_finished(run)  # before the look, so that the last one is whole
        yield read_all_status(run)
        if over:
            return
        sleep(POLL_SECONDS)


def is_finished(run: str | Path) -> bool:
    directory = open_run(run)
    several = directory.run.mooring.purpose == "compare"
    return (directory.path / COMPARISON_FILE).is_file() if several else directory.finished
