"""`load`: any source of rows as `Clients`; `encode_new_rows`: later rows in the same encoding."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from pandas.api import types
from torch import Tensor

from mooring.core.cohort import Rows
from mooring.core.errors import RequestError
from mooring.core.types import JsonObject
from mooring.data import datasets
from mooring.data.clients import BINARY, CLASSES, PARTS, REGRESSION, Clients, require_finite
from mooring.data.column_roles import (
    ColumnRoles,
    client_codes,
    drop_missing_targets,
    drop_small_clients,
    feature_names,
    find_roles,
    group_codes,
    row_times,
    split_rows,
    subset,
    weights_by_client,
)
from mooring.data.data_warnings import find_leaks, find_suspicious_values, find_time_order, twin_levels
from mooring.data.file_readers import file_stem
from mooring.data.formula_parser import MixedFormula, parse_formula
from mooring.data.formulas import (
    FormulaState,
    find_complete_rows,
    learn_formula,
    required_columns,
)
from mooring.data.load_options import LoadOptions
from mooring.data.row_cleaning import clip_quantiles, find_repeats, merge_levels, parse_merges, replace_levels
from mooring.data.schema import Schema, describe_schema, encode_columns, encode_table
from mooring.data.schema_client import ClientTable, agree_on_schema, target_of
from mooring.data.sheet_layout import TOTAL
from mooring.data.splits import TRAIN, parse_shares
from mooring.data.table_sources import read_source
from mooring.data.tables import Table, count_phrase, quote_list
from mooring.data.target import Target, encode_target


def load(
    source: object,
    *,
    dtype: torch.dtype = torch.float64,
    schema: Schema | None = None,
    data_dir: str | Path | None = None,
    **arguments: object,
) -> Clients:
    """Return clients from a path or a known name, a data frame, (X, y, groups), or a dict with each client's own data.

    A dict contains a data frame, (x, y) or a torch Dataset for every client. Tables are encoded, imputed and scaled by
    the training rows of all clients (`Clients.schema`); inputs that are not a table are used unchanged. The options
    are those of `LoadOptions`. With the `schema` of an earlier run the table is encoded by it; a table without the
    client column is then one client, called by its title.
    """
    options = LoadOptions.make(arguments)
    if datasets.is_dataset_name(source) and source in datasets.LOADERS:
        _, validation, test = parse_shares(options.split)
        names = ("client", "target", "group", "time_column", "weights", "features", "drop", "split")
        values = [getattr(options, name) for name in names]
        column = next(
            (value for value in values if value and not (value is options.split and not isinstance(value, str))), None
        )
        if column is not None:
            raise RequestError(f"data set '{source}' is no table; it has no column {column!r}.")
        return datasets.load_dataset(source, data_dir, validation=validation, test=test, seed=options.seed)
    member, digest, notes = read_client_table(source, options, schema)
    features, rare, split, seed = options.features, options.min_category_rows, options.split, options.seed
    table, roles, code, clients, shares = member.table, member.roles, member.code, member.clients, member.shares
    x = table.x
    if x is not None:
        refuse_infinite_inputs(torch.as_tensor(x), code, clients)
    if schema is None:
        has_chosen_columns = features is not None or member.formula is not None
        agreed, plan, (reading,) = agree_on_schema(
            [member], keep_useless=has_chosen_columns, rare=rare, title=table.title
        )
        answer, part = reading.target, reading.part
        notes += [*plan.notes, *reading.notes]
        if len(clients) == 1:
            notes.append(f"There is one client only, '{clients[0]}'; a federation needs more.")
        if x is None:
            reading_facts = {"digest": digest, "formula": member.formula, **cell_formats(table, options)}
            schema = agreed.model_copy(update=reading_facts)
            x, encoding_notes = encode_columns(reading.columns, schema.columns)
            x = (x - np.array(schema.mean)) / np.array(schema.scale)
            notes += [*describe_schema(schema.columns, schema.dropped), *encoding_notes]
            leaks = list(find_leaks(reading.columns, answer, roles.target))
            refused = [leak.sentence for leak in leaks if leak.column not in options.allow]
            if refused and options.refuse_leaks:
                raise RequestError(f"{table.title}: {refused[0][0].lower()}{refused[0][1:]}")
            suspicions = find_suspicious_values(reading.columns, answer, roles.target)
            notes += [*refused, *(suspicion.sentence for suspicion in suspicions)]
            if roles.time is None and (ordered := find_time_order(reading.columns, code)):
                notes.append(
                    f"Rows seem to be ordered in time by '{ordered}'. Rows held out at random are then easier to "
                    f"predict than later ones; --time-column {ordered} evaluates on later rows (name the column in "
                    "--features as well if it is to stay a predictor)."
                )
    else:
        agreed = schema
        answer = Target(schema.kind, target_of(table, roles, schema), schema.classes, [])
        part, split_notes = split_rows(table, roles, code, clients, answer, seed, shares)
        notes += split_notes
        if x is None:
            x, encoding_notes = encode_table(table.frame, schema, table.place)
            notes += encoding_notes
    mean, scale = agreed.target_mean, agreed.target_scale
    y = (answer.y - mean) / scale if answer.kind == REGRESSION else answer.y
    train = part == TRAIN
    if table.x is None:
        notes += constant_within(x[train], code[train], len(clients), agreed.features)
    placement = pd.DataFrame(
        {"client": np.array(clients, dtype=object)[code], "row": table.rows(), "part": np.array(PARTS)[part]}
    )
    label = torch.int64 if answer.kind in (BINARY, CLASSES) else dtype
    train_rows, validation_rows, test_rows = (
        rows_of(x, y, code, part == part_code, len(clients), dtype, label) for part_code in range(len(PARTS))
    )
    unit_of = None if roles.group is None else group_codes(table, roles.group)
    time_of = None if roles.time is None else row_times(table, roles.time)
    return Clients(
        tuple(clients),
        train_rows,
        validation_rows,
        test_rows,
        kind=answer.kind,
        classes=answer.classes,
        features=() if table.x is not None else agreed.features,
        target_mean=mean,
        target_scale=scale,
        schema=schema,
        placement=placement,
        weights_from_column=weights_by_client(table, roles.weights, code, clients),
        units=by_part(unit_of, code, part),
        times=by_part(time_of, code, part),
        has_random_parts=split is None and roles.split is None,
        title=table.title,
        notes=notes,
    )


def by_part(values: np.ndarray | None, code: np.ndarray, part: np.ndarray) -> dict[str, torch.Tensor] | None:
    """Return the rows' values by part, in the order of the part's rows."""
    if values is None:
        return None
    values_tensor = torch.from_numpy(np.array(values))
    return {name: values_tensor[in_part(code, part == k)] for k, name in enumerate(PARTS)}


def read_client_table(
    source: object,
    options: LoadOptions,
    schema: Schema | None = None,
    formula_state: FormulaState | None = None,
    learns_formula: bool = True,
) -> tuple[ClientTable, str, list[str]]:
    """Return a source's rows for the agreement on a schema, their digest, and notes.

    A formula is learned from the table, or has the agreed `formula_state`; without both (`learns_formula` False) the
    columns are those that the formula names.
    """
    table = read_source(source, options.reading(schema))
    if schema is not None:
        table = replace(table, frame=replace_levels(table.frame, schema.merges)[0])
    if table.x is not None and (options.features or options.drop):
        raise RequestError(f"{table.title}: the inputs are no table; there are no columns to choose or drop.")
    if schema is not None:
        table = fit_in(table, schema)
    digest = "" if table.x is not None else table_digest(table.frame)
    roles = roles_of(table, options)
    formula = None if options.formula is None or schema is not None else parse_formula(options.formula)
    if formula is not None:
        if table.x is not None:
            raise RequestError(f"{table.title}: the inputs are no table; a formula has no columns to name.")
        formula_columns = required_columns(formula)
        options = replace(options, features=[name for name in formula_columns if name not in roles])
    names = (
        [] if table.x is not None or schema is not None else feature_names(table, roles, options.features, options.drop)
    )
    refuse_unreadable(table, {*names, *roles})
    table, notes = clean_rows(table, options, roles)
    if options.drop_missing_target:
        table, new_notes = drop_missing_targets(table, roles.target)
        notes += new_notes
    if schema is not None and schema.formula is not None and options.formula is not None:
        table, new_notes = keep_complete(table, find_complete_rows(schema.formula, table.frame, table.place))
        notes += new_notes
    state = None
    if formula is not None and (learns_formula or formula_state is not None):
        table, state, new_notes = follow_formula(table, formula, roles, formula_state)
        names, notes = list(map(str, table.frame.columns.drop([*filter(None, roles)]))), [*notes, *new_notes]
    elif formula is not None:
        table, _ = keep_complete(table, ~table.frame[names].isna().any(axis=1).to_numpy())
    code, clients = client_codes(table, roles.client)
    notes += [
        f"Clients '{first}' and '{second}' differ in case or spaces only, but count as two; --merge-levels "
        f'"{second}={first}" makes them one.'
        for first, second in twin_levels(clients)
    ]
    totals = [name for name in clients if TOTAL.match(name)]
    notes += [f"Client '{name}' is named like a total; if its rows are sums of others, delete them." for name in totals]
    table, code, clients, new_notes = drop_small_clients(
        table, roles, code, clients, options.min_rows, options.drop_small
    )
    notes += new_notes
    kind = table.kind if options.target_type == "auto" and table.kind else options.target_type
    shares = parse_shares(options.split)
    return ClientTable(table, roles, code, clients, names, kind, options.seed, shares, state), digest, notes


def keep_complete(table: Table, present: np.ndarray) -> tuple[Table, list[str]]:
    """Return the table without the rows that lack a column of a formula, and a note on these."""
    absent = int((~present).sum())
    notes = [f"{count_phrase(absent, 'row')} left out: a column of the formula is missing there."] if absent else []
    return subset(table, present), notes


def follow_formula(
    table: Table, formula: MixedFormula, roles: ColumnRoles, agreed: FormulaState | None = None
) -> tuple[Table, FormulaState, list[str]]:
    """Return the table with the formula's columns instead of its own, the formula's state, and notes."""
    state, columns, present = learn_formula(formula, table.frame, table.place, table.title, agreed)
    table, notes = keep_complete(table, present)
    role_columns = table.frame[[name for name in dict.fromkeys(roles) if name is not None]]
    return replace(table, frame=pd.concat([role_columns, columns], axis=1), formats=table.formats), state, notes


def roles_of(table: Table, options: LoadOptions) -> ColumnRoles:
    """Return the columns that are not features."""
    return find_roles(
        table,
        options.client,
        options.target,
        options.group,
        options.time_column,
        options.split,
        options.drop or (),
        options.weights,
    )


def refuse_unreadable(table: Table, names: Collection[str | None]) -> None:
    """Refuse used columns of numbers with other cells, and used columns of ambiguous dates."""
    for stray in table.strays:
        if stray.column in names:
            raise RequestError(stray.describe(table.place(int(stray.rows[0]))))
    for doubt in table.ambiguous:
        if doubt.column in names:
            raise RequestError(f"{table.title}: {doubt.sentence}")


def clean_rows(table: Table, options: LoadOptions, roles: ColumnRoles) -> tuple[Table, list[str]]:
    """Return the table after the requested cleaning, and all notes on it."""
    notes = list(table.notes)
    frame, new_notes = merge_levels(table.frame, parse_merges(options.merge_levels), table.title)
    table = replace(table, frame=frame)
    notes += new_notes
    if options.winsorize:
        table, new_notes = winsorize(table, options.winsorize, {*roles} - {roles.target})
        notes += new_notes
    if options.drop_repeats:
        repeats = find_repeats(table.frame)
        if repeats.any():
            notes.append(f"{count_phrase(int(repeats.sum()), 'row')} left out that repeat an earlier row.")
        table = subset(table, ~repeats)
    return table, notes


def read_by_schema(source: object, schema: Schema) -> Table:
    """Return a table read as an earlier run's table was: its formats of cells, and its replaced texts."""
    table = read_source(source, LoadOptions().reading(schema))
    return replace(table, frame=replace_levels(table.frame, schema.merges)[0])


