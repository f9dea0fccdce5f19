"""The columns that the terms of a formula make of a table.

Categories are coded as in R: by contrasts where the other terms span their mean, else by one column per level. What a
transformation learns from the rows is a row of numbers:

    center  mean                               poly  a_0 .. a_(d-1), n_0 .. n_d of the recurrence below
    scale   mean, divisor                      bs, ns, cr  all knots, the outer ones first and last
    C       levels, of a column of numbers     p_(k+1) = (x - a_k) p_k - n_k / n_(k-1) p_(k-1),  n_k = |p_k|^2

Source   Kennedy, Gentle. Statistical computing. 1980, p. 343-344 (orthogonal polynomials).
         Smith et al. patsy, "Redundancy and categorical factors" (which categories are coded by contrasts).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise, product
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy.interpolate import BSpline, CubicSpline

from mooring.core.errors import RequestError
from mooring.data.formula_parser import (
    CALL,
    CATEGORIES,
    ELEMENTWISE,
    MINUS,
    NAME,
    NUMBER,
    SPLINES,
    SUM,
    Node,
    Term,
    arguments_of,
    function_of,
    learns,
)
from mooring.data.tables import RowLocator

INTERCEPT = "Intercept"
MAX_COLUMNS = 20_000  # of a formula
Numbers = tuple[float, ...]
Learned = dict[str, Numbers]  # by the text of a transformation
Inputs = Mapping[str, "np.ndarray | pd.Categorical"]  # columns of numbers and categories

OPERATIONS = {
    "*": np.multiply, "/": np.divide, "^": np.power, "**": np.power, "<": np.less, "<=": np.less_equal,
    ">": np.greater, ">=": np.greater_equal, "==": np.equal, "!=": np.not_equal,
}  # fmt: skip


class RowPlaces(NamedTuple):
    """Positions of rows in their table."""

    positions: np.ndarray
    place: RowLocator

    def name(self, row: int) -> str:
        return self.place(int(self.positions[row]))


class Coded(NamedTuple):
    """A factor of a term as named columns."""

    names: list[str]
    values: np.ndarray  # [N, k]


class Levels(NamedTuple):
    """A factor of categories."""

    names: list[str]
    codes: np.ndarray  # [N]
    contrasts: tuple[str, str]

    def columns(self, label: str, is_full: bool) -> Coded:
        count = len(self.names)
        if is_full:
            return Coded([f"{label}[{name}]" for name in self.names], np.eye(count)[self.codes])
        kind, base = self.contrasts
        if kind == "contr.sum":
            coding = np.vstack([np.eye(count - 1), -np.ones((1, count - 1))])
            return Coded([f"{label}[S.{name}]" for name in self.names[:-1]], coding[self.codes])
        if base and base not in self.names:
            raise RequestError(f"'{label}' of the formula: there is no level {base!r:.80}.")
        others = [k for k in range(count) if k != (self.names.index(base) if base else 0)]
        return Coded([f"{label}[T.{self.names[k]}]" for k in others], np.eye(count)[self.codes][:, others])


class Evaluation(NamedTuple):
    """A table while its columns are made."""

    inputs: Inputs
    rows: RowPlaces
    known: Learned | None  # what was learned from other rows; None: it is learned from these
    learned: Learned

    def recall(self, call: Node) -> Numbers | None:
        """Return what a transformation has learned; None if it is to be learned now."""
        if self.known is not None and str(call) not in self.known and learns(call):
            raise RequestError(f"the schema has no numbers for '{call}' of the formula.")
        return None if self.known is None else self.known.get(str(call))

    def require_finite(self, values: np.ndarray, names: Sequence[str]) -> None:
        """Refuse rows [N, k] for which a transformation is not defined."""
        wrong = np.argwhere(~np.isfinite(values))
        if len(wrong):
            raise RequestError(
                f"{self.rows.name(wrong[0][0])}: '{names[wrong[0][1]]}' of the formula is not a finite number there; "
                "leave the row out, or choose a transformation that is defined for its values."
            )


def evaluate_terms(
    terms: Sequence[Term], inputs: Inputs, rows: RowPlaces, known: Learned | None = None
) -> tuple[pd.DataFrame, Learned]:
    """Return the columns of terms, and what their transformations learned (or `known`)."""
    table = Evaluation(inputs, rows, known, {} if known is None else dict(known))
    factors: dict[Node, Coded | Levels] = {}
    with np.errstate(all="ignore"):
        for factor in dict.fromkeys(factor for term in terms for factor in term):
            factors[factor] = _evaluate_factor(factor, table)
        blocks, count = list[Coded](), 0
        for parts in _choose_codings(terms, factors):
            coded = [_code(factor, factors[factor], is_full) for factor, is_full in parts]
            count += int(np.prod([len(part.names) for part in coded], dtype=float))
            if count > MAX_COLUMNS:
                raise RequestError(f"the formula makes more than {MAX_COLUMNS:,} columns.")
            blocks.append(_multiply(coded, len(rows.positions)))
    names = [name for block in blocks for name in block.names]
    if len(set(names)) < len(names):
        twice = next(name for k, name in enumerate(names) if name in names[:k])
        raise RequestError(f"two columns of the formula are named '{twice}'.")
    matrix = np.hstack([block.values for block in blocks]) if blocks else np.zeros((len(rows.positions), 0))
    table.require_finite(matrix, names)
    return pd.DataFrame(matrix, columns=names), table.learned


def fits_call(call: Node | None, numbers: Numbers) -> bool:
    """Return whether a transformation can have learned these numbers."""
    if call is None or not np.isfinite(numbers).all():
        return False
    arguments = arguments_of(call)
    match function_of(call.value):
        case "center":
            return len(numbers) == 1
        case "scale" | "standardize":
            return len(numbers) == 2 and numbers[1] > 0
        case "poly":
            degree = int(arguments.get("degree", 1))
            return len(numbers) == 2 * degree + 1 and min(numbers[degree:]) > 0
        case name if name in SPLINES:
            rises = all(a < b for a, b in pairwise(numbers))
            return rises and len(numbers) == _count_inner_knots(name, arguments) + 2
    return len(numbers) > 0


def _code(factor: Node, value: Coded | Levels, is_full: bool) -> Coded:
    return value.columns(_label(factor), is_full) if isinstance(value, Levels) else value


def _label(factor: Node) -> str:
    return factor.value if factor.kind == NAME else str(factor)


def _multiply(parts: list[Coded], rows: int) -> Coded:
    """Return the products of one column of each part, those of the first part change fastest."""
    if not parts:
        return Coded([INTERCEPT], np.ones((rows, 1)))
    picks = [pick[::-1] for pick in product(*(range(len(part.names)) for part in reversed(parts)))]
    names = [":".join(part.names[k] for part, k in zip(parts, pick)) for pick in picks]
    values = np.ones((rows, len(picks)))
    for j, part in enumerate(parts):
        values *= part.values[:, [pick[j] for pick in picks]]
    return Coded(names, values)


def _choose_codings(terms: Sequence[Term], factors: Mapping[Node, Coded | Levels]) -> list[list[tuple[Node, bool]]]:
    """Return products of factors, with a flag whether its levels have one column each, so that none is redundant.

    A product of categories with one column per level spans the products of contrasts of all subsets of its factors.
    Each of these is added once per product of numeric factors, and subsets that differ by one factor are joined.
    """
    spanned: set[tuple[frozenset[Node], frozenset[Node]]] = set()
    codings = []
    for term in terms:
        categories = [factor for factor in term if isinstance(factors[factor], Levels)]
        numeric = frozenset(term) - set(categories)
        pieces: list[dict[Node, bool]] = []
        for size in range(len(categories) + 1):
            for subset in combinations(categories, size):
                if (numeric, frozenset(subset)) not in spanned:
                    spanned.add((numeric, frozenset(subset)))
                    pieces.append(dict.fromkeys(subset, False))
        while joined := _find_joined(pieces):
            small, large, extra = joined
            large[extra] = True
            pieces = [piece for piece in pieces if piece is not small]
        for piece in pieces:
            codings.append([(factor, piece.get(factor, False)) for factor in term if factor in {*piece, *numeric}])
    return codings


def _find_joined(pieces: list[dict[Node, bool]]) -> tuple[dict[Node, bool], dict[Node, bool], Node] | None:
    for small, large in combinations(pieces, 2):
        extra = [factor for factor in large if factor not in small]
        if len(extra) == 1 and not large[extra[0]] and small.items() <= large.items():
            return small, large, extra[0]
    return None


def _evaluate_factor(factor: Node, table: Evaluation) -> Coded | Levels:
    label, name = _label(factor), function_of(factor.value) if factor.kind == CALL else ""
    if factor.kind == NAME or name in CATEGORIES:
        contrasts = arguments_of(factor).get("contrasts", ("contr.treatment", "")) if name else ("", "")
        column = _column(factor if factor.kind == NAME else factor.parts[0], table)
        if isinstance(column, pd.Categorical):
            return Levels([str(level) for level in column.categories], np.asarray(column.codes), contrasts)
        return Coded([label], column[:, None]) if factor.kind == NAME else _levels_of_numbers(factor, column, table)
    if name in SPLINES or name == "poly":
        x = _as_column(_compute(factor.parts[0], table), table)
        table.require_finite(x[:, None], [label])
        values = _spline(factor, x, table) if name in SPLINES else _polynomial(factor, x, table)
        return Coded([f"{label}[{k + 1}]" for k in range(values.shape[1])], values)
    return Coded([label], _as_column(_compute(factor, table), table)[:, None])


def _column(node: Node, table: Evaluation) -> Any:
    if node.value not in table.inputs:
        raise RequestError(f"the formula names column '{node.value}', which the table does not have.")
    return table.inputs[node.value]


def _as_column(values: np.ndarray, table: Evaluation) -> np.ndarray:
    """Return [N], also where the formula has a number only."""
    return np.broadcast_to(np.asarray(values, dtype=float), len(table.rows.positions))


def _levels_of_numbers(call: Node, column: np.ndarray, table: Evaluation) -> Levels:
    levels = table.recall(call)
    levels = tuple(map(float, np.unique(column))) if levels is None else levels
    table.learned[str(call)] = levels
    codes = pd.Index(levels).get_indexer(column)
    if (codes < 0).any():
        row = int(np.argmax(codes < 0))
        raise RequestError(
            f"{table.rows.name(row)}, column '{call.parts[0].value}': the value '{column[row]:g}' is in no row that "
            "the model was fitted to."
        )
    contrasts = arguments_of(call).get("contrasts", ("contr.treatment", ""))
    return Levels([f"{level:g}" for level in levels], codes, contrasts)


def _compute(node: Node, table: Evaluation) -> Any:
    """Return the value of arithmetic: [N], or a number."""
    if node.kind == NUMBER:
        return np.float64(node.value)
    if node.kind == NAME:
        column = _column(node, table)
        if isinstance(column, pd.Categorical):
            raise RequestError(f"column '{node.value}' holds categories; the formula cannot compute with it.")
        return column
    values = [_compute(part, table) for part in node.parts[: 1 if node.kind == CALL else None]]
    if node.kind == SUM:
        return sum(values[1:], start=values[0])
    if node.kind == MINUS:
        return -values[0]
    if node.kind == CALL:
        name = function_of(node.value)
        return ELEMENTWISE[name](values[0]) if name in ELEMENTWISE else _standardize(node, values[0], table)
    return np.asarray(OPERATIONS[node.value](*values), dtype=float)


def _standardize(call: Node, values: np.ndarray, table: Evaluation) -> np.ndarray:
    """Return values minus their mean, and over their standard deviation unless the call is center()."""
    x, name, arguments = _as_column(values, table), function_of(call.value), arguments_of(call)
    table.require_finite(x[:, None], [str(call)])
    numbers = table.recall(call)
    if numbers is None:
        mean = float(x.mean()) if arguments.get("center", True) else 0.0
        freedom = 1 if name == "scale" and len(x) > 1 else 0
        divisor = float(np.sqrt(((x - mean) ** 2).sum() / (len(x) - freedom))) if arguments.get("scale", True) else 1.0
        numbers = (mean,) if name == "center" else (mean, divisor)
        if not fits_call(call, numbers):
            raise RequestError(f"'{call}' of the formula needs finite numbers, not all of them the same.")
        table.learned[str(call)] = numbers
    return (x - numbers[0]) / (numbers[1] if len(numbers) > 1 else 1.0)


def _polynomial(call: Node, x: np.ndarray, table: Evaluation) -> np.ndarray:
    """Return [N, degree], powers that are orthonormal on the rows that they were learned from."""
    arguments = arguments_of(call)
    degree = int(arguments.get("degree", 1))
    if arguments.get("raw"):
        return x[:, None] ** np.arange(1, degree + 1)
    numbers = table.recall(call)
    is_new = numbers is None
    if numbers is None and len(np.unique(x)) <= degree:
        raise RequestError(f"'{call}' of the formula needs more than {degree} different values.")
    centers, squares = ([], []) if numbers is None else (list(numbers[:degree]), list(numbers[degree:]))
    powers = [np.ones(len(x))]
    for k in range(degree + 1):
        if is_new:
            squares.append(float((powers[k] ** 2).sum()))
        if k == degree:
            break
        if is_new:
            centers.append(float((x * powers[k] ** 2).sum() / squares[k]))
        before = squares[k] / squares[k - 1] * powers[k - 1] if k else 0.0
        powers.append((x - centers[k]) * powers[k] - before)
    if is_new:
        table.learned[str(call)] = (*centers, *squares)
        if not fits_call(call, table.learned[str(call)]):
            raise RequestError(f"'{call}' of the formula cannot be computed from these values.")
    return np.stack([powers[k] / np.sqrt(squares[k]) for k in range(1, degree + 1)], axis=1)


def _count_inner_knots(name: str, arguments: Mapping[str, Any]) -> int:
    if "knots" in arguments:
        return len(arguments["knots"])
    if "df" not in arguments:
        return 0
    return int(arguments["df"] - {"bs": arguments.get("degree", 3), "ns": 1, "cr": 2}[name])


def _spline(call: Node, x: np.ndarray, table: Evaluation) -> np.ndarray:
    """Return the columns of a spline: B-splines for bs, else natural cubic splines that are 1 at one knot and 0 at the
    others, for ns without the first. Beyond the outer knots a spline keeps its last value."""
    arguments = arguments_of(call)
    knots = table.recall(call)
    if knots is None:
        bounds = arguments.get("lower_bound", x.min()), arguments.get("upper_bound", x.max())
        levels = np.linspace(0, 1, _count_inner_knots(call.value, arguments) + 2)[1:-1]
        inside = np.unique(x) if call.value == "cr" else x
        inside = inside[(inside >= bounds[0]) & (inside <= bounds[1])]
        inner = arguments["knots"] if "knots" in arguments else np.quantile(inside, levels) if len(inside) else []
        knots = tuple(float(knot) for knot in (bounds[0], *inner, bounds[1]))
        if not fits_call(call, knots):
            raise RequestError(
                f"'{call}' of the formula: its column has too few different values, or knots beyond its range; give "
                "fewer knots or a lower df."
            )
        if learns(call):
            table.learned[str(call)] = knots
    x = np.clip(x, knots[0], knots[-1])
    if call.value != "bs":
        basis = CubicSpline(knots, np.eye(len(knots)), bc_type="natural")(x)
        return basis[:, 1:] if call.value == "ns" else basis
    degree = int(arguments.get("degree", 3))
    padded = [*[knots[0]] * degree, *knots, *[knots[-1]] * degree]
    if not len(x):
        return np.zeros((0, len(knots) + degree - 2))
    return BSpline.design_matrix(np.ascontiguousarray(x), np.array(padded), degree).toarray()[:, 1:]
