"""Advice from end to end: answers, files, interruptions, and the odd federations."""

import json

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import mooring
from mooring.advice.advise import advise, as_json, resume
from mooring.advice.evaluation import fold_checkpoints
from mooring.cli import main
from mooring.core.errors import RequestError
from mooring.engines.theory_report import theory_as_json
from mooring.runs.atomic_files import json_bytes, to_json
from mooring.runs.directory import RunDirectory, open_run
from tests.support.linear_federation import LinearFederation
from tests.support.planted_table import planted


def told(frame, **more):
    return advise(frame, client="who", target="y", threads=1, **{"shape": "linear", "theory": False} | more)


def test_personal_models_beat_both_ends_where_clients_differ_somewhat():
    advice = told(planted(0.4, samples=25, clients=60), folds=5)
    summary = advice.summary
    assert summary["recommended"] < summary["local"] and summary["recommended"] < summary["global"]
    assert (advice.clients["recommended"] == "personal").mean() > 0.9
    assert advice.headline.startswith("Use a personal model at")
    assert min(summary[f"improvement_over_{other}"]["ci_low"] for other in ("local", "global")) > 0


def identical_clients(kind, clients=60, samples=25, seed=0):
    """Sixty clients with one model; counts vary four times as much as Poisson's."""
    rng = np.random.default_rng(seed)
    frame = planted(0.0, clients=clients, samples=samples, seed=seed)
    score = frame["x0"] - 0.5 * frame["x1"]
    if kind == "binary":
        return frame.assign(y=np.where(score + rng.logistic(size=len(frame)) > 0, "yes", "no"))
    if kind == "count":
        mean = np.exp(1 + 0.3 * score)
        return frame.assign(y=rng.poisson(mean * rng.gamma(1.0, 1.0, len(frame))))
    return frame


@pytest.mark.parametrize("kind", ["regression", "binary", "count"])
def test_identical_clients_get_the_global_model(kind):
    advice = told(identical_clients(kind), target_type=kind, folds=3)
    assert (advice.clients["recommended"] == "global").mean() >= 0.9
    assert advice.summary["recommended"] <= 1.01 * advice.summary["global"]
    assert np.isfinite(advice.clients.select_dtypes(float).drop(columns="alpha").drop(columns="lam")).all().all()


def test_unrelated_clients_with_many_rows_get_local_or_personal_models():
    advice = told(planted(5.0, samples=200), folds=3)
    assert set(advice.clients["recommended"]) <= {"local", "personal"}
    assert (advice.clients["recommended"] == "local").mean() > 0.9
    assert advice.headline.startswith("Use a local model at")
    assert advice.summary["recommended"] <= 1.02 * advice.summary["local"]


@pytest.mark.parametrize("spread", [0.0, 0.5])
def test_rows_duplicated_five_times_get_the_same_recommendations(spread):
    """As five times as many rows they would be local models that are as good as exact. Folds are drawn anew, so that a
    client at the margin may change."""
    frame = planted(spread, samples=20, clients=20)
    once, often = told(frame, folds=4), told(pd.concat([frame] * 5, ignore_index=True), folds=4)
    assert (often.clients["recommended"] == once.clients["recommended"]).mean() >= 0.9
    assert (often.clients["recommended"] == "local").mean() <= 0.1
    assert (often.clients["held_out_rows"] == 20).all() and (often.clients["rows"] == 100).all()
    assert any("Every row appears 5 times" in note for note in often.job.clients.notes)
    for name in ("local", "global", "personal"):
        assert often.summary[name] == pytest.approx(once.summary[name], rel=0.05)
    lines = [a.summary["personal_models"]["improvement_over_local"] for a in (once, often)]
    width = [line["ci_high"] - line["ci_low"] for line in lines]
    assert width[1] > 0.6 * width[0]


