"""Files as tables: CSV, Parquet, or a folder with one table per client.

Rows are counted from 1 in sentences for people (the header is not counted) and from 0 in `Table.row`.
"""

from __future__ import annotations

import csv
import difflib
import io
import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow
import pyarrow.parquet

from mooring.core.errors import RequestError

CSV_ENDINGS, PARQUET_ENDINGS = (".csv", ".tsv", ".txt"), (".parquet", ".pq")
EXTRA_MISSING = ("?", ".")  # how the UCI repository, and SAS and Stata, write a missing value
SNIFFED_BYTES = 65_536

Place = Callable[[int], str]  # where the row at a position of the table stands, in words


@dataclass(frozen=True, eq=False)
class Table:
    """A source's rows in one frame, and what the source says about itself."""

    frame: pd.DataFrame
    title: str
    client: str | None = None  # the columns that the source itself fixes
    target: str | None = None
    kind: str | None = None
    drop: tuple[str, ...] = ()  # columns that the source itself says are no features
    drop_small: bool = False  # leave out clients too small to split, whatever the caller says
    origin: np.ndarray | None = None  # the file (or client) of each row, where there are several
    row: np.ndarray | None = None  # each row's number inside its file, from 0; None: its place in the frame
    x: Any = None  # inputs that are no table (images, tokens): a tensor with a row for each row of the frame
    notes: list[str] = field(default_factory=list)

    def rows(self) -> np.ndarray:
        return np.arange(len(self.frame)) if self.row is None else self.row

    def place(self, position: int) -> str:
        where = self.title if self.origin is None else self.origin[position]
        return f"{where}, row {int(self.rows()[position]) + 1}"


