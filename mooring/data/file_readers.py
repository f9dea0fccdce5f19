"""One file as a data frame: CSV in the encodings and dialects that people send, Excel, Parquet; CSV may be gzipped."""

from __future__ import annotations

import codecs
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

import numpy as np
import pandas as pd
import pyarrow
import pyarrow.parquet
from pandas.api import types

from mooring.core.errors import RequestError
from mooring.core.size_limits import HOW_TO_RAISE_LIMIT, MAX_UNPACKED_BYTES, read_bounded
from mooring.data.cell_formats import COMMA, CellFormat
from mooring.data.character_encoding import UTF8, example_word, guess_code_page
from mooring.data.sheet_layout import MIN_HEADER_SHARE, TOTAL, SheetLayout, find_layout
from mooring.data.typed_columns import ReadingOptions

CSV_ENDINGS, PARQUET_ENDINGS, EXCEL_ENDINGS = (".csv", ".tsv", ".txt"), (".parquet", ".pq"), (".xlsx", ".xlsm")
GZIP_ENDING = ".gz"
ENDINGS = (*CSV_ENDINGS, *(ending + GZIP_ENDING for ending in CSV_ENDINGS), *EXCEL_ENDINGS, *PARQUET_ENDINGS)
# Texts for missing values: pandas' own list, and those of the UCI repository, SAS and Stata.
MISSING_TEXTS = (
    "", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>", "N/A", "NA",
    "NULL", "NaN", "None", "n/a", "nan", "null", "?", ".",
)  # fmt: skip
SNIFF_BYTES = (
    65_536  # bytes or characters that show whether it is text, how decimals are written, and how the file ends
)
LEADING_ZEROS = re.compile(r"^0\d{3,}$")  # of codes: postal codes, numbers of articles
MAX_BYTES_FOR_SHORT_LINES = 50_000_000  # of files that are searched for lines with too few cells
HEADER_SEARCH_LINES = 30  # at the top of a CSV file


class CellReading(NamedTuple):
    """Columns that need special reading, and formats of cells."""

    text: frozenset[str] = frozenset()  # not converted (007 does not become 7)
    names: frozenset[str] = frozenset()  # not converted, and NA or None is a name: only an empty cell is missing
    categorical: frozenset[str] = frozenset()  # read as categories
    decimal: str = ""  # "." or ","; "": detected by column
    decimal_hint: str = ""  # the decimal mark of an earlier table
    date_format: str = ""  # such as %d.%m.%Y; "": detected
    na: tuple[str, ...] = ()  # further texts that stand for a missing value
    encoding: str = ""  # of a CSV file; "": detected
    encoding_hint: str = ""  # that of an earlier table
    sheet: str = ""  # of a workbook: its name or number; "": the first that contains a table
    header_row: int | None = None  # from 1; None: detected
    formats: tuple[tuple[str, CellFormat], ...] = ()  # of an earlier table's columns

    @property
    def as_written(self) -> frozenset[str]:
        """Columns that are read as text."""
        commas = {name for name, form in self.formats if form.decimal == COMMA}
        return self.text | self.names | self.categorical | commas

    def dtypes(self, header: Iterable[str]) -> dict[str, type]:
        return {name: str for name in header if name in self.as_written}

    def missing(self, header: Iterable[str]) -> dict[str, list[str]]:
        return {name: [""] if name in self.names else [*MISSING_TEXTS, *self.na] for name in header}

    def typing(self, hint: str = "") -> ReadingOptions:
        """Return the options of the conversion of text columns to numbers and dates."""
        hint = hint or self.decimal_hint
        unconverted = self.text | self.names
        return ReadingOptions(
            unconverted, self.categorical, self.decimal, hint, self.date_format, self.na, self.formats
        )


class FileContent(NamedTuple):
    """A file's rows; the index contains their numbers in the file, from 0."""

    frame: pd.DataFrame
    decimal: str  # "," where the file shows that it uses decimal commas
    notes: list[str]


