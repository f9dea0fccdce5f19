"""What the figures measure against, by naive loops and by what must hold at a minimiser."""

import numpy as np
import pytest
import torch

from mooring_papers import exact_minimum
from tests.support.problems import PROBLEMS

RNG = np.random.default_rng(0)
M, D = 4, 3


def tensor(x):
    return torch.as_tensor(x, dtype=torch.float64)


def test_average_and_individual_excess():
    excess, p = tensor([0.1, 0.4, 0.2]), tensor([0.5, 0.2, 0.3])
    average = exact_minimum.average_excess(excess, p)
    assert average == pytest.approx(0.5 * 0.1 + 0.2 * 0.4 + 0.3 * 0.2)
    assert bool((excess <= average / p).all())


def test_squared_errors_by_hand():
    truths, v, w = tensor(RNG.normal(size=(M, D))), tensor(RNG.normal(size=(M, D))), tensor(RNG.normal(size=D))
    p = tensor([0.1, 0.2, 0.3, 0.4])
    found = exact_minimum.squared_errors(w, v, truths, p)
    average = sum(q * t for q, t in zip(p.tolist(), truths.numpy()))
    assert found.common == pytest.approx(np.sum((w.numpy() - average) ** 2))
    for i in range(M):
        assert float(found.personal[i]) == pytest.approx(np.sum((v[i] - truths[i]).numpy() ** 2))


@pytest.mark.parametrize("problem", ["linear", "logistic", "absolute"])
def test_nothing_near_the_minimiser_has_a_smaller_objective(problem):
    task, clients = PROBLEMS[problem]()
    p, rows = clients.weights(), clients.train
    lam = torch.linspace(0.2, 1, 5, dtype=torch.float64)
    best = exact_minimum.minimize_objective(task, lam, p, rows)
    least = exact_minimum.objective(task, best.w, best.v, lam, p, rows)
    naive = sum(
        float(p[i])
        * (float(task.loss(best.v, rows.padded())[i]) + float(lam[i]) / 2 * float((best.v[i] - best.w).norm()) ** 2)
        for i in range(5)
    )
    assert least == pytest.approx(naive)
    for scale in (1e-2,) if problem == "absolute" else (1e-3, 1.0):
        w, v = best.w + scale * tensor(RNG.normal(size=4)), best.v + scale * tensor(RNG.normal(size=(5, 4)))
        assert exact_minimum.objective(task, w, v, lam, p, rows) > least
