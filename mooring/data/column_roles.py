"""Which column plays which part, whose row is whose, and which rows are held out."""

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
    """Names of the columns that are no features."""

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
    """The columns asked for, else those that the source fixes, else columns called `client`, `target`, `split`.

    Shares instead of a split's column are the business of `split_rows`; a column that fixes the parts refuses them.
    """
    shares, split = (None, split) if split is None or isinstance(split, str) else (split, None)
    given = {"group": unit, "time": time, "split": split}
    ways = [f"{role} = '{name}'" for role, name in given.items() if name is not None]
    if len(ways) > 1 and not (unit is None and len(ways) == 2):  # a split and a time: the time orders what it leaves
        raise RequestError(f"{table.title}: rows are held out in one way, got {' and '.join(ways)}.")
    for role, name in (("client", client or table.client), ("target", target or table.target)):
        if name is None and role not in table.frame.columns:
            raise RequestError(
                f"{table.title}: which column is the {role}? Name it with --{role}; "
                f"the columns are {quote_list(table.frame.columns)}."
            )
    client, target = client or table.client or "client", target or table.target or "target"
    if split is None and not ways and "split" in table.frame.columns and "split" not in {client, target, *drop}:
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
        taken = next((name for name in names if name in reserved), None)
        if taken is not None:
            role = roles._fields[roles.index(taken)]
            raise RequestError(f"{table.title}: column '{taken}' is the {role} column and cannot be a feature.")
    if not names:
        raise RequestError(
            f"{table.title}: no feature column is left; the columns are {quote_list(table.frame.columns)}."
        )
    return names


def client_codes(table: Table, client: str) -> tuple[np.ndarray, list[str]]:
    """Each row's client as a number, and the clients' names in the order of names: whoever comes first in a table, sums
    over clients are the same to the last bit."""
    text = to_client_names(table.frame[client])
    absent = np.flatnonzero(text.codes < 0)
    if len(absent):
        raise RequestError(
            f"{table.place(absent[0])}, client column '{client}': the name is missing, as in {len(absent)} rows."
        )
    return compact_codes(np.asarray(text.codes), list(text.categories))


def compact_codes(codes: np.ndarray, names: list[str]) -> tuple[np.ndarray, list[str]]:
    """Codes without gaps, and the names that remain, in the order of names."""
    place = {name: i for i, name in enumerate(names)}
    present = set(np.unique(codes).tolist())
    order = [place[name] for name in sort_levels(names) if place[name] in present]
    rank = np.full(len(names), -1)
    rank[order] = np.arange(len(order))
    return rank[codes], [names[i] for i in order]


def parts_from_column(table: Table, split: str) -> np.ndarray:
    """The parts that a column fixes."""
    text = to_categories(table.frame[split])
    parts = np.array([PARTS.index(level) if level in PARTS else -1 for level in text.categories] + [-1])[text.codes]
    wrong = np.flatnonzero(parts < 0)
    if len(wrong):
        found = "nothing" if text.codes[wrong[0]] < 0 else f"'{text[wrong[0]]}'"
        raise RequestError(f"{table.place(wrong[0])}, column '{split}': found {found}, not {quote_list(PARTS)}.")
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
    """Clients too small to be split are left out, or refused: the table, codes and names that remain, and notes.

    With fewer than LEAST_ROWS rows there is nothing to decide: such a client takes no part and has the common model.
    A somewhat larger one may take part (a smaller `min_rows`) or not (`drop`): that is for the user to say.
    """
    reasons = explain_smallness(table, roles, code, len(names), min_rows)
    if not reasons:
        return table, code, names, []
    tiny = set(find_unsplittable_clients(roles, code, len(names), min_rows))
    undecided = sorted(set(reasons) - tiny)
    if undecided and not drop:
        first = undecided[0]
        others = (
            f" (too small as well: {count_phrase(len(undecided) - 1, 'other client')})" if len(undecided) > 1 else ""
        )
        raise RequestError(
            f"{table.title}: client '{names[first]}' has {reasons[first]}{others}. Use --min-rows or --drop-small."
        )
    if len(reasons) == len(names):
        raise RequestError(f"{table.title}: every client is too small; '{names[0]}' has {reasons[0]}.")
    keep = ~np.isin(code, list(reasons))
    left = quote_list(names[i] for i in sorted(reasons))
    least = min_rows if undecided else MIN_ROWS_TO_SPLIT
    note = (
        f"{count_phrase(len(reasons), 'client')} too small to split (fewer than {least} rows) left out: {left}; "
        "the global model is used for them."
    )
    code, names = compact_codes(code[keep], names)
    return subset(table, keep), code, names, [note]


