"""Advice for networks: the grid of local training, the candidates, and models that are trained on all rows."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import mooring
from mooring.advice.candidates.families import GLOBAL, TUNED, Setting
from mooring.advice.candidates.network_candidates import (
    ADAPTIVE_ETAS,
    SGD_ETA_FACTORS,
    NetworkPlan,
    Progress,
    StopBelowMedian,
    list_variants,
    make_algorithm,
    train_local,
)
from mooring.advice.evaluation.networks import NetworkCheckpoint, choose_from_checkpoint
from mooring.advice.reporting.setting_summary import as_algorithm
from mooring.algorithms.base import build
from mooring.core.cohort import Rows
from mooring.core.errors import RequestError
from mooring.data.clients import CLASSES, Clients
from mooring.engines.metrics import row_errors
from mooring.engines.prepare import prepare
from mooring.engines.request import request
from mooring.runs.directory import open_run


def make_clients(m=4, n=30, seed=0):
    """Three classes, each client's labels permuted by its own number."""
    rng = np.random.default_rng(seed)
    center = rng.normal(size=(3, 4)) * 2

    def rows(count):
        ys = [rng.integers(0, 3, count) for _ in range(m)]
        xs = [center[y] + rng.normal(size=(count, 4)) for y in ys]
        labels = [torch.from_numpy((y + i % 2) % 3) for i, y in enumerate(ys)]
        return Rows.stack([torch.tensor(x, dtype=torch.float32) for x in xs], labels)

    names = tuple(f"client {i}" for i in range(m))
    return Clients(names, rows(n), rows(n // 2), rows(n // 2), kind=CLASSES, classes=("a", "b", "c"))


def net(features, classes):
    return nn.Sequential(nn.Linear(features, 6), nn.Tanh(), nn.Linear(6, classes))


HOW = {"model": net, "threads": 1, "rounds": 6, "folds": 2}


def test_what_is_given_is_not_tried():
    job = SimpleNamespace(clients=make_clients())
    free = list_variants(job, {}, 0.1)
    assert [v["eta"] for v in free[: len(SGD_ETA_FACTORS)]] == [f * 0.1 for f in SGD_ETA_FACTORS]
    assert {v.get("optimizer") for v in free} == {None, "adamw"} and any(v.get("server_optimizer") for v in free)
    given = {"eta": 0.3, "steps": 5, "batch": 8, "optimizer": "sgd", "server_optimizer": "sgd"}
    assert list_variants(job, given, 0.1) == [given]
    adam = list_variants(job, {"optimizer": "adam", "steps": 5, "batch": 8, "server_optimizer": "sgd"}, 0.1)
    assert [v["eta"] for v in adam] == list(ADAPTIVE_ETAS)
    many = SimpleNamespace(clients=make_clients(n=200))
    assert [v["epochs"] for v in list_variants(many, {"eta": 0.1}, 0.1) if v.get("epochs")] == [5]  # 7 batches each


def test_rounds_are_scaled_to_the_rows_where_a_round_has_a_fixed_number_of_steps():
    setting = Setting(GLOBAL, 0.0)
    plan = NetworkPlan({}, {}, {"global 0.0": 10}, rows=100)
    assert plan.scaled_rounds(setting, 150) == 15 and plan.scaled_rounds(setting, 1) == 1
    assert NetworkPlan({"epochs": 1}, {}, {"global 0.0": 10}, rows=100).scaled_rounds(setting, 150) == 10


def test_a_run_below_the_median_is_stopped_after_the_first_quarter():
    curves = {"a": {1: 1.0, 4: 0.5}, "b": {1: 1.0, 4: 0.6}, "c": {1: 1.0, 4: 0.9}}
    callback, training = (
        StopBelowMedian(curves, "mine"),
        SimpleNamespace(rounds=8, state=SimpleNamespace(stopped=False)),
    )
    callback.on_evaluation(training, SimpleNamespace(validation_loss=5.0), SimpleNamespace(t=1))
    assert not training.state.stopped
    callback.on_evaluation(training, SimpleNamespace(validation_loss=0.55), SimpleNamespace(t=4))
    assert not training.state.stopped and curves["mine"] == {1: 5.0, 4: 0.55}
    other = StopBelowMedian(curves, "other")
    other.on_evaluation(training, SimpleNamespace(validation_loss=0.7), SimpleNamespace(t=4))
    assert training.state.stopped


def test_a_pull_makes_steps_smaller():
    plan = NetworkPlan({"eta": 0.5, "batch": 8})
    assert make_algorithm(Setting("ditto", 3.0), plan).eta == pytest.approx(1 / (1 / 0.5 + 3.0))
    assert make_algorithm(Setting("fedper", 0.0), plan).eta == 0.5


@pytest.mark.parametrize("chosen,given,better", [({"eta": 1e-6}, {}, "given"), ({"eta": 0.3}, {"eta": 1e-6}, "chosen")])
def test_local_models_keep_the_better_of_two_local_trainings(chosen, given, better):
    """Steps that suit FedAvg and not a client by itself do not weaken the models that personal ones are compared to."""
    clients = make_clients()
    job = prepare(request(clients, purpose="advise", model=net, threads=1, rounds=6), clients, net)

    def train(work, given):
        plan = NetworkPlan(work)
        return train_local(job, given, plan, Progress(lambda *line: None, 2, lambda: 0.0)).outcome.state.best, plan

    (best, plan), (of_chosen, _), (of_given, _) = train(chosen, given), train(chosen, chosen), train(given, given)
    assert of_chosen != of_given and best == min(of_chosen, of_given)
    assert best == (of_given if better == "given" else of_chosen)
    assert (plan.local["eta"] == chosen["eta"]) == (better == "chosen")


def test_progress_names_the_step_and_estimates_the_time_left():
    now, lines = [0.0], []
    progress = Progress(lambda *line: lines.append(line), 4, lambda: now[0])
    step = progress.step("FedAvg")
    now[0] = 10.0
    step("", 5, 10)
    assert lines[-1] == ("FedAvg (1 of about 4, 70 s left)", 5, 10)
    now[0] = 1000.0
    step("", 10, 10)
    assert lines[-1][0] == "FedAvg (1 of about 4, 50 min left)"


@pytest.fixture(scope="module")
def advised(tmp_path_factory):
    run = tmp_path_factory.mktemp("networks") / "run"
    lines = []
    settings = {"lr": 0.2, "batch": 10, "optimizer": "sgd"}
    result = mooring.advise(make_clients(), out=run, settings=settings, progress=lambda *s: lines.append(s), **HOW)
    return result, run, lines


def test_given_settings_are_used_and_stored(advised):
    result, run, lines = advised
    assert result.choice.local_training["eta"] == 0.2 and result.choice.local_training["batch"] == 10
    stored = open_run(run).run
    assert stored.advice.settings == {"batch": 10, "eta": 0.2, "optimizer": "sgd"}
    assert stored.algorithm.fields["batch"] == 10
    assert any("of about" in what for what, *_ in lines)


def test_all_families_are_candidates(advised):
    result, _, _ = advised
    families = {"global", "tuned", "lambda", "ditto", "mixture", "fedper", "fedrod", "local"}
    assert set(result.choice.table["family"]) == families
    assert (result.choice.table["family"] == "global").sum() == 2  # FedAvg and FedProx


def test_permuted_labels_are_not_given_the_global_model(advised):
    result, _, _ = advised
    assert set(result.clients["recommended"]) <= {"personal", "local"}
    assert result.summary["recommended"] < result.summary["global"]


@pytest.mark.parametrize("family", ["tuned", "lambda", "ditto", "mixture", "fedper", "fedrod", "local", "global"])
def test_a_plan_is_an_algorithm_that_new_clients_get_their_models_by(advised, family):
    result, _, _ = advised
    settings = result.choice.table[result.choice.table["family"] == family]
    choice = result.choice._replace(plan=Setting(family, float(settings["value"].iloc[0])))
    section = as_algorithm(choice, result.evidence.own.rows)
    algorithm = build(section.pop("name"), section)
    assert algorithm.batch == 10 or family == "global"  # of which new clients get the model as it is


def test_selection_by_accuracy():
    clients = make_clients()
    job = prepare(request(clients, purpose="advise", model=net, select_by="accuracy", threads=1), clients, net)
    rows = int(clients.validation.size.sum())
    loss = torch.stack([torch.full((rows,), value) for value in (0.3, 0.2, 0.4)])
    error = torch.stack([torch.full((rows,), value) for value in (0.1, 0.5, 0.1)])
    settings = [Setting(GLOBAL, 0.0), Setting(TUNED, 1.0), Setting("local", 0.0)]
    known = {"settings": [list(s) for s in settings], "plan": {}}
    choice, _ = choose_from_checkpoint(job, NetworkCheckpoint({"loss": loss, "error": error}, known))
    assert choice.plan == settings[0]  # as accurate as the third, and of lower loss
    assert choice.table["loss"].tolist() == pytest.approx([0.3, 0.2, 0.4])
    by_loss, _ = choose_from_checkpoint(job, NetworkCheckpoint({"loss": loss}, known))
    assert by_loss.plan == settings[1]


def test_errors_by_row():
    clients = make_clients()
    job = prepare(request(clients, purpose="advise", model=net, threads=1), clients, net)
    w = torch.stack([job.task.start(k) for k in range(len(clients))])
    expected = []
    for i in range(len(clients)):
        x, y = clients.validation.of(i)
        expected.append(job.task.predict(w[i][None], x[None])[0].argmax(1) != y)
    assert torch.equal(row_errors(job.task, w, clients.validation), torch.cat(expected).double())


def test_a_network_with_running_statistics_is_advised():
    def normalized(features, classes):
        return nn.Sequential(nn.Linear(features, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, classes))

    work = {"eta": 0.1, "steps": 3, "batch": 8, "optimizer": "sgd", "server_optimizer": "sgd"}  # nothing to try
    result = mooring.advise(make_clients(m=3, n=16), settings=work, **(HOW | {"model": normalized, "rounds": 2}))
    assert set(result.choice.table["family"]) >= {"mixture", "fedrod", "ditto"}  # which train statistics, too


def test_what_does_not_apply_is_refused():
    clients = make_clients()
    with pytest.raises(RequestError, match="unknown hyperparameter 'etta'"):
        mooring.advise(clients, settings={"etta": 1.0}, **HOW)
    with pytest.raises(RequestError, match="solved exactly"):
        mooring.advise(clients, settings={"eta": 1.0}, threads=1)
    with pytest.raises(RequestError, match="select_by = 'auc'"):
        mooring.advise(clients, select_by="auc", **HOW)
