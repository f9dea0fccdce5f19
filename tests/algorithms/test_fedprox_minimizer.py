"""The FedProx family reaches the minimiser of its objective; what holds there and of the envelopes."""

from itertools import combinations

import cvxpy as cp
import numpy as np
import pytest
import torch

from mooring.algorithms.base import build
from mooring.core.cohort import Round
from mooring.core.minibatches import minibatches
from mooring.data.clients import from_arrays
from mooring.tasks.linear import Linear
from mooring.theory.moreau import moreau
from tests.algorithms.quadratics import LAM, MU, SMOOTH, D, M, Quadratics
from tests.support.personalized_objective import minimize_objective
from tests.support.problems import PROBLEMS, simulate

PER_CLIENT = np.linspace(0.3, 2, M)
PER_COEFFICIENT = np.linspace(0.5, 1.5, D)
MOORS = {
    "number": (LAM, LAM),
    "per client": (list(PER_CLIENT), PER_CLIENT[:, None]),
    "per coefficient": ({"per_coefficient": list(PER_COEFFICIENT)}, PER_COEFFICIENT[None]),
    "product": (
        {"per_client": list(PER_CLIENT), "per_coefficient": list(PER_COEFFICIENT)},
        PER_CLIENT[:, None] * PER_COEFFICIENT,
    ),
}
FORMS = [
    ("fedprox_personal", {"gamma": "auto"}, tuple(MOORS)),
    ("fedprox_personal", {"inner": "descent", "steps": 300, "tol": 1e-12}, tuple(MOORS)),
    ("fedprox_personal", {"preset": "theory"}, ("number",)),
    ("fedprox_two_stage", {"inner": "exact"}, tuple(MOORS)),
    ("fedprox", {}, ("number",)),
    ("fedmspp", {"batch": 0}, ("number",)),
]


@pytest.mark.parametrize("name,fields,moor", [(n, f, moor) for n, f, moors in FORMS for moor in moors])
def test_every_form_reaches_the_minimiser_of_its_objective(name, fields, moor):
    oracle = Quadratics()
    given, lam = MOORS[moor]
    server, models, _ = simulate(build(name, {"lam": given, **fields}), oracle.task, oracle.clients, rounds=150)
    w, v = oracle.minimiser(lam)
    np.testing.assert_allclose(server.w, w, atol=1e-8)
    if name in ("fedprox_personal", "fedprox_two_stage"):
        np.testing.assert_allclose(models, v, atol=1e-8)


