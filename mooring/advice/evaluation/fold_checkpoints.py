"""Finished folds in the run directory's `checkpoint/`: an interrupted advice resumes after them."""

from __future__ import annotations

import re
from contextlib import suppress

from torch import Tensor

from mooring.core.errors import RequestError
from mooring.core.types import JsonObject
from mooring.runs.atomic_files import make_synced_folder, write_error
from mooring.runs.checkpoint import CHECKPOINT_FOLDER
from mooring.runs.directory import RunDirectory
from mooring.runs.tensor_files import read_tensors, write_tensors

_NAME = re.compile(r"fold-(\d+)\.safetensors")


def save_fold(directory: RunDirectory | None, number: int, tensors: dict[str, Tensor], known: JsonObject) -> None:
    """Store the result of fold `number`; without a run directory nothing is stored."""
    if directory is None:
        return
    folder = directory.path / CHECKPOINT_FOLDER
    try:
        make_synced_folder(folder)
    except OSError as error:
        raise write_error(folder, error) from error
    write_tensors(folder / f"fold-{number:04d}.safetensors", tensors, {"fold": number, "known": known})


def read_folds(directory: RunDirectory | None) -> dict[int, tuple[dict[str, Tensor], JsonObject]]:
    """All stored folds that are intact; a damaged one is fitted again."""
    folds = {}
    for path in sorted((directory.path / CHECKPOINT_FOLDER).glob("fold-*")) if directory is not None else ():
        with suppress(RequestError):
            tensors, meta = read_tensors(path)
            if _NAME.fullmatch(path.name):
                folds[int(meta["fold"])] = (tensors, meta["known"])
    return folds


def remove_folds(directory: RunDirectory) -> None:
    """Delete the folds, after the result is written."""
    for path in (directory.path / CHECKPOINT_FOLDER).glob("fold-*"):
        with suppress(OSError):
            path.unlink()
    with suppress(OSError):
        (directory.path / CHECKPOINT_FOLDER).rmdir()