def file_ending(path: Path) -> str:
    """.csv, or .csv.gz."""
    endings = [part.lower() for part in path.suffixes[-2:]]
    return "".join(endings) if endings and endings[-1] == GZIP_ENDING else path.suffix.lower()


def file_stem(path: Path) -> str:
    """The name without its ending."""
    return path.name[: len(path.name) - len(file_ending(path))]


def read_file(path: Path, cells: CellReading) -> FileContent:
    """The rows of a file."""
    ending = file_ending(path)
    if ending not in ENDINGS:
        raise RequestError(
            f"{path.name}: the ending '{ending}' is not known; it should be one of {', '.join((*ENDINGS, '.npz'))}, "
            "or a folder."
        )
    try:
        if ending in PARQUET_ENDINGS:
            content = FileContent(read_parquet(path), "", [])
        elif ending in EXCEL_ENDINGS:
            content = read_excel(path, cells)
        else:
            content = read_csv(path, cells)
    except OSError as failure:
        raise RequestError(f"{path.name}: cannot be read ({failure.strerror or failure}).") from failure
    if content.frame.empty:
        raise RequestError(f"{path.name}: the table has no rows.")
    return content


def require_distinct_names(names: Iterable[str], title: str) -> None:
    twice = next(((name, count) for name, count in Counter(names).items() if name and count > 1), None)
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


def read_excel(path: Path, cells: CellReading) -> FileContent:
    """Return a sheet's table without titles above the header, total rows and footers, and notes on these."""
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
            names = [str(name) for name in book.sheet_names]
            requested_sheet = choose_sheet(path.name, names, cells.sheet) if cells.sheet else None
            sheets = {
                name: pd.read_excel(
                    book, sheet_name=name, header=None, dtype=object, keep_default_na=False, na_values=[""]
                )
                for name in ([requested_sheet] if requested_sheet else names)
            }
    except (zipfile.BadZipFile, KeyError, ValueError, SyntaxError, IndexError) as failure:
        if isinstance(failure, RequestError):
            raise
        raise RequestError(f"{path.name}: is not a readable Excel file; it may be cut off or damaged.") from failure
    header = None if cells.header_row is None else cells.header_row - 1
    layouts = {name: find_layout(sheet, header) for name, sheet in sheets.items()}
    chosen = next((name for name, layout in layouts.items() if layout is not None), None)
    if chosen is None:
        location = f"sheet '{requested_sheet}' has" if requested_sheet else "it has"
        raise RequestError(f"{path.name}: {location} no table: a header and at least one row below it are needed.")
    layout, sheet = layouts[chosen], sheets[chosen]
    assert layout is not None
    notes = []
    if len(names) > 1 and not requested_sheet:
        notes.append(f"{path.name}: sheet '{chosen}' of {len(names)} was read; --sheet sets another.")
    return FileContent(table_in_sheet(sheet, layout, cells, path.name), "", [*notes, *layout.describe(path.name)])


def choose_sheet(title: str, names: list[str], requested: str) -> str:
    """Return the sheet with a name, or with a number from 1."""
    if requested in names:
        return requested
    if requested.isdigit() and 1 <= int(requested) <= len(names):
        return names[int(requested) - 1]
    raise RequestError(f"{title}: there is no sheet '{requested}'; it has {', '.join(map(repr, names))}.")


