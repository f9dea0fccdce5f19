"""Planted truths: radii and risks against loops, quadrature, sampling and automatic differentiation."""

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.special import expit
from scipy.stats import norm

from mooring_papers.generators import LinearTruth, Truth
from mooring_papers.generators.ground_truth import GaussianInputs, LogisticTruth, PointInputs, flatten_parameters
from mooring_papers.generators.hard_logistic import input_points


def rng(k):
    return np.random.default_rng(k)


def some_inputs(kind, m=3, d=4):
    if kind == "gaussian":
        return GaussianInputs(
            torch.from_numpy(rng(1).normal(size=(m, d))), torch.from_numpy(rng(2).random((m, d)) + 0.1)
        )
    return PointInputs(torch.from_numpy(rng(3).normal(size=(50, d))))


def test_radii_by_loops():
    w, p = rng(0).normal(size=(5, 3)), np.array([0.1, 0.2, 0.3, 0.15, 0.25])
    truth = Truth(torch.from_numpy(w), torch.from_numpy(p))
    average = sum(p[i] * w[i] for i in range(5))
    away = [np.linalg.norm(w[i] - average) for i in range(5)]
    assert np.allclose(truth.average, average)
    assert truth.r_rms == pytest.approx(np.sqrt(sum(p[i] * away[i] ** 2 for i in range(5))))
    assert truth.r_max == pytest.approx(max(away))
    assert truth.diameter == pytest.approx(max(np.linalg.norm(a - b) for a in w for b in w))


def test_the_diameter_keeps_its_digits_for_close_truths():
    w = torch.full((40, 10), 1e3, dtype=torch.float64)
    w[0, 0] += 1e-6
    assert Truth(w, torch.full((40,), 1 / 40).double()).diameter == pytest.approx(1e-6, rel=1e-3)


def test_linear_excess_risk_is_the_risk_difference():
    m, d = 2, 3
    root = rng(0).normal(size=(m, d, d))
    moment = root @ root.transpose(0, 2, 1)
    w, v = rng(1).normal(size=(2, m, d))
    truth = LinearTruth(torch.from_numpy(w), torch.ones(m).double() / m, torch.from_numpy(moment), noise=0.7)
    excess = truth.excess_risk(torch.from_numpy(v))
    for i in range(m):
        x = rng(5).normal(size=(400_000, d)) @ root[i].T
        noise = 0.7 * rng(6).normal(size=len(x))
        risk = [0.5 * np.mean((x @ u - x @ w[i] - noise) ** 2) for u in (v[i], w[i])]
        assert float(excess[i]) == pytest.approx(risk[0] - risk[1], rel=0.02)
    assert truth.excess_risk(truth.w).abs().max() == 0


@pytest.mark.parametrize("scale", [0.3, 3.0, 12.0])
def test_gaussian_expectations_against_adaptive_quadrature(scale):
    mean, variance, v = 0.8, 1.7, scale
    inputs = GaussianInputs(*(torch.tensor([[k]], dtype=torch.float64) for k in (mean, variance)))
    vs = torch.tensor([[v]], dtype=torch.float64)

    def expected(f):
        s = np.sqrt(variance)
        edges = mean - 10 * s, mean + 10 * s
        return quad(lambda x: f(x) * norm.pdf(x, mean, s), *edges, points=[0, mean], limit=500, epsabs=1e-13)[0]

    value, slope = inputs.expect(vs)
    assert float(value[0]) == pytest.approx(expected(lambda x: np.logaddexp(0, x * v)), rel=1e-9)
    assert float(slope[0, 0]) == pytest.approx(expected(lambda x: x * expit(x * v)), rel=1e-9)
    curve = expected(lambda x: x * x * expit(x * v) * expit(-x * v))
    assert float(inputs.hessian(vs)[0, 0, 0]) == pytest.approx(curve, rel=1e-8)


@pytest.mark.parametrize("kind", ["gaussian", "points"])
def test_slopes_and_hessians_are_derivatives(kind):
    inputs = some_inputs(kind)
    v = torch.from_numpy(rng(7).normal(size=(3, 4))).requires_grad_()
    value, slope = inputs.expect(v)
    assert torch.allclose(torch.autograd.grad(value.sum(), v)[0], slope, atol=1e-10)
    columns = [torch.autograd.grad(inputs.expect(v)[1][:, k].sum(), v)[0] for k in range(4)]
    assert torch.allclose(torch.stack(columns, 2), inputs.hessian(v), atol=1e-10)


@pytest.mark.parametrize("kind", ["gaussian", "points"])
def test_the_ridge_truth_is_stationary_and_tends_to_the_planted_one(kind):
    inputs = some_inputs(kind)
    planted, p = torch.from_numpy(rng(8).normal(size=(3, 4))), torch.full((3,), 1 / 3).double()
    truth = LogisticTruth.solve(planted, p, 0.05, inputs)
    w = truth.w.clone().requires_grad_()
    assert torch.autograd.grad(truth.risk(w).sum(), w)[0].abs().max() < 1e-8
    assert (truth.excess_risk(planted) > 1e-5).all()
    assert torch.allclose(LogisticTruth.solve(planted, p, 1e-8, inputs).w, planted, atol=1e-5)
    assert torch.equal(LogisticTruth.solve(planted, p, 0.0, inputs).w, planted)


def test_logistic_risk_against_sampled_labels():
    inputs = some_inputs("gaussian")
    planted, v = torch.from_numpy(rng(9).normal(size=(2, 3, 4)))
    truth = LogisticTruth.solve(planted, torch.full((3,), 1 / 3).double(), 0.1, inputs)
    x = inputs.mean[0].numpy() + np.sqrt(inputs.variance[0].numpy()) * rng(10).normal(size=(400_000, 4))
    y = rng(11).random(len(x)) < expit(x @ planted[0].numpy())
    a = x @ v[0].numpy()
    sampled = np.mean(np.logaddexp(0, a) - y * a) + 0.05 * float(v[0] @ v[0])
    assert float(truth.risk(v)[0]) == pytest.approx(sampled, rel=0.01)


def test_input_points_have_the_moments_of_the_inputs():
    corners = input_points(5, "rademacher")
    assert corners.shape == (32, 5) and np.array_equal(np.cov(corners.T, bias=True), np.eye(5))
    for inputs, variance in (("uniform", 1 / 3), ("rademacher", 1.0)):
        x = input_points(20, inputs)
        assert np.abs(x.mean(0)).max() < 1e-12
        assert np.abs(x.T @ x / len(x) - variance * np.eye(20)).max() < 0.02


def test_flat_classifiers_score_like_the_logistic_task():
    from mooring.tasks.logistic import Logistic

    x = torch.from_numpy(rng(0).normal(size=(2, 7, 3)))
    for c in (2, 4):
        weight, bias = torch.from_numpy(rng(1).normal(size=(2, 3, c))), torch.from_numpy(rng(2).normal(size=(2, c)))
        task = Logistic(features=3, classes=c, intercept=True)
        expected = torch.softmax(x @ weight + bias[:, None], -1)
        assert torch.allclose(task.predict(flatten_parameters(weight, bias), x), expected)
