"""One file as a data frame: CSV in the encodings and dialects that people send, Excel, Parquet; CSV may be gzipped."""

from __future__ import annotations

import csv
import gzip
import importlib.util
import io
import re
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import pyarrow
import pyarrow.parquet

from mooring.core.errors import RequestError
from mooring.core.size_limits import HOW_TO_RAISE_LIMIT, MAX_UNPACKED_BYTES, read_bounded

CSV_ENDINGS, PARQUET_ENDINGS, EXCEL_ENDINGS = (".csv", ".tsv", ".txt"), (".parquet", ".pq"), (".xlsx", ".xlsm")
GZIP_ENDING = ".gz"
ENDINGS = (*CSV_ENDINGS, *(ending + GZIP_ENDING for ending in CSV_ENDINGS), *EXCEL_ENDINGS, *PARQUET_ENDINGS)
# What stands for a missing value: pandas' own list, and how the UCI repository, and SAS and Stata, write it.
MISSING_TEXTS = (
    "", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>", "N/A", "NA",
    "NULL", "NaN", "None", "n/a", "nan", "null", "?", ".",
)  # fmt: skip
SNIFF_BYTES = (
    65_536  # bytes or characters that show whether it is text, how decimals are written, and how the file ends
)
UTF8, WINDOWS, LATIN = "utf-8-sig", "cp1252", "latin-1"


class CellReading(NamedTuple):
    """Columns that are read in their own way."""

    text: frozenset[str] = frozenset()  # stay as they are written (no 007 to 7)
    names: frozenset[str] = frozenset()  # so do these, and NA or None is a name: only an empty cell is missing

    def dtypes(self, header: Iterable[str]) -> dict[str, type]:
        return {name: str for name in header if name in self.text | self.names}

    def missing(self, header: Iterable[str]) -> dict[str, list[str]]:
        return {name: [""] if name in self.names else list(MISSING_TEXTS) for name in header}


def file_ending(path: Path) -> str:
    """.csv, or .csv.gz."""
    endings = [part.lower() for part in path.suffixes[-2:]]
    return "".join(endings) if endings and endings[-1] == GZIP_ENDING else path.suffix.lower()


def file_stem(path: Path) -> str:
    """The name without its ending."""
    return path.name[: len(path.name) - len(file_ending(path))]


def read_file(path: Path, cells: CellReading) -> tuple[pd.DataFrame, list[str]]:
    """The rows of a file, and notes on how it was read."""
    ending = file_ending(path)
    if ending not in ENDINGS:
        raise RequestError(
            f"{path.name}: the ending '{ending}' is not known; it should be one of {', '.join((*ENDINGS, '.npz'))}, "
            "or a folder."
        )
    notes: list[str] = []
    try:
        if ending in PARQUET_ENDINGS:
            frame = read_parquet(path)
        elif ending in EXCEL_ENDINGS:
            frame, notes = read_excel(path, cells)
        else:
            frame, notes = read_csv(path, cells)
    except OSError as failure:
        raise RequestError(f"{path.name}: cannot be read ({failure.strerror or failure}).") from failure
    if frame.empty:
        raise RequestError(f"{path.name}: the table has no rows.")
    return frame, notes


def require_distinct_names(names: Iterable[str], title: str) -> None:
    twice = next(((name, many) for name, many in Counter(names).items() if name and many > 1), None)
    if twice is not None:
        raise RequestError(f"{title}: column '{twice[0]}' appears {twice[1]} times; names must differ.")


def read_parquet(path: Path) -> pd.DataFrame:
    try:
        require_distinct_names(pyarrow.parquet.read_schema(path).names, path.name)
        content = read_bounded(path, path.name)
    except (pyarrow.ArrowException, OSError) as failure:
        raise RequestError(f"{path.name}: is not a readable Parquet file; it may be cut off or damaged.") from failure
    frame = content.to_pandas().reset_index(drop=True)
    for field in content.schema:
        if pyarrow.types.is_binary(field.type) or pyarrow.types.is_large_binary(field.type):
            frame[field.name] = frame[field.name].map(bytes.hex, na_action="ignore")  # text, whatever the bytes are
    return frame


def read_excel(path: Path, cells: CellReading) -> tuple[pd.DataFrame, list[str]]:
    """The first sheet; its first row is the header."""
    if importlib.util.find_spec("openpyxl") is None:
        raise RequestError(
            f"{path.name}: Excel files are read with the package openpyxl, which is not installed; "
            "install it, or save the table as CSV."
        )
    try:
        with zipfile.ZipFile(path) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > MAX_UNPACKED_BYTES:
                raise RequestError(
                    f"{path.name}: unpacks to more than {MAX_UNPACKED_BYTES:,} bytes; {HOW_TO_RAISE_LIMIT}."
                )
        with pd.ExcelFile(path, engine="openpyxl") as book:
            sheets = list(book.sheet_names)
            raw = pd.read_excel(book, sheet_name=sheets[0], header=None, nrows=1)
            header = named_columns(["" if pd.isna(name) else str(name) for name in (raw.iloc[0] if len(raw) else [])])
            require_distinct_names(header, path.name)
            frame = pd.read_excel(
                book,
                sheet_name=sheets[0],
                names=header,
                header=0,
                dtype=cells.dtypes(header),
                keep_default_na=False,
                na_values=cells.missing(header),
            )
    except (zipfile.BadZipFile, KeyError, ValueError, SyntaxError) as failure:
        if isinstance(failure, RequestError):
            raise
        raise RequestError(f"{path.name}: is not a readable Excel file; it may be cut off or damaged.") from failure
    notes = [f"{path.name}: the first of {len(sheets)} sheets was read, '{sheets[0]}'."] if len(sheets) > 1 else []
    return frame, notes


