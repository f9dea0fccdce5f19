"""Encoding of a table as numbers: learned from the clients' training rows, stored in `schema.json`, applied to any
table.

Numbers are one column each; dates become days, month and weekday; a category with two levels is one column, with more
levels one per level; a column that had missing values in training gets a second one that flags them. Then every column
is centered and scaled. `schema_server.py` computes a schema from the clients' statistics.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from mooring.core.errors import RequestError
from mooring.core.types import JsonObject
from mooring.data.column_types import CATEGORY, DATE, Values, date_part, is_missing, read_values, shorten_levels
from mooring.data.formulas import FormulaState, apply_formula
from mooring.data.tables import RowLocator, quote_list, suggest_name
from mooring.shapes.columns import ShapedColumns

OTHER_LEVEL = "other"
OUTLIER_FACTOR = 20.0  # cells this many times further out than usual ones are clipped
Limits = dict[str, tuple[float, float]]  # by column


class Feature(BaseModel):
    """A column of the source, or the month or weekday of a column of dates."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    kind: Literal["number", "date", "category"]
    source: str = ""  # the column that it is read from, if it has another name
    part: Literal["", "month", "weekday"] = ""

    def read(self, frame: pd.DataFrame, place: RowLocator) -> Values:
        """The feature's values in a table."""
        if not self.part:
            values = read_values(frame[self.name], self.kind, place)
            return shorten_levels(values) if isinstance(values, pd.Categorical) else values
        return date_part(np.asarray(read_values(frame[self.source], DATE, place)), self.part)


class Column(Feature):
    """A feature and its encoding."""

    fill: float | str  # replacement for missing values: the mean, or the most frequent level
    levels: tuple[str, ...] = ()
    flagged: bool = False  # whether an extra column flags missing values
    other: bool = False  # whether values without a level of their own count as the level "other"

    @property
    def encoded(self) -> list[str]:
        """Names of the encoded columns."""
        encoded_levels = self.levels[1:] if len(self.levels) <= 2 else self.levels
        names = [f"{self.name}={level}" for level in encoded_levels] if self.kind == CATEGORY else [self.name]
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
    max_count: float | None = None  # of a target of counts: the largest in any client's training rows, rounded upwards
    dropped: dict[str, str] = {}  # columns left out, with reasons
    digest: str = ""  # sha256 of the table that it was learned from
    shape: JsonObject | None = None  # extra columns for nonlinear effects (`shapes.columns.ShapedColumns.as_json`)
    formats: dict[str, tuple[str, str, str]] = {}  # of columns that are not plain: decimal mark, unit, date format
    decimal: str = ""  # the decimal mark of the table's file, where it shows one
    encoding: str = ""  # of text files, where it was given
    na: tuple[str, ...] = ()  # further texts that stand for a missing value
    merges: dict[str, str] = {}  # texts that are read as another one
    clip: Limits = {}  # of winsorized columns: numbers beyond count as these
    formula: FormulaState | None = None  # which makes `columns` of a table's own columns
    limits: Limits = {}  # of columns and targets with outlier cells, which `clip_outliers` clips

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the inputs: encoded columns, then extra ones."""
        names = tuple(name for column in self.columns for name in column.encoded)
        return names if self.shape is None else tuple(ShapedColumns.from_json(self.shape).names(names))

    @property
    def numeric_places(self) -> tuple[int, ...]:
        """Places of the numeric columns among the encoded ones."""
        ends = np.cumsum([0, *(len(column.encoded) for column in self.columns)])
        return tuple(int(end) for end, column in zip(ends, self.columns) if column.kind != CATEGORY)

    def to_json(self) -> str:
        return self.model_dump_json(indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Schema:
        """Return a schema, or a draft of one, which has no means and scales yet."""
        try:
            return cls._parse(json.loads(text))
        except json.JSONDecodeError as failure:
            raise RequestError(f"schema.json is not JSON: {failure}.") from failure

    @classmethod
    def from_content(cls, content: JsonObject) -> Schema:
        """Return the schema of a run, which may be somebody else's: what no table can give is refused."""
        schema = cls._parse(content)
        schema._check_numbers()
        return schema

    @classmethod
    def _parse(cls, content: JsonObject) -> Schema:
        try:
            return cls.model_validate(content)
        except ValidationError as failure:
            first = failure.errors()[0]
            location = ".".join(map(str, first["loc"])) or "the file"
            message = str(first["msg"])[:200]
            raise RequestError(f"schema.json is not a schema of this version: {location:.200}: {message}.") from failure

    def _check_numbers(self) -> None:
        """Refuse numbers and levels that do not fit the columns."""
        width = sum(len(column.encoded) for column in self.columns)
        numbers = [*self.mean, *self.scale, self.target_mean, self.target_scale]
        for wrong, what in (
            (len(self.mean) != width or len(self.scale) != width, f"mean and scale need {width} numbers each"),
            (not np.isfinite(numbers).all(), "a number is not finite"),
            (min([*self.scale, self.target_scale]) <= 0, "a scale is not positive"),
            (any(column.levels and column.fill not in column.levels for column in self.columns), "a fill is no level"),
            (any(c.kind != CATEGORY and isinstance(c.fill, str) for c in self.columns), "a fill is no number"),
        ):
            if wrong:
                raise RequestError(f"schema.json does not fit its columns: {what}.")


