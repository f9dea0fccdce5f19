"""Progress reports of long-running functions."""

from __future__ import annotations

import sys

from mooring.core.process import replace_control_characters
from mooring.core.types import OnProgress as OnProgress


def ignore_progress(step: str, done: int, rounds: int) -> None:
    """Show no progress."""


def print_progress(step: str, done: int, rounds: int) -> None:
    """Print the step and its progress, in one line on stderr."""
    sys.stderr.write(
        f"\r\033[K{replace_control_characters(step)}: {done} of {rounds}" + ("\n" if done == rounds else "")
    )
    sys.stderr.flush()


def progress_function(progress: bool | OnProgress) -> OnProgress:
    """Return the function that is called with (step, done, total)."""
    return progress if callable(progress) else print_progress if progress else ignore_progress