def test_every_client_has_one_recommendation_whose_numbers_agree():
    frame = told(planted(0.4, samples=12, clients=20), folds=4).clients
    assert set(frame["recommended"]) <= {"personal", "global", "local"}
    assert set(frame["confidence"]) <= {"high", "moderate", "low"}
    losses = frame[["local", "global", "personal"]]
    mine = losses.to_numpy()[np.arange(20), losses.columns.get_indexer(frame["recommended"])]
    for other in ("local", "global"):
        probability = frame[f"probability_better_than_{other}"]
        low, mean, high = (frame[f"improvement_over_{other}{end}"] for end in ("_ci_low", "", "_ci_high"))
        apart = frame["recommended"] != other
        assert probability.between(0, 1).all() and (low <= mean + 1e-9).all() and (mean <= high + 1e-9).all()
        np.testing.assert_allclose(mean, frame[other] - mine, atol=1e-12)
        np.testing.assert_allclose(frame[f"improvement_over_{other}_pct"], 100 * (1 - mine / frame[other]), atol=1e-9)
        assert ((low > 0) == (probability > 0.95))[apart].all() and (mean[~apart] == 0).all()


def test_models_that_are_written_are_those_that_are_recommended(tmp_path):
    advice = told(planted(0.15, samples=15, clients=12), out=tmp_path / "run", folds=4)
    models = advice.models
    kinds = {"local": models.local, "global": models.global_.expand_as(models.personal), "personal": models.personal}
    assert advice.clients["recommended"].nunique() > 1
    for i, kind in enumerate(advice.clients["recommended"]):
        assert torch.equal(models.recommended[i], kinds[kind][i])
    saved = open_run(tmp_path / "run").models
    assert torch.equal(saved.personal, models.recommended)
    assert torch.equal(saved.common, models.global_)  # whose losses the clients' table has
    center = sum(weight * w for weight, w in zip(advice.choice.mix.values(), models.centers))
    assert torch.equal(center, saved.common if saved.centre is None else saved.centre)


def split_table():
    frame, rng = planted(0.4, clients=8, samples=30), np.random.default_rng(0)
    return frame.assign(split=rng.choice(["train", "validation", "test"], len(frame), p=[0.6, 0.2, 0.2]))


def test_all_rows_are_used_unless_the_table_has_its_own_split():
    frame = split_table()
    whole, apart = (told(table, folds=3) for table in (frame.drop(columns="split"), frame))
    assert (whole.clients["held_out_rows"] == 30).all() and whole.summary["test"] is None
    assert (apart.clients["held_out_rows"] == 30 - apart.clients["test"]).all()
    assert whole.summary["evaluated_on"] == apart.summary["evaluated_on"] == "held-out rows"
    test = apart.summary["test"]
    assert test["rows"] == (frame["split"] == "test").sum()
    assert test["personal"] < min(test["local"], test["global"]) and set(apart.summary["measures"]) > {"recommended"}


def test_test_rows_never_decide():
    """With other targets in them, all but the reported test losses is the same to the last bit."""
    frame = split_table()
    changed = frame.assign(y=np.where(frame["split"] == "test", frame["y"] + 100, frame["y"]))
    first, second = told(frame, folds=3), told(changed, folds=3)
    for one, other in zip(first.models[:5], second.models[:5]):
        assert torch.equal(one, other)
    pd.testing.assert_frame_equal(first.clients, second.clients, check_exact=True)
    assert first.words.pop("test") != second.words.pop("test")  # reported, and nothing else
    assert first.headline == second.headline and first.words == second.words
    differ = {key for key in first.summary if to_json(first.summary[key]) != to_json(second.summary[key])}
    assert differ == {"test", "measures"}


def test_a_table_without_test_rows_has_an_answer():
    frame = planted(0.4, clients=8, samples=30)
    frame["split"] = np.where(np.arange(len(frame)) % 5 == 0, "validation", "train")
    advice = told(frame, folds=3)
    assert (advice.clients["test"] == 0).all() and advice.summary["test"] is None


