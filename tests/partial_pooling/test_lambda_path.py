"""The path: fixed points of one-stage FedProx, its limits, its stationarity for every solver."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.linear_model import QuantileRegressor

from mooring.algorithms.fedprox_personal import FedProxPersonal
from mooring.core.cohort import Rows
from mooring.core.errors import RequestError
from mooring.partial_pooling.end_models import fit_global_model, fit_local_models
from mooring.partial_pooling.lambda_path import (
    LAMBDA_SCALES,
    PathPoint,
    PullShape,
    initial_curvature,
    ridge_mask,
    solve_path,
    sum_weighted_squares,
)
from mooring.partial_pooling.lambda_path_iterative import (
    RELATIVE_GRADIENT_TOLERANCE,
    solve_envelope_path,
    solve_large_path,
    solve_nonsmooth_path,
)
from mooring.tasks.linear import Linear
from mooring.tasks.linear_losses import Absolute, Hinge, Poisson, Quantile
from mooring.tasks.logistic import Logistic
from tests.support.problems import PROBLEMS, linear_clients, logistic_clients, simulate

TASKS = {
    "linear": lambda: (Linear(3), linear_clients()),
    "linear, few rows": lambda: (Linear(3), linear_clients(sizes=[3, 5, 12, 30])),
    "logistic": lambda: (Logistic(3), logistic_clients()),
    "softmax": lambda: (Logistic(3, classes=3), logistic_clients(classes=3)),
    "poisson": lambda: (Poisson(3), counts()),
}


def counts():
    clients = linear_clients()
    for part in (clients.train, clients.validation, clients.test):
        part.y.copy_(part.y.abs().round())
    return clients


def slopes(task, rows, v):
    """[m, d]: the gradient of each client's own loss."""
    return torch.cat([task.grad(v[i : i + 1], rows.select(torch.tensor([i])).padded()) for i in range(len(rows))])


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("shaped", [False, True])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_every_point_is_stationary(name, shaped, elsewhere):
    task, clients = TASKS[name]()
    rows, p, ridge = clients.train, clients.weights(), 0.05
    slack = torch.linspace(0, 2, task.dim, dtype=torch.float64)
    shape = PullShape(1 / rows.size.double(), slack) if shaped else PullShape()
    tight = torch.ones(len(rows)).double() if not shaped else shape.tight
    slack = torch.ones(task.dim).double() if not shaped else slack
    start = PathPoint(
        1.0, torch.ones(task.dim).double(), torch.linspace(-1, 1, len(rows) * task.dim).double().view(-1, task.dim)
    )
    for point in solve_path(task, rows, p, [50.0, 1.0, 0.05], shape, ridge, start if elsewhere else None):
        g, gap = slopes(task, rows, point.v), point.v - point.w
        assert float((p @ g + ridge * ridge_mask(task) * point.w).norm()) < 1e-6
        assert float(gap[:, slack == 0].abs().sum()) == 0
        free = slack > 0
        pull = point.scale * tight[:, None] / slack[free] * gap[:, free]
        assert float((g[:, free] + pull).norm()) < 1e-5


