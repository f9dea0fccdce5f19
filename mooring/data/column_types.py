"""Types of columns: numbers, dates, or categories.

Booleans are categories with the levels False and True. Dates are days since 1970-01-01.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

import numpy as np
import pandas as pd
from pandas.api import types

from mooring.core.errors import RequestError
from mooring.data.cell_formats import DAY, EPOCH, POINT, days_of, parse_days, parse_numbers
from mooring.data.tables import RowLocator

NUMBER, DATE, CATEGORY = "number", "date", "category"
MONTH, WEEKDAY = "month", "weekday"
WEEKDAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
MAX_LEVEL_BYTES = 64  # of a category's level
MIN_READABLE_SHARE = 0.95  # a text column with this share of numbers is a number column with slips in it
WHOLE_NUMBER = re.compile(r"^(-?(?:0|[1-9]\d*))\.0+$")  # a whole number written with a decimal point

Values: TypeAlias = (
    np.ndarray | pd.Categorical
)  # floats with NaN for missing, or text levels with the code -1 for missing


def label(value: object) -> str:
    """Return a value as text; whole numbers have no decimals, so that 1 and 1.0 are the same level."""
    if isinstance(value, (float, np.floating)) and float(value).is_integer():
        return str(int(value))
    return str(value)


def sort_levels(levels: Iterable[object]) -> list[str]:
    """Return levels sorted as numbers if all are numbers, else as text."""
    texts = [str(level) for level in levels]
    numbers = pd.to_numeric(pd.Series(texts, dtype=object), errors="coerce").to_numpy()
    if np.isnan(numbers).any():
        return sorted(texts)
    return [texts[i] for i in np.lexsort((texts, numbers))]


def to_categories(series: pd.Series) -> pd.Categorical:
    """Return the column's values as text levels."""
    try:
        codes, values = pd.factorize(series)
    except TypeError:  # lists and other nested values
        codes, values = pd.factorize(series.map(str, na_action="ignore"))
    text = pd.Series([label(value) for value in values], dtype=object)
    text_codes, names = pd.factorize(text)
    order = sort_levels(names)
    rank = pd.Index(order).get_indexer(pd.Index(names))[text_codes] if len(order) else text_codes
    return pd.Categorical.from_codes(np.where(codes >= 0, np.append(rank, -1)[codes], -1), categories=order)


def shorten_levels(values: pd.Categorical) -> pd.Categorical:
    """Return the values with levels of at most MAX_LEVEL_BYTES bytes; longer ones end in a digest."""
    long = {level: shorten_level(level) for level in values.categories if len(level.encode()) > MAX_LEVEL_BYTES}
    return values.rename_categories(long) if long else values


def shorten_level(level: str) -> str:
    suffix = "~" + hashlib.sha256(level.encode()).hexdigest()[:12]
    return level.encode()[: MAX_LEVEL_BYTES - len(suffix)].decode(errors="ignore") + suffix


def client_name(value: object) -> str:
    """Return a client's name: 3, 3.0 and "3" are one client, 007 is another."""
    return WHOLE_NUMBER.sub(r"\1", label(value).strip())


def to_client_names(series: pd.Series) -> pd.Categorical:
    """Return the column's values as clients' names."""
    text = to_categories(series)
    codes, names = pd.factorize(pd.Series([client_name(name) for name in text.categories], dtype=object))
    return pd.Categorical.from_codes(np.append(codes, -1)[text.codes], categories=list(names))


def is_text(series: pd.Series) -> bool:
    return not (types.is_numeric_dtype(series) or types.is_datetime64_any_dtype(series) or is_span(series))


def is_span(series: pd.Series) -> bool:
    return types.is_timedelta64_dtype(series)


def detect_kind(series: pd.Series) -> str:
    """Return the type of a column. Text counts as numbers (or dates) if nearly all of it can be read as such."""
    read = classify_cells(series)
    return choose_kind(int(read.present.sum()), int(read.number.sum()), int(read.date.sum()))


