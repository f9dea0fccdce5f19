"""Lemma C.6 of alternative and Eq. 5 of effect on planted logistic clients, with exact minimizers."""

import numpy as np
import pytest
import torch

from mooring.tasks.logistic import Logistic
from mooring_papers.exact_minimum import minimize_objective
from mooring_papers.generators import HardLogistic
from mooring_papers.theory.proximal_estimate import error_bound, error_inequality, truth_to_prox_bound

RIDGE = 0.3
TASK = Logistic(4, intercept=False, ridge=RIDGE)


def planted(seed):
    data = HardLogistic(6, 40, 4, 1.0, "smooth", "rademacher", ridge=RIDGE).make(seed)
    full, p = data.train.full(TASK), data.weights()
    truth = data.truth.w
    return data, full, p, truth, TASK.grad(truth, full), p @ truth


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("lam", [0.01, 0.5, 10.0])
def test_the_prox_of_the_true_average_is_near_each_truth(seed, lam):
    _, full, _, truth, gradient, average = planted(seed)
    near = TASK.prox(average.expand_as(truth), lam, full)
    for i in range(len(truth)):
        far = float((truth[i] - near[i]).norm())
        assert far <= truth_to_prox_bound(gradient[i].numpy(), (truth[i] - average).numpy(), RIDGE, lam)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("lam", [0.01, 0.5, 10.0])
def test_equation_5_holds_with_half_the_printed_mu(seed, lam):
    data, _, p, truth, gradient, average = planted(seed)
    v = minimize_objective(TASK, lam, p, data.train).v
    radius = float((p @ (truth - average).square().sum(1)).sqrt())
    errors = v - truth
    left = error_inequality(errors.numpy(), gradient.numpy(), p.numpy(), RIDGE)
    assert left <= lam / 2 * radius**2 + 1e-12
    s = float((p @ errors.square().sum(1)).sqrt())
    g = float((p @ gradient.square().sum(1)).sqrt())
    assert s <= error_bound(g, radius, RIDGE, lam)


def test_equation_5_leaves_no_slack_at_the_printed_mu():
    """L_i(w) = 1/2 |w - z_i|^2 with mu = 1, all truths 0, lam -> 0: both sides are 0 with mu in place of mu/2."""
    rng = np.random.default_rng(0)
    z, truth, p = rng.standard_normal((5, 2)), np.zeros((5, 2)), np.full(5, 0.2)
    v = z  # the minimizer as lam -> 0
    gradient = truth - z
    assert error_inequality(v - truth, gradient, p, 1.0) <= 0  # -1/2 sum p |z|^2
    assert error_inequality(v - truth, gradient, p, 2.0) == pytest.approx(0)  # mu itself: no slack is left


def test_the_bound_solves_its_quadratic():
    s = error_bound(0.7, 1.3, 0.4, 2.0)
    assert 0.4 / 2 * s**2 - 0.7 * s == pytest.approx(2.0 / 2 * 1.3**2)
    assert torch.isfinite(torch.tensor(s))
