"""Newcomers to an advice: the models that its clients got, from what the run keeps of each setting."""

import shutil

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.optimize import minimize

import mooring
from mooring.advice.advise import advise
from mooring.advice.candidates.families import DIAGONAL, GLOBAL, LAMBDA, LOCAL, MIXTURE, SIZE, Setting, fit_settings
from mooring.advice.evaluation.cross_fitting import cross_fit
from mooring.advice.new_clients.model_average import average_models, describe_average, fit_new_clients
from mooring.advice.new_clients.personalize import personalize
from mooring.algorithms.base import build
from mooring.core.cohort import Round, Rows
from mooring.data.folds import concatenate_rows, iterate_client_folds, replace_client_rows, usable_rows
from mooring.data.loading import load
from mooring.engines.adaptation import adapt_models
from mooring.engines.predict import read_task_and_schema
from mooring.partial_pooling.client_prior import estimate_priors
from mooring.partial_pooling.lambda_path_iterative import RELATIVE_GRADIENT_TOLERANCE
from mooring.runs.directory import StoredMixture, open_run
from mooring.tasks.linear import Linear
from mooring.tasks.linear_losses import Absolute
from mooring.tasks.logistic import Logistic
from mooring.tasks.proximal import is_dense
from tests.support.problems import linear_clients, logistic_clients

SETTINGS = [
    Setting(GLOBAL, 0.03),
    Setting(LOCAL, 0.1),
    Setting(LOCAL, 0.1, free=True),
    Setting(LAMBDA, 0.4, 0.02),
    Setting(SIZE, 0.5, 0.02),
    Setting(DIAGONAL, 2.0, 0.02),
    Setting(MIXTURE, 0.25, 0.02, 0.3),
]
SIZES = [9, 30, 16, 24, 40, 12]
SLACK = torch.tensor([0.5, 0.0, 0.02, 1.0], dtype=torch.float64)  # the second coefficient is common to all
SLACKS = {f"linear.{family}": SLACK for family in (SIZE, DIAGONAL)}


def problem(name):
    if name == "linear":
        return Linear(3), usable_rows(linear_clients(6, sizes=SIZES))
    return Logistic(3), usable_rows(logistic_clients(6, sizes=SIZES))


def prior_like(task, rows, setting, noise):
    """A prior with slack SLACK, or its mean where all coefficients have the same."""
    slack = SLACK if setting.family == DIAGONAL else SLACK.mean().expand(4)
    kind = "diagonal" if setting.family == DIAGONAL else "scalar"
    (found, *_) = estimate_priors(task, rows)
    found = found._replace(kind=kind, variance=noise * slack, noise=torch.full((len(rows),), noise).double())
    return found, slack


@pytest.mark.parametrize("name", ["linear", "logistic"])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_with_a_clients_rows_and_the_settings_common_model_a_newcomer_has_the_clients_model(name, setting):
    task, rows = problem(name)
    prior, slack = prior_like(task, rows, setting, noise=0.3)
    (models,) = fit_settings(task, rows, rows.size.double(), [setting], [prior])
    found = fit_new_clients(task, rows, setting, models.w, slack).expand_as(models.v)
    torch.testing.assert_close(found, models.v, rtol=1e-7, atol=1e-7)
    if setting.family == DIAGONAL:
        assert torch.equal(found[:, 1], models.w[1].expand(len(rows)))
    if setting.family != GLOBAL:
        assert float((found - models.w).abs().max()) > 0.1


def naive_model(task, x, y, setting, w):
    """[d] by a general minimiser of the written-out objective; w is numpy."""
    design, slack = np.column_stack([x, np.ones(len(x))]), SLACK.numpy()

    def loss(v):
        z = design @ v
        if isinstance(task, Linear):
            rows, slope = 0.5 * (z - y) ** 2, z - y
        else:
            rows, slope = np.logaddexp(0, z) - y * z, 1 / (1 + np.exp(-z)) - y
        return rows.mean() + task.ridge / 2 * v @ v, design.T @ slope / len(y) + task.ridge * v

    def solved(lam, centre, moves):
        def objective(part):
            v = centre.copy()
            v[moves] = part
            value, slope = loss(v)
            return value + 0.5 * np.sum(lam * (v - centre) ** 2), (slope + lam * (v - centre))[moves]

        out = centre.copy()
        out[moves] = minimize(objective, centre[moves], jac=True, method="BFGS", options={"gtol": 1e-9}).x
        return out

    everything = np.full(4, True)
    if setting.family == GLOBAL:
        return w
    if setting.family == LOCAL:
        return solved(setting.value * np.array([1, 1, 1, 0 if setting.free else 1]), np.zeros(4), everything)
    if setting.family == MIXTURE:
        return setting.value * solved(setting.own_ridge, np.zeros(4), everything) + (1 - setting.value) * w
    if setting.family == LAMBDA:
        return solved(setting.value, w, everything)
    moves = slack > 0
    return solved(np.where(moves, setting.value / len(y) / np.where(moves, slack, 1), 0.0), w, moves)


