from types import SimpleNamespace

import numpy as np
import pytest
import statsmodels.api as sm
import torch
from scipy.optimize import minimize

from mooring.core.errors import RequestError
from mooring.estimates.client_queries import cached_summary
from mooring.estimates.client_summaries import (
    compute_hessian,
    compute_linear_stats,
    fit_convex,
    fit_covariance,
    fit_from_stats,
    fit_logistic,
    hessian_shaped_covariance,
    trace,
)
from mooring.estimates.firth import fit_firth
from mooring.tasks.linear import Linear
from mooring.tasks.logistic import Logistic

from .planted import linear_rows, logistic_rows, rows_of

SIZES = [9, 40, 12, 25]


@pytest.fixture
def clients():
    rng = np.random.default_rng(0)
    return linear_rows(SIZES, rng.normal(size=(4, 3)), rng)


def test_linear_stats_equal_a_loop(clients):
    rows, xs, ys = clients
    stats = compute_linear_stats(rows, intercept=True)
    for i, (x, y) in enumerate(zip(xs, ys)):
        design = np.column_stack([x, np.ones(len(x))])
        np.testing.assert_allclose(stats.gram[i], design.T @ design / len(x), atol=1e-12)
        np.testing.assert_allclose(stats.moment[i], design.T @ y / len(x), atol=1e-12)
        assert stats.yy[i] == pytest.approx(y @ y / len(x))
    assert stats.n.tolist() == SIZES


def test_least_squares_covariances_are_those_of_statsmodels(clients):
    rows, xs, ys = clients
    equal = fit_from_stats(compute_linear_stats(rows))
    for i, (x, y) in enumerate(zip(xs, ys)):
        reference = sm.OLS(y, x).fit()
        np.testing.assert_allclose(equal.fit[i], reference.params, atol=1e-10)
        np.testing.assert_allclose(fit_covariance(equal)[i], reference.cov_params(), atol=1e-10)


def test_shape_keeps_the_trace(clients):
    fits = fit_from_stats(compute_linear_stats(clients[0]))
    torch.testing.assert_close(trace(hessian_shaped_covariance(fits)), trace(fit_covariance(fits)))


def test_clients_with_too_few_rows_or_a_constant_column_are_undetermined():
    rng = np.random.default_rng(1)
    xs = [rng.normal(size=(k, 3)) for k in (3, 20, 20)]
    xs[1][:, 2] = xs[1][:, 0]
    fits = fit_from_stats(compute_linear_stats(rows_of(xs, [rng.normal(size=len(x)) for x in xs])))
    assert (fits.freedom > 0).tolist() == [False, False, True]
    assert fit_covariance(fits).isnan().any((1, 2)).tolist() == [True, True, False]


def test_client_without_rows_has_sums_of_0_and_no_fit():
    rows = rows_of([np.ones((2, 1)), np.ones((0, 1))], [np.ones(2), np.ones(0)])
    assert [part[1].tolist() for part in compute_linear_stats(rows)] == [0, [[0]], [0], 0]
    with pytest.raises(RequestError, match="client 1 has no rows"):
        fit_logistic(rows)


def test_summaries_of_some_clients_are_looked_up_among_all(clients):
    rows, some = clients[0], torch.tensor([3, 1])
    everyone = cached_summary(Linear(3, intercept=False), rows)
    few = cached_summary(Linear(3, intercept=False), rows.select(some))
    for found, whole, again in zip(few, everyone, compute_linear_stats(rows.select(some)), strict=True):
        assert torch.equal(found, whole[some])
        torch.testing.assert_close(found, again)


def penalised(w, x, y):
    score = x @ w
    prob = 1 / (1 + np.exp(-score))
    fisher = (x * (prob * (1 - prob))[:, None]).T @ x
    return np.sum(np.logaddexp(0, score) - y * score) - 0.5 * np.linalg.slogdet(fisher)[1]


