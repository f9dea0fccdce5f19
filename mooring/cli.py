"""The command line: the commands, options that may stand anywhere, exit codes, and errors in one sentence."""

from __future__ import annotations

import shlex
import sys
import warnings
from importlib import import_module
from typing import Annotated, Any

import typer

from mooring.commands.common import RESUMABLE_RUNS, app
from mooring.commands.plugins import has_command, load_commands
from mooring.core.errors import RequestError, WorkError
from mooring.core.field_checks import describe_unknown
from mooring.core.logs import LOGGER
from mooring.core.memory import keep_freed_memory
from mooring.core.trusted_files import CONFIRMATIONS
from mooring.runs.sections import installed_version

for part in ("training", "models", "data", "reference", "federation"):  # in the order of `mooring --help`
    import_module(f"mooring.commands.{part}")

DEBUG = {"on": False}
GLOBAL_FLAGS = ("--debug", "--quiet", "--verbose")  # options that may stand anywhere


def print_version(asked: bool) -> None:
    if asked:
        print(f"mooring {installed_version()}")  # noqa: T201
        raise typer.Exit


@app.callback(epilog="Example: mooring advise heart --out runs/heart")
def options(
    quiet: Annotated[bool, typer.Option("--quiet", help="Print the answer only, without notes and progress.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Print every step with the time that it took.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the stack trace of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=print_version, is_eager=True)
    ] = False,
) -> None:
    pass  # the first three may stand anywhere: `main` takes them


def main(argv: list[str] | None = None) -> None:
    """Run a command. Exit codes: 0 done, 1 the work failed, 2 the request was wrong."""
    warnings.showwarning = lambda message, *_, **__: print(f"note: {message}", file=sys.stderr)  # noqa: T201
    if sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty():
        CONFIRMATIONS[:] = [lambda question: typer.confirm(question, err=True)]
    try:
        given = sys.argv[1:] if argv is None else argv
        RESUMABLE_RUNS.clear()
        DEBUG["on"] = "--debug" in given
        keep_freed_memory()  # only here: a user's own process decides for itself
        LOGGER.setLevel("WARNING" if "--quiet" in given else "DEBUG" if "--verbose" in given else "INFO")
        words = [word for word in given if word not in GLOBAL_FLAGS] or ["--help"]
        if not has_command(app, words[0]):
            load_commands(app)  # only here: to look for installed packages takes a while
        code = app(words, prog_name="mooring", standalone_mode=False)
        if code == 130:  # typer's own way to say that it was interrupted
            describe_interruption()
    except Exception as error:
        if DEBUG["on"]:
            raise
        code = print_error(error)
    except KeyboardInterrupt:
        code = describe_interruption()
    sys.exit(code if isinstance(code, int) else 0)


def describe_interruption() -> int:
    """Print how an interrupted command can be continued; its exit code."""
    how = "nothing was written"
    for what in RESUMABLE_RUNS:
        if isinstance(what, str):
            how = what
        elif (what / "run.toml").is_file():
            how = f"continue with `mooring resume {shlex.quote(str(what))}`"
    print(f"interrupted; {how}.", file=sys.stderr)  # noqa: T201
    return 130


def command_name(context: Any) -> str:
    """`mooring fit`, whichever way it was started."""
    return "mooring" if context.parent is None else f"{command_name(context.parent)} {context.info_name}"


def print_error(error: Exception) -> int:
    """Say an error in one sentence, which may hold words from files and data; its exit code."""
    import click

    from mooring.report.terminal import replace_control_characters

    if isinstance(error, click.exceptions.Exit):
        return error.exit_code
    if isinstance(error, click.NoSuchOption) and error.ctx is not None:
        known = [word for parameter in error.ctx.command.params for word in parameter.opts if word.startswith("--")]
        asked = command_name(error.ctx)
        error = RequestError(f"{asked}: {describe_unknown('option', error.option_name, known, f'{asked} --help')}.")
    if isinstance(error, click.UsageError) and error.ctx is not None:
        text = error.format_message().split(" Did you mean")[0]
        if isinstance(error.ctx.command, click.Group) and text.startswith("No such command"):
            asked = text.split("'", 1)[-1].rstrip("'.")
            usage = f"{command_name(error.ctx)} --help"
            text = f"{describe_unknown('command', asked, error.ctx.command.commands, usage)}."
        usage = "" if "--help`" in text else f" See `{command_name(error.ctx)} --help`."
        error = RequestError(f"{command_name(error.ctx)}: {text}{usage}")
    if isinstance(error, click.ClickException):
        error = RequestError(error.format_message())
    if isinstance(error, click.Abort):
        return describe_interruption()
    foreseen = isinstance(error, RequestError | WorkError)
    text = str(error) if foreseen else f"unexpected {type(error).__name__}: {error} (run with --debug for the details)"
    print(f"error: {replace_control_characters(text)}", file=sys.stderr)  # noqa: T201
    return 2 if isinstance(error, RequestError) else 1
