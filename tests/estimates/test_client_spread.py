"""How the spread of a task's clients is found: planted spreads, clients that tell little, and very many clients."""

import numpy as np
import pytest
import torch

from mooring.core.cohort import Rows
from mooring.estimates import client_spread as module
from mooring.estimates.answers import Here
from mooring.estimates.client_spread import client_spread, forms_of
from mooring.estimates.spread import spread_likelihood
from mooring.estimates.summaries import linear_stats
from mooring.tasks.features import KernelRegression
from mooring.tasks.hinge import Hinge
from mooring.tasks.linear import Linear
from mooring.tasks.logistic import Logistic
from mooring.tasks.poisson import Poisson
from tests.problems import logistic_clients

from .planted import linear_rows, logistic_rows, rows_of


def spread_of(task, rows, form="scalar"):
    return client_spread(task, Here(task, rows), form)


def classes(rows):
    return Rows(rows.x, rows.y.long(), rows.start, rows.size)


def test_linear_clients_are_asked_for_sums():
    rng = np.random.default_rng(0)
    rows, *_ = linear_rows([5, 9, 3, 20] * 10, 1 + 0.5 * rng.normal(size=(40, 4)), rng)
    for form in ("scalar", "diagonal"):
        found, asked = spread_of(Linear(4, intercept=False), rows, form)
        expected = spread_likelihood(linear_stats(rows), form)
        torch.testing.assert_close(found.variance, expected.variance)
        assert asked.tolist() == list(range(40))


def test_logistic_spread_is_near_the_planted_one():
    """Laplace's approximation is a fifth low at 4 rows per coefficient; 600 draws of a normal tell tau^2 to 6 %."""
    rng = np.random.default_rng(1)
    rows, *_ = logistic_rows([30] * 200, 0.5 + 0.7 * rng.normal(size=(200, 3)), rng)
    found, _ = spread_of(Logistic(3, intercept=False), classes(rows))
    assert 0.65 * 0.49 < float(found.variance[0]) < 1.25 * 0.49


def test_counts_have_a_spread_too():
    rng = np.random.default_rng(2)
    xs = [rng.normal(size=(25, 2)) for _ in range(150)]
    ys = [rng.poisson(np.exp(x @ (0.2 + 0.4 * rng.normal(size=2)))).astype(float) for x in xs]
    found, _ = spread_of(Poisson(2, intercept=False), rows_of(xs, ys))
    assert float(found.variance[0]) == pytest.approx(0.16, rel=0.4)


def test_separable_tiny_and_one_class_clients_are_no_trouble():
    rng = np.random.default_rng(3)
    sizes = rng.integers(1, 8, 60)
    xs = [rng.normal(size=(int(n), 3)) for n in sizes]
    for ys in ([x[:, 0] > 0 for x in xs], [np.full(len(x), i % 2) for i, x in enumerate(xs)]):
        found, _ = spread_of(Logistic(3), classes(rows_of(xs, [np.asarray(y, float) for y in ys])))
        assert bool(torch.isfinite(found.variance).all()) and bool(torch.isfinite(found.models).all())


def test_nothing_is_said_where_nothing_can_be():
    rng = np.random.default_rng(4)
    rows, *_ = linear_rows([4, 4], rng.normal(size=(2, 3)), rng)
    lone = rows.select(torch.tensor([0]))
    assert spread_of(Linear(3), lone) is None
    assert spread_of(Linear(7), linear_rows([4, 4], rng.normal(size=(2, 7)), rng)[0]) is None
    assert spread_of(Hinge(3), classes(rows)) is None
    assert spread_of(Logistic(400), classes(linear_rows([500] * 2, np.zeros((2, 400)), rng)[0])) is None
    # Every client fits its rows exactly: spread and noise cannot be told apart.
    exact, *_ = linear_rows([3] * 9, rng.normal(size=(9, 3)), rng, noise=0.0)
    assert spread_of(Linear(3, intercept=False), exact) is None


def test_a_part_of_very_many_clients_is_asked(monkeypatch):
    rng = np.random.default_rng(5)
    rows, *_ = linear_rows([0, 6] * 60, 1 + 0.5 * rng.normal(size=(120, 2)), rng)
    monkeypatch.setattr(module, "MOST_CLIENTS", 40)
    found, asked = spread_of(Linear(2, intercept=False), rows)
    assert len(asked) == 40 and bool((rows.size[asked] > 0).all()) and len(found.models) == 40


def test_kernels_have_one_spread_for_all_coefficients():
    assert forms_of(Linear(5)) == ("scalar", "diagonal")
    assert forms_of(KernelRegression(2)) == ("scalar",)


def test_from_a_near_spread_the_approximation_ends_sooner_at_nearly_the_same():
    clients = logistic_clients(m=30, sizes=[40] * 30, seed=3)
    task = Logistic(3, ridge=0.0)
    asked = []

    class Counted(Here):
        def refit(self, *how):
            asked.append(1)
            return super().refit(*how)

    exact = client_spread(task, Counted(task, clients.train)).spread
    rounds = len(asked)
    asked.clear()
    again = client_spread(task, Counted(task, clients.train), near=exact).spread
    assert len(asked) < rounds
    torch.testing.assert_close(again.variance, exact.variance, rtol=0.02, atol=0)
