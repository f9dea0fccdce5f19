"""Conversion of a table's text columns to numbers and dates, each by its own format.

Columns of plain numbers and ISO dates are left to later steps.
A column of numbers or dates but for a few cells is not a category: the cells are reported by row (`StrayCells`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import pandas as pd
from pandas.api import types

from mooring.data.cell_formats import (
    COMMA,
    DATE_LIKE,
    ISO_DATE,
    PERCENT,
    POINT,
    CellFormat,
    date_in_words,
    is_measure,
    parse_days,
    parse_numbers,
    possible_date_formats,
)
from mooring.data.cures import Cure

NUMBER, DATE = "number", "date"
NUMBER_WITH_TEXT = re.compile(r"(?P<before>[^\d]*?)(?P<number>\d[\d.,'\u2019 \u00a0\u202f]*)(?P<after>[^\d]*)")
MIN_SHARE = 0.95  # of a column's cells that are numbers (or dates): then the others are errors
MIN_SHARE_WITH_STRAYS = 0.5  # the same if the others are few different texts, such as "-" and "n/a",
MAX_STRAY_TEXTS = 3
MIN_DECISIVE_SHARE = 0.1  # of cells with marks that are numbers with one decimal mark only: it is the column's
MIN_DIFFERENT_NUMBERS = 5  # and the numbers are at least this many


class StrayCells(NamedTuple):
    """The cells of a column of numbers or dates that are neither."""

    column: str
    kind: str  # "number" or "date"
    rows: np.ndarray  # positions
    value: str  # the first of them
    present: int  # cells that are not empty
    other: str = ""  # a number or date in another format, if they are such as well
    is_unknown: bool = False  # they look like numbers in a format that is not known

    @property
    def cures(self) -> tuple[Cure, ...]:
        if self.other or self.is_unknown:
            return (Cure("drop", self.column), Cure("categorical", self.column))
        return (Cure("na", self.value), Cure("categorical", self.column))

    def describe(self, place: str) -> str:
        """Return a sentence that names the first row and value, and the remedies."""
        remedy = f"use --drop '{self.column}', or --categorical '{self.column}' to read the column as categories."
        if self.is_unknown:
            return (
                f"{place}, column '{self.column}': '{self.value}' looks like a {self.kind}, but its format is not "
                f"known. Write plain {self.kind}s, or {remedy}"
            )
        if self.other:
            return (
                f"{place}, column '{self.column}': '{self.value}' is a {self.kind} in another format than "
                f"'{self.other}'. "
                f"Write all cells in one format{' and unit' if self.kind == NUMBER else ''}, or {remedy}"
            )
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
    """Formats of cells."""

    as_text: frozenset[str] = frozenset()  # columns that are not converted
    categorical: frozenset[str] = frozenset()  # columns that are read as categories
    decimal: str = ""  # "." or ","; "": detected
    decimal_hint: str = ""  # the decimal mark if a column's own cells are ambiguous
    date_format: str = ""
    missing: tuple[str, ...] = ()  # texts that stand for a missing value
    formats: tuple[tuple[str, CellFormat], ...] = ()  # of an earlier table's columns: they apply here as well


def type_columns(frame: pd.DataFrame, options: ReadingOptions) -> TypedFrame:
    """Return the table with its text columns converted, their formats, and stray cells."""
    known_formats = dict(options.formats)
    categories = [name for name in frame.columns if str(name) in options.categorical]
    frame = frame.assign(**{name: frame[name].map(str, na_action="ignore").astype("category") for name in categories})
    codes = parse_numbers(options.missing)[0] if options.missing else np.empty(0)
    for name in frame.columns if len(codes) else ():
        if types.is_numeric_dtype(frame[name]) and str(name) not in options.as_text and frame[name].isin(codes).any():
            frame = frame.assign(**{name: frame[name].mask(frame[name].isin(codes))})
    candidates: dict[str, tuple[pd.Series, list[ColumnReading]]] = {}
    for name in frame.columns:
        if is_convertible(frame[name]) and str(name) not in options.as_text:
            series = with_missing(frame[name].astype(object), options.missing)
            if options.missing:
                frame = frame.assign(**{name: series})
            candidates[str(name)] = series, list(read_formats(series, options, known_formats.get(str(name))))
    hint = options.decimal or options.decimal_hint or common_decimal(readings for _, readings in candidates.values())
    formats, described = dict[str, CellFormat](), dict[str, list[str]]()
    strays, ambiguous, notes = list[StrayCells](), list[AmbiguousDates](), list[str]()
    for name, (series, readings) in candidates.items():
        best = choose_reading(readings, hint)
        present = series.notna().to_numpy()
        if name not in known_formats and (mixed := find_mixed_formats(name, series, options.decimal)):
            strays.append(mixed)
            continue
        if best is None:
            if unknown := find_unknown_format(name, series):
                strays.append(unknown)
            continue
        stray = np.flatnonzero(present & np.isnan(best.values))
        if not is_mostly(best, series, int(present.sum()), stray) and name not in known_formats:
            if unknown := find_unknown_format(name, series):
                strays.append(unknown)
            continue
        if len(stray):
            strays.append(StrayCells(name, best.kind, stray, str(series.iloc[stray[0]]), int(present.sum())))
        if doubt := find_ambiguity(readings, best, hint):
            if best.kind == DATE:
                ambiguous.append(AmbiguousDates(name, f"column '{name}' {doubt}"))
            else:
                notes.append(f"Column '{name}' {doubt}")
        description = best.format.describe(best.kind)
        if description is None:
            continue
        formats[name] = best.format
        described.setdefault(description, []).append(name)
        frame = frame.assign(**{name: convert_column(series, best, stray)})
    notes += [
        f"Read as {description}: {', '.join(repr(name) for name in names)}." for description, names in described.items()
    ]
    return TypedFrame(frame, formats, strays, ambiguous, notes)


def find_mixed_formats(name: str, series: pd.Series, decimal: str) -> StrayCells | None:
    """Return cells of a column of numbers with another decimal mark, or in another unit, than most; None if the column
    is not numbers, or all are in one format."""
    texts = np.flatnonzero(series.map(lambda value: isinstance(value, str)))
    code, levels = pd.factorize(series.iloc[texts])
    rows = np.bincount(code, minlength=len(levels))
    (point, point_units), (comma, comma_units) = (parse_numbers(levels, mark) for mark in (POINT, COMMA))
    is_number = ~np.isnan(point) | ~np.isnan(comma)
    if is_number.sum() < MIN_DIFFERENT_NUMBERS or rows[is_number].sum() < MIN_SHARE * len(code):
        return None
    forms = np.where(np.isnan(point), comma_units, point_units)
    if PERCENT in forms or any(map(is_measure, forms)):
        forms = np.where(is_number & (forms == ""), "no unit", forms)  # 0.12 is no percentage; an amount needs no unit
    marks = np.where(np.isnan(comma), POINT, np.where(np.isnan(point), COMMA, ""))
    marks[~is_number] = ""
    if not (marks != "").any():  # 1.234 and 1,234 are numbers with either mark
        doubtful = [(COMMA if COMMA in text else POINT) if a != b else "" for text, a, b in zip(levels, point, comma)]
        marks = np.array(doubtful)
    if not decimal and POINT in marks and COMMA in marks:
        forms = marks
    count = {form: int(rows[forms == form].sum()) for form in set(forms) - {""}}
    if len(count) < 2:
        return None
    usual = max(sorted(count), key=lambda form: count[form])
    stray = texts[((forms != usual) & (forms != ""))[code]]
    example = str(levels[np.flatnonzero(forms == usual)[0]])
    return StrayCells(name, NUMBER, stray, str(series.iloc[stray[0]]), int(series.notna().sum()), example)


def find_unknown_format(name: str, series: pd.Series) -> StrayCells | None:
    """Return cells of a column that looks like numbers with decimals, or like dates, in formats that are not known or
    differ: "~1.5", "1.2k", "31.12.2024" beside "12/31/2024". None for other columns."""
    texts = np.flatnonzero(series.map(lambda value: isinstance(value, str)))
    code, levels = pd.factorize(series.iloc[texts])
    rows, present = np.bincount(code, minlength=len(levels)), int(series.notna().sum())
    is_date = np.array([DATE_LIKE.fullmatch(level.strip()) is not None for level in levels], dtype=bool)
    if len(levels) >= MIN_DIFFERENT_NUMBERS and rows[is_date].sum() >= MIN_SHARE * len(code):
        marks = np.array([re.sub(r"[\dA-Za-z]+", "", level.strip()) for level in levels])
        usual = max(sorted(set(marks)), key=lambda mark: int(rows[marks == mark].sum()))
        odd = texts[(marks != usual)[code]]
        if len(odd):
            example = str(levels[np.flatnonzero(marks == usual)[0]])
            return StrayCells(name, DATE, odd, str(series.iloc[odd[0]]), present, example)
        return None
    parts = [NUMBER_WITH_TEXT.fullmatch(level.strip()) for level in levels]
    is_number = np.array([part is not None for part in parts], dtype=bool)
    texts_around = {(part["before"].strip(), part["after"].strip()) for part in parts if part is not None}
    has_decimals = any(part is not None and not part["number"].isdigit() for part in parts)
    if is_number.sum() < MIN_DIFFERENT_NUMBERS or rows[is_number].sum() < MIN_SHARE * len(code):
        return None
    if not has_decimals or len(texts_around) > MAX_STRAY_TEXTS:
        return None  # labels such as "room 12", or words with numbers
    stray = texts[[parts[k] is not None and any((parts[k]["before"].strip(), parts[k]["after"].strip())) for k in code]]
    if not len(stray):
        return None
    return StrayCells(name, NUMBER, stray, str(series.iloc[stray[0]]), present, is_unknown=True)


def is_convertible(series: pd.Series) -> bool:
    """Return whether a column contains texts that are not declared as categories."""
    typed = (types.is_numeric_dtype, types.is_datetime64_any_dtype, types.is_timedelta64_dtype)
    return not any(is_type(series) for is_type in typed) and not isinstance(series.dtype, pd.CategoricalDtype)


def with_missing(series: pd.Series, texts: tuple[str, ...]) -> pd.Series:
    """Return the column without the texts for missing values."""
    return series.mask(series.map(lambda value: isinstance(value, str) and value.strip() in texts)) if texts else series


def read_formats(
    series: pd.Series, options: ReadingOptions, known_format: CellFormat | None
) -> Iterator[ColumnReading]:
    """Yield a text column under every format that can read some of it."""
    texts = series.map(lambda value: isinstance(value, str)).to_numpy(bool)
    if not texts.any():
        return
    code, levels = pd.factorize(series[texts])
    numeric = pd.to_numeric(series[~texts].map(not_bool), errors="coerce").to_numpy(float)

    def spread(parsed: np.ndarray, numbers: np.ndarray | None) -> np.ndarray:
        values = np.full(len(series), np.nan)
        values[texts] = parsed[code]
        if numbers is not None:
            values[~texts] = numbers
        return values

    decimals = [known_format.decimal] if known_format else [options.decimal] if options.decimal else [POINT, COMMA]
    for decimal in decimals:
        parsed, units = parse_numbers(levels, decimal)
        unit = known_format.unit if known_format else most_frequent_unit(units[code][~np.isnan(parsed[code])])
        # Cells in another unit are not numbers of this column; nor is 0.12 in a column of percentages or kilograms.
        wrong = (units != unit) & ((units != "") | (unit == PERCENT) | is_measure(unit))
        parsed = np.where(wrong, np.nan, parsed)
        if not np.isnan(parsed).all():
            values = spread(parsed, numeric)
            yield ColumnReading(NUMBER, CellFormat(decimal, unit), values, int((~np.isnan(values)).sum()))
    if known_format:
        dates = [known_format.date]
    else:
        dates = [options.date_format] if options.date_format else [ISO_DATE, *possible_date_formats(map(str, levels))]
    for date in dates:
        days = parse_days(levels, date)
        if not np.isnan(days).all():
            values = spread(days, None)
            yield ColumnReading(DATE, CellFormat(date=date), values, int((~np.isnan(values)).sum()))


def not_bool(value: object) -> object:
    return None if isinstance(value, bool | np.bool_) else value


def most_frequent_unit(units: np.ndarray) -> str:
    """Return the unit of most cells that have one, or ""."""
    units_present, count = np.unique(units[units != ""].astype(str), return_counts=True)
    return str(units_present[count.argmax()]) if len(units_present) else ""


def choose_reading(readings: list[ColumnReading], hint: str) -> ColumnReading | None:
    """Return the reading of most cells, numbers before dates; the cells determine the decimal mark, or else the
    hint."""
    numbers = {r.format.decimal: r for r in readings if r.kind == NUMBER}
    if len(numbers) > 1:
        mark = shown_decimal(numbers[POINT], numbers[COMMA]) or hint or POINT
        readings = [r for r in readings if r.kind == DATE or r.format.decimal == mark]
    return min(readings, key=lambda r: (-r.readable, r.kind == DATE), default=None)


def shown_decimal(point: ColumnReading, comma: ColumnReading) -> str:
    """Return the decimal mark of a column's cells; "" if it is ambiguous: 1,234 is a number with either mark."""
    read_point, read_comma = ~np.isnan(point.values), ~np.isnan(comma.values)
    only_point, only_comma = int((read_point & ~read_comma).sum()), int((read_comma & ~read_point).sum())
    doubtful = int((read_point & read_comma & (point.values != comma.values)).sum())
    decisive, mark = max((only_point, POINT), (only_comma, COMMA))
    return mark if decisive > 0 and decisive >= MIN_DECISIVE_SHARE * (decisive + doubtful) else ""


