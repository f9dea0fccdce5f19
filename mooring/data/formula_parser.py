"""The grammar of formulas such as `score ~ lrt * gender + (1 + lrt | school)`.

    formula    column ~ sum                       sum     term, joined by + and -; 1 and 0 stand for the intercept
    term       terms joined by * / : ^            factor  a column (in backticks where it is no plain name), or a call
    call       f(arithmetic of columns, literals) bars    (sum | column) or (sum || column), in the sum itself

Operators are those of R: a * b is a + b + a:b, a / b is a + a:b, (a + b)^2 is a + b + a:b. A text outside of the
grammar is refused with its place. Nothing here or in `formula_columns.py` runs text as code: a formula becomes a tree.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from mooring.core.errors import RequestError
from mooring.data.tables import quote_list

NAME, NUMBER, TEXT, LIST, CALL = "name", "number", "text", "list", "call"
SUM, MINUS, OPERATOR, BAR = "sum", "minus", "operator", "bar"
MAX_LENGTH = 10_000  # characters of a formula
MAX_DEPTH = 40  # of nested parentheses and operators
MAX_TERMS = 2_000
MAX_FACTORS = 8  # of a term
MAX_COUNT = 50  # largest df or degree

TOKEN = re.compile(
    r"(?P<number>(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)|(?P<name>[^\W\d][\w.]*)|`(?P<quoted>[^`]+)`"
    r"|(?P<text>'[^'\\]*'|\"[^\"\\]*\")|(?P<sign>\*\*|\|\||<=|>=|==|!=|[-+*/:^|~()\[\],=<>])"
)
STRENGTH = {"<": 1, "<=": 1, ">": 1, ">=": 1, "==": 1, "!=": 1, "+": 2, "-": 2, "*": 3, "/": 3, ":": 4, "^": 6, "**": 6}
MINUS_STRENGTH = 5  # of a sign before an operand: -x^2 is -(x^2)
POWERS = ("^", "**")

SPLINES = ("bs", "ns", "cr")
CATEGORIES = ("C", "factor")
STATEFUL = frozenset((*SPLINES, "poly", "center", "scale", "standardize"))  # they learn from the rows,
FIXED_SPLINE = {"knots", "lower_bound", "upper_bound"}  # but for splines with these arguments
ELEMENTWISE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "I": np.positive, "log": np.log, "log2": np.log2, "log10": np.log10, "log1p": np.log1p, "exp": np.exp,
    "expm1": np.expm1, "sqrt": np.sqrt, "abs": np.abs, "sin": np.sin, "cos": np.cos, "tanh": np.tanh,
    "square": np.square,
}  # fmt: skip
PARAMETERS: dict[str, tuple[str, ...]] = {  # after the first argument
    "bs": ("df", "knots", "degree", "lower_bound", "upper_bound"),
    "ns": ("df", "knots", "lower_bound", "upper_bound"),
    "cr": ("df", "knots", "lower_bound", "upper_bound"),
    "poly": ("degree", "raw"),
    "scale": ("center", "scale"),
    **dict.fromkeys(CATEGORIES, ("contrasts",)),
    **dict.fromkeys(("center", "standardize", *ELEMENTWISE), ()),
}
CONTRASTS = ("contr.treatment", "contr.sum")
Literal = float | bool | str | list[float] | tuple[str, str]


@dataclass(frozen=True)
class Node:
    """A part of a formula; two are equal where they are written alike."""

    kind: str
    value: str = ""
    parts: tuple[Node, ...] = ()
    labels: tuple[str, ...] = ()  # of a call's arguments, "" for those without
    at: int = field(default=0, compare=False)  # position in the formula

    def __str__(self) -> str:
        return _write(self)


Term = tuple[Node, ...]  # the factors of a product; the intercept has none


class MixedFormula(NamedTuple):
    """The parts of a formula."""

    text: str
    target: str
    fixed: tuple[Term, ...]
    random: tuple[Term, ...] | None  # the terms that vary by client; None: no random effects
    client: str | None
    correlated: bool  # whether the random effects may be correlated: `|`, not `||`

    @property
    def factors(self) -> list[Node]:
        return [factor for term in (*self.fixed, *(self.random or ())) for factor in term]


class _Token(NamedTuple):
    kind: str
    value: str
    at: int


class _Refusal(Exception):
    """What a formula cannot contain, and where."""

    def __init__(self, at: int, why: str):
        super().__init__(why)
        self.at = at


def parse_formula(text: str) -> MixedFormula:
    """Return the parts of a formula; nested and crossed random effects are refused."""
    if len(text) > MAX_LENGTH:
        raise RequestError(f"a formula has at most {MAX_LENGTH:,} characters, got {len(text):,}.")
    if text.count("~") != 1 or not text.split("~")[0].strip():
        raise RequestError(f"a formula reads 'target ~ terms + (1 | client)', got {quote_formula(text)}.")
    try:
        return _parse(text)
    except _Refusal as refusal:
        raise RequestError(f"{quote_formula(text)}, at character {refusal.at + 1}: {refusal}.") from None


def quote_formula(text: str) -> str:
    """Return a formula as errors show it."""
    return repr(text if len(text) <= 200 else f"{text[:200]}...")


def _parse(text: str) -> MixedFormula:
    tokens = _split(text)
    target = _parse_operand(tokens, 0)
    if target.kind != NAME or tokens[0].value != "~":
        raise _Refusal(
            target.at,
            "the target is one column and cannot be computed here; add a column such as its logarithm to the table, "
            "and predictions are on the scale of that column",
        )
    tokens.popleft()
    right = Node(NUMBER, "1", at=len(text)) if tokens[0].kind == "end" else _parse_expression(tokens, 0, 0)
    if tokens[0].kind != "end":
        raise _Refusal(tokens[0].at, f"an operator is expected, not {tokens[0].value!r}")
    bars: list[Node] = []
    fixed = _expand_sum(right, {frozenset(): ()}, bars)
    if len(bars) == 0:
        return MixedFormula(text, target.value, fixed, None, None, True)
    clients = sorted({bar.parts[1].value for bar in bars})
    if len(clients) > 1:
        raise _Refusal(
            bars[1].at,
            f"crossed random effects ({' and '.join(clients)}) are not supported; use one grouping column",
        )
    if len(bars) > 1:
        raise _Refusal(
            bars[1].at,
            "write the random effects in one pair of parentheses; (a || client) keeps them uncorrelated",
        )
    random = _expand_sum(bars[0].parts[0], {frozenset(): ()}, None)
    return MixedFormula(text, target.value, fixed, random, clients[0], bars[0].value == "|")


def _split(text: str) -> deque[_Token]:
    tokens, at = deque[_Token](), 0
    while at < len(text):
        if text[at].isspace():
            at += 1
            continue
        match = TOKEN.match(text, at)
        if match is None or match.lastgroup is None:
            why = "name the columns; '.' does not stand for all of them here" if text[at] == "." else ""
            raise _Refusal(at, why or f"{text[at]!r} cannot be used; put names of other columns in backticks")
        tokens.append(_Token(match.lastgroup, match[match.lastgroup], at))
        at = match.end()
    tokens.append(_Token("end", "the end", len(text)))
    return tokens


def _parse_expression(tokens: deque[_Token], strength: int, depth: int) -> Node:
    """Return the expression at the front, up to the first operator that is not stronger than `strength`."""
    left = _parse_operand(tokens, depth)
    level = depth
    while tokens[0].kind == "sign" and STRENGTH.get(tokens[0].value, 0) > strength:
        sign, level = tokens.popleft(), level + 1
        own = STRENGTH[sign.value]
        if sign.value in "+-":  # flat, so that long sums are not deep
            level = depth
            right = _parse_expression(tokens, own, depth + 1)
            right = Node(MINUS, "-", (right,), at=sign.at) if sign.value == "-" else right
            left = Node(SUM, "+", (*(left.parts if left.kind == SUM else (left,)), right), at=left.at)
            continue
        right = _parse_expression(tokens, own - (sign.value in POWERS), level + 1)
        left = Node(OPERATOR, sign.value, (left, right), at=sign.at)
    return left


def _parse_operand(tokens: deque[_Token], depth: int) -> Node:
    token = tokens.popleft()
    if depth > MAX_DEPTH:
        raise _Refusal(token.at, f"more than {MAX_DEPTH} operators or parentheses are nested")
    if token.kind == "name" and tokens[0].value == "(" and tokens[0].kind == "sign":
        return _parse_call(token, tokens, depth)
    if token.kind in ("name", "quoted"):
        return Node(NAME, token.value, at=token.at)
    if token.kind in ("number", "text"):
        return Node(NUMBER if token.kind == "number" else TEXT, token.value, at=token.at)
    if token.value == "-" and token.kind == "sign":
        return Node(MINUS, "-", (_parse_expression(tokens, MINUS_STRENGTH, depth + 1),), at=token.at)
    if token.value == "+" and token.kind == "sign":
        return _parse_expression(tokens, MINUS_STRENGTH, depth + 1)
    if token.value == "[" and token.kind == "sign":
        parts, _ = _parse_list(tokens, "]", depth)
        return Node(LIST, "[", parts, at=token.at)
    if token.value == "(" and token.kind == "sign":
        inner = _parse_expression(tokens, 0, depth + 1)
        if tokens[0].value in ("|", "||"):
            bar = tokens.popleft()
            inner = Node(BAR, bar.value, (inner, _parse_client(tokens, depth)), at=token.at)
        _expect(tokens, ")")
        return inner
    if token.value in ("|", "||"):
        raise _Refusal(token.at, "random effects cannot be read; write them as (1 + column | client)")
    raise _Refusal(token.at, f"a column, a number or a function is expected; {token.value!r} cannot be here")


def _parse_client(tokens: deque[_Token], depth: int) -> Node:
    client = _parse_expression(tokens, 0, depth + 1)
    if client.kind != NAME:
        raise _Refusal(client.at, "nested random effects are not supported; clients are one column, as in (1 | client)")
    return client


def _parse_list(tokens: deque[_Token], end: str, depth: int) -> tuple[tuple[Node, ...], tuple[str, ...]]:
    parts, labels = list[Node](), list[str]()
    while tokens[0].value != end:
        label = ""
        if tokens[0].kind == "name" and tokens[1].value == "=":
            label = tokens.popleft().value
            tokens.popleft()
        parts.append(_parse_expression(tokens, 0, depth + 1))
        labels.append(label)
        if tokens[0].value != end:
            _expect(tokens, ",")
    tokens.popleft()
    return tuple(parts), tuple(labels)


def _parse_call(token: _Token, tokens: deque[_Token], depth: int) -> Node:
    tokens.popleft()
    if token.value == "offset":
        raise _Refusal(
            token.at,
            "offset() is not supported; of a number, subtract the column from the target, and of a count, add it as a "
            "term, such as log(exposure)",
        )
    name = function_of(token.value)
    if name not in PARAMETERS and token.value not in CONTRASTS:
        raise _Refusal(
            token.at,
            f"{token.value!r} cannot be used in a formula; these functions can: {quote_list(sorted(PARAMETERS), 40)}",
        )
    parts, labels = _parse_list(tokens, ")", depth)
    return Node(CALL, token.value, parts, labels, at=token.at)


def _expect(tokens: deque[_Token], sign: str) -> None:
    token = tokens.popleft()
    if token.value != sign or token.kind != "sign":
        raise _Refusal(token.at, f"{sign!r} is expected; {token.value!r} cannot be here")


Terms = dict[frozenset[Node], Term]  # by the set of their factors


def _expand_sum(node: Node, start: Terms, bars: list[Node] | None) -> tuple[Term, ...]:
    """Return the terms of a sum, those of fewer factors first; terms in parentheses with a bar are added to `bars`."""
    terms = dict(start)
    _add_terms(node, terms, bars)
    return tuple(sorted(terms.values(), key=len))


def _add_terms(node: Node, terms: Terms, bars: list[Node] | None, nested: bool = False) -> None:
    """Add the terms of a sum, or remove those that it subtracts, in the order in which it is written."""
    for part in node.parts if node.kind == SUM else (node,):
        if part.kind == MINUS:
            removed = part.parts[0]
            if removed == Node(NUMBER, "0"):
                terms[frozenset()] = ()
                continue
            for key in _expand(removed):
                terms.pop(key, None)
        elif part.kind == SUM:
            inner: Terms = {}
            _add_terms(part, inner, bars, nested=True)
            terms |= inner | terms
        elif part == Node(NUMBER, "0") and not nested:
            terms.pop(frozenset(), None)
        elif part.kind == BAR and bars is not None:
            bars.append(part)
        else:
            for key, term in _expand(part).items():
                terms.setdefault(key, term)
    if len(terms) > MAX_TERMS:
        raise _Refusal(node.at, f"this makes more than {MAX_TERMS:,} terms")


def _expand(node: Node) -> Terms:
    """Return the terms of an expression."""
    if node.kind == SUM:
        terms: Terms = {}
        _add_terms(node, terms, None, nested=True)
        return terms
    if node == Node(NUMBER, "1"):
        return {frozenset(): ()}
    if node.kind == NAME or (node.kind == CALL and node.value not in CONTRASTS):
        _check_factor(node)
        return {frozenset([node]): (node,)}
    if node.kind == NUMBER:
        raise _Refusal(node.at, "a number cannot be a term, but for 1 and 0, the intercept; use I() for arithmetic")
    if node.kind == BAR:
        raise _Refusal(node.at, "random effects cannot be read here; add them to the other terms by +")
    if node.kind != OPERATOR or node.value not in (*POWERS, "*", "/", ":"):
        raise _Refusal(node.at, f"{str(node)[:40]!r} cannot be a term; use I() for arithmetic")
    left = _expand(node.parts[0])
    if node.value in POWERS:
        exponent = node.parts[1]
        if exponent.kind != NUMBER or not exponent.value.isdecimal() or not 1 <= int(exponent.value) <= MAX_COUNT:
            raise _Refusal(exponent.at, f"the power of terms is a whole number from 1 to {MAX_COUNT}")
        terms = left
        for _ in range(1, int(exponent.value)):
            before, terms = len(terms), {**terms, **_multiply(terms, left, node.at)}
            if len(terms) == before:
                break
        return terms
    right = _expand(node.parts[1])
    if node.value == "/":  # a / b is a + a:b, and (a + b) / c is a + b + a:b:c
        return {**left, **_multiply(_multiply_all(left, node.at), right, node.at)}
    products = _multiply(left, right, node.at)
    return products if node.value == ":" else {**left, **right, **products}


def _multiply(left: Terms, right: Terms, at: int) -> Terms:
    if len(left) * len(right) > MAX_TERMS:
        raise _Refusal(at, f"this makes more than {MAX_TERMS:,} terms")
    products: Terms = {}
    for a in left.values():
        for b in right.values():
            term = tuple(dict.fromkeys((*a, *b)))
            if len(term) > MAX_FACTORS:
                raise _Refusal(at, f"a term has at most {MAX_FACTORS} factors")
            products.setdefault(frozenset(term), term)
    return products


def _multiply_all(terms: Terms, at: int) -> Terms:
    product: Terms = {frozenset(): ()}
    for key, term in terms.items():
        product = _multiply(product, {key: term}, at)
    return product


def _check_factor(node: Node) -> None:
    """Refuse arguments that a function does not take, at their place."""
    if node.kind == NAME:
        return
    name = function_of(node.value)
    if not node.parts or node.labels[0]:
        raise _Refusal(node.at, f"the first argument of {node.value}() must be a column")
    if name in CATEGORIES and node.parts[0].kind != NAME:
        raise _Refusal(node.parts[0].at, f"the argument of {node.value}() must be a column, and cannot be computed")
    if name not in CATEGORIES:
        _check_arithmetic(node.parts[0])
    parameters, known = dict[str, Node](), PARAMETERS[name]
    for position, (label, part) in enumerate(zip(node.labels[1:], node.parts[1:])):
        label = label or (known[position] if position < len(known) and not any(node.labels[: position + 1]) else "")
        if label not in known or label in parameters:
            usable = f"takes {quote_list(known)}" if known else "takes one argument"
            written = repr(label or str(part))[:60]
            raise _Refusal(part.at, f"{node.value}() {usable} after its column; {written} cannot be here")
        parameters[label] = part
        is_right, expected = LITERALS[label]
        value = _literal(part)
        if value is None or not is_right(value):
            raise _Refusal(part.at, f"{label} of {node.value}() must be {expected}")
    if name in SPLINES:
        _check_spline(node, arguments_of(node))


def _check_spline(node: Node, arguments: dict[str, Any]) -> None:
    name, df = node.value, arguments.get("df")
    if ("df" in arguments) == ("knots" in arguments) and ("df" in arguments or name != "bs"):
        raise _Refusal(node.at, f"{name}() takes df or knots, and one of them only")
    least = {"ns": 1, "cr": 2, "bs": arguments.get("degree", 3)}[name]
    if df is not None and df < least:
        raise _Refusal(node.at, f"df of {name}() must be at least {least:g} here")
    lower, upper = arguments.get("lower_bound", -math.inf), arguments.get("upper_bound", math.inf)
    if any(a >= b for a, b in pairwise((lower, *arguments.get("knots", ()), upper))):
        raise _Refusal(node.at, f"knots of {name}() must rise, and lie between its bounds")


def _check_arithmetic(node: Node) -> None:
    """Refuse what is not arithmetic of columns and numbers."""
    is_call = node.kind == CALL and function_of(node.value) in {*ELEMENTWISE, "center", "scale", "standardize"}
    if is_call:
        _check_factor(node)
    elif node.kind == NUMBER:
        if not math.isfinite(float(node.value)):
            raise _Refusal(node.at, f"{node.value[:20]} is too large for a number")
    elif node.kind in (SUM, MINUS) or (node.kind == OPERATOR and node.value != ":"):
        for part in node.parts:
            _check_arithmetic(part)
    elif node.kind != NAME:
        what = ":" if node.kind == OPERATOR else str(node)[:40]
        raise _Refusal(node.at, f"{what!r} cannot be used inside a function")


def _literal(node: Node) -> Literal | None:
    """Return the value of a literal; None if it is none."""
    if node.kind == NUMBER:
        return float(node.value)
    if node.kind == MINUS:
        value = _literal(node.parts[0])
        return -value if isinstance(value, float) else None
    if node.kind == LIST:
        numbers = [_literal(part) for part in node.parts]
        return [value for value in numbers if isinstance(value, float)] if _are_floats(numbers) else None
    if node.kind == TEXT:
        return node.value[1:-1]
    if node.kind == NAME and node.value.title() in ("True", "False"):
        return node.value.title() == "True"
    if node.kind == NAME and node.value in CONTRASTS:
        return node.value, ""
    if node.kind == CALL and node.value == CONTRASTS[0] and len(node.parts) == 1 and node.labels[0] in ("", "base"):
        base = _literal(node.parts[0])
        return (node.value, base) if isinstance(base, str) else None
    return None


def _are_floats(values: Iterable[object]) -> bool:
    return all(isinstance(value, float) for value in values)


def _is_count(value: Literal) -> bool:
    return isinstance(value, float) and value in range(1, MAX_COUNT + 1)


def _is_number(value: Literal) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def _is_rising(value: Literal) -> bool:
    return isinstance(value, list) and all(map(_is_number, value)) and sorted(set(value)) == value != []


_COUNT = _is_count, f"a whole number from 1 to {MAX_COUNT}"
_FLAG = (lambda value: isinstance(value, bool)), "True or False"
_NUMBER = _is_number, "a number"
LITERALS: dict[str, tuple[Callable[[Literal], bool], str]] = {
    "df": _COUNT,
    "degree": _COUNT,
    "knots": (_is_rising, "a list of rising numbers, such as [0, 1]"),
    "lower_bound": _NUMBER,
    "upper_bound": _NUMBER,
    "raw": _FLAG,
    "center": _FLAG,
    "scale": _FLAG,
    "contrasts": ((lambda value: isinstance(value, tuple)), "contr.treatment('level') or contr.sum"),
}


def function_of(name: str) -> str:
    """Return the function that a name stands for: np.log is log."""
    plain = name.removeprefix("np.")
    return plain if plain in ELEMENTWISE else name


def arguments_of(call: Node) -> dict[str, Any]:
    """Return the literal arguments of a checked call, by name."""
    known = PARAMETERS[function_of(call.value)]
    pairs = zip(call.labels[1:], call.parts[1:])
    literals = {label or known[k]: _literal(part) for k, (label, part) in enumerate(pairs)}
    return {name: value for name, value in literals.items() if value is not None}


def walk(node: Node) -> Iterator[Node]:
    """Yield the columns and calls of a factor; the names among literals are no columns."""
    yield node
    for part in node.parts[:1] if node.kind == CALL else node.parts:
        yield from walk(part)


def columns_of(factors: Iterable[Node]) -> set[str]:
    """Return the columns that factors name."""
    return {node.value for factor in factors for node in walk(factor) if node.kind == NAME}


def learns(node: Node) -> bool:
    """Whether a part is a call that learns from the rows."""
    if node.kind != CALL or function_of(node.value) not in STATEFUL:
        return False
    arguments = arguments_of(node)
    return not (node.value in SPLINES and arguments.keys() >= FIXED_SPLINE) and not arguments.get("raw")


def _write(node: Node, strength: int = 0) -> str:
    """Return a part as it is written, with parentheses where a stronger operator is around it."""
    if node.kind == NAME:
        return node.value if re.fullmatch(r"[^\W\d][\w.]*", node.value) else f"`{node.value}`"
    if node.kind == LIST:
        return f"[{', '.join(map(_write, node.parts))}]"
    if node.kind == CALL:
        parts = (f"{label}={_write(part)}" if label else _write(part) for label, part in zip(node.labels, node.parts))
        return f"{node.value}({', '.join(parts)})"
    if node.kind == BAR:
        return f"({_write(node.parts[0])} {node.value} {_write(node.parts[1])})"
    if node.kind == SUM:
        own = STRENGTH["+"]
        first, *others = node.parts
        text = _write(first, own) + "".join(
            f" - {_write(part.parts[0], own + 1)}" if part.kind == MINUS else f" + {_write(part, own + 1)}"
            for part in others
        )
    elif node.kind == MINUS:
        own, text = MINUS_STRENGTH, f"-{_write(node.parts[0], MINUS_STRENGTH)}"
    elif node.kind == OPERATOR:
        own = STRENGTH[node.value]
        is_power = node.value in POWERS
        text = f"{_write(node.parts[0], own + is_power)} {node.value} {_write(node.parts[1], own + (not is_power))}"
    else:
        return node.value
    return f"({text})" if own < strength else text
