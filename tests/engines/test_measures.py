"""Measures against naive loops, quadrature, Monte Carlo and the inequalities that tie them together."""

import numpy as np
import pytest
import torch
from scipy.integrate import dblquad

from mooring.algorithms.base import build
from mooring.core.cohort import Batch
from mooring.data.clients import from_arrays
from mooring.engines import measures
from mooring.engines.loop import Plan, Progress, run
from mooring.tasks.absolute import Absolute
from mooring.tasks.linear import Linear
from mooring.tasks.logistic import Logistic
from mooring.theory.stability import fedprox_condition, fedprox_stability
from tests.problems import PROBLEMS, linear_clients, settled_simulator

RNG = np.random.default_rng(0)
M, D = 4, 3


def tensor(x):
    return torch.as_tensor(x, dtype=torch.float64)


def covariances():
    roots = RNG.normal(size=(M, D, D))
    return tensor(roots @ roots.transpose(0, 2, 1) + 0.1 * np.eye(D))


def test_linear_excess_is_the_expected_difference_of_half_squared_losses():
    truth, v, moment = tensor(RNG.normal(size=(M, D))), tensor(RNG.normal(size=(M, D))), covariances()
    excess = measures.linear_excess(v, truth, moment)
    for i in range(M):
        gap = (v[i] - truth[i]).numpy()
        assert float(excess[i]) == pytest.approx(0.5 * gap @ moment[i].numpy() @ gap)
    task = Linear(D, intercept=False)
    x = torch.stack([torch.linalg.cholesky(c) @ tensor(RNG.normal(size=(D, 40000))) for c in moment]).mT
    y = torch.einsum("cbi,ci->cb", x, truth) + tensor(RNG.normal(size=(M, 40000)))
    draws = Batch(x, y, torch.full((M, 40000), 1 / 40000, dtype=torch.float64))
    torch.testing.assert_close(measures.sampled_excess(task, v, truth, draws), excess, rtol=0.1, atol=0.02)
    shared = measures.linear_excess(v[0], truth, moment[0])
    assert float(shared[2]) == pytest.approx(float(measures.linear_excess(v[:1], truth[2:3], moment[:1])))


def test_logistic_excess_equals_quadrature_and_draws():
    mean, cov = np.array([0.3, -0.2]), np.array([[1.0, 0.4], [0.4, 0.5]])
    truth, v = np.array([1.2, -0.7]), np.array([0.4, 0.9])
    inverse, constant = np.linalg.inv(cov), 1 / (2 * np.pi * np.sqrt(np.linalg.det(cov)))

    def integrand(b, a):
        x = np.array([a, b])
        density = constant * np.exp(-0.5 * (x - mean) @ inverse @ (x - mean))
        head = 1 / (1 + np.exp(-x @ truth))
        loss = [np.logaddexp(0, x @ w) - head * (x @ w) for w in (v, truth)]
        return density * (loss[0] - loss[1])

    expected = dblquad(integrand, -8, 8, -8, 8, epsabs=1e-9)[0]
    found = measures.logistic_excess(tensor(v), tensor(truth)[None], tensor(mean), tensor(cov))
    assert float(found) == pytest.approx(expected, abs=1e-7)
    draws = 100_000
    x = tensor(RNG.multivariate_normal(mean, cov, size=draws))[None]
    y = (torch.sigmoid(x[0] @ tensor(truth)) > tensor(RNG.random(draws))).long()[None]
    batch = Batch(x, y, torch.full((1, draws), 1 / draws, dtype=torch.float64))
    sampled = measures.sampled_excess(
        Logistic(2, intercept=False, ridge=0.0), tensor(v)[None], tensor(truth)[None], batch
    )
    assert float(sampled) == pytest.approx(expected, abs=0.02)


def test_logistic_excess_is_zero_at_the_truth_and_positive_elsewhere():
    truth, mean, cov = tensor(RNG.normal(size=(M, D))), tensor(RNG.normal(size=(M, D))), covariances()
    torch.testing.assert_close(measures.logistic_excess(truth, truth, mean, cov), torch.zeros(M, dtype=torch.float64))
    assert bool((measures.logistic_excess(truth + 0.5, truth, mean, cov) > 0).all())
    flat = measures.logistic_excess(truth, torch.zeros_like(truth), mean, cov)
    assert bool((flat > 0).all())


