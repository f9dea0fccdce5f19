"""Phase retrieval: its prox is the minimizer, its constants, and that it is offered as a task."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from mooring.core.cohort import Batch
from mooring.core.errors import RequestError
from mooring.core.task import HasProx
from mooring.estimates.client_statistics import collect_statistics
from mooring.tasks import catalog
from mooring_papers.phase_retrieval import PhaseRetrieval
from tests.support.problems import linear_clients

SIZES = (6, 17, 40)


def make_batch():
    """Three clients of different sizes in one padded batch, some of their squared measurements far off."""
    rng = np.random.default_rng(0)
    xs = [rng.normal(size=(n, 3)) for n in SIZES]
    scores = [x @ rng.normal(size=3) for x in xs]
    x, y, weight = np.full((3, max(SIZES), 3), 7.0), np.ones((3, max(SIZES))), np.zeros((3, max(SIZES)))
    for i, n in enumerate(SIZES):
        x[i, :n], y[i, :n], weight[i, :n] = xs[i], (scores[i] + rng.standard_t(2, n)) ** 2, 1 / n
    return Batch(torch.from_numpy(x), torch.from_numpy(y), torch.from_numpy(weight))


def draw_models(task, seed=1, scale=1.0):
    rng = torch.Generator().manual_seed(seed)
    return scale * torch.randn(3, task.dim, dtype=torch.float64, generator=rng)


@pytest.mark.parametrize("excess", [1.05, 3.0])
def test_prox_of_phase_retrieval_is_the_minimiser(excess):
    task = PhaseRetrieval(3, ridge=0.05, exact=True)
    rows, center = make_batch(), draw_models(task)
    lam = excess * float(task.weak(rows).max())
    v = task.prox(center, lam, rows)

    def value(u):
        return task.loss(u, rows) + lam / 2 * (u - center).square().sum(1)

    best = value(v)
    # Strongly convex with modulus lam - weak around its minimiser: that much higher everywhere else.
    for seed in range(60):
        step = draw_models(task, seed, scale=10 ** (-seed / 12))
        floor = (lam - task.weak(rows)) / 2 * step.square().sum(1)
        assert bool((value(v + step) >= best + floor - 1e-11).all())
    for i in range(3):

        def one(u, i=i):
            return float(value(torch.from_numpy(u).expand(3, -1))[i])

        found = minimize(one, center[i].numpy(), method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-13})
        assert found.fun >= float(best[i]) - 1e-10
    with pytest.raises(RequestError, match="phase': the prox needs lam above the modulus"):
        task.prox(center, 0.1, rows)
    assert isinstance(task, HasProx) and not isinstance(PhaseRetrieval(3), HasProx)
    assert float(task.start(4).norm()) == pytest.approx(1)


@pytest.mark.parametrize("task", [PhaseRetrieval(3), PhaseRetrieval(3, exact=True, ridge=20.0)])
def test_its_statistics(task):
    statistics = collect_statistics(task, linear_clients().cohort(), task.start(), ("fit",))
    assert bool(statistics.smooth.isnan().all()) and bool((statistics.noise > 0).all()) and statistics.fit is None
    assert bool((statistics.convex > 0).all() if task.exact else (statistics.convex < 0).all())


def test_it_is_a_task_by_name():
    described = catalog.describe("phase")
    assert described["summary"] and described["targets"] and "ridge" in described["fields"]
    assert not described["exact"] and not described["smooth"]
    assert isinstance(catalog.build("phase", "regression", 3, 0, {"ridge": 1}), PhaseRetrieval)
