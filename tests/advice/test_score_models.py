"""Models of one client: fits against Newton's equations, scores without rows against refits of everything."""

import numpy as np
import pytest
import torch

from mooring.advice.federated.score_models import (
    Center,
    HomeRows,
    center_moves,
    design,
    family_of,
    fit_local,
    fit_pulled,
    minimize,
)
from mooring.core.cohort import Batch
from mooring.tasks.linear import Linear
from mooring.tasks.linear_losses import Poisson
from mooring.tasks.logistic import Logistic

FEATURES = 3
TASKS = {
    "linear": Linear(FEATURES),
    "two classes": Logistic(FEATURES),
    "three classes": Logistic(FEATURES, classes=3),
    "counts": Poisson(FEATURES),
}


def make_clients(name, sizes, seed=0):
    """Rows of several clients with models of their own."""
    task, rng = TASKS[name], np.random.default_rng(seed)
    family, out = family_of(task), []
    for n in sizes:
        x = rng.normal(size=(n, FEATURES))
        j = design(x, family.scores, True)
        z = j @ (0.5 * rng.normal(size=task.dim))
        if name == "linear":
            y = z[:, 0] + rng.normal(size=n)
        elif name == "counts":
            y = rng.poisson(np.exp(z[:, 0])).astype(float)
        else:
            z = np.concatenate([np.zeros_like(z), z], 1) if family.scores == 1 else z
            y = (z + rng.gumbel(size=z.shape)).argmax(1).astype(float)
        out.append((x, HomeRows(j, y, family, ())))
    return task, out


def fit_center(clients, ridge=1e-3):
    """The global model of all rows, and the inverse of its curvature."""
    rows = [rows for _, rows in clients]
    pooled = HomeRows(
        np.concatenate([r.jacobian for r in rows]), np.concatenate([r.y for r in rows]), rows[0].family, ()
    )
    offset = np.zeros((len(pooled.y), pooled.family.scores))
    w, curvature = minimize(pooled, offset, np.ones(pooled.dim, bool), np.full(pooled.dim, ridge), 1.0)
    return Center(w, np.linalg.inv(curvature))


def drop(rows, places):
    keep = np.setdiff1d(np.arange(len(rows.y)), places)
    return rows._replace(jacobian=rows.jacobian[keep], y=rows.y[keep], blocks=())


@pytest.mark.parametrize("name", TASKS)
def test_losses_are_those_of_the_task(name):
    task, [(x, rows)] = make_clients(name, [7])
    rng = np.random.default_rng(1)
    w, true = rng.normal(size=(2, task.dim))
    kind = torch.long if "classes" in name else torch.float64
    batch = Batch(torch.tensor(x)[None], torch.tensor(rows.y).to(kind)[None], torch.full((1, 7), 1 / 7))
    models = [torch.tensor(v)[None] for v in (w, true)]
    z, z_true = rows.scores(w), rows.scores(true)
    np.testing.assert_allclose(rows.family.risk(z, rows.y), task.row_risk(models[0], batch)[0], rtol=1e-12)
    divergence = task.row_divergence(*models, batch)[0]
    np.testing.assert_allclose(rows.family.divergence(z, z_true), divergence, rtol=1e-9, atol=1e-12)
    gradient = task.grad(models[0], batch)[0].numpy() - task.ridge * w
    np.testing.assert_allclose(rows.pull_back(rows.family.slope(z, rows.y)) / 7, gradient, atol=1e-12)
    hessian = task.hessian(models[0], batch)[0].numpy() - task.ridge * np.eye(task.dim)
    np.testing.assert_allclose(rows.gram(rows.family.bend(z, rows.y)) / 7, hessian, atol=1e-12)


