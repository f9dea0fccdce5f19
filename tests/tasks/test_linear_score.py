"""Tasks on one linear score against cvxpy, scikit-learn, finite differences and the inequalities that define them."""

from dataclasses import replace

import cvxpy as cp
import numpy as np
import pytest
import torch
from sklearn.linear_model import PoissonRegressor
from sklearn.metrics import accuracy_score, mean_poisson_deviance
from sklearn.svm import LinearSVC

from mooring.core.cohort import Batch
from mooring.core.errors import RequestError
from mooring.core.task import HasSolve
from mooring.estimates.client_statistics import collect_statistics
from mooring.tasks.linear_losses import Absolute, Hinge, Poisson, Quantile, Sigmoid, SquaredHinge
from mooring.tasks.linear_score import KINK_RIDGE
from tests.support.derivatives import assert_derivatives_equal_differences
from tests.support.personalized_objective import measure_accuracy
from tests.support.problems import linear_clients, logistic_clients

SIZES = (6, 17, 40)
SMOOTH = {
    "squared_hinge": SquaredHinge(3, ridge=0.1),
    "sigmoid": Sigmoid(3, ridge=0.1),
    "poisson": Poisson(3, ridge=0.1),
}
KINKED = {
    "hinge": Hinge(3, ridge=0.05),
    "absolute": Absolute(3, ridge=0.05),
    "quantile": Quantile(3, ridge=0.05, tau=0.8),
    "hinge without intercept": Hinge(3, intercept=False, ridge=0.0),
    "absolute on whole numbers": Absolute(3, ridge=0.0),
}


def batch_of(task, seed=0, whole=False):
    """Three clients of different sizes in one padded batch; whole numbers make ties and repeated rows."""
    rng = np.random.default_rng(seed)
    xs = [rng.normal(size=(n, 3)) for n in SIZES]
    scores = [x @ rng.normal(size=3) for x in xs]
    if whole:
        xs, scores = [np.round(x) for x in xs], [np.round(z) for z in scores]
    draw = {
        "regression": lambda z: (
            np.round(z + rng.standard_t(2, size=len(z))) if whole else z + rng.standard_t(2, len(z))
        ),
        "binary": lambda z: (z + rng.logistic(size=len(z)) > 0).astype(float),
        "count": lambda z: rng.poisson(np.exp(0.5 * z)).astype(float),
    }[task.kinds[0]]
    ys = [draw(z) for z in scores]
    longest = max(SIZES)
    x, y, weight = np.full((3, longest, 3), 7.0), np.ones((3, longest)), np.zeros((3, longest))
    for i, n in enumerate(SIZES):
        x[i, :n], y[i, :n], weight[i, :n] = xs[i], ys[i], 1 / n
    return Batch(torch.from_numpy(x), torch.from_numpy(y), torch.from_numpy(weight)), xs, ys


def at(task, seed=1, scale=1.0):
    rng = torch.Generator().manual_seed(seed)
    return scale * torch.randn(3, task.dim, dtype=torch.float64, generator=rng)


@pytest.mark.parametrize("name", SMOOTH)
def test_gradient_curve_and_hessian_equal_finite_differences(name):
    task = SMOOTH[name]
    rows, w = batch_of(task)[0], at(task, scale=0.5)
    assert_derivatives_equal_differences(task, w, rows)
    hessian = task.hessian(w, rows)
    for j, direction in enumerate(torch.eye(task.dim, dtype=w.dtype)):
        torch.testing.assert_close(task.hessian_product(w, rows, direction.expand_as(w)), hessian[:, :, j])


@pytest.mark.parametrize("name", KINKED)
def test_subgradients_support_the_loss(name):
    """L(u) >= L(w) + g'(u - w) for a sub-gradient g at w, also at a kink."""
    task = KINKED[name]
    rows = batch_of(task, whole="whole" in name)[0]
    for w in (at(task), torch.zeros(3, task.dim, dtype=torch.float64), task.solve(rows)):
        g = task.grad(w, rows)
        for seed in range(50):
            u = w + at(task, seed, scale=10 ** (1 - seed / 10))
            assert bool((task.loss(u, rows) >= task.loss(w, rows) + (g * (u - w)).sum(1) - 1e-12).all())


def cvxpy_prox(task, x, y, center, lam):
    w = cp.Variable(task.dim)
    score = x @ w[:3] + (w[3] if task.intercept else 0)
    low, high = task.box
    residual = y - score if task.kinds == ("regression",) else 1 - cp.multiply(2 * y - 1, score)
    loss = cp.sum(cp.maximum(low * residual, high * residual)) / len(y) + task.ridge / 2 * cp.sum_squares(w)
    problem = cp.Problem(cp.Minimize(loss + cp.sum(cp.multiply(lam, (w - center) ** 2)) / 2))
    problem.solve(solver=cp.CLARABEL, tol_gap_abs=1e-13, tol_gap_rel=1e-13, tol_feas=1e-13)
    return w.value