@pytest.mark.parametrize("name", ["linear", "logistic", "softmax"])
def test_a_point_is_the_fixed_point_of_one_stage_fedprox(name):
    task, clients = PROBLEMS[name]()
    lam = 0.3
    point = next(solve_path(task, clients.train, clients.weights(), [lam]))
    server, models, _ = simulate(FedProxPersonal(lam=lam), task, clients, rounds=300)
    torch.testing.assert_close(point.w, server.w, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(point.v, models, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["linear", "logistic"])
def test_the_ends_are_one_common_model_and_everyone_alone(name):
    task, clients = PROBLEMS[name]()
    rows, p = clients.train, clients.weights()
    first, taut, slack = solve_path(task, rows, p, [torch.inf, 1e7, 1e-9])
    pooled = task.solve(rows.pooled(p))[0]
    torch.testing.assert_close(first.w, pooled, atol=1e-6, rtol=1e-5)
    assert torch.equal(first.v, first.w.expand_as(first.v))
    torch.testing.assert_close(taut.v, first.v, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(slack.v, fit_local_models(task, rows, 0.0), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(fit_global_model(task, rows, p, 0.0), pooled, atol=1e-6, rtol=1e-5)


def test_collinear_columns_and_clients_without_rows():
    clients = linear_clients(sizes=[20, 20, 20])
    x = torch.cat([clients.train.x, clients.train.x[:, :1]], 1)
    rows = type(clients.train)(x, clients.train.y, clients.train.start, torch.tensor([12, 12, 0]))
    for point in solve_path(Linear(4), rows, torch.tensor([1.0, 1.0, 0.0]), [torch.inf, 1.0, 1e-3]):
        assert bool(torch.isfinite(point.v).all()) and float(point.v.abs().max()) < 100
        torch.testing.assert_close(point.v[2], point.w)


@pytest.mark.parametrize("classes", [2, 3])
def test_the_large_solver_finds_the_exact_path_to_its_accuracy(classes):
    task, clients = Logistic(3, classes=classes, ridge=1e-2), logistic_clients(classes=classes)
    rows, p = clients.train, clients.weights()
    start = float((p @ (slopes(task, rows, torch.zeros(5, task.dim).double()) ** 2).sum(1)).sqrt())
    scales, one, none = [3.0, 0.3, 0.03], torch.ones(5).double(), torch.zeros(task.dim).double()
    for (scale, w, v), exact in zip(
        solve_large_path(task, rows, p, scales, one, none), solve_path(task, rows, p, scales)
    ):
        residual = slopes(task, rows, v) + scale * (v - w)
        assert float((p @ (residual**2).sum(1)).sqrt()) <= RELATIVE_GRADIENT_TOLERANCE * start * 1.01
        assert float((v - exact.v).norm()) < 0.05 * float(exact.v.norm())


@pytest.mark.parametrize("task", [Quantile(3, tau=0.5, ridge=0.01), Quantile(3, tau=0.2), Absolute(3), Hinge(3)])
def test_nonsmooth_paths_by_an_interior_point_and_by_envelopes(task):
    """The pulls on w balance, each v is the exact prox, and no w has a lower objective."""
    clients = logistic_clients() if isinstance(task, Hinge) else linear_clients()
    rows, p, batch = clients.train, clients.weights().double(), clients.train.padded()
    one, penalty = torch.tensor([1.0, 2, 1, 0.5, 1]).double(), 0.1 * torch.ones(task.dim).double()

    def objective(w, v, lam):
        return float(p @ (task.loss(v, batch) + lam / 2 * ((v - w) ** 2).sum(1)) + penalty @ w**2 / 2)

    scales = [10.0, 0.5, 0.01]
    solvers = (solve_nonsmooth_path, solve_envelope_path)
    for (scale, w, v), (_, w2, v2) in zip(*(solve(task, rows, p, scales, one, penalty) for solve in solvers)):
        lam = scale * one
        torch.testing.assert_close(v, task.prox(w, lam[:, None], batch))
        assert float((p @ (lam[:, None] * (w - v)) + penalty * w).norm()) < 1e-6
        assert objective(w, v, lam) <= objective(w2, v2, lam) * (1 + 1e-9)
        assert objective(w, v, lam) == pytest.approx(objective(w2, v2, lam), rel=1e-5)


def test_the_common_model_of_a_kinked_loss_is_quantile_regression_on_all_rows():
    """Weighed by rows it is scikit-learn's, an independent linear program, to its tolerance."""
    rows, task = linear_clients(spread=1.0).train, Quantile(3, tau=0.3)
    found = fit_global_model(task, rows, rows.size.double(), 0.0)
    model = QuantileRegressor(quantile=0.3, alpha=0.0).fit(rows.x.numpy(), rows.y.numpy())
    known = torch.tensor([*model.coef_, model.intercept_], dtype=found.dtype)
    torch.testing.assert_close(found, known, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("slack", [None, torch.linspace(0, 2, 13).double()])
def test_wide_tables_are_solved_from_their_rows(slack, monkeypatch):
    """Fewer rows than columns at every client, of which one is empty: as by decompositions of d x d matrices."""
    task, rng = Linear(12), np.random.default_rng(0)
    x, y = torch.from_numpy(rng.normal(size=(24, 12))), torch.from_numpy(rng.normal(size=24))
    x[:, 3] = x[:, 5]  # undetermined

    def rows():
        size = torch.tensor([7, 3, 0, 9, 5])
        return Rows(x, y, torch.cumsum(size, 0) - size, size)

    p, shape = rows().size.double(), PullShape(torch.linspace(0.5, 2, 5).double(), slack)
    scales = [torch.inf, 10.0, 0.1]
    exact = list(solve_path(task, rows(), p, scales, shape, 1e-3))
    local = fit_local_models(task, rows(), 0.01)
    monkeypatch.setattr("mooring.partial_pooling.lambda_path.is_dense", lambda task: False)
    for point, known in zip(solve_path(task, rows(), p, scales, shape, 1e-3), exact):
        torch.testing.assert_close(point.w, known.w, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(point.v, known.v, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(fit_local_models(task, rows(), 0.01), local, rtol=1e-7, atol=1e-9)


def test_scales_are_lambdas_in_units_of_the_curvature():
    clients = linear_clients(sizes=[4000, 4000])
    assert initial_curvature(Linear(3), clients.train, clients.weights()) == pytest.approx(1.0, rel=0.05)
    assert len(LAMBDA_SCALES) == 25 and float(LAMBDA_SCALES[0]) > float(LAMBDA_SCALES[-1])


def test_wrong_requests():
    clients = linear_clients()
    with pytest.raises(RequestError, match="scales must be above 0"):
        solve_path(Linear(3), clients.train, clients.weights(), [0.0])
    with pytest.raises(RequestError, match="has no Hessian"):
        solve_path(Quantile(3), clients.train, clients.weights(), [1.0], PullShape(slack=torch.ones(4)))


def test_a_free_intercept_is_least_squares_with_centred_rows_and_is_left_alone_by_any_ridge():
    rng = np.random.default_rng(0)
    x = [torch.from_numpy(rng.standard_normal((n, 2)) + 3) for n in (6, 9)]
    y = [torch.from_numpy(rng.standard_normal(n) + 50) for n in (6, 9)]
    rows = Rows.stack(x, y)
    for ridge in (1e-3, 1.0, 1e6):
        found = fit_local_models(Linear(2), rows, ridge, free=True)
        for i in range(2):
            a = (x[i] - x[i].mean(0)).numpy()
            slope = np.linalg.solve(a.T @ a / len(a) + ridge * np.eye(2), a.T @ (y[i] - y[i].mean()).numpy() / len(a))
            np.testing.assert_allclose(found[i, :2], slope, atol=1e-9)
            assert float(found[i, 2]) == pytest.approx(float(y[i].mean() - x[i].mean(0) @ torch.from_numpy(slope)))
    task = Logistic(2)
    labels = Rows.stack(x, [torch.tensor([1, 1, 1, 1, 0, 1]), torch.tensor([0, 1] * 4 + [1])])
    tight = fit_local_models(task, labels, 1e5, free=True)
    share = torch.tensor([5 / 6, 5 / 9], dtype=torch.float64)
    # No slope is left, and the intercept is the log-odds of the client's own share, up to the task's small ridge.
    torch.testing.assert_close(torch.sigmoid(tight[:, 2]), share, atol=2e-3, rtol=0)
    empty = Rows(x[0], y[0], torch.tensor([0, 6]), torch.tensor([6, 0]))
    assert float(fit_local_models(Linear(2), empty, 0.1, free=True)[1].abs().max()) == 0


@pytest.mark.parametrize("slack", [None, torch.tensor([1.0, 0.2, 0.0, 3.0], dtype=torch.float64)])
def test_block_by_block_a_linear_path_is_the_same(monkeypatch, slack):
    clients = linear_clients(m=7, sizes=[4, 9, 12, 5, 7, 20, 6])
    task, p = Linear(3), clients.weights()
    shape = PullShape(tight=torch.linspace(0.5, 2, 7, dtype=torch.float64), slack=slack)
    whole = list(solve_path(task, clients.train, p, [torch.inf, 1.0, 0.1], shape, ridge=0.01))
    monkeypatch.setattr("mooring.partial_pooling.lambda_path.MAX_CLIENTS_PER_BLOCK", 3)
    apart = list(solve_path(task, clients.train, p, [torch.inf, 1.0, 0.1], shape, ridge=0.01))
    for one, other in zip(whole, apart):
        torch.testing.assert_close(other.w, one.w, rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(other.v, one.v, rtol=1e-9, atol=1e-10)


def test_block_by_block_models_alone_are_the_same(monkeypatch):
    rows = linear_clients(m=7, sizes=[4, 9, 12, 5, 7, 20, 6]).train
    for free in (False, True):
        whole = fit_local_models(Linear(3), rows, 0.1, free)
        with monkeypatch.context() as patch:
            patch.setattr("mooring.partial_pooling.end_models.MAX_CLIENTS_PER_BLOCK", 3)
            torch.testing.assert_close(fit_local_models(Linear(3), rows, 0.1, free), whole, rtol=1e-9, atol=1e-10)


def test_weighted_squares_are_sums_of_outer_products(monkeypatch):
    monkeypatch.setattr("mooring.partial_pooling.lambda_path.CACHE_NUMBERS", 40)
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((17, 3)), rng.standard_normal((17, 4))
    wanted = np.einsum("nc,ni,nj->cij", weight, x, x)
    found = sum_weighted_squares(torch.from_numpy(x), torch.from_numpy(weight))
    torch.testing.assert_close(found, torch.from_numpy(wanted))


def test_equal_slack_of_all_coefficients_divides_the_pull():
    task, rows = Linear(3), linear_clients(seed=4).train
    p, scales = torch.ones(len(rows)), [2.0, 0.1]
    shape = PullShape(slack=torch.full((task.dim,), 0.5, dtype=torch.float64))
    for point, scale in zip(solve_path(task, rows, p, scales, shape), scales, strict=True):
        other = next(solve_path(task, rows, p, [scale / 0.5]))
        torch.testing.assert_close(point.v, other.v, rtol=1e-12, atol=1e-12)
        general = PullShape(slack=torch.tensor([0.5] * (task.dim - 1) + [0.5 * (1 + 1e-9)], dtype=torch.float64))
        torch.testing.assert_close(point.v, next(solve_path(task, rows, p, [scale], general)).v, rtol=1e-6, atol=1e-6)


def test_threads_that_share_rows_do_not_see_each_others_decompositions():
    """Folds of a federation are fitted side by side: another thread may overwrite the cache at any moment."""
    task, rows = Linear(3), linear_clients(seed=3).train
    p = torch.ones(len(rows))
    slacks = [torch.linspace(value, 2 * value, task.dim, dtype=torch.float64) for value in (0.1, 3.0)]

    class Overwritten(dict):
        def __setitem__(self, key, value):
            super().__setitem__(key, other if key[0] == "eigen" else value)

    expected = [next(solve_path(task, rows, p, [1.0], PullShape(slack=slack))).v for slack in slacks]
    other = rows.cache["eigen", task, False]  # the second slack's
    shared = replace(rows, cache=Overwritten())
    torch.testing.assert_close(next(solve_path(task, shared, p, [1.0], PullShape(slack=slacks[0]))).v, expected[0])