def common_decimal(columns: Iterable[list[ColumnReading]]) -> str:
    """Return the decimal mark of most columns that determine it; "" if there is none."""
    votes = {POINT: 0, COMMA: 0}
    for readings in columns:
        numbers = {r.format.decimal: r for r in readings if r.kind == NUMBER}
        mark = shown_decimal(numbers[POINT], numbers[COMMA]) if len(numbers) > 1 else next(iter(numbers), "")
        if mark:
            votes[mark] += 1
    return "" if votes[POINT] == votes[COMMA] else max(votes, key=lambda mark: votes[mark])


def is_mostly(reading: ColumnReading, series: pd.Series, present: int, stray: np.ndarray) -> bool:
    """Return whether a column is numbers (or dates), except for a few cells."""
    if reading.readable >= MIN_SHARE * present:
        return True
    different = len(np.unique(reading.values[~np.isnan(reading.values)]))
    has_few_strays = series.iloc[stray].nunique() <= MAX_STRAY_TEXTS
    return reading.readable >= MIN_SHARE_WITH_STRAYS * present and has_few_strays and different >= MIN_DIFFERENT_NUMBERS


def find_ambiguity(readings: list[ColumnReading], best: ColumnReading, hint: str) -> str | None:
    """Return a description of another reading with other values; None if there is none, or the hint decides."""
    for alternative in readings:
        if alternative is best or alternative.kind != best.kind or alternative.readable < best.readable:
            continue
        is_read = ~np.isnan(best.values) & ~np.isnan(alternative.values)
        if not is_read.any() or np.array_equal(best.values[is_read], alternative.values[is_read]):
            continue
        if best.kind == DATE:
            formats = f"{date_in_words(best.format.date)} and as {date_in_words(alternative.format.date)}"
            return f"holds dates that read as {formats}; set one with --date-format '{best.format.date}'."
        if not hint:
            return "was read with decimal points; its cells could have decimal commas as well: --decimal sets one."
    return None


def convert_column(series: pd.Series, reading: ColumnReading, stray: np.ndarray) -> pd.Series:
    """Return the column's values; cells that cannot be read stay text."""
    values = reading.values
    if reading.kind == DATE:
        out = pd.Series(pd.to_datetime(values, unit="D", errors="coerce"), index=series.index)
        out = out.dt.round("s")
    else:
        is_integer = (
            not np.isnan(values).any() and bool((values == np.rint(values)).all()) and np.abs(values).max() < 2**53
        )
        out = pd.Series(values.astype(np.int64) if is_integer else values, index=series.index)
    if len(stray):
        out = out.astype(object)
        out.iloc[stray] = series.iloc[stray]
    return out
