"""Recommendations from sums: against pooled fits, planted truths, the plan, and single precision of what is sent."""

import numpy as np
import pytest
import torch

from mooring.advice.federated.estimate import (
    STEP_TOLERANCE,
    Shape,
    _fit_global,
    _sum_moments,
    check_rows,
    estimate_program,
    size_numbers,
)
from mooring.advice.federated.plan import list_steps, nonlinear_budget, plan_budget
from mooring.advice.federated.program import advise_together, shape_of
from mooring.advice.federated.score_models import HomeRows, design, family_of
from mooring.core.cohort import Batch
from mooring.core.errors import RequestError
from mooring.core.summing import run_together
from mooring.tasks.linear import Linear
from mooring.tasks.linear_losses import Poisson
from mooring.tasks.logistic import Logistic

TASKS = {
    "linear": Linear(4),
    "two classes": Logistic(4),
    "three classes": Logistic(4, classes=3),
    "counts": Poisson(4),
}


def plant(name, clients, rows, spread, seed, noise=1.0):
    """Clients with models around a global one."""
    task, rng = TASKS[name], np.random.default_rng(seed)
    family = family_of(task)
    center, homes, truths = 0.5 * rng.normal(size=task.dim), [], []
    for _ in range(clients):
        truths.append(center + spread * rng.normal(size=task.dim))
        j = design(rng.normal(size=(rows, 4)), family.scores, True)
        z = j @ truths[-1]
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


@pytest.mark.parametrize("name", TASKS)
def test_the_plan_is_what_is_sent(name):
    for clients in (4, 9):
        task, homes, _ = plant(name, clients, 60, 0.3, clients)
        record: list[tuple[str, int]] = []
        advise_together(shape_of(task), homes, 0.01, 0.95, record)
        planned = {part.step.name: part for part in list_steps(clients, shape_of(task))}
        for step, size in record:
            assert size <= planned[step].numbers
        for step, part in planned.items():
            sent = [name for name, _ in record if name == step]
            assert 1 <= len(sent) <= part.times
        counted = sum(part.counted for part in planned.values())
        assert counted <= max(nonlinear_budget(clients, task.dim), 6)


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
    assert plan_budget(60, [shape_of(Linear(20))]).variance_steps == 4


def test_a_cohort_gives_the_numbers_of_its_clients():
    task, homes, _ = plant("linear", 6, 40, 0.3, 1)
    shape: Shape = shape_of(task)
    single = run_together([estimate_program(shape, [home], plan_budget) for home in homes])
    (together,) = run_together([estimate_program(shape, homes, plan_budget)])
    np.testing.assert_allclose(together[0].w, single[0][0].w, atol=1e-7)
    for k in range(6):
        np.testing.assert_allclose(together[1][k].personal.v, single[k][1][0].personal.v, atol=1e-3)