@pytest.mark.parametrize("name", ["linear", "logistic"])
def test_the_average_by_weights_is_the_naive_one(name):
    task, rows = problem(name)
    rng = np.random.default_rng(0)
    weights, centres = rng.dirichlet(np.ones(len(SETTINGS))), rng.normal(size=(len(SETTINGS), 4))
    known = [s._asdict() | {"weight": float(weight)} for s, weight in zip(SETTINGS, weights)]
    found = average_models(task, rows, StoredMixture(known, torch.from_numpy(centres), SLACKS))
    for i in range(len(rows)):
        x, y = (part.numpy() for part in rows.of(i))
        parts = [naive_model(task, x, y, s, w) for s, w in zip(SETTINGS, centres)]
        np.testing.assert_allclose(found[i], weights @ np.stack(parts), rtol=1e-6, atol=1e-6)


def test_nobody_depends_on_other_newcomers():
    task, rows = problem("logistic")
    mix = StoredMixture(
        [s._asdict() | {"weight": 0.1} for s in SETTINGS], torch.ones(len(SETTINGS), 4).double(), SLACKS
    )
    together = average_models(task, rows, mix)
    for i in range(len(rows)):
        one = average_models(task, rows.select(torch.tensor([i])), mix)[0]
        torch.testing.assert_close(one, together[i], rtol=1e-10, atol=1e-10)


def test_without_rows_a_newcomer_is_where_its_moorings_are():
    """As a client without rows is: its own model is 0 then."""
    task, rows = problem("linear")
    some = Rows(rows.x, rows.y, torch.tensor([0, 8]), torch.tensor([8, 0]))
    w = torch.tensor([1.0, -2.0, 3.0, 0.5]).double()
    for setting in SETTINGS:
        v = fit_new_clients(task, some, setting, w, SLACK).expand(2, -1)
        share = {LOCAL: 0.0, MIXTURE: 0.75}.get(setting.family, 1.0)
        torch.testing.assert_close(v[1], share * w)


@pytest.mark.parametrize("name", ["linear", "logistic"])
def test_a_choices_mix_gives_its_clients_their_personal_models(name):
    task, rows = problem(name)
    choice, evidence = cross_fit(task, rows, np.arange(len(rows), dtype=np.uint64), folds=3)
    assert len(choice.mix) > 1 and not choice.own
    found = average_models(task, rows, describe_average(choice, evidence.models.centers))
    torch.testing.assert_close(found, evidence.models.personal, rtol=1e-6, atol=1e-6)


def test_kinked_losses():
    task, rows = Absolute(3), usable_rows(linear_clients(6, sizes=SIZES))
    for setting in (Setting(LAMBDA, 0.2), Setting(MIXTURE, 0.5, 0.0, 0.1), Setting(LOCAL, 0.1)):
        (models,) = fit_settings(task, rows, rows.size.double(), [setting])
        found = fit_new_clients(task, rows, setting, models.w, None)
        torch.testing.assert_close(found, models.v, rtol=1e-6, atol=1e-6)


def test_many_parameters_as_far_as_their_path_is_solved():
    """|v - prox(w)| <= |grad L(v) + lam (v - w)| / lam, and the path stops at RELATIVE times the first gradient."""
    task = Logistic(120, classes=3, ridge=0.01)
    rows = usable_rows(logistic_clients(4, d=120, sizes=[20, 30, 40, 50], classes=3))
    assert not is_dense(task)
    setting, p = Setting(LAMBDA, 0.3), rows.size.double() / rows.size.sum()
    (models,) = fit_settings(task, rows, p, [setting])
    found, batch = fit_new_clients(task, rows, setting, models.w, None), rows.padded()
    left = (task.grad(models.v, batch) + 0.3 * (models.v - models.w)).norm(dim=1)
    assert bool(((found - models.v).norm(dim=1) <= left / 0.3 + 1e-8).all())
    first = task.grad(torch.zeros_like(models.v), batch)
    assert float((p @ left**2).sqrt()) <= 2 * RELATIVE_GRADIENT_TOLERANCE * float((p @ first.square().sum(1)).sqrt())


def towns(clients=12, samples=30, seed=0):
    rng = np.random.default_rng(seed)
    truth = rng.normal(size=3) + 0.5 * rng.normal(size=(clients, 3))
    x = rng.normal(size=(clients, samples, 3))
    y = np.einsum("csj,cj->cs", x, truth) + rng.normal(size=(clients, samples))
    frame = pd.DataFrame(x.reshape(-1, 3), columns=["x0", "x1", "x2"])
    return frame.assign(who=np.repeat([f"c{i}" for i in range(clients)], samples), y=y.ravel())


