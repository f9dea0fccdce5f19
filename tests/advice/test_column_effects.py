"""Partial dependence on columns whose effects are not linear, from a table with one such effect."""

import numpy as np
import pandas as pd
import pytest

import mooring
from mooring.advice.reporting.sentences import describe_effects


def bent_table(clients=6, rows=60):
    """y = 2 + v^2 + u with v from 10 to 30 in its own units; u is linear."""
    rng = np.random.default_rng(0)
    v, u = rng.uniform(10, 30, clients * rows), rng.normal(size=clients * rows)
    y = 2 + ((v - 20) / 5) ** 2 + u + 0.1 * rng.normal(size=len(v))
    return pd.DataFrame({"site": np.repeat([f"s{i}" for i in range(clients)], rows), "v": v, "u": u, "y": y})


@pytest.fixture(scope="module")
def advice():
    return mooring.advise(bent_table(), client="site", target="y", shape="spline", theory=False, folds=3)


def test_the_curved_column_is_found_and_its_effect_is_the_planted_one(advice):
    (effect,) = advice.column_effects
    assert effect["column"] == "v" and effect["spline"]
    values, found = np.array(effect["values"]), np.array(effect["prediction"])
    assert 10 < values[0] < 12 and 28 < values[-1] < 30
    planted = ((values - 20) / 5) ** 2
    np.testing.assert_allclose(found - found.mean(), planted - planted.mean(), atol=0.2)
    departure = np.sqrt(np.mean((found - np.array(effect["linear"])) ** 2))
    assert effect["curvature"] == pytest.approx(departure) and departure > 0.9


def test_the_record_has_the_effects_and_a_sentence_names_them(advice):
    assert advice.record["column_effects"] == advice.column_effects
    assert advice.words["effects"] == "The effect of v is not linear."
    three = [{"column": name} for name in ("age", "dose", "time")]
    assert describe_effects(three) == "The effects of age, dose and time are not linear, most of all that of age."
    assert describe_effects([]) == ""


def test_linear_columns_have_no_effects_to_show():
    table = bent_table(4, 20)
    assert mooring.advise(table, client="site", target="y", shape="linear", theory=False, folds=2).column_effects == []
