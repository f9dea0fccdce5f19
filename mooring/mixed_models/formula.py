"""The matrices of a mixed-model formula for a table."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd
from pandas.api.types import is_numeric_dtype

from mooring.core.errors import RequestError
from mooring.data.column_types import is_text
from mooring.data.formula_columns import Learned, RowPlaces, evaluate_terms
from mooring.data.formula_parser import MixedFormula
from mooring.data.formulas import required_columns


class DesignMatrices(NamedTuple):
    """A table as a model sees it, without rows that have a missing value."""

    y: np.ndarray  # [n]
    x: np.ndarray  # [n, p]
    z: np.ndarray  # [n, q]
    code: np.ndarray  # [n], each row's client
    clients: list[str]
    fixed_names: list[str]
    random_names: list[str]
    dropped_rows: int
    transforms: Learned  # what the formula's transformations learned
    levels: dict[str, list[object]]  # by text column: its values


class RowMatrices(NamedTuple):
    """Later rows as a model sees them."""

    x: np.ndarray  # [n, p]
    z: np.ndarray  # [n, q]
    clients: np.ndarray  # [n], names; "" where the table does not name them


def build_matrices(formula: MixedFormula, frame: pd.DataFrame) -> DesignMatrices:
    """The matrices of a formula for a table; rows with a missing value in a column that it names are left out."""
    names = required_columns(formula)
    absent = [name for name in names if name not in frame.columns]
    if absent:
        raise RequestError(f"the formula names column '{absent[0]}', which the table does not have.")
    present = np.flatnonzero(frame[names].notna().all(axis=1))
    complete = frame[names].iloc[present].reset_index(drop=True)
    if complete.empty:
        raise RequestError("no row has a value in every column that the formula names.")
    y = pd.to_numeric(complete[formula.target], errors="coerce").to_numpy(float)
    if np.isnan(y).any():
        raise RequestError(f"the target column '{formula.target}' holds text; a linear mixed model predicts numbers.")
    rows = RowPlaces(present, lambda position: f"row {position + 1}")
    inputs = [name for name in names if name not in (formula.target, formula.client)]
    levels = {name: sorted(complete[name].unique()) for name in inputs if is_text(complete[name])}
    columns = read_inputs(complete[inputs], levels)
    x, transforms = evaluate_terms(formula.fixed, columns, rows)
    z = None
    if formula.random is not None:
        z, learned = evaluate_terms(formula.random, columns, rows)
        transforms = transforms | learned
    if formula.client is None:
        code, clients = np.zeros(len(y), dtype=np.int64), ["all"]
    else:
        code, client_names = pd.factorize(complete[formula.client].astype(str), sort=True)
        clients = [str(name) for name in client_names]
    return DesignMatrices(
        y,
        np.asarray(x, dtype=float),
        np.zeros((len(y), 0)) if z is None else np.asarray(z, dtype=float),
        code,
        clients,
        list(x.columns),
        [] if z is None else list(z.columns),
        len(frame) - len(complete),
        transforms,
        levels,
    )


def read_inputs(frame: pd.DataFrame, levels: dict[str, list[object]]) -> dict[str, np.ndarray | pd.Categorical]:
    """The columns as formulas take them: texts as categories of these values, the others as numbers."""
    for name in frame.columns.difference(list(levels)):
        if not is_numeric_dtype(frame[name]):
            raise RequestError(f"column '{name}' holds neither numbers nor text; a linear mixed model needs either.")
    return {
        name: pd.Categorical(frame[name].where(frame[name].isin(levels[name])), categories=levels[name])
        if name in levels
        else frame[name].to_numpy(float, na_value=np.nan)
        for name in map(str, frame.columns)
    }


def build_row_matrices(formula: MixedFormula, design: DesignMatrices, frame: pd.DataFrame) -> RowMatrices:
    """Later rows by what a formula learned; a missing or unknown value is refused by its row."""
    names = [name for name in required_columns(formula) if name != formula.target]
    inputs = [name for name in names if name != formula.client]
    for name in inputs:
        if name not in frame.columns:
            raise RequestError(f"the formula names column '{name}', which the table does not have.")
    table = read_inputs(frame[inputs], design.levels)
    for name in inputs:
        absent = np.flatnonzero(pd.isna(table[name]))
        if len(absent):
            value = frame[name].iloc[absent[0]]
            why = "is missing" if pd.isna(value) else f"'{value}' is in no row that the model was fitted to"
            raise RequestError(f"row {absent[0] + 1}, column '{name}': the value {why}.")
    rows = RowPlaces(np.arange(len(frame)), lambda position: f"row {position + 1}")
    x, _ = evaluate_terms(formula.fixed, table, rows, design.transforms)
    z = np.zeros((len(frame), 0))
    if formula.random is not None:
        part, _ = evaluate_terms(formula.random, table, rows, design.transforms)
        z = part.to_numpy()
    is_named = formula.client is not None and formula.client in frame.columns
    clients = frame[formula.client].astype(str).to_numpy(object) if is_named else np.full(len(frame), "", dtype=object)
    return RowMatrices(x.to_numpy(), z, clients)
