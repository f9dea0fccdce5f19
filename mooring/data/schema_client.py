"""A client's side of the agreement on a schema (`schema_server.py`): three answers, none of which holds a row.

    survey   all rows       what the columns and the target hold           -> a plan: kinds, columns left out, classes
    tally    training rows  counts, sums, levels of the planned columns    -> a draft: vocabularies, imputation, means
    spread   training rows  sums of squares about the draft's means        -> the schema

Every function takes the rows of one client, or of all clients of a pooled table at once: `code` says whose row it is.
A lone client gives the same numbers as its rows within a pooled table.
"""

from __future__ import annotations

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
    """A client's table, or a pooled table with its clients, and what was asked for."""

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
    """A member's rows as the plan reads them. Stays at the client."""

    columns: dict[str, Values]
    target: Target
    part: np.ndarray
    notes: list[str]

    @property
    def train(self) -> np.ndarray:
        return self.part == TRAIN


def survey_table(member: ClientTable) -> ColumnStatistics:
    """What every column holds, in all rows."""
    require_targets(member.table.frame[member.roles.target], member.table.place)
    found = survey_target(member.table.frame[member.roles.target], member.kind, member.code, member.clients)
    columns = survey_columns(member.table.frame, member.features, member.code, len(member.clients))
    roles = {
        role: {name or "": LevelCount(len(member.clients), min(member.clients))}
        for role, name in member.roles._asdict().items()
    }
    return merge_statistics([ColumnStatistics(tuple(member.clients), columns | found.facts, found.levels, roles)])


def survey_columns(
    frame: pd.DataFrame, names: list[str], code: np.ndarray, clients: int
) -> dict[str, dict[str, np.ndarray]]:
    """For every column, client by client: how many values there are, how many read as numbers or dates, how many
    differ, and for numbers the extremes, the median and how far values lie from it."""
    facts = {}
    rows = sum_by_client(np.ones(len(code)), code, clients)
    for place, name in enumerate(names):
        series = frame[name]
        read = classify_cells(series)
        values = np.full(len(series), np.nan)
        for kind, reads in ((NUMBER, read.number), (DATE, read.date)):
            if reads.any():
                values[reads] = np.asarray(parse_values(series, kind)[0])[reads]
        found = order_statistics(values, code, clients)
        if (read.present & ~np.isfinite(values)).any():
            found["distinct"] = order_statistics(
                np.where(read.present, to_categories(series).codes, np.nan), code, clients
            )["distinct"]
        whole = types.is_integer_dtype(series)
        facts[name] = {
            "has": np.ones(clients),
            "place": np.full(clients, float(place)),
            "rows": rows,
            "present": sum_by_client(read.present, code, clients),
            "numbers": sum_by_client(read.number, code, clients),
            "dates": sum_by_client(read.date, code, clients),
            "whole": np.full(clients, float(whole)),
        } | found
    return facts


def parse_table(member: ClientTable, plan: SchemaPlan) -> ParsedTable:
    """The planned columns' values, the target and the parts; what cannot be read is refused by its row."""
    table = member.table
    columns = {feature.name: feature.read(table.frame, table.place) for feature in plan.columns}
    target = Target(plan.kind, target_of(table, member.roles, plan), plan.classes, [])
    part, notes = split_rows(table, member.roles, member.code, member.clients, target, member.seed, member.shares)
    return ParsedTable(clip_columns(columns, plan.limits), target, part, notes)


def target_of(table: Table, roles: ColumnRoles, known: SchemaPlan | Schema) -> np.ndarray:
    """A table's targets as they count, by a plan or a schema."""
    y = encode_target(table.frame[roles.target], known.kind, known.classes, table.place)
    return clip_outliers(y, known.limits[known.target]) if known.target in known.limits else y


def count_values(member: ClientTable, plan: SchemaPlan, reading: ParsedTable) -> ColumnStatistics:
    """Counts, sums and levels of the training rows."""
    code, many = member.code[reading.train], len(member.clients)
    rows = sum_by_client(np.ones(len(code)), code, many)
    facts, levels = {}, {}
    for feature in plan.columns:
        values = reading.columns[feature.name]
        absent = is_missing(values)
        mine = values[reading.train]
        gone = is_missing(mine)
        about = {"has": np.ones(many), "rows": rows, "present": sum_by_client(~gone, code, many)}
        about["missing"] = sum_by_client(absent, member.code, many)  # in any row: a column without is told apart
        if feature.kind == CATEGORY:
            levels[feature.name] = count_levels(mine.codes, list(mine.categories), code, member.clients)
        else:
            shown = order_statistics(mine, code, many)
            about |= {"total": sum_by_client(np.where(gone, 0.0, mine), code, many)}
            about |= {"low": shown["low"], "high": shown["high"]}
        facts[feature.name] = about
    y = reading.target.y[reading.train].astype(float)
    shown = order_statistics(y, code, many)
    facts[plan.target] = {
        "has": np.ones(many),
        "rows": rows,
        "total": sum_by_client(y, code, many),
        "low": shown["low"],
        "high": shown["high"],
    }
    return merge_statistics([ColumnStatistics(tuple(member.clients), facts, levels)])


def sum_squares(member: ClientTable, draft: Schema, reading: ParsedTable) -> ColumnStatistics:
    """Sums of squares of the training rows about the draft's means. Squares about the common mean,
    unlike plain squares, lose no digits when a column's mean is large against its spread (years, days)."""
    code, many = member.code[reading.train], len(member.clients)
    facts = {TARGET_KEY: {"rows": sum_by_client(np.ones(len(code)), code, many)}}
    if draft.columns:
        x = encode_columns(reading.columns, draft.columns)[0][reading.train]
        for j, mean in enumerate(draft.mean):
            facts[str(j)] = {"squares": sum_by_client((x[:, j] - mean) ** 2, code, many)}
    if draft.kind == REGRESSION:
        off = reading.target.y[reading.train] - draft.target_mean
        facts[TARGET_KEY]["squares"] = sum_by_client(off**2, code, many)
    return merge_statistics([ColumnStatistics(tuple(member.clients), facts)])


def agree_on_schema(
    members: Sequence[ClientTable], *, asked: bool = False, rare: int = 1, title: str = "the clients"
) -> tuple[Schema, SchemaPlan, list[ParsedTable]]:
    """The whole conversation within one process: the schema of all members' rows, the plan on the way to it, and each
    member's rows as they are read by it."""
    plan = plan_schema(
        merge_statistics(survey_table(m) for m in members), kind=members[0].kind, asked=asked, title=title
    )
    readings = [parse_table(member, plan) for member in members]
    tallies = merge_statistics(count_values(member, plan, mine) for member, mine in zip(members, readings))
    draft = draft_schema(tallies, plan, rare=rare, title=title)
    spreads = merge_statistics(sum_squares(member, draft, mine) for member, mine in zip(members, readings))
    return complete_schema(spreads, draft), plan, readings
