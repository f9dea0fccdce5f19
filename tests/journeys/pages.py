"""What a page of the documentation shows, block by block."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from mooring.cli import main
from tests.support.repository import ROOT


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of a language, in order."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.S)


def commands(page: str) -> list[list[str]]:
    """The lines of indented blocks that call `mooring`, as words, without their comments."""
    return [words(line) for line in re.findall(r"^    (mooring .*)$", (ROOT / page).read_text(), re.M)]


def words(line: str) -> list[str]:
    """What follows `mooring` in a line, without its comment."""
    return shlex.split(line, comments=True)[1:]


def run_python(found: list[str]) -> dict[str, Any]:
    """Run blocks one after another, in one namespace, and return it."""
    names: dict[str, Any] = {}
    for text in found:
        exec(compile(text, "page", "exec"), names)
    return names


def typed(argv: list[str]) -> None:
    """Give a command; it must succeed."""
    with pytest.raises(SystemExit) as left:
        main(argv)
    assert left.value.code == 0, argv


def run_page(page: Path, names: dict[str, Any] | None = None) -> int:
    """Every block of a page in its order, here: Python is run, a run file saved, a command given; how many."""
    found = re.findall(r"```(?P<b>(\w+)\n.*?)```|^    (mooring [^\n]*)$", page.read_text(), re.S | re.M)
    names = {} if names is None else names
    for block, language, line in found:
        if language == "python":
            exec(compile(block.removeprefix("python\n"), page.name, "exec"), names)
        elif language == "toml":
            Path("run.toml").write_text(block.removeprefix("toml\n"))
        elif line:
            typed(words(line))
    return len(found)
