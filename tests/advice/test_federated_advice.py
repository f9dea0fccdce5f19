"""Recommendations from sums: against pooled fits, planted truths, the plan, and single precision of what is sent."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.optimize import minimize_scalar

from mooring.advice.federated.client import AdviceClientNode
from mooring.advice.federated.curves import columns_program, expand
from mooring.advice.federated.estimate import (
    STEP_TOLERANCE,
    VARIANCE_STEPS,
    Shape,
    _curve_ridge,
    _fit_global,
    _sum_moments,
    check_rows,
    column_sets,
    estimate_program,
    size_numbers,
)
from mooring.advice.federated.plan import list_steps, nonlinear_budget, plan_budget, plan_digest
from mooring.advice.federated.plan_text import describe_plan
from mooring.advice.federated.program import advise_together, home_rows, shape_of
from mooring.advice.federated.score_models import HomeRows, design, family_of
from mooring.advice.federated.server import advise_federation
from mooring.core.cohort import Batch
from mooring.core.errors import RequestError
from mooring.core.summing import Step, Sum, run_together, side_by_side
from mooring.engines.predict import predict
from mooring.engines.prepare import prepare
from mooring.engines.request import read_federation_request, request
from mooring.remote.client_requests import RESULT_DIR
from mooring.remote.memory import MemoryTransport
from mooring.shapes.splines import KNOT_LEVELS
from mooring.tasks.linear import Linear
from mooring.tasks.linear_losses import Poisson
from mooring.tasks.logistic import Logistic

TASKS = {
    "linear": Linear(4),
    "two classes": Logistic(4),
    "three classes": Logistic(4, classes=3),
    "counts": Poisson(4),
}


def plant(name, clients, rows, spread, seed, noise=1.0, curve=0.0):
    """Clients with models around a global one, and a curve in the first column."""
    task, rng = TASKS[name], np.random.default_rng(seed)
    family = family_of(task)
    center, homes, truths = 0.5 * rng.normal(size=task.dim), [], []
    for _ in range(clients):
        truths.append(center + spread * rng.normal(size=task.dim))
        j = design(rng.normal(size=(rows, 4)), family.scores, True)
        z = j @ truths[-1] + curve * np.sin(2 * j[:, :, :1].sum(1))
        if name == "linear":
            y = z[:, 0] + noise * rng.normal(size=rows)
        elif name == "counts":
            y = rng.poisson(np.exp(np.minimum(z[:, 0], 5))).astype(float)
        else:
            z = np.concatenate([np.zeros_like(z), z], 1) if family.scores == 1 else z
            y = (z + rng.gumbel(size=z.shape)).argmax(1).astype(float)
        homes.append(HomeRows(j, y, family, ()))
    return task, homes, np.array(truths)


def _fit_pooled(shape, homes, rows):
    moments = yield from _sum_moments(shape, homes)
    return (yield from _fit_global(shape, homes, rows, moments))


@pytest.mark.parametrize("name", TASKS)
def test_the_global_model_is_that_of_all_rows_in_one_place(name):
    """Up to a part of its standard errors, where the steps end."""
    task, homes, _ = plant(name, 6, 80, 0.2, 0)
    ((w, curvature),) = run_together([_fit_pooled(shape_of(task), homes, 480)])
    x = np.concatenate([h.jacobian[:, 0, :: h.family.scores][:, :4] for h in homes])
    y = np.concatenate([h.y for h in homes])
    kind = torch.long if "classes" in name else torch.float64
    batch = Batch(torch.tensor(x)[None], torch.tensor(y).to(kind)[None], torch.full((1, len(y)), 1 / len(y)))
    pooled = task.solve(batch)
    np.testing.assert_allclose(curvature / 480, task.hessian(pooled, batch)[0].numpy(), atol=1e-3)
    change = w - pooled[0].numpy()
    assert change @ curvature @ change < (1e-12 if name == "linear" else STEP_TOLERANCE)


@pytest.mark.parametrize("has_curves", [False, True])
@pytest.mark.parametrize("name", TASKS)
def test_the_plan_is_what_is_sent(name, has_curves):
    for clients in (9,) if has_curves else (4, 9):
        task, homes, _ = plant(name, clients, 60, 0.3, clients, curve=0.7 * has_curves)
        record: list[tuple[str, int]] = []
        shape = shape_of(task)._replace(numeric=(0, 2) if has_curves else ())
        result, _ = advise_together(shape, homes, 0.01, 0.95, record)
        extra = result.federation.extra
        assert (extra > 0) == has_curves
        planned = {part.step.name: part for part in list_steps(clients, shape, extra)}
        for step, size in record:
            assert size <= planned[step].numbers
        for step, part in planned.items():
            sent = [name for name, _ in record if name == step]
            assert 1 <= len(sent) <= part.times
        counted = sum(part.counted for part in planned.values())
        assert counted <= max(nonlinear_budget(clients, task.dim + extra * homes[0].family.scores), 6)


@pytest.mark.parametrize("spread", [0.02, 0.3, 1.0])
def test_planted_variances_are_found(spread):
    found = []
    for seed in range(6):
        task, homes, _ = plant("linear", 30, 60, spread, seed)
        result, _ = advise_together(shape_of(task), homes, 0.01, 0.95)
        found.append(result.federation.fits["linear"].variances["scalar"].mean())
    assert 0.5 * spread**2 < np.median(found) < 2 * spread**2


def test_personal_models_are_near_the_bayes_estimate():
    """Of a known center, spread and noise: the excess risk is at most a fifth above."""
    excess, bayes = [], []
    for seed in range(8):
        task, homes, truths = plant("linear", 20, 15, 0.4, seed)
        _, own = advise_together(shape_of(task), homes, 0.01, 0.95)
        center = 0.5 * np.random.default_rng(seed).normal(size=task.dim)
        for home, result, truth in zip(homes, own, truths):
            x = home.jacobian[:, 0]
            best = center + np.linalg.solve(x.T @ x + np.eye(5) / 0.16, x.T @ (home.y - x @ center))
            excess.append(((result.models.personal.v - truth) ** 2).sum())
            bayes.append(((best - truth) ** 2).sum())
    assert np.mean(excess) < 1.2 * np.mean(bayes)


def test_clients_with_one_true_model_are_not_recommended_local_ones():
    task, homes, _ = plant("linear", 12, 60, 0.0, 3)
    result, _ = advise_together(shape_of(task), homes, 0.01, 0.95)
    assert result.recommended["local"] == 0 and result.recommended["global"] >= 6


def test_few_rows_and_large_clients_are_refused():
    def total(sizes):
        return np.sum([size_numbers(n) for n in sizes], axis=0)

    check_rows(total([40] * 6), 5)
    with pytest.raises(RequestError, match="besides the two largest clients 18 rows"):
        check_rows(total([40, 40, 2, 2, 2]), 5)
    with pytest.raises(RequestError, match="more than half"):
        check_rows(total([90, 90, 9000, 80, 300]), 5)
    with pytest.raises(RequestError, match="too few"):
        check_rows(total([40, 40]), 5)


def test_the_budget_falls_with_clients_and_coefficients():
    task = Linear(2)
    small = plan_budget(4, [shape_of(task)])
    assert not small.spread and not small.candidates
    assert plan_budget(60, [shape_of(Linear(20))]).variance_steps == VARIANCE_STEPS


def test_a_cohort_gives_the_numbers_of_its_clients():
    task, homes, _ = plant("linear", 6, 40, 0.3, 1)
    shape: Shape = shape_of(task)
    single = run_together([estimate_program(shape, [home], plan_budget) for home in homes])
    (together,) = run_together([estimate_program(shape, homes, plan_budget)])
    np.testing.assert_allclose(together[0].w, single[0][0].w, atol=1e-7)
    for k in range(6):
        np.testing.assert_allclose(together[1][k].personal.v, single[k][1][0].personal.v, atol=1e-3)


CURVED = [name for name in TASKS if name != "three classes"]


@pytest.mark.parametrize("name", CURVED)
def test_curves_are_found_where_they_are(name):
    task, homes, truths = plant(name, 8, 150, 0.2, 5, curve=1.0)
    shape, errors = shape_of(task), []
    for numeric in ((), (0, 1, 2, 3)):
        result, own = advise_together(shape._replace(numeric=numeric), homes, 0.01, 0.95)
        columns, rng = result.federation.columns, np.random.default_rng(1)
        assert (columns is not None) == bool(numeric)
        x, gaps = rng.normal(size=(500, 4)), []
        for part, truth in zip(own, truths):
            base = HomeRows(design(x, 1, True), np.zeros(500), homes[0].family, ())
            rows = base if columns is None else expand(base, columns)
            gaps.append(rows.scores(part.models.personal.v)[:, 0] - base.scores(truth)[:, 0] - np.sin(2 * x[:, 0]))
        errors.append(np.mean(np.square(gaps)))
    assert errors[1] < 0.5 * errors[0]
    weights = result.federation.weights
    assert sum(weight for candidate, weight in weights.items() if candidate.columns == "spline") > 0.95


@pytest.mark.parametrize("name", CURVED)
def test_curves_cost_little_where_all_is_linear(name):
    errors = {(): [], (0, 1, 2, 3): []}
    for seed in range(3):
        task, homes, truths = plant(name, 8, 100, 0.2, seed)
        for numeric, found in errors.items():
            result, own = advise_together(shape_of(task)._replace(numeric=numeric), homes, 0.01, 0.95)
            columns, x = result.federation.columns, np.random.default_rng(seed).normal(size=(500, 4))
            base = HomeRows(design(x, 1, True), np.zeros(500), homes[0].family, ())
            rows = base if columns is None else expand(base, columns)
            found += [
                ((rows.scores(part.models.personal.v) - base.scores(truth)) ** 2).mean()
                for part, truth in zip(own, truths)
            ]
    plain, curved = (np.mean(found) for found in errors.values())
    assert curved < 1.15 * plain


def test_linear_columns_are_kept_on_request():
    schema = SimpleNamespace(numeric_places=(0, 2))
    assert shape_of(TASKS["linear"], schema).numeric == (0, 2)
    shape = shape_of(TASKS["linear"], schema, "linear")
    assert shape.numeric == ()
    _, homes, _ = plant("linear", 8, 60, 0.2, 0, curve=1.0)
    record: list[tuple[str, int]] = []
    result, _ = advise_together(shape, homes, 0.01, 0.95, record)
    assert "histogram" not in dict(record) and result.federation.columns is None


def test_knots_are_quantiles_of_all_rows():
    rng = np.random.default_rng(2)
    x = np.stack([rng.normal(size=4000), rng.exponential(size=4000) - 1], 1)
    y = np.zeros(1000)
    homes = [HomeRows(design(part, 1, True), y, family_of(TASKS["linear"]), ()) for part in np.split(x, 4)]
    columns = run_together([columns_program([home], 2, (0, 1), 40) for home in homes])[0]
    assert columns is not None and [place for place, _ in columns.splines] == [0, 1]
    for place, knots in columns.splines:
        below = (x[:, place, None] < np.array(knots)).mean(0)
        np.testing.assert_allclose(below, KNOT_LEVELS[len(knots)], atol=0.06)
    extra = columns(torch.from_numpy(x)).numpy()[:, 2:]
    np.testing.assert_allclose(extra.mean(0), 0, atol=0.1)
    np.testing.assert_allclose(extra.std(0), 1, atol=0.1)


def test_the_ridge_of_a_curve_maximizes_its_restricted_likelihood():
    """Of y ~ N(X b, noise + noise / ridge Z Z'), with the likelihood computed row by row."""
    rng, n, noise = np.random.default_rng(3), 60, 0.5
    x = np.concatenate([rng.normal(size=(n, 4)), np.ones((n, 1))], 1)
    y = x @ [1.0, 0.3, -0.4, 0.2, 0.5] + noise**0.5 * rng.normal(size=n)
    gram, place = x.T @ x, np.array([1, 2, 3])
    fixed, curve = x[:, [0, 4]], x[:, place]

    def deviance(log_ridge):
        covariance = noise * np.eye(n) + noise / np.exp(log_ridge) * curve @ curve.T
        inverse = np.linalg.inv(covariance)
        inner = fixed.T @ inverse @ fixed
        left = y - fixed @ np.linalg.solve(inner, fixed.T @ inverse @ y)
        return np.linalg.slogdet(covariance)[1] + np.linalg.slogdet(inner)[1] + left @ inverse @ left

    best = np.exp(minimize_scalar(deviance, bounds=(-5, 12), method="bounded").x)
    _, columns = column_sets(shape_of(Linear(1)), 3, [0, 0, 0])
    assert [part.tolist() for part in columns.curves] == [[1, 2, 3]]
    ridge = _curve_ridge(columns, np.linalg.solve(gram, x.T @ y), gram, noise, n)
    np.testing.assert_allclose(ridge, [0, best, best, best, 0], rtol=0.02)


def test_programs_side_by_side_wait_for_one_another():
    first, second = Step("first", "", 1.0), Step("second", "", 1.0)

    def program(own, times):
        total = 0.0
        for _ in range(times):
            total += (yield Sum(first, np.array([[own]]))).sum()
        return total, float((yield Sum(second, np.array([[own, own]]))).sum())

    record: list[tuple[str, int]] = []
    programs = [side_by_side([program(own, 1), program(10 * own, 3)], [first, second]) for own in (1.0, 2.0)]
    results = run_together(programs, record)
    assert results == [[(3.0, 6.0), (90.0, 60.0)]] * 2
    assert record == [("first", 2), ("first", 1), ("first", 1), ("second", 4)]


def test_saved_runs_predict_with_curves(tmp_path):
    """The global model and a client's own, from the tables that the clients have."""
    rng = np.random.default_rng(4)
    (tmp_path / "clients").mkdir()
    for k in range(9):
        u, v = rng.normal(size=(2, 120))
        y = np.sin(2 * u) * 2 + v + 0.3 * rng.normal(size=120) + k
        pd.DataFrame({"u": u, "v": v, "y": y}).to_csv(tmp_path / "clients" / f"site {k}.csv", index=False)
    path = tmp_path / "run.toml"
    text = f'[mooring]\npurpose = "advise"\n[data]\nsource = "{tmp_path / "clients"}"\ntarget = "y"\n'
    path.write_text(text + "[training]\nthreads = 1\n[advice]\n[federation]\nclients = 9\n")
    run = read_federation_request(path)
    files = sorted((tmp_path / "clients").iterdir())
    nodes = [AdviceClientNode(run, file, tmp_path / "state" / file.stem) for file in files]
    advise_federation(run, MemoryTransport(nodes), tmp_path / "run")
    for node in nodes:
        frame = pd.read_csv(node.path)
        for folder in (node.folder / RESULT_DIR, tmp_path / "run"):
            error = predict(folder, node.path, client=node.name)[0]["y"] - frame["y"]
            assert error.std() < 1.0  # 1.4 of lines
    run = run.model_copy(update={"advice": run.advice.model_copy(update={"shape": "boosted"})})
    with pytest.raises(RequestError, match="boosted does not apply across machines"):
        advise_federation(run, MemoryTransport(nodes), tmp_path / "other")


def test_the_printed_plan_fits_a_terminal_and_names_its_digest(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        '[mooring]\npurpose = "advise"\n[data]\nsource = "clients"\ntarget = "y"\n[federation]\nclients = 4\n'
    )
    run = read_federation_request(path)
    lines = describe_plan(run, 12)
    assert plan_digest(run) in lines[0] and max(map(len, lines)) <= 80
    planned = list_steps(4, shape_of(Linear(12)))
    assert all(any(line.startswith(part.step.name) for line in lines) for part in planned)
    assert any("3 of them together" in line for line in lines)


def test_personal_models_of_hospitals_predict_as_well_as_the_others():
    """One row that alone decides a coefficient once made the average of candidates worthless (log-loss 1.1)."""
    job = prepare(request("heart", purpose="advise"), None)
    homes = [home_rows(job.task, job.clients, k) for k in range(len(job.clients))]
    result, own = advise_together(shape_of(job.task, job.clients.schema), homes, 0.01, 0.95)
    loss = result.line.loss
    assert loss["personal"] < min(loss["local"], loss["global"])
    assert max(np.abs(client.models.personal.without).max() for client in own) < 20