def clip_outliers(values: np.ndarray, limits: tuple[float, float]) -> np.ndarray:
    """Return cells with those beyond the limits clipped to 1 / OUTLIER_FACTOR of the distance to the limit."""
    low, high = limits
    center, usual_distance = (low + high) / 2, (high - low) / 2 / OUTLIER_FACTOR
    return np.where(values > high, center + usual_distance, np.where(values < low, center - usual_distance, values))


def clip_columns(columns: dict[str, Values], limits: Limits) -> dict[str, Values]:
    """Return the columns with clipped outliers."""
    return columns | {name: clip_outliers(columns[name], limits[name]) for name in limits if name in columns}


def encode_columns(columns: dict[str, Values], specs: Sequence[Column]) -> tuple[np.ndarray, list[str]]:
    """Return the unscaled numbers of every row, and notes on values that do not fit."""
    blocks, notes = [], []
    for spec in specs:
        values: Any = columns[spec.name]
        absent = is_missing(values)
        if spec.kind == CATEGORY:
            lookup = pd.Index(spec.levels).get_indexer(values.categories)
            lookup = np.where((lookup < 0) & spec.other, len(spec.levels) - 1, lookup)
            codes = np.append(lookup, -1)[values.codes]
            unseen = (codes < 0) & ~absent
            if unseen.any():
                notes.append(
                    f"Column '{spec.name}': {unseen.sum()} rows hold values that no training row has "
                    f"({quote_list(sorted(set(values[unseen])), 3)}); they are encoded as zeros."
                )
            codes = np.where(absent, spec.levels.index(str(spec.fill)) if spec.levels else -1, codes)
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


def encode_table(frame: pd.DataFrame, schema: Schema, place: RowLocator | None = None) -> tuple[np.ndarray, list[str]]:
    """Return a table's scaled inputs, float64 [rows, features], and notes on values that do not fit the schema."""
    place = place or (lambda position: f"row {position + 1}")
    formula_notes: list[str] = []
    if schema.formula is not None:
        frame, formula_notes = apply_formula(schema.formula, frame, place)
    for column in schema.columns:
        name = column.source or column.name
        if name not in frame.columns:
            raise RequestError(
                f"column '{name}' is missing from the table; it needs the columns "
                f"{quote_list(dict.fromkeys(c.source or c.name for c in schema.columns))}."
                f"{suggest_name(name, map(str, frame.columns))}"
            )
    columns = {column.name: column.read(frame, place) for column in schema.columns}
    columns |= {name: np.clip(columns[name], *schema.clip[name]) for name in schema.clip if name in columns}
    x, notes = encode_columns(clip_columns(columns, schema.limits), schema.columns)
    x = (x - np.array(schema.mean)) / np.array(schema.scale)
    if schema.shape is not None:
        x = ShapedColumns.from_json(schema.shape, "schema.json")(torch.from_numpy(x)).numpy()
    return x, [*formula_notes, *notes]


def describe_schema(specs: Sequence[Column], dropped: dict[str, str]) -> list[str]:
    """Return notes on the encoding of the columns."""
    notes = [f"Column '{name}' was left out: it {reason}." for name, reason in dropped.items()]
    dates = [spec.name for spec in specs if spec.kind == DATE]
    if dates:
        notes.append(f"Dates became days since 1970-01-01, month and weekday: {quote_list(dates)}.")
    grouped = [spec.name for spec in specs if spec.other]
    if grouped:
        notes.append(f"Rare levels became the level '{OTHER_LEVEL}': {quote_list(grouped)}.")
    flagged = [spec.name for spec in specs if spec.flagged]
    if flagged:
        notes.append(
            "Missing values were replaced by the mean or the most frequent value of all clients' training rows, and "
            f"flagged in a column of their own: {quote_list(flagged)}."
        )
    return notes
