"""mspp: every row of its catalogue has claims, and what its experiments measure is what they say."""

import numpy as np
import pytest
import torch

from mooring.tasks.network import NetworkTask
from mooring_papers.base import catalog
from mooring_papers.base.results import Results, Trial
from mooring_papers.mspp import _accuracy_targets, _ratio_claims, tab1


def test_figures_1_and_2_share_their_runs():
    assert (
        catalog.load_experiment("mspp-fig1").experiment.trial is catalog.load_experiment("mspp-fig2").experiment.trial
    )


def test_data_points_are_gradients_of_rows():
    problem = _accuracy_targets.PROBLEMS["tiny"]["a"]._replace(rounds=3)
    clients, task = problem.make(0), NetworkTask(problem.net)
    methods = _accuracy_targets.algorithms(problem)
    n = int(clients.train.size[0])
    assert (clients.train.size - n).abs().max() <= 3
    for name, rows in (("FedMSPP, large b", problem.minibatches[0]), (_accuracy_targets.FEDPROX, n)):
        points = _accuracy_targets.track(methods[name], task, clients, problem, 0, np.inf).points
        assert points / (problem.sampled * problem.epochs * rows) == pytest.approx([1, 2, 3], rel=0.06)


def test_a_run_stops_when_its_accuracy_is_enough():
    problem = _accuracy_targets.PROBLEMS["tiny"]["a"]
    clients, task = problem.make(0), NetworkTask(problem.net)
    assert (
        len(
            _accuracy_targets.track(
                _accuracy_targets.algorithms(problem)["FedAvg"], task, clients, problem, 0, 0.0
            ).accuracy
        )
        == 1
    )


def test_reached_takes_the_first_round_at_the_target():
    track = _accuracy_targets.Track(np.array([0.1, 0.6, 0.5, 0.8]), np.array([10.0, 20.0, 30.0, 40.0]))
    rounds, points = _accuracy_targets.reached(track, np.array([0.5, 0.7, 0.9]))
    assert rounds[:2] == [2, 4] and points[:2] == [20, 40]
    assert np.isnan(rounds[2]) and np.isnan(points[2])


def test_ratios_are_judged_case_by_case():
    def results(values):
        return Results([Trial({"panel": "a"}, k, {"r": [v, v, v]}) for k, v in enumerate(values)])

    assert _ratio_claims.ratio_below({"r": "r"}, ["a"])(results([0.4, 0.5, 0.6])).outcome == "held"
    assert _ratio_claims.ratio_below({"r": "r"}, ["a"], 0.45)(results([0.4, 0.5, 0.6])).outcome == "open"
    assert _ratio_claims.ratio_below({"r": "r"}, ["a"])(results([-0.4, -0.5, -0.6])).outcome == "contradicted"
    assert _ratio_claims.ratio_below({"r": "r"}, ["a"])(results([np.nan, 0.5, 0.6])).outcome == "open"


def test_devices_with_equal_rows_and_unit_lengths():
    same = tab1.federation(0, 1.0, alike=True)
    assert torch.equal(same.train.of(0)[0], same.train.of(7)[0])
    apart = tab1.federation(0, 3.0)
    assert not torch.equal(apart.train.of(0)[1], apart.train.of(7)[1])
    assert torch.allclose(apart.train.x.norm(dim=1), torch.ones(len(apart.train.x), dtype=torch.float64))


def test_stationary_point_is_one():
    clients = tab1.federation(0, 1.0)
    pooled = clients.train.pooled(clients.weights("uniform"))
    assert float(tab1.RIDGED.grad(tab1.stationary(clients)[None], pooled).norm()) < 1e-4
