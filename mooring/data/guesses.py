"""Which column of a table may name the clients, and which may be the target: guesses for a person to confirm."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from mooring.data.columns import DATE, NUMBER, as_names, kind_of, parse_values

ROWS_EACH = 5  # a column with fewer rows for each of its values on average names no clients
EXAMPLES = 3
CLIENT_WORDS = re.compile(
    "branch|cent(er|re)|client|clinic|country|district|farm|group|hospital|household|institution|patient|person|plant|"
    "region|school|shop|site|store|subject|town|unit|user|ward|who"
)
TARGET_WORDS = re.compile("answer|class|diagnosis|grade|label|outcome|response|result|score|target|y")
WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|\d+")


class Found(NamedTuple):
    """A column at a glance."""

    name: str
    kind: str  # "number", "date" or "category"
    values: int  # different ones
    missing: int
    examples: list[str]
    whole: bool  # all numbers in it are whole


def columns_of(frame: pd.DataFrame) -> list[Found]:
    """Every column of a table, in its order."""
    found = []
    for name in frame.columns:
        series, kind = frame[name], kind_of(frame[name])
        names = as_names(series)
        seen = names.categories[np.unique(names.codes[names.codes >= 0])]
        numbers = parse_values(series, kind)[0] if kind == NUMBER else np.array([])
        whole = kind == NUMBER and bool(np.all(np.mod(numbers[np.isfinite(numbers)], 1) == 0))
        examples = [str(level) for level in seen[:EXAMPLES]]
        found.append(Found(str(name), kind, len(seen), int(series.isna().sum()), examples, whole))
    return found


def likely_clients(found: Sequence[Found], rows: int) -> list[str]:
    """Columns that repeat few enough values to name clients, the likeliest first."""
    able = [
        column
        for column in found
        if 2 <= column.values <= rows / ROWS_EACH and column.kind != DATE and (column.kind != NUMBER or column.whole)
    ]
    order = sorted(able, key=lambda column: (not speaks_of(column.name, CLIENT_WORDS), column.kind == NUMBER))
    return [column.name for column in order]


def likely_targets(found: Sequence[Found], client: str | None) -> list[str]:
    """Columns that could be predicted, the likeliest first: by their name, else the last ones."""
    able = [column for column in reversed(found) if column.values >= 2 and column.kind != DATE]
    order = sorted(able, key=lambda column: not speaks_of(column.name, TARGET_WORDS))
    return [column.name for column in order if column.name != client]


def speaks_of(name: str, words: re.Pattern[str]) -> bool:
    """Whether a column's name has one of the words in it: `hospital_id` and `schoolName` have."""
    return any(words.fullmatch(part.lower()) for part in WORDS.findall(name))