def encode_new_rows(source: object, schema: Schema) -> tuple[np.ndarray, np.ndarray | None, list[str]]:
    """Return a later table's inputs and, if it has the target column, its targets, encoded as in `Clients`; and
    notes."""
    table = read_by_schema(source, schema)
    x, notes = encode_table(table.frame, schema, table.place)
    if schema.target not in table.frame.columns:
        return x, None, notes
    y = encode_target(table.frame[schema.target], schema.kind, schema.classes, table.place)
    return x, (y - schema.target_mean) / schema.target_scale if schema.kind == REGRESSION else y, notes


def winsorize(table: Table, share: float, excluded: Collection[str | None]) -> tuple[Table, list[str]]:
    """Return the table with each column's lowest and highest share of numbers clipped, and a note."""
    if not 0 < share < 0.5:
        raise RequestError(f"winsorize must be a share above 0 and below 0.5, got {share:g}.")
    frame, clip = clip_quantiles(table.frame, share, excluded)
    column_names = quote_list(clip, 6)
    note = f"Numbers below the {share:.2%} and above the {1 - share:.2%} quantile count as these: {column_names}."
    return replace(table, frame=frame, clip=clip), [note] if clip else []


def cell_formats(table: Table, options: LoadOptions) -> JsonObject:
    """Return the formats of cells that a schema stores."""
    formats = {name: tuple(form) for name, form in table.formats.items()}
    return {
        "formats": formats,
        "decimal": table.decimal or options.decimal or "",
        "encoding": options.encoding or "",
        "na": tuple(options.na),
        "merges": parse_merges(options.merge_levels),
        "clip": table.clip,
    }


