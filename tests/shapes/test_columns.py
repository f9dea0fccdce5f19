import json
from functools import reduce
from operator import add

import numpy as np
import pytest
import torch

from mooring.core.errors import RequestError
from mooring.shapes.columns import ExtraColumn, ShapedColumns, choose_splines, partial_dependence
from mooring.shapes.quantiles import count_values
from mooring.shapes.splines import spline_basis
from tests.support.trees import draw_trees

RNG = np.random.default_rng(0)
X = torch.from_numpy(RNG.standard_normal((200, 4)))
KNOTS = (-1.0, 0.0, 0.5, 1.5)


def describe(outputs=1):
    shape = ShapedColumns(4, ((1, KNOTS), (3, (-1.0, 0.0, 1.0))), ((0, 2),), draw_trees(outputs=outputs))
    return shape.standardize(shape.sum_extra(X))


def test_base_columns_come_first_then_standardized_extra_ones():
    shape = describe()
    z = shape(X)
    assert z.shape == (200, shape.width) == (200, 4 + 2 + 1 + 1 + 1) and z.dtype == torch.float64
    assert (z[:, :4] == X).all()
    np.testing.assert_allclose(z[:, 4:].mean(0), 0, atol=1e-12)
    np.testing.assert_allclose(z[:, 4:].std(0, correction=0), 1, atol=1e-12)
    raw = spline_basis(X[:, 1], KNOTS)
    np.testing.assert_allclose(z[:, 4:6], (raw - raw.mean(0)) / raw.std(0, correction=0), atol=1e-12)
    score = shape.booster.score(X.numpy())[:, 0]
    np.testing.assert_allclose(z[:, -1], (score - score.mean()) / score.std(), atol=1e-12)


def test_sums_of_clients_give_the_columns_of_the_pooled_rows():
    shape = ShapedColumns(4, ((1, KNOTS),), ((0, 2),), draw_trees(outputs=1))
    parts = reduce(add, [shape.sum_extra(part) for part in X.split([17, 3, 180])])
    np.testing.assert_allclose(shape.standardize(parts)(X), shape.standardize(shape.sum_extra(X))(X), atol=1e-12)


def test_names_and_groups():
    shape = describe(outputs=2)
    assert shape.names(["age", "dose", "sex", "bmi"])[4:] == [
        "dose, spline 1",
        "dose, spline 2",
        "bmi, spline 1",
        "age x sex",
        "boosted score 1",
        "boosted score 2",
    ]
    assert shape.groups[0] == ExtraColumn("spline", (1,), 1) and shape.groups[3] == ExtraColumn("product", (0, 2), 1)
    assert describe().names(list("abcd"))[-1] == "boosted score"
    assert ShapedColumns(2).names(["a", "b"]) == ["a", "b"]


def test_given_scores_replace_those_of_the_booster():
    shape = describe()
    scores = shape.scales[-1] * torch.linspace(-5, 5, 200, dtype=torch.float64)[:, None]
    z = shape(X, scores)
    assert (z[:, :-1] == shape(X)[:, :-1]).all()
    np.testing.assert_allclose(z[:, -1].diff(), 10 / 199)


def test_boosted_scores_are_limited_by_those_of_the_training_rows():
    """Where trees of parts of the rows hardly split, those of all rows may differ a million times as much."""
    shape = describe()
    hardly = torch.from_numpy(shape.booster.base) + 1e-6 * torch.arange(200.0).double()[:, None]
    shape = shape.standardize(shape.sum_extra(X, hardly))
    assert float(shape(X, hardly)[:, -1].abs().max()) < 2
    assert float(shape(X)[:, -1].abs().max()) == 10


def test_any_leading_shape_and_32_bits():
    shape = describe()
    blocks = shape(X.reshape(2, 5, 20, 4))
    assert (blocks.reshape(200, -1) == shape(X)).all()
    single = shape(X.float())
    assert single.dtype == torch.float32
    np.testing.assert_allclose(single[:, :-1], shape(X)[:, :-1], atol=1e-4)
    assert shape(X[:0]).shape == (0, shape.width)
    assert (ShapedColumns(4)(X) == X).all()


def test_json_gives_back_an_equal_description():
    shape = describe()
    copy = ShapedColumns.from_json(json.loads(json.dumps(shape.as_json(), allow_nan=False)))
    assert copy == shape and hash(copy) == hash(shape) and (copy(X) == shape(X)).all()


@pytest.mark.parametrize(
    "change, words",
    [
        ({"splines": [[9, list(KNOTS)]]}, "from 0 to 3"),
        ({"splines": [[1, [0.0, 0.0, 1.0]]]}, "rising knots"),
        ({"splines": [[1, [0.0, float("nan"), 1.0]]]}, "rising knots"),
        ({"splines": 3}, "not extra columns that Mooring wrote"),
        ({"inputs": "4"}, "not extra columns that Mooring wrote"),
        ({"inputs": 5}, "booster was fitted on 4 columns instead of 5"),
        ({"scales": [0.0] * 5}, "scales must be > 0"),
        ({"centers": [0.0]}, "5 finite centers"),
        ({"booster": {"features": 4}}, r"m\.json: not trees that Mooring wrote"),
    ],
)
def test_damaged_descriptions_are_refused(change, words):
    with pytest.raises(RequestError, match=words) as error:
        ShapedColumns.from_json(describe().as_json() | change, "m.json")
    assert "\n" not in str(error.value)
    with pytest.raises(RequestError, match="an object was expected"):
        ShapedColumns.from_json([])


def test_other_widths_are_refused():
    with pytest.raises(RequestError, match="4 base columns are needed, got 3"):
        describe()(X[:, :3])


def test_constant_columns_are_zero_not_nan():
    x = X.clone()
    x[:, 1] = 0.3
    x[:, 0] = 0
    shape = ShapedColumns(4, ((1, KNOTS),), ((0, 2),))
    z = shape.standardize(shape.sum_extra(x))(x)
    np.testing.assert_allclose(z[:, 4:], 0, atol=1e-12)


def test_splines_are_chosen_for_columns_with_many_values():
    x = X.numpy().copy()
    x[:, 0] = 1.5
    x[:, 1] = np.sign(x[:, 1])
    counts = count_values(x)
    assert [i for i, _ in choose_splines(counts)] == [2, 3]
    assert [i for i, _ in choose_splines(counts, numeric=[0, 3])] == [3]
    assert choose_splines(counts, numeric=[]) == ()
    assert len(choose_splines(counts, max_knots=3)[0][1]) == 3


def test_partial_dependence_includes_products_and_the_booster():
    shape, values = describe(), torch.linspace(-2, 2, 5).double()
    dependence = partial_dependence(shape, lambda z: z[:, -2:], X, 0, values)
    for value, row in zip(values, dependence):
        x = X.clone()
        x[:, 0] = value
        np.testing.assert_allclose(row, shape(x)[:, -2:].mean(0))
    assert dependence.std(0).min() > 0
