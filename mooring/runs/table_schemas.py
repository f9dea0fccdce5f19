"""The two tables of a run: one row per round, one row per client. Their columns are declared here and nowhere else.

A file contains the columns that its run fills: a fit has no recommendations, an exact method no privacy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from mooring.core.errors import RequestError
from mooring.core.types import NamedValues
from mooring.runs.atomic_files import read_table


def _field(name: str, kind: pa.DataType, description: str, nullable: bool = True) -> pa.Field:
    return pa.field(name, kind, nullable=nullable, metadata={"about": description})


def _count(name: str, description: str) -> pa.Field:
    return _field(name, pa.int64(), description, nullable=False)


def _number(name: str, description: str) -> pa.Field:
    return _field(name, pa.float64(), description)  # NaN and missing are the same: no value


def _improvements() -> list[pa.Field]:
    """Return the fields of the recommended model's improvement over the local and the global one."""
    end_texts = {"": "", "_ci_low": ", lower end of its interval", "_ci_high": ", upper end of its interval"}
    units = {"": "in the unit of the loss", "_pct": "in percent of the other model's loss"}
    out = []
    for alternative in ("local", "global"):
        out += [
            _number(
                f"improvement_over_{alternative}{unit}{end}",
                f"loss of the {alternative} model less this one, {unit_text}{end_text}",
            )
            for unit, unit_text in units.items()
            for end, end_text in end_texts.items()
        ]
        out.append(
            _number(
                f"probability_better_than_{alternative}",
                f"that the recommended model's loss is lower than the {alternative}",
            )
        )
    return out


ROUNDS_SCHEMA = pa.schema(
    [
        _count("round", "communication round, from 1"),
        _number("train_loss", "mean over the clients' training rows, in the target's own units"),
        _number("validation_loss", "the same over validation rows"),
        _number("test_loss", "the same over test rows"),
        _number("test_rmse", "of a regression by squared loss"),
        _number("test_r2", "of a regression by squared loss"),
        _number("test_accuracy", "of classes, where the rows are in one place"),
        _number("test_auc", "of two classes, where the rows are in one place"),
        _count("bytes_up", "sent by the clients"),
        _count("bytes_down", "sent by the server"),
        _count("samples", "rows drawn in local updates"),
        _count("gradients", "gradients of single rows that were computed"),
        _count("promised", "inner solves that promised a gradient norm"),
        _count("broken", "those of them that ended above it"),
        _number("gradient_promised", "of the worst of them"),
        _number("gradient_reached", "of the worst of them"),
        _count("asked", "clients in the cohort"),
        _count("accepted", "clients whose replies were used"),
        _number("epsilon", "privacy spent so far, of a private run"),
    ]
)

CLIENTS_SCHEMA = pa.schema(
    [
        _field("client", pa.string(), "name", nullable=False),
        _count("rows", "all of the client's rows"),
        _count("train", "training rows"),
        _count("validation", "validation rows"),
        _count("test", "test rows"),
        _field("recommended", pa.string(), "model that the client should use: local, global or personal"),
        _field("confidence", pa.string(), "that it is better than both others: high, moderate or low"),
        _number("local", "loss of the local model: expected (advise) or on test rows (fit)"),
        _number("global", "loss of the global model: expected (advise)"),
        _number("pooled", "loss of the pooled model on test rows (fit)"),
        _number("personal", "loss of the personal model: expected (advise) or on test rows (fit)"),
        *_improvements(),
        *(_number(f"{model}_held_out", f"measured loss of the {model} model on held-out rows")
          for model in ("local", "global", "personal")),
        _field("held_out_rows", pa.int64(), "rows of the client that were held out"),
        _number("rmse", "of the personal model on test rows"),
        _number("mae", "of the personal model on test rows"),
        _number("r2", "of the personal model on test rows"),
        _number("accuracy", "of the personal model on test rows"),
        _number("auc", "of the personal model on test rows"),
        _field("plan", pa.string(), "kind of pull behind the recommended model"),
        _number("lam", "lambda, the strength of the pull towards the global model"),
        _number("alpha", "weight of the local part in a mixture"),
        _number("rows_to_match", "rows at which a local model would match the personal one"),
        _number("others_held_out", "mean held-out loss of the other clients' personal models, per row"),
        _number("contribution", "rise of that loss without this client, estimated"),
        _number("contribution_pct", "the same in percent of `others_held_out`"),
        _field("is_outlier", pa.bool_(), "whether its coefficients are far from the other clients'"),
        _field("left_out", pa.string(), "in how many rounds the client's replies could not be used, and why"),
    ]
)  # fmt: skip


def rounds_table(rows: Iterable[NamedValues]) -> pa.Table:
    """`rounds.parquet` from one mapping per round, such as the records of a checkpoint; losses may be left out."""
    return _table("rounds.parquet", rows, ROUNDS_SCHEMA)


def clients_table(rows: Iterable[NamedValues]) -> pa.Table:
    """`clients.parquet` from one mapping per client; all but its name and sizes may be left out."""
    return _table("clients.parquet", rows, CLIENTS_SCHEMA)


def read_records(path: str | Path, columns: pa.Schema) -> pd.DataFrame:
    """A table of the run with the columns that the run filled."""
    table = read_table(path)
    fields = {field.name: field for field in columns}
    missing = [field.name for field in columns if not field.nullable and field.name not in table.column_names]
    fields |= {name: _number(name, "") for name in table.column_names if name not in fields and _is_metric(name)}
    if missing or any(field.name not in fields or field.type != fields[field.name].type for field in table.schema):
        columns_text, names = ", ".join(table.column_names), ", ".join(columns.names)
        raise RequestError(f"{path} has the columns {columns_text}; this version of Mooring reads {names}.")
    return table.to_pandas()


def _is_metric(column: str) -> bool:
    """Whether a column that no schema has is the metric of a user, on test rows."""
    return column.startswith("test_")


def _table(file: str, rows: Iterable[NamedValues], columns: pa.Schema) -> pa.Table:
    rows = list(rows)
    unknown = sorted({name for row in rows for name in row} - set(columns.names))
    columns = pa.schema([*columns, *(_number(name, "a user's metric") for name in unknown if _is_metric(name))])
    unknown = [name for name in unknown if not _is_metric(name)]
    if unknown:
        raise RequestError(f"{file} has no column '{unknown[0]}'; it has {', '.join(columns.names)}.")
    values = {field: [_value(file, row.get(field.name), field) for row in rows] for field in columns}
    filled = [field for field in columns if not field.nullable or any(value is not None for value in values[field])]
    schema = pa.schema([field.remove_metadata() for field in filled])
    return pa.Table.from_arrays([pa.array(values[field], field.type) for field in filled], schema=schema)


def _value(file: str, value: Any, field: pa.Field) -> object:
    if isinstance(value, float) and math.isnan(value):
        value = None  # a missing value in a data frame
    if value is not None and pa.types.is_float64(field.type):
        value = float(value)
        value = None if math.isnan(value) else value
    if value is not None and pa.types.is_int64(field.type):
        value = int(value)
    if value is None and not field.nullable:
        raise RequestError(f"{file}: every row needs a value of '{field.name}', got none.")
    return value