def test_average_and_individual_excess():
    excess, p = tensor([0.1, 0.4, 0.2]), tensor([0.5, 0.2, 0.3])
    average = measures.average_excess(excess, p)
    assert average == pytest.approx(0.5 * 0.1 + 0.2 * 0.4 + 0.3 * 0.2)
    assert bool((excess <= average / p).all())


def test_squared_errors_and_their_relation_to_excess_risk():
    """mu/2 |v - w*|^2 <= IER <= smooth/2 |v - w*|^2."""
    truths, v, w = tensor(RNG.normal(size=(M, D))), tensor(RNG.normal(size=(M, D))), tensor(RNG.normal(size=D))
    p, moment = tensor([0.1, 0.2, 0.3, 0.4]), covariances()
    found = measures.squared_errors(w, v, truths, p)
    average = sum(q * t for q, t in zip(p.tolist(), truths.numpy()))
    assert found.common == pytest.approx(np.sum((w.numpy() - average) ** 2))
    for i in range(M):
        assert float(found.personal[i]) == pytest.approx(np.sum((v[i] - truths[i]).numpy() ** 2))
    eigenvalues = torch.linalg.eigvalsh(moment)
    excess = measures.linear_excess(v, truths, moment)
    assert bool((eigenvalues[:, 0] / 2 * found.personal <= excess + 1e-12).all())
    assert bool((excess <= eigenvalues[:, -1] / 2 * found.personal + 1e-12).all())


@pytest.mark.parametrize("problem", ["linear", "logistic", "absolute"])
def test_optimisation_error_is_zero_at_the_minimiser_only(problem):
    task, clients = PROBLEMS[problem]()
    p, rows = clients.weights(), clients.train
    lam = torch.linspace(0.2, 1, 5, dtype=torch.float64)
    best = measures.minimiser(task, lam, p, rows)
    assert abs(measures.optimisation_error(task, best.w, best.v, lam, p, rows)) < 1e-10
    naive = sum(
        float(p[i])
        * (float(task.loss(best.v, rows.padded())[i]) + float(lam[i]) / 2 * float((best.v[i] - best.w).norm()) ** 2)
        for i in range(5)
    )
    assert measures.objective(task, best.w, best.v, lam, p, rows) == pytest.approx(naive)
    for scale in (1e-2,) if problem == "absolute" else (1e-3, 1.0):
        w, v = best.w + scale * tensor(RNG.normal(size=4)), best.v + scale * tensor(RNG.normal(size=(5, 4)))
        assert measures.optimisation_error(task, w, v, lam, p, rows) > 0


def test_gradient_norm_in_both_conventions():
    clients = linear_clients()
    task, p, w = Linear(3), clients.weights(), tensor(RNG.normal(size=4))
    found = measures.gradient_norm(task, w, p, clients.train)
    total, count = np.zeros(4), 0
    for i in range(5):
        x, y = (part.numpy() for part in clients.train.of(i))
        x = np.hstack([x, np.ones((len(x), 1))])
        total, count = total - 2 * x.T @ (y - x @ w.numpy()), count + len(y)
    assert found.plotted == pytest.approx(np.linalg.norm(total / count))
    assert found.training == pytest.approx(found.plotted / 2)


def test_moreau_stationarity_vanishes_at_the_minimiser_and_bounds_subgradients():
    task, clients = Absolute(3, ridge=0.01), linear_clients()
    p, rho = clients.weights(), 0.3
    best = task.solve(clients.train.pooled(p))[0]
    assert measures.moreau_stationarity(task, best, p, clients.train, rho) < 1e-6
    w = best + 0.5
    score = measures.moreau_stationarity(task, w, p, clients.train, rho)
    # |grad F_rho(w)| is at most the norm of any sub-gradient at w, and at least F's mean slope towards the minimiser.
    assert score <= float(task.grad(w[None], clients.train.pooled(p)).norm()) + 1e-9
    assert score > 0
    quadratic = Linear(3, ridge=0.1)
    smooth = measures.moreau_stationarity(quadratic, w, p, clients.train, 1e-6)
    assert smooth == pytest.approx(measures.gradient_norm(quadratic, w, p, clients.train).training, rel=1e-4)


