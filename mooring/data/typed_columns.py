"""Text columns of a table as the numbers and dates that they are, each in the format in which it is written.

A column is converted where it is written otherwise than plain numbers and ISO dates, which later steps read themselves.
A column of numbers or dates but for a few cells is not a category: the cells are reported by row (`StrayCells`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from pandas.api import types

from mooring.data.cell_formats import (
    COMMA,
    ISO_DATE,
    PERCENT,
    POINT,
    CellFormat,
    date_in_words,
    parse_days,
    parse_numbers,
    possible_date_formats,
)

NUMBER, DATE = "number", "date"
MIN_SHARE = 0.95  # of a column's cells that are numbers (or dates): then the others are slips
MIN_SHARE_WITH_STRAYS = 0.5  # the same where the others are few different texts, such as "-" and "n/a",
MAX_STRAY_TEXTS = 3
MIN_DECISIVE_SHARE = 0.1  # of cells with marks that are numbers with one decimal mark only: it is the column's
MIN_DIFFERENT_NUMBERS = 5  # and the numbers are many


class StrayCells(NamedTuple):
    """The cells of a column of numbers or dates that are neither."""

    column: str
    kind: str  # "number" or "date"
    rows: np.ndarray  # positions
    value: str  # the first of them
    present: int  # cells that are not empty

    def describe(self, place: str) -> str:
        """One sentence that names the first row and value, and the cures."""
        count = f"{len(self.rows)} of {self.present} cells {'is' if len(self.rows) == 1 else 'are'} not"
        return (
            f"{place}, column '{self.column}': '{self.value}' is not a {self.kind}, but the column is {self.kind}s "
            f"({count}). Correct it, leave the cell empty, use --na '{self.value}' if it means missing, or "
            f"--categorical '{self.column}' to read the column as categories."
        )


class ColumnReading(NamedTuple):
    """A column in a format."""

    kind: str
    format: CellFormat
    values: np.ndarray  # [rows], NaN where a cell is empty or cannot be read
    readable: int


class AmbiguousDates(NamedTuple):
    """A column of dates that two formats read as different days."""

    column: str
    sentence: str


class TypedFrame(NamedTuple):
    frame: pd.DataFrame
    formats: dict[str, CellFormat]  # of the columns that were converted
    strays: list[StrayCells]
    ambiguous: list[AmbiguousDates]
    notes: list[str]


class ReadingOptions(NamedTuple):
    """What is known of how cells are written."""

    as_text: frozenset[str] = frozenset()  # columns that are left as they are
    categorical: frozenset[str] = frozenset()  # columns that are categories, whatever they hold
    decimal: str = ""  # "." or ","; "": found out
    decimal_hint: str = ""  # the decimal mark where a column's own cells leave it open
    date_format: str = ""
    missing: tuple[str, ...] = ()  # texts that stand for a missing value
    formats: tuple[tuple[str, CellFormat], ...] = ()  # of an earlier table's columns: they hold here as well


def type_columns(frame: pd.DataFrame, options: ReadingOptions) -> TypedFrame:
    """The table with its text columns converted, and what was found on the way."""
    known = dict(options.formats)
    categories = [name for name in frame.columns if str(name) in options.categorical]
    frame = frame.assign(**{name: frame[name].map(str, na_action="ignore").astype("category") for name in categories})
    found: dict[str, tuple[pd.Series, list[ColumnReading]]] = {}
    for name in frame.columns:
        if is_convertible(frame[name]) and str(name) not in options.as_text:
            series = with_missing(frame[name].astype(object), options.missing)
            if options.missing:
                frame = frame.assign(**{name: series})
            found[str(name)] = series, list(read_formats(series, options, known.get(str(name))))
    hint = options.decimal or options.decimal_hint or common_decimal(readings for _, readings in found.values())
    formats, described = dict[str, CellFormat](), dict[str, list[str]]()
    strays, ambiguous, notes = list[StrayCells](), list[AmbiguousDates](), list[str]()
    for name, (series, readings) in found.items():
        best = choose_reading(readings, hint)
        if best is None:
            continue
        present = series.notna().to_numpy()
        stray = np.flatnonzero(present & np.isnan(best.values))
        if not is_mostly(best, series, int(present.sum()), stray) and name not in known:
            continue
        if len(stray):
            strays.append(StrayCells(name, best.kind, stray, str(series.iloc[stray[0]]), int(present.sum())))
        if doubt := find_ambiguity(readings, best, hint):
            if best.kind == DATE:
                ambiguous.append(AmbiguousDates(name, f"column '{name}' {doubt}"))
            else:
                notes.append(f"Column '{name}' {doubt}")
        words = best.format.describe(best.kind)
        if words is None:
            continue
        formats[name] = best.format
        described.setdefault(words, []).append(name)
        frame = frame.assign(**{name: converted(series, best, stray)})
    notes += [f"Read as {words}: {', '.join(repr(name) for name in names)}." for words, names in described.items()]
    return TypedFrame(frame, formats, strays, ambiguous, notes)


def is_convertible(series: pd.Series) -> bool:
    """Whether a column holds texts, and nobody says that they are categories."""
    known = (types.is_numeric_dtype, types.is_datetime64_any_dtype, types.is_timedelta64_dtype)
    return not any(is_type(series) for is_type in known) and not isinstance(series.dtype, pd.CategoricalDtype)


def with_missing(series: pd.Series, texts: tuple[str, ...]) -> pd.Series:
    """The column without the texts that stand for a missing value."""
    return series.mask(series.map(lambda value: isinstance(value, str) and value.strip() in texts)) if texts else series


def read_formats(series: pd.Series, options: ReadingOptions, known: CellFormat | None) -> Iterator[ColumnReading]:
    """A text column under every format that reads some of it."""
    texts = series.map(lambda value: isinstance(value, str)).to_numpy(bool)
    if not texts.any():
        return
    code, levels = pd.factorize(series[texts])
    numeric = pd.to_numeric(series[~texts].map(not_bool), errors="coerce").to_numpy(float)

    def spread(parsed: np.ndarray, plain: np.ndarray | None) -> np.ndarray:
        values = np.full(len(series), np.nan)
        values[texts] = parsed[code]
        if plain is not None:
            values[~texts] = plain
        return values

    decimals = [known.decimal] if known else [options.decimal] if options.decimal else [POINT, COMMA]
    for decimal in decimals:
        parsed, units = parse_numbers(levels, decimal)
        unit = known.unit if known else most_frequent_unit(units[code][~np.isnan(parsed[code])])
        # Cells in another unit are no numbers of this column; nor is 0.12 in a column of percentages.
        wrong = (units != unit) & ((units != "") | (unit == PERCENT))
        parsed = np.where(wrong, np.nan, parsed)
        if not np.isnan(parsed).all():
            values = spread(parsed, numeric)
            yield ColumnReading(NUMBER, CellFormat(decimal, unit), values, int((~np.isnan(values)).sum()))
    if known:
        dates = [known.date]
    else:
        dates = [options.date_format] if options.date_format else [ISO_DATE, *possible_date_formats(map(str, levels))]
    for date in dates:
        days = parse_days(levels, date)
        if not np.isnan(days).all():
            values = spread(days, None)
            yield ColumnReading(DATE, CellFormat(date=date), values, int((~np.isnan(values)).sum()))


def not_bool(value: Any) -> Any:
    return None if isinstance(value, bool | np.bool_) else value


def most_frequent_unit(units: np.ndarray) -> str:
    """The unit of most cells that have one, unless nearly all have none."""
    named, count = np.unique(units[units != ""].astype(str), return_counts=True)
    return str(named[count.argmax()]) if len(named) else ""


def choose_reading(readings: list[ColumnReading], hint: str) -> ColumnReading | None:
    """The reading of most cells, numbers before dates; the decimal mark is what the cells show, or else the hint."""
    numbers = {r.format.decimal: r for r in readings if r.kind == NUMBER}
    if len(numbers) > 1:
        mark = shown_decimal(numbers[POINT], numbers[COMMA]) or hint or POINT
        readings = [r for r in readings if r.kind == DATE or r.format.decimal == mark]
    return min(readings, key=lambda r: (-r.readable, r.kind == DATE), default=None)


def shown_decimal(point: ColumnReading, comma: ColumnReading) -> str:
    """The decimal mark that a column's cells show; "" if they leave it open: 1,234 is a number with either mark."""
    read_point, read_comma = ~np.isnan(point.values), ~np.isnan(comma.values)
    only_point, only_comma = int((read_point & ~read_comma).sum()), int((read_comma & ~read_point).sum())
    doubtful = int((read_point & read_comma & (point.values != comma.values)).sum())
    decisive, mark = max((only_point, POINT), (only_comma, COMMA))
    return mark if decisive > 0 and decisive >= MIN_DECISIVE_SHARE * (decisive + doubtful) else ""


