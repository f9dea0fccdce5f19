"""Measures that people know, against scikit-learn's."""

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import t
from sklearn.metrics import (
    accuracy_score,
    f1_score,
    mean_absolute_error,
    r2_score,
    roc_auc_score,
    root_mean_squared_error,
)

import mooring
from mooring.core.errors import RequestError
from mooring.engines.callbacks import Callback
from mooring.engines.metrics import compute_metrics, improvement_pct, mean_improvement
from mooring.report.terminal import Display
from mooring.run_verbs import show_run
from mooring.runs.directory import open_run
from tests.support.homes import homes

HOW = {"client": "town", "threads": 1, "rounds": 3}


def held_out(run, frame):
    split = open_run(run).split
    return frame.iloc[np.sort(split[split["part"] == "test"]["row"])]


def test_numbers_in_the_units_of_the_target(tmp_path):
    frame = homes().drop(columns=["sold", "band"])
    result = mooring.fit(frame, target="price", out=tmp_path / "run", **HOW)
    rows = held_out(tmp_path / "run", frame)
    found = mooring.predict(tmp_path / "run", rows)[0]["price"]
    told = result.summary["measures"]["personal"]
    assert told["rmse"] == pytest.approx(root_mean_squared_error(rows["price"], found), rel=1e-9)
    assert told["mae"] == pytest.approx(mean_absolute_error(rows["price"], found), rel=1e-9)
    assert told["r2"] == pytest.approx(r2_score(rows["price"], found), rel=1e-9)
    assert told["rmse"] ** 2 == pytest.approx(result.summary["personal"], rel=1e-9)
    for _, client in result.clients.iterrows():
        mine = (rows["town"] == client["client"]).to_numpy()
        assert client["r2"] == pytest.approx(r2_score(rows["price"][mine], found[mine]), rel=1e-9)
        assert client["mae"] == pytest.approx(mean_absolute_error(rows["price"][mine], found[mine]), rel=1e-9)
    assert set(result.summary["measures"]) == {"local", "pooled", "personal"}
    again = mooring.open(tmp_path / "run")
    assert again.summary["measures"] == result.summary["measures"]
    pd.testing.assert_series_equal(again.clients["r2"], result.clients["r2"])
    losses = result.rounds.dropna(subset=["test_loss"])
    np.testing.assert_allclose(losses["test_rmse"] ** 2, losses["test_loss"])
    last = losses[losses["round"] == result.summary["best_round"]].iloc[0]
    assert last["test_rmse"] == pytest.approx(told["rmse"]) and last["test_r2"] == pytest.approx(told["r2"])


def test_classes(tmp_path):
    frame = homes()
    for target, other in (("sold", "band"), ("band", "sold")):
        run = tmp_path / target
        result = mooring.fit(frame.drop(columns=["price", other]), target=target, out=run, **HOW)
        rows = held_out(run, frame)
        found, told = mooring.predict(run, rows)[0], result.summary["measures"]["personal"]
        assert told["accuracy"] == pytest.approx(accuracy_score(rows[target], found[target]))
        kept = result.rounds.set_index("round").loc[result.summary["best_round"]]
        assert kept["test_accuracy"] == pytest.approx(told["accuracy"])
        assert open_run(run).rounds["test_accuracy"].notna().all()
        if target == "band":
            assert set(told) == {"accuracy"} and "test_auc" not in open_run(run).rounds
            continue
        assert kept["test_auc"] == pytest.approx(told["auc"])
        assert told["auc"] == pytest.approx(roc_auc_score(rows["sold"] == "sold", found["p(sold)"]))
        for _, client in result.clients.iterrows():
            mine = (rows["town"] == client["client"]).to_numpy()
            truth, prob = rows["sold"][mine] == "sold", found["p(sold)"][mine]
            assert client["auc"] == pytest.approx(roc_auc_score(truth, prob))


def test_ties_and_clients_of_one_class():
    from mooring.engines.metrics import auc

    y, score = np.array([0, 1, 0, 1, 1, 1]), np.array([0.5, 0.5, 0.2, 0.9, 0.1, 0.2])
    owner = np.array([0, 0, 0, 0, 2, 2])
    found = auc(y, score, owner, 3)
    assert found[0] == roc_auc_score(y[:4], score[:4]) and np.isnan(found[1:]).all()


def test_nobody_to_score():
    result = mooring.fit(homes().drop(columns=["sold", "band"]), target="price", **HOW)
    assert compute_metrics(result.job.task, result.job.clients, None) == ({}, {})


def test_improvements_follow_from_the_losses():
    """In percent of the other loss, by client and over all rows, with Student's interval clustered by client."""
    assert improvement_pct(4.0, 3.0) == 25 and np.isnan(improvement_pct(0.0, 1.0))
    result = mooring.fit(homes().drop(columns=["sold", "band"]), target="price", **HOW)
    summary, clients = result.summary, result.clients
    for other in ("local", "pooled"):
        line = summary[f"improvement_over_{other}"]
        assert line["mean"] == pytest.approx(summary[other] - summary["personal"])
        assert line["pct"] == pytest.approx(100 * (1 - summary["personal"] / summary[other]))
        rows, gap = clients["test"].to_numpy(float), (clients[other] - clients["personal"]).to_numpy()
        m = len(rows)
        error = np.sqrt(m / (m - 1) * ((rows * (gap - line["mean"])) ** 2).sum()) / rows.sum()
        reach = t.ppf(0.975, m - 1) * error
        assert line["mean"] - line["ci_low"] == pytest.approx(reach)
        assert line["ci_high"] == pytest.approx(min(line["mean"] + reach, summary[other]))  # at most all of the loss
        assert line["ci_low"] < line["mean"] < line["ci_high"]
    pct = 100 * (1 - clients["personal"] / clients["local"])
    np.testing.assert_allclose(clients["improvement_over_local_pct"], pct)
    assert mean_improvement([3, 0], [np.nan, 1.0], [1.0, 1.0]) is None