def rounding(task, rows, v, held):
    """[C]: 100 units of rounding in the forces at v, over what holds the model, and in scores, over a row's length."""
    eps = torch.finfo(torch.float64).eps
    lengths = task.lengths(rows).sqrt() * (rows.weight > 0)
    forces = max(map(abs, task.box)) * (rows.weight * lengths).sum(1) + (held * v.abs()).amax(1)
    scores = (lengths * v.norm(dim=1, keepdim=True) + rows.y.abs()).amax(1)
    return 100 * eps * (forces / held.min() + scores / lengths.masked_fill(lengths == 0, torch.inf).amin(1))


@pytest.mark.parametrize("name", KINKED)
def test_a_fit_without_ridge_is_the_same_in_any_company(name):
    """Ties, repeated rows, separable classes and nothing to decide between minimisers but their norm."""
    task = replace(KINKED[name], ridge=0.0)
    for seed in range(6):
        rows = batch_of(task, seed, whole="whole" in name)[0]
        v, far = task.solve(rows), task.prox(at(task, seed, 100.0), 0.0, rows)
        room = rounding(task, rows, v, torch.tensor(KINK_RIDGE))
        assert bool(((v - far).norm(dim=1) <= room).all())
        for i in range(3):
            lone = task.solve(Batch(*(part[i : i + 1, : SIZES[i]] for part in rows[:3])))
            assert float((lone[0] - v[i]).norm()) <= room[i]


@pytest.mark.parametrize("name", KINKED)
@pytest.mark.parametrize("shape", ["number", "per client", "diagonal"])
def test_exact_prox_of_kinked_losses_equals_cvxpy(name, shape):
    task = KINKED[name]
    lam = {
        "number": torch.tensor(1e-3, dtype=torch.float64),
        "per client": torch.tensor([0.01, 1.0, 30.0], dtype=torch.float64),
        "diagonal": torch.linspace(0.02, 2, 3 * task.dim, dtype=torch.float64).view(3, -1),
    }[shape]
    for seed in range(2):
        rows, xs, ys = batch_of(task, seed, whole="whole" in name)
        center = at(task, seed)
        v = task.prox(center, lam, rows)
        for i in range(3):
            stiff = lam if lam.ndim == 0 else lam[i]
            expected = cvxpy_prox(task, xs[i], ys[i], center[i].numpy(), np.broadcast_to(stiff.numpy(), task.dim))
            # The reference stops at a relative gap of 1e-13 at best, often 1e-10: mu/2 |error|^2 <= gap.
            value = float(task.loss(v, rows)[i] + (stiff * (v[i] - center[i]) ** 2).sum() / 2)
            weakest = task.ridge + float(stiff.min())
            assert np.linalg.norm(v[i].numpy() - expected) <= np.sqrt(2e-10 * (1 + value) / weakest)
            alone = Batch(
                rows.x[i : i + 1, : SIZES[i]], rows.y[i : i + 1, : SIZES[i]], rows.weight[i : i + 1, : SIZES[i]]
            )
            lone = task.prox(center[i : i + 1], stiff[None] if lam.ndim == 2 else stiff, alone)
            assert float((lone[0] - v[i]).norm()) <= rounding(task, rows, v, stiff + task.ridge)[i]


@pytest.mark.parametrize("name", ["hinge", "absolute", "quantile"])
def test_a_stiff_moor_returns_the_subgradient(name):
    """lam (center - prox) is a sub-gradient at the prox; for large lam, the one at the centre."""
    task = KINKED[name]
    rows, center = batch_of(task)[0], at(task)
    v = task.prox(center, 1e8, rows)
    torch.testing.assert_close(1e8 * (center - v), task.grad(center, rows), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["squared_hinge", "poisson"])
def test_solve_and_prox_of_smooth_losses_are_optimal(name):
    task = SMOOTH[name]
    rows, center = batch_of(task)[0], at(task)
    lam = torch.linspace(0.1, 3, 3 * task.dim, dtype=torch.float64).view(3, -1)
    v = task.prox(center, lam, rows)
    assert float((task.grad(v, rows) + lam * (v - center)).abs().max()) < 1e-8
    assert float(task.grad(task.solve(rows), rows).abs().max()) < 1e-8


def test_poisson_equals_scikit_learn():
    task = Poisson(3, ridge=1e-3)
    rows, xs, ys = batch_of(task)
    free = Poisson(3, intercept=False, ridge=1e-3)
    for i, w in enumerate(free.solve(rows)):
        reference = PoissonRegressor(alpha=1e-3, fit_intercept=False, tol=1e-10, max_iter=1000).fit(xs[i], ys[i])
        np.testing.assert_allclose(w, reference.coef_, atol=1e-5)
        expected = mean_poisson_deviance(ys[i], reference.predict(xs[i]))
        assert float(free.risk(w.expand(3, -1), rows)[i]) == pytest.approx(expected, rel=1e-4)
    assert float(task.predict(at(task), rows.x).min()) > 0


