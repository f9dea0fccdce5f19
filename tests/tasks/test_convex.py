"""Linear and logistic tasks against scikit-learn, numpy, finite differences and the optimality conditions."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import log_loss

from mooring.core.cohort import Batch
from mooring.tasks.linear import Linear
from mooring.tasks.logistic import Logistic
from mooring.tasks.proximal import MIN_RIDGE
from tests.support.accuracy import assert_equal_up_to_rounding, condition
from tests.support.derivatives import assert_derivatives_equal_differences
from tests.support.personalized_objective import measure_accuracy
from tests.support.problems import PROBLEMS, linear_clients, logistic_clients

TASKS = ("linear", "logistic", "softmax")


def at(task, clients, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(len(clients), task.dim, dtype=torch.float64, generator=rng)


@pytest.mark.parametrize("problem", TASKS)
def test_gradient_and_hessian_equal_finite_differences(problem):
    task, clients = PROBLEMS[problem]()
    assert_derivatives_equal_differences(task, at(task, clients), clients.train.padded())


@pytest.mark.parametrize("problem", TASKS)
@pytest.mark.parametrize("shape", ["number", "per client", "diagonal"])
def test_prox_satisfies_its_optimality_condition(problem, shape):
    task, clients = PROBLEMS[problem]()
    rows, center = clients.train.full(task), at(task, clients)
    lam = {
        "number": torch.tensor(0.7, dtype=torch.float64),
        "per client": torch.linspace(0.1, 2, len(clients), dtype=torch.float64),
        "diagonal": torch.linspace(0.1, 3, len(clients) * task.dim, dtype=torch.float64).view(len(clients), -1),
    }[shape]
    v = task.prox(center, lam, rows)
    pull = lam[:, None] if lam.ndim == 1 else lam
    assert float((task.grad(v, rows) + pull * (v - center)).abs().max()) < 1e-8


@pytest.mark.parametrize("problem", TASKS)
def test_solve_has_no_gradient(problem):
    task, clients = PROBLEMS[problem]()
    rows = clients.train.full(task)
    assert float(task.grad(task.solve(rows), rows).abs().max()) < 1e-8


def test_summary_stands_for_the_rows():
    task, clients = Linear(3, ridge=0.1), linear_clients()
    rows, summary, w = clients.train.padded(), clients.train.full(Linear(3, ridge=0.1)), at(task, clients)
    torch.testing.assert_close(task.loss(w, rows), task.loss(w, summary))
    torch.testing.assert_close(task.grad(w, rows), task.grad(w, summary))
    assert task.count(rows) == task.count(summary) == int(clients.train.size.sum())


def test_linear_agrees_with_scikit_learn():
    clients = linear_clients()
    task = Linear(3, intercept=False, ridge=0.3)
    found = task.solve(clients.train.full(task))
    for i in range(len(clients)):
        x, y = clients.train.of(i)
        reference = Ridge(alpha=0.3 * len(y), fit_intercept=False).fit(x, y)
        np.testing.assert_allclose(found[i], reference.coef_, rtol=1e-8)


def test_least_norm_where_rows_do_not_determine_the_fit():
    clients = linear_clients(m=2, d=6, sizes=[6, 8])
    task = Linear(6, intercept=False)
    found = task.solve(clients.train.full(task))
    for i in range(2):
        x, y = (part.numpy() for part in clients.train.of(i))
        np.testing.assert_allclose(found[i], np.linalg.pinv(x) @ y, atol=1e-8)


@pytest.mark.parametrize("lam", [0.0, 1e-14, [0.0, 0.5], "diagonal"])
def test_prox_is_the_limit_of_a_vanishing_ridge(lam):
    """Few rows, and no pull in some or all directions: pinv(H + diag(lam)) (moment + lam center)."""
    clients = linear_clients(m=2, d=6, sizes=[6, 8])
    task = Linear(6, intercept=False)
    diagonal = torch.tensor([[0, 0, 0, 1.0, 0, 2], [0, 0, 0, 0, 0, 0]], dtype=torch.float64)
    lam = torch.as_tensor(diagonal if lam == "diagonal" else lam, dtype=torch.float64)
    center = at(task, clients)
    found = task.prox(center, lam, clients.train.full(task))
    for i in range(2):
        x, y = (part.numpy() for part in clients.train.of(i))
        pull = np.broadcast_to(lam[i].numpy() if lam.ndim else lam.numpy(), 6)
        root = np.concatenate([x / np.sqrt(len(y)), np.diag(np.sqrt(pull))])
        aim = np.concatenate([y / np.sqrt(len(y)), np.sqrt(pull) * center[i].numpy()])
        if pull.max() == 1e-14:  # too little to change what rows see, and all there is where they see nothing
            own = np.linalg.pinv(x) @ y
            expected = own + center[i].numpy() - np.linalg.pinv(x) @ x @ center[i].numpy()
        else:
            expected = np.linalg.lstsq(root, aim, rcond=1e-10)[0]
        # eps times the condition number of H; lam = 1e-14 itself is part of the difference.
        known = np.linalg.eigvalsh(root.T @ root)
        error = 1e3 * np.finfo(float).eps * known[-1] / known[known > 1e-10 * known[-1]][0]
        np.testing.assert_allclose(found[i], expected, atol=error)


@pytest.mark.parametrize("classes", [2, 3])
def test_separable_classes_without_a_ridge_have_a_finite_fit(classes):
    """The fit is that of a ridge of 1e-10: every row on its side, and as its optimality condition says."""
    clients = logistic_clients(classes=classes, sizes=[5, 6, 7, 40, 60])
    task, ridged = Logistic(3, classes=classes, ridge=0.0), Logistic(3, classes=classes, ridge=MIN_RIDGE)
    rows = clients.train.full(task)
    found = task.solve(rows)
    assert bool(torch.isfinite(found).all())
    hits = measure_accuracy(task, found, clients.train.padded())
    assert bool((hits[:3] == 1).all()) and float(found[:3].norm(dim=1).min()) > 10
    # A gradient is a mean of rows times 1 at most, and right to some eps; the ridge's own share is far above that.
    rounding = 64 * torch.finfo(torch.float64).eps * rows.x.norm(dim=2).amax(1)
    assert bool((MIN_RIDGE * found[:3].norm(dim=1) > 1000 * rounding[:3]).all())
    assert bool((ridged.grad(found, rows).norm(dim=1) <= rounding).all())
    # Along separating directions the curvature is about LEAST_RIDGE: that much rounding moves the fit by 1e-4.
    start = at(task, clients)
    torch.testing.assert_close(task.prox(start, 0.0, rows), found, rtol=1e-4, atol=1e-4)
    for i in range(len(clients)):
        lone = clients.train.select(torch.tensor([i]))
        torch.testing.assert_close(task.solve(lone.full(task))[0], found[i], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("classes", [2, 3])
def test_logistic_agrees_with_scikit_learn(classes):
    clients = logistic_clients(classes=classes)
    task = Logistic(3, classes=classes, intercept=False, ridge=0.2)
    found = task.solve(clients.train.full(task))
    batch = clients.train.padded()
    for i in range(len(clients)):
        x, y = clients.train.of(i)
        if len(torch.unique(y)) < classes:
            continue
        reference = LogisticRegression(C=1 / (0.2 * len(y)), fit_intercept=False, tol=1e-10, max_iter=5000).fit(x, y)
        mine = task.predict(found, batch.x)[i, : len(y)].numpy()
        np.testing.assert_allclose(mine, reference.predict_proba(x), atol=1e-5)
        assert float(task.risk(found, batch)[i]) == pytest.approx(log_loss(y, mine, labels=range(classes)), rel=1e-9)


def test_newton_cg_agrees_with_newton(monkeypatch):
    clients = logistic_clients(classes=3)
    task = Logistic(3, classes=3, ridge=0.1)
    rows = clients.train.full(task)
    dense = task.solve(rows)
    monkeypatch.setattr("mooring.tasks.proximal.MAX_DENSE_PARAMETERS", 0)
    iterated = task.solve(rows)
    assert not torch.equal(iterated, dense)  # it took another way
    assert_equal_up_to_rounding(iterated, dense, condition(task, clients))


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("problem", ["logistic", "softmax"])
def test_newton_finds_the_same_fit_in_any_company(problem, dense, monkeypatch):
    """A client with a hard problem and a far start neither hastens nor delays the others."""
    task, clients = PROBLEMS[problem]()
    if not dense:
        monkeypatch.setattr("mooring.tasks.proximal.MAX_DENSE_PARAMETERS", 0)
    center, lam = at(task, clients), torch.tensor([1e-3, 0.1, 1.0, 10.0, 100.0], dtype=torch.float64)
    start = center.clone()
    start[0] *= 30
    together = task.prox(center, lam, clients.train.full(task), start)
    for i in range(len(clients)):
        alone = clients.train.select(torch.tensor([i]))
        lone = task.prox(center[i : i + 1], lam[i : i + 1], alone.full(task), start[i : i + 1])
        assert_equal_up_to_rounding(together[i], lone[0], condition(task, clients))
        fresh = task.prox(center[i : i + 1], lam[i : i + 1], alone.full(task))
        assert_equal_up_to_rounding(together[i], fresh[0], condition(task, clients))


@pytest.mark.parametrize("problem", TASKS)
def test_constants_bound_the_curvature(problem):
    task, clients = PROBLEMS[problem]()
    rows = clients.train.full(task)
    known = task.constants(rows)
    for seed in range(5):
        values = torch.linalg.eigvalsh(task.hessian(at(task, clients, seed), rows))
        assert bool((values[:, -1] <= known.smooth * (1 + 1e-6)).all())
    at_fit = torch.linalg.eigvalsh(task.hessian(task.solve(rows), rows))[:, 0]
    assert bool((known.convex <= at_fit * 1.01 + 1e-6).all())


def test_separable_data_do_not_break_the_prox():
    x = torch.linspace(-1, 1, 10, dtype=torch.float64)[None, :, None] + 0.05
    batch = Batch(x, (x[..., 0] > 0).long(), torch.full((1, 10), 0.1, dtype=torch.float64))
    v = Logistic(1, ridge=0.0).prox(torch.zeros(1, 2, dtype=torch.float64), 1e-4, batch)
    assert bool(torch.isfinite(v).all()) and float(v[0, 0]) > 5


def test_smoothness_where_columns_cancel():
    """Columns z, -z, z, -z are orthogonal to the vector of ones."""
    z = torch.randn(1, 40, 1, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    x = torch.cat([z, -z, z, -z], -1)
    batch = Batch(x, torch.zeros(1, 40, dtype=torch.long), torch.full((1, 40), 1 / 40, dtype=torch.float64))
    task = Logistic(4, intercept=False, ridge=1e-4)
    expected = np.linalg.eigvalsh(x[0].numpy().T @ x[0].numpy() / 40)[-1] / 4 + 1e-4
    assert float(task.constants(batch).smooth) == pytest.approx(expected, rel=1e-6)