@pytest.mark.parametrize("fixed", [(), (1,)])
@pytest.mark.parametrize("blocks", [(), (np.array([0, 4, 5]), np.array([1, 2]))])
def test_scores_without_rows_are_those_of_refits_for_squared_losses(blocks, fixed):
    _, clients = make_clients("linear", [9, 12, 15])
    variance, noise = np.array([0.3, 0.1, 0.5, 0.2]), 0.7
    variance[list(fixed)] = 0
    rows = clients[0][1]._replace(blocks=blocks)
    fit = fit_pulled(rows, fit_center(clients), variance, noise)
    local = fit_local(rows, np.full(4, 0.4), noise)
    for j in range(len(rows.y)):
        block = next((b for b in blocks if j in b), np.array([j]))
        others = drop(rows, block)
        center = fit_center([(None, others), *clients[1:]])
        again = fit_pulled(others, center, variance, noise)
        np.testing.assert_allclose(fit.without[j], rows.jacobian[j] @ again.v, atol=1e-10)
        own = fit_local(others, np.full(4, 0.4), noise)
        np.testing.assert_allclose(local.without[j], rows.jacobian[j] @ own.v, atol=1e-10)


@pytest.mark.parametrize("name", ["two classes", "three classes", "counts"])
def test_scores_without_rows_are_near_refits_for_others(name):
    """One Newton step misses the scores' change by a small part of it, and their mean loss by less."""
    _, clients = make_clients(name, [60, 80, 70])
    rows, variance = clients[0][1], np.full(clients[0][1].dim, 0.2)
    fit = fit_pulled(rows, fit_center(clients), variance, 1.0)
    refits = []
    for j in range(len(rows.y)):
        others = drop(rows, [j])
        again = fit_pulled(others, fit_center([(None, others), *clients[1:]]), variance, 1.0)
        refits.append(rows.jacobian[j] @ again.v)
    change, missed = np.abs(refits - fit.z), np.abs(refits - fit.without)
    assert missed.mean() < 0.1 * change.mean()
    losses = [rows.family.risk(z, rows.y).mean() for z in (np.array(refits), fit.without, fit.z)]
    assert abs(losses[0] - losses[1]) < 0.1 * abs(losses[0] - losses[2])


def test_the_center_moves_as_it_does_without_the_row():
    _, clients = make_clients("linear", [9, 12])
    center, rows = fit_center(clients), clients[0][1]
    moved = fit_center([(None, drop(rows, [3])), clients[1]])
    np.testing.assert_allclose(center_moves(rows, center)[3], moved.w - center.w, atol=1e-12)


@pytest.mark.parametrize("with_block", [False, True])
def test_rows_leave_the_center_of_pulled_models_too(with_block):
    """Of squared losses: against the generalized least squares of all clients without the row."""
    task, clients = make_clients("linear", [12, 15, 9], 4)
    rng, dispersions = np.random.default_rng(5), [0.8, 1.3, 1.0]
    variance = rng.uniform(0.1, 1.0, task.dim)

    def fit(parts):
        """The center, its covariance, and the first client's model."""
        normal, right = np.zeros((task.dim, task.dim)), np.zeros(task.dim)
        for (x, y), phi in zip(parts, dispersions):
            inverse = np.linalg.inv(x * variance @ x.T + phi * np.eye(len(y)))
            normal, right = normal + x.T @ inverse @ x, right + x.T @ inverse @ y
        w = np.linalg.solve(normal, right)
        x, y = parts[0]
        gain = variance[:, None] * x.T @ np.linalg.inv(x * variance @ x.T + dispersions[0] * np.eye(len(y)))
        return w, np.linalg.inv(normal), w + gain @ (y - x @ w)

    parts = [(rows.jacobian[:, 0], rows.y) for _, rows in clients]
    w, covariance, v = fit(parts)
    rows = clients[0][1]
    blocks = (np.array([0, 3, 4]),) if with_block else ()
    found = fit_pulled(rows._replace(blocks=blocks), Center(w, covariance, True), variance, dispersions[0])
    np.testing.assert_allclose(found.v, v, atol=1e-9)
    for j in range(len(rows.y)):
        out = blocks[0] if with_block and j in blocks[0] else [j]
        x, y = parts[0]
        _, _, without = fit([(np.delete(x, out, 0), np.delete(y, out)), *parts[1:]])
        np.testing.assert_allclose(found.without[j], x[j] @ without, atol=1e-9)