def test_federated_stability_equals_retraining_by_hand_and_keeps_its_bound():
    rng = np.random.default_rng(4)
    xs = [rng.uniform(-1, 1, size=(40, 2)) for _ in range(3)]
    ys = [np.clip(x @ [0.5, -0.5] + 0.1 * rng.normal(size=40), -1, 1) for x in xs]
    task, clients = Linear(2, intercept=False, ridge=0.5), from_arrays(xs, ys)
    p, lam = clients.weights(), 0.02

    def fit(rows):
        return measures.minimiser(task, lam, p, rows).v

    fresh = [(tensor(rng.uniform(-1, 1, size=2)), tensor(rng.uniform(-1, 1))) for _ in range(5)]
    probe = Batch(
        tensor(rng.uniform(-1, 1, size=(1, 50, 2))), tensor(rng.uniform(-1, 1, size=(1, 50))), torch.ones(1, 50)
    )
    changes = measures.federated_stability(fit, task, clients.train, 1, fresh, probe)
    x, y = [a.copy() for a in xs], [a.copy() for a in ys]
    x[1][3], y[1][3] = fresh[3][0].numpy(), float(fresh[3][1])
    old, new = (fit(from_arrays(a, b).train)[1].numpy() for a, b in ((xs, ys), (x, y)))

    def losses(w):
        return 0.5 * (probe.x[0].numpy() @ w - probe.y[0].numpy()) ** 2 + 0.25 * w @ w

    assert float(changes[3]) == pytest.approx(np.abs(losses(new) - losses(old)).max(), rel=1e-6)
    assert torch.equal(clients.train.y, tensor(np.concatenate(ys)))
    mu, smooth = 0.5, 2.5
    ell_max = float(np.max(0.5 * (np.sqrt(2) * 2 + 1) ** 2))
    assert fedprox_condition(smooth, mu, lam, p.numpy(), np.full(3, 40)).all()
    assert float(changes.max()) <= fedprox_stability(smooth, ell_max, mu, lam, p.numpy(), np.full(3, 40))[1]


def test_fairness_over_clients():
    risk = tensor([float(k) for k in range(1, 25)] + [np.nan])
    alone = tensor([12.5] * 24 + [0.0])
    found = measures.fairness(risk, alone)
    assert found.quantiles == {q: pytest.approx(np.quantile(np.arange(1, 25), q)) for q in (0.1, 0.25, 0.5, 0.75, 0.9)}
    assert found.worst_decile == pytest.approx((24 + 23 + 22) / 3)
    assert found.harmed == pytest.approx(0.5)
    assert np.isnan(measures.fairness(risk).harmed)
    assert np.isnan(measures.fairness(tensor([np.nan])).worst_decile)


def test_costs_of_a_run():
    """FedMSPP draws b records a client and round; five certified steps on them are five gradients each."""
    task, clients = PROBLEMS["logistic"]()
    fields = {"lam": 1.0, "batch": 4, "inner": "descent", "steps": 5, "tol": 0.0}
    ready, exchange, server = settled_simulator(build("fedmspp", fields), task, clients)
    outcome = run(ready, exchange, Plan(rounds=6, evaluate_every=2), Progress(server))
    records = outcome.progress.records
    assert measures.accessed(records) == (6 * 5 * 4, 6 * 5 * 4 * 5)
    assert measures.accessed(records, until=2) == (2 * 5 * 4, 2 * 5 * 4 * 5)
    losses = [r["test_loss"] for r in records if r["round"] % 2 == 0]
    assert measures.rounds_to(records, losses[1]) in (2, 4)
    assert measures.rounds_to(records, -1.0) is None
