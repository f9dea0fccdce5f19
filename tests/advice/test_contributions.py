"""Reasons: influence against refitting, rows to match against a simulation, strangers found."""

import numpy as np
import pytest
import torch
from scipy.stats import false_discovery_control

from mooring.advice.candidates.families import DIAGONAL, GLOBAL, LAMBDA, SIZE, Setting, fit_settings
from mooring.advice.reporting.contributions import (
    estimate_contributions,
    find_outliers,
    fit_with_curvature,
    rows_to_match,
    select_discoveries,
)
from mooring.data.folds import row_losses
from mooring.partial_pooling.client_prior import estimate_priors, select_priors
from mooring.partial_pooling.lambda_path import ridge_mask
from mooring.tasks.linear import Linear
from mooring.tasks.logistic import Logistic
from tests.support.linear_federation import LinearFederation
from tests.support.problems import linear_clients, logistic_clients


@pytest.mark.parametrize(
    "setting", [Setting(LAMBDA, 0.5), Setting(GLOBAL, 0.0), Setting(SIZE, 1.0), Setting(DIAGONAL, 2.0)]
)
@pytest.mark.parametrize("kind", ["linear", "logistic"])
def test_what_a_client_brings_is_what_refitting_without_it_costs(kind, setting):
    if kind == "linear":
        task, clients = Linear(3), linear_clients(m=8, sizes=[30] * 8)
    else:
        task, clients = Logistic(3), logistic_clients(m=8, sizes=[80] * 8)
    rows, held, p = clients.train, clients.validation, clients.weights()
    prior = next(
        (
            q
            for q in estimate_priors(task, rows)
            if {SIZE: "scalar", DIAGONAL: "diagonal"}.get(setting.family) == q.kind
        ),
        None,
    )
    fit = fit_with_curvature(task, rows, p, setting, [] if prior is None else [prior])
    found = estimate_contributions(task, fit, p, held, 0.0 * ridge_mask(task))
    with_all = row_losses(task, fit.v, held)
    owner = torch.repeat_interleave(torch.arange(8), held.size)
    for i in (0, 5):
        rest = torch.tensor([k for k in range(8) if k != i])
        part = [] if prior is None else select_priors([prior], rest)
        v = fit.v.clone()
        v[rest] = next(fit_settings(task, rows.select(rest), p[rest], [setting], part)).v
        change = (row_losses(task, v, held) - with_all)[owner != i].mean()
        assert found[i] == pytest.approx(
            float(change), rel=1e-6 if kind == "linear" else 0.25, abs=1e-9 if kind == "linear" else 2e-4
        )


def test_rows_to_match_are_those_at_which_least_squares_alone_is_as_good():
    task, ratios = Linear(5, intercept=False), []
    for seed in range(5):
        made = LinearFederation(clients=60, samples=30, dim=5, spread=0.15, noise=1.0).make(seed)
        prior = estimate_priors(task, made.train)[0]
        fit = fit_with_curvature(task, made.train, made.weights(), Setting(SIZE, 1.0), [prior])
        risk = float(made.truth.excess_risk(fit.v).mean())
        needed = float(np.mean(rows_to_match(fit, made.train)))
        ratios.append(risk / (0.5 * 5 / needed))  # least squares with n rows: noise^2 d / (2 n)
    assert 0.8 < np.mean(ratios) < 1.3


def test_a_common_plan_would_never_be_matched():
    clients = linear_clients()
    fit = fit_with_curvature(Linear(3), clients.train, clients.weights(), Setting(GLOBAL, 0.0), [])
    assert np.isinf(rows_to_match(fit, clients.train)).all()


def test_outliers_are_found_and_others_are_not():
    federation = LinearFederation(clients=60, samples=60, dim=4, spread=0.3, noise=0.5)
    made = federation.make(0)
    task = Linear(4, intercept=False)
    assert find_outliers(estimate_priors(task, made.train)[0], 60).sum() <= 3
    made = federation.make(0)
    x, y = made.train.of(7)
    y += x @ torch.full((4,), 2.5, dtype=torch.float64)
    assert find_outliers(estimate_priors(task, made.train)[0], 60)[7]


def test_discoveries_are_those_of_benjamini_and_hochberg():
    rng = np.random.default_rng(0)
    for few in (0, 3, 30):
        chance = np.concatenate([rng.uniform(size=100), 1e-3 * rng.uniform(size=few), [1.0, 1.0]])
        np.testing.assert_array_equal(select_discoveries(chance, 0.05), false_discovery_control(chance) <= 0.05)
