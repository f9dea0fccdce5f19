"""Files as tables: a file, or a folder with one table per client.

Rows are counted from 1 in sentences for people (the header is not counted) and from 0 in `Table.row`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import pandas as pd

from mooring.core.errors import RequestError
from mooring.data.cell_formats import CellFormat
from mooring.data.file_readers import ENDINGS, CellReading, file_ending, file_stem, read_file, require_distinct_names
from mooring.data.typed_columns import AmbiguousDates, ReadingOptions, StrayCells, type_columns

DEFAULT_READING = CellReading()
RUN_DIRECTORY_FILES = ("run.toml", "schema.json")  # that a run directory has, and a folder of tables has not

RowLocator = Callable[[int], str]  # returns the location of a row in words


class Note(str):
    """A sentence on the data with what it is about: the clients that it names, and its column. A client of a federation
    may read notes that name no client but itself."""

    clients: tuple[str, ...]
    column: str | None

    def __new__(cls, text: str, clients: Iterable[str] = (), column: str | None = None) -> Self:
        note = super().__new__(cls, text)
        note.clients, note.column = tuple(clients), column
        return note

    def is_visible_to(self, client: str) -> bool:
        return set(self.clients) <= {client}


@dataclass(frozen=True, eq=False)
class Table:
    """A source's rows in one frame, and the source's metadata."""

    frame: pd.DataFrame
    title: str
    client: str | None = None  # the columns that the source itself fixes
    target: str | None = None
    kind: str | None = None
    origin: np.ndarray | None = None  # the file (or client) of each row, if there are several
    row: np.ndarray | None = None  # each row's number inside its file, from 0; None: its place in the frame
    x: Any = None  # inputs that are not a table (images, tokens): a tensor with one row per row of the frame
    notes: list[str] = field(default_factory=list)
    formats: dict[str, CellFormat] = field(default_factory=dict)  # of columns that were not plain numbers or ISO dates
    decimal: str = ""  # the decimal mark of the file, if it has one
    strays: tuple[StrayCells, ...] = ()  # cells that are not numbers in columns of numbers
    ambiguous: tuple[AmbiguousDates, ...] = ()
    clip: dict[str, tuple[float, float]] = field(default_factory=dict)  # limits of winsorized columns

    def rows(self) -> np.ndarray:
        return np.arange(len(self.frame)) if self.row is None else self.row

    def place(self, position: int) -> str:
        location = self.title if self.origin is None else self.origin[position]
        return f"{location}, row {int(self.rows()[position]) + 1}"


def count_phrase(count: int, noun: str) -> str:
    """1 row, 2 rows."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def quote_list(names: Iterable[object], max_names: int = 12) -> str:
    """'a', 'b', 'c' and 4 more."""
    quoted = [f"'{name}'" for name in names]
    return ", ".join(quoted[:max_names]) + (f" and {len(quoted) - max_names} more" if len(quoted) > max_names else "")


def suggest_name(name: str, candidates: Iterable[str]) -> str:
    """Return a sentence that proposes the closest candidate, or ""."""
    folded = {str(k).casefold(): str(k) for k in candidates}
    close = difflib.get_close_matches(name.casefold(), folded, n=1, cutoff=0.6)
    return f" Did you mean '{folded[close[0]]}'?" if close else ""


def require_column(frame: pd.DataFrame, name: str, role: str, title: str) -> None:
    """Refuse a column name that the table does not have."""
    if name not in frame.columns:
        raise RequestError(
            f"{title}: there is no {role} column '{name}'; the columns are {quote_list(frame.columns)}."
            f"{suggest_name(str(name), frame.columns)}"
        )


def read_table(path: str | Path, cells: CellReading = DEFAULT_READING) -> Table:
    """Read a file or a folder; `cells` names the columns that are not converted."""
    path = Path(path)
    if not path.exists():
        beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        raise RequestError(f"{path}: there is no such file or folder.{suggest_name(path.name, beside)}")
    if path.is_dir():
        return read_folder(path, cells)
    if not path.is_file():
        raise RequestError(f"{path}: is neither a file nor a folder.")  # reading a pipe would block
    content = read_file(path, cells)
    row = content.frame.index.to_numpy()
    table = Table(
        content.frame.reset_index(drop=True), path.name, row=row, decimal=content.decimal, notes=content.notes
    )
    return with_types(table, cells.typing(content.decimal))


