"""Mixed-model formulas such as `score ~ lrt * gender + (1 + lrt | school)`, and the matrices that they stand for.

The fixed part, and what stands before the bar, are formulas of `formulaic`: interactions, transformations, splines.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from mooring.core.errors import RequestError

RANDOM_TERM = re.compile(r"\+?\s*\(([^()|]*(?:\([^()]*\)[^()|]*)*)(\|\|?)([^()|]*)\)")


class MixedFormula(NamedTuple):
    """The parts of a formula."""

    text: str
    target: str
    fixed: str  # a formula, the intercept included unless it says "0 +"
    random: str | None  # the terms that vary by client; None: no random effects
    client: str | None
    correlated: bool  # whether the random effects may be correlated: `|`, not `||`


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


def parse_formula(text: str) -> MixedFormula:
    """The parts of a formula; nested and crossed random effects are refused."""
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


def required_columns(formula: MixedFormula, columns: Iterable[str]) -> list[str]:
    """The columns that a formula names, the target and the client's first: those that formulaic finds, and those of the
    table that stand in it as words (formulaic does not look into every transformation)."""
    formulaic = import_formulaic()
    parts = (formula.fixed, formula.random or "1")
    found = {str(name) for part in parts for name in formulaic.Formula(part).required_variables}
    words = {word for part in parts for match in re.findall(r"`([^`]+)`|([^\W\d]\w*)", part) for word in match if word}
    names = found | {name for name in columns if name in words}
    return list(dict.fromkeys([formula.target, *([formula.client] if formula.client else []), *sorted(names)]))


def import_formulaic() -> Any:
    try:
        import formulaic
    except ModuleNotFoundError:
        raise RequestError("formulas need the package formulaic: pip install 'mooring-fl[formula]'.") from None
    return formulaic


def build_matrices(formula: MixedFormula, frame: pd.DataFrame) -> DesignMatrices:
    """The matrices of a formula for a table; rows with a missing value in a column that it names are left out."""
    formulaic = import_formulaic()
    try:
        names = required_columns(formula, map(str, frame.columns))
    except formulaic.errors.FormulaicError as failure:
        raise RequestError(f"the formula {formula.text!r} cannot be read: {failure}.") from failure
    absent = [name for name in names if name not in frame.columns]
    if absent:
        raise RequestError(f"the formula names column '{absent[0]}', which the table does not have.")
    complete = frame[names].dropna().reset_index(drop=True)
    if complete.empty:
        raise RequestError("no row has a value in every column that the formula names.")
    y = pd.to_numeric(complete[formula.target], errors="coerce").to_numpy(float)
    if np.isnan(y).any():
        raise RequestError(f"the target column '{formula.target}' holds text; a linear mixed model predicts numbers.")
    try:
        x = formulaic.model_matrix(formula.fixed, complete)
        z = formulaic.model_matrix(formula.random, complete) if formula.random is not None else None
    except formulaic.errors.FormulaicError as failure:
        raise RequestError(f"the formula {formula.text!r} cannot be evaluated: {failure}.") from failure
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