def table_in_sheet(sheet: pd.DataFrame, layout: SheetLayout, cells: CellReading, title: str) -> pd.DataFrame:
    """The rows of a table inside a sheet, typed as the cells are."""
    used_columns = [
        j for j in sheet.columns if pd.notna(sheet.iat[layout.header, j]) or sheet[j].iloc[layout.data].notna().any()
    ]
    header = named_columns([text_of_cell(sheet.iat[layout.header, j]) for j in used_columns])
    require_distinct_names(header, title)
    frame = sheet.iloc[layout.data, used_columns].set_axis(header, axis=1)
    frame.index = pd.Index(layout.data - layout.header - 1)
    missing = cells.missing(header)
    columns = {}
    for name in header:
        column = frame[name]
        missing_texts = set(missing[name])
        column = column.mask(
            column.map(
                lambda value, missing_texts=missing_texts: isinstance(value, str) and value.strip() in missing_texts
            )
        )
        if name in cells.as_written:
            column = column.map(text_of_cell, na_action="ignore")
        columns[name] = column.infer_objects()
    return pd.DataFrame(columns, index=frame.index)


def text_of_cell(value: object) -> str:
    """Return a cell as text; whole numbers have no decimals."""
    if value is None or (isinstance(value, float) and value != value):
        return ""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def unpack(path: Path) -> bytes:
    """Return the content of a gzipped file."""
    try:
        with gzip.open(path) as file:
            content = file.read(MAX_UNPACKED_BYTES + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as failure:
        raise RequestError(f"{path.name}: is not a readable .gz file; it may be cut off or damaged.") from failure
    if len(content) > MAX_UNPACKED_BYTES:
        raise RequestError(f"{path.name}: unpacks to more than {MAX_UNPACKED_BYTES:,} bytes; {HOW_TO_RAISE_LIMIT}.")
    return content


def named_columns(header: list[str]) -> list[str]:
    """Return names without surrounding spaces; a column without a name is named by its position."""
    stripped = [name.strip() for name in header]
    return [name or f"Unnamed: {i}" for i, name in enumerate(stripped)]


def as_utf8(path: Path, content: bytes | None, encoding: str) -> bytes:
    """Return the content of a file in UTF-8."""
    if content is None:
        if path.stat().st_size > MAX_UNPACKED_BYTES:
            raise RequestError(f"{path.name}: {encoding} files of more than {MAX_UNPACKED_BYTES:,} bytes are not read.")
        content = path.read_bytes()
    try:
        return content.decode(encoding).encode()
    except UnicodeError as failure:
        raise RequestError(f"{path.name}: is not readable as {encoding}; it may be cut off or damaged.") from failure


def read_csv(path: Path, cells: CellReading) -> FileContent:
    """Return the rows of a CSV file; the header line determines the separator."""
    content = unpack(path) if path.suffix.lower() == GZIP_ENDING else None
    with io.BytesIO(content) if content is not None else path.open("rb") as file:
        head = file.read(SNIFF_BYTES)
        size = file.seek(0, io.SEEK_END)
        file.seek(max(0, size - SNIFF_BYTES))
        tail = file.read()
    is_utf16 = head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))  # as Excel writes "Unicode text"
    if cells.encoding or is_utf16:
        content = as_utf8(path, content, cells.encoding or "utf-16")
        head, tail = content[:SNIFF_BYTES], content[-SNIFF_BYTES:]
    if b"\0" in head:
        raise RequestError(f"{path.name}: is not a text table (it holds binary data).")
    if not head.strip():
        raise RequestError(f"{path.name}: the file is empty; a header line and rows are needed.")
    encoding = encoding_of(path, content, cells.encoding_hint)
    skipped = lines_above_header(head.decode(encoding, errors="replace"), cells.header_row)
    with text_of(path, content, encoding) as lines:
        for _ in range(skipped):
            lines.readline()
        try:
            header, separator = read_header(lines)
        except csv.Error as failure:
            raise RequestError(f"{path.name}: the header line cannot be read: {failure}.") from failure
        sample = lines.read(SNIFF_BYTES)
    header = named_columns(header)
    require_distinct_names(header, path.name)  # also names that differ in blanks at their ends only
    refuse_cut(tail.decode(encoding, errors="replace"), separator, len(header), path.name)
    comma = separator == ";" and re.search(r"(^|;)\s*\"?-?\d+,\d+\s*\"?(;|$)", sample, re.MULTILINE) is not None
    comma = cells.decimal == COMMA or (comma and not cells.decimal)
    notes = [f"{path.name} was read with decimal commas."] if comma else []
    coded = [n for n in columns_with_leading_zeros(sample, header, separator) if n not in cells.as_written]
    if skipped:
        notes.append(f"{path.name}: line {skipped + 1} was taken as the header; --header-row sets another.")
    if encoding not in (UTF8, cells.encoding_hint):
        with text_of(path, content, encoding) as lines:
            word = example_word(lines.read(SNIFF_BYTES))
        shown = f" ('{word}')" if word else ""
        notes.append(f"{path.name} is not UTF-8 text; it was read as {encoding}{shown}; --encoding sets another.")
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
                skiprows=skipped,
                skipinitialspace=True,
                keep_default_na=False,
                na_values=cells.missing(header),
                dtype=cells.dtypes(header) | dict.fromkeys(coded, str),
                low_memory=False,
            )
    except pd.errors.EmptyDataError as failure:
        raise RequestError(f"{path.name}: the file is empty; a header line and rows are needed.") from failure
    except pd.errors.ParserWarning as failure:
        raise RequestError(f"{path.name}: its rows hold more values than the header has columns.") from failure
    except pd.errors.ParserError as failure:
        reason = str(failure).removeprefix("Error tokenizing data. C error: ").strip()
        if surplus := re.search(r"Expected (\d+) fields in line (\d+), saw (\d+)", reason):
            expected, line, cells_in_line = surplus.groups()
            raise RequestError(
                f"{path.name}: line {line} has {cells_in_line} cells, but the header has {expected}; delete the "
                f"surplus one, or put quotes around a cell that contains '{separator}'."
            ) from failure
        raise RequestError(f"{path.name}: is not a regular table: {reason}.") from failure
    if coded:
        frame = frame.astype(dict.fromkeys(coded, "category"))
        notes.append(f"Read as categories, because of leading zeros: {', '.join(map(repr, coded))}.")
    repeated = repeats_header(frame)
    if repeated.any():
        rows = ", ".join(str(row + 1) for row in np.flatnonzero(repeated)[:5])
        notes.append(f"{path.name}: the header stands again in row {rows}, which was left out.")
        frame = frame[~repeated]
    if frame.iloc[:, -1].isna().any() and size <= MAX_BYTES_FOR_SHORT_LINES:
        with text_of(path, content, encoding) as lines:
            short = find_short_line(lines, separator, len(header), skipped)
        if short is not None:
            line, cells_in_line = short
            notes.append(
                f"{path.name}: line {line} has {cells_in_line} of {len(header)} cells; those at its end were read as "
                "empty."
            )
    total = is_total(frame)
    if total.any():
        rows = ", ".join(str(row + 1) for row in np.flatnonzero(total)[:5])
        notes.append(
            f"{path.name}: {int(total.sum())} total row{'s' if total.sum() > 1 else ''} left out (row {rows})."
        )
    return FileContent(frame[~total], COMMA if comma else "", notes)


