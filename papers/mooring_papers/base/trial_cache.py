"""Cache of finished trials on disk, one file per trial.

The key of a trial contains the name of its function, the version of its experiment (`Experiment.version`), arguments
and seed, the versions of the numerical libraries, and the digests of its data files. For trials that are trained as one
cohort it also contains the points of the cohort. A change of the code repeats no trial unless the version is raised.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path

from mooring.core.types import JsonObject, NamedValues
from mooring.data.benchmark_datasets import DATA_DIR_VARIABLE
from mooring.runs.atomic_files import DamagedFile, make_synced_folder, read_json, to_plain, write_error, write_json

LIBRARIES = ("numpy", "scipy", "scikit-learn", "torch")
CACHE_DIR_VARIABLE = "MOORING_CACHE"


def default_trial_folder() -> Path:
    """Return the folder of the cache: MOORING_CACHE, or `mooring/trials` in the user's cache folder."""
    if folder := os.environ.get(CACHE_DIR_VARIABLE):
        return Path(folder)
    return user_cache_path("mooring") / "trials"


def trial_key(
    trial: Callable[..., object],
    arguments: NamedValues,
    seed: int,
    version: int = 1,
    needs: tuple[str, ...] = (),
    beside: Sequence[NamedValues] = (),
) -> str:
    """Return the key of a trial; `beside` contains the points that are trained as one cohort, if there are several."""
    content = {
        "trial": f"{trial.__module__}.{trial.__qualname__}",
        "arguments": to_plain(dict(arguments)),
        "seed": seed,
        **({"beside": [to_plain(dict(point)) for point in beside]} if beside else {}),
        **describe_origin(version, needs),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def describe_origin(version: int, needs: tuple[str, ...] = ()) -> JsonObject:
    """Return what trials depend on besides their arguments: their version, library versions, digests of the data."""
    return {"trials": version, "versions": library_versions(), "data": digest_data_files(needs)}


@cache  # every trial asks, and metadata files are parsed anew each time
def library_versions() -> dict[str, str]:
    """Return the versions of the libraries that determine the numbers."""
    return {library: version(library) for library in LIBRARIES}


def load_trial(folder: Path, name: str) -> JsonObject | None:
    """Return a finished trial, or None; a damaged file counts as absent and is replaced."""
    path = _place(folder, name)
    if not path.exists():
        return None
    try:
        stored = read_json(path)
    except DamagedFile:
        return None
    return stored | {"values": {series: _to_floats(value) for series, value in stored["values"].items()}}


def save_trial(folder: Path, name: str, values: NamedValues, seconds: float, description: NamedValues) -> None:
    """Write a finished trial; `description` contains its arguments."""
    path = _place(folder, name)
    try:
        make_synced_folder(path.parent)
    except OSError as error:
        raise write_error(path, error) from error
    write_json(path, {"values": dict(values), "seconds": seconds, "what": dict(description)})


def digest_data_files(needs: tuple[str, ...]) -> dict[str, str]:
    """Return the digests of the files in the data folder whose names start with one of `needs`."""
    folder = os.environ.get(DATA_DIR_VARIABLE)
    if not needs or folder is None or not Path(folder).is_dir():
        return {}
    files = sorted(path for path in Path(folder).iterdir() if path.name.startswith(needs))
    return {path.name: _digest(path, path.stat().st_size, path.stat().st_mtime_ns) for path in files}


@cache
def _digest(path: Path, size: int, changed: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _place(folder: Path, name: str) -> Path:
    return folder / name[:2] / f"{name}.json"


def _to_floats(value: Any) -> object:
    """Return numbers as they were before JSON: null was nan, a string was an infinity."""
    if isinstance(value, list):
        return [_to_floats(item) for item in value]
    return float("nan") if value is None else float(value)
