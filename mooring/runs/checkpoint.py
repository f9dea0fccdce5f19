"""Where a killed run goes on: `checkpoint/` holds the two latest generations, one tensor file each."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from mooring.core.errors import RequestError
from mooring.runs.files import DamagedFile, make_folder, unwritten
from mooring.runs.tensors import Stored, read_tensors, write_tensors

FOLDER = "checkpoint"
KEPT = 2
_NAME = re.compile(r"round-(\d+)\.safetensors")


class Checkpoint(NamedTuple):
    """A run after `round`: its state, and what else it needs to go on (the records so far)."""

    round: int
    tensors: dict[str, Tensor]
    meta: dict[str, Any]
    note: str | None  # a sentence when a newer generation was damaged and this older one took its place


def generations(run: str | Path) -> list[tuple[int, Path]]:
    """(round, file) of every generation, latest first."""
    folder = Path(run) / FOLDER
    names = ((_NAME.fullmatch(path.name), path) for path in folder.glob("*"))
    return sorted(((int(match[1]), path) for match, path in names if match), reverse=True)


def save(run: str | Path, round: int, tensors: Mapping[str, Stored], meta: dict[str, Any]) -> None:
    """Add the generation of `round`, then drop all but the two latest up to it.

    Later generations are dropped too: a run that saves an earlier round has gone back behind them.
    """
    folder = Path(run) / FOLDER
    try:
        make_folder(folder)
    except OSError as error:
        raise unwritten(folder, error) from error
    write_tensors(folder / f"round-{round:08d}.safetensors", tensors, {"round": round, "run": meta})
    upto = [path for at, path in generations(run) if at <= round]
    drop(path for _, path in generations(run) if path not in upto[:KEPT])


def drop_old(run: str | Path) -> None:
    """All but the two latest generations: what a process that was killed between adding and dropping has left."""
    drop(path for _, path in generations(run)[KEPT:])


def drop(files: Iterable[Path]) -> None:
    for path in files:
        try:
            os.unlink(path)
        except OSError as error:
            raise unwritten(path.parent, error) from error


def latest(run: str | Path) -> Checkpoint | None:
    """The newest generation that is whole; None when there is none yet, DamagedFile when none is whole."""
    failures = []
    for round, path in generations(run):
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
