"""`fit`: which round's models are kept, where the others are, and referees where they can be had."""

import json

import numpy as np
import pandas as pd
import pytest
import torch

from mooring.cli import main
from mooring.core.errors import RequestError
from mooring.engines.fit import fit
from mooring.engines.fit_result import as_json
from mooring.runs.directory import MODELS_FILE, OTHER_MODELS, open_run
from mooring.runs.runfile import read_run
from mooring.runs.tensor_files import read_tensors

HOW = {"client": "who", "target": "y", "algorithm": "local", "rounds": 30, "evaluate_every": 1, "threads": 1}
SGD = {"inner": "sgd", "ridge": 0.0}


@pytest.fixture
def noise(tmp_path):
    """A table on which training longer is worse: many features, and a target of noise."""
    rng = np.random.default_rng(1)
    frame = pd.DataFrame(rng.normal(size=(120, 12)), columns=[f"x{i}" for i in range(12)])
    frame["who"], frame["y"] = [f"client {i % 4}" for i in range(120)], rng.normal(size=120)
    frame.to_csv(tmp_path / "noise.csv", index=False)
    return tmp_path / "noise.csv"


def tensors(path):
    return read_tensors(path)[0]


def printed(capsys, *argv):
    with pytest.raises(SystemExit) as left:
        main([str(word) for word in argv])
    assert left.value.code == 0
    return capsys.readouterr().out


def test_both_rounds_are_saved_and_one_word_chooses(noise, tmp_path):
    best = fit(noise, settings=SGD, out=tmp_path / "best", **HOW)
    last = fit(noise, settings=SGD, out=tmp_path / "last", checkpoint="last", **HOW)
    losses = best.rounds["validation_loss"].to_numpy()
    assert best.trained.best.t == int(losses.argmin()) + 1 < best.trained.last.t == 30
    assert (best.summary["checkpoint"], last.summary["checkpoint"]) == ("best", "last")
    assert best.summary["personal"] < last.summary["personal"]
    kept, other = tensors(tmp_path / "best" / MODELS_FILE), tensors(tmp_path / "best" / OTHER_MODELS["last"])
    assert not torch.equal(kept["personal"], other["personal"])
    swapped, first = tensors(tmp_path / "last" / MODELS_FILE), tensors(tmp_path / "last" / OTHER_MODELS["best"])
    assert torch.equal(swapped["personal"], other["personal"]) and torch.equal(first["personal"], kept["personal"])
    assert torch.equal(open_run(tmp_path / "best").models.personal, best.trained.best.models)


def test_without_a_better_round_there_is_one_file(noise, tmp_path):
    result = fit(noise, settings=SGD, out=tmp_path / "run", **HOW | {"rounds": 1})
    assert result.trained.best.t == result.trained.last.t == 1
    assert not any((tmp_path / "run" / name).exists() for name in OTHER_MODELS.values())


def test_the_terminal_says_which_round_it_is(noise, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fit(noise, settings=SGD, out="first", **HOW)
    text = (tmp_path / "first" / "run.toml").read_text()
    for keep in ("best", "last"):
        (tmp_path / f"{keep}.toml").write_text(text.replace('checkpoint = "best"', f'checkpoint = "{keep}"'))
        said = " ".join(printed(capsys, "fit", f"{keep}.toml", "--out", f"again-{keep}").split())
        assert f"The models are those of round {30 if keep == 'last' else ''}" in said
        other = {"best": "last", "last": "best"}[keep]
        assert f"models-{other}.safetensors" in said and (tmp_path / f"again-{keep}" / OTHER_MODELS[other]).exists()


def test_runs_of_an_earlier_version_are_refused(noise, tmp_path):
    fit(noise, settings=SGD, out=tmp_path / "run", **HOW | {"rounds": 1})
    text = (tmp_path / "run" / "run.toml").read_text()
    (tmp_path / "old.toml").write_text(text.replace("format = 2", "format = 1"))
    with pytest.raises(RequestError, match=r"made by Mooring .* in format 1; this is Mooring .*, which reads format 2"):
        read_run(tmp_path / "old.toml")


def test_json_tells_the_rounds(noise, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = printed(capsys, "fit", noise, "--client", "who", "--target", "y", "--rounds", 2, "--json")
    told = json.loads(out)
    assert {"checkpoint", "best_round", "last_round"} <= set(told["summary"])
    directory = as_json(open_run(told["run"]))  # what a federation's server prints
    assert told["summary"].items() <= directory["summary"].items() and directory["run"] == told["run"]
    for row, right in zip(directory["clients"], told["clients"], strict=True):
        assert row == {name: value for name, value in right.items() if value is not None}


def test_every_client_has_its_mixture(noise):
    fixed = fit(noise, settings={"alpha": 0.25, "adapt": "no"}, **HOW | {"algorithm": "apfl", "rounds": 2})
    assert fixed.clients["alpha"].tolist() == [0.25] * 4
    free = fit(noise, settings={"adapt": "step"}, **HOW | {"algorithm": "apfl", "rounds": 2, "participation": 2})
    assert free.clients["alpha"].isna().sum() in (0, 1, 2) and free.clients["alpha"].dropna().between(0, 1).all()
    assert fit(noise, **HOW | {"algorithm": "fedavg", "rounds": 2}).clients["alpha"].isna().all()


def test_training_losses_are_those_of_the_deployed_models(noise):
    result = fit(noise, **HOW | {"algorithm": "fedprox_personal", "rounds": 3, "checkpoint": "last"})
    clients, errors = result.job.clients, []
    for i, w in enumerate(result.trained.models):
        x, y = clients.train.of(i)
        errors.append((x @ w[:-1] + w[-1] - y) ** 2)
    expected = float(torch.cat(errors).mean()) * clients.target_scale**2
    assert result.rounds["train_loss"].iloc[-1] == pytest.approx(expected, rel=1e-9)


def test_the_summary_says_what_a_report_needs(noise, tmp_path):
    result = fit(noise, out=tmp_path / "run", **HOW | {"algorithm": "fedavg", "rounds": 4})
    kept = open_run(tmp_path / "run").summary
    assert {name: kept[name] for name in result.summary} == result.summary
    assert kept["algorithm"] == "fedavg" and kept["last_round"] == 4
    assert kept["title"] == result.job.clients.title and kept["notes"] == list(result.job.clients.notes)