def find_unsplittable_clients(roles: ColumnRoles, code: np.ndarray, clients: int, min_rows: int) -> list[int]:
    """Clients whose rows cannot be split into three parts, unless such small ones are asked for."""
    if roles.split is not None:
        return []
    return np.flatnonzero(np.bincount(code, minlength=clients) < min(MIN_ROWS_TO_SPLIT, min_rows)).tolist()


def explain_smallness(
    table: Table, roles: ColumnRoles, code: np.ndarray, clients: int, min_rows: int
) -> dict[int, str]:
    """For each client that cannot be split: what it has, and what is needed."""
    if min_rows < 1:
        raise RequestError(f"min_rows must be at least 1, got {min_rows}.")

    def few(count: np.ndarray, least: int, what: str, purpose: str = "to train, validate and test") -> dict[int, str]:
        return {
            int(i): f"{count_phrase(count[i], what)}; at least {least} {'is' if least == 1 else 'are'} needed {purpose}"
            for i in np.flatnonzero(count < least)
        }

    reasons = few(np.bincount(code, minlength=clients), min_rows, "row")
    if roles.group is not None:
        first = number_groups(code, group_codes(table, roles.group))[1]
        reasons = few(np.bincount(code[first], minlength=clients), min(MIN_ROWS_TO_SPLIT, min_rows), "group") | reasons
    if roles.split is not None:
        train = code[parts_from_column(table, roles.split) == TRAIN]
        reasons = few(np.bincount(train, minlength=clients), 1, "training row", "to train") | reasons
    return reasons


def group_codes(table: Table, unit: str) -> np.ndarray:
    text = to_categories(table.frame[unit])
    absent = np.flatnonzero(text.codes < 0)
    if len(absent):
        raise RequestError(f"{table.place(absent[0])}, group column '{unit}': the value is missing.")
    return np.asarray(text.codes, dtype=np.int64)


def subset(table: Table, keep: np.ndarray) -> Table:
    """The table with some of its rows, which keep their places in the source."""
    return replace(
        table,
        frame=table.frame.loc[keep].reset_index(drop=True),
        origin=None if table.origin is None else table.origin[keep],
        row=table.rows()[keep],
        x=None if table.x is None else table.x[keep],
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
        held = [np.bincount(code[parts == part], minlength=len(names)) for part in range(len(PARTS))]
        notes = [
            f"{(held[part] == 0).sum()} of {len(names)} clients have no {PARTS[part]} rows."
            for part in range(1, len(PARTS))
            if (held[part] == 0).any()
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
        found = table.frame[column].iloc[wrong[0]]
        raise RequestError(
            f"{table.place(wrong[0])}, weights column '{column}': found '{found}', not a number above 0."
        )
    first = values[np.unique(code, return_index=True)[1]]
    wrong = np.flatnonzero(values != first[code])
    if len(wrong):
        one = code[wrong[0]]
        raise RequestError(
            f"{table.place(wrong[0])}, weights column '{column}': client '{names[one]}' has {values[wrong[0]]:g} here "
            f"and {first[one]:g} before; a client's weight is the same in all its rows."
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