def test_options_of_the_advice_are_heeded():
    frame = planted(0.3, clients=10, samples=20)
    plain, wide = told(frame, folds=3, theory=True), told(frame, margin="50%", level=0.5, folds=3)
    assert plain.theory is not None and wide.theory is None and "theory" not in wide.words
    assert (wide.clients["recommended"] != "personal").mean() > (plain.clients["recommended"] != "personal").mean()
    width = [
        a.summary["personal_models"]["improvement_over_local"]["ci_high"]
        - a.summary["personal_models"]["improvement_over_local"]["ci_low"]
        for a in (plain, wide)
    ]
    assert width[1] < 0.6 * width[0]  # the middle half is about a third of the middle 95%
    assert wide.summary["margin"] == 0.5 and wide.summary["level"] == 0.5


def interrupted_after(monkeypatch, folds):
    """Lets so many folds be kept, then fails as a killed process would."""
    keep, done = fold_checkpoints.save_fold, []

    def save(*given):
        if len(done) == folds:
            raise KeyboardInterrupt
        done.append(given)
        keep(*given)

    monkeypatch.setattr(fold_checkpoints, "save_fold", save)


@pytest.mark.parametrize("model", [None, "network"])
def test_an_interrupted_advice_goes_on_to_the_same_bytes(tmp_path, monkeypatch, model):
    frame = planted(0.4, clients=5, samples=20)
    frame.to_csv(tmp_path / "rows.csv", index=False)
    more = {"client": "who", "target": "y", "threads": 1, "folds": 3, "theory": False, "shape": "linear"}
    if model:
        (tmp_path / "net.py").write_text("from torch import nn\n\nmake = lambda features: nn.Linear(features, 1)\n")
        work = {"eta": 0.1, "steps": 3, "batch": 8, "optimizer": "sgd", "server_optimizer": "sgd"}  # nothing to try
        more |= {"model": str(tmp_path / "net.py:make"), "rounds": 2, "settings": work}
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


def test_an_advice_killed_while_writing_is_no_dead_end(tmp_path, monkeypatch):
    frame = planted(0.4, clients=5, samples=20)
    frame.to_csv(tmp_path / "rows.csv", index=False)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RunDirectory, "write_models", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        told(tmp_path / "rows.csv", out=tmp_path / "run", folds=2)
    assert not open_run(tmp_path / "run").finished
    again = resume(tmp_path / "run")
    assert open_run(tmp_path / "run").finished and set(as_json(again)) == {"headline", "summary", "clients", "run"}


def test_the_run_holds_models_tables_and_theory(tmp_path):
    frame = planted(0.4, clients=8)
    advice = told(frame, out=tmp_path / "run", theory=True, folds=3)
    directory = open_run(tmp_path / "run")
    assert directory.finished and len(directory.models.personal) == 8
    for name in ("recommended", "improvement_over_local", "probability_better_than_global", "confidence"):
        assert list(directory.clients[name]) == list(advice.clients[name])
    assert json_bytes(directory.advice) == json_bytes(advice.record)  # in memory and on disk alike
    assert json_bytes(directory.theory) == json_bytes(theory_as_json(advice.theory))
    answers, _ = mooring.predict(tmp_path / "run", frame)
    assert np.corrcoef(answers["y"], frame["y"])[0, 1] > 0.5


def test_json_has_the_promised_shape():
    table = json.loads(to_json(as_json(told(planted(0.4, clients=6), folds=2))))
    assert set(table) == {"headline", "summary", "clients", "run"}
    summary = {"local", "global", "personal", "recommended", "metric", "recommended_counts", "confidence_counts"}
    assert summary | {"held_out_rows", "improvement_over_local", "personal_models"} <= set(table["summary"])
    line = {"mean", "ci_low", "ci_high", "pct", "pct_ci_low", "pct_ci_high"}
    assert line == set(table["summary"]["improvement_over_global"])
    keys = {"client", "rows", "recommended", "confidence", "local", "global", "personal", "held_out_rows", "lam"}
    for other in ("local", "global"):
        ends = {f"improvement_over_{other}{unit}{end}" for unit in ("", "_pct") for end in ("", "_ci_low", "_ci_high")}
        keys |= ends | {f"probability_better_than_{other}"}
    assert keys <= set(table["clients"][0])


