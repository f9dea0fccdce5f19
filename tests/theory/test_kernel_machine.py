import math

import numpy as np
import pytest
import torch

from mooring.core.errors import RequestError
from mooring.tasks import kernel_functions
from mooring.theory import kernel_operator as op
from mooring.theory import kernel_rounds as kr
from tests.support import kernel_machine as km

UPDATES = [op.fedavg(0.2), op.fedavg(0.2, 4), op.fedprox(0.2), op.fedprox(4.0)]
every_update = pytest.mark.parametrize("update", UPDATES, ids=["gd", "fedavg4", "fedprox", "fedprox-long"])
SIZES = [3, 8, 5]
GRID = np.linspace(-2, 2, 9)[:, None]


def problem(q=1, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((n, q)) for n in SIZES], [rng.standard_normal(n) for n in SIZES]


def naive_function(kernel, xs, ys, update, rounds, batch=0, per="client"):
    """Functions as functions: every local step adds kernel bumps, one row at a time. Returns f."""

    def local(i, f):
        x, y, n = xs[i], ys[i], len(xs[i])
        size = batch or n
        divisor = n if per == "client" else min(size, n)
        bumps = np.zeros(n)

        def now(rows):
            return f(rows) + kernel(rows, x) @ bumps

        for _ in range(update.steps):
            for a in range(0, n, size):
                b = list(range(a, min(a + size, n)))
                residual = y[b] - now(x[b])
                if update.prox:  # arg min 1/(2 divisor)|g(x_b) - y_b|^2 + 1/(2 eta)|g - now|_H^2
                    ridge = divisor / update.eta
                    bumps[b] += np.linalg.solve(kernel(x[b], x[b]) + ridge * np.eye(len(b)), residual)
                else:
                    bumps[b] += update.eta / divisor * residual
        return bumps

    total, points = sum(SIZES), np.concatenate(xs)
    a = np.zeros(total)
    for _ in range(rounds):
        a = a + np.concatenate(
            [len(x) / total * local(i, lambda z, a=a: kernel(z, points) @ a) for i, x in enumerate(xs)]
        )
    return lambda z: kernel(z, points) @ a


def rbf(x, z):
    return np.exp(-((x[:, None] - z[None]) ** 2).sum(-1) / 2)


@every_update
@pytest.mark.parametrize("batch", [0, 3, 100])
@pytest.mark.parametrize("per", kr.BATCH_LOSS_SCALES)
def test_equals_functions_moved_step_by_step(update, batch, per):
    xs, ys = problem()
    machine = km.fit("rbf", xs, ys, update, 5, batch=batch, per=per)
    expected = naive_function(rbf, xs, ys, update, 5, batch, per)
    np.testing.assert_allclose(machine.predict(GRID), expected(GRID), atol=1e-10)


@every_update
@pytest.mark.parametrize("batch", [0, 3])
@pytest.mark.parametrize("rounds", [0, 1, 6, 1000])
def test_coefficients_predictions_and_features_agree(update, batch, rounds):
    """f-space, coefficient space and theta-space are one recursion."""
    xs, ys = problem(q=3)
    y = np.concatenate(ys)
    machine = km.fit("linear", xs, ys, update, rounds, batch=batch)
    theta = np.zeros(3)
    if batch:
        maps = [kr.minibatch_round(x, part, update, batch) for x, part in zip(xs, ys)]
        matrix, push = (sum(n / 16 * part for n, part in zip(SIZES, column)) for column in zip(*maps))
        theta = kr.propagate(matrix, push, rounds)
    else:
        theta = op.theta_at(op.theta_flow(xs, update), y, rounds)
        flow = op.kernel_flow(np.concatenate(xs) @ np.concatenate(xs).T, SIZES, update)
        np.testing.assert_allclose(machine.predict(np.concatenate(xs)), op.predictions(flow, y, rounds), atol=1e-10)
    z = np.random.default_rng(9).standard_normal((7, 3))
    np.testing.assert_allclose(machine.predict(z), z @ theta, atol=1e-10)


@every_update
@pytest.mark.parametrize("batch", [0, 3])
def test_the_limit_is_where_the_rounds_go_and_fits_all_rows(update, batch):
    """Remark 6: the Gram matrix is positive definite, so no training error is left."""
    xs, ys = problem()
    limit = km.fit("laplace", xs, ys, update, "limit", batch=batch)
    late = km.fit("laplace", xs, ys, update, 10**6, batch=batch)
    np.testing.assert_allclose(limit.predict(GRID), late.predict(GRID), atol=1e-8)
    np.testing.assert_allclose(limit.predict(np.concatenate(xs)), np.concatenate(ys), atol=1e-8)


@every_update
@pytest.mark.parametrize("batch", [0, 3])
def test_a_start_is_a_function(update, batch):
    xs, ys = problem()
    begun = km.fit("rbf", xs, ys, update, 3, batch=batch)
    onward = km.fit("rbf", xs, ys, update, 4, batch=batch, start=begun.predict)
    np.testing.assert_allclose(
        onward.predict(GRID), km.fit("rbf", xs, ys, update, 7, batch=batch).predict(GRID), atol=1e-10
    )


def test_one_full_step_is_gradient_descent_on_the_pooled_rows():
    xs, ys = problem()
    x, y, eta = np.concatenate(xs), np.concatenate(ys), 0.2
    a = np.zeros(16)
    for _ in range(8):
        a = a - eta * (rbf(x, x) @ a - y) / 16
    np.testing.assert_allclose(km.fit("rbf", xs, ys, op.fedavg(eta), 8).predict(GRID), rbf(GRID, x) @ a, atol=1e-10)


