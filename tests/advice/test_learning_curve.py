"""The learning curve: anchored at what was seen, its course that of Bayes' risk in closed form; told by advice."""

import numpy as np
import pandas as pd
import pytest
import torch

import mooring
from mooring.advice.candidates.families import SIZE, Setting
from mooring.advice.reporting.contributions import fit_with_curvature, mean_degrees_of_freedom
from mooring.advice.reporting.learning_curve import estimate_learning_curve
from mooring.partial_pooling.client_prior import estimate_priors
from mooring.tasks.linear import Linear
from tests.support.linear_federation import LinearFederation
from tests.support.tables import EXAM

NOISE, SPREAD, DIM, ROWS = 1.0, 0.3, 4, 40.0


class Sums:
    """What n rows with second moments 1 tell, in units of the moor."""

    ratios = torch.full((3, DIM), ROWS * SPREAD**2 / NOISE, dtype=torch.float64)


def summary(over_local: float) -> dict:
    return {"personal": 2.0, "local": 2.0 + over_local, "global": 2.3}


def risk(n: np.ndarray) -> np.ndarray:
    """Bayes' own excess risk with n rows of covariance 1: each coefficient's posterior variance, times 1/2."""
    return 0.5 * DIM / (n / NOISE + 1 / SPREAD**2)


def test_the_course_is_that_of_bayes_risk_and_of_least_squares():
    match = ROWS * DIM / mean_degrees_of_freedom(Sums)
    frame = pd.DataFrame({"rows": [ROWS] * 3, "rows_to_match": [match] * 3})
    gap = 0.5 * NOISE * DIM / ROWS - risk(ROWS)
    found = estimate_learning_curve(Sums, frame, summary(gap))
    n, table = found.table["rows"].to_numpy(), found.table
    np.testing.assert_allclose(table["personal"] - 2.0, risk(n) - risk(ROWS), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(table["local"] - 2.0, 0.5 * NOISE * DIM / n - risk(ROWS), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(table["global"], 2.3)
    assert (found.now, found.match) == (ROWS, pytest.approx(match)) and n[0] < ROWS < match < n[-1]
    assert (table["personal"] < table["local"]).all()


def test_no_gain_and_a_taut_moor_have_no_curve():
    frame = pd.DataFrame({"rows": [ROWS], "rows_to_match": [4 * ROWS]})
    assert estimate_learning_curve(Sums, frame, summary(-0.1)) is None
    assert estimate_learning_curve(Sums, frame.assign(rows_to_match=np.inf), summary(0.1)) is None
    assert estimate_learning_curve(Sums, frame.assign(rows_to_match=np.nan), summary(0.1)) is None


def test_freedom_is_the_trace_of_what_is_left_free():
    clients = LinearFederation(clients=20, samples=30, dim=DIM, spread=SPREAD).make(0)
    task = Linear(DIM, intercept=False)
    fit = fit_with_curvature(
        task, clients.train, clients.weights(), Setting(SIZE, 1.0), [estimate_priors(task, clients.train)[0]]
    )
    trace = float(fit.free.diagonal(dim1=1, dim2=2).sum(1).mean())
    assert mean_degrees_of_freedom(fit) == pytest.approx(trace, rel=1e-9)
    assert mean_degrees_of_freedom(fit, 4.0) > mean_degrees_of_freedom(fit) > mean_degrees_of_freedom(fit, 0.25)


def test_an_advice_brings_its_curve_and_every_clients_path():
    advice = mooring.advise(EXAM.path, shape="linear", theory=False, folds=5, **EXAM.columns)
    curve, record = advice.learning_curve, advice.record
    at_now = np.interp(curve.now, curve.table["rows"], curve.table["local"])
    assert at_now == pytest.approx(advice.summary["local"], rel=0.01)
    assert f"about {curve.match:,.0f} rows of its own (it has {curve.now:,.0f})" in advice.words["rows_needed"]
    assert record["learning_curve"]["rows"] == curve.table["rows"].tolist()
    lams = sorted(row["lam"] for row in record["path"] if row["family"] == "lambda")
    paths = np.array(record["client_paths"])
    assert paths.shape == (len(advice.clients), len(lams))
    # Over all clients, each with its held-out rows, the paths are the federation's.
    whole = [row["loss"] for row in sorted(record["path"], key=lambda row: row["lam"]) if row["family"] == "lambda"]
    np.testing.assert_allclose(np.average(paths, 0, advice.clients["held_out_rows"]), whole, rtol=1e-5)