def test_no_predicted_mean_exceeds_twice_the_largest_count():
    task = Poisson(3, ridge=1e-3, max_count=2.0)
    rows, _, ys = batch_of(task)
    far = rows._replace(x=10 * rows.x)
    free, w = Poisson(3, ridge=1e-3), task.solve(rows)
    torch.testing.assert_close(w, free.solve(rows), rtol=0, atol=0)
    mean = free.predict(w, far.x).clamp(max=4.0)
    assert float(free.predict(w, far.x).max()) > 100
    torch.testing.assert_close(task.predict(w, far.x), mean)
    for i, n in enumerate(SIZES):
        expected = mean_poisson_deviance(ys[i], mean[i, :n].numpy())
        assert float(task.risk(w, far)[i]) == pytest.approx(expected)
    assert float(task.row_divergence(w + 100, w + 200, far._replace(x=0 * far.x)).max()) == 0


def test_squared_hinge_and_hinge_equal_scikit_learn():
    """LinearSVC minimises C sum_j loss + |w|^2/2: ridge = 1/(C n)."""
    for task, loss in ((SquaredHinge(3, intercept=False, ridge=0.1), "squared_hinge"), (Hinge(3, False, 0.1), "hinge")):
        rows, xs, ys = batch_of(task)
        for i, w in enumerate(task.solve(rows)):
            model = LinearSVC(loss=loss, C=1 / (0.1 * SIZES[i]), fit_intercept=False, tol=1e-9, max_iter=1_000_000)
            model.fit(xs[i], ys[i])
            np.testing.assert_allclose(w, model.coef_[0], atol=2e-4)
            hits = measure_accuracy(task, w.expand(3, -1), rows)[i]
            assert float(hits) == pytest.approx(accuracy_score(ys[i], model.predict(xs[i])))
            assert bool(((task.predict(w.expand(3, -1), rows.x)[i, :, 1] > 0.5) == (rows.x[i] @ w > 0)).all())


def test_quantiles_cover_their_share():
    """At the exact minimiser with an intercept and no ridge, at most d rows lie on the wrong side of tau."""
    rng = np.random.default_rng(3)
    x, n = rng.normal(size=(1, 500, 2)), 500
    y = x[0] @ [1.0, -2.0] + rng.standard_t(3, size=n)
    rows = Batch(torch.from_numpy(x), torch.from_numpy(y)[None], torch.full((1, n), 1 / n, dtype=torch.float64))
    for tau in (0.1, 0.5, 0.9):
        task = Quantile(2, ridge=0.0, tau=tau)
        w = task.solve(rows)
        assert float((rows.weight * (rows.y <= task.predict(w, rows.x))).sum()) == pytest.approx(tau, abs=3.5 / n)
    median, least = Quantile(2, ridge=0.0).solve(rows), Absolute(2, ridge=0.0).solve(rows)
    torch.testing.assert_close(median, least, atol=1e-6, rtol=0)
    with pytest.raises(RequestError, match=r"tau must lie between 0 and 1, got 1\.5"):
        Quantile(2, tau=1.5)


@pytest.mark.parametrize("name", SMOOTH)
def test_constants_bound_the_curvature(name):
    task = SMOOTH[name]
    rows = batch_of(task)[0]
    fit = task.solve(rows) if isinstance(task, HasSolve) else at(task, scale=0.1)
    c = task.constants(rows, None if isinstance(task, HasSolve) else fit)
    eigenvalues = torch.linalg.eigvalsh(task.hessian(fit, rows))
    assert bool((eigenvalues[:, -1] <= c.smooth + 1e-4).all()) and bool((c.convex <= c.smooth).all())
    slope = torch.stack(
        [task.grad(fit, Batch(rows.x[:, j : j + 1], rows.y[:, j : j + 1], torch.ones(3, 1))) for j in range(6)], 1
    )
    naive = (slope[0] - task.ridge * fit[0]).square().sum(1).mean() * 6 / 2
    if isinstance(task, HasSolve):
        torch.testing.assert_close(c.noise[0] ** 2, naive, rtol=1e-3, atol=0)
    else:
        assert bool((c.convex < 0).all())


@pytest.mark.parametrize("task", [Absolute(3), Quantile(3, tau=0.3)])
def test_facts_of_losses_with_kinks(task):
    clients = linear_clients()
    facts = collect_statistics(task, clients.cohort(), task.start(), ("fit",))
    assert bool(facts.smooth.isnan().all()) and bool((facts.noise > 0).all()) and facts.fit is None
    assert bool((facts.convex > 0).all())


def test_facts_of_classifiers():
    clients = logistic_clients()
    for task in (Hinge(3), SquaredHinge(3), Sigmoid(3)):
        facts = collect_statistics(task, clients.cohort(), task.start(), ("fit", "alone"))
        assert bool((facts.noise > 0).all())
        assert (facts.alone is None) == (task.name == "sigmoid")
