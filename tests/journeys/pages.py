"""What a page of the documentation shows, block by block."""

import re
import shlex
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent


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
