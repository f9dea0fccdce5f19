"""How many files of the package `mooring fit heart` and `mooring advise heart` call functions of.

python -m benchmarks.files_entered

Each command runs twice; the second run, when everything is imported, is watched by a profiler.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType

import mooring
from mooring.cli import main

PACKAGE = str(Path(mooring.__file__).parent)


def run_command(*arguments: str) -> None:
    """Run a command of Mooring in an empty folder, without its output."""
    sys.argv = ["mooring", *arguments]
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        os.chdir(folder)
        with contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(SystemExit):
            main()
        os.chdir(PACKAGE)


def files_entered(*arguments: str) -> set[str]:
    """The files of the package of which a command calls functions."""
    run_command(*arguments)
    files: set[str] = set()

    def watch(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            files.add(frame.f_code.co_filename)

    threading.setprofile(watch)
    sys.setprofile(watch)
    run_command(*arguments)
    sys.setprofile(None)
    threading.setprofile(None)
    return files


if __name__ == "__main__":
    total = len(list(Path(PACKAGE).rglob("*.py")))
    for command in ("fit", "advise"):
        print(f"mooring {command} heart: {len(files_entered(command, 'heart'))} of {total} files")
