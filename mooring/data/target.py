"""The target column: its kind, its classes, its numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

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
    y: np.ndarray  # class codes (int64), or unscaled numbers (float64)
    classes: tuple[str, ...]
    notes: list[str]


class TargetDescription(NamedTuple):
    """The target's kind, which all clients use."""

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


def survey_target(
    series: pd.Series, kind: str, code: np.ndarray, clients: list[str], exact: bool = False
) -> ColumnStatistics:
    """Return the clients' statistics of their targets: counts, extremes, and the classes by name.

    A client names its values only if they may be classes: text, whole numbers that are few and small, at most two
    different numbers, or classes by `kind`; and never more than MAX_NAMED_CLASSES and half of its rows.
    """
    if kind not in (*TARGET_KINDS, "auto"):
        raise RequestError(f"the target's kind must be one of {quote_list(('auto', *TARGET_KINDS))}, got {kind!r}.")
    name, num_clients = str(series.name), len(clients)
    rows = sum_by_client(np.ones(len(series)), code, num_clients)
    number = classify_cells(series).number | types.is_datetime64_any_dtype(series)
    numbers = sum_by_client(number, code, num_clients)
    if number.all():
        text, statistics = (
            None,
            order_statistics(np.asarray(parse_values(series, NUMBER)[0], dtype=float), code, num_clients, exact),
        )
    else:
        text, values = to_categories(series), np.full(len(series), np.nan)
        values[number] = np.asarray(parse_values(series, NUMBER)[0])[number]
        statistics = order_statistics(values, code, num_clients, exact)
        statistics["distinct"] = order_statistics(text.codes.astype(float), code, num_clients)["distinct"]
    is_integer = types.is_integer_dtype(series)
    is_code = (
        is_integer
        & (statistics["distinct"] <= MAX_CODE_VALUES)
        & (statistics["low"] >= 0)
        & (statistics["high"] <= MAX_CODE)
    )
    likely = (statistics["distinct"] <= 2) | is_code | (numbers < MIN_READABLE_SHARE * rows)
    if kind != "auto":
        likely = np.full(num_clients, kind in (BINARY, CLASSES))
    is_named = likely & (statistics["distinct"] <= np.maximum(MAX_NAMED_CLASSES, rows / 2))
    counts = {
        "has": np.ones(num_clients),
        "rows": rows,
        "numbers": numbers,
        "whole": np.full(num_clients, float(is_integer)),
    }
    levels = {}
    if is_named.any():
        text = to_categories(series) if text is None else text
        levels = count_levels(np.where(is_named[code], text.codes, -1), list(text.categories), code, clients)
    return ColumnStatistics(
        tuple(clients), {name: counts | statistics | {"named": is_named.astype(float)}}, {name: levels}
    )


class TargetSummary(NamedTuple):
    """What decides on the kind of the target, over all clients."""

    rows: int
    numbers: int
    levels: int  # different values of the clients that name theirs
    named: bool  # whether all clients name their values
    is_code: bool  # whether all clients have whole numbers from 0 to MAX_CODE only