@pytest.fixture(scope="module")
def advised(tmp_path_factory):
    """(the table, the advice, its run directory)."""
    frame, path = towns(), tmp_path_factory.mktemp("advised") / "run"
    return frame, advise(frame, client="who", target="y", threads=1, theory=False, shape="linear", out=path), path


def renamed(frame, who):
    """The very rows of some clients under other names."""
    some = frame[frame["who"].isin(who)]
    return some.assign(who="new " + some["who"])


def test_a_newcomer_with_a_clients_rows_gets_the_clients_model(advised):
    frame, advice, path = advised
    assert len(advice.choice.mix) > 1
    told = personalize(path, renamed(frame, advice.clients["client"]))
    assert told.way == "average" and told.clients["client"].tolist() == ["new " + c for c in advice.clients["client"]]
    which = np.flatnonzero(told.clients["recommended"] == "personal").tolist()
    assert len(which) > 6
    torch.testing.assert_close(told.models[which], advice.models.personal[which], rtol=1e-9, atol=1e-9)


def test_what_judges_newcomers_was_fitted_without_the_fold(advised):
    frame, _, path = advised
    rows = renamed(frame, ["c3"])
    told = personalize(path, rows, seed=5)
    directory = open_run(path)
    task, schema = read_task_and_schema(directory)
    clients = load(rows, schema=schema, seed=5, dtype=task.dtype)
    lost = []
    for part, held in iterate_client_folds(
        replace_client_rows(clients, concatenate_rows(clients.train, clients.test), clients.validation), 5
    ):
        left = concatenate_rows(part.train, part.validation)
        assert int(left.size) + int(held.size) == 30
        lost.append(task.row_risk(average_models(task, left, directory.models.mix), held.padded())[0])
    assert len(lost) == 5
    mean = float(torch.cat(lost).mean()) * clients.target_scale**2
    assert told.clients["personal_held_out"][0] == pytest.approx(mean, rel=1e-12)


def test_runs_of_before_and_other_ways_are_as_they_were(advised, tmp_path):
    frame, _, path = advised
    rows, directory = renamed(frame, [f"c{i}" for i in range(6)]), open_run(shutil.copytree(path, tmp_path / "before"))
    task, schema = read_task_and_schema(directory)
    asked, models = directory.run.algorithm, directory.models
    algorithm = build(asked.name, asked.fields)
    directory.write_models(models._replace(mix=None))
    before, other = personalize(directory.path, rows), personalize(path, rows, how=algorithm.new_client_method)
    assert before.way == other.way == algorithm.new_client_method == "prox"
    pd.testing.assert_frame_equal(before.clients, other.clients)
    assert torch.equal(before.models, other.models)
    clients = load(rows, schema=schema, dtype=task.dtype)
    whole = replace_client_rows(clients, concatenate_rows(clients.train, clients.test), clients.validation)
    server = algorithm.init(task, models.centre)[0]
    moored = adapt_models(algorithm, server, task, whole.cohort(), Round(1, 1, 6, 6, 1.0, 0))
    which = np.flatnonzero(before.clients["recommended"] == "personal").tolist()
    assert len(which) > 2 and torch.equal(before.models[which], moored[which])


def test_who_joined_leaves_the_average_as_it_was(advised, tmp_path):
    frame, _, path = advised
    first = personalize(path, renamed(frame, ["c4"]))
    personalize(path, renamed(frame, ["c7"]), out=tmp_path / "joined")
    again = personalize(tmp_path / "joined", renamed(frame, ["c4"]))
    assert again.way == "average" and torch.equal(again.models, first.models)
    assert mooring.open(tmp_path / "joined").names[-1] == "new c7"


def test_where_noises_differ_a_newcomer_is_moored_by_its_own():
    """With a client's rows it gets the client's model nearly: its noise is found around the centre that the clients
    were left with, not anew around that of all rows; with everyone's typical noise it would be far further off."""
    rng = np.random.default_rng(0)
    m, n, d = 30, 25, 3
    sd = np.where(np.arange(m) % 2 == 0, 0.5, 2.0)
    x = rng.standard_normal((m, n, d))
    w = rng.standard_normal(d) + 0.5 * rng.standard_normal((m, d))
    y = np.einsum("cnq,cq->cn", x, w) + sd[:, None] * rng.standard_normal((m, n))
    rows, task = Rows.stack(*([torch.from_numpy(one) for one in part] for part in (x, y))), Linear(d)
    choice, evidence = cross_fit(task, rows, np.arange(m, dtype=np.uint64))
    mix = describe_average(choice, evidence.models.centers)
    assert mix.noises is not None and not choice.own
    away = (evidence.models.personal - evidence.models.global_).norm(dim=1)
    off, typical = (
        float(((average_models(task, rows, kept) - evidence.models.personal).norm(dim=1) / away).mean())
        for kept in (mix, mix._replace(noises=None))
    )
    assert off < 0.02 and off < typical / 4, (off, typical)
