"""Kernel FedAvg and FedProx: the methods that they jump ahead in, their stop, and what they refuse."""

import math

import numpy as np
import pytest
import torch

from mooring.algorithms.base import build
from mooring.core.errors import RequestError
from mooring.data.clients import from_arrays
from mooring.tasks.kernel_regression import KernelRegression
from mooring.tasks.linear import Linear
from mooring.tasks.logistic import Logistic
from mooring.theory import kernel_operator, kernel_stopping
from tests.support import kernel_machine
from tests.support.problems import PROBLEMS, logistic_clients, simulate

TASKS = pytest.mark.parametrize("problem", ["linear", "kernel"])
WEIGHTS = pytest.mark.parametrize("weights", ["size", "uniform"])


def common(name, fields, task, clients, rounds=1, **how):
    return simulate(build(name, fields), task, clients, rounds=rounds, **how)[0].w


@TASKS
@WEIGHTS
@pytest.mark.parametrize("steps", [1, 6])
def test_kernel_fedavg_is_fedavg_on_full_batches(problem, weights, steps):
    task, clients = PROBLEMS[problem]()
    fields = {"eta": 0.1, "steps": steps}
    one_by_one = common("fedavg", {**fields, "batch": 0}, task, clients, rounds=9, weights=weights)
    at_once = common("kernel_fedavg", {**fields, "rounds_exact": 9}, task, clients, weights=weights)
    torch.testing.assert_close(at_once, one_by_one, rtol=1e-10, atol=1e-10)


@TASKS
@WEIGHTS
def test_kernel_fedprox_is_shared_fedprox_with_exact_solves(problem, weights):
    task, clients = PROBLEMS[problem]()
    one_by_one = common("fedprox", {"lam": 0.7, "inner": "exact"}, task, clients, rounds=9, weights=weights)
    at_once = common("kernel_fedprox", {"lam": 0.7, "rounds_exact": 9}, task, clients, weights=weights)
    torch.testing.assert_close(at_once, one_by_one, rtol=1e-10, atol=1e-10)


@TASKS
@WEIGHTS
def test_limits_at_the_limit(problem, weights):
    task, clients = PROBLEMS[problem]()
    pooled = common("pooled", {}, task, clients, weights=weights)
    one_step = common("kernel_fedavg", {"steps": 1, "rounds_exact": "limit"}, task, clients, weights=weights)
    torch.testing.assert_close(one_step, pooled, rtol=1e-8, atol=1e-8)
    stiff = common("kernel_fedprox", {"lam": 1e7, "rounds_exact": "limit"}, task, clients, weights=weights)
    torch.testing.assert_close(stiff, pooled, rtol=1e-4, atol=1e-4)
    loose = common("kernel_fedprox", {"lam": 1e-8, "rounds_exact": "limit"}, task, clients, weights=weights)
    fits = clients.weights(weights) @ task.solve(clients.train.full(task))
    torch.testing.assert_close(loose, fits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["kernel_fedavg", "kernel_fedprox"])
