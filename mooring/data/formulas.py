"""Formulas such as `score ~ lrt * gender + (1 + lrt | school)`, and the columns that they make of a table.

The fixed part, and the part before the bar, are formulas of `formulaic`: interactions, transformations, splines.
Knots, means and categories that a formula learns are stored in `FormulaState`, so that later tables become the
same columns. Terms are checked before they are evaluated: columns, numbers and the functions of FUNCTIONS only.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from pydantic import BaseModel, ConfigDict

from mooring.core.errors import RequestError
from mooring.core.types import JsonObject
from mooring.data.column_types import CATEGORY, DATE, NUMBER, detect_kind, is_missing, read_values
from mooring.data.tables import RowLocator, quote_list, suggest_name

RANDOM_TERM = re.compile(r"\+?\s*\(([^()|]*(?:\([^()]*\)[^()|]*)*)(\|\|?)([^()|]*)\)")
SPLINES = ("bs", "cr", "cc", "cs")
FUNCTIONS = frozenset((*SPLINES, "C", "I", "poly", "center", "scale", "standardize", "log", "log2", "log10", "exp"))
MODULE_FUNCTIONS = {
    "np": frozenset(("log", "log2", "log10", "log1p", "exp", "expm1", "sqrt", "abs", "sin", "cos", "tanh", "square")),
    "contr": frozenset(("treatment", "sum", "helmert", "poly", "diff")),
}
EXTRAPOLATION = ", extrapolation='clip'"  # a spline is constant beyond the range of the training rows
INTERCEPT = "Intercept"
STATEFUL = frozenset((*SPLINES, "poly", "center", "scale", "standardize"))  # they learn from the rows,
FIXED_SPLINE = {"knots", "lower_bound", "upper_bound"}  # but for `bs` with these arguments


class MixedFormula(NamedTuple):
    """The parts of a formula."""

    text: str
    target: str
    fixed: str  # a formula, with the intercept unless it contains "0 +"
    random: str | None  # the terms that vary by client; None: no random effects
    client: str | None
    correlated: bool  # whether the random effects may be correlated: `|`, not `||`


class RowPlaces(NamedTuple):
    """Positions of rows in their table."""

    positions: np.ndarray
    place: RowLocator


class FormulaState(BaseModel):
    """A formula and its parameters learned from a table."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    text: str
    transforms: JsonObject  # by factor: formulaic's state of a transformation, such as knots
    levels: dict[str, tuple[str, ...]]  # by column: its categories, the first is the reference
    dates: tuple[str, ...]  # columns of dates, which count as days since 1970-01-01
    fills: dict[str, float | str]  # by column: replacement for missing values of a later table
    varying: tuple[str, ...]  # columns whose coefficients vary by client; Intercept among them
    all_vary: bool  # whether every coefficient may vary


def parse_formula(text: str) -> MixedFormula:
    """Return the parts of a formula; nested and crossed random effects are refused."""
    sides = text.split("~")
    if len(sides) != 2 or not sides[0].strip():
        raise RequestError(f"a formula reads 'target ~ terms + (1 | client)', got {text!r}.")
    target, right = sides[0].strip().strip("`"), sides[1]
    terms = RANDOM_TERM.findall(right)
    fixed = RANDOM_TERM.sub("", right).strip().removeprefix("+").strip() or "1"
    if "|" in fixed:
        raise RequestError(f"the random effects of {text!r} cannot be read; write them as (1 + column | client).")
    groups = {group.strip() for _, _, group in terms}
    if any(re.search(r"[/:*+]", group) for group in groups):
        raise RequestError(
            f"{text!r}: nested random effects are not supported; clients are one column, as in (1 | client)."
        )
    if len(groups) > 1:
        raise RequestError(
            f"{text!r}: crossed random effects ({' and '.join(sorted(groups))}) are not supported; "
            "use one grouping column."
        )
    if len(terms) > 1:
        raise RequestError(
            f"{text!r}: write the random effects in one pair of parentheses; (a || client) keeps them uncorrelated."
        )
    if not terms:
        return MixedFormula(text, target, fixed, None, None, True)
    inside, bar, group = terms[0]
    return MixedFormula(text, target, fixed, inside.strip() or "1", group.strip().strip("`"), bar == "|")