def lines_above_header(head: str, header_row: int | None) -> int:
    """Return the number of lines above the header: as requested, or those at the top with far fewer values."""
    if header_row is not None:
        return header_row - 1
    lines = head.splitlines()[:HEADER_SEARCH_LINES]
    counts = np.array([max(line.count(mark) for mark in ",;\t") for line in lines])
    filled = np.array([bool(line.strip()) for line in lines], dtype=bool)
    if filled.sum() < 3:
        return 0
    typical = int(np.median(counts[filled]))
    first = int(np.flatnonzero(filled)[0])
    if typical == 0 or counts[first] > 0:
        return 0
    wide = np.flatnonzero(counts >= max(1, MIN_HEADER_SHARE * typical))
    return int(wide[0]) if len(wide) else 0


def columns_with_leading_zeros(sample: str, header: list[str], separator: str) -> list[str]:
    """Return columns of codes such as 01099, by the first lines of a file."""
    rows = csv.reader(sample.splitlines()[:-1], delimiter=separator, skipinitialspace=True)
    zeros: dict[str, bool] = {}
    try:
        for row in rows:
            zeros |= {name: True for name, cell in zip(header, row) if LEADING_ZEROS.match(cell)}
    except csv.Error:  # a quoted cell that the sample cuts
        pass
    return [name for name in header if name in zeros]


