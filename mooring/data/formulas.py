"""What a formula learns from a table, so that later tables become the same columns.

Its transformations, categories, and replacements for missing values are stored in `FormulaState` as numbers and names.
The text of the formula is parsed (`formula_parser.py`), and never evaluated as code.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd
from pydantic import BaseModel, ConfigDict, model_validator

from mooring.core.errors import RequestError
from mooring.core.types import JsonObject
from mooring.data.column_types import CATEGORY, DATE, NUMBER, detect_kind, is_missing, read_values
from mooring.data.formula_columns import INTERCEPT, Learned, RowPlaces, evaluate_terms, fits_call
from mooring.data.formula_parser import (
    CALL,
    CATEGORIES,
    MixedFormula,
    Node,
    columns_of,
    learns,
    parse_formula,
    quote_formula,
    walk,
)
from mooring.data.tables import RowLocator, quote_list, suggest_name


class FormulaState(BaseModel):
    """A formula and its parameters learned from a table."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    text: str
    transforms: Learned  # by the text of a transformation: the numbers that it learned, such as knots
    levels: dict[str, tuple[str, ...]]  # by column: its categories, the first is the reference
    dates: tuple[str, ...]  # columns of dates, which count as days since 1970-01-01
    fills: dict[str, float | str]  # by column: replacement for missing values of a later table
    varying: tuple[str, ...]  # columns whose coefficients vary by client; Intercept among them
    all_vary: bool  # whether every coefficient may vary

    @model_validator(mode="after")
    def _check(self) -> FormulaState:
        """Refuse what no table can teach, because a state may come from a file of somebody else."""
        formula = parse_formula(self.text)
        calls = {str(call): call for call in learning_calls(formula)}
        problems = [
            *(f"transforms: {name!r:.80}" for name, n in self.transforms.items() if not fits_call(calls.get(name), n)),
            *(f"fills: {name!r:.80}" for name in self.fills.keys() ^ columns_of(formula.factors)),
            *(f"levels: {name!r:.80}" for name, levels in self.levels.items() if self.fills.get(name) not in levels),
            *(f"levels: {name!r:.80}" for name, levels in self.levels.items() if len(set(levels)) < len(levels)),
            *(f"levels: {name!r:.80}" for name in categories_in(formula) - self.levels.keys()),
            *(f"dates: {name!r:.80}" for name in self.dates if name not in self.fills or name in self.levels),
        ]
        numbers = [name for name in self.fills if name not in self.levels]
        problems += [f"fills: {name!r:.80}" for name in numbers if not isinstance(self.fills[name], float)]
        if problems:
            raise ValueError(f"{problems[0]} does not fit the formula")
        return self


def learning_calls(formula: MixedFormula) -> list[Node]:
    """Return the transformations of a formula that learn from the rows."""
    return [node for factor in formula.factors for node in walk(factor) if learns(node)]


def refuse_stateful_terms(text: str) -> None:
    """Refuse a formula with a transformation that learns from all rows, for clients that keep theirs."""
    for factor in parse_formula(text).factors:
        if any(map(learns, walk(factor))):
            raise RequestError(
                f"the formula's '{factor}' learns from the rows of all clients, which stay with them: leave the "
                "transformation out (columns are standardized anyway), or write bs with knots, lower_bound and "
                "upper_bound."
            )


def categories_in(formula: MixedFormula) -> set[str]:
    """Return the columns that a formula makes categories by C()."""
    return {node.parts[0].value for node in formula.factors if node.kind == CALL and node.value in CATEGORIES}


def kinds_by_state(state: FormulaState) -> dict[str, str]:
    """Return the kind of every column that a formula names."""
    return {name: CATEGORY if name in state.levels else DATE if name in state.dates else NUMBER for name in state.fills}


def find_complete_rows(state: FormulaState, frame: pd.DataFrame, place: RowLocator) -> np.ndarray:
    """Return [N]: which rows have a value in every column that a formula names."""
    missing = [is_missing(read_values(frame[name], kind, place)) for name, kind in kinds_by_state(state).items()]
    return ~np.any([np.zeros(len(frame), dtype=bool), *missing], axis=0)


def required_columns(formula: MixedFormula) -> list[str]:
    """Return the columns that a formula names, the target and the client's first."""
    roles = [formula.target, *([formula.client] if formula.client else [])]
    return list(dict.fromkeys([*roles, *sorted(columns_of(formula.factors))]))


