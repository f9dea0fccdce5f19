"""Roles of columns, the client of each row, and the held-out rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pandas as pd

from mooring.core.errors import RequestError
from mooring.core.seeds import client_key
from mooring.data.clients import BINARY, CLASSES, PARTS
from mooring.data.column_types import (
    CATEGORY,
    detect_kind,
    is_missing,
    read_values,
    sort_levels,
    to_categories,
    to_client_names,
)
from mooring.data.splits import DEFAULT_SHARES, TRAIN, Shares, group_split, number_groups, random_split, time_split
from mooring.data.tables import Table, count_phrase, quote_list, require_column
from mooring.data.target import Target

MIN_ROWS_TO_SPLIT = 3  # one to train, one to validate, one to test


class ColumnRoles(NamedTuple):
    """Names of the columns that are not features."""

    client: str
    target: str
    group: str | None = None
    time: str | None = None
    split: str | None = None
    weights: str | None = None


def find_roles(
    table: Table,
    client: str | None = None,
    target: str | None = None,
    unit: str | None = None,
    time: str | None = None,
    split: str | Sequence[float] | None = None,
    drop: Sequence[str] = (),
    weights: str | None = None,
) -> ColumnRoles:
    """Return the requested columns, else those that the source fixes, else columns called `client`, `target`, `split`.

    Shares are left to `split_rows`; they are refused if a column fixes the parts.
    """
    shares, split = (None, split) if split is None or isinstance(split, str) else (split, None)
    split_columns = {"group": unit, "time": time, "split": split}
    conflicts = [f"{role} = '{name}'" for role, name in split_columns.items() if name is not None]
    if len(conflicts) > 1 and not (
        unit is None and len(conflicts) == 2
    ):  # a split and a time: the time orders the rows within the parts
        raise RequestError(f"{table.title}: rows are held out in one way, got {' and '.join(conflicts)}.")
    for role, name in (("client", client or table.client), ("target", target or table.target)):
        if name is None and role not in table.frame.columns:
            raise RequestError(
                f"{table.title}: which column is the {role}? Name it with --{role}; "
                f"the columns are {quote_list(table.frame.columns)}."
            )
    client, target = client or table.client or "client", target or table.target or "target"
    if split is None and not conflicts and "split" in table.frame.columns and "split" not in {client, target, *drop}:
        levels = set(to_categories(table.frame["split"]).categories)
        split = "split" if "train" in levels and levels <= set(PARTS) else None
        if split is not None and shares is not None:
            raise RequestError(
                f"{table.title}: column 'split' already names each row's part; drop it, or leave the shares "
                f"{quote_list(shares)} out."
            )
    roles = ColumnRoles(client, target, unit, time, split, weights)
    for role, name in roles._asdict().items():
        if name is not None:
            require_column(table.frame, name, role, table.title)
    if client == target:
        raise RequestError(f"{table.title}: column '{client}' cannot be both the client and the target.")
    return roles


def feature_names(
    table: Table, roles: ColumnRoles, features: Sequence[str] | None = None, drop: Sequence[str] | None = None
) -> list[str]:
    """The columns to learn from: all without a role and not dropped, or exactly those that `features` names."""
    for name in (*(features or ()), *(drop or ())):
        require_column(table.frame, name, "feature", table.title)
    if features is None:
        names = [c for c in table.frame.columns if c not in {*roles, *(drop or ())}]
    else:
        names = [name for name in dict.fromkeys(features) if name not in (drop or ())]
        reserved = (roles.client, roles.target, roles.split, roles.weights)
        reserved_name = next((name for name in names if name in reserved), None)
        if reserved_name is not None:
            role = roles._fields[roles.index(reserved_name)]
            raise RequestError(f"{table.title}: column '{reserved_name}' is the {role} column and cannot be a feature.")
    if not names:
        raise RequestError(
            f"{table.title}: no feature column is left; the columns are {quote_list(table.frame.columns)}."
        )
    return names


def client_codes(table: Table, client: str) -> tuple[np.ndarray, list[str]]:
    """Return each row's client as a number, and the clients' names, sorted: the order of rows in a table does not
    change sums over clients."""
    text = to_client_names(table.frame[client])
    absent = np.flatnonzero(text.codes < 0)
    if len(absent):
        others = f", as in {count_phrase(len(absent), 'row')}" if len(absent) > 1 else ""
        raise RequestError(
            f"{table.place(absent[0])}, client column '{client}': the name is missing{others}. Fill it in, in every "
            "row that merged cells cover, or delete the row."
        )
    return compact_codes(np.asarray(text.codes), list(text.categories))


def compact_codes(codes: np.ndarray, names: list[str]) -> tuple[np.ndarray, list[str]]:
    """Return codes without gaps, and the names that remain, in the order of names."""
    place = {name: i for i, name in enumerate(names)}
    present = set(np.unique(codes).tolist())
    order = [place[name] for name in sort_levels(names) if place[name] in present]
    rank = np.full(len(names), -1)
    rank[order] = np.arange(len(order))
    return rank[codes], [names[i] for i in order]


def parts_from_column(table: Table, split: str) -> np.ndarray:
    """Return the parts that a column fixes."""
    text = to_categories(table.frame[split])
    parts = np.array([PARTS.index(level) if level in PARTS else -1 for level in text.categories] + [-1])[text.codes]
    wrong = np.flatnonzero(parts < 0)
    if len(wrong):
        cell_text = "nothing" if text.codes[wrong[0]] < 0 else f"'{text[wrong[0]]}'"
        raise RequestError(f"{table.place(wrong[0])}, column '{split}': found {cell_text}, not {quote_list(PARTS)}.")
    return parts


def drop_missing_targets(table: Table, target: str) -> tuple[Table, list[str]]:
    """The rows that have a target, and a note on the others."""
    absent = table.frame[target].isna().to_numpy()
    if not absent.any():
        return table, []
    if absent.all():
        raise RequestError(f"{table.title}: target column '{target}' has no value in any row.")
    note = f"{count_phrase(int(absent.sum()), 'row')} of {len(absent)} left out: target '{target}' is missing there."
    return subset(table, ~absent), [note]


def drop_small_clients(
    table: Table, roles: ColumnRoles, code: np.ndarray, names: list[str], min_rows: int, drop: bool
) -> tuple[Table, np.ndarray, list[str], list[str]]:
    """Return the table, codes and names without clients that are too small to split, and notes; or refuse such clients.

    With fewer than LEAST_ROWS rows there is nothing to decide: such a client is left out and gets the global model.
    The user decides on larger ones: a smaller `min_rows` includes them, `drop` leaves them out.
    """
    reasons = explain_smallness(table, roles, code, len(names), min_rows)
    if not reasons:
        return table, code, names, []
    tiny = set(find_unsplittable_clients(roles, code, len(names), min_rows))
    undecided = sorted(set(reasons) - tiny)
    if undecided and not drop:
        first = undecided[0]
        others_text = (
            f" (too small as well: {count_phrase(len(undecided) - 1, 'other client')})" if len(undecided) > 1 else ""
        )
        raise RequestError(
            f"{table.title}: client '{names[first]}' has {reasons[first]}{others_text}. Use --min-rows or --drop-small."
        )
    if len(reasons) == len(names):
        raise RequestError(f"{table.title}: every client is too small; '{names[0]}' has {reasons[0]}.")
    is_kept = ~np.isin(code, list(reasons))
    dropped_names = quote_list(names[i] for i in sorted(reasons))
    required_rows = min_rows if undecided else MIN_ROWS_TO_SPLIT
    note = (
        f"{count_phrase(len(reasons), 'client')} too small to split (fewer than {required_rows} rows) left out: "
        f"{dropped_names}; the global model is used for them."
    )
    code, names = compact_codes(code[is_kept], names)
    return subset(table, is_kept), code, names, [note]


def find_unsplittable_clients(roles: ColumnRoles, code: np.ndarray, clients: int, min_rows: int) -> list[int]:
    """Return the clients whose rows cannot be split into three parts, unless `min_rows` allows them."""
    if roles.split is not None:
        return []
    return np.flatnonzero(np.bincount(code, minlength=clients) < min(MIN_ROWS_TO_SPLIT, min_rows)).tolist()


def explain_smallness(
    table: Table, roles: ColumnRoles, code: np.ndarray, clients: int, min_rows: int
) -> dict[int, str]:
    """Return, for each client that cannot be split, its rows and the required number."""
    if min_rows < 1:
        raise RequestError(f"min_rows must be at least 1, got {min_rows}.")

    def explain_counts(
        count: np.ndarray, required: int, unit: str, purpose: str = "to train, validate and test"
    ) -> dict[int, str]:
        needed = f"at least {required} {'is' if required == 1 else 'are'} needed {purpose}"
        return {int(i): f"{count_phrase(count[i], unit)}; {needed}" for i in np.flatnonzero(count < required)}

    reasons = explain_counts(np.bincount(code, minlength=clients), min_rows, "row")
    if roles.group is not None:
        first = number_groups(code, group_codes(table, roles.group))[1]
        reasons = (
            explain_counts(np.bincount(code[first], minlength=clients), min(MIN_ROWS_TO_SPLIT, min_rows), "group")
            | reasons
        )
    if roles.split is not None:
        train = code[parts_from_column(table, roles.split) == TRAIN]
        reasons = explain_counts(np.bincount(train, minlength=clients), 1, "training row", "to train") | reasons
    return reasons


def group_codes(table: Table, unit: str) -> np.ndarray:
    text = to_categories(table.frame[unit])
    absent = np.flatnonzero(text.codes < 0)
    if len(absent):
        raise RequestError(f"{table.place(absent[0])}, group column '{unit}': the value is missing.")
    return np.asarray(text.codes, dtype=np.int64)


def subset(table: Table, is_kept: np.ndarray) -> Table:
    """Return the table with some of its rows, which keep their positions in the source."""
    return replace(
        table,
        frame=table.frame.loc[is_kept].reset_index(drop=True),
        origin=None if table.origin is None else table.origin[is_kept],
        row=table.rows()[is_kept],
        x=None if table.x is None else table.x[is_kept],
    )


def split_rows(
    table: Table,
    roles: ColumnRoles,
    code: np.ndarray,
    names: list[str],
    target: Target,
    seed: int,
    shares: Shares = DEFAULT_SHARES,
) -> tuple[np.ndarray, list[str]]:
    """The part of every row, and notes."""
    if roles.split is not None:
        parts = parts_from_column(table, roles.split)
        counts = [np.bincount(code[parts == part], minlength=len(names)) for part in range(len(PARTS))]
        notes = [
            f"{(counts[part] == 0).sum()} of {len(names)} clients have no {PARTS[part]} rows."
            for part in range(1, len(PARTS))
            if (counts[part] == 0).any()
        ]
        return parts, notes
    if roles.time is not None:
        return time_split(code, row_times(table, roles.time), shares), []
    keys = np.array([client_key(name) for name in names], dtype=np.uint64)
    strata = target.y if target.kind in (BINARY, CLASSES) else None
    if roles.group is None:
        return random_split(code, keys, seed, strata, shares), []
    unit = group_codes(table, roles.group)
    pairs = len(number_groups(code, unit)[1])
    shared = pairs - len(np.unique(unit))
    note = f"{shared} values of '{roles.group}' appear under several clients; they count as different groups there."
    return group_split(code, keys, seed, unit, strata, shares), [note] if shared else []


def weights_by_client(table: Table, column: str | None, code: np.ndarray, names: list[str]) -> dict[str, float] | None:
    """Each client's weight from a column that is constant within the client; None without such a column."""
    if column is None:
        return None
    values = pd.to_numeric(table.frame[column], errors="coerce").to_numpy(float)
    wrong = np.flatnonzero(~(np.isfinite(values) & (values > 0)))
    if len(wrong):
        cell = table.frame[column].iloc[wrong[0]]
        raise RequestError(f"{table.place(wrong[0])}, weights column '{column}': found '{cell}', not a number above 0.")
    first = values[np.unique(code, return_index=True)[1]]
    wrong = np.flatnonzero(values != first[code])
    if len(wrong):
        position = code[wrong[0]]
        raise RequestError(
            f"{table.place(wrong[0])}, weights column '{column}': client '{names[position]}' has {values[wrong[0]]:g} "
            f"here and {first[position]:g} before; a client's weight is the same in all its rows."
        )
    return dict(zip(names, first.tolist()))


def row_times(table: Table, time: str) -> np.ndarray:
    series = table.frame[time]
    kind = detect_kind(series)
    if kind == CATEGORY:
        raise RequestError(
            f"{table.title}: time column '{time}' is text such as '{series.dropna().iloc[0]}'; "
            "it should hold numbers or dates (YYYY-MM-DD)."
        )
    values = read_values(series, kind, table.place)
    absent = np.flatnonzero(is_missing(values))
    if len(absent):
        raise RequestError(f"{table.place(absent[0])}, time column '{time}': the value is missing.")
    return values
