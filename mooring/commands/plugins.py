"""Commands of other distributions, by the entry-point group `mooring.commands`."""

from __future__ import annotations

import warnings
from typing import Annotated

import typer

from mooring.core.errors import RequestError

ENTRY_POINT_GROUP = "mooring.commands"  # an entry is a module that adds its commands to `commands.common.app`
PAPERS_COMMANDS = {"reproduce": "mooring reproduce all --preset quick", "theorem": "mooring theorem alternative"}


def has_command(app: typer.Typer, name: str) -> bool:
    groups = [group.name for group in app.registered_groups]
    commands = [command.name or getattr(command.callback, "__name__", "") for command in app.registered_commands]
    return name in (*commands, *groups)


def load_commands(app: typer.Typer) -> None:
    """Import the modules of commands; commands of the papers that are missing are added to explain how to get them."""
    from importlib.metadata import entry_points

    for point in entry_points(group=ENTRY_POINT_GROUP):
        try:
            point.load()
        except ImportError as error:
            warnings.warn(f"The commands of '{point.name}' ({point.value}) are left out: {error}.")
    for name, example in PAPERS_COMMANDS.items():
        if not has_command(app, name):
            _add_placeholder(app, name, example)


def papers_missing(command: str) -> RequestError:
    return RequestError(f"{command} is part of the papers' reproduction: pip install 'mooring-fl[papers]'.")


def _add_placeholder(app: typer.Typer, name: str, example: str) -> None:
    def placeholder(words: Annotated[list[str] | None, typer.Argument(hidden=True)] = None) -> None:
        raise papers_missing(f"mooring {name}")

    app.command(
        name,
        hidden=True,
        help="Part of mooring-fl[papers].",
        epilog=f"Example: {example}",
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )(placeholder)
