"""Mutated formulas run no code: they are refused in one sentence, or make columns of a table."""

import numpy as np
import pandas as pd
import pytest

from mooring.core.errors import RequestError
from mooring.data.formula_parser import parse_formula
from mooring.data.formulas import FormulaState, apply_formula, learn_formula
from tests.support.audit import watch

FORMULAS = [
    "y ~ x + z + (1 | g)",
    "y ~ x * h + (1 + x | g)",
    "y ~ C(h) + bs(x, df=4) + ns(z, knots=[0, 1]) + (x || g)",
    "y ~ poly(x, 2) / scale(z) - 1 + 1",
    "y ~ (x + z + h)^2 + I(x^2) + np.log1p(exp(z)) + (0 + x | g)",
    "y ~ `a b` + center(`a b`):h + cr(x, df=3)",
    "y ~ factor(h, contr.treatment('v')) + log(I(x > 0) + 1)",
    "y ~ bs(x, knots=[0.0], lower_bound=-9, upper_bound=9, degree=2)",
]
FRAGMENTS = [
    *("__import__('os').system('id')", "eval('1')", "exec(compile('1', '', 'exec'))", "open('/etc/passwd')"),
    *("x.__class__.__mro__", "{x + 1}", "[c for c in ().__class__.__base__.__subclasses__()]", "f'{x}'"),
    *("np.load('x')", "pd.read_pickle('x')", "@x", "`__import__('os')`", "np.__builtins__", "globals()", "lambda: 1"),
    *("getattr(x, 'T')", "x if z else x", "log", "bs(", "poly(x, 2)", "C(", "I(", ")", "(", "|", "||", "~", "^", "**"),
    *("*", "/", ":", "+", "-", ",", "=", "[", "]", "`", "'", '"', "1", "0", "9" * 40, "1e400", "x", "z", "h", "g", "y"),
    *("a b", "\x1b[31m", "\0", "\n", ";", "%in%", "\u202e", "é", "𝑥", "٣", "df=", "knots=[", "offset(x)", "True", "."),
    *("..", "\\", "#", "$", "((((((((((", "-" * 30, "x*" * 30),
]  # fmt: skip


@pytest.fixture(scope="module")
def table():
    rng = np.random.default_rng(0)
    numbers = {name: rng.normal(size=40) for name in ("x", "z", "a b", "y")}
    return pd.DataFrame(numbers | {name: rng.choice(["u", "v", "w"], 40) for name in ("g", "h")})


def mutate(rng, text):
    for _ in range(rng.integers(1, 5)):
        start, end = sorted(rng.integers(0, len(text) + 1, 2))
        piece = str(rng.choice(FRAGMENTS)) if rng.random() < 0.6 else FORMULAS[rng.integers(len(FORMULAS))][start:end]
        kind = rng.integers(4)
        if kind == 0:  # insert
            text = text[:start] + piece + text[start:]
        elif kind == 1:  # replace a short part
            text = text[:start] + piece + text[min(end, start + 6) :]
        elif kind == 2:  # remove a short part
            text = text[:start] + text[min(end, start + 4) :]
        else:  # repeat
            text = text[:end] + text[start:end] + text[end:]
    return text


def place(position):
    return f"row {position + 1}"


def learn_and_apply(text, table):
    """Return whether a formula makes columns."""
    try:
        state, columns, _ = learn_formula(parse_formula(text), table, place, "table")
    except RequestError as refusal:
        assert len(str(refusal)) < 2_000
        return False
    later, _ = apply_formula(FormulaState.model_validate_json(state.model_dump_json()), table, place)
    np.testing.assert_allclose(later, columns, rtol=1e-9, atol=1e-9)
    return True


@pytest.mark.parametrize(
    ("count", "seed"), [(3_000, 0), pytest.param(100_000, 1, marks=pytest.mark.slow)], ids=["3,000", "100,000"]
)
def test_mutated_formulas_run_no_code(count, seed, table):
    rng = np.random.default_rng(seed)
    for text in FORMULAS:  # lazy imports of libraries are over
        assert learn_and_apply(text, table), text
    understood = 0
    with watch() as seen:
        for _ in range(count):
            text = mutate(rng, FORMULAS[rng.integers(len(FORMULAS))])
            understood += learn_and_apply(text, table)
            assert not seen, f"{text!r}: {seen}"
    assert 0.02 * count < understood < 0.5 * count


def test_the_watch_sees_code():
    """The hook itself: what it must find is found."""
    with watch() as seen:
        eval("1 + 1")
        compile("1", "x", "eval")
        with pytest.raises(ModuleNotFoundError):
            __import__("a_module_that_is_nowhere")
    assert [event.split(":")[0] for event in seen[:1]] == ["compile"]
    assert {"compile", "exec", "import"} <= {event.split(":")[0] for event in seen}
