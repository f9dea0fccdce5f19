"""The client's side of the agreement on a schema (`schema_server.py`): three replies, without rows.

    survey   all rows        types and extremes of columns and target   -> a plan: kinds, columns left out, classes
    tally    training rows   counts, sums, levels of planned columns    -> a draft: vocabularies, imputation, means
    spread   training rows   sums of squares about the draft's means    -> the schema

Every function takes the rows of one client, or of all clients of a pooled table at once: `code` is the client of each
row. A single client gives the same numbers as its rows within a pooled table.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from pandas.api import types

from mooring.data.clients import REGRESSION
from mooring.data.column_roles import ColumnRoles, split_rows
from mooring.data.column_statistics import (
    ColumnStatistics,
    LevelCount,
    count_levels,
    merge_statistics,
    order_statistics,
    sum_by_client,
)
from mooring.data.column_types import (
    CATEGORY,
    DATE,
    NUMBER,
    Values,
    classify_cells,
    is_missing,
    parse_values,
    to_categories,
)
from mooring.data.formulas import FormulaState
from mooring.data.schema import Schema, clip_columns, clip_outliers, encode_columns
from mooring.data.schema_server import TARGET_KEY, SchemaPlan, complete_schema, draft_schema, plan_schema
from mooring.data.splits import DEFAULT_SHARES, TRAIN, Shares
from mooring.data.tables import Table
from mooring.data.target import Target, encode_target, require_targets, survey_target


@dataclass(frozen=True, eq=False)
class ClientTable:
    """A client's table, or a pooled table with its clients, and options."""

    table: Table
    roles: ColumnRoles
    code: np.ndarray  # each row's client
    clients: list[str]
    features: list[str]  # the columns to learn from
    kind: str = "auto"
    seed: int = 0
    shares: Shares = DEFAULT_SHARES
    formula: FormulaState | None = None  # which made the columns


@dataclass(frozen=True, eq=False)
class ParsedTable:
    """A client's rows as parsed by the plan. They stay at the client."""

    columns: dict[str, Values]
    target: Target
    part: np.ndarray
    notes: list[str]

    @property
    def train(self) -> np.ndarray:
        return self.part == TRAIN


def survey_table(member: ClientTable, exact: bool = False) -> ColumnStatistics:
    """Return statistics of every column, over all rows; `exact` ones do not leave the client."""
    require_targets(member.table.frame[member.roles.target], member.table.place)
    target_statistics = survey_target(
        member.table.frame[member.roles.target], member.kind, member.code, member.clients, exact
    )
    columns = survey_columns(member.table.frame, member.features, member.code, len(member.clients), exact)
    roles = {
        role: {name or "": LevelCount(len(member.clients), min(member.clients))}
        for role, name in member.roles._asdict().items()
    }
    return merge_statistics(
        [ColumnStatistics(tuple(member.clients), columns | target_statistics.facts, target_statistics.levels, roles)]
    )


def survey_columns(
    frame: pd.DataFrame, names: list[str], code: np.ndarray, clients: int, exact: bool = False
) -> dict[str, dict[str, np.ndarray]]:
    """Return for every column, by client: the numbers of values, of numbers, of dates and of different
    values, and for numbers the extremes, the median and distances from it."""
    statistics = {}
    rows = sum_by_client(np.ones(len(code)), code, clients)
    for place, name in enumerate(names):
        series = frame[name]
        read = classify_cells(series)
        values = np.full(len(series), np.nan)
        for kind, reads in ((NUMBER, read.number), (DATE, read.date)):
            if reads.any():
                values[reads] = np.asarray(parse_values(series, kind)[0])[reads]
        ordered = order_statistics(values, code, clients, exact)
        if (read.present & ~np.isfinite(values)).any():
            ordered["distinct"] = order_statistics(
                np.where(read.present, to_categories(series).codes, np.nan), code, clients
            )["distinct"]
        is_integer = types.is_integer_dtype(series)
        statistics[name] = {
            "has": np.ones(clients),
            "place": np.full(clients, float(place)),
            "rows": rows,
            "present": sum_by_client(read.present, code, clients),
            "numbers": sum_by_client(read.number, code, clients),
            "dates": sum_by_client(read.date, code, clients),
            "whole": np.full(clients, float(is_integer)),
        } | ordered
    return statistics


def parse_table(member: ClientTable, plan: SchemaPlan) -> ParsedTable:
    """Return the planned columns' values, the target and the parts; an unreadable cell is refused by its row."""
    table = member.table
    columns = {feature.name: feature.read(table.frame, table.place) for feature in plan.columns}
    target = Target(plan.kind, target_of(table, member.roles, plan), plan.classes, [])
    part, notes = split_rows(table, member.roles, member.code, member.clients, target, member.seed, member.shares)
    return ParsedTable(clip_columns(columns, plan.limits), target, part, notes)