def test_a_million_rounds_reach_the_limit_where_rows_are_fewer_than_coefficients(name):
    rng = np.random.default_rng(0)
    clients = from_arrays([rng.standard_normal((3, 12)) for _ in range(3)], [rng.standard_normal(3) for _ in range(3)])
    task = Linear(12, intercept=False)
    limit = common(name, {"rounds_exact": "limit"}, task, clients)
    torch.testing.assert_close(common(name, {"rounds_exact": 10**6}, task, clients), limit, rtol=1e-8, atol=1e-8)
    design, y = clients.train.x, clients.train.y
    torch.testing.assert_close(design @ limit, y, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(limit, torch.linalg.pinv(design) @ y, rtol=1e-8, atol=1e-8)


def test_the_stop_equals_that_of_the_pooled_points():
    """The clients' second moments and residuals give what all rows in one place give."""
    rng = np.random.default_rng(1)
    theta, xs = rng.standard_normal(5), [rng.standard_normal((n, 5)) for n in (30, 40, 50, 60)]
    clients = from_arrays(xs, [x @ theta + 0.7 * rng.standard_normal(len(x)) for x in xs])
    task = Linear(5, intercept=False)
    xs, ys = zip(*[(x.numpy(), y.numpy()) for x, y in (clients.train.of(i) for i in range(4))])
    for name, fields, update in (
        ("kernel_fedavg", {"eta": 0.02, "steps": 3}, kernel_operator.fedavg(0.02, 3)),
        ("kernel_fedprox", {"lam": 20.0}, kernel_operator.fedprox(0.05)),
    ):
        server, _, _ = simulate(build(name, {**fields, "norm": 2.0}), task, clients)
        sizes, x = [len(y) for y in ys], np.concatenate(xs)
        sigma2 = [kernel_stopping.sigma_from_residuals([a @ a.T], [b]) ** 2 for a, b in zip(xs, ys)]
        sigma = math.sqrt(np.average(sigma2, weights=sizes))
        assert sigma == pytest.approx(0.7, rel=0.15)
        stop = kernel_machine.stop(x @ x.T, sizes, np.concatenate(ys), update, sigma, 2.0)
        assert float(server.rounds) == stop > 5
        fit = kernel_machine.fit("linear", xs, ys, update, stop)
        np.testing.assert_allclose(fit.predict(np.eye(5)), server.w, atol=1e-10)
        told = simulate(build(name, {**fields, "sigma": sigma}), task, clients)[0]
        assert float(told.rounds) == kernel_machine.stop(x @ x.T, sizes, np.concatenate(ys), update, sigma)


def test_the_stop_is_near_the_best_round_on_random_features():
    rng = np.random.default_rng(0)
    xs = [rng.uniform(-1.7, 1.7, (15, 1)) for _ in range(8)]
    ys = [np.sin(3 * x[:, 0]) + 0.5 * rng.standard_normal(15) for x in xs]
    clients = from_arrays(xs, ys)
    task = KernelRegression(1, kernel="laplace", bandwidth=1.0, width=200, ridge=0.0)
    z = torch.linspace(-1.7, 1.7, 200, dtype=torch.float64)[:, None]

    def error(rounds):
        server, _, _ = simulate(build("kernel_fedavg", {"steps": 5, "rounds_exact": rounds}), task, clients)
        return float(((task.predict(server.w[None], z[None])[0] - torch.sin(3 * z[:, 0])) ** 2).mean())

    best = min(error(t) for t in (3, 10, 30, 100, 300, 1000, 3000))
    assert error("stop") <= 2 * best
    assert error("limit") > 3 * error("stop")


def test_noise_alone_is_not_fitted():
    rng = np.random.default_rng(0)
    clients = from_arrays([rng.standard_normal((10, 3)) for _ in range(5)], [rng.standard_normal(10) for _ in range(5)])
    with pytest.warns(UserWarning, match="not one round"):
        server, _, _ = simulate(build("kernel_fedavg", {}), Linear(3), clients)
    assert not bool(server.w.any()) and float(server.rounds) == 0


def test_a_client_without_training_rows_changes_nothing():
    rng = np.random.default_rng(0)
    xs, ys = [rng.standard_normal((n, 2)) for n in (20, 0, 30)], [rng.standard_normal(n) for n in (20, 0, 30)]
    for fields in ({"rounds_exact": 5}, {"rounds_exact": 5, "batch": 3}, {"sigma": 0.1}, {"norm": 5.0}):
        with_it = common("kernel_fedavg", fields, Linear(2), from_arrays(xs, ys))
        without = common("kernel_fedavg", fields, Linear(2), from_arrays(xs[::2], ys[::2]))
        torch.testing.assert_close(with_it, without, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("kernel_fedavg", {"eta": 0.0}, "eta must be a finite number > 0"),
        ("kernel_fedavg", {"rounds_exact": "soon"}, "rounds_exact must be a number or 'stop' or 'limit'"),
        ("kernel_fedavg", {"rounds_exact": -1}, "rounds_exact must be >= 0"),
        ("kernel_fedavg", {"rounds_exact": 2.5}, "rounds_exact must be a whole number, 'stop' or 'limit', got 2.5"),
        ("kernel_fedprox", {"rounds_exact": float("inf")}, "rounds_exact must be a whole number"),
        ("kernel_fedavg", {"per": "epoch"}, "per must be one of 'client', 'batch'"),
        ("kernel_fedprox", {"lam": 0.0}, "lam must be > 0"),
        ("kernel_fedprox", {"batch": 5, "per": "batch"}, "set rounds_exact"),
    ],
)
def test_wrong_fields_are_refused(name, fields, message):
    with pytest.raises(RequestError, match=message):
        build(name, fields)


@pytest.mark.parametrize("name", ["kernel_fedavg", "kernel_fedprox"])
def test_wrong_tasks_and_steps_are_refused(name):
    with pytest.raises(RequestError, match="linear in its parameters"):
        simulate(build(name, {"rounds_exact": 3}), Logistic(3), logistic_clients())
    task, clients = PROBLEMS["linear"]()
    if name == "kernel_fedavg":
        with pytest.raises(RequestError, match="below 1"):
            simulate(build(name, {"rounds_exact": 3, "eta": 5.0}), task, clients)
    with pytest.raises(RequestError, match="every client"):
        simulate(build(name, {"rounds_exact": 3}), task, clients, participation=0.5)
