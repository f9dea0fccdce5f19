"""Advice from end to end: plans, verdicts, files, and the odd federations."""

import json

import numpy as np
import pandas as pd
import pytest
from torch import nn

import mooring
from mooring.advice.advise import advise, as_json
from mooring.advice.survey import as_table
from mooring.cli import main
from mooring.core.errors import RequestError
from mooring.data.generators import LinearFederation
from mooring.runs.directory import open_run
from mooring.runs.files import json_bytes, to_json


def planted(spread, clients=30, samples=40, seed=0, dim=3, noise=1.0):
    """A table with planted models."""
    rng = np.random.default_rng(seed)
    truth = rng.normal(size=dim) + spread * rng.normal(size=(clients, dim))
    rows = []
    for i in range(clients):
        x = rng.normal(size=(samples, dim))
        frame = pd.DataFrame(x, columns=[f"x{j}" for j in range(dim)])
        rows.append(frame.assign(who=f"c{i}", y=x @ truth[i] + noise * rng.normal(size=samples)))
    return pd.concat(rows, ignore_index=True)


def told(frame, **more):
    return advise(frame, client="who", target="y", threads=1, **more)


def test_advice_beats_both_ends_where_personalization_pays():
    advice = told(planted(0.4, samples=25, clients=60))
    losses = advice.summary
    assert losses["advised"] < losses["alone"] and losses["advised"] < losses["common"]
    assert set(advice.clients["verdict"]) <= {"personal", "common", "alone", "undecided"}


def test_identical_clients_are_not_sent_apart():
    advice = told(planted(0.0, samples=25))
    assert set(advice.clients["verdict"]) <= {"common", "undecided"}
    assert advice.summary["advised"] <= 1.02 * advice.summary["common"]


def test_unrelated_clients_are_not_tied_together():
    advice = told(planted(5.0, samples=60))
    assert set(advice.clients["verdict"]) <= {"alone", "personal", "undecided"}
    assert (advice.clients["verdict"] != "undecided").mean() > 0.5
    assert advice.summary["advised"] <= 1.02 * advice.summary["alone"]


def test_the_run_holds_models_tables_and_theory(tmp_path):
    frame = planted(0.4, clients=8)
    advice = told(frame, out=tmp_path / "run")
    directory = open_run(tmp_path / "run")
    assert directory.finished and len(directory.models.personal) == 8
    assert list(directory.clients["verdict"]) == list(advice.clients["verdict"])
    assert json_bytes(directory.advice) == json_bytes(advice.record)  # in memory and on disk alike
    assert json_bytes(directory.theory) == json_bytes(as_table(advice.theory))
    answers, _ = mooring.predict(tmp_path / "run", frame)
    assert np.corrcoef(answers["y"], frame["y"])[0, 1] > 0.5


def test_json_has_the_promised_shape():
    told_json = json.loads(to_json(as_json(told(planted(0.4, clients=6)))))
    assert set(told_json) == {"summary", "clients", "run"}
    assert {"alone", "common", "advised", "shared_lambda", "metric", "helped", "harmed", "undecided"} <= set(
        told_json["summary"]
    )
    assert {"heterogeneity", "threshold"} <= set(told_json["summary"])
    keys = {"client", "rows", "verdict", "lambda", "alone", "common", "personal", "gain", "gain_low", "gain_high"}
    assert keys <= set(told_json["clients"][0])


def test_classes_one_class_clients_and_constant_features():
    frame = planted(0.5, clients=10)
    frame["y"] = np.where(frame["y"] > 0, "up", "down")
    frame.loc[frame["who"] == "c0", "y"] = "up"
    frame.loc[frame["who"] == "c1", "x0"] = 3.0
    advice = told(frame)
    assert advice.summary["metric"] == "log-loss" and np.isfinite(advice.summary["advised"])


def test_two_clients():
    advice = told(planted(1.0, clients=2, samples=60))
    assert len(advice.clients) == 2 and np.isfinite(advice.summary["advised"])


def test_many_tiny_clients():
    made = LinearFederation(clients=2_000, samples=6, dim=3, spread=0.5, noise=1.0, validation=2, test=2).make(0)
    advice = advise(made, threads=1)
    assert advice.summary["advised"] < min(advice.summary["alone"], advice.summary["common"])


def test_a_single_client_is_one_sentence():
    with pytest.raises(RequestError, match="one client only"):
        told(planted(0.0, clients=1))


def test_networks():
    frame = planted(1.5, clients=5, samples=60)
    advice = told(frame, model=lambda features: nn.Linear(features, 1), rounds=15)
    assert advice.summary["advised"] <= 1.1 * min(advice.summary["alone"], advice.summary["common"])
    assert mooring.plot(advice, "path") is not None and advice.theory is None


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    planted(0.5, clients=6).to_csv("rows.csv", index=False)
    with pytest.raises(SystemExit) as left:
        main(["advise", "rows.csv", "--client", "who", "--target", "y", "--threads", "1", "--out", "run"])
    out = capsys.readouterr().out
    assert left.value.code == 0 and "Verdicts:" in out and "advised" in out
    for name in ("path.png", "path.svg", "gains.png", "gains.svg"):
        assert (tmp_path / "run" / name).stat().st_size > 1000
    assert max(len(line) for line in out.splitlines() if "Verdicts" not in line and " " * 2 in line) <= 80


@pytest.mark.parametrize("width", [8, 70])
def test_kernel_tasks_are_advised_on_their_features(width):
    frame = planted(0.3, clients=6)
    frame["y"] = np.sin(2 * frame["x0"]) + 0.1 * frame["y"]
    advice = told(frame, task={"name": "kernel", "width": width})
    assert advice.models.personal.shape == (6, width + 1) and np.isfinite(advice.summary["advised"])
    assert advice.choice.prior is not None and len(advice.choice.prior.variance) == width + 1
