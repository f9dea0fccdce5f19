"""Server optimizers equal naive transcriptions of Reddi et al. (2021, Algorithm 2) and of FedAvgM."""

import math

import numpy as np
import pytest
import torch

from mooring.algorithms.base import algorithm_names, build, find
from mooring.algorithms.server_optimizers import SERVER_OPTIMIZERS, ServerOptimizer
from mooring.core.cohort import Round
from mooring.core.errors import RequestError
from mooring.tasks.linear import Linear
from tests.algorithms.cases import TABLE_FIELDS
from tests.support.problems import PROBLEMS, simulate

FIELDS = {"server_momentum": 0.8, "server_beta2": 0.9, "server_tau": 0.05, "server_eta": 0.3}
WITH_OPTIMIZER = [name for name in algorithm_names() if issubclass(find(name), ServerOptimizer)]


def naive(kind, changes, step=0.7):
    """The model after the changes, from 0: one coefficient at a time."""
    out = []
    for series in np.transpose(changes):
        w, m, s = 0.0, 0.0, FIELDS["server_tau"] ** 2
        for d in series:
            if kind in ("sgd", "momentum"):
                m = d if kind == "sgd" else FIELDS["server_momentum"] * m + d
                w += step * m
                continue
            m = FIELDS["server_momentum"] * m + (1 - FIELDS["server_momentum"]) * d
            if kind == "adagrad":
                s = s + d * d
            elif kind == "yogi":
                s = s - (1 - FIELDS["server_beta2"]) * d * d * np.sign(s - d * d)
            else:
                s = FIELDS["server_beta2"] * s + (1 - FIELDS["server_beta2"]) * d * d
            w += FIELDS["server_eta"] * m / (math.sqrt(s) + FIELDS["server_tau"])
        out.append(w)
    return out


@pytest.mark.parametrize("kind", SERVER_OPTIMIZERS)
def test_equals_the_papers_equations(kind):
    changes = np.random.default_rng(1).normal(size=(6, 4)) * [0.01, 0.1, 1.0, 3.0]
    algorithm = build("fedavg", {"server_optimizer": kind, "server_step": 0.7, **FIELDS})
    server, _ = algorithm.init(Linear(3), torch.zeros(4, dtype=torch.float64))
    for t, change in enumerate(changes):
        server = algorithm.server_update(server, torch.from_numpy(change), Round(t + 1, 6, 3, 3, 1.0, 0))
    np.testing.assert_allclose(server.w.numpy(), naive(kind, changes), rtol=1e-12)


def test_most_algorithms_take_one():
    expected = {"fedavg", "fedavg_finetune", "fedprox", "scaffold", "ditto", "pfedme", "per_fedavg", "fedper", "fedrod"}
    assert expected <= set(WITH_OPTIMIZER)


@pytest.mark.parametrize("kind", SERVER_OPTIMIZERS[1:])
@pytest.mark.parametrize("name", WITH_OPTIMIZER)
def test_every_algorithm_trains_with_it(name, kind):
    task, clients = PROBLEMS["linear"]()
    fields = TABLE_FIELDS.get(name, {}) | {"server_optimizer": kind, "server_momentum": 0.5, "server_eta": 0.1}
    server, models, exchange = simulate(build(name, fields), task, clients, rounds=10)
    plain, _, _ = simulate(build(name, {**fields, "server_optimizer": "sgd"}), task, clients, rounds=10)
    deployed = exchange.deployed_task
    start = float(task.loss(task.start()[None].expand(len(clients), -1), clients.train.full(task)).mean())
    assert float(deployed.loss(models, clients.train.full(deployed)).mean()) < start
    assert not torch.equal(server.w, plain.w)


def test_unknown_optimizers_are_refused():
    with pytest.raises(RequestError, match="server_optimizer must be one of 'sgd', 'momentum'"):
        build("fedavg", {"server_optimizer": "rmsprop"})
