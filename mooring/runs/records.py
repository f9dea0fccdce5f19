"""The two tables of a run: a row a round, a row a client. Their columns are fixed here and nowhere else."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from mooring.core.errors import RequestError
from mooring.runs.files import read_table


def _count(name: str) -> pa.Field:
    return pa.field(name, pa.int64(), nullable=False)


def _number(name: str) -> pa.Field:
    return pa.field(name, pa.float64())  # NaN and missing are the same: no value


def _over(other: str) -> list[pa.Field]:
    """What an advice tells of the deployed model against another: gains with intervals, the chance to be better."""
    gains = [f"gain_over_{other}{unit}{end}" for unit in ("", "_percent") for end in ("", "_low", "_high")]
    return [*map(_number, gains), _number(f"chance_over_{other}"), pa.field(f"sure_over_{other}", pa.string())]


ROUNDS = pa.schema(
    [
        _count("t"),
        _number("train_loss"),
        _number("validation_loss"),
        _number("test_loss"),
        _number("test_rmse"),  # of a regression by squares, in the target's own units
        _number("test_r2"),
        _number("test_accuracy"),  # of classes, where the rows are in one place
        _number("test_auc"),
        _count("bytes_up"),
        _count("bytes_down"),
        _count("samples"),
        _count("gradients"),
        _count("promised"),  # inner solves that promised a gradient
        _count("broken"),  # those of them that ended above it
        _number("gradient_promised"),  # of the worst of them
        _number("gradient_reached"),
        _count("asked"),
        _count("accepted"),
        _number("epsilon"),  # of a private run, spent by then
    ]
)

CLIENTS = pa.schema(
    [
        pa.field("client", pa.string(), nullable=False),
        _count("rows"),
        _count("train"),
        _count("validation"),
        _count("test"),
        _number("alone"),
        _number("common"),
        _number("personal"),
        _number("gain"),
        _number("gain_percent"),
        *map(_number, ("rmse", "mae", "r2", "accuracy", "auc")),  # of the personal model, as far as they apply
        _number("lam"),
        _number("alpha"),
        pa.field("left_out", pa.string()),  # why, of a client whose replies could not all be used
        pa.field("deploy", pa.string()),  # of an advice: personal, common or alone
        pa.field("will_do", pa.string()),  # the simplest of them that is no practical difference worse
        *(field for other in ("alone", "common") for field in _over(other)),
    ]
)
RETIRED = ("gain_low", "gain_high", "verdict", "seconds")  # columns that earlier versions wrote


def rounds_table(rows: Iterable[Mapping[str, Any]]) -> pa.Table:
    """`rounds.parquet` from a mapping a round, such as the records of a checkpoint; losses may be left out."""
    return _table("rounds.parquet", rows, ROUNDS)


def clients_table(rows: Iterable[Mapping[str, Any]]) -> pa.Table:
    """`clients.parquet` from a mapping a client; all but its name and sizes may be left out."""
    return _table("clients.parquet", rows, CLIENTS)


def read_records(path: str | Path, columns: pa.Schema) -> pd.DataFrame:
    """A table of the run, its columns as declared above; those that an earlier version did not write are empty."""
    table = found = read_table(path)
    table = table.drop_columns([name for name in RETIRED if name in found.column_names])
    for k, column in enumerate(columns):
        if column.nullable and column.name not in found.column_names and k <= table.num_columns:
            table = table.add_column(k, column, pa.nulls(len(table), column.type))
    if not table.schema.equals(columns):
        mine, known = ", ".join(found.column_names), ", ".join(columns.names)
        raise RequestError(f"{path} has the columns {mine}; this version of Mooring reads {known}.")
    return table.to_pandas()


def _table(file: str, rows: Iterable[Mapping[str, Any]], columns: pa.Schema) -> pa.Table:
    rows = list(rows)
    unknown = sorted({name for row in rows for name in row} - set(columns.names))
    if unknown:
        raise RequestError(f"{file} has no column '{unknown[0]}'; it knows {', '.join(columns.names)}.")
    values = [[_value(file, row.get(field.name), field) for row in rows] for field in columns]
    return pa.Table.from_arrays([pa.array(v, field.type) for v, field in zip(values, columns)], schema=columns)


def _value(file: str, value: Any, field: pa.Field) -> Any:
    if pa.types.is_float64(field.type) and value is not None:
        value = float(value)
        value = None if math.isnan(value) else value
    if isinstance(value, float) and pa.types.is_string(field.type):
        value = None  # how a data frame says that there is no text
    if value is None and not field.nullable:
        raise RequestError(f"{file}: every row needs a value of '{field.name}', got none.")
    return value
