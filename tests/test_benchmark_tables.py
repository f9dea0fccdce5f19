"""Splits of grouped tables, and the models that the linear baselines are made of."""

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.special import expit
from scipy.stats import nbinom

from benchmarks.advice_tables import Table, advise_table
from benchmarks.count_likelihoods import NegativeBinomial, estimate_theta, log_scores
from benchmarks.peers.shrunken_models import (
    POOLED_PULL,
    client_rows,
    derivatives,
    fit_mixed_effects,
    fit_shrunken,
    score,
)
from benchmarks.tables import BY_TIME, TEST, TRAIN, VALIDATION, split_of
from benchmarks.tables_catalog import (
    ADDED,
    BINARY,
    CLOSED,
    COUNT,
    DESIGN,
    MULTICLASS,
    PACKAGES,
    PARTS,
    REGRESSION,
    TABLES,
    part_of,
)
from benchmarks.who_should_federate import write_page

ENTRY = {"name": "made_up", "client": "who", "time": "day"}
SIZES = (4, 5, 10, 33)


@pytest.fixture
def frame():
    who = np.repeat(["a", "b", "c", "d"], SIZES)
    order = np.random.default_rng(0).permutation(len(who))
    return pd.DataFrame({"who": who[order], "day": order % 7, "y": order * 0.5})


def make_rows(kind, clients=6, size=15, seed=0):
    rng = np.random.default_rng(seed)
    client = np.repeat(np.arange(clients), size)
    x = rng.normal(size=(clients * size, 2))
    z = x @ [0.5, -0.3] + 0.7 * rng.normal(size=clients)[client]
    y = {
        REGRESSION: z + rng.normal(size=len(z)),
        BINARY: (rng.random(len(z)) < expit(z)).astype(float),
        COUNT: rng.poisson(np.exp(z)).astype(float),
        MULTICLASS: (z > 0).astype(int) + (rng.random(len(z)) < 0.3),
    }[kind]
    return client_rows(kind, 3 if kind == MULTICLASS else 1, x, y, client, clients)


def test_catalog_is_consistent():
    names = [table.name for table in TABLES]
    assert len(set(names)) == len(names)
    assert {table.package for table in TABLES} == set(PACKAGES)
    assert {table.kind for table in TABLES} == {REGRESSION, BINARY, COUNT, MULTICLASS}
    assert {part_of(name) for name in names} == set(PARTS)
    parts = part_of("gapminder"), part_of("grunfeld"), part_of("galton")
    assert parts == (DESIGN, CLOSED, ADDED)  # an assignment never changes


@pytest.mark.parametrize("seed", [1, 2, BY_TIME])
def test_parts_of_every_client(frame, seed):
    part = split_of(frame, ENTRY, seed)
    counts = pd.crosstab(frame["who"], part)
    for client, size in zip("abcd", SIZES):
        held_out = int(0.2 * size + 0.5)
        assert counts.loc[client].to_dict() == {TRAIN: size - 2 * held_out, VALIDATION: held_out, TEST: held_out}
    np.testing.assert_array_equal(part, split_of(frame.copy(), ENTRY, seed))


def test_seeds_and_names_change_the_split(frame):
    first = split_of(frame, ENTRY, 1)
    assert (first != split_of(frame, ENTRY, 2)).any()
    assert (first != split_of(frame, ENTRY | {"name": "other"}, 1)).any()


def test_time_orders_the_parts(frame):
    part = split_of(frame, ENTRY, BY_TIME)
    for _, day in frame["day"].groupby(frame["who"]):
        at = part[day.index]
        assert day[at == TRAIN].max() <= day[at == VALIDATION].min() <= day[at == VALIDATION].max()
        assert day[at == VALIDATION].max() <= day[at == TEST].min()
    with pytest.raises(ValueError, match="no time column"):
        split_of(frame, ENTRY | {"time": ""}, BY_TIME)


@pytest.mark.parametrize("kind", [REGRESSION, BINARY, COUNT, MULTICLASS])
def test_minimizer_has_no_gradient(kind):
    rows = make_rows(kind)
    pull, ridge = np.full(rows.width, 2.0), np.full(rows.width, 0.5)
    fit = fit_shrunken(rows, pull, ridge)
    gradient = derivatives(rows, fit.v)[0] + pull * (fit.v - fit.w)
    np.testing.assert_allclose(gradient, 0, atol=1e-3)
    np.testing.assert_allclose(ridge * fit.w - (pull * (fit.v - fit.w)).sum(0), 0, atol=1e-3)