def repeats_header(frame: pd.DataFrame) -> np.ndarray:
    """Return [rows]: whether every cell of a row is the name of its column."""
    out = np.ones(len(frame), dtype=bool)
    for name in frame.columns:
        column = frame[name]
        if types.is_numeric_dtype(column) or not out.any():
            return np.zeros(len(frame), dtype=bool)
        out &= column.astype(object).map(lambda cell, name=name: isinstance(cell, str) and cell.strip() == name)
    return out


def find_short_line(lines: io.TextIOWrapper, separator: str, columns: int, skipped: int) -> tuple[int, int] | None:
    """Return the number of the first line with fewer cells than the header, and its cells; blank lines do not count."""
    reader = csv.reader(lines, delimiter=separator, skipinitialspace=True)
    try:
        for row in reader:
            if reader.line_num > skipped + 1 and 1 < len(row) < columns:
                return reader.line_num, len(row)
    except csv.Error:
        pass
    return None


def is_total(frame: pd.DataFrame) -> np.ndarray:
    """Return [rows]: whether a row is a total, by its first cell, and has empty cells or is the last row."""
    out = np.zeros(len(frame), dtype=bool)
    if not len(frame) or types.is_numeric_dtype(frame.iloc[:, 0]):
        return out
    first = frame.iloc[:, 0].astype(object)
    is_labelled = first.map(lambda value: isinstance(value, str) and TOTAL.match(value) is not None).to_numpy(bool)
    out[is_labelled] = frame[is_labelled].isna().any(axis=1).to_numpy()
    out[-1] |= is_labelled[-1]
    return out if out.sum() < len(frame) else np.zeros(len(frame), dtype=bool)


def encoding_of(path: Path, content: bytes | None, hint: str = "") -> str:
    """Return UTF-8 or the hint if the file is valid in it, else the code page that its letters suggest."""
    for encoding in filter(None, (UTF8, hint)):
        try:
            with text_of(path, content, encoding) as lines:
                while lines.read(2**20):
                    pass
            return encoding
        except UnicodeError:
            continue
    return guess_code_page(path.read_bytes() if content is None else content)


def text_of(path: Path, content: bytes | None, encoding: str) -> io.TextIOWrapper:
    binary = path.open("rb") if content is None else io.BytesIO(content)
    return io.TextIOWrapper(binary, encoding=encoding, newline=None)


def read_header(lines: io.TextIOWrapper) -> tuple[list[str], str]:
    """Return the names in the first line that is not blank, and their separator."""
    first = next((line for line in iter(lines.readline, "") if line.strip()), "")
    separator = max(",;\t", key=first.count)

    def from_first() -> Iterable[str]:
        yield first
        yield from iter(lines.readline, "")  # a quoted name may hold a line end

    return next(csv.reader(from_first(), delimiter=separator, skipinitialspace=True)), separator


def refuse_cut(tail: str, separator: str, columns: int, title: str) -> None:
    """Refuse a file whose last line has no end and too few values: it was cut off."""
    lines = tail.splitlines()
    if len(lines) < 2 or tail.endswith(("\n", "\r")) or '"' in lines[-1]:
        return
    values = lines[-1].count(separator) + 1
    if values < columns:
        raise RequestError(f"{title}: the last line has {values} of {columns} values; the file seems to be cut off.")
