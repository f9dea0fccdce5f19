"""A run told to a tracker says what its directory says; both trackers write to this folder only."""

import io
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import mooring
from mooring.cli import main
from mooring.engines.callbacks import Callback
from mooring.report.report_contents import collect_contents
from mooring.report.tracking import collect_final_losses, iterate_losses
from mooring.runs.trackers import TRACKERS, flatten_parameters
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


def test_a_missing_tracker_is_refused_before_training(table, monkeypatch, capsys):
    code, _, err = call(capsys, "fit", *table, "--track", "diary", "--out", "run")
    assert code == 2 and "--track takes mlflow or tensorboard, got 'diary'" in err
    monkeypatch.setattr("mooring.runs.trackers.find_spec", lambda name: None)
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


class Diary:
    """A tracker that keeps what it is told, and when."""

    def __init__(self, name):
        self.location, self.name, self.entries, self.closed, self.parameters = "here", name, [], None, {}
        Diary.opened = self

    def log_parameters(self, parameters):
        self.parameters = dict(parameters)

    def log(self, name, value, step=0):
        self.entries.append((name, step, value))

    def log_file(self, path):
        pass

    def close(self, failed=False):
        self.closed = "failed" if failed else "finished"


@pytest.fixture
def diary(monkeypatch):
    monkeypatch.setitem(TRACKERS, "diary", Diary)
    monkeypatch.setattr("mooring.runs.trackers.find_spec", lambda name: name)


def test_fit_logs_every_evaluated_round_while_it_runs(diary):
    seen = []

    class Watch(Callback):
        def on_round_end(self, training, record):
            seen.append(len([entry for entry in Diary.opened.entries if entry[0] == "test_loss"]))

    result = mooring.fit(
        federation(), client="who", target="y", rounds=4, evaluate_every=2, track="diary", callbacks=[Watch()]
    )
    rounds = result.rounds.dropna(subset=["test_loss"])
    for column in ("train_loss", "validation_loss", "test_loss"):
        logged = [(step, value) for name, step, value in Diary.opened.entries if name == column]
        assert [step for step, _ in logged] == rounds["round"].tolist() == [2, 4]
        np.testing.assert_allclose([value for _, value in logged], rounds[column])
    assert seen == [0, 0, 1, 1]  # those of earlier rounds are there already when a later round ends
    finals = {name: value for name, _, value in Diary.opened.entries if name.startswith("final_")}
    assert finals == {f"final_{name}": result.summary[name] for name in ("personal", "local", "pooled")}
    assert Diary.opened.parameters["training.rounds"] == "4" and Diary.opened.closed == "finished"


def test_a_run_that_fails_is_closed_as_failed(diary):
    class Fail(Callback):
        def on_round_end(self, training, record):
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        mooring.fit(federation(), client="who", target="y", rounds=2, track="diary", callbacks=[Fail()])
    assert Diary.opened.closed == "failed"


def test_mlflow_has_the_rounds_of_a_fit_from_python(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    result = mooring.fit(federation(), client="who", target="y", rounds=4, evaluate_every=2, track="mlflow")
    client = mlflow.MlflowClient((tmp_path / "mlruns").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("mooring").experiment_id])
    history = client.get_metric_history(run.info.run_id, "test_loss")
    rounds = result.rounds.dropna(subset=["test_loss"])
    assert [m.step for m in history] == rounds["round"].tolist()
    np.testing.assert_allclose([m.value for m in history], rounds["test_loss"])
    assert run.info.status == "FINISHED" and run.data.params["training.rounds"] == "4"
