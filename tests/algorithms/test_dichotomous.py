"""The dichotomous strategy in its three variants."""

import numpy as np
import pytest
import torch
from torch import nn

from mooring.algorithms.base import build
from mooring.algorithms.dichotomous import split_rows
from mooring.core.errors import RequestError
from mooring.core.seeds import uniforms
from mooring.data.clients import from_arrays
from mooring.tasks.linear import Linear
from mooring.tasks.linear_losses import Sigmoid
from mooring.tasks.network import NetworkTask
from tests.support.problems import PROBLEMS, linear_clients, logistic_clients, settled_simulator, simulate


def run(fields, problem="linear", seed=0):
    task, clients = problem if isinstance(problem, tuple) else PROBLEMS[problem]()
    server, models, exchange = simulate(build("dichotomous", fields), task, clients, seed=seed)
    return task, clients, server, models, exchange


def risks(task, clients, models):
    return task.risk(models, clients.validation.padded())


def test_known_r_switches_once_and_exactly_at_the_threshold():
    """Matrix 18: at R^2 = ell_max m / (mu N) everyone still shares, just above everyone is alone."""
    task, clients = PROBLEMS["linear"]()
    border = np.sqrt(2.0 * 5 / (0.5 * int(clients.train.size.sum())))
    decisions = []
    for radius in border * np.array([0, 0.5, 1 - 1e-9, 1 + 1e-9, 2, 100]):
        fields = {"variant": "known_r", "radius": float(radius), "mu": 0.5, "ell_max": 2.0, "ridge": 0.0}
        *_, exchange = run(fields)
        decisions.append(exchange.states.fields.uses_local.tolist())
    assert decisions == [[False] * 5] * 3 + [[True] * 5] * 3
    _, alone, _ = simulate(build("local", {"ridge": 0.0}), task, clients)
    torch.testing.assert_close(run(fields)[3], alone)


def test_known_r_estimates_missing_constants():
    """Close truths share and distant ones part; the client's unit takes the largest distance."""
    for spread, verdict in ((0.0, False), (5.0, True)):
        rng = np.random.default_rng(1)
        xs = [rng.normal(size=(80, 2)) for _ in range(6)]
        ys = [x @ (1 + spread * rng.normal(size=2)) + rng.normal(size=80) for x in xs]
        problem = (Linear(2, intercept=False), from_arrays(xs, ys))
        radius = {}
        for unit in ("system", "client"):
            *_, exchange = run({"variant": "known_r", "unit": unit, "ridge": 0.0}, problem)
            assert bool((exchange.states.fields.uses_local == verdict).all())
            radius[unit] = exchange.algorithm.radius
        assert 0 <= radius["system"] <= radius["client"]


def test_given_constants_are_kept_and_the_others_are_the_clients_own():
    """mu is the smallest curvature of all clients, with the ridge; ell_max = noise^2 / mu."""
    task, clients = PROBLEMS["linear"]()
    asked = {"variant": "known_r", "radius": 0.7, "ridge": 0.0}

    def resolved(**given):
        found = settled_simulator(build("dichotomous", asked | given), task, clients)[0]
        return found.mu, found.ell_max

    designs = [torch.cat([x, torch.ones(len(x), 1)], 1) for x in (clients.train.of(i)[0] for i in range(5))]
    least = task.ridge + min(float(torch.linalg.eigvalsh(x.T @ x / len(x))[0]) for x in designs)
    mu, ell_max = resolved()
    assert mu == pytest.approx(least)
    assert resolved(mu=0.25) == (0.25, pytest.approx(ell_max * mu / 0.25))
    assert resolved(ell_max=3.5) == (pytest.approx(least), 3.5)
    assert resolved(mu=0.25, ell_max=3.5) == (0.25, 3.5)


@pytest.mark.parametrize("problem", ["linear", "logistic", "hinge"])
def test_full_data_takes_the_smaller_validation_risk(problem):
    task, clients, server, models, _ = run({"unit": "system", "ridge": 0.1}, problem)
    _, alone, _ = simulate(build("local", {"ridge": 0.1}), task, clients)
    common = simulate(build("pooled", {}), task, clients)[0].w.expand_as(alone)
    torch.testing.assert_close(server.w, common[0])
    p = clients.weights()
    best = min(float(p @ risks(task, clients, alone)), float(p @ risks(task, clients, common)))
    assert float(p @ risks(task, clients, models)) == pytest.approx(best, rel=1e-9)
    each = run({"unit": "client", "ridge": 0.1}, problem)[3]
    torch.testing.assert_close(
        risks(task, clients, each), torch.minimum(risks(task, clients, alone), risks(task, clients, common))
    )


def test_sample_splitting_uses_separate_rows():
    """Each side is fit to its own part, and the two parts together are all rows."""
    task, clients = PROBLEMS["linear"]()
    own, shared = split_rows(clients.train, clients.keys, 0.4, seed=3)
    assert own.size.tolist() == [round(0.4 * n) for n in clients.train.size.tolist()]
    for i in range(5):
        both = torch.cat([own.of(i)[1], shared.of(i)[1]]).sort().values
        assert torch.equal(both, clients.train.of(i)[1].sort().values)
    fields = {"variant": "sample_split", "unit": "client", "fraction": 0.4, "ridge": 0.0}
    _, _, server, models, exchange = run(fields, seed=3)
    torch.testing.assert_close(server.w, task.solve(shared.pooled(clients.weights()))[0])
    fits = task.prox(torch.zeros(1, 4, dtype=torch.float64), 0.0, own.full(task))
    expected = torch.where(exchange.states.fields.uses_local[:, None], fits, server.w)
    torch.testing.assert_close(models, expected)