@pytest.mark.parametrize("problem", ["linear", "logistic", "softmax"])
def test_the_objective_runs_from_everyone_alone_to_one_common_model(problem):
    """Matrix 5: lam = 1e-8 gives the local fits and their average, lam = 1e8 the common fit."""
    task, clients = PROBLEMS[problem]()
    p, rows = clients.weights(), clients.train
    alone, common = task.solve(rows.full(task)), task.solve(rows.pooled(p))[0]
    loose, stiff = minimize_objective(task, 1e-8, p, rows), minimize_objective(task, 1e8, p, rows)
    torch.testing.assert_close(loose.v, alone, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(loose.w, p @ alone, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(stiff.w, common, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(stiff.v, common.expand_as(stiff.v), rtol=1e-5, atol=1e-5)
    none = minimize_objective(task, 0.0, p, rows)
    torch.testing.assert_close(none.v, alone)


@pytest.mark.parametrize("problem", ["absolute", "hinge"])
def test_the_minimiser_of_kinked_losses_equals_cvxpy(problem):
    task, clients = PROBLEMS[problem]()
    p, lam = clients.weights(), 0.5
    w, v = minimize_objective(task, lam, p, clients.train)
    common, own = cp.Variable(4), cp.Variable((5, 4))
    total = 0
    for i in range(5):
        x, y = (part.numpy().astype(float) for part in clients.train.of(i))
        score = x @ own[i, :3] + own[i, 3]
        loss = cp.abs(y - score) if problem == "absolute" else cp.pos(1 - cp.multiply(2 * y - 1, score))
        penalty = task.ridge / 2 * cp.sum_squares(own[i]) + lam / 2 * cp.sum_squares(own[i] - common)
        total += float(p[i]) * (cp.sum(loss) / len(y) + penalty)
    cp.Problem(cp.Minimize(total)).solve(solver=cp.CLARABEL)
    np.testing.assert_allclose(w, common.value, atol=1e-5)
    np.testing.assert_allclose(v, own.value, atol=1e-5)


@pytest.mark.parametrize("problem", ["linear", "logistic", "softmax"])
def test_stationarity_identities(problem):
    """Matrix 6: v_i = prox_i(w), w = sum p_i v_i, grad L_i(v_i) = lam (w - v_i), sum p_i grad L_i(v_i) = 0."""
    task, clients = PROBLEMS[problem]()
    p, rows = clients.weights(), clients.train
    server, models, _ = simulate(build("fedprox_personal", {"lam": 0.7}), task, clients, rounds=200)
    w, v = minimize_objective(task, 0.7, p, rows)
    for common, personal in ((w, v), (server.w, models)):
        grad = task.grad(personal, rows.full(task))
        near = task.prox(common.expand_as(personal), 0.7, rows.full(task))
        torch.testing.assert_close(personal, near, rtol=0, atol=1e-8)
        torch.testing.assert_close(common, p @ personal, rtol=0, atol=1e-8)
        torch.testing.assert_close(grad, 0.7 * (common - personal), rtol=0, atol=1e-8)
        torch.testing.assert_close(p @ grad, torch.zeros_like(common), rtol=0, atol=1e-8)


@pytest.mark.parametrize("problem", ["linear", "logistic", "absolute", "hinge"])
def test_envelopes_have_the_gradient_lam_times_the_gap(problem):
    """Matrix 8 and 9: grad F_i = lam (w - prox_i(w)) by finite differences; prox_i is lam/(lam + ridge)-Lipschitz."""
    task, clients = PROBLEMS[problem]()
    rows, lam = clients.train.full(task), 0.9
    w, step = torch.randn(5, task.dim, dtype=torch.float64, generator=torch.Generator().manual_seed(2)), 1e-6

    def envelope(w):
        v = task.prox(w, lam, rows)
        return task.loss(v, rows) + lam / 2 * (v - w).square().sum(1)

    gap = lam * (w - task.prox(w, lam, rows))
    for j in range(task.dim):
        shift = torch.zeros_like(w)
        shift[:, j] = step
        slope = (envelope(w + shift) - envelope(w - shift)) / (2 * step)
        torch.testing.assert_close(slope, gap[:, j], rtol=1e-5, atol=1e-5)
    for seed in range(20):
        u = w + torch.randn(w.shape, dtype=w.dtype, generator=torch.Generator().manual_seed(seed)) * 10.0 ** (-seed % 3)
        moved = (task.prox(u, lam, rows) - task.prox(w, lam, rows)).norm(dim=1)
        assert bool((moved <= lam / (lam + task.ridge) * (u - w).norm(dim=1) + 1e-9).all())


@pytest.mark.parametrize("lam", [0.1, 1.0, 10.0])
def test_envelope_constants_on_quadratics(lam):
    oracle, known = Quadratics(), moreau(MU, SMOOTH, lam)
    rows = oracle.clients.train.full(oracle.task)
    for seed in range(20):
        u, w = torch.randn(2, M, D, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        change = lam * ((u - w) - (oracle.task.prox(u, lam, rows) - oracle.task.prox(w, lam, rows)))
        along, size = (change * (u - w)).sum(1), (u - w).square().sum(1)
        assert bool((along >= known.mu_g * size - 1e-12).all()) and bool((along <= known.smooth_g * size + 1e-12).all())


def test_minibatch_variance_by_enumeration_and_by_draws():
    """Matrix 10 (alternative, Lemma B.5): E|mean of B of n|^2 = (n/B - 1)/(n (n - 1)) sum |x - xbar|^2 + |xbar|^2."""
    rng = np.random.default_rng(0)
    n, size = 6, 4
    x = rng.normal(size=(n, 2)) + 0.5
    spread = ((x - x.mean(0)) ** 2).sum()
    formula = (n / size - 1) / (n * (n - 1)) * spread + (x.mean(0) ** 2).sum()
    listed = np.mean([(x[list(chosen)].mean(0) ** 2).sum() for chosen in combinations(range(n), size)])
    assert listed == pytest.approx(formula, rel=1e-12)
    clients = from_arrays([x] * 400, [np.zeros(n)] * 400)
    data, task = clients.cohort(), Linear(2)
    turns = [Round(t, 5, 400, 400, 1.0, 3) for t in range(1, 6)]
    draws = [next(minibatches(task, data, turn, batch=size, steps=1, slot=0)).batch.x.mean(1) for turn in turns]
    squares = torch.cat(draws).square().sum(1)
    assert float(squares.mean()) == pytest.approx(formula, abs=4 * float(squares.std()) / len(squares) ** 0.5)
