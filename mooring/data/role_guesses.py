"""Which column of a table may name the clients, and which may be the target: guesses for a person to confirm."""

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
    """A column at a glance."""

    name: str
    kind: str  # "number", "date" or "category"
    values: int  # different ones
    missing: int
    examples: list[str]
    whole: bool  # all numbers in it are whole


def describe_columns(frame: pd.DataFrame) -> list[ColumnOverview]:
    """Every column of a table, in its order."""
    found = []
    for name in frame.columns:
        series, kind = frame[name], detect_kind(frame[name])
        names = to_client_names(series)
        seen = names.categories[np.unique(names.codes[names.codes >= 0])]
        numbers = parse_values(series, kind)[0] if kind == NUMBER else np.array([])
        whole = kind == NUMBER and bool(np.all(np.mod(numbers[np.isfinite(numbers)], 1) == 0))
        examples = [str(level) for level in seen[:NUM_EXAMPLES]]
        found.append(ColumnOverview(str(name), kind, len(seen), int(series.isna().sum()), examples, whole))
    return found


def guess_client_columns(found: Sequence[ColumnOverview], rows: int) -> list[str]:
    """Columns that repeat few enough values to name clients, the likeliest first."""
    able = [
        column
        for column in found
        if 2 <= column.values <= rows / MIN_ROWS_PER_CLIENT
        and column.kind != DATE
        and (column.kind != NUMBER or column.whole)
    ]
    order = sorted(able, key=lambda column: (not speaks_of(column.name, CLIENT_WORDS), column.kind == NUMBER))
    return [column.name for column in order]


def guess_target_columns(found: Sequence[ColumnOverview], client: str | None) -> list[str]:
    """Columns that could be predicted, the likeliest first: by their name, else the last ones."""
    able = [column for column in reversed(found) if column.values >= 2 and column.kind != DATE]
    order = sorted(able, key=lambda column: not speaks_of(column.name, TARGET_WORDS))
    return [column.name for column in order if column.name != client]


def speaks_of(name: str, words: re.Pattern[str]) -> bool:
    """Whether a column's name has one of the words in it: `hospital_id` and `schoolName` have."""
    return any(words.fullmatch(part.lower()) for part in WORDS.findall(name))