def fit_in(table: Table, schema: Schema) -> Table:
    """Return a table with the roles of a schema; without the schema's client column it is one client."""
    if table.client is None and schema.client is not None and schema.client not in table.frame.columns:
        table = replace(table, frame=table.frame.assign(**{schema.client: file_stem(Path(table.title))}))
    return replace(table, client=table.client or schema.client, target=table.target or schema.target)


def refuse_infinite_inputs(x: Tensor, code: np.ndarray, clients: Sequence[str]) -> None:
    """Refuse NaN and infinite inputs, by the client's name; such inputs are used unchanged."""
    if x.dtype.is_floating_point and not bool(torch.isfinite(x.sum())):
        for i, name in enumerate(clients):
            require_finite(x[torch.from_numpy(code == i)], f"client '{name}'")


def constant_within(x: np.ndarray, code: np.ndarray, clients: int, features: Sequence[str]) -> list[str]:
    """Return a note on columns that do not vary within a client: a local model cannot learn their coefficients."""
    order = np.argsort(code, kind="stable")
    start = np.searchsorted(code[order], np.arange(clients))
    flat = np.minimum.reduceat(x[order], start) == np.maximum.reduceat(x[order], start)
    hit = flat.sum(0)
    worst = sorted(np.flatnonzero(hit).tolist(), key=lambda j: (-hit[j], j))
    if not worst:
        return []
    column_texts = ", ".join(f"'{features[j]}' ({hit[j]} of {clients})" for j in worst[:6])
    remainder = f" and {len(worst) - 6} more" if len(worst) > 6 else ""
    return [
        f"Columns that do not vary within the training rows of some clients: {column_texts}{remainder}; "
        "a local model cannot learn their coefficients there without a ridge."
    ]


