"""Which kind of target a column is."""

import numpy as np
import pandas as pd
import pytest

from mooring.core.errors import RequestError
from mooring.data.target import encode_target, read_target


def place(position):
    return f"row {position + 1}"


def read(values, name="outcome", kind="auto"):
    return read_target(pd.Series(values, name=name), kind, place, "table")


@pytest.mark.parametrize(
    ("values", "name", "kind", "classes"),
    [
        ([0, 1, 0, 1], "outcome", "binary", ("0", "1")),
        ([0.0, 1.0, 0.0], "outcome", "binary", ("0", "1")),
        ([1, 2, 2], "outcome", "binary", ("1", "2")),
        ([True, False], "outcome", "binary", ("False", "True")),
        (["N", "Y", "N"], "outcome", "binary", ("N", "Y")),
        (["low", "mid", "high"] * 4, "outcome", "classes", ("high", "low", "mid")),
        ([0, 1, 2, 10] * 4, "digit", "classes", ("0", "1", "2", "10")),
        ([0, 1, 2, 3], "number_of_visits", "regression", ()),
        ([0, 1, 2, 3], "age", "regression", ()),
        ([-1, 0, 1, 5], "outcome", "regression", ()),
        ([0, 1, 500], "outcome", "regression", ()),
        (list(range(30)), "outcome", "regression", ()),
        ([0.0, 1.0, 2.0], "outcome", "regression", ()),
        ([0.5, 1.5, 2.25], "outcome", "regression", ()),
    ],
)
def test_auto(values, name, kind, classes):
    found = read(values, name)
    assert (found.kind, found.classes) == (kind, classes)
    if classes:
        assert [classes[code] for code in found.y] == [str(v if isinstance(v, (str, bool)) else int(v)) for v in values]
    else:
        np.testing.assert_array_equal(found.y, values)


def test_the_kind_may_be_given():
    assert read([0, 1, 2, 3], kind="regression").kind == "regression"
    assert read([0, 1, 2, 3], kind="count").kind == "count"
    assert read([0.5, 1.5, 2.5], kind="classes").classes == ("0.5", "1.5", "2.5")
    assert read([0, 1, 1], kind="regression").y.dtype == float


def test_codes_taken_as_classes_are_said():
    assert any("taken as classes" in note for note in read([0, 1, 2, 3]).notes)
    assert any("1 stands for 'Y'" in note for note in read(["N", "Y"]).notes)


def test_refusals():
    with pytest.raises(RequestError, match="one class only, 'a'"):
        read(["a", "a"])
    with pytest.raises(RequestError, match="looks like a key"):
        read([f"person {i}" for i in range(40)])
    with pytest.raises(RequestError, match="3 in every row"):
        read([3.0, 3.0], kind="regression")


def test_later_targets_use_the_first_codes():
    codes = encode_target(pd.Series(["c", "a"], name="t"), "classes", ("a", "b", "c"), place)
    assert codes.tolist() == [2, 0]
    with pytest.raises(RequestError, match=r"row 2, target column 't': 'z' is not one of the classes 'a', 'b'"):
        encode_target(pd.Series(["a", "z"], name="t"), "binary", ("a", "b"), place)
