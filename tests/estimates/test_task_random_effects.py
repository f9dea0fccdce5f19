"""How the spread of a task's clients is found: planted spreads, clients that tell little, and very many clients."""

import numpy as np
import pytest
import statsmodels.api as sm
import torch

from mooring.core.cohort import Rows
from mooring.estimates import task_random_effects
from mooring.estimates import task_random_effects as module
from mooring.estimates.client_queries import fit_penalized, sum_for_dispersion
from mooring.estimates.client_summaries import compute_linear_stats
from mooring.estimates.random_effects import fit_reml
from mooring.estimates.task_random_effects import available_forms, count_intercepts, estimate_random_effects
from mooring.tasks.kernel_regression import KernelRegression
from mooring.tasks.linear import Linear
from mooring.tasks.linear_losses import Hinge, Poisson
from mooring.tasks.logistic import Logistic
from tests.support.problems import logistic_clients

from .planted import linear_rows, logistic_rows, rows_of


def spread_of(task, rows, form="scalar"):
    return estimate_random_effects(task, rows, form)


def classes(rows):
    return Rows(rows.x, rows.y.long(), rows.start, rows.size)


def test_linear_clients_are_asked_for_sums():
    rng = np.random.default_rng(0)
    rows, *_ = linear_rows([5, 9, 3, 20] * 10, 1 + 0.5 * rng.normal(size=(40, 4)), rng)
    for form in ("scalar", "diagonal"):
        found, asked = spread_of(Linear(4, intercept=False), rows, form)
        expected = fit_reml(compute_linear_stats(rows), form)
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


def test_no_estimate_where_none_is_possible():
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
    monkeypatch.setattr(module, "MAX_CLIENTS_BY_SUMS", 40)
    found, asked = spread_of(Linear(2, intercept=False), rows)
    assert len(asked) == 40 and bool((rows.size[asked] > 0).all()) and len(found.models) == 40


def test_kernels_have_one_spread_for_all_coefficients():
    assert available_forms(Linear(5)) == ("scalar", "diagonal", "intercept")
    assert available_forms(Linear(5, intercept=False)) == ("scalar", "diagonal")
    assert "diagonal" not in available_forms(KernelRegression(2))


def test_from_a_near_spread_the_approximation_ends_sooner_at_nearly_the_same(monkeypatch):
    clients = logistic_clients(m=30, sizes=[40] * 30, seed=3)
    task = Logistic(3, ridge=0.0)
    asked = []

    def count_calls(*given, **shared):
        asked.append(1)
        return fit_penalized(*given, **shared)

    monkeypatch.setattr(task_random_effects, "fit_penalized", count_calls)
    exact = estimate_random_effects(task, clients.train).spread
    rounds = len(asked)
    asked.clear()
    again = estimate_random_effects(task, clients.train, near=exact).spread
    assert len(asked) < rounds
    torch.testing.assert_close(again.variance, exact.variance, rtol=0.02, atol=0)


def counts(clients, rows, dispersion, spread=0.0, seed=0):
    """Counts with Var y = dispersion * mean (negative binomial), and intercepts that vary by `spread`."""
    rng = np.random.default_rng(seed)
    xs = [rng.normal(size=(rows, 2)) for _ in range(clients)]
    ys = []
    for x in xs:
        mean = np.exp(1 + x @ [0.3, -0.2] + spread * rng.normal())
        over = dispersion - 1
        ys.append(rng.poisson(rng.gamma(mean / over, over) if over else mean).astype(float))
    return rows_of(xs, ys)


def test_where_only_intercepts_vary_no_other_coefficient_takes_dispersion_away():
    rng = np.random.default_rng(0)
    xs = [rng.normal(size=(7, 15)) for _ in range(40)]
    ys = [rng.poisson(rng.gamma(np.exp(3 + 0.1 * x[:, 0] + 0.5 * rng.normal()) / 2, 2)).astype(float) for x in xs]
    found, _ = spread_of(Poisson(15), rows_of(xs, ys), "intercept")
    assert float(found.noise[0]) == pytest.approx(3, rel=0.12)
    assert float(found.variance[:-1].abs().max()) == 0 < float(found.variance[-1])


@pytest.mark.parametrize("planted", [1.0, 3.0])
def test_the_dispersion_of_counts_is_found(planted):
    """1,800 rows show it to a standard error of 3 to 5 %."""
    found, _ = spread_of(Poisson(2), counts(60, 30, planted))
    assert float(found.noise[0]) == pytest.approx(planted, rel=0.12) and len(set(found.noise.tolist())) == 1


def test_overdispersed_counts_of_identical_clients_show_hardly_any_spread(monkeypatch):
    rows = counts(60, 30, 4.0)
    found, _ = spread_of(Poisson(2), rows)
    monkeypatch.setattr(Poisson, "overdispersed", False)
    naive, _ = spread_of(Poisson(2), rows)
    assert float(naive.variance[0]) > 0.01 and float(found.variance[0]) < 0.25 * float(naive.variance[0])


def test_sums_for_the_dispersion_are_those_of_a_loop():
    task, rows = Poisson(2), counts(3, 7, 2.0)
    rows = Rows(rows.x, rows.y, rows.start, torch.tensor([7, 4, 5]))
    models = torch.tensor([[0.3, -0.2, 1.0], [0.1, 0.0, 0.5], [0.0, 0.0, 2.0]], dtype=torch.float64)
    square, scale = sum_for_dispersion(task, rows, models)
    for i in range(3):
        x, y = (part.numpy() for part in rows.of(i))
        mean = np.exp(x @ models[i, :2].numpy() + float(models[i, 2]))
        assert float(square[i]) == pytest.approx(((y - mean) ** 2 / mean).sum())
        assert float(scale[i]) == pytest.approx((y / mean).sum())


def test_the_intercepts_variance_is_that_of_a_random_intercept_model():
    """Against statsmodels' restricted maximum likelihood."""
    rng = np.random.default_rng(6)
    sizes = rng.integers(3, 12, 25)
    xs = [rng.normal(size=(n, 2)) for n in sizes]
    ys = [x @ [1.0, -0.5] + 0.8 * rng.normal() + rng.normal(size=len(x)) for x in xs]
    found, _ = spread_of(Linear(2), rows_of(xs, ys), "intercept")
    owner, x, y = np.repeat(np.arange(25), sizes), np.concatenate(xs), np.concatenate(ys)
    known = sm.MixedLM(y, np.column_stack([x, np.ones(len(y))]), owner).fit(reml=True)
    assert found.variance[:2].tolist() == [0.0, 0.0]
    assert float(found.variance[2]) == pytest.approx(float(known.cov_re.squeeze()), rel=1e-3)
    assert float(found.noise[0]) == pytest.approx(known.scale, rel=1e-3)
    np.testing.assert_allclose(found.center, known.fe_params, rtol=1e-4, atol=1e-5)
    assert torch.equal(found.models[:, :2], found.center[:2].expand(25, 2))  # slopes are the same for all


def test_of_several_classes_all_intercepts_vary():
    clients = logistic_clients(m=12, sizes=[40] * 12, classes=3)
    task = Logistic(3, classes=3)
    assert (
        count_intercepts(task) == 3
        and count_intercepts(Logistic(3)) == 1
        and count_intercepts(Linear(3, intercept=False)) == 0
    )
    found, _ = spread_of(task, clients.train, "intercept")
    assert float(found.variance[:-3].abs().max()) == 0 and bool((found.variance[-3:] > 0).all())
