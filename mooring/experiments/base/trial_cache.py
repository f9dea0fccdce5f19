"""Finished trials on disk, each a file of its own, kept under what its numbers depend on.

The key of a trial: its function, its arguments, its seed, the code that the function reaches (`code_digest.py`), the
versions
of the libraries that make its numbers, and the digests of the data files that it needs; of a trial that is trained
beside others also their points, and the code that does so. Rewording a claim repeats no
trial, and neither does an edit of an algorithm that a trial does not use.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mooring.data.benchmark_datasets import DATA_DIR_VARIABLE
from mooring.engines.sweep import all_answered
from mooring.experiments.base import code_digest
from mooring.runs.atomic_files import DamagedFile, make_synced_folder, read_json, to_plain, write_error, write_json

LIBRARIES = ("numpy", "scipy", "scikit-learn", "torch")
CACHE_ENVIRONMENT = "MOORING_CACHE"


def default_trial_folder() -> Path:
    """Where trials are kept: what MOORING_CACHE names, else `mooring` in the user's cache folder."""
    if given := os.environ.get(CACHE_ENVIRONMENT):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mooring" / "trials"


def trial_key(
    trial: Callable[..., Any],
    arguments: Mapping[str, Any],
    seed: int,
    needs: tuple[str, ...] = (),
    beside: Sequence[Mapping[str, Any]] = (),
) -> str:
    """`beside` are the points that are trained as one cohort, where there are several."""
    what = {
        "trial": f"{trial.__module__}.{trial.__qualname__}",
        "arguments": to_plain(dict(arguments)),
        "seed": seed,
        **({"beside": [to_plain(dict(point)) for point in beside]} if beside else {}),
        **describe_origin(trial, needs, bool(beside)),
    }
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


def describe_origin(trial: Callable[..., Any], needs: tuple[str, ...] = (), together: bool = False) -> dict[str, Any]:
    """What a trial's numbers rest on beside its arguments: digest of the code, versions, digests of the data."""
    functions = [trial, all_answered] if together else [trial]
    digests = [_code(one.__module__, one.__qualname__) for one in functions]
    whole = hashlib.sha256("".join(digests).encode()).hexdigest() if together else digests[0]
    return {"code": whole, "versions": versions(), "data": digest_data_files(needs)}


def versions() -> dict[str, str]:
    return {library: version(library) for library in LIBRARIES}


def load_trial(folder: Path, name: str) -> dict[str, Any] | None:
    """A finished trial, or None; a damaged file counts as absent and is written anew."""
    path = _place(folder, name)
    if not path.exists():
        return None
    try:
        kept = read_json(path)
    except DamagedFile:
        return None
    return kept | {"values": {series: _numbers(value) for series, value in kept["values"].items()}}


def save_trial(folder: Path, name: str, values: Mapping[str, Any], seconds: float, what: Mapping[str, Any]) -> None:
    path = _place(folder, name)
    try:
        make_synced_folder(path.parent)
    except OSError as error:
        raise write_error(path, error) from error
    write_json(path, {"values": dict(values), "seconds": seconds, "what": dict(what)})


def digest_data_files(needs: tuple[str, ...]) -> dict[str, str]:
    """Digests of the files in the data folder whose names begin with one of `needs`."""
    folder = os.environ.get(DATA_DIR_VARIABLE)
    if not needs or folder is None or not Path(folder).is_dir():
        return {}
    files = sorted(path for path in Path(folder).iterdir() if path.name.startswith(needs))
    return {path.name: _digest(path, path.stat().st_size, path.stat().st_mtime_ns) for path in files}


@cache
def _digest(path: Path, size: int, changed: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@cache
def _code(module: str, name: str) -> str:
    return code_digest.digest_code(module, name)


def _place(folder: Path, name: str) -> Path:
    return folder / name[:2] / f"{name}.json"


def _numbers(value: Any) -> Any:
    """Numbers as they were before JSON: null was nan, a text an infinity."""
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    return float("nan") if value is None else float(value)
