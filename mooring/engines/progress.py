"""How a function tells its caller what it is doing."""

from __future__ import annotations

import sys
from collections.abc import Callable

OnProgress = Callable[[str, int, int], None]  # (what is running, rounds done, rounds in all)


def ignore_progress(what: str, done: int, rounds: int) -> None:
    """No progress is shown."""


def print_progress(what: str, done: int, rounds: int) -> None:
    """The step and how much of it is done, in one line on stderr."""
    sys.stderr.write(f"\r\033[K{what}: {done} of {rounds}" + ("\n" if done == rounds else ""))
    sys.stderr.flush()


def progress_function(progress: bool | OnProgress) -> OnProgress:
    """The function that is called with (step, done, total)."""
    return progress if callable(progress) else print_progress if progress else ignore_progress
