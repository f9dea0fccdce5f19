"""Models for other tools answer as the run itself does."""

import json

import numpy as np
import pandas as pd
import pytest
import torch

import mooring
from mooring.cli import main
from mooring.core.errors import RequestError
from mooring.engines.export import export


def homes(kind):
    rng = np.random.default_rng(1)
    frame = pd.DataFrame(
        {
            "town": np.repeat(["a", "b", "7"], 40),
            "size": rng.normal(50, 20, 120).round(1),
            "age": rng.normal(30, 9, 120),
            "garden": rng.choice(["none", "small", "large"], 120),
        }
    )
    score = frame["size"] / 20 - frame["age"] / 9 + (frame["garden"] == "large") + rng.normal(size=120)
    if kind == "regression":
        return frame.assign(price=1000 * score)
    levels = ["no", "yes"] if kind == "binary" else ["low", "mid", "high"]
    return frame.assign(price=pd.qcut(score, len(levels), labels=levels).astype(str))


@pytest.fixture(scope="module", params=["regression", "binary", "classes"])
def made(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    homes(request.param).to_csv(folder / "homes.csv", index=False)
    how = {"client": "town", "target": "price", "rounds": 5, "threads": 1, "baselines": False}
    result = mooring.fit(folder / "homes.csv", **how, out=folder / "run")
    return request.param, folder, result


def test_estimators_answer_as_the_run_does(made, tmp_path):
    kind, folder, result = made
    run = mooring.open(folder / "run")
    told = run.predict(folder / "homes.csv", client="7")
    x = run.inputs(folder / "homes.csv")
    assert list(x.columns) == list(run.schema.features) and "size" in x
    np.testing.assert_allclose(x["size"], homes(kind)["size"])
    content, _ = export(folder / "run", "sklearn")
    (tmp_path / "models.json").write_bytes(content)
    for model in (run.model("7"), mooring.load_sklearn(tmp_path / "models.json", 7), result.model("7")):
        if kind == "regression":
            np.testing.assert_allclose(model.predict(x), told["price"], rtol=1e-9)
        else:
            assert (model.predict(x) == told["price"]).all()
            chances = told[[f"p({level})" for level in model.classes_]] if "p(no)" in told else told.filter(like="p")
            np.testing.assert_allclose(model.predict_proba(x), chances.select_dtypes("number"), atol=1e-9)
    common = mooring.load_sklearn(tmp_path / "models.json")
    np.testing.assert_array_equal(common.coef_, run.model().coef_)


def test_files_of_estimators_that_are_none_are_refused(made, tmp_path):
    _, folder, _ = made
    content, _ = export(folder / "run", "sklearn", client="a")
    (tmp_path / "one.json").write_bytes(content)
    with pytest.raises(RequestError, match="no global model"):
        mooring.load_sklearn(tmp_path / "one.json")
    with pytest.raises(RequestError, match="no model of client 'b'"):
        mooring.load_sklearn(tmp_path / "one.json", "b")
    (tmp_path / "other.json").write_text(json.dumps({"x": 1}))
    with pytest.raises(RequestError, match="is no file of"):
        mooring.load_sklearn(tmp_path / "other.json")


def test_a_task_that_scikit_learn_does_not_have(tmp_path):
    rows = homes("regression")
    result = mooring.fit(rows, client="town", target="price", task="absolute", rounds=2, baselines=False)
    with pytest.raises(RequestError, match="task 'absolute' is no model of scikit-learn's"):
        result.model("a")


@pytest.fixture
def networks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(
        "from torch import nn\n\n\ndef make(features, classes):\n"
        "    return nn.Sequential(nn.Linear(features, 5), nn.Tanh(), nn.Linear(5, classes or 1))\n"
    )
    homes("regression").to_csv("homes.csv", index=False)
    how = {"rounds": 2, "threads": 1, "baselines": False, "model": "net.py:make"}
    mooring.fit("homes.csv", client="town", target="price", out="table", **how)
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    data = {name: (x + k, (x[:, 0] > 0).long()) for k, name in enumerate("ab")}
    mooring.fit(data, out="arrays", **how)
    return data


def test_networks_as_onnx_answer_as_the_run_does(networks, tmp_path):
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime, which would run the file, is not installed")
    pytest.importorskip("onnx", reason="onnx, which writes the file, is not installed")
    content, _ = export("table", "onnx", client="7")
    session = runtime.InferenceSession(content)
    run = mooring.open("table")
    x = run.inputs("homes.csv").to_numpy(np.float32)
    (answer,) = session.run(None, {"input": x})
    np.testing.assert_allclose(answer.reshape(-1), run.predict("homes.csv", client="7")["price"], rtol=1e-3, atol=1.0)
    content, _ = export("arrays", "onnx", client="b")
    inputs = networks["b"][0]
    (answer,) = runtime.InferenceSession(content).run(None, {"input": inputs.numpy()})
    expected = mooring.open("arrays").model("b")(inputs).detach().numpy()
    np.testing.assert_allclose(answer, expected, rtol=1e-4, atol=1e-5)


def test_a_missing_package_is_named(networks, monkeypatch, capsys):
    monkeypatch.setattr("mooring.engines.exported_models.find_spec", lambda name: None)
    with pytest.raises(SystemExit) as left:
        main(["export", "table", "--client", "a", "--to", "onnx", "--out", "a.onnx"])
    assert left.value.code == 2 and "pip install 'mooring-fl[onnx]'" in capsys.readouterr().err