def learn_formula(
    formula: MixedFormula, frame: pd.DataFrame, place: RowLocator, title: str, agreed: FormulaState | None = None
) -> tuple[FormulaState, pd.DataFrame, np.ndarray]:
    """Return the formula's state, its columns for the rows without a missing value, and which rows these
    are. Kinds, categories and replacements are learned from the table, or those that clients have `agreed` on."""
    absent = next((name for name in required_columns(formula) if name not in frame.columns), None)
    if absent is not None:
        raise RequestError(
            f"{title}: the formula names column '{absent}', which the table does not have."
            f"{suggest_name(absent, map(str, frame.columns))}"
        )
    inputs = sorted(columns_of(formula.factors))
    if formula.target in inputs or formula.client in inputs:
        raise RequestError(f"{quote_formula(formula.text)}: the target and the client's column cannot be terms.")
    as_category = categories_in(formula)
    kinds = {name: CATEGORY if name in as_category else detect_kind(frame[name]) for name in inputs}
    if agreed is not None:
        kinds = {name: kind for name, kind in kinds_by_state(agreed).items() if name in inputs}
    values = {name: read_values(frame[name], kind, place) for name, kind in kinds.items()}
    absent_cells = [is_missing(column) for column in values.values()]
    present = ~np.any([np.zeros(len(frame), dtype=bool), *absent_cells], axis=0)
    if not present.any():
        raise RequestError(f"{title}: no row has a value in every column that the formula names.")
    levels = {
        name: tuple(map(str, column[present].remove_unused_categories().categories))
        for name, column in values.items()
        if isinstance(column, pd.Categorical)
    }
    fills: dict[str, float | str] = {}
    if agreed is not None:
        levels, fills = agreed.levels, agreed.fills
        known = {name: pd.Categorical(values[name], categories=list(own)) for name, own in levels.items()}
        values |= {name: column.fillna(str(fills[name])) for name, column in known.items()}
    for name, column in values.items() if agreed is None else ():
        values_present = pd.Series(column[present])
        fills[name] = str(values_present.mode()[0]) if name in levels else float(values_present.mean())
    rows = _to_factors({name: column[present] for name, column in values.items()}, levels)
    places = RowPlaces(np.flatnonzero(present), place)
    columns, transforms = evaluate_terms(formula.fixed, rows, places)
    if INTERCEPT not in columns:
        raise RequestError(
            f"{quote_formula(formula.text)}: models have an intercept; leave '0 +' or '- 1' out of the fixed effects."
        )
    varying: Iterable[str] = columns.columns
    if formula.random is not None:
        random, random_transforms = evaluate_terms(formula.random, rows, places)
        transforms, varying = transforms | random_transforms, random.columns
        columns = columns.assign(**{name: random[name] for name in varying if name not in columns})
    if columns.shape[1] < 2:
        raise RequestError(f"{quote_formula(formula.text)} has no column to learn from beside the intercept.")
    state = FormulaState(
        text=formula.text,
        transforms=transforms,
        levels=levels,
        dates=tuple(name for name, kind in kinds.items() if kind == DATE),
        fills=fills,
        varying=tuple(varying),
        all_vary=set(varying) == set(columns.columns),
    )
    return state, columns.drop(columns=INTERCEPT), present


def apply_formula(state: FormulaState, frame: pd.DataFrame, place: RowLocator) -> tuple[pd.DataFrame, list[str]]:
    """Return a later table's columns, and notes on cells that do not fit."""
    values, notes = JsonObject(), list[str]()
    for name, fill in state.fills.items():
        if name not in frame.columns:
            raise RequestError(
                f"column '{name}' is missing from the table; the formula {quote_formula(state.text)} names it."
                f"{suggest_name(name, map(str, frame.columns))}"
            )
        kind = CATEGORY if name in state.levels else DATE if name in state.dates else NUMBER
        column: Any = read_values(frame[name], kind, place)
        if name in state.levels:
            coded = column.set_categories(list(state.levels[name]))
            unseen = np.asarray(coded.codes < 0) & ~is_missing(column)
            if unseen.any():
                notes.append(
                    f"Column '{name}': {unseen.sum()} rows hold values that no training row has "
                    f"({quote_list(sorted(set(column[unseen])), 3)}); they count as '{fill}', the most frequent one."
                )
            column = coded
        absent = is_missing(read_values(frame[name], kind, place))
        if absent.any():
            notes.append(f"Column '{name}': {absent.sum()} rows have no value; '{fill}' stands in.")
        values[name] = column.fillna(fill) if name in state.levels else np.where(absent, fill, column)
    rows, formula = _to_factors(values, state.levels), parse_formula(state.text)
    places = RowPlaces(np.arange(len(frame)), place)
    columns, _ = evaluate_terms(formula.fixed, rows, places, state.transforms)
    if formula.random is not None:
        random, _ = evaluate_terms(formula.random, rows, places, state.transforms)
        columns = columns.assign(**{name: random[name] for name in random if name not in columns})
    return columns.drop(columns=INTERCEPT), notes


def _to_factors(values: JsonObject, levels: dict[str, tuple[str, ...]]) -> dict[str, np.ndarray | pd.Categorical]:
    """Columns as formulas take them: numbers, and categories with all their levels."""
    return {
        name: pd.Categorical(column, categories=list(levels[name])) if name in levels else np.asarray(column, float)
        for name, column in values.items()
    }
