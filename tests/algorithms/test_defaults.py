"""Defaults work on tables they have never seen: after 100 rounds no method is much worse than its two referees."""

from functools import cache

import pytest

from mooring.algorithms.base import algorithm_names, build
from mooring.data.loading import load
from mooring.engines.loop import run
from mooring.engines.training_state import TrainingPlan, TrainingState
from mooring.tasks import catalog
from tests.algorithms.cases import TABLE_FIELDS
from tests.support.problems import settled_simulator
from tests.support.tables import TABLES


@cache
def problem(name):
    table = TABLES[name]
    clients = load(table.path, seed=0, **table.columns)
    return catalog.build("auto", clients.kind, clients.train.x.shape[1], len(clients.classes)), clients


@cache
def loss_of(name, table):
    ready, exchange, server = settled_simulator(build(name, TABLE_FIELDS.get(name, {})), *problem(table))
    return run(
        ready, exchange, TrainingPlan(rounds=100, evaluate_every=100, checkpoint="last"), TrainingState(server)
    ).last.test_loss


@pytest.mark.slow
@pytest.mark.parametrize("table", ["exam", "contraception"])
@pytest.mark.parametrize("name", algorithm_names())
def test_defaults_stay_near_the_baselines(name, table):
    if name.startswith("kernel"):
        pytest.skip("held to its own referees in test_kernel.py")
    assert loss_of(name, table) <= 1.2 * max(loss_of("local", table), loss_of("pooled", table))
