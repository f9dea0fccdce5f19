"""Columns of formulas against other implementations: formulaic, patsy, and R's printed output."""

import numpy as np
import pandas as pd
import patsy
import pytest

from mooring.core.errors import RequestError
from mooring.data.formula_columns import RowPlaces, evaluate_terms
from mooring.data.formula_parser import parse_formula

formulaic = pytest.importorskip("formulaic")
FACTORS = [
    *("x", "z", "g", "h", "k", "`a b`", "C(z)", "log(z)", "np.sqrt(z)", "I(x**2)", "I(-x / (z + 1) * 2 - 1)"),
    *("scale(x)", "scale(z, center=False)", "poly(x, 2)", "poly(x, degree=3)", "bs(x, df=4)", "bs(z, degree=2, df=3)"),
    *("center(x)", "bs(x, knots=[-0.5, 0.5])", "cr(x, df=3)", "exp(center(x) / 2)", "C(g, contr.sum)"),
    *("C(h, contr.treatment('v'))", "bs(x)", "cr(x, knots=[0], lower_bound=-3, upper_bound=3)", "standardize(x + z)"),
]  # fmt: skip


@pytest.fixture(scope="module")
def table():
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"x": rng.normal(size=60).clip(-2.9, 2.9), "z": rng.integers(1, 5, 60), "a b": rng.random(60)})
    levels = {"g": list("abc"), "h": list("uv"), "k": list("pqr")}
    return frame.assign(**{name: pd.Categorical(rng.choice(values, 60)) for name, values in levels.items()})


def columns(text, table, known=None):
    items = table.items()
    inputs = {name: column.array if column.dtype == "category" else column.to_numpy(float) for name, column in items}
    rows = RowPlaces(np.arange(len(table)), lambda position: f"row {position + 1}")
    return evaluate_terms(parse_formula(f"y ~ {text}").fixed, inputs, rows, known)


def draw(rng, depth=0):
    """A random sum of terms."""
    if depth == 2 or rng.random() < 0.3:
        return str(rng.choice(FACTORS))
    left, right = draw(rng, depth + 1), draw(rng, depth + 1)
    sign = rng.choice(["+", "-", "*", ":", "/", "**"], p=[0.4, 0.05, 0.2, 0.15, 0.1, 0.1])
    if sign == "**":
        return f"({left} + {right})**{rng.integers(1, 4)}"
    return f"({left}) {sign} ({right})" if sign in ("*", ":", "/") else f"{left} {sign} {right}"


@pytest.mark.parametrize("seed", range(150))
def test_random_formulas_make_the_columns_of_formulaic(seed, table):
    rng = np.random.default_rng(seed)
    text = " + ".join(draw(rng) for _ in range(rng.integers(1, 4))) + rng.choice(["", " - 1", " + 0", " + 1"])
    ours, learned = columns(text, table)
    theirs = formulaic.model_matrix(text, table, context={})
    assert sorted(ours) == sorted(map(str, theirs.columns))
    for name in ours:
        np.testing.assert_allclose(ours[name], theirs[name].to_numpy(float), rtol=1e-8, atol=1e-9, err_msg=name)
    later, _ = columns(text, table[17:29], learned)
    np.testing.assert_allclose(later, ours[17:29], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("df", [1, 2, 3, 6])
def test_ns_spans_natural_splines(df, table):
    ours, _ = columns(f"ns(x, df={df})", table)
    x = table["x"].to_numpy()
    knots = np.quantile(x, np.linspace(0, 1, df + 1))
    theirs = np.ones((len(x), 1)) if df == 1 else np.asarray(
        patsy.cr(x, knots=knots[1:-1], lower_bound=knots[0], upper_bound=knots[-1])
    )  # fmt: skip
    theirs = np.column_stack([theirs, x])
    assert ours.shape[1] == df + 1 == np.linalg.matrix_rank(ours.to_numpy())
    fitted = ours.to_numpy() @ np.linalg.lstsq(ours.to_numpy(), theirs, rcond=None)[0]
    np.testing.assert_allclose(fitted, theirs, atol=1e-9)


def test_poly_is_that_of_r():
    """As by QR of the powers, the definition of R: each column rises at the right end."""
    ours, _ = columns("poly(x, 2)", pd.DataFrame({"x": [1.0, 2, 4, 7]}))
    powers = np.linalg.qr(np.vander([1.0, 2, 4, 7], 3, increasing=True))[0][:, 1:]
    np.testing.assert_allclose(np.abs(ours.to_numpy()[:, 1:]), np.abs(powers), atol=1e-12)
    assert (ours.to_numpy()[-1, 1:] > 0).all()


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("(x + z)^2", "x + z + x:z"),
        ("x^2", "x"),
        ("x / z", "x + x:z"),
        ("x * z - x:z", "x + z"),
        ("x * z - z + z", "x + x:z + z"),
        ("(x + z + g)^3 - x:z:g", "(x + z + g)^2"),
        ("x + (z - x)", "x + z"),
        ("x + x + I(x^2)", "x + I(x ^ 2)"),
        ("factor(g)", "factor(g) + factor(g)"),
        ("x + 0 + 1", "x"),
    ],
)
def test_operators_are_those_of_r(text, same):
    assert set(parse_formula(f"y ~ {text}").fixed) == set(parse_formula(f"y ~ {same}").fixed)
    assert parse_formula("y ~ I(x^2)").fixed[1] != parse_formula("y ~ x^2").fixed[1]


