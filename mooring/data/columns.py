"""What a column holds: numbers, dates, or categories; and whether it is only a key.

Booleans are categories with the levels False and True. Dates are days since 1970-01-01.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pandas as pd
from pandas.api import types

from mooring.core.errors import RequestError
from mooring.data.tables import Place

NUMBER, DATE, CATEGORY = "number", "date", "category"
MOSTLY = 0.95  # a text column with this share of numbers is a number column with slips in it
MOST_LEVELS = 50  # a category with more levels says little per level and makes the model wide
KEY_NAME = re.compile(r"(?i:(^|[ _.-])(id|key|uuid|guid|index|rownames?|row))$|^Unnamed: \d+$|[a-z]I[dD]$")
DATE_TEXT = re.compile(r"\d{4}-\d{1,2}-\d{1,2}([T ]\d.*)?$")
EPOCH, DAY = pd.Timestamp(0, tz="UTC"), pd.Timedelta(days=1)

Values = np.ndarray | pd.Categorical  # floats with NaN for missing, or text levels with the code -1 for missing


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


def as_text(series: pd.Series) -> pd.Categorical:
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


def is_text(series: pd.Series) -> bool:
    return not (types.is_numeric_dtype(series) or types.is_datetime64_any_dtype(series) or is_span(series))


def is_span(series: pd.Series) -> bool:
    return types.is_timedelta64_dtype(series)


def kind_of(series: pd.Series) -> str:
    """What the column holds. Text counts as numbers (or dates) when nearly all of it reads as such."""
    if types.is_bool_dtype(series):
        return CATEGORY
    if types.is_datetime64_any_dtype(series):
        return DATE
    if not is_text(series):
        return NUMBER
    text = as_text(series)
    count = np.bincount(text.codes[text.codes >= 0], minlength=len(text.categories))
    for kind, parse in ((NUMBER, level_numbers), (DATE, level_days)):
        if count.sum() and count[~np.isnan(parse(text))].sum() >= MOSTLY * count.sum():
            return kind
    return CATEGORY


def level_numbers(text: pd.Categorical) -> np.ndarray:
    """The number that each level reads as, or NaN."""
    return pd.to_numeric(pd.Series(text.categories, dtype=object), errors="coerce").to_numpy(float)


def level_days(text: pd.Categorical) -> np.ndarray:
    """The day that each level reads as (YYYY-MM-DD, optionally with a time), or NaN."""
    levels = pd.Series(text.categories, dtype=object)
    shaped = levels.map(lambda level: DATE_TEXT.match(level) is not None).astype(bool)
    days = np.full(len(levels), np.nan)
    if shaped.any():
        days[shaped] = days_of(pd.to_datetime(levels[shaped], format="ISO8601", errors="coerce", utc=True))
    return days


def days_of(stamps: pd.Series) -> np.ndarray:
    stamps = stamps.dt.tz_localize("UTC") if stamps.dt.tz is None else stamps
    return ((stamps - EPOCH) / DAY).to_numpy(float)


def parse_values(series: pd.Series, kind: str) -> tuple[Values, np.ndarray]:
    """The column's values as its kind, and the positions of values that are not of that kind (read as missing)."""
    none = np.zeros(0, dtype=np.int64)
    if kind == CATEGORY:
        return as_text(series), none
    if types.is_datetime64_any_dtype(series):
        return days_of(series), none
    if is_span(series):
        return (series / DAY).to_numpy(float), none
    if types.is_numeric_dtype(series):
        return series.to_numpy(float, na_value=np.nan), none
    text = as_text(series)
    parsed = level_numbers(text) if kind == NUMBER else level_days(text)
    values = np.append(parsed, np.nan)[text.codes]
    return values, np.flatnonzero(np.isnan(values) & (text.codes >= 0))


def read_values(series: pd.Series, kind: str, place: Place) -> Values:
    """The column's values as its kind; a value that is not, or is infinite, is an error that names its row."""
    values, slips = parse_values(series, kind)
    if len(slips):
        wanted = "a number" if kind == NUMBER else "a date (YYYY-MM-DD)"
        raise RequestError(
            f"{place(slips[0])}, column '{series.name}': '{series.iloc[slips[0]]}' is not {wanted}; "
            "correct it, or leave the cell empty if the value is missing."
        )
    infinite = infinities(values)
    if len(infinite):
        raise RequestError(
            f"{place(infinite[0])}, column '{series.name}': the value is infinite; "
            "correct it, or leave the cell empty if the value is missing."
        )
    return values


def infinities(values: Values) -> np.ndarray:
    """Positions of infinite values."""
    none = np.zeros(0, dtype=np.int64)
    return none if isinstance(values, pd.Categorical) else np.flatnonzero(np.isinf(values))


def missing(values: Values) -> np.ndarray:
    return values.codes < 0 if isinstance(values, pd.Categorical) else np.isnan(values)


def why_useless(series: pd.Series, values: Values) -> str | None:
    """Why a column is better left out: empty, constant, a key, or text with too many levels; None if it is not."""
    present = ~missing(values)
    count = int(present.sum())
    if count == 0:
        return "has no values"
    if isinstance(values, pd.Categorical):
        distinct = len(values.categories)
        if distinct > 1 and distinct == count >= 10:
            return "is a key: its texts are all different"
        if distinct > MOST_LEVELS:
            return f"is text with {distinct} different values{numbers_hint(values)}"
    else:
        known = values[present]
        distinct = len(np.unique(known))
        if types.is_integer_dtype(series) and is_key(str(series.name), known, distinct):
            return "is a key: its whole numbers " + ("are all different" if distinct == count else "hardly repeat")
    return "has the same value everywhere" if distinct == 1 and present.all() else None


def is_key(name: str, known: np.ndarray, distinct: int) -> bool:
    """Whether whole numbers are a key: called one and with many values, or without repeats where some were due.

    n numbers drawn from a range of some width repeat about n^2 / (2 width) times.
    """
    due = len(known) ** 2 / (2 * (known.max() - known.min() + 1))
    named = KEY_NAME.search(name) is not None
    return (named and distinct > MOST_LEVELS) or (distinct == len(known) > 1 and (named or due >= 5))


def numbers_hint(text: pd.Categorical) -> str:
    """Tells text that is partly numbers or dates in an unknown format from plain text."""
    share = np.mean(~np.isnan(level_numbers(text)))
    if share >= 0.5:
        odd = text.categories[np.isnan(level_numbers(text))][0]
        return f", {share:.0%} of them numbers, but also '{odd}'"
    if all(re.match(r"\d{1,4}[./-]\d{1,2}[./-]\d{1,4}", level) for level in text.categories[:20]):
        return "; dates are read when written YYYY-MM-DD"
    return ""
