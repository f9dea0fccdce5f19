"""`mooring.open`: a finished run of any kind says again what it said."""

import numpy as np
import pandas as pd
import pytest
import torch

import mooring
from mooring.core.errors import RequestError
from tests.support.homes import homes


@pytest.fixture
def frame():
    return homes().drop(columns=["sold", "band", "split"])


HOW = {"client": "town", "target": "price", "threads": 1}


def test_a_fit(frame, tmp_path):
    result = mooring.fit(frame, **HOW, rounds=3, out=tmp_path / "run")
    run = mooring.open(tmp_path / "run")
    assert run.purpose == "fit" and run.method == "fedprox_personal" and "4 clients" in repr(run)
    pd.testing.assert_frame_equal(run.coefficients, result.coefficients)
    assert run.summary["personal"] == result.summary["personal"]
    assert list(run.clients["client"]) == list(run.models) == list(run.names) == list(result.models)
    for name, w in result.models.items():
        assert torch.equal(run.models[name], w)
    predicted = run.predict(frame)
    said, _ = mooring.predict(tmp_path / "run", frame)
    pd.testing.assert_frame_equal(predicted, said)
    # A prediction is what the coefficients say.
    terms = run.coefficients.pivot(index="client", columns="term", values="coefficient").loc[frame["town"]]
    by_hand = terms["(intercept)"].to_numpy() + terms["area"].to_numpy() * frame["area"]
    by_hand += terms["share"].to_numpy() * frame["share"] + terms["garden=yes"].to_numpy() * (frame["garden"] == "yes")
    np.testing.assert_allclose(predicted["price"], by_hand, rtol=1e-9)
    with pytest.raises(RequestError, match="is no network"):
        run.module("town 0")
    with pytest.raises(RequestError, match=r"unknown client 'town 9'.*Did you mean"):
        run.vector("town 9")
    with pytest.raises(RequestError, match="no comparison"):
        mooring.open(tmp_path / "run", method="local")


def test_a_comparison_gives_the_method_asked_for_or_the_best_on_validation_rows(frame, tmp_path):
    told = mooring.compare(frame, ["local", "pooled"], **HOW, rounds=2, out=tmp_path / "run")
    best = told.methods.sort_values("validation_loss")["method"].iloc[0]
    run = mooring.open(tmp_path / "run")
    assert run.method == best and best in run.notes[0]
    other = mooring.open(tmp_path / "run", method="pooled")
    assert other.method == "pooled" and other.notes == []
    assert other.summary["test_loss"] == told.methods.set_index("method").loc["pooled", "test_loss"]
    assert list(other.clients["client"]) == list(other.names)
    assert (other.coefficients["deviation"].abs() < 1e-9 * other.coefficients["coefficient"].abs()).all()
    said, notes = mooring.predict(tmp_path / "run", frame, method="pooled")
    pd.testing.assert_frame_equal(other.predict(frame), said)
    assert notes == []
    with pytest.raises(RequestError, match=r"unknown method 'poolde'; it compares local, pooled"):
        mooring.open(tmp_path / "run", method="poolde")


def test_an_advice(frame, tmp_path):
    advice = mooring.advise(frame, **HOW, out=tmp_path / "run")
    run = mooring.open(tmp_path / "run")
    pd.testing.assert_frame_equal(run.coefficients, advice.coefficients)
    assert run.summary["recommended"] == pytest.approx(advice.summary["recommended"])
    assert len(run.predict(frame)) == len(frame)


def test_odd_rows_are_warned_of(frame, tmp_path):
    mooring.fit(frame, **HOW, rounds=1, out=tmp_path / "run")
    run = mooring.open(tmp_path / "run")
    with pytest.warns(UserWarning, match="1 unknown client, 'elsewhere': predicted with the global model"):
        run.predict(frame.head(3).assign(town=["elsewhere", "town 1", "town 2"]))