def test_squares_and_comparisons_inside_i(table):
    ours, _ = columns("I(x^2) + I(-x^2) + I(x > 0) + I(2^3^0.5 * x)", table)
    x = table["x"]
    expected = np.column_stack([np.ones(60), x**2, -(x**2), x > 0, 2 ** (3**0.5) * x])
    np.testing.assert_allclose(ours, expected)


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("y ~ open('x')", 5, "'open' cannot be used in a formula; these functions can: 'C', 'I'"),
        ("log(y) ~ x", 1, "'log(y) ~ x'.*the target is one column.*predictions are on the scale"),
        ("y ~ x + offset(z)", 9, "offset() is not supported.*subtract the column from the target"),
        ("y ~ x + .", 9, "'.' does not stand for all of them"),
        ("y ~ x + 2", 9, "a number cannot be a term"),
        ("y ~ x; import os", 6, "';' cannot be used"),
        ("y ~ x z", 7, "an operator is expected, not 'z'"),
        ("y ~ bs(x, df=two)", 14, "df of bs() must be a whole number from 1 to 50"),
        ("y ~ bs(x, knots=[1, 0])", 17, "knots of bs() must be a list of rising numbers"),
        ("y ~ bs(x, knots=[1], upper_bound=0)", 5, "knots of bs() must rise, and lie between"),
        ("y ~ bs(x, df=2)", 5, "df of bs() must be at least 3"),
        ("y ~ ns(x)", 5, "ns() takes df or knots"),
        ("y ~ bs(x, df=4, extrapolation='clip')", 31, "'extrapolation' cannot be here"),
        ("y ~ log(x, 2)", 12, "log() takes one argument"),
        ("y ~ log(x:z)", 10, "':' cannot be used inside a function"),
        ("y ~ C(x + 1)", 7, "the argument of C() must be a column"),
        ("y ~ C(x, sum)", 10, "contrasts of C() must be contr.treatment"),
        ("y ~ (a + b + c + d)^99", 21, "the power of terms"),
        ("y ~ x + (1 | a/b)", 15, "nested random effects"),
        ("y ~ x + 1 | g", 11, "an operator is expected, not '|'"),
        ("y ~ x * (1 | g)", 9, "add them to the other terms by +"),
        ("y ~ `x", 5, "'`' cannot be used"),
        ("y ~ " + "(" * 60 + "x" + ")" * 60, 46, "more than 40 operators or parentheses"),
        ("y ~ (a+b+c+d+e+f+g+h+i+j+k+l)^8", 30, "this makes more than 2,000 terms"),
        ("y ~ " + "*".join("abcdefghij"), 20, "a term has at most 8 factors"),
        ("y ~ {x + 1}", 5, "'{' cannot be used"),
        ("y ~ I(x)(1)", 9, "an operator is expected, not '('"),
        ("y ~ log()", 5, "the first argument of log() must be a column"),
        ("y ~ I(1e999 * x)", 7, "is too large for a number"),
    ],
)
def test_a_refusal_has_its_place(text, place, words):
    with pytest.raises(RequestError) as error:
        parse_formula(text)
    message = str(error.value)
    assert f"at character {place}: " in message and "\n" not in message and len(message) < 700
    parts = words.split(".*")
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("log(g)", "column 'g' holds categories"),
        ("bs(z, df=20)", "'bs(z, df=20)' of the formula: its column has too few different values"),
        ("poly(z, 4)", "needs more than 4 different values"),
        ("Intercept", "two columns of the formula are named 'Intercept'"),
        ("C(g, contr.treatment('q'))", "there is no level 'q'"),
        ("poly(log(x), 2)", "of the formula is not a finite number"),
        ("scale(I(0 * x))", "not all of them the same"),
        ("I(x^999)", "of the formula is not a finite number"),
    ],
)
def test_values_that_do_not_fit_are_named(text, words, table):
    with pytest.raises(RequestError) as error:
        columns(text, table.assign(Intercept=1.0))
    assert words in str(error.value)


def test_learned_numbers_must_be_there(table):
    with pytest.raises(RequestError, match=r"the schema has no numbers for 'center.x.'"):
        columns("center(x)", table, {})
    with pytest.raises(RequestError, match="row 1, column 'z': the value '9' is in no row"):
        columns("C(z)", table.assign(z=9.0), columns("C(z)", table)[1])
