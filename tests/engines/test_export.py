"""Exported models say in other tools what they say here."""

import io
import json

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load as load_weights
from sklearn.linear_model import LinearRegression, LogisticRegression
from torch import nn

import mooring
from mooring.core.errors import RequestError
from mooring.engines.export import export
from tests.support.homes import design, homes

HOW = {"client": "town", "threads": 1, "rounds": 3}


@pytest.fixture
def run(tmp_path):
    frame = homes()
    mooring.fit(frame.drop(columns=["sold", "band"]), target="price", out=tmp_path / "run", **HOW)
    return tmp_path / "run"


def test_csv_and_json_hold_the_coefficients(run):
    table = mooring.open(run).coefficients
    pd.testing.assert_frame_equal(pd.read_csv(io.BytesIO(export(run)[0])), table, rtol=1e-14)
    told = json.loads(export(run, "json", "town 2")[0])
    assert told["target"] == "price" and told["method"] == "fedprox_personal"
    mine = table[table["client"] == "town 2"]
    assert told["coefficients"] == mine.to_dict("records")


def test_scikit_learn_predicts_the_same(run):
    frame = homes(seed=1)
    told = json.loads(export(run, "sklearn")[0])
    assert told["feature_names_in_"] == ["area", "share", "garden=yes"] and len(told["clients"]) == 4
    for name, owner in (("town 1", told["clients"]["town 1"]), ("elsewhere", told["global"])):
        model = LinearRegression()
        model.coef_, model.intercept_ = np.array(owner["coef_"]), np.array(owner["intercept_"])
        expected, _ = mooring.predict(run, frame.assign(town=name))
        np.testing.assert_allclose(model.predict(design(frame)[:, 1:]), expected["price"], rtol=1e-9)


def test_scikit_learn_predicts_the_same_classes(tmp_path):
    frame = homes()
    for target, other in (("sold", "band"), ("band", "sold")):
        out = tmp_path / target
        mooring.fit(frame.drop(columns=["price", other]), target=target, out=out, **HOW)
        told = json.loads(export(out, "sklearn", "town 1")[0])
        model = LogisticRegression()
        model.classes_ = np.array(told["classes_"])
        model.coef_, model.intercept_ = (np.array(told["clients"]["town 1"][k]) for k in ("coef_", "intercept_"))
        expected, _ = mooring.predict(out, frame, client="town 1")
        np.testing.assert_allclose(model.predict_proba(design(frame)[:, 1:]), expected.filter(like="p("), rtol=1e-8)


def test_a_network_as_weights(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    net = "nn.Sequential(nn.Linear(features, 4), nn.Tanh(), nn.Linear(4, 1))"
    source = f"from torch import nn\n\ndef make(features):\n    return {net}\n"
    (tmp_path / "net.py").write_text(source)
    frame = homes().drop(columns=["sold", "band"])
    mooring.fit(frame, target="price", model="net.py:make", out=tmp_path / "run", **HOW)
    weights = load_weights(export(tmp_path / "run", "torch", "town 0")[0])
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    inner = {name.removeprefix("net."): part for name, part in weights.items()}
    net.load_state_dict({name: inner[name] for name in net.state_dict()})
    own = mooring.open(tmp_path / "run").models["town 0"]
    assert torch.equal(torch.cat([p.detach().flatten() for p in net.parameters()]), own)


def test_models_that_cannot_be_exported_are_named(run):
    with pytest.raises(RequestError, match="unknown format 'excel'; known: csv, json, sklearn, torch"):
        export(run, "excel")
    with pytest.raises(RequestError, match="unknown client 'town 9'"):
        export(run, "csv", "town 9")
    with pytest.raises(RequestError, match="task 'linear' is no network"):
        export(run, "torch")
