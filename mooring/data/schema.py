"""How a table becomes numbers: learnt from the clients' training rows, kept as `schema.json`, applied to any table.

Numbers and dates are one column each; a category with two levels is one column, with more levels one per level; a
column that had missing values in training gets a second one that flags them. Then every column is centred and scaled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import pandas as pd
from pydantic import BaseModel, ConfigDict, ValidationError

from mooring.core.errors import RequestError
from mooring.data.columns import CATEGORY, DATE, Values, kind_of, missing, read_values, sort_levels, why_useless
from mooring.data.scaling import level_counts, mean_of, sums
from mooring.data.tables import Place, listing, near


class Column(BaseModel):
    """One column of the source."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    kind: Literal["number", "date", "category"]
    fill: float | str  # what stands in for a missing value: the mean, or the most frequent level
    levels: tuple[str, ...] = ()
    flagged: bool = False  # whether a column tells where the value was missing

    @property
    def encoded(self) -> list[str]:
        """The names of the numbers that it becomes."""
        shown = self.levels[1:] if len(self.levels) <= 2 else self.levels
        names = [f"{self.name}={level}" for level in shown] if self.kind == CATEGORY else [self.name]
        return [*names, f"{self.name} missing"] if self.flagged else names


class Schema(BaseModel):
    """All that is needed to turn another table into the same numbers, and predictions into the target's units."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    target: str
    kind: Literal["regression", "binary", "classes", "count"]
    columns: tuple[Column, ...]
    mean: tuple[float, ...]  # of each encoded column, over all clients' training rows
    scale: tuple[float, ...]
    client: str | None = None
    classes: tuple[str, ...] = ()
    target_mean: float = 0.0
    target_scale: float = 1.0
    dropped: dict[str, str] = {}  # columns left out, and why
    digest: str = ""  # sha256 of the table that it was learnt from

    @property
    def features(self) -> tuple[str, ...]:
        return tuple(name for column in self.columns for name in column.encoded)

    def to_json(self) -> str:
        return self.model_dump_json(indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Schema:
        try:
            return cls.model_validate_json(text)
        except ValidationError as failure:
            first = failure.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the file"
            raise RequestError(f"schema.json is not a schema of this version: {where}: {first['msg']}.") from failure


def typed(frame: pd.DataFrame, names: Sequence[str], place: Place) -> dict[str, tuple[str, Values]]:
    """Kind and values of each of the columns."""
    kinds = {name: kind_of(frame[name]) for name in names}
    return {name: (kind, read_values(frame[name], kind, place)) for name, kind in kinds.items()}


def select_useful(
    frame: pd.DataFrame, columns: dict[str, tuple[str, Values]], train: np.ndarray
) -> tuple[list[str], dict[str, str]]:
    """The columns worth keeping, and the others with the reason why not."""
    dropped = {}
    for name, (_, values) in columns.items():
        reason = why_useless(frame[name], values)
        if reason is None and not missing(values).any() and is_constant(values[train]):
            reason = "has the same value in every training row"
        if reason is None and missing(values[train]).all():
            reason = "has no value in any training row"
        if reason is not None:
            dropped[name] = reason
    return [name for name in columns if name not in dropped], dropped


def is_constant(values: Values) -> bool:
    codes = values.codes if isinstance(values, pd.Categorical) else values
    return len(codes) == 0 or bool((codes == codes[0]).all())


def fit_columns(
    columns: dict[str, tuple[str, Values]], train: np.ndarray, code: np.ndarray, clients: int
) -> list[Column]:
    """Vocabularies and imputation from the training rows of all clients (merged counts and sums)."""
    specs = []
    for name, (kind, values) in columns.items():
        mine = values[train]
        flagged = bool(missing(mine).any())
        if kind == CATEGORY:
            count = level_counts(mine.codes, code[train], clients, len(mine.categories)).sum(0)
            levels = sort_levels(mine.categories[count > 0])
            fill = mine.categories[count.argmax()] if len(levels) else ""
            specs.append(Column(name=name, kind=kind, fill=fill, levels=tuple(levels), flagged=flagged))
        else:
            mean = mean_of(sums(mine[:, None], code[train], clients))[1]
            specs.append(Column(name=name, kind=kind, fill=float(mean[0]), flagged=flagged))
    return specs


def to_numbers(columns: dict[str, tuple[str, Values]], specs: Sequence[Column]) -> tuple[np.ndarray, list[str]]:
    """The unscaled numbers of every row, and sentences on what did not fit."""
    blocks, notes = [], []
    for spec in specs:
        values = columns[spec.name][1]
        absent = missing(values)
        if spec.kind == CATEGORY:
            lookup = pd.Index(spec.levels).get_indexer(values.categories)
            codes = np.append(lookup, -1)[values.codes]
            unseen = (codes < 0) & ~absent
            if unseen.any():
                notes.append(
                    f"Column '{spec.name}': {unseen.sum()} rows hold values that no training row has "
                    f"({listing(sorted(set(values[unseen])), 3)}); they are encoded as zeros."
                )
            codes = np.where(absent, spec.levels.index(spec.fill) if spec.levels else -1, codes)
            block = codes[:, None] == np.arange(len(spec.levels))
            blocks.append((block[:, 1:] if len(spec.levels) <= 2 else block).astype(float))
        else:
            blocks.append(np.where(absent, spec.fill, values)[:, None])
        if spec.flagged:
            blocks.append(absent[:, None].astype(float))
        elif absent.any():
            notes.append(
                f"Column '{spec.name}': {absent.sum()} rows have no value, although all training rows have one; "
                "the mean or most frequent value of the training rows stands in."
            )
    return np.concatenate(blocks, axis=1), notes


def encode(frame: pd.DataFrame, schema: Schema, place: Place | None = None) -> tuple[np.ndarray, list[str]]:
    """A table's scaled inputs, float64 [rows, features], and sentences on what did not fit the schema."""
    place = place or (lambda position: f"row {position + 1}")
    for column in schema.columns:
        if column.name not in frame.columns:
            raise RequestError(
                f"column '{column.name}' is missing from the table; it needs the columns "
                f"{listing(c.name for c in schema.columns)}.{near(column.name, map(str, frame.columns))}"
            )
    columns = {c.name: (c.kind, read_values(frame[c.name], c.kind, place)) for c in schema.columns}
    x, notes = to_numbers(columns, schema.columns)
    return (x - np.array(schema.mean)) / np.array(schema.scale), notes


def describe(specs: Sequence[Column], dropped: dict[str, str]) -> list[str]:
    """Sentences on what became of the columns."""
    notes = [f"Column '{name}' was left out: it {reason}." for name, reason in dropped.items()]
    dates = [spec.name for spec in specs if spec.kind == DATE]
    if dates:
        notes.append(f"Dates became days since 1970-01-01: {listing(dates)}.")
    flagged = [spec.name for spec in specs if spec.flagged]
    if flagged:
        notes.append(
            "Missing values were replaced by the mean or the most frequent value of all clients' training rows, and "
            f"flagged in a column of their own: {listing(flagged)}."
        )
    return notes
