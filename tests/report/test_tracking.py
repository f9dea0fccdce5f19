"""A run told to a tracker says what its directory says; both trackers write to this folder only."""

import io
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import mooring
from mooring.cli import main
from mooring.report.report_contents import collect_contents
from mooring.report.tracking import collect_final_losses, flatten_parameters, iterate_losses
from tests.report.example_runs import federation


@pytest.fixture
def table(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    federation().to_csv("table.csv", index=False)
    return ["table.csv", "--client", "who", "--target", "y", "--threads", "1", "--rounds", "4"]


def call(capsys, *argv):
    with pytest.raises(SystemExit) as left:
        main([*argv])
    told = capsys.readouterr()
    return left.value.code, told.out, told.err


def test_a_tracker_that_is_not_there_is_told_before_the_work(table, monkeypatch, capsys):
    code, _, err = call(capsys, "fit", *table, "--track", "diary", "--out", "run")
    assert code == 2 and "--track takes mlflow or tensorboard, got 'diary'" in err
    monkeypatch.setattr("mooring.report.tracking.find_spec", lambda name: None)
    code, _, err = call(capsys, "fit", *table, "--track", "mlflow", "--out", "run")
    assert code == 2 and "pip install 'mooring-fl[mlflow]'" in err and not Path("run").exists()


def test_settings_have_dotted_names():
    table = {"mooring": {"seal": "x", "format": 1}, "data": {"drop": ["a"], "partition": {"clients": 3}}}
    found = dict(flatten_parameters(table))
    assert found == {"mooring.format": "1", "data.drop": "['a']", "data.partition.clients": "3"}


def test_mlflow_keeps_parameters_losses_and_the_page(table, capsys):
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    code, out, _ = call(capsys, "fit", *table, "--track", "mlflow", "--out", "run")
    assert code == 0 and "Tracked: file://" in out
    (kept,) = mlflow.search_runs(experiment_names=["mooring"], output_format="list")
    run = mooring.open("run")
    assert kept.data.params["algorithm.name"] == "fedprox_personal" and kept.data.params["training.rounds"] == "4"
    assert kept.data.metrics["final_personal"] == pytest.approx(run.summary["personal"])
    history = mlflow.MlflowClient().get_metric_history(kept.info.run_id, "test_loss")
    rounds = run.directory.rounds.dropna(subset=["test_loss"])
    assert [(m.step, m.value) for m in history] == [(t, v) for t, v in zip(rounds["round"], rounds["test_loss"])]
    assert {a.path for a in mlflow.MlflowClient().list_artifacts(kept.info.run_id)} == {"report.html", "run.toml"}


def test_tensorboard_keeps_losses(table, capsys):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    code, out, _ = call(
        capsys, "compare", *table, "--methods", "local,fedavg", "--track", "tensorboard", "--out", "run"
    )
    assert code == 0 and "Tracked: tensorboard/run" in out
    events = EventAccumulator("tensorboard/run").Reload()
    told = collect_contents("run")
    for name, step, value in iterate_losses(told):
        found = {event.step: event.value for event in events.Scalars(name)}
        np.testing.assert_allclose(found[step], value, rtol=1e-6)
    assert (
        {f"final_{m}" for m in ("local", "fedavg")} == set(collect_final_losses(told)) <= set(events.Tags()["scalars"])
    )


def test_clients_as_csv_on_stdout(table, capsys):
    for command in (["fit"], ["compare", "--methods", "local,fedavg"]):
        code, out, _ = call(capsys, command[0], *table, *command[1:], "--csv", "--out", command[0])
        found = pd.read_csv(io.StringIO(out))
        assert code == 0 and len(found) == 30 and "client" in found