def test_the_default_unit_is_the_sources():
    """Sample splitting chooses for each client, the comparison on all rows for the whole system."""
    for variant, unit in (("sample_split", "client"), ("full_data", "system"), ("known_r", "system")):
        *_, models, exchange = run({"variant": variant})
        assert exchange.algorithm.unit == unit
        assert torch.equal(models, run({"variant": variant, "unit": unit})[3])


@pytest.mark.parametrize("unit", ["system", "client"])
def test_extreme_splits_are_the_two_baselines(unit):
    task, clients = PROBLEMS["linear"]()
    fields = {"variant": "sample_split", "unit": unit, "ridge": 0.1}
    _, alone, _ = simulate(build("local", {"ridge": 0.1}), task, clients)
    common = simulate(build("pooled", {}), task, clients)[0].w
    torch.testing.assert_close(run({**fields, "fraction": 1.0})[3], alone)
    torch.testing.assert_close(run({**fields, "fraction": 0.0})[3], common.expand_as(alone))


@pytest.mark.parametrize("variant", ["full_data", "sample_split"])
def test_test_rows_take_no_part(variant):
    task, clients = PROBLEMS["linear"]()
    before = run({"variant": variant, "unit": "client"}, (task, clients))[3]
    clients.test.y.mul_(-100)
    assert torch.equal(before, run({"variant": variant, "unit": "client"}, (task, clients))[3])


def test_clients_without_validation_rows_follow_the_system():
    rng = np.random.default_rng(0)
    xs = [rng.normal(size=(12, 2)) for _ in range(4)]
    ys = [x @ rng.normal(size=2) * 5 for x in xs]
    parts = [np.array(["train"] * 8 + ["validation"] * 4)] * 3 + [np.full(12, "train")]
    problem = (Linear(2), from_arrays(xs, ys, parts=parts))
    *_, exchange = run({"unit": "client", "ridge": 0.0}, problem)
    assert exchange.states.fields.uses_local.tolist() == [True] * 4
    with pytest.raises(RequestError, match="variant = 'full_data' chooses on validation rows, but there are none"):
        run({"ridge": 0.0}, (Linear(2), from_arrays(xs, ys)))


def test_known_r_needs_curvature():
    with pytest.raises(RequestError, match="Dichotomous: variant = 'known_r' needs every client's loss to be strongly"):
        fields = {"variant": "known_r", "radius": 1.0}
        settled_simulator(build("dichotomous", fields), Linear(3), linear_clients(sizes=[4, 5, 6, 7, 8]))


WORK = {"eta": 0.1, "steps": 5, "batch": 4}


@pytest.mark.parametrize("unit", ["system", "client"])
@pytest.mark.parametrize("problem", ["sigmoid", "network"])
def test_without_solvers_local_training_competes_with_fedavg(problem, unit):
    """After every round the choice is that between Local's and FedAvg's models, on validation rows."""
    clients = logistic_clients()
    task = (
        Sigmoid(3)
        if problem == "sigmoid"
        else NetworkTask(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double())
    )
    for rounds in (1, 4):
        chosen, models, exchange = simulate(
            build("dichotomous", {"unit": unit, "ridge": 0.2, **WORK}), task, clients, rounds=rounds, seed=3
        )
        local = simulate(build("local", {"ridge": 0.2, "inner": "sgd", **WORK}), task, clients, rounds=rounds, seed=3)[
            1
        ]
        fedavg = simulate(build("fedavg", WORK), task, clients, rounds=rounds, seed=3)[0].w
        torch.testing.assert_close(chosen.w, fedavg)
        gap = risks(task, clients, fedavg.expand_as(local)) - risks(task, clients, local)
        better = gap > 0 if unit == "client" else ((clients.weights() * gap).sum() > 0).expand(len(gap))
        assert exchange.algorithm.inner == "sgd"
        assert exchange.states.fields.uses_local.tolist() == better.tolist()
        torch.testing.assert_close(models, torch.where(better[:, None], local, fedavg))


def test_a_network_is_split_alike_in_every_round():
    """Rows of the local half never reach the global model: changing them leaves it as it is."""
    clients = logistic_clients()
    fields = {"variant": "sample_split", "fraction": 0.5, "ridge": 0.0, **WORK}
    before = simulate(build("dichotomous", fields), Sigmoid(3), clients, rounds=3, seed=3)[0].w
    for i, key in enumerate(clients.keys):
        rows = clients.train.of(i)[1]
        draw = uniforms(3, "algorithm", key, np.arange(len(rows)))
        rows[torch.from_numpy(np.argsort(draw, kind="stable")[: round(0.5 * len(rows))])] ^= 1
    after = simulate(build("dichotomous", fields), Sigmoid(3), clients, rounds=3, seed=3)[0].w
    assert torch.equal(before, after)
