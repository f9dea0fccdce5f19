"""Files that are complete or absent, and whose damage is detected.

A file is written under a temporary name in its own directory, synced, renamed, and the directory is synced. It contains
a checksum (its "seal"): the sha256 of the whole file with the checksum's own digits set to 0. It is checked before any
parser sees a byte, so a flipped bit or a cut is noticed wherever it is. It is no signature: anybody can compute it for
other contents, so that contents are checked where they are used, and nothing in a file is run as code.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import math
import os
import secrets
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

try:
    import fcntl
except ImportError as error:  # Windows
    raise ImportError("Mooring needs Linux or macOS; on Windows, run it in WSL 2.") from error
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from torch import Tensor

from mooring.core.errors import RequestError, WorkError
from mooring.core.size_limits import read_bounded
from mooring.core.types import JsonObject, NamedValues

CHECKSUM_MARK = b"mooring-sha256:"
_BLANK = b"0" * 64
BLANK_CHECKSUM = (CHECKSUM_MARK + _BLANK).decode()  # placeholder that `with_checksum` replaces by the digest
_PARQUET_KEY = "mooring"
LOCK_FILE = ".mooring.lock"  # of a run directory, while a process writes into it


class DamagedFile(RequestError):
    """A file is not what was written: cut, changed, or never one of ours."""


class Stream(NamedTuple):
    """A file whose seal is computed while it is written, so that it need not fit in memory."""

    head: bytes  # contains BLANK_CHECKSUM once
    parts: Iterable[memoryview]  # the content after the head


def write_atomically(path: str | Path, data: bytes | Stream, *, durable: bool = True) -> None:
    """Write `data` to `path`; after any interruption the old or the new file is there, complete. A file that is not
    `durable` may be lost or damaged by a power failure."""
    path = Path(path)
    try:
        replace_file(path, data, durable=durable)
    except OSError as error:
        raise write_error(path, error) from error


def replace_file(path: Path, data: bytes | Stream, *, durable: bool = True) -> None:
    """Write a file as `write_atomically` does, but raise OSError, for callers with their own error messages.

    Temporary files that killed processes left in the same folder are removed."""
    remove_leftovers(path.parent)
    temp = None
    try:
        temp, handle = _claim(path.parent)
        try:
            if isinstance(data, Stream):
                _write_sealed(handle, data)
            else:
                _write(handle, data)
            if durable:
                os.fsync(handle)
            os.rename(temp, path)
        finally:
            os.close(handle)
        temp = None
        if durable:
            sync_directory(path.parent)
    finally:
        if temp is not None:
            with suppress(OSError):
                os.unlink(temp)


def _write(handle: int, data: bytes | memoryview) -> None:
    remaining = memoryview(data)
    while remaining:
        remaining = remaining[os.write(handle, remaining) :]


def _write_sealed(handle: int, data: Stream) -> None:
    place = _place_of_seal(data.head)
    digest = hashlib.sha256()
    parts: Iterable[bytes | memoryview] = chain([data.head], data.parts)
    for part in parts:
        digest.update(part)
        _write(handle, part)
    os.pwrite(handle, digest.hexdigest().encode(), place)


def write_error(path: Path, error: OSError) -> WorkError:
    """Return the error for a disk that is full, broken or not writable."""
    return WorkError(
        f"{path} could not be written ({error.strerror or error}); nothing that was saved before is lost: "
        "put that right, then resume or start again."
    )


def sync_directory(path: Path) -> None:
    """Make renames and new names in a directory survive a power failure."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_synced_folder(path: Path) -> None:
    """Create a folder and its parents so that they survive a power failure; OSError if that fails."""
    for folder in reversed([place for place in (path, *path.parents) if not place.is_dir()]):
        with suppress(FileExistsError):  # another process was first
            os.mkdir(folder, 0o700)
        sync_directory(folder.parent)


def temporary_path(directory: Path) -> Path:
    """Return a unique name that `remove_leftovers` recognizes."""
    return directory / f".mooring-{secrets.token_hex(8)}.tmp"


def lock_handle(handle: int) -> None:
    """Mark a temporary file as in use; without file locks, `remove_leftovers` removes nothing."""
    with suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_EX)


