"""Folds of an advice that are done, in the run directory's `checkpoint/`: an interrupted advice goes on after them."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

from torch import Tensor

from mooring.core.errors import RequestError
from mooring.runs.checkpoint import FOLDER
from mooring.runs.directory import RunDir
from mooring.runs.files import make_folder, unwritten
from mooring.runs.tensors import read_tensors, write_tensors

_NAME = re.compile(r"fold-(\d+)\.safetensors")


def save(directory: RunDir | None, number: int, tensors: dict[str, Tensor], known: dict[str, Any]) -> None:
    """Keep what fold `number` found out; in memory there is nothing to keep it in."""
    if directory is None:
        return
    folder = directory.path / FOLDER
    try:
        make_folder(folder)
    except OSError as error:
        raise unwritten(folder, error) from error
    write_tensors(folder / f"fold-{number:04d}.safetensors", tensors, {"fold": number, "known": known})


def read(directory: RunDir | None) -> dict[int, tuple[dict[str, Tensor], dict[str, Any]]]:
    """Every fold that is kept whole; a damaged one is fitted again."""
    found = {}
    for path in sorted((directory.path / FOLDER).glob("fold-*")) if directory is not None else ():
        with suppress(RequestError):
            tensors, meta = read_tensors(path)
            if _NAME.fullmatch(path.name):
                found[int(meta["fold"])] = (tensors, meta["known"])
    return found


def remove(directory: RunDir) -> None:
    """The answer is written: the folds have no further use."""
    for path in (directory.path / FOLDER).glob("fold-*"):
        with suppress(OSError):
            path.unlink()
    with suppress(OSError):
        (directory.path / FOLDER).rmdir()