def common_decimal(columns: Iterable[list[ColumnReading]]) -> str:
    """The decimal mark of most columns that show theirs; "" if there is none."""
    votes = {POINT: 0, COMMA: 0}
    for readings in columns:
        numbers = {r.format.decimal: r for r in readings if r.kind == NUMBER}
        mark = shown_decimal(numbers[POINT], numbers[COMMA]) if len(numbers) > 1 else next(iter(numbers), "")
        if mark:
            votes[mark] += 1
    return "" if votes[POINT] == votes[COMMA] else max(votes, key=lambda mark: votes[mark])


def is_mostly(reading: ColumnReading, series: pd.Series, present: int, stray: np.ndarray) -> bool:
    """Whether a column is numbers (or dates), perhaps but for a few cells."""
    if reading.readable >= MIN_SHARE * present:
        return True
    different = len(np.unique(reading.values[~np.isnan(reading.values)]))
    few = series.iloc[stray].nunique() <= MAX_STRAY_TEXTS
    return reading.readable >= MIN_SHARE_WITH_STRAYS * present and few and different >= MIN_DIFFERENT_NUMBERS


def find_ambiguity(readings: list[ColumnReading], best: ColumnReading, hint: str) -> str | None:
    """Another reading of the same cells as other values, in words; None if there is none, or the hint decides."""
    for other in readings:
        if other is best or other.kind != best.kind or other.readable < best.readable:
            continue
        both = ~np.isnan(best.values) & ~np.isnan(other.values)
        if not both.any() or np.array_equal(best.values[both], other.values[both]):
            continue
        if best.kind == DATE:
            mine, its = date_in_words(best.format.date), date_in_words(other.format.date)
            return f"holds dates that read as {mine} and as {its}; set one with --date-format '{best.format.date}'."
        if not hint:
            return "was read with decimal points; its cells could have decimal commas as well: --decimal sets one."
    return None


def converted(series: pd.Series, reading: ColumnReading, stray: np.ndarray) -> pd.Series:
    """The column's values; cells that cannot be read stay as they are written."""
    values: Any = reading.values
    if reading.kind == DATE:
        out = pd.Series(pd.to_datetime(values, unit="D", errors="coerce"), index=series.index)
        out = out.dt.round("s")
    else:
        whole = not np.isnan(values).any() and bool((values == np.rint(values)).all()) and np.abs(values).max() < 2**53
        out = pd.Series(values.astype(np.int64) if whole else values, index=series.index)
    if len(stray):
        out = out.astype(object)
        out.iloc[stray] = series.iloc[stray]
    return out
