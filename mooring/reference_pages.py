"""The documentation's pages on commands and algorithms, from the code.

`python -m mooring.reference_pages commands > docs/commands.md`, and the same with `algorithms`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

import click
import typer

COMMANDS_HEADER = """# Commands

`mooring COMMAND --help` prints the same. All options of data, task, training and advice,
also the rare ones that help texts leave out, are on [Options](options.md).

This page is written by `python -m mooring.reference_pages commands > docs/commands.md`.
"""
ALGORITHMS_HEADER = """# Algorithms

`--algorithm NAME` chooses one of them for `mooring fit`, `--methods A,B` several for `mooring compare`; `--set
NAME=VALUE` sets a hyperparameter. The equations are on [Mathematics and notation](maths.md), the references on
[Papers](papers.md).

This page is written by `python -m mooring.reference_pages algorithms > docs/algorithms.md`.
"""


def format_commands(package: str = "mooring", header: str = COMMANDS_HEADER) -> str:
    """docs/commands.md: every command of a package with its help and its options."""
    from mooring.cli import app

    return "\n".join([header, *_describe_group(typer.main.get_command(app), ("mooring",), package)])


def _describe_group(command: click.Command, path: tuple[str, ...], package: str) -> Iterator[str]:
    """The sections of a package's commands below one, in alphabetical order."""
    for name, child in sorted(getattr(command, "commands", {}).items()):
        if isinstance(child, click.Group):
            yield from _describe_group(child, (*path, name), package)
        elif not child.hidden and (child.callback.__module__ or "").partition(".")[0] == package:
            yield _describe_command(child, (*path, name))


def _describe_command(command: click.Command, path: tuple[str, ...]) -> str:
    """A command: its text, its example, and a table of its options."""
    arguments = " ".join(
        str(part.make_metavar(click.Context(command))) for part in command.params if isinstance(part, click.Argument)
    )
    lines = [f"## {' '.join(path)}\n", f"```text\n{' '.join(path)} {arguments} [OPTIONS]\n```\n".replace("  ", " ")]
    lines.append(_join_lines(command.help or "") + "\n")
    if command.epilog:
        text, _, example = command.epilog.partition("Example: ")
        lines.append(f"{_join_lines(text)}\n" if text.strip() else "")
        lines.append(f"Example: `{_join_lines(example)}`\n" if example else "")
    options = [part for part in command.params if isinstance(part, click.Option) and not part.hidden]
    if options:
        rows = [f"| `{', '.join(part.opts)}` | {_escape(part.help or '')} |" for part in options]
        lines.append("\n".join(["| option | effect [default] |", "|---|---|", *rows]) + "\n")
    return "\n".join(line for line in lines if line)


def _join_lines(text: str) -> str:
    """Paragraphs of a text, each in one line."""
    return "\n\n".join(" ".join(part.split()) for part in re.split(r"\n\s*\n", text.strip()))


def _escape(text: str) -> str:
    return " ".join(text.replace("\\[", "[").replace("|", "\\|").split())


def format_algorithms() -> str:
    """docs/algorithms.md: every algorithm with its hyperparameters, its source and what its messages reveal."""
    from mooring.algorithms.base import algorithm_names
    from mooring.commands.reference import describe_algorithm

    sections = ["\n".join([f"## {name}\n", *describe_algorithm(name), ""]) for name in sorted(algorithm_names())]
    return "\n".join([ALGORITHMS_HEADER, *sections])


PAGES = {"commands": format_commands, "algorithms": format_algorithms}

if __name__ == "__main__":
    sys.stdout.write(PAGES[sys.argv[1]]())