def choose_kind(present: int, numbers: int, dates: int) -> str:
    """Return the kind of a column by its numbers of values, of numbers and of dates."""
    if numbers >= MIN_READABLE_SHARE * present:
        return NUMBER
    return DATE if dates >= MIN_READABLE_SHARE * present else CATEGORY


class CellTypes(NamedTuple):
    """By row: whether there is a value, and whether it is a number or a date."""

    present: np.ndarray
    number: np.ndarray
    date: np.ndarray


def classify_cells(series: pd.Series) -> CellTypes:
    present = series.notna().to_numpy()
    all_false = np.zeros(len(series), dtype=bool)
    if types.is_bool_dtype(series) or isinstance(series.dtype, pd.CategoricalDtype):
        return CellTypes(present, all_false, all_false)  # these types mean categories
    if types.is_datetime64_any_dtype(series):
        return CellTypes(present, all_false, present)
    if not is_text(series):
        return CellTypes(present, present, all_false)
    text = to_categories(series)
    number, date = (np.append(~np.isnan(parse(text)), False)[text.codes] for parse in (level_numbers, level_days))
    return CellTypes(present, number, date)


def date_part(days: np.ndarray, part: str) -> pd.Categorical:
    """Return the month ("1" to "12") or the weekday ("Mon" to "Sun") of days since 1970-01-01."""
    levels = [str(month) for month in range(1, 13)] if part == MONTH else list(WEEKDAYS)
    is_finite = np.isfinite(days)
    dates = np.floor(np.where(is_finite, days, 0)).astype("datetime64[D]")
    if part == MONTH:
        code = dates.astype("datetime64[M]").astype(np.int64) % 12
    else:
        code = (dates.astype(np.int64) + EPOCH.weekday()) % 7
    return pd.Categorical.from_codes(np.where(is_finite, code, -1), categories=levels)


def level_numbers(text: pd.Categorical) -> np.ndarray:
    """Return the number in each level, or NaN; 3,750 is read as 3750."""
    numbers, units = parse_numbers(text.categories, POINT)
    return np.where(units == "", numbers, np.nan)


def level_days(text: pd.Categorical) -> np.ndarray:
    """Return the day of each level (YYYY-MM-DD, optionally with a time), or NaN."""
    return parse_days(text.categories)


def parse_values(series: pd.Series, kind: str) -> tuple[Values, np.ndarray]:
    """Return the column's values as its kind, and the positions of values that are not of that kind (read as
    missing)."""
    no_positions = np.zeros(0, dtype=np.int64)
    if kind == CATEGORY:
        return to_categories(series), no_positions
    if types.is_datetime64_any_dtype(series):
        return days_of(series), no_positions
    if is_span(series):
        return (series / DAY).to_numpy(float), no_positions
    if types.is_numeric_dtype(series):
        return series.to_numpy(float, na_value=np.nan), no_positions
    text = to_categories(series)
    parsed = level_numbers(text) if kind == NUMBER else level_days(text)
    values = np.append(parsed, np.nan)[text.codes]
    return values, np.flatnonzero(np.isnan(values) & (text.codes >= 0))


def read_values(series: pd.Series, kind: str, place: RowLocator) -> Values:
    """Return the column's values as its kind; another or an infinite value is an error that names its row."""
    values, slips = parse_values(series, kind)
    if len(slips):
        expected = "a number" if kind == NUMBER else "a date (YYYY-MM-DD)"
        raise RequestError(
            f"{place(slips[0])}, column '{series.name}': '{series.iloc[slips[0]]}' is not {expected}; "
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
    """Return the positions of infinite values."""
    no_positions = np.zeros(0, dtype=np.int64)
    return no_positions if isinstance(values, pd.Categorical) else np.flatnonzero(np.isinf(values))


def is_missing(values: Values) -> np.ndarray:
    return values.codes < 0 if isinstance(values, pd.Categorical) else np.isnan(values)