@every_update
def test_shared_truths_balance_at_themselves_and_others_between(update):
    """Four functions of a four-dimensional space, so that 16 rows determine them."""
    xs, _ = problem()
    kernel = kernel_functions.find("polynomial", degree=3)
    truths = [lambda z: z[:, 0] ** 3 - z[:, 0], lambda z: 2 + z[:, 0], lambda z: z[:, 0] ** 2]
    small = update._replace(eta=update.eta / 200) if not update.prox else update  # gamma_K < 1
    same = km.balance(kernel, xs, [truths[0]] * 3, small)
    np.testing.assert_allclose(same.predict(GRID), truths[0](GRID), atol=1e-6)
    features = [np.hstack([np.ones_like(x), 3**0.5 * x, 3**0.5 * x**2, x**3]) for x in xs]
    flow = op.theta_flow(features, small)
    theta = op.limit_point(flow, np.concatenate([f(x) for f, x in zip(truths, xs)]))
    lifted = np.hstack([np.ones_like(GRID), 3**0.5 * GRID, 3**0.5 * GRID**2, GRID**3])
    np.testing.assert_allclose(km.balance(kernel, xs, truths, small).predict(GRID), lifted @ theta, atol=1e-6)


def sine_federation(sigma, seed=0, clients=20, rows=15):
    rng = np.random.default_rng(seed)
    xs = [np.sort(rng.uniform(i / clients, (i + 1) / clients, rows)) for i in range(clients)]
    ys = [np.sin(2 * np.pi * x) + sigma * rng.standard_normal(rows) for x in xs]
    return xs, ys


@pytest.mark.parametrize("update", [op.fedavg(0.5), op.fedavg(0.5, 5), op.fedprox(0.5)], ids=["gd", "s=5", "fedprox"])
def test_stopping_with_estimated_noise_and_norm_is_near_the_best_round_on_new_points(update):
    xs, ys = sine_federation(sigma=0.5)
    z = np.linspace(0, 1, 101)

    def error(rounds, **known):
        return miss(km.fit("sobolev", xs, ys, update, rounds, **known))

    def miss(machine):
        return np.mean((machine.predict(z) - np.sin(2 * np.pi * z)) ** 2)

    x, y = np.concatenate(xs), np.concatenate(ys)
    flow = op.kernel_flow(np.minimum.outer(x, x), [15] * 20, update)
    rounds = np.unique(np.geomspace(1, 10**5, 40).astype(int))
    best = min(miss(km.Machine("sobolev", x[:, None], op.coefficients(flow, y, int(t)))) for t in rounds)
    assert error("stop") <= 2 * best
    assert error("stop", sigma=0.5, norm=math.sqrt(2) * np.pi) <= 2 * best  # |f|_H^2 = integral of f'^2
    assert error("limit") > 10 * best
    assert error("stop", norm=1.0) > 2 * error("stop")  # the paper's units are not these


def test_the_norm_that_the_path_confirms_is_near_the_truth_and_keeps_its_units():
    update = op.fedavg(0.5)
    xs, ys = sine_federation(sigma=0.3)
    x, y = np.concatenate(xs), np.concatenate(ys)
    gram = np.minimum.outer(x, x)
    sizes = [15] * 20
    found = km.stop(gram, sizes, y, update, sigma=0.3)
    exact = km.stop(gram, sizes, y, update, sigma=0.3, norm=math.sqrt(2) * np.pi)
    assert 0.7 * exact < found <= exact * 1.3
    assert km.stop(gram, sizes, 1000 * y, update, sigma=300.0) == found
    assert km.stop(gram, sizes, np.random.default_rng(0).standard_normal(300), update) == 0  # nothing but noise


def test_functions_are_kernels_and_numbers_are_points():
    xs, ys = problem()
    named = km.fit("rbf", [x[:, 0] for x in xs], ys, op.fedavg(0.2), 3)
    given = km.fit(lambda x, z: torch.exp(-(torch.cdist(x, z) ** 2) / 2), xs, ys, op.fedavg(0.2), 3)
    np.testing.assert_allclose(named.predict(GRID[:, 0]), given.predict(GRID), atol=1e-12)


def test_several_draws_at_once():
    xs, ys = problem()
    twice = [np.column_stack([y, -2 * y]) for y in ys]
    for batch in (0, 3):
        one = km.fit("rbf", xs, ys, op.fedavg(0.2, 2), 4, batch=batch).predict(GRID)
        np.testing.assert_allclose(
            km.fit("rbf", xs, twice, op.fedavg(0.2, 2), 4, batch=batch).predict(GRID),
            np.column_stack([one, -2 * one]),
            atol=1e-12,
        )


def test_wrong_requests_are_refused():
    xs, ys = problem()
    with pytest.raises(RequestError, match="below 1"):
        km.fit("rbf", xs, ys, op.fedavg(5.0), 3, batch=2)
    with pytest.raises(RequestError, match="whole number >= 0"):
        km.fit("rbf", xs, ys, op.fedavg(0.1), -1)
    with pytest.raises(RequestError, match="whole number >= 0"):
        km.fit("rbf", xs, ys, op.fedavg(0.1), "soon")
    with pytest.raises(RequestError, match="steps of size 1/batch"):
        km.fit("rbf", xs, ys, op.fedavg(0.1), "stop", batch=2, per="batch")
    with pytest.raises(RequestError, match="per must be one of"):
        km.fit("rbf", xs, ys, op.fedavg(0.1), 2, batch=2, per="epoch")
