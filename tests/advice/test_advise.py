"""Advice from end to end: answers, files, interruptions, and the odd federations."""

import json

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import mooring
from mooring.advice import kept
from mooring.advice.advise import advise, as_json, resume
from mooring.advice.survey import as_table
from mooring.cli import main
from mooring.core.errors import RequestError
from mooring.data.generators import LinearFederation
from mooring.runs.directory import RunDir, open_run
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
    assert (advice.clients["deploy"] == "personal").mean() > 0.9
    assert advice.headline.startswith("Personal models pay")
    assert min(advice.summary[f"gain_over_{other}"]["low"] for other in ("alone", "common")) > 0


def test_identical_clients_are_told_that_common_will_do():
    advice = told(planted(0.0, samples=25))
    assert (advice.clients["will_do"] == "common").all()
    assert advice.headline.startswith(("One common model will do", "No personal model does better than one common"))
    assert advice.summary["advised"] <= 1.02 * advice.summary["common"]


def test_unrelated_clients_are_told_that_alone_will_do():
    advice = told(planted(5.0, samples=200))
    assert set(advice.clients["deploy"]) <= {"alone", "personal"}
    assert (advice.clients["will_do"] == "alone").mean() > 0.9
    assert advice.headline.startswith("Training alone will do")
    assert advice.summary["advised"] <= 1.02 * advice.summary["alone"]


def test_everybody_has_an_answer_in_two_columns():
    frame = told(planted(0.4, samples=12, clients=20)).clients
    assert set(frame["deploy"]) <= {"personal", "common", "alone"}
    for other in ("alone", "common"):
        chance, sure = frame[f"chance_over_{other}"], frame[f"sure_over_{other}"]
        assert chance.between(0, 1).all() and set(sure) <= {"sure", "likely", "open", "same"}
        assert (chance[sure == "sure"] >= 0.95).all() and (chance[sure == "likely"].between(0.8, 0.95)).all()
        low, mean, high = (frame[f"gain_over_{other}{end}"] for end in ("_low", "", "_high"))
        assert (low <= mean).all() and (mean <= high).all() and (mean > -1e-12).all()  # the best is deployed
        assert (np.sign(frame[f"gain_over_{other}_percent"]) == np.sign(mean)).all()


def test_models_that_are_written_are_those_to_deploy(tmp_path):
    advice = told(planted(0.15, samples=15, clients=12), out=tmp_path / "run")
    models = advice.models
    kinds = {"alone": models.alone, "common": models.common.expand_as(models.personal), "personal": models.personal}
    for i, kind in enumerate(advice.clients["deploy"]):
        assert torch.equal(models.deployed[i], kinds[kind][i])
    saved = open_run(tmp_path / "run").models
    assert torch.equal(saved.personal, models.deployed)
    assert torch.equal(saved.common, models.common)  # whose losses the clients' table has
    centre = sum(weight * w for weight, w in zip(advice.choice.mix.values(), models.centres))
    assert torch.equal(centre, saved.common if saved.centre is None else saved.centre)


def test_all_rows_are_used_unless_the_table_brings_its_own_split():
    frame = planted(0.4, clients=8, samples=30)
    whole = told(frame)
    assert (whole.clients["judged_rows"] == 30).all() and whole.summary["judged_on"] == "held-out rows"
    rng = np.random.default_rng(0)
    frame["split"] = rng.choice(["train", "validation", "test"], len(frame), p=[0.6, 0.2, 0.2])
    apart = told(frame)
    assert (apart.clients["judged_rows"] == apart.clients["test"]).all() and apart.summary["judged_on"] == "test rows"
    changed = frame.assign(y=np.where(frame["split"] == "test", frame["y"] + 100, frame["y"]))
    again = told(changed)  # test rows take no part in choice and fits
    assert torch.equal(again.models.personal, apart.models.personal)
    assert not np.allclose(again.clients["alone"], apart.clients["alone"])


def test_a_table_without_test_rows_has_an_answer():
    frame = planted(0.4, clients=8, samples=30)
    frame["split"] = np.where(np.arange(len(frame)) % 5 == 0, "validation", "train")
    advice = told(frame)
    assert (advice.clients["test"] == 0).all() and advice.summary["judged_on"] == "held-out rows"