def import_formulaic() -> Any:
    try:
        import formulaic
    except ModuleNotFoundError:
        raise RequestError("formulas need the package formulaic: pip install 'mooring-fl[formula]'.") from None
    return formulaic


def parse_terms(part: str, text: str) -> Any:
    """Return a side of a formula as parsed by formulaic, with factors that are safe to evaluate."""
    formulaic = import_formulaic()
    try:
        terms = formulaic.Formula(part)
    except (formulaic.errors.FormulaicError, SyntaxError) as failure:
        raise RequestError(f"the formula {text!r} cannot be read: {str(failure).splitlines()[0]}.") from failure
    if "." in {str(factor.expr) for term in _list_terms(terms) for factor in term.factors}:
        raise RequestError(f"{text!r}: name the columns; '.' does not stand for all of them here.")
    for term in _list_terms(terms):
        for factor in term.factors:
            if factor.eval_method.value == "python":
                _check_expression(str(factor.expr), text)
    return terms


def _list_terms(terms: object) -> list[Any]:
    if not hasattr(terms, "__iter__") or hasattr(terms, "lhs"):
        raise RequestError("a formula has one '~'.")
    return list(terms)


def _check_expression(expression: str, text: str) -> None:
    """Refuse all but columns, numbers and the functions of FUNCTIONS, because formulaic evaluates Python."""
    allowed = (
        ast.Expression, ast.Call, ast.Constant, ast.BinOp, ast.UnaryOp, ast.Compare, ast.List, ast.Tuple,
        ast.keyword, ast.Load, ast.operator, ast.unaryop, ast.cmpop,
    )  # fmt: skip
    try:
        tree = ast.parse(re.sub(r"`[^`]*`", "column", expression), mode="eval")
    except SyntaxError as failure:
        raise RequestError(f"the formula {text!r} cannot be read at {expression!r}.") from failure
    called_ids = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    functions = {id(node) for node in ast.walk(tree) if id(node) in called_ids and _is_usable_function(node)}
    modules = {id(node.value) for node in ast.walk(tree) if id(node) in functions and isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        is_name = isinstance(node, ast.Name) and id(node) not in called_ids
        if id(node) not in functions | modules and not is_name and not isinstance(node, allowed):
            usable = quote_list(sorted(FUNCTIONS | {f"np.{name}" for name in MODULE_FUNCTIONS["np"]}), 40)
            raise RequestError(
                f"{text!r}: {ast.unparse(node)!r} cannot be used in a formula; these functions can: {usable}."
            )


def refuse_stateful_terms(text: str) -> None:
    """Refuse a formula with a transformation that learns from all rows, for clients that keep theirs."""
    formula = parse_formula(text)
    for part in (formula.fixed, formula.random or "1"):
        for term in _list_terms(parse_terms(part, text)):
            for factor in term.factors:
                expression = re.sub(r"`[^`]*`", "column", str(factor.expr))
                calls = [node for node in ast.walk(ast.parse(expression, mode="eval")) if isinstance(node, ast.Call)]
                for call in calls if factor.eval_method.value == "python" else ():
                    name = getattr(call.func, "id", "")
                    is_fixed = name == "bs" and {word.arg for word in call.keywords} >= FIXED_SPLINE
                    if name in STATEFUL and not is_fixed:
                        raise RequestError(
                            f"the formula's {str(factor.expr)!r} learns from the rows of all clients, which stay with "
                            "them: leave the transformation out (columns are standardized anyway), or write bs with "
                            "knots, lower_bound and upper_bound."
                        )


def categories_in(formula: MixedFormula) -> set[str]:
    """Return the columns that a formula makes categories by C()."""
    return set(re.findall(r"\bC\(\s*`?([^\s,()`]+)", f"{formula.fixed} {formula.random or ''}"))


def kinds_by_state(state: FormulaState) -> dict[str, str]:
    """Return the kind of every column that a formula names."""
    return {name: CATEGORY if name in state.levels else DATE if name in state.dates else NUMBER for name in state.fills}


def find_complete_rows(state: FormulaState, frame: pd.DataFrame, place: RowLocator) -> np.ndarray:
    """Return [N]: which rows have a value in every column that a formula names."""
    missing = [is_missing(read_values(frame[name], kind, place)) for name, kind in kinds_by_state(state).items()]
    return ~np.any([np.zeros(len(frame), dtype=bool), *missing], axis=0)


def _is_usable_function(node: ast.AST) -> bool:
    if isinstance(node, ast.Name):
        return node.id in FUNCTIONS
    if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
        return False
    return node.attr in MODULE_FUNCTIONS.get(node.value.id, ())


def extrapolate_splines(part: str) -> str:
    """Return the formula with splines that are defined beyond the range of the training rows."""
    out, start = "", 0
    for match in re.finditer(rf"\b(?:{'|'.join(SPLINES)})\(", part):
        depth, end = 1, match.end()
        while end < len(part) and depth:
            depth += (part[end] == "(") - (part[end] == ")")
            end += 1
        if depth == 0 and "extrapolation" not in part[match.start() : end]:
            out, start = out + part[start : end - 1] + EXTRAPOLATION, end - 1
    return out + part[start:]


def required_columns(formula: MixedFormula, columns: Iterable[str]) -> list[str]:
    """Return the columns that a formula names, the target and the client's first: those that formulaic finds, and those
    of the table that occur in it as words (formulaic does not inspect every transformation)."""
    parts = (formula.fixed, formula.random or "1")
    variables = {str(name) for part in parts for name in parse_terms(part, formula.text).required_variables}
    names_in_text = {
        name for part in parts for match in re.findall(r"`([^`]+)`|([^\W\d]\w*)", part) for name in match if name
    }
    names = variables | {name for name in columns if name in names_in_text}
    return list(dict.fromkeys([formula.target, *([formula.client] if formula.client else []), *sorted(names)]))


def evaluate_terms(
    part: str, frame: pd.DataFrame, text: str, rows: RowPlaces, transforms: JsonObject | None = None
) -> tuple[pd.DataFrame, JsonObject]:
    """Return the columns of one side of a formula, and the state of its transformations (or the given `transforms`).

    `rows` has the positions of the frame's rows in the table.
    """
    formulaic = import_formulaic()
    spec = formulaic.ModelSpec(
        formula=parse_terms(part, text), na_action="ignore", output="pandas", transform_state=dict(transforms or {})
    )
    try:
        with np.errstate(all="ignore"):
            matrix = spec.get_model_matrix(frame, context={})
    except (formulaic.errors.FormulaicError, ValueError, TypeError) as failure:
        reason = str(failure).splitlines()[0].rstrip(".")
        raise RequestError(f"the formula {text!r} cannot be evaluated: {reason}.") from failure
    columns = pd.DataFrame(np.asarray(matrix, dtype=float), columns=[str(name) for name in matrix.columns])
    wrong = np.argwhere(~np.isfinite(columns.to_numpy()))
    if len(wrong):
        row, name = rows.place(int(rows.positions[wrong[0][0]])), name_as_written(str(columns.columns[wrong[0][1]]))
        raise RequestError(
            f"{row}: '{name}' of the formula is not a finite number there; leave the row out, or choose a "
            "transformation that is defined for its values."
        )
    return columns, matrix.model_spec.transform_state


def learn_formula(
    formula: MixedFormula, frame: pd.DataFrame, place: RowLocator, title: str, agreed: FormulaState | None = None
) -> tuple[FormulaState, pd.DataFrame, np.ndarray]:
    """Return the formula's state, its columns for the rows without a missing value, and which rows these
    are. Kinds, categories and replacements are learned from the table, or those that clients have `agreed` on."""
    names = required_columns(formula, map(str, frame.columns))
    absent = next((name for name in names if name not in frame.columns), None)
    if absent is not None:
        raise RequestError(
            f"{title}: the formula names column '{absent}', which the table does not have."
            f"{suggest_name(absent, map(str, frame.columns))}"
        )
    inputs = [name for name in names if name not in (formula.target, formula.client)]
    if formula.target in _variables(formula) or formula.client in _variables(formula):
        raise RequestError(f"{formula.text!r}: the target and the client's column cannot be terms.")
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
    rows = rows if inputs else pd.DataFrame(index=range(int(present.sum())))
    places = RowPlaces(np.flatnonzero(present), place)
    columns, transforms = evaluate_terms(extrapolate_splines(formula.fixed), rows, formula.text, places)
    if INTERCEPT not in columns:
        raise RequestError(
            f"{formula.text!r}: models have an intercept; leave '0 +' or '- 1' out of the fixed effects."
        )
    varying: Iterable[str] = columns.columns
    if formula.random is not None:
        random, random_transforms = evaluate_terms(extrapolate_splines(formula.random), rows, formula.text, places)
        transforms, varying = transforms | random_transforms, random.columns
        columns = columns.assign(**{name: random[name] for name in varying if name not in columns})
    if columns.shape[1] < 2:
        raise RequestError(f"{formula.text!r} has no column to learn from beside the intercept.")
    state = FormulaState(
        text=formula.text,
        transforms=_to_json(transforms),
        levels=levels,
        dates=tuple(name for name, kind in kinds.items() if kind == DATE),
        fills=fills,
        varying=tuple(name_as_written(name) for name in varying),
        all_vary=set(varying) == set(columns.columns),
    )
    return state, _name_columns(columns), present


def apply_formula(state: FormulaState, frame: pd.DataFrame, place: RowLocator) -> tuple[pd.DataFrame, list[str]]:
    """Return a later table's columns, and notes on cells that do not fit."""
    values, notes = JsonObject(), list[str]()
    for name, fill in state.fills.items():
        if name not in frame.columns:
            raise RequestError(
                f"column '{name}' is missing from the table; the formula {state.text!r} names it."
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
    rows = _to_factors(values, state.levels)
    formula, transforms = parse_formula(state.text), _from_json(state.transforms)
    places = RowPlaces(np.arange(len(rows)), place)
    columns, _ = evaluate_terms(extrapolate_splines(formula.fixed), rows, state.text, places, transforms)
    if formula.random is not None:
        random, _ = evaluate_terms(extrapolate_splines(formula.random), rows, state.text, places, transforms)
        columns = columns.assign(**{name: random[name] for name in random if name not in columns})
    return _name_columns(columns), notes


def _variables(formula: MixedFormula) -> set[str]:
    parts = (formula.fixed, formula.random or "1")
    return {str(name) for part in parts for name in parse_terms(part, formula.text).required_variables}


def _to_factors(values: JsonObject, levels: dict[str, tuple[str, ...]]) -> pd.DataFrame:
    """Columns as formulaic takes them: numbers, and categories with all their levels."""
    return pd.DataFrame(
        {
            name: pd.Categorical(column, categories=list(levels[name])) if name in levels else np.asarray(column, float)
            for name, column in values.items()
        }
    )


def _name_columns(columns: pd.DataFrame) -> pd.DataFrame:
    """The columns without the intercept, by their names in the formula."""
    return columns.drop(columns=INTERCEPT).rename(columns=name_as_written)


def name_as_written(name: str) -> str:
    """A column's name as its formula was written."""
    return name.replace(EXTRAPOLATION, "").replace(EXTRAPOLATION.replace("'", '"'), "")


def _to_json(value: object) -> Any:
    if isinstance(value, dict):
        return {str(key): _to_json(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | list | tuple):
        return [_to_json(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value


def _from_json(value: object) -> Any:
    if isinstance(value, dict):
        return {int(key) if key.isdigit() else key: _from_json(item) for key, item in value.items()}
    return [_from_json(item) for item in value] if isinstance(value, list) else value
