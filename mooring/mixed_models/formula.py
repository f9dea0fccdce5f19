"""The matrices of a mixed-model formula for a table."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd

from mooring.core.errors import RequestError
from mooring.data.formulas import MixedFormula, RowPlaces, evaluate_terms, required_columns


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


def build_matrices(formula: MixedFormula, frame: pd.DataFrame) -> DesignMatrices:
    """The matrices of a formula for a table; rows with a missing value in a column that it names are left out."""
    names = required_columns(formula, map(str, frame.columns))
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
    x, _ = evaluate_terms(formula.fixed, complete, formula.text, rows)
    z = None if formula.random is None else evaluate_terms(formula.random, complete, formula.text, rows)[0]
    if formula.client is None:
        code, clients = np.zeros(len(y), dtype=np.int64), ["all"]
    else:
        code, levels = pd.factorize(complete[formula.client].astype(str), sort=True)
        clients = [str(level) for level in levels]
    return DesignMatrices(
        y,
        np.asarray(x, dtype=float),
        np.zeros((len(y), 0)) if z is None else np.asarray(z, dtype=float),
        code,
        clients,
        [str(name) for name in x.columns],
        [] if z is None else [str(name) for name in z.columns],
        len(frame) - len(complete),
    )