def unpacked(path: Path) -> bytes:
    """What is in a gzipped file."""
    try:
        with gzip.open(path) as file:
            content = file.read(MAX_UNPACKED_BYTES + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as failure:
        raise RequestError(f"{path.name}: is not a readable .gz file; it may be cut off or damaged.") from failure
    if len(content) > MAX_UNPACKED_BYTES:
        raise RequestError(f"{path.name}: unpacks to more than {MAX_UNPACKED_BYTES:,} bytes; {HOW_TO_RAISE_LIMIT}.")
    return content


def named_columns(header: list[str]) -> list[str]:
    """Names without spaces around them; a column without a name is called by its place."""
    stripped = [name.strip() for name in header]
    return [name or f"Unnamed: {i}" for i, name in enumerate(stripped)]


def read_csv(path: Path, cells: CellReading) -> tuple[pd.DataFrame, list[str]]:
    """The rows of a CSV file; the header line, read to its end, tells the separator."""
    content = unpacked(path) if path.suffix.lower() == GZIP_ENDING else None
    with io.BytesIO(content) if content is not None else path.open("rb") as file:
        head = file.read(SNIFF_BYTES)
        size = file.seek(0, io.SEEK_END)
        file.seek(max(0, size - SNIFF_BYTES))
        tail = file.read()
    if b"\0" in head:
        raise RequestError(f"{path.name}: is not a text table (it holds binary data).")
    if not head.strip():
        raise RequestError(f"{path.name}: the file is empty; a header line and rows are needed.")
    encoding = encoding_of(path, content)
    with text_of(path, content, encoding) as lines:
        try:
            header, separator = read_header(lines)
        except csv.Error as failure:
            raise RequestError(f"{path.name}: the header line cannot be read: {failure}.") from failure
        sample = lines.read(SNIFF_BYTES)
    header = named_columns(header)
    require_distinct_names(header, path.name)  # also names that differ in blanks at their ends only
    refuse_cut(tail.decode(encoding, errors="replace"), separator, len(header), path.name)
    comma = separator == ";" and re.search(r"(^|;)\s*-?\d+,\d+\s*(;|$)", sample, re.MULTILINE) is not None
    notes = [f"{path.name} was read with decimal commas."] if comma else []
    if encoding != UTF8:
        notes.append(f"{path.name} is not UTF-8 text; it was read as {encoding}.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # rows longer than the header
            frame = pd.read_csv(
                path if content is None else io.BytesIO(content),
                sep=separator,
                decimal="," if comma else ".",
                encoding=encoding,
                header=0,
                names=header,
                index_col=False,
                skipinitialspace=True,
                keep_default_na=False,
                na_values=cells.missing(header),
                dtype=cells.dtypes(header),
                low_memory=False,
            )
            return frame, notes
    except pd.errors.EmptyDataError as failure:
        raise RequestError(f"{path.name}: the file is empty; a header line and rows are needed.") from failure
    except pd.errors.ParserWarning as failure:
        raise RequestError(f"{path.name}: its rows hold more values than the header has columns.") from failure
    except pd.errors.ParserError as failure:
        reason = str(failure).removeprefix("Error tokenizing data. C error: ").strip()
        raise RequestError(f"{path.name}: is not a regular table: {reason}.") from failure


def encoding_of(path: Path, content: bytes | None) -> str:
    """UTF-8 where the whole file is; else what Windows programs write, or Latin-1, which reads any bytes."""
    for encoding in (UTF8, WINDOWS):
        try:
            with text_of(path, content, encoding) as lines:
                while lines.read(2**20):
                    pass
            return encoding
        except UnicodeDecodeError:
            continue
    return LATIN


def text_of(path: Path, content: bytes | None, encoding: str) -> io.TextIOWrapper:
    binary = path.open("rb") if content is None else io.BytesIO(content)
    return io.TextIOWrapper(binary, encoding=encoding, newline=None)


def read_header(lines: io.TextIOWrapper) -> tuple[list[str], str]:
    """The names in the first line that is not blank, as long as it may be, and what separates them."""
    first = next((line for line in iter(lines.readline, "") if line.strip()), "")
    separator = max(",;\t", key=first.count)

    def from_first() -> Iterable[str]:
        yield first
        yield from iter(lines.readline, "")  # a quoted name may hold a line end

    return next(csv.reader(from_first(), delimiter=separator, skipinitialspace=True)), separator


def refuse_cut(tail: str, separator: str, columns: int, title: str) -> None:
    """A last line without an end and with too few values means that the file was cut off."""
    lines = tail.splitlines()
    if len(lines) < 2 or tail.endswith(("\n", "\r")) or '"' in lines[-1]:
        return
    found = lines[-1].count(separator) + 1
    if found < columns:
        raise RequestError(f"{title}: the last line has {found} of {columns} values; the file seems to be cut off.")