def counted(count: int, what: str) -> str:
    """1 row, 2 rows."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def listing(names: Iterable[Any], most: int = 12) -> str:
    """'a', 'b', 'c' and 4 more."""
    names = [f"'{name}'" for name in names]
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def near(name: str, known: Iterable[str]) -> str:
    """A sentence that proposes the closest of the known names, or nothing."""
    folded = {str(k).casefold(): str(k) for k in known}
    close = difflib.get_close_matches(name.casefold(), folded, n=1, cutoff=0.6)
    return f" Did you mean '{folded[close[0]]}'?" if close else ""


def need_column(frame: pd.DataFrame, name: str, role: str, title: str) -> None:
    """Refuse a column name that the table does not have."""
    if name not in frame.columns:
        raise RequestError(
            f"{title}: there is no {role} column '{name}'; the columns are {listing(frame.columns)}."
            f"{near(str(name), frame.columns)}"
        )


def read_table(path: str | Path, text: Iterable[str] = ()) -> Table:
    """Read a file or a folder; the columns named in `text` stay as they are written (no 007 to 7)."""
    path, text = Path(path), set(text)
    if not path.exists():
        beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        raise RequestError(f"{path}: there is no such file or folder.{near(path.name, beside)}")
    if path.is_dir():
        return read_folder(path, text)
    frame, notes = read_one(path, text)
    return Table(frame, path.name, notes=notes)


def read_one(path: Path, text: set[str]) -> tuple[pd.DataFrame, list[str]]:
    ending = path.suffix.lower()
    if ending not in CSV_ENDINGS + PARQUET_ENDINGS:
        known = ", ".join((*CSV_ENDINGS, *PARQUET_ENDINGS, ".npz"))
        raise RequestError(
            f"{path.name}: the ending '{ending}' is not known; it should be one of {known}, or a folder."
        )
    try:
        frame, notes = read_csv(path, text) if ending in CSV_ENDINGS else (read_parquet(path), [])
    except OSError as failure:
        raise RequestError(f"{path.name}: cannot be read ({failure.strerror or failure}).") from failure
    if frame.empty:
        raise RequestError(f"{path.name}: the table has no rows.")
    return frame, notes


def refuse_twins(names: list[str], title: str) -> None:
    twice = [name for name in dict.fromkeys(names) if name and names.count(name) > 1]
    if twice:
        raise RequestError(f"{title}: column '{twice[0]}' appears {names.count(twice[0])} times; names must differ.")


def read_parquet(path: Path) -> pd.DataFrame:
    try:
        refuse_twins(pyarrow.parquet.read_schema(path).names, path.name)
        content = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as failure:
        raise RequestError(f"{path.name}: is not a readable Parquet file; it may be cut off or damaged.") from failure
    return content.to_pandas().reset_index(drop=True)


def read_csv(path: Path, text: set[str]) -> tuple[pd.DataFrame, list[str]]:
    """The rows of a CSV file; the header line tells the separator."""
    with path.open("rb") as file:
        head = file.read(SNIFFED_BYTES)
        file.seek(max(0, path.stat().st_size - SNIFFED_BYTES))
        tail = file.read()
    if b"\0" in head:
        raise RequestError(f"{path.name}: is not a text table (it holds binary data).")
    if not head.strip():
        raise RequestError(f"{path.name}: the file is empty; a header line and rows are needed.")
    sample = head.decode("utf-8-sig", errors="replace")
    first = sample.lstrip("\r\n").splitlines()[0]
    separator = max(",;\t", key=first.count)
    header = [name.strip() for name in next(csv.reader(io.StringIO(sample.lstrip("\r\n")), delimiter=separator))]
    refuse_twins(header, path.name)
    refuse_cut(tail.decode("utf-8", errors="replace"), separator, len(header), path.name)
    comma = separator == ";" and re.search(r";\s*-?\d+,\d+\s*(;|$)", sample, re.MULTILINE) is not None
    notes = [f"{path.name} was read with decimal commas."] if comma else []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # rows longer than the header
            frame = pd.read_csv(
                path,
                sep=separator,
                decimal="," if comma else ".",
                encoding="utf-8-sig",
                index_col=False,
                skipinitialspace=True,
                na_values=list(EXTRA_MISSING),
                dtype={name: str for name in header if name in text},
                low_memory=False,
            )
            return frame.rename(columns=str.strip), notes
    except UnicodeDecodeError as failure:
        raise RequestError(f"{path.name}: is not UTF-8 text; save it with the encoding UTF-8.") from failure
    except pd.errors.EmptyDataError as failure:
        raise RequestError(f"{path.name}: the file is empty; a header line and rows are needed.") from failure
    except pd.errors.ParserWarning as failure:
        raise RequestError(f"{path.name}: its rows hold more values than the header has columns.") from failure
    except pd.errors.ParserError as failure:
        reason = str(failure).removeprefix("Error tokenizing data. C error: ").strip()
        raise RequestError(f"{path.name}: is not a regular table: {reason}.") from failure


def refuse_cut(tail: str, separator: str, columns: int, title: str) -> None:
    """A last line without an end and with too few values means that the file was cut off."""
    lines = tail.splitlines()
    if len(lines) < 2 or tail.endswith(("\n", "\r")) or '"' in lines[-1]:
        return
    found = lines[-1].count(separator) + 1
    if found < columns:
        raise RequestError(f"{title}: the last line has {found} of {columns} values; the file seems to be cut off.")


def read_folder(folder: Path, text: set[str]) -> Table:
    """One table per client; the file's stem is the client's name."""
    endings = CSV_ENDINGS + PARQUET_ENDINGS
    entries = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    files = [entry for entry in entries if entry.suffix.lower() in endings]
    if not files:
        raise RequestError(
            f"{folder}: the folder holds no table; one {' or '.join(endings)} file per client is needed."
        )
    stems = [file.stem for file in files]
    twice = next((stem for stem in stems if stems.count(stem) > 1), None) if len(set(stems)) < len(stems) else None
    if twice is not None:
        raise RequestError(f"{folder}: two files are named '{twice}'; a file's stem is the client's name.")
    frames, notes = zip(*(read_one(file, text) for file in files))
    ignored = [entry.name for entry in entries if entry not in files]
    said = [note for notes_of_one in notes for note in notes_of_one]
    if ignored:
        said.append(f"{folder.name}: {listing(ignored, 3)} ignored.")
    return replace(join(dict(zip(stems, frames)), folder.name, [file.name for file in files]), notes=said)


def join(frames: dict[str, pd.DataFrame], title: str, labels: list[str]) -> Table:
    """One table from a table per client; `labels` say in words where each came from."""
    reference = next(iter(frames.values()))
    for frame, label in zip(frames.values(), labels):
        refuse_twins([str(name) for name in frame.columns], label)
        lacking = [c for c in reference.columns if c not in frame.columns]
        extra = [c for c in frame.columns if c not in reference.columns]
        if lacking or extra:
            verb, column = ("lacks", lacking[0]) if lacking else ("has the extra", extra[0])
            raise RequestError(f"{title}: {label} {verb} column '{column}'; all must have the columns of {labels[0]}.")
    sizes = [len(frame) for frame in frames.values()]
    client = next(name for name in ("client", "client_name", "client_file") if name not in reference.columns)
    whole = pd.concat(list(frames.values()), ignore_index=True)
    whole[client] = np.repeat(np.array(list(frames), dtype=object), sizes)
    row = np.concatenate([np.arange(size) for size in sizes])
    return Table(whole, title, client=client, origin=np.repeat(np.array(labels, dtype=object), sizes), row=row)