def with_types(table: Table, options: ReadingOptions) -> Table:
    """Return the table with its text columns converted to numbers and dates."""
    typed = type_columns(table.frame, options)
    return replace(
        table,
        frame=typed.frame,
        formats=typed.formats,
        strays=tuple(typed.strays),
        ambiguous=tuple(typed.ambiguous),
        notes=[*table.notes, *typed.notes],
    )


def join_typed(tables: dict[str, Table], title: str, labels: list[str]) -> Table:
    """Return one table from a table per client, with the formats of their cells."""
    joined = join({name: table.frame for name, table in tables.items()}, title, labels)
    parts = list(tables.values())
    starts = np.cumsum([0, *(len(table.frame) for table in parts)])
    return replace(
        joined,
        row=np.concatenate([table.rows() for table in parts]),
        notes=list(dict.fromkeys(note for table in parts for note in table.notes)),
        formats={name: form for table in parts for name, form in table.formats.items()},
        decimal=next((table.decimal for table in parts if table.decimal), ""),
        strays=tuple(s._replace(rows=s.rows + start) for table, start in zip(parts, starts) for s in table.strays),
        ambiguous=tuple(a for table in parts for a in table.ambiguous),
    )


def is_run_directory(folder: Path) -> bool:
    """Return whether a folder is the result of a run, which has tables of its own."""
    return all((folder / name).is_file() for name in RUN_DIRECTORY_FILES)


def read_folder(folder: Path, cells: CellReading) -> Table:
    """Return the table of a folder with one file per client; the file's name without its ending is the client's
    name."""
    if is_run_directory(folder):
        raise RequestError(f"{folder}: is the directory of a run; give the table or the folder that it was made from.")
    entries = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    files = [entry for entry in entries if file_ending(entry) in ENDINGS]
    if not files:
        raise RequestError(
            f"{folder}: the folder holds no table; one {' or '.join(ENDINGS)} file per client is needed."
        )
    stems = [file_stem(file) for file in files]
    twice = next((stem for stem in stems if stems.count(stem) > 1), None) if len(set(stems)) < len(stems) else None
    if twice is not None:
        raise RequestError(
            f"{folder}: two files are named '{twice}'; a file's name without its ending is the client's name."
        )
    tables = {stem: read_table(file, cells) for stem, file in zip(stems, files)}
    ignored = [entry.name for entry in entries if entry not in files]
    notes = [f"{folder.name}: {quote_list(ignored, 3)} ignored."] if ignored else []
    joined = join_typed(tables, folder.name, [file.name for file in files])
    return replace(joined, notes=[*joined.notes, *notes])


def join(frames: dict[str, pd.DataFrame], title: str, labels: list[str]) -> Table:
    """Return one table from a table per client; `labels` describe the origin of each."""
    reference = next(iter(frames.values()))
    for frame, label in zip(frames.values(), labels):
        require_distinct_names([str(name) for name in frame.columns], label)
        lacking = [c for c in reference.columns if c not in frame.columns]
        extra = [c for c in frame.columns if c not in reference.columns]
        if lacking or extra:
            verb, column = ("lacks", lacking[0]) if lacking else ("has the extra", extra[0])
            raise RequestError(f"{title}: {label} {verb} column '{column}'; all must have the columns of {labels[0]}.")
    sizes = [len(frame) for frame in frames.values()]
    client = next(name for name in ("client", "client_name", "client_file") if name not in reference.columns)
    combined = pd.concat(list(frames.values()), ignore_index=True)
    combined[client] = np.repeat(np.array(list(frames), dtype=object), sizes)
    row = np.concatenate([np.arange(size) for size in sizes])
    return Table(combined, title, client=client, origin=np.repeat(np.array(labels, dtype=object), sizes), row=row)