def agree_target(summary: ColumnStatistics, name: str, kind: str, title: str) -> TargetDescription:
    """Return the target's kind, or the kind that fits it best ("auto"), and its classes."""
    location = f"{title}: target column '{name}'"
    levels, rows = summary.levels.get(name, {}), int(summary.total(name, "rows"))
    low, high = summary.of(name, "low").min(), summary.of(name, "high").max()
    named, whole = summary.of(name, "named") > 0, summary.of(name, "whole") > 0
    is_code = bool(whole.all() and low >= 0 and high <= MAX_CODE)
    facts = TargetSummary(rows, int(summary.total(name, "numbers")), len(levels), bool(named.all()), is_code)
    chosen = fitting_kind(name, facts) if kind == "auto" else kind
    if chosen not in (BINARY, CLASSES):
        if low == high and summary.total(name, "finite") == rows:
            raise RequestError(f"{location} is {low:g} in every row; there is nothing to learn.")
        return TargetDescription(chosen, (), [])
    if not named.all():
        numeric = summary.select_clients(name, ~named & (summary.of(name, "numbers") > 0))
        texts = summary.select_clients(
            name, summary.of(name, "numbers") < MIN_READABLE_SHARE * summary.of(name, "rows")
        )
        if numeric and texts and kind == "auto":
            raise RequestError(
                f"{location} holds numbers at client '{numeric[0]}', but text at client '{texts[0]}'; "
                "all clients must have the same kind of target."
            )
        refuse_key(f"{summary.of(name, 'distinct').max():.0f} or more", rows, location)
    examples = [f"'{value}' at client '{levels[value].client}'" for value in sort_levels(levels)[:5]]
    values = ", ".join(examples) if len(levels) > 1 else quote_list(levels)
    refuse_classes(len(levels), chosen, rows, location, values)
    return describe_classes(name, kind, chosen, sort_levels(levels), bool(whole.all()))


def fitting_kind(name: str, target: TargetSummary) -> str:
    """Return the kind that fits a target best: text, booleans and columns with two values are classes; so are up to
    ten small whole numbers, unless the column's name is that of a quantity; every other number is a regression
    target."""
    if target.named and target.levels <= 2:
        return BINARY
    if target.numbers < MIN_READABLE_SHARE * target.rows:
        return CLASSES
    is_code = target.named and target.is_code and target.levels <= MAX_CODE_VALUES
    return CLASSES if is_code and not QUANTITY.search(name) else REGRESSION


def refuse_key(classes: str, rows: int, location: str) -> NoReturn:
    raise RequestError(f"{location} holds {classes} classes in {rows} rows; it looks like a key, not a target.")


def refuse_classes(classes: int, kind: str, rows: int, location: str, values: str = "") -> None:
    """Refuse a number of classes that cannot be learned from; `values` names some of them."""
    if classes == 1:
        raise RequestError(f"{location} holds one class only{values and f', {values}'}; at least two are needed.")
    if kind == BINARY and classes > 2:
        raise RequestError(f"{location} holds {classes} values{values and f' ({values})'}; a binary target has two.")
    if classes > max(10, rows / 2):
        refuse_key(str(classes), rows, location)


def describe_classes(name: str, kind: str, chosen: str, classes: Sequence[str], is_whole: bool) -> TargetDescription:
    """Return the description of a target of classes; `kind` is the requested one."""
    notes = []
    if kind == "auto" and chosen == CLASSES and is_whole:
        notes.append(
            f"Target '{name}' has {len(classes)} different whole numbers and was taken as classes; "
            f"set its kind to 'regression' if they are amounts."
        )
    if chosen == BINARY and tuple(classes) != ("0", "1"):
        notes.append(f"Target '{name}': 1 stands for '{classes[1]}', 0 for '{classes[0]}'.")
    return TargetDescription(chosen, tuple(classes), notes)


def read_target(
    series: pd.Series,
    kind: str,
    place: RowLocator,
    title: str,
    code: np.ndarray | None = None,
    clients: Sequence[str] = (),
) -> Target:
    """Return the target of a table, with the kind that its clients (default: one) agree on."""
    require_targets(series, place)
    name = str(series.name)
    if code is None:
        code, clients = np.zeros(len(series), dtype=np.int64), [title]
    answer = agree_target(survey_target(series, kind, code, list(clients)), name, kind, title)
    return Target(answer.kind, encode_target(series, answer.kind, answer.classes, place), answer.classes, answer.notes)


def encode_target(series: pd.Series, kind: str, classes: tuple[str, ...], place: RowLocator) -> np.ndarray:
    """Return a table's target in the agreed codes (or numbers)."""
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
    unknown = np.flatnonzero(codes < 0)
    if len(unknown):
        raise RequestError(
            f"{place(unknown[0])}, target column '{series.name}': '{text[unknown[0]]}' is not one of the classes "
            f"{quote_list(classes)}."
        )
    return codes.astype(np.int64)