def test_a_network_that_says_one_logit(tmp_path, monkeypatch):
    """Two classes by one number, or several labels a row, have an accuracy as well."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text("from torch import nn\ndef make(features):\n    return nn.Linear(features, 1)\n")
    frame = homes().drop(columns=["price", "band"])
    result = mooring.fit(frame, target="sold", model="net.py:make", out="run", algorithm="fedavg", **HOW)
    rows, told = held_out("run", frame), result.summary["measures"]["personal"]
    found = mooring.predict("run", rows)[0]
    assert told["accuracy"] == pytest.approx(accuracy_score(rows["sold"], found["sold"]))
    assert told["auc"] == pytest.approx(roc_auc_score(rows["sold"] == "sold", found["p(sold)"]), abs=1e-6)


def test_several_labels_a_row():
    rng = np.random.default_rng(0)
    sites = {}
    for name in "abc":
        x = rng.normal(size=(40, 3)).astype("float32")
        sites[name] = (x, (x[:, :2] > 0).astype("float32"))
    result = mooring.fit(torch.nn.Linear(3, 2), sites, algorithm="fedavg", threads=1, rounds=3)
    clients = result.job.clients
    right = [
        ((result.predict(x, name) > 0.5) == (y > 0.5)).double().mean(1)
        for name, (x, y) in zip(clients.names, map(clients.test.of, range(3)))
    ]
    assert result.summary["measures"]["personal"] == {"accuracy": pytest.approx(float(torch.cat(right).mean()))}
    assert result.rounds["test_accuracy"].between(0, 1).all()


def test_metrics_of_users_in_every_round_and_by_client(tmp_path):
    frame = homes()
    lines = []

    class Watch(Callback):
        def on_round_end(self, training, record):
            lines.append(record["test_f1"])

    def f1(y, prediction):
        return f1_score(y, prediction)

    def brier(y, probabilities):
        return float(np.mean((probabilities[:, 1] - y) ** 2))

    how = HOW | {"target": "sold", "drop": ["band"], "metrics": {"f1": f1, "brier": brier}, "evaluate_every": 1}
    result = mooring.fit(frame, out=tmp_path / "run", callbacks=[Watch()], **how)
    rows = held_out(tmp_path / "run", frame)
    found = mooring.predict(tmp_path / "run", rows)[0]
    label = found.columns[-1] if "sold" not in found else "sold"
    positive = sorted(frame["sold"].unique())[1]
    y, said = rows["sold"] == positive, found[label] == positive
    assert result.summary["measures"]["personal"]["f1"] == pytest.approx(f1_score(y, said))
    assert result.rounds["test_f1"].tolist() == lines and len(lines) == 3
    first = result.clients.iloc[0]
    mine = (rows["town"] == first["client"]).to_numpy()
    assert first["test_f1"] == pytest.approx(f1_score(y[mine], said[mine]))
    assert 0 < first["test_brier"] < 1
    again = mooring.open(tmp_path / "run")
    assert open_run(tmp_path / "run").rounds["test_f1"].tolist() == lines
    pd.testing.assert_series_equal(again.clients["test_brier"], result.clients["test_brier"])
    with pytest.raises(RequestError, match="metric 'bad' fails: ZeroDivisionError"):
        mooring.fit(frame, **(how | {"metrics": {"bad": lambda y, p: 1 / 0}}))


def test_the_best_round_by_a_measure(tmp_path):
    frame = homes()
    rounds = []

    class Watch(Callback):
        def on_evaluation(self, training, evaluation, round):
            rounds.append((evaluation.validation_measures["accuracy"], -round.t, evaluation.validation_loss))

    how = HOW | {"target": "band", "drop": ["sold"], "algorithm": "fedavg", "rounds": 12, "evaluate_every": 1}
    result = mooring.fit(
        frame, select_by="accuracy", settings={"eta": 2.0}, baselines=False, callbacks=[Watch()], **how
    )
    assert result.summary["best_round"] == -max(rounds)[1]
    with pytest.raises(RequestError, match="select_by = 'f2' is not measured"):
        mooring.fit(frame, select_by="f2", **how)


def test_a_comparison_has_each_clients_accuracy_by_method(tmp_path, capsys):
    frame = homes().drop(columns=["price", "band"])
    result = mooring.compare(frame, ["local", "fedavg"], target="sold", out=tmp_path / "run", **HOW)
    for method in ("local", "fedavg"):
        measures = mooring.fit(frame, target="sold", algorithm=method, **HOW).clients.set_index("client")
        table = result.clients.set_index("client")
        np.testing.assert_allclose(table[f"{method} accuracy"], measures.loc[table.index, "accuracy"])
        rows = result.clients["test"] * result.clients[f"{method} accuracy"]
        total = rows.sum() / result.clients["test"].sum()
        assert total == pytest.approx(result.methods.set_index("method").loc[method, "accuracy"])
    written = pd.read_csv(tmp_path / "run" / "clients.csv")
    assert written.columns.tolist() == result.clients.columns.tolist()
    show_run(Display(), tmp_path / "run", per_client=True)
    assert "test accuracy by client" in capsys.readouterr().out
