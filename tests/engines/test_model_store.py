"""Results in memory and the saved run answer alike: parameters, estimators, coefficients, predictions."""

import numpy as np
import pandas as pd
import pytest
import torch

import mooring
from mooring.core.errors import RequestError
from tests.support.homes import homes

HOW = {"client": "town", "target": "price", "threads": 1}


@pytest.fixture(scope="module")
def frame():
    return homes().drop(columns=["sold", "band", "split"])


def fit(frame, out):
    return mooring.fit(frame, **HOW, rounds=3, out=out)


def advise(frame, out):
    return mooring.advise(frame, **HOW, folds=2, shape="linear", out=out)


@pytest.mark.parametrize("make", [fit, advise], ids=lambda make: make.__name__)
def test_a_result_in_memory_answers_as_its_saved_run(make, frame, tmp_path):
    result = make(frame, tmp_path / "run")
    saved = mooring.open(tmp_path / "run")
    assert result.names == saved.names and torch.equal(result.global_, saved.global_)
    pd.testing.assert_frame_equal(result.coefficients, saved.coefficients)
    pd.testing.assert_frame_equal(result.predict(frame, interval=0.9), saved.predict(frame, interval=0.9))
    rows = saved.inputs(frame)
    for client in (None, *saved.names):
        assert torch.equal(result.vector(client), saved.vector(client))
        by_model = result.model(client).predict(rows)
        np.testing.assert_array_equal(by_model, saved.model(client).predict(rows))
        if client is not None:
            np.testing.assert_allclose(by_model, result.predict(frame, client)["price"], rtol=1e-9)
    unknown = r"unknown client 'town 9'; .*run has 4, such as town 0.*Did you mean"
    for store in (result, saved):
        with pytest.raises(RequestError, match=unknown):
            store.vector("town 9")


def test_arrays_given_to_a_fit_of_a_table_are_encoded_rows(frame):
    result = fit(frame, None)
    clients, w = result.job.clients, result.vector("town 1")
    x = clients.train.x[:5]
    parts = {part.name: w[part.start : part.start + part.size] for part in result.task.layout}
    by_hand = clients.target_mean + clients.target_scale * (x @ parts["slopes"] + parts["intercept"])
    torch.testing.assert_close(result.predict(x.numpy(), "town 1"), by_hand)