def test_options_of_the_advice_are_heeded():
    frame = planted(0.3, clients=10, samples=20)
    plain, wide = told(frame), told(frame, practical="50%", level=0.5, folds=3, theory=False)
    assert plain.theory is not None and wide.theory is None and not any("theorem" in line for line in wide.words)
    assert (wide.clients["will_do"] == "common").mean() > (plain.clients["will_do"] == "common").mean()
    width = [a.summary["gain_over_alone"]["high"] - a.summary["gain_over_alone"]["low"] for a in (plain, wide)]
    assert width[1] < 0.6 * width[0]  # the middle half is about a third of the middle 95 %
    assert wide.summary["practical"] == 0.5 and wide.summary["level"] == 0.5


def interrupted_after(monkeypatch, folds):
    """Lets so many folds be kept, then fails as a killed process would."""
    keep, done = kept.save, []

    def save(*given):
        if len(done) == folds:
            raise KeyboardInterrupt
        done.append(given)
        keep(*given)

    monkeypatch.setattr(kept, "save", save)


@pytest.mark.parametrize("model", [None, "network"])
def test_an_interrupted_advice_goes_on_to_the_same_bytes(tmp_path, monkeypatch, model):
    frame = planted(0.4, clients=5, samples=20)
    frame.to_csv(tmp_path / "rows.csv", index=False)
    more = {"client": "who", "target": "y", "threads": 1, "folds": 3, "theory": False}
    if model:
        (tmp_path / "net.py").write_text("from torch import nn\n\nmake = lambda features: nn.Linear(features, 1)\n")
        more |= {"model": str(tmp_path / "net.py:make"), "rounds": 2}
    advise(tmp_path / "rows.csv", out=tmp_path / "whole", **more)
    assert (open_run(tmp_path / "whole").models.mix is None) == bool(model)  # an average of networks is none of them
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupted_after(patch, 2)
        advise(tmp_path / "rows.csv", out=tmp_path / "cut", **more)
    assert not open_run(tmp_path / "cut").finished and len(list((tmp_path / "cut" / "checkpoint").iterdir())) == 2
    first = next((tmp_path / "cut" / "checkpoint").glob("*0001*"))
    first.write_bytes(first.read_bytes()[:-5])  # a damaged fold is fitted again
    resume(tmp_path / "cut")
    assert open_run(tmp_path / "cut").finished and not (tmp_path / "cut" / "checkpoint").exists()
    for name in ("models.safetensors", "advice.json", "clients.parquet", "run.toml"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


def test_an_advice_killed_while_writing_is_no_dead_end(tmp_path, monkeypatch, capsys):
    frame = planted(0.4, clients=5, samples=20)
    frame.to_csv(tmp_path / "rows.csv", index=False)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RunDir, "write_models", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        advise(tmp_path / "rows.csv", out=tmp_path / "run", client="who", target="y", threads=1)
    for _ in range(2):  # finished it is only read again
        with pytest.raises(SystemExit) as left:
            main(["resume", str(tmp_path / "run"), "--json"])
        told_json = json.loads(capsys.readouterr().out)
        assert left.value.code == 0 and set(told_json) == {"headline", "summary", "clients", "run"}
    assert open_run(tmp_path / "run").finished


def test_the_run_holds_models_tables_and_theory(tmp_path):
    frame = planted(0.4, clients=8)
    advice = told(frame, out=tmp_path / "run")
    directory = open_run(tmp_path / "run")
    assert directory.finished and len(directory.models.personal) == 8
    for name in ("deploy", "will_do", "gain_over_alone", "chance_over_common", "sure_over_alone"):
        assert list(directory.clients[name]) == list(advice.clients[name])
    assert json_bytes(directory.advice) == json_bytes(advice.record)  # in memory and on disk alike
    assert json_bytes(directory.theory) == json_bytes(as_table(advice.theory))
    answers, _ = mooring.predict(tmp_path / "run", frame)
    assert np.corrcoef(answers["y"], frame["y"])[0, 1] > 0.5


def test_json_has_the_promised_shape():
    told_json = json.loads(to_json(as_json(told(planted(0.4, clients=6)))))
    assert set(told_json) == {"headline", "summary", "clients", "run"}
    summary = {"alone", "common", "personal", "advised", "metric", "gain_over_alone", "gain_over_common", "deploy"}
    summary |= {"will_do", "sure_over_alone", "sure_over_common", "practical", "level", "heterogeneity", "threshold"}
    assert summary <= set(told_json["summary"])
    assert {"mean", "low", "high", "percent_mean"} <= set(told_json["summary"]["gain_over_alone"])
    keys = {"client", "rows", "deploy", "will_do", "alone", "common", "personal", "lambda"}
    for other in ("alone", "common"):
        gains = {f"gain_over_{other}{unit}{end}" for unit in ("", "_percent") for end in ("", "_low", "_high")}
        keys |= gains | {f"chance_over_{other}", f"sure_over_{other}"}
    assert keys <= set(told_json["clients"][0])


def test_classes_one_class_clients_and_constant_features():
    frame = planted(0.5, clients=5, samples=20)
    frame["y"] = np.where(frame["y"] > 0, "up", "down")
    frame.loc[frame["who"] == "c0", "y"] = "up"
    frame.loc[frame["who"] == "c1", "x0"] = 3.0
    advice = told(frame)
    assert advice.summary["metric"] == "log-loss" and np.isfinite(advice.summary["advised"])


def test_two_clients():
    advice = told(planted(1.0, clients=2, samples=60))
    assert len(advice.clients) == 2 and np.isfinite(advice.summary["advised"])


def test_many_tiny_clients():
    made = LinearFederation(clients=2_000, samples=6, dim=2, spread=0.5, noise=1.0, validation=2, test=2).make(0)
    advice = advise(made, threads=1)
    assert advice.summary["advised"] < min(advice.summary["alone"], advice.summary["common"])
    assert advice.clients["deploy"].notna().all()


@pytest.mark.parametrize("odd", ["no noise", "count", "three classes"])
def test_odd_targets_have_an_answer(odd):
    frame, kind = planted(0.4, clients=4, samples=12, dim=2), None
    if odd == "no noise":
        frame["y"] = frame["x0"]
    elif odd == "count":
        frame["y"], kind = np.random.default_rng(0).poisson(np.exp(0.5 * frame["x0"])), "count"
    else:
        frame["y"] = np.array(["a", "b", "c"])[np.digitize(frame["y"], [-0.7, 0.7])]
    found = told(frame, kind=kind, folds=2, theory=False).clients
    assert set(found["deploy"]) <= {"personal", "common", "alone"}
    numbers = [f"{what}_over_{other}" for what in ("gain", "chance") for other in ("alone", "common")]
    assert np.isfinite(found[numbers]).all().all()


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
    monkeypatch.setenv("COLUMNS", "80")
    planted(0.5, clients=6).to_csv("rows.csv", index=False)
    with pytest.raises(SystemExit) as left:
        main(["advise", "rows.csv", "--client", "who", "--target", "y", "--threads", "1", "--out", "run"])
    out = capsys.readouterr().out
    assert left.value.code == 0 and "Personal models" in out and "Deploy" in out and "Better than" in out
    assert sum(max(1, -(-len(line) // 80)) for line in out.splitlines()) <= 15  # of a terminal 80 characters wide
    assert "lambda" not in out and "verdict" not in out.lower()
    assert not list((tmp_path / "run").glob("*.png"))  # drawn when they are asked for
    with pytest.raises(SystemExit):
        main(["report", "run", "--images"])
    assert "path.png" in capsys.readouterr().out
    for name in ("path.png", "path.svg", "gains.png", "gains.svg"):
        assert (tmp_path / "run" / name).stat().st_size > 1000
    with pytest.raises(SystemExit):
        main(["advise", "rows.csv", "--client", "who", "--target", "y", "--out", "more", "--clients", "--folds", "3"])
    table = capsys.readouterr().out
    assert "over alone, %" in table and all(f"c{i}" in table for i in range(6))
    assert max(len(line) for line in table.splitlines() if not line.endswith(".")) <= 80


@pytest.mark.parametrize("width", [8, 70])
def test_kernel_tasks_are_advised_on_their_features(width):
    frame = planted(0.3, clients=6)
    frame["y"] = np.sin(2 * frame["x0"]) + 0.1 * frame["y"]
    advice = told(frame, task={"name": "kernel", "width": width})
    assert advice.models.personal.shape == (6, width + 1) and np.isfinite(advice.summary["advised"])
    assert advice.choice.prior is not None and len(advice.choice.prior.variance) == width + 1
