"""Checkpoints, from which an interrupted run resumes: tensor files in `checkpoint/`, of a training the two latest
rounds, of an advice all finished folds."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from mooring.core.errors import RequestError, WorkError
from mooring.core.types import JsonObject
from mooring.runs.atomic_files import DamagedFile, make_synced_folder, write_error
from mooring.runs.tensor_files import StoredTensor, read_tensors, write_tensors

CHECKPOINT_FOLDER = "checkpoint"
MAX_CHECKPOINTS = 2
ROUND, FOLD = "round-{:08d}.safetensors", "fold-{:04d}.safetensors"


class Checkpoint(NamedTuple):
    """A run after `round`: its state, and the records so far."""

    round: int
    tensors: dict[str, Tensor]
    meta: JsonObject
    note: str | None  # a sentence if a newer checkpoint is damaged and this older one replaces it


def list_checkpoints(run: str | Path, name: str = ROUND) -> list[tuple[int, Path]]:
    """Return (round, file) of every checkpoint, latest first; or of every fold."""
    pattern = re.compile(name.split("{")[0] + r"(\d+)\.safetensors")
    names = ((pattern.fullmatch(path.name), path) for path in (Path(run) / CHECKPOINT_FOLDER).glob("*"))
    return sorted(((int(match[1]), path) for match, path in names if match), reverse=True)


def write_checkpoint(run: str | Path, round: int, tensors: Mapping[str, StoredTensor], meta: JsonObject) -> None:
    """Add the checkpoint of `round`, then delete all but the two latest up to it.

    Later checkpoints are deleted too: a run that saves an earlier round was restarted before them.
    """
    _write(run, ROUND.format(round), tensors, {"round": round, "run": meta})
    upto = [path for at, path in list_checkpoints(run) if at <= round]
    drop(path for _, path in list_checkpoints(run) if path not in upto[:MAX_CHECKPOINTS])


def drop_old(run: str | Path) -> None:
    """Delete all but the two latest checkpoints, which a killed process may have left."""
    drop(path for _, path in list_checkpoints(run)[MAX_CHECKPOINTS:])


def drop(files: Iterable[Path]) -> None:
    for path in files:
        try:
            os.unlink(path)
        except OSError as error:
            raise write_error(path.parent, error) from error


def read_latest_checkpoint(run: str | Path) -> Checkpoint | None:
    """Return the newest intact checkpoint; None if there is none yet, DamagedFile if all are damaged."""
    failures = []
    for round, path in list_checkpoints(run):
        try:
            tensors, meta = read_tensors(path)
            if meta.get("round") != round:
                raise DamagedFile(f"{path} holds round {meta.get('round')}, which its name denies.")
        except RequestError as error:
            failures.append(str(error))
            continue
        note = f"{failures[0]} Resuming from round {round} instead." if failures else None
        return Checkpoint(round, tensors, meta["run"], note)
    if failures:
        raise DamagedFile(f"{failures[0]} No earlier checkpoint is whole: start the run again with its run.toml.")
    return None


def save_fold(run: str | Path, number: int, tensors: Mapping[str, StoredTensor], known: JsonObject) -> None:
    """Store the result of fold `number`."""
    _write(run, FOLD.format(number), tensors, {"fold": number, "known": known})


def read_folds(run: str | Path) -> dict[int, tuple[dict[str, Tensor], JsonObject]]:
    """All stored folds that are intact; a damaged one is fitted again."""
    folds = {}
    for _, path in reversed(list_checkpoints(run, FOLD)):
        with suppress(RequestError):
            tensors, meta = read_tensors(path)
            folds[int(meta["fold"])] = (tensors, meta["known"])
    return folds


def remove_folds(run: str | Path) -> None:
    """Delete the folds, after the result is written."""
    with suppress(OSError, WorkError):
        drop(path for _, path in list_checkpoints(run, FOLD))
        (Path(run) / CHECKPOINT_FOLDER).rmdir()


def _write(run: str | Path, name: str, tensors: Mapping[str, StoredTensor], meta: JsonObject) -> None:
    folder = Path(run) / CHECKPOINT_FOLDER
    try:
        make_synced_folder(folder)
    except OSError as error:
        raise write_error(folder, error) from error
    write_tensors(folder / name, tensors, meta)
