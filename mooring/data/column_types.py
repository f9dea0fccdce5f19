"""What a column holds: numbers, dates, or categories; and whether it is only a key.

Booleans are categories with the levels False and True. Dates are days since 1970-01-01.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pandas as pd
from pandas.api import types

from mooring.core.errors import RequestError
from mooring.data.cell_formats import DAY, EPOCH, POINT, days_of, parse_days, parse_numbers
from mooring.data.tables import RowLocator

NUMBER, DATE, CATEGORY = "number", "date", "category"
MONTH, WEEKDAY = "month", "weekday"
WEEKDAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
MIN_READABLE_SHARE = 0.95  # a text column with this share of numbers is a number column with slips in it
WHOLE_NUMBER = re.compile(r"^(-?(?:0|[1-9]\d*))\.0+$")  # a whole number written with a decimal point

Values: TypeAlias = (
    np.ndarray | pd.Categorical
)  # floats with NaN for missing, or text levels with the code -1 for missing


def label(value: Any) -> str:
    """A value as text; whole numbers have no decimals, so that 1 and 1.0 are the same level."""
    if isinstance(value, (float, np.floating)) and float(value).is_integer():
        return str(int(value))
    return str(value)


def sort_levels(levels: Any) -> list[str]:
    """Levels in the order of their numbers where all are numbers, else of their text."""
    levels = [str(level) for level in levels]
    numbers = pd.to_numeric(pd.Series(levels, dtype=object), errors="coerce").to_numpy()
    if np.isnan(numbers).any():
        return sorted(levels)
    return [levels[i] for i in np.lexsort((levels, numbers))]


def to_categories(series: pd.Series) -> pd.Categorical:
    """The column's values as text levels."""
    try:
        codes, values = pd.factorize(series)
    except TypeError:  # lists and other nested values
        codes, values = pd.factorize(series.map(str, na_action="ignore"))
    text = pd.Series([label(value) for value in values], dtype=object)
    again, names = pd.factorize(text)
    order = sort_levels(names)
    rank = pd.Index(order).get_indexer(pd.Index(names))[again] if len(order) else again
    return pd.Categorical.from_codes(np.where(codes >= 0, np.append(rank, -1)[codes], -1), categories=order)


def client_name(value: Any) -> str:
    """A client's name: 3, 3.0 and "3" are one client, 007 is another."""
    return WHOLE_NUMBER.sub(r"\1", label(value))


def to_client_names(series: pd.Series) -> pd.Categorical:
    """The column's values as clients' names."""
    text = to_categories(series)
    codes, names = pd.factorize(pd.Series([client_name(name) for name in text.categories], dtype=object))
    return pd.Categorical.from_codes(np.append(codes, -1)[text.codes], categories=list(names))


def is_text(series: pd.Series) -> bool:
    return not (types.is_numeric_dtype(series) or types.is_datetime64_any_dtype(series) or is_span(series))


def is_span(series: pd.Series) -> bool:
    return types.is_timedelta64_dtype(series)


def detect_kind(series: pd.Series) -> str:
    """What the column holds. Text counts as numbers (or dates) when nearly all of it reads as such."""
    read = classify_cells(series)
    return choose_kind(int(read.present.sum()), int(read.number.sum()), int(read.date.sum()))


def choose_kind(present: int, numbers: int, dates: int) -> str:
    """The kind of a column with so many values, so many of which read as numbers and as dates."""
    if numbers >= MIN_READABLE_SHARE * present:
        return NUMBER
    return DATE if dates >= MIN_READABLE_SHARE * present else CATEGORY


class CellTypes(NamedTuple):
    """Row by row: whether there is a value, and whether it reads as a number or as a date."""

    present: np.ndarray
    number: np.ndarray
    date: np.ndarray


def classify_cells(series: pd.Series) -> CellTypes:
    present = series.notna().to_numpy()
    none = np.zeros(len(series), dtype=bool)
    if types.is_bool_dtype(series) or isinstance(series.dtype, pd.CategoricalDtype):
        return CellTypes(present, none, none)  # a data frame says that these are categories
    if types.is_datetime64_any_dtype(series):
        return CellTypes(present, none, present)
    if not is_text(series):
        return CellTypes(present, present, none)
    text = to_categories(series)
    number, date = (np.append(~np.isnan(parse(text)), False)[text.codes] for parse in (level_numbers, level_days))
    return CellTypes(present, number, date)


def date_part(days: np.ndarray, part: str) -> pd.Categorical:
    """The month ("1" to "12") or the weekday ("Mon" to "Sun") of days since 1970-01-01."""
    levels = [str(month) for month in range(1, 13)] if part == MONTH else list(WEEKDAYS)
    known = np.isfinite(days)
    whole = np.floor(np.where(known, days, 0)).astype("datetime64[D]")
    if part == MONTH:
        code = whole.astype("datetime64[M]").astype(np.int64) % 12
    else:
        code = (whole.astype(np.int64) + EPOCH.weekday()) % 7
    return pd.Categorical.from_codes(np.where(known, code, -1), categories=levels)


def level_numbers(text: pd.Categorical) -> np.ndarray:
    """The number that each level reads as, or NaN; 3,750 reads as 3750."""
    numbers, units = parse_numbers(text.categories, POINT)
    return np.where(units == "", numbers, np.nan)


def level_days(text: pd.Categorical) -> np.ndarray:
    """The day that each level reads as (YYYY-MM-DD, optionally with a time), or NaN."""
    return parse_days(text.categories)


def parse_values(series: pd.Series, kind: str) -> tuple[Values, np.ndarray]:
    """The column's values as its kind, and the positions of values that are not of that kind (read as missing)."""
    none = np.zeros(0, dtype=np.int64)
    if kind == CATEGORY:
        return to_categories(series), none
    if types.is_datetime64_any_dtype(series):
        return days_of(series), none
    if is_span(series):
        return (series / DAY).to_numpy(float), none
    if types.is_numeric_dtype(series):
        return series.to_numpy(float, na_value=np.nan), none
    text = to_categories(series)
    parsed = level_numbers(text) if kind == NUMBER else level_days(text)
    values = np.append(parsed, np.nan)[text.codes]
    return values, np.flatnonzero(np.isnan(values) & (text.codes >= 0))


def read_values(series: pd.Series, kind: str, place: RowLocator) -> Values:
    """The column's values as its kind; a value that is not, or is infinite, is an error that names its row."""
    values, slips = parse_values(series, kind)
    if len(slips):
        wanted = "a number" if kind == NUMBER else "a date (YYYY-MM-DD)"
        raise RequestError(
            f"{place(slips[0])}, column '{series.name}': '{series.iloc[slips[0]]}' is not {wanted}; "
            "correct it, or leave the cell empty if the value is missing."
        )
    infinite = find_infinities(values)
    if len(infinite):
        raise RequestError(
            f"{place(infinite[0])}, column '{series.name}': the value is infinite; "
            "correct it, or leave the cell empty if the value is missing."
        )
    return values


def find_infinities(values: Values) -> np.ndarray:
    """Positions of infinite values."""
    none = np.zeros(0, dtype=np.int64)
    return none if isinstance(values, pd.Categorical) else np.flatnonzero(np.isinf(values))


def is_missing(values: Values) -> np.ndarray:
    return values.codes < 0 if isinstance(values, pd.Categorical) else np.isnan(values)
