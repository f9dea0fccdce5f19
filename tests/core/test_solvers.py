"""Projections, schedules, Newton's method and stiffness, each against a closed form."""

import numpy as np
import pytest
import torch

from mooring.core.cohort import Round
from mooring.core.errors import RequestError
from mooring.core.newton import conjugate_gradient, damped_newton
from mooring.core.penalty import PerClientPenalty, parse_lam, penalty_rows
from mooring.core.solvers import Ball, Box, descend_to_tolerance, geometric_decay, inverse_decay, project, sgd
from mooring.tasks.linear import Linear
from tests.support.problems import linear_clients


def test_projections():
    w = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
    torch.testing.assert_close(project(w, Ball(1.0)), torch.tensor([[0.6, 0.8], [0.3, 0.4]]))
    center = torch.tensor([3.0, 0.0])
    torch.testing.assert_close(project(w, Ball(1.0, center))[0], torch.tensor([3.0, 1.0]))
    torch.testing.assert_close(project(w, Box(-1, 1)), torch.tensor([[1.0, 1.0], [0.3, 0.4]]))
    assert project(w, None) is w


def test_schedules():
    assert [inverse_decay(1.0, 0.5)(k) for k in range(3)] == [1.0, 1 / 1.5, 0.5]
    assert inverse_decay(1.0, 0.5, before=2)(0) == 0.5
    halved = geometric_decay(1.0, 0.5, before=torch.tensor([0, 3]), every=torch.tensor([2, 3]))
    assert [halved(k).tolist() for k in range(4)] == [[1.0, 0.5], [1.0, 0.5], [0.5, 0.5], [0.5, 0.25]]
    assert [float(geometric_decay(2.0, 0.1)(k)) for k in range(3)] == pytest.approx([2.0, 1.8, 1.62], rel=1e-15)


def test_sgd_with_a_pull_reaches_the_prox():
    clients = linear_clients()
    task = Linear(3, ridge=0.1)
    data = clients.cohort()
    center = torch.ones(4, dtype=torch.float64)
    lam = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5], dtype=torch.float64)
    turn = Round(1, 1, 5, 5, 1.0, 0)
    found = sgd(task, torch.zeros(4, dtype=torch.float64), data, turn, 0.2, steps=2000, pull=(lam, center))
    expected = task.prox(center, lam, clients.train.full(task))
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9)
    certified = descend_to_tolerance(
        task, torch.zeros(5, 4, dtype=torch.float64), data.train.full(task), lam, center, 0.2, tol=1e-9, most=5000
    )
    torch.testing.assert_close(certified, expected, rtol=1e-6, atol=1e-7)


def test_projected_sgd_stays_inside():
    data = linear_clients(spread=5.0).cohort()
    turn = Round(1, 1, 5, 5, 1.0, 0)
    w = sgd(Linear(3), torch.zeros(4, dtype=torch.float64), data, turn, 0.1, batch=2, steps=20, region=Ball(0.5))
    assert bool((w.norm(dim=1) <= 0.5 + 1e-12).all())


def test_newton_minimises_convex_functions():
    """f(w) = sum log cosh(a (w - b)), whose minimiser is b; far starts need damping."""
    a = torch.tensor([[1.0, 5.0], [0.1, 20.0]], dtype=torch.float64)
    b = torch.tensor([[1.0, -2.0], [30.0, 0.5]], dtype=torch.float64)

    def value(w):
        z = (a * (w - b)).abs()
        return (z + torch.log1p(torch.exp(-2 * z)) - np.log(2)).sum(1)

    def grad(w):
        return a * torch.tanh(a * (w - b))

    def direction(w, g):
        return g / (a**2 / torch.cosh((a * (w - b)).clamp(-300, 300)) ** 2 + 1e-9)

    torch.testing.assert_close(damped_newton(value, grad, direction, torch.zeros(2, 2, dtype=torch.float64)), b)


def test_conjugate_gradient_solves_each_system():
    rng = torch.Generator().manual_seed(0)
    root = torch.randn(3, 6, 6, dtype=torch.float64, generator=rng)
    matrix = root @ root.mT + torch.eye(6, dtype=torch.float64)
    b = torch.randn(3, 6, dtype=torch.float64, generator=rng)
    found = conjugate_gradient(lambda s: torch.einsum("cij,cj->ci", matrix, s), b, tol=1e-12, most=50)
    torch.testing.assert_close(found, torch.linalg.solve(matrix, b))


def test_stiffness_is_a_product():
    like = torch.zeros(1, 3, dtype=torch.float64)
    index = torch.tensor([2, 0])
    assert penalty_rows(0.5, index, like).tolist() == [[0.5], [0.5]]
    assert penalty_rows(PerClientPenalty(per_client=(1.0, 2.0, 3.0)), index, like).tolist() == [[3.0], [1.0]]
    both = PerClientPenalty((1.0, 2.0, 3.0), (1.0, 10.0, 100.0))
    assert penalty_rows(both, index, like).tolist() == [[3.0, 30.0, 300.0], [1.0, 10.0, 100.0]]


@pytest.mark.parametrize(
    "lam,sentence",
    [
        (-1, "X: lam must be >= 0, got -1"),
        (float("nan"), "X: lam must be >= 0, got nan"),
        ("often", "X: lam must be a number >= 0 or one of 'auto', got 'often'"),
        ([0.1, -2], "X: lam must be >= 0, got -2"),
        ({"per_row": [1]}, "X: lam takes per_client and per_coefficient, got 'per_row'"),
    ],
)
def test_wrong_stiffness_is_one_sentence(lam, sentence):
    with pytest.raises(RequestError) as error:
        parse_lam("X", lam, ("auto",))
    assert str(error.value).startswith(sentence)