def target_of(table: Table, roles: ColumnRoles, schema: SchemaPlan | Schema) -> np.ndarray:
    """Return a table's targets with clipped outliers, by a plan or a schema."""
    y = encode_target(table.frame[roles.target], schema.kind, schema.classes, table.place)
    return clip_outliers(y, schema.limits[schema.target]) if schema.target in schema.limits else y


def count_values(member: ClientTable, plan: SchemaPlan, reading: ParsedTable) -> ColumnStatistics:
    """Return counts, sums and levels of the training rows."""
    code, num_clients = member.code[reading.train], len(member.clients)
    rows = sum_by_client(np.ones(len(code)), code, num_clients)
    statistics, levels = {}, {}
    for feature in plan.columns:
        values = reading.columns[feature.name]
        absent = is_missing(values)
        train_values = values[reading.train]
        train_missing = is_missing(train_values)
        column_facts = {
            "has": np.ones(num_clients),
            "rows": rows,
            "present": sum_by_client(~train_missing, code, num_clients),
        }
        column_facts["missing"] = sum_by_client(
            absent, member.code, num_clients
        )  # over all rows, to detect columns without missing values
        if feature.kind == CATEGORY:
            levels[feature.name] = count_levels(train_values.codes, list(train_values.categories), code, member.clients)
        else:
            extremes = order_statistics(train_values, code, num_clients)
            column_facts |= {"total": sum_by_client(np.where(train_missing, 0.0, train_values), code, num_clients)}
            column_facts |= {"low": extremes["low"], "high": extremes["high"]}
        statistics[feature.name] = column_facts
    y = reading.target.y[reading.train].astype(float)
    extremes = order_statistics(y, code, num_clients)
    statistics[plan.target] = {
        "has": np.ones(num_clients),
        "rows": rows,
        "total": sum_by_client(y, code, num_clients),
        "low": extremes["low"],
        "high": extremes["high"],
    }
    return merge_statistics([ColumnStatistics(tuple(member.clients), statistics, levels)])


def sum_squares(member: ClientTable, draft: Schema, reading: ParsedTable) -> ColumnStatistics:
    """Return sums of squares of the training rows about the draft's means. Squares about the shared mean,
    unlike plain squares, lose no digits when a column's mean is large against its spread (years, days)."""
    code, num_clients = member.code[reading.train], len(member.clients)
    statistics = {TARGET_KEY: {"rows": sum_by_client(np.ones(len(code)), code, num_clients)}}
    if draft.columns:
        x = encode_columns(reading.columns, draft.columns)[0][reading.train]
        for j, mean in enumerate(draft.mean):
            statistics[str(j)] = {"squares": sum_by_client((x[:, j] - mean) ** 2, code, num_clients)}
    if draft.kind == REGRESSION:
        off = reading.target.y[reading.train] - draft.target_mean
        statistics[TARGET_KEY]["squares"] = sum_by_client(off**2, code, num_clients)
    return merge_statistics([ColumnStatistics(tuple(member.clients), statistics)])


def find_nearest_cell(frame: pd.DataFrame, rows: np.ndarray, column: str, near: float) -> float:
    """Return the number of a column nearest to another one, among some rows; `near` itself if it has no numbers."""
    if not types.is_numeric_dtype(frame[column]):
        return near
    values = frame[column].to_numpy(float, na_value=np.nan)[rows]
    return float(values[np.nanargmin(np.abs(values - near))]) if np.isfinite(values).any() else near


def name_own_cells(frame: pd.DataFrame, sentence: str) -> str:
    """Return a sentence on a client's own outlier with the cell itself; other clients see a rounded extreme."""
    match = re.search(r"column '(.+)': about (\S+) lies", sentence)
    if match is None or match[1] not in frame.columns:
        return sentence
    cell = find_nearest_cell(frame, np.ones(len(frame), dtype=bool), match[1], float(match[2]))
    return sentence.replace(f"about {match[2]} lies", f"{cell:.6g} lies")


def agree_on_schema(
    members: Sequence[ClientTable], *, keep_useless: bool = False, rare: int = 1, title: str = "the clients"
) -> tuple[Schema, SchemaPlan, list[ParsedTable]]:
    """Run the agreement within one process: return the schema of all members' rows, its plan, and each
    member's parsed rows."""

    def find_cell(client: str, column: str, near: float) -> float:
        member = next(member for member in members if client in member.clients)
        return find_nearest_cell(member.table.frame, member.code == member.clients.index(client), column, near)

    survey = merge_statistics(survey_table(member) for member in members)
    plan = plan_schema(survey, kind=members[0].kind, keep_useless=keep_useless, title=title, find_cell=find_cell)
    readings = [parse_table(member, plan) for member in members]
    tallies = merge_statistics(count_values(member, plan, reading) for member, reading in zip(members, readings))
    draft = draft_schema(tallies, plan, rare=rare, title=title)
    spreads = merge_statistics(sum_squares(member, draft, reading) for member, reading in zip(members, readings))
    return complete_schema(spreads, draft), plan, readings