def test_firth_maximises_the_penalised_likelihood():
    rng = np.random.default_rng(2)
    rows, xs, ys = logistic_rows([30, 45], rng.normal(size=(2, 3)), rng)
    fits = fit_logistic(rows)
    for i, (x, y) in enumerate(zip(xs, ys)):
        best = minimize(penalised, np.zeros(3), args=(x, y), tol=1e-12)
        np.testing.assert_allclose(fits.fit[i], best.x, atol=1e-4)


def test_firth_curvature_is_the_second_derivative():
    rng = np.random.default_rng(3)
    _, (x,), (y,) = logistic_rows([40], np.array([[1.0, -0.5, 0.2]]), rng)
    found = fit_firth(torch.from_numpy(x)[None], torch.from_numpy(y)[None] > 0, torch.ones(1, 40, dtype=torch.bool))
    w, step, hessian = found.fit[0].numpy(), 1e-4, np.empty((3, 3))
    eye = step * np.eye(3)
    for a in range(3):
        for b in range(3):
            corners = [(1, 1, 1), (1, -1, -1), (-1, 1, -1), (-1, -1, 1)]
            hessian[a, b] = sum(s * penalised(w + i * eye[a] + j * eye[b], x, y) for i, j, s in corners) / (4 * step**2)
    np.testing.assert_allclose(found.curvature[0], hessian, rtol=1e-4, atol=1e-4)


def test_firth_is_finite_for_separable_rows():
    x = np.array([[-2.0], [-1.0], [1.0], [2.0]])
    fits = fit_logistic(rows_of([x, x], [(x[:, 0] > 0).astype(float), np.ones(4)]), intercept=True)
    assert torch.isfinite(fits.fit).all() and torch.isfinite(fit_covariance(fits)).all()
    assert fits.fit.abs().max() < 5


def test_logistic_fit_and_variance_have_little_bias_at_ten_rows_per_coefficient():
    """1000 clients with one truth: the mean fit is the truth, the scatter the estimated variance."""
    rng = np.random.default_rng(4)
    w = np.full(10, 1 / np.sqrt(10))
    rows, _, _ = logistic_rows([100] * 1000, np.tile(w, (1000, 1)), rng)
    fits = fit_logistic(rows)
    assert fits.fit.mean(0).numpy() @ w == pytest.approx(1, abs=0.02)
    scatter = (fits.fit - fits.fit.mean(0)).square().sum(1).mean()
    assert float(trace(fit_covariance(fits)).mean() / scatter) == pytest.approx(1, abs=0.04)


@pytest.mark.parametrize("task", [Linear(2, ridge=0.1), Logistic(2, ridge=0.1)])
def test_convex_fits_equal_a_loop_over_records(task):
    rng = np.random.default_rng(5)
    rows, _, _ = logistic_rows([15, 22], rng.normal(size=(2, 2)), rng)
    fits = fit_convex(task, rows)
    for i in range(2):
        alone = rows.select(torch.tensor([i]))
        torch.testing.assert_close(task.grad(fits.fit[i : i + 1], alone.padded()), torch.zeros(1, task.dim).double())
        x, y = alone.of(0)
        grads = torch.cat(
            [
                task.grad(fits.fit[i : i + 1], rows_of([a], [b]).padded())
                for a, b in zip(x.numpy()[:, None], y.numpy()[:, None])
            ]
        )
        expected = torch.cov(grads.T) * (len(y) - 1) / (len(y) - task.dim)
        torch.testing.assert_close(fits.gradient_cov[i], expected)


def test_hessian_by_differences_is_the_tasks_own():
    rng = np.random.default_rng(6)
    rows, _, _ = logistic_rows([15, 22], rng.normal(size=(2, 2)), rng)
    task, w = Logistic(2, ridge=0.1), torch.from_numpy(rng.normal(size=(2, 3)))

    class Bare:
        hessian = None
        grad = staticmethod(task.grad)

    torch.testing.assert_close(
        compute_hessian(Bare, w, rows.padded()), task.hessian(w, rows.padded()), atol=1e-6, rtol=1e-6
    )


def test_task_without_exact_minimiser_is_refused():
    with pytest.raises(RequestError, match="'network' has no exact minimizer"):
        fit_convex(SimpleNamespace(name="network", solve=None), rows_of([np.ones((3, 2))], [np.ones(3)]))