@contextmanager
def directory_lock(directory: Path) -> Iterator[None]:
    """Lock a run directory for one writing process; a second process gets an error that names the first.

    The lock ends with its process. A file system without locks has none.
    """
    path, handle = directory / LOCK_FILE, None
    try:
        while handle is None:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = os.pread(handle, 200, 0).decode(errors="replace") or "another process"
                raise RequestError(
                    f"{directory} is in use by {owner}; wait until it has finished, or stop it."
                ) from None
            if not os.fstat(handle).st_nlink:  # its last holder has just removed it
                os.close(handle)
                handle = None
        os.truncate(handle, 0)
        os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    except RequestError:
        os.close(handle)  # type: ignore[arg-type]
        raise
    except OSError:  # no locks, or not writable: the first write will raise an error
        pass
    try:
        yield
    finally:
        if handle is not None:
            with suppress(OSError):
                os.unlink(path)
            os.close(handle)


def _claim(directory: Path) -> tuple[Path, int]:
    while True:
        temp = temporary_path(directory)
        handle = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        lock_handle(handle)
        if os.fstat(handle).st_nlink:
            return temp, handle
        os.close(handle)  # another process removed it between creation and lock


def remove_leftovers(directory: Path) -> list[Path]:
    """Remove temporary files of killed processes; those of a running process are locked and stay."""
    removed = []
    for temp in sorted(directory.glob(".mooring-*.tmp")):
        try:
            handle = os.open(temp, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)  # never wait for a pipe's other end
        except OSError:
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if temp.is_dir():
                shutil.rmtree(temp)
            else:
                os.unlink(temp)
            removed.append(temp)
        except OSError:
            continue
        finally:
            os.close(handle)
    return removed


def with_checksum(data: bytes) -> bytes:
    """Return `data` with its digest in place of BLANK_CHECKSUM, which it contains once."""
    place = _place_of_seal(data)
    digest = hashlib.sha256(data).hexdigest().encode()
    return b"".join((memoryview(data)[:place], digest, memoryview(data)[place + 64 :]))


def _place_of_seal(data: bytes) -> int:
    if data.count(CHECKSUM_MARK) != 1 or BLANK_CHECKSUM.encode() not in data:
        raise RequestError(
            f"a name or a value contains {CHECKSUM_MARK.decode()!r}, which marks the checksum of a file; rename it."
        )
    return data.index(CHECKSUM_MARK) + len(CHECKSUM_MARK)


def read_bytes(path: str | Path) -> bytes:
    """Return the bytes of a file; RequestError if it cannot be read."""
    with open_to_read(path) as file:
        return file.read()


@contextmanager
def open_to_read(path: str | Path) -> Iterator[BinaryIO]:
    """Open a file for reading; RequestError if it cannot be read."""
    try:
        if Path(path).exists() and not Path(path).is_file():
            raise RequestError(f"{path} is not a file.")  # reading a pipe would block
        with open(path, "rb") as file:
            yield file
    except FileNotFoundError:
        raise RequestError(f"{path} does not exist.") from None
    except OSError as error:
        raise RequestError(f"{path} could not be read: {error.strerror or error}.") from error


def read_checked(path: str | Path) -> bytes:
    """Return the bytes of a file with a valid seal; DamagedFile otherwise."""
    data = read_bytes(path)
    check_checksum(path, data, ())
    return data


def check_checksum(path: str | Path, head: bytes, parts: Iterable[bytes | memoryview]) -> None:
    """Raise DamagedFile unless the seal in `head` matches the file, which is `head` followed by `parts`."""
    if head.count(CHECKSUM_MARK) != 1:
        raise DamagedFile(f"{path} is damaged or was not written by Mooring: it carries no checksum.")
    place = head.index(CHECKSUM_MARK) + len(CHECKSUM_MARK)
    view = memoryview(head)
    digest = hashlib.sha256(view[:place])
    blocks: Iterable[bytes | memoryview] = chain([_BLANK, view[place + 64 :]], parts)
    for part in blocks:
        digest.update(part)
    if digest.hexdigest().encode() != head[place : place + 64]:
        raise DamagedFile(f"{path} is damaged: it was cut or changed after it was saved.")


def to_plain(value: object, real: Callable[[float], object] = float) -> Any:
    """Return arrays, tuples and dataclasses as numbers, text, lists and tables; a dataclass drops its Nones."""
    if isinstance(value, np.generic | np.ndarray | Tensor):
        value = value.tolist()
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return real(value)
    if isinstance(value, list | tuple):
        return [to_plain(item, real) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        pairs = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
        value = {name: item for name, item in pairs if item is not None}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: to_plain(item, real) for key, item in value.items()}
    raise TypeError(f"{type(value).__name__} cannot be stored: {value!r}")


def _json_number(value: float) -> float | str | None:
    if math.isnan(value):
        return None
    return value if math.isfinite(value) else ("Infinity" if value > 0 else "-Infinity")


