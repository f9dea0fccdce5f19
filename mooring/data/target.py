"""The target column: what kind it is, its classes, its numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from pandas.api import types

from mooring.core.errors import RequestError
from mooring.data.clients import BINARY, CLASSES, COUNT, REGRESSION
from mooring.data.column_statistics import ColumnStatistics, count_levels, order_statistics, sum_by_client
from mooring.data.column_types import (
    MIN_READABLE_SHARE,
    NUMBER,
    classify_cells,
    parse_values,
    read_values,
    sort_levels,
    to_categories,
)
from mooring.data.tables import RowLocator, quote_list

TARGET_KINDS = (REGRESSION, BINARY, CLASSES, COUNT)
MAX_CODE_VALUES, MAX_CODE = 10, 20  # whole numbers that are at most so many and so large may be codes of classes
MAX_NAMED_CLASSES = 50  # a client names no more classes than this, or than half of its rows
QUANTITY = re.compile(
    r"(?i)count|number|score|points|rating|age|year|month|week|day|hour|time|amount|price|cost|size|length|visits"
    r"|^(n|nr|no|num)([_. ]|$)"
)


class Target(NamedTuple):
    kind: str
    y: np.ndarray  # class codes (int64), or numbers as they are (float64)
    classes: tuple[str, ...]
    notes: list[str]


class TargetDescription(NamedTuple):
    """What all clients take the target for."""

    kind: str
    classes: tuple[str, ...]
    notes: list[str]


def require_targets(series: pd.Series, place: RowLocator) -> None:
    empty = np.flatnonzero(series.isna())
    if len(empty):
        raise RequestError(
            f"{place(empty[0])}, target column '{series.name}': the value is missing, as in {len(empty)} of "
            f"{len(series)} rows; fill them in, or drop the rows without a target (drop_missing_target)."
        )


def survey_target(series: pd.Series, kind: str, code: np.ndarray, clients: list[str]) -> ColumnStatistics:
    """What clients say about their targets: counts, extremes, and the classes by name.

    A client names its values only where they may be classes: text, whole numbers that are few and small, at most two
    different numbers, or what `kind` says are classes; and never more than NAMED_CLASSES and half of its rows.
    """
    if kind not in (*TARGET_KINDS, "auto"):
        raise RequestError(f"the target's kind must be one of {quote_list(('auto', *TARGET_KINDS))}, got {kind!r}.")
    name, many = str(series.name), len(clients)
    rows = sum_by_client(np.ones(len(series)), code, many)
    number = classify_cells(series).number | types.is_datetime64_any_dtype(series)
    numbers = sum_by_client(number, code, many)
    if number.all():
        text, found = None, order_statistics(np.asarray(parse_values(series, NUMBER)[0], dtype=float), code, many)
    else:
        text, values = to_categories(series), np.full(len(series), np.nan)
        values[number] = np.asarray(parse_values(series, NUMBER)[0])[number]
        found = order_statistics(values, code, many)
        found["distinct"] = order_statistics(text.codes.astype(float), code, many)["distinct"]
    whole = types.is_integer_dtype(series)
    few = whole & (found["distinct"] <= MAX_CODE_VALUES) & (found["low"] >= 0) & (found["high"] <= MAX_CODE)
    likely = (found["distinct"] <= 2) | few | (numbers < MIN_READABLE_SHARE * rows)
    if kind != "auto":
        likely = np.full(many, kind in (BINARY, CLASSES))
    named = likely & (found["distinct"] <= np.maximum(MAX_NAMED_CLASSES, rows / 2))
    facts = {"has": np.ones(many), "rows": rows, "numbers": numbers, "whole": np.full(many, float(whole))}
    levels = {}
    if named.any():
        text = to_categories(series) if text is None else text
        levels = count_levels(np.where(named[code], text.codes, -1), list(text.categories), code, clients)
    return ColumnStatistics(tuple(clients), {name: facts | found | {"named": named.astype(float)}}, {name: levels})


def agree_target(summary: ColumnStatistics, name: str, kind: str, title: str) -> TargetDescription:
    """The target's kind, or the kind that fits it best ("auto"), and its classes.

    Auto: text, booleans and columns with two values are classes; so are up to ten small whole numbers, unless the
    column's name speaks of a quantity; every other number is a regression target.
    """
    where = f"{title}: target column '{name}'"
    found = fitting_kind(summary, name) if kind == "auto" else kind
    levels = summary.levels.get(name, {})
    classes = tuple(sort_levels(levels))
    rows = int(summary.total(name, "rows"))
    if found not in (BINARY, CLASSES):
        low, high = summary.of(name, "low").min(), summary.of(name, "high").max()
        if low == high and summary.total(name, "finite") == rows:
            raise RequestError(f"{where} is {low:g} in every row; there is nothing to learn.")
        return TargetDescription(found, (), [])
    unnamed = summary.where(name, summary.of(name, "named") == 0)
    if unnamed:
        most = int(summary.of(name, "distinct").max())
        numeric = summary.where(name, (summary.of(name, "named") == 0) & (summary.of(name, "numbers") > 0))
        texts = summary.where(name, summary.of(name, "numbers") < MIN_READABLE_SHARE * summary.of(name, "rows"))
        if numeric and texts and kind == "auto":
            raise RequestError(
                f"{where} holds numbers at client '{numeric[0]}', but text at client '{texts[0]}'; "
                "all clients must have the same kind of target."
            )
        raise RequestError(f"{where} holds {most} or more classes in {rows} rows; it looks like a key, not a target.")
    refuse_classes(summary, name, found, where)
    notes = []
    if kind == "auto" and found == CLASSES and summary.of(name, "whole").all():
        notes.append(
            f"Target '{name}' has {len(classes)} different whole numbers and was taken as classes; "
            f"set its kind to 'regression' if they are amounts."
        )
    if found == BINARY and classes != ("0", "1"):
        notes.append(f"Target '{name}': 1 stands for '{classes[1]}', 0 for '{classes[0]}'.")
    return TargetDescription(found, classes, notes)


def fitting_kind(summary: ColumnStatistics, name: str) -> str:
    levels, all_named = summary.levels.get(name, {}), bool(summary.of(name, "named").all())
    if all_named and len(levels) <= 2:
        return BINARY
    if summary.total(name, "numbers") < MIN_READABLE_SHARE * summary.total(name, "rows"):
        return CLASSES
    codes = (
        all_named
        and summary.of(name, "whole").all()
        and len(levels) <= MAX_CODE_VALUES
        and summary.of(name, "low").min() >= 0
        and summary.of(name, "high").max() <= MAX_CODE
        and not QUANTITY.search(name)
    )
    return CLASSES if codes else REGRESSION


def refuse_classes(summary: ColumnStatistics, name: str, kind: str, where: str) -> None:
    levels, rows = summary.levels[name], int(summary.total(name, "rows"))
    if len(levels) == 1:
        raise RequestError(f"{where} holds one class only, '{next(iter(levels))}'; at least two are needed.")
    if kind == BINARY and len(levels) > 2:
        some = [f"'{value}' at client '{levels[value].client}'" for value in sort_levels(levels)[:5]]
        raise RequestError(f"{where} holds {len(levels)} values ({', '.join(some)}); a binary target has two.")
    if len(levels) > max(10, rows / 2):
        raise RequestError(f"{where} holds {len(levels)} classes in {rows} rows; it looks like a key, not a target.")


def read_target(
    series: pd.Series,
    kind: str,
    place: RowLocator,
    title: str,
    code: np.ndarray | None = None,
    clients: Sequence[str] = (),
) -> Target:
    """The target of a table as what its clients (default: one) take it for."""
    require_targets(series, place)
    name = str(series.name)
    if code is None:
        code, clients = np.zeros(len(series), dtype=np.int64), [title]
    answer = agree_target(survey_target(series, kind, code, list(clients)), name, kind, title)
    return Target(answer.kind, encode_target(series, answer.kind, answer.classes, place), answer.classes, answer.notes)


def encode_target(series: pd.Series, kind: str, classes: tuple[str, ...], place: RowLocator) -> np.ndarray:
    """A table's target in the codes (or numbers) that were agreed on."""
    require_targets(series, place)
    if kind not in (BINARY, CLASSES):
        y = np.asarray(read_values(series, NUMBER, place), dtype=float)
        wrong = np.flatnonzero((y < 0) | (y != np.floor(y))) if kind == COUNT else np.zeros(0, dtype=np.int64)
        if len(wrong):
            raise RequestError(
                f"{place(wrong[0])}, target column '{series.name}': {y[wrong[0]]:g} is not a count; "
                "counts are whole numbers from 0 on."
            )
        return y
    text = to_categories(series)
    codes = pd.Index(classes).get_indexer(text.categories)[text.codes]
    strange = np.flatnonzero(codes < 0)
    if len(strange):
        raise RequestError(
            f"{place(strange[0])}, target column '{series.name}': '{text[strange[0]]}' is not one of the classes "
            f"{quote_list(classes)}."
        )
    return codes.astype(np.int64)