def test_classes_one_class_clients_and_constant_features():
    frame = planted(0.5, clients=5, samples=20)
    frame["y"] = np.where(frame["y"] > 0, "up", "down")
    frame.loc[frame["who"] == "c0", "y"] = "up"
    frame.loc[frame["who"] == "c1", "x0"] = 3.0
    advice = told(frame, folds=2)
    assert advice.summary["metric"] == "log-loss" and np.isfinite(advice.summary["recommended"])


def test_two_clients():
    advice = told(planted(1.0, clients=2, samples=60))
    assert len(advice.clients) == 2 and np.isfinite(advice.summary["recommended"])


def test_many_tiny_clients():
    made = LinearFederation(clients=2_000, samples=6, dim=2, spread=0.5, noise=1.0, validation=2, test=2).make(0)
    advice = advise(made, threads=1, folds=3, theory=False)
    assert advice.summary["recommended"] < min(advice.summary["local"], advice.summary["global"])
    assert advice.clients["recommended"].notna().all()


def test_clients_of_two_rows_have_an_answer():
    """None of them has validation rows."""
    found = told(planted(0.5, clients=40, samples=2, dim=2), min_rows=2).clients
    assert len(found) == 40 and np.isfinite(found["improvement_over_local"]).all()
    assert found["contribution"].isna().all()


def test_rows_of_one_time_are_one_sentence():
    with pytest.raises(RequestError, match="two different times"):
        told(planted(0.5, clients=4, samples=12, dim=2).assign(day=1), time_column="day")


@pytest.mark.parametrize("odd", ["no noise", "count", "three classes"])
def test_odd_targets_have_an_answer(odd):
    frame, kind = planted(0.4, clients=4, samples=12, dim=2), None
    if odd == "no noise":
        frame["y"] = frame["x0"] + frame["x1"]
    elif odd == "count":
        frame["y"], kind = np.random.default_rng(0).poisson(np.exp(0.5 * frame["x0"])), "count"
    else:
        frame["y"] = np.array(["a", "b", "c"])[np.digitize(frame["y"], [-0.7, 0.7])]
    found = told(frame, target_type=kind, folds=2).clients
    assert set(found["recommended"]) <= {"personal", "global", "local"}
    kinds = ("improvement_over", "probability_better_than")
    numbers = [f"{kind}_{other}" for kind in kinds for other in ("local", "global")]
    assert np.isfinite(found[numbers]).all().all()


def test_a_single_client_is_one_sentence():
    with pytest.raises(RequestError, match="one client only"):
        told(planted(0.0, clients=1))


def test_networks():
    frame = planted(1.5, clients=4, samples=40)
    advice = told(frame, model=lambda features: nn.Linear(features, 1), rounds=8)
    assert advice.summary["recommended"] <= 1.1 * min(advice.summary["local"], advice.summary["global"])
    assert advice.theory is None and set(advice.path["family"]) == {"global", "local", "lambda"}


def test_the_command_prints_the_headline_and_writes_a_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    planted(0.5, clients=6).to_csv("rows.csv", index=False)
    words = ["advise", "rows.csv", "--client", "who", "--target", "y", "--threads", "1", "--folds", "2"]
    with pytest.raises(SystemExit) as left:
        main([*words, "--shape", "linear", "--out", "run"])
    out = " ".join(capsys.readouterr().out.split())
    assert left.value.code == 0 and open_run("run").advice["headline"] in out
    assert not list((tmp_path / "run").glob("*.png"))  # drawn when they are asked for
    with pytest.raises(SystemExit) as left:
        main(["resume", "run", "--json"])  # finished, it is only read again
    table = json.loads(capsys.readouterr().out)
    assert left.value.code == 0 and set(table) == {"headline", "summary", "clients", "run"}


@pytest.mark.parametrize("width", [8, 70])
def test_kernel_tasks_are_advised_on_their_features(width):
    frame = planted(0.3, clients=6)
    frame["y"] = np.sin(2 * frame["x0"]) + 0.1 * frame["y"]
    advice = told(frame, task={"name": "kernel", "width": width}, folds=3)
    assert advice.models.personal.shape == (6, width + 1) and np.isfinite(advice.summary["recommended"])
    assert len(advice.choice.priors[0].variance) == width + 1
