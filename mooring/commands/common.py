"""What commands share: the options that many have, where a run goes, and how an answer is written."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from mooring.core.errors import RequestError
from mooring.core.process import replace_control_characters
from mooring.core.types import JsonObject
from mooring.options import split_assignments

if TYPE_CHECKING:
    import click

    from mooring.report.terminal import Display


class PlainHelp(TyperCommand):
    """A command whose help text escapes nothing: typer writes `\\[required]` for rich."""

    def get_help(self, ctx: click.Context) -> str:
        return super().get_help(ctx).replace("\\[", "[")


class PlainTyper(typer.Typer):
    """Commands with plain help texts."""

    def command(self, *args: Any, **options: Any) -> Any:
        return super().command(*args, **{"cls": PlainHelp} | options)


app = PlainTyper(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"max_content_width": 120},
    help="Personalized federated learning: which model should each client use?",
)
RESUMABLE_RUNS: list[Path | str] = []  # the run directory of the running command, or a sentence on how to resume it
RunArgument = Annotated[Path, typer.Argument(hidden=True)]
MethodChoice = Annotated[
    str | None, typer.Option("--method", help="Method of a comparison. [the best on validation rows]")
]


@contextmanager
def lasting_imports() -> Iterator[None]:
    """Import without garbage collections: PyTorch alone makes 200,000 objects that stay until the process ends.

    Collections while they are made, and at the end, would take a third of the time of the import.
    """
    if "torch" in sys.modules:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def open_display(aside: bool, track: str | None) -> Display:
    """Return the display of a command (`aside`: stdout is for data); a tracker that is missing is refused first."""
    from mooring.report.terminal import Display

    if track is not None:
        from mooring.runs.trackers import check_tracker

        check_tracker(track)
    return Display(aside)


def log_to_tracker(display: Display, out: Path, track: str | None) -> None:
    if track is not None:
        from mooring.report.tracking import log_run

        display.print_line(f"Tracked: {log_run(out, track)}")


def mark_resumable(out: Path) -> Path:
    """Where a run is about to be written: it must be writable, and an interrupted command prints how to resume."""
    from mooring.runs.directory import check_writable

    check_writable(out)
    RESUMABLE_RUNS[:] = [out]
    return out


def free_directory(source: str, purpose: str) -> Path:
    """The default directory of a run, named after its source and its method."""
    from mooring.runs.directory import default_run_path

    return default_run_path(f"{Path(source).stem}-{purpose}")


def parse_task_settings(texts: list[str] | None, given: JsonObject) -> JsonObject:
    """The options with the task's fields, where there is no algorithm to set fields of."""
    fields, given = split_assignments(texts, given)
    if fields:
        raise RequestError(f"--set takes task.FIELD=VALUE here, got {next(iter(fields))!r}.")
    return given


def print_json(value: object) -> None:
    """One JSON object on stdout."""
    from mooring.runs.atomic_files import to_json

    write_data(to_json(value) + "\n")


def write_data(text: str) -> None:
    """Write a result to stdout: as it is to a file or a pipe, without control characters to a terminal."""
    sys.stdout.write(replace_control_characters(text) if sys.stdout.isatty() else text)


def csv_text(frame: object) -> str:
    """A table as CSV, without formulas for spreadsheets."""
    from mooring.runs.atomic_files import csv_bytes

    return csv_bytes(frame).decode()