@pytest.mark.parametrize("kind", [REGRESSION, BINARY, COUNT, MULTICLASS])
def test_infinite_pull_is_the_pooled_model(kind):
    rows = make_rows(kind)
    ridge = np.full(rows.width, 0.1)
    order = np.zeros(len(rows.y), int)
    pooled = client_rows(kind, rows.scores, rows.x[:, :-1], rows.y, order, 1)
    together = fit_shrunken(pooled, ridge, None).v[0]
    np.testing.assert_allclose(fit_shrunken(rows, np.full(rows.width, POOLED_PULL), ridge).w, together, atol=1e-3)


def test_fixed_center_is_ridge_regression():
    rows = make_rows(REGRESSION)
    fit = fit_shrunken(rows, np.full(rows.width, 3.0), None)
    for i in range(rows.clients):
        x, y = rows.x[rows.client == i], rows.y[rows.client == i]
        np.testing.assert_allclose(fit.v[i], np.linalg.solve(x.T @ x + 3 * np.eye(3), x.T @ y), atol=1e-8)


def test_mixed_effects_agree_with_statsmodels():
    from statsmodels.regression.mixed_linear_model import MixedLM

    rows = make_rows(REGRESSION, clients=40)
    fit, variance = fit_mixed_effects(rows, np.array([False, False, True]), rounds=500, tolerance=1e-4)
    found = MixedLM(rows.y, rows.x, rows.client).fit(reml=False)
    assert variance[2] == pytest.approx(float(np.asarray(found.cov_re)[0, 0]), rel=0.05)
    expected = rows.x @ found.fe_params + np.array([float(np.asarray(found.random_effects[i])[0]) for i in rows.client])
    np.testing.assert_allclose(score(fit.v, rows.x, rows.client, 1)[:, 0], expected, atol=0.03)


def test_a_table_without_heterogeneity_and_one_with_it_fill_the_page(tmp_path):
    """The page's numbers are those of test rows: recomputed from the stored losses."""
    rng = np.random.default_rng(0)
    entries = []
    for name, spread in (("alike", 0.0), ("apart", 3.0)):
        who, x = np.repeat(list("abcd"), 20), rng.normal(size=80)
        y = x * (1 + spread * np.repeat(rng.normal(size=4), 20)) + 0.5 * rng.normal(size=80)
        pd.DataFrame({"who": who, "x": x, "y": y}).to_parquet(tmp_path / f"{name}.parquet")
        entries.append(
            {
                "name": name,
                "client": "who",
                "target": "y",
                "features": ["x"],
                "time": "",
                "kind": REGRESSION,
                "rows": 80,
            }
            | {"rows": 80, "clients": 4, "package": "r-cran-made", "version": "1.0-2"}
        )
    results = [advise_table(tmp_path, entry, 1, "linear") for entry in entries]
    page = write_page(entries, [Table(result, None) for result in results])
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in page.splitlines() if line.startswith("| a")}
    for entry, result in zip(entries, results):
        line = rows[entry["name"]]
        over_local = 100 * (1 - result["recommended"].mean() / result["local"].mean())
        assert f"{over_local:+.1f}%" in line and "made 1.0 | mse | 4 | 80" in line
    assert "## Whether the stated confidence is right" in page and page.count("\n| local |") == 1


def test_negative_binomials_are_those_of_scipy():
    rng, theta = np.random.default_rng(0), 2.5
    mu = np.exp(rng.normal(size=4_000))
    y = rng.poisson(mu * rng.gamma(theta, 1 / theta, len(mu)))
    known = -nbinom.logpmf(y, theta, theta / (theta + mu))
    np.testing.assert_allclose(log_scores(y, mu, theta), known, rtol=1e-9)
    assert estimate_theta(y, mu) == pytest.approx(theta, rel=0.15)
    task, counts = NegativeBinomial(3, theta=theta), torch.from_numpy(y).double()
    z = torch.from_numpy(np.log(mu)).requires_grad_()
    loss = task.row_loss(z, counts)
    rise = task.row_loss(z + 0.1, counts) - loss
    higher = log_scores(y, mu * np.exp(0.1), theta) - known
    np.testing.assert_allclose(rise.detach().numpy(), higher, atol=1e-9)
    (slope,) = torch.autograd.grad(loss.sum(), z, create_graph=True)
    (bend,) = torch.autograd.grad(slope.sum(), z)
    torch.testing.assert_close(task.row_slope(z, counts), slope)
    torch.testing.assert_close(task.row_bend(z, counts), bend)
