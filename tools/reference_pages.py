"""The documentation's pages on commands, options, algorithms and output files, from the code.

`python -m tools.reference_pages commands > docs/commands.md`, and the same with `options`, `algorithms` and
`output-files`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

import click
import typer

from mooring.runs.sections import OPTIONS
from tools.output_files import format_output_files

COMMANDS_HEADER = """# Commands

`mooring COMMAND --help` prints the same. All options of data, task, training and advice,
also the rare ones that help texts leave out, are on [Options](options.md).

This page is written by `python -m tools.reference_pages commands > docs/commands.md`.
"""
ALGORITHMS_HEADER = """# Algorithms

`--algorithm NAME` chooses one of them for `mooring fit`, `--methods A,B` several for `mooring compare`; `--set
NAME=VALUE` sets a hyperparameter. The equations are on [Mathematics and notation](maths.md), the references on
[Papers](papers.md).

This page is written by `python -m tools.reference_pages algorithms > docs/algorithms.md`.
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


OPTION_TITLES = {
    "data": "Data: what is learnt from, and which rows are held out",
    "task": "Task: what is learnt",
    "training": "Training: rounds, participation, aggregation",
    "advice": "Advice: what counts as a difference, and how sure to be",
}
OPTIONS_HEADER = """# Options

An option has the same meaning as a flag, in a run file and in Python: `--min-rows 10`, `min_rows = 10` in the section
`[data]` of `run.toml`, `mooring.fit(..., min_rows=10)`. Where a source is a run file, flags and arguments override
it: `mooring fit run.toml --rounds 7`. Lists are separated by commas, or their flag is repeated. What a command has
no use for is refused, never ignored.

This page is written by `python -m tools.reference_pages options > docs/options.md`.
"""
OPTIONS_FOOTER = """
## Algorithm

`--algorithm NAME` (`algorithm=`) chooses the method of `fit`, `--methods A,B` (`methods=`) those of `compare`; in a run
file they are the section `[algorithm]` with a `name`, or a section `[[algorithms]]` for each. A method's own fields
(`mooring list algorithms --json` lists them) stand in the same section, and are given as `--set lam=0.1` or
`settings={"lam": 0.1}`; `compare` names the method too: `--set fedavg.steps=5`, `settings={"fedavg": {"steps": 5}}`.
Fields of the task stand in `[task]`, and are given as `--set task.ridge=0.1` or `task={"ridge": 0.1}`.

The numbers that a run resolved (`[algorithm.resolved]`: what "auto" became) are used again when its file is run
as it is, and resolved anew as soon as an option changes anything.
"""


def format_options() -> str:
    """docs/options.md: every option of a run file with its flag and its argument."""
    lines = [OPTIONS_HEADER]
    for section, title in OPTION_TITLES.items():
        lines += [
            f"## {title}",
            "",
            "| flag | `[" + section + "]` | Python | default | what |",
            "|---|---|---|---|---|",
        ]
        for option in OPTIONS.values():
            if option.section == section:
                right = f"{option.info.title} Must be {option.info.description}."
                cells = [f"`{option.flag}`", f"`{option.field}`", f"`{option.name}`", option.default, right]
                lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n" + OPTIONS_FOOTER


PAGES = {
    "commands": format_commands,
    "options": format_options,
    "algorithms": format_algorithms,
    "output-files": format_output_files,
}

if __name__ == "__main__":
    sys.stdout.write(PAGES[sys.argv[1]]())