def in_part(code: np.ndarray, is_selected: np.ndarray) -> np.ndarray:
    """Return the positions of a part's rows, sorted by client."""
    index = np.flatnonzero(is_selected)
    return index[np.argsort(code[index], kind="stable")]


def rows_of(
    x: Any,
    y: np.ndarray,
    code: np.ndarray,
    is_selected: np.ndarray,
    clients: int,
    dtype: torch.dtype,
    label: torch.dtype,
) -> Rows:
    """Return one part's rows, sorted by client; inputs that are whole numbers (images, tokens) keep their type."""
    index = in_part(code, is_selected)
    size = torch.from_numpy(np.bincount(code[index], minlength=clients))
    inputs = torch.as_tensor(x[index])
    return Rows(
        inputs.to(dtype) if inputs.dtype.is_floating_point else inputs,
        torch.as_tensor(y[index]).to(label),
        torch.cumsum(size, 0) - size,
        size,
    )


def table_digest(frame: pd.DataFrame) -> str:
    """Return the sha256 of a table's column names and values."""
    digest = hashlib.sha256()
    for name in frame.columns:
        column = frame[name]
        digest.update(str(name).encode() + b"\0")
        if types.is_numeric_dtype(column):
            digest.update(column.to_numpy(float, na_value=np.nan).tobytes())
        else:
            digest.update(pd.util.hash_array(column.astype(str).to_numpy(object)).tobytes())
    return digest.hexdigest()
