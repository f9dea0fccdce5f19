"""Coefficients in the units of the data are those of a fit on the raw columns."""

import numpy as np
import pytest
import statsmodels.api as sm

import mooring
from mooring.core.errors import RequestError
from mooring.data.schema import encode_table
from tests.support.homes import design, homes

ALONE = {"algorithm": "local", "settings": {"ridge": 0.0}, "rounds": 1, "threads": 1}


def test_a_regression_alone_is_least_squares_on_the_raw_columns():
    frame = homes()
    result = mooring.fit(frame, client="town", target="price", drop=["sold", "band"], **ALONE)
    table = result.coefficients
    assert list(table.columns) == ["client", "term", "coefficient", "global", "deviation"]
    assert list(table["term"][:4]) == ["(intercept)", "area", "share", "garden=yes"]
    for town, mine in frame[frame["split"] == "train"].groupby("town"):
        fitted = sm.OLS(mine["price"].to_numpy(), design(mine)).fit()
        found = table[table["client"] == town]["coefficient"].to_numpy()
        # The condition number of the raw columns is about 1e7: least squares on them has about 9 digits.
        np.testing.assert_allclose(found, fitted.params, rtol=1e-6)
    np.testing.assert_allclose(table["deviation"], table["coefficient"] - table["global"])


def test_the_common_ones_are_those_of_the_common_model():
    result = mooring.fit(homes(), client="town", target="price", drop=["sold", "band"], rounds=3, threads=1)
    table = result.coefficients
    common = table[table["client"] == "town 0"]["global"].to_numpy()
    rows = homes(seed=1)
    scaled = result.job.clients.schema
    x, _ = encode_table(rows, scaled)
    np.testing.assert_allclose(design(rows) @ common, result.predict(x).numpy(), rtol=1e-9)


def test_two_classes_are_in_log_odds_of_the_raw_columns():
    frame = homes(n=400)
    how = ALONE | {"task": {"ridge": 0.0}}
    result = mooring.fit(frame, client="town", target="sold", drop=["price", "band"], **how)
    for town, mine in frame[frame["split"] == "train"].groupby("town"):  # noqa: B007
        fitted = sm.Logit((mine["sold"] == "sold").to_numpy(float), design(mine)).fit(disp=0, tol=1e-12, maxiter=100)
        found = result.coefficients.query("client == @town")["coefficient"].to_numpy()
        np.testing.assert_allclose(
            found, fitted.params, rtol=1e-5
        )  # Newton's method on ill-scaled columns: ~ 1e-16 1e7


def test_three_classes_have_coefficients_each():
    """Scores of classes have a free constant: the differences of classes give the model's probabilities."""
    frame = homes(n=100, towns=2)
    result = mooring.fit(frame, client="town", target="band", drop=["price", "sold"], **ALONE)
    table = result.coefficients.query("client == 'town 0'")
    assert list(table["class"].unique()) == ["a", "b", "c"]
    found = table.pivot(index="class", columns="term", values="coefficient")
    found = found[["(intercept)", "area", "share", "garden=yes"]].to_numpy()
    rows = frame[frame["town"] == "town 0"]
    score = design(rows) @ found.T
    prob = np.exp(score) / np.exp(score).sum(1, keepdims=True)
    x, _ = encode_table(rows, result.job.clients.schema)
    np.testing.assert_allclose(prob, result.predict(x, "town 0").numpy(), rtol=1e-9)


def test_a_model_without_coefficients_says_so():
    result = mooring.fit(homes(), client="town", target="price", drop=["sold", "band"], task="kernel", rounds=1)
    with pytest.raises(RequestError, match="task 'kernel' has no coefficients of columns"):
        result.coefficients  # noqa: B018


def test_rows_given_as_arrays_keep_their_units():
    rng = np.random.default_rng(0)
    x, groups = rng.normal(5, 3, size=(120, 2)), np.repeat(["a", "b"], 60)
    y = 100 + x @ [3.0, -2.0] + (groups == "b") * 7
    table = mooring.fit((x, y, groups), **ALONE).coefficients
    np.testing.assert_allclose(table["coefficient"], [100, 3, -2, 107, 3, -2], rtol=1e-9)