def to_json(value: object) -> str:
    """Return strict JSON on one line, for other programs; NaN and infinities as in `json_bytes`."""
    return json.dumps(to_plain(value, _json_number), allow_nan=False, ensure_ascii=False)


def json_bytes(value: JsonObject) -> bytes:
    """Return a sealed file of sorted, strict JSON; the seal is its key "seal".

    NaN is null (no value), an infinity is the text "Infinity" or "-Infinity".
    """
    if "seal" in value:
        raise ValueError("the key 'seal' belongs to the file")
    content = to_plain({**value, "seal": BLANK_CHECKSUM}, _json_number)
    return with_checksum(
        (json.dumps(content, sort_keys=True, indent=1, allow_nan=False, ensure_ascii=False) + "\n").encode()
    )


def write_json(path: str | Path, value: JsonObject, *, durable: bool = True) -> None:
    write_atomically(path, json_bytes(value), durable=durable)


def read_json(path: str | Path) -> JsonObject:
    """Return the content of a file of `write_json`; numbers that are not finite are as in `json_bytes`."""
    data = read_checked(path)
    try:
        value = json.loads(data)
        del value["seal"]
    except (ValueError, TypeError, KeyError) as error:
        raise DamagedFile(f"{path} is not a JSON file of Mooring's: {error}.") from error
    return value


def frame_from_rows(rows: Sequence[NamedValues]) -> pd.DataFrame:
    """Return rows of `json_bytes` (or equal ones in memory) as a table; in columns of numbers null becomes NaN."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    return pd.DataFrame({name: _column([row.get(name) for row in rows]) for name in names})


def _column(values: list[object]) -> list[object]:
    special_values = {None: math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
    numbers = [
        special_values.get(value, value) if value is None or isinstance(value, str) else value for value in values
    ]
    is_numeric = all(isinstance(value, int | float | np.number) and not isinstance(value, bool) for value in numbers)
    return numbers if is_numeric and any(value is not None for value in values) else values


def parquet_bytes(frame: pd.DataFrame | pa.Table) -> bytes:
    """A sealed Parquet file: equal contents, equal bytes. Categories become plain values, the index is left out."""
    if isinstance(frame, pd.DataFrame):
        coded = frame.select_dtypes("category").columns
        frame = frame.astype({name: frame[name].cat.categories.dtype for name in coded})
        frame = pa.Table.from_pandas(frame, preserve_index=False)
    sink = io.BytesIO()
    pq.write_table(frame.replace_schema_metadata({_PARQUET_KEY: BLANK_CHECKSUM}), sink)
    return with_checksum(sink.getvalue())


def csv_bytes(frame: pd.DataFrame) -> bytes:
    """Return a CSV file in which spreadsheets find no formula: such cells begin with an apostrophe."""
    safe = frame.copy()
    for name in frame.columns[[not pd.api.types.is_numeric_dtype(kind) for kind in frame.dtypes]]:
        safe[name] = frame[name].map(_escape_formula)
    return safe.rename(columns=_escape_formula).to_csv(index=False).encode()


def excel_bytes(frame: pd.DataFrame) -> bytes:
    """Return a workbook; texts that begin like formulas stay texts."""
    if find_spec("openpyxl") is None:
        raise RequestError("Excel files are written with the package openpyxl: pip install 'mooring-fl[excel]'.")
    content = io.BytesIO()
    with pd.ExcelWriter(content, engine="openpyxl") as book:
        frame.to_excel(book, index=False, sheet_name="predictions")
        for row in book.sheets["predictions"].iter_rows():
            for cell in row:
                if cell.data_type == "f":
                    cell.data_type = "s"
    return content.getvalue()


def _escape_formula(cell: object) -> object:
    if not isinstance(cell, str) or not cell.startswith(("=", "+", "-", "@", "\t", "\r")):
        return cell
    try:
        float(cell)
    except ValueError:
        return "'" + cell
    return cell  # a number


def write_parquet(path: str | Path, frame: pd.DataFrame | pa.Table) -> None:
    write_atomically(path, parquet_bytes(frame))


def read_table(path: str | Path) -> pa.Table:
    """Return the Arrow table that `write_parquet` wrote."""
    data = read_checked(path)
    try:
        return read_bounded(pa.BufferReader(data), str(path)).replace_schema_metadata(None)
    except (pa.ArrowException, OSError) as error:
        raise DamagedFile(f"{path} is not a Parquet file of Mooring's: {error}.") from error


def read_parquet(path: str | Path) -> pd.DataFrame:
    return read_table(path).to_pandas()
