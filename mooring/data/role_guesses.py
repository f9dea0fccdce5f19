"""Guesses of the client column and of the target column, for a person to confirm."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from mooring.data.column_types import DATE, NUMBER, detect_kind, parse_values, to_client_names

MIN_ROWS_PER_CLIENT = 5  # a column with fewer rows for each of its values on average names no clients
NUM_EXAMPLES = 3
CLIENT_WORDS = re.compile(
    "branch|cent(er|re)|client|clinic|country|district|farm|group|hospital|household|institution|patient|person|plant|"
    "region|school|shop|site|store|subject|town|unit|user|ward|who"
)
TARGET_WORDS = re.compile("answer|class|diagnosis|grade|label|outcome|response|result|score|target|y")
WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|\d+")


class ColumnOverview(NamedTuple):
    """Summary of a column."""

    name: str
    kind: str  # "number", "date" or "category"
    values: int  # number of different values
    missing: int
    examples: list[str]
    is_whole: bool  # all numbers in it are whole


def describe_columns(frame: pd.DataFrame) -> list[ColumnOverview]:
    """Return the summaries of all columns of a table, in their order."""
    overviews = []
    for name in frame.columns:
        series, kind = frame[name], detect_kind(frame[name])
        names = to_client_names(series)
        levels = names.categories[np.unique(names.codes[names.codes >= 0])]
        numbers = parse_values(series, kind)[0] if kind == NUMBER else np.array([])
        is_whole = kind == NUMBER and bool(np.all(np.mod(numbers[np.isfinite(numbers)], 1) == 0))
        examples = [str(level) for level in levels[:NUM_EXAMPLES]]
        overviews.append(ColumnOverview(str(name), kind, len(levels), int(series.isna().sum()), examples, is_whole))
    return overviews


def guess_client_columns(overviews: Sequence[ColumnOverview], rows: int) -> list[str]:
    """Return columns with few enough values to name clients, the likeliest first."""
    able = [
        column
        for column in overviews
        if 2 <= column.values <= rows / MIN_ROWS_PER_CLIENT
        and column.kind != DATE
        and (column.kind != NUMBER or column.is_whole)
    ]
    order = sorted(able, key=lambda column: (not has_word(column.name, CLIENT_WORDS), column.kind == NUMBER))
    return [column.name for column in order]


def guess_target_columns(overviews: Sequence[ColumnOverview], client: str | None) -> list[str]:
    """Return columns that could be targets, the likeliest first: by their name, else the last ones."""
    able = [column for column in reversed(overviews) if column.values >= 2 and column.kind != DATE]
    order = sorted(able, key=lambda column: not has_word(column.name, TARGET_WORDS))
    return [column.name for column in order if column.name != client]


def has_word(name: str, pattern: re.Pattern[str]) -> bool:
    """Return whether a column's name contains one of the words, as `hospital_id` and `schoolName` do."""
    return any(pattern.fullmatch(part.lower()) for part in WORDS.findall(name))
