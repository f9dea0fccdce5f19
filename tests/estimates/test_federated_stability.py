"""Replace a record, refit, compare: against a closed form and against the theorem's bound."""

import numpy as np
import pytest
import torch

from mooring.core.cohort import Rows
from mooring.estimates.federated_stability import federated_stability
from mooring.tasks.linear import Linear
from mooring.tasks.logistic import Logistic
from mooring.theory.stability import fedavg_condition, fedavg_stability


def rows_of(xs, ys):
    return Rows.stack([torch.as_tensor(x) for x in xs], [torch.as_tensor(y) for y in ys])


def test_the_mean_moves_by_a_share_of_the_replacement():
    """Local means of y: a replaced record moves client i's by (y' - y_j)/n_i, and ell = (w - y)^2/2 accordingly."""
    ys = [np.array([0.0, 1.0, 2.0]), np.array([10.0, 10.0])]
    rows = rows_of([np.ones((3, 1)), np.ones((2, 1))], ys)
    task = Linear(1, intercept=False)
    found = federated_stability(task, rows, lambda r: task.solve(r.full(task)), tries=60)
    values = np.concatenate(ys)

    def largest(mean, moved):
        return max(np.abs((mean - values) ** 2 - (m - values) ** 2).max() / 2 for m in moved)

    first = largest(1.0, [1.0 + (10 - y) / 3 for y in ys[0]])
    second = largest(10.0, [10.0 + (y - 10) / 2 for y in ys[0]])
    np.testing.assert_allclose(found, [first, second])


def test_the_theorems_bound_is_not_below_what_is_measured():
    rng = np.random.default_rng(0)
    ridge, d, sizes = 0.5, 2, [30, 60]
    xs = [rng.choice([-1.0, 1.0], size=(n, d)) for n in sizes]
    ys = [(rng.random(n) < 0.6).astype(float) for n in sizes]
    rows, task = rows_of(xs, ys), Logistic(d, intercept=False, ridge=ridge)
    p = np.array(sizes) / sum(sizes)

    def common(given):
        w = task.solve(given.pooled(torch.from_numpy(p)))[0]
        return w.expand(len(given), -1)

    measured = federated_stability(task, rows, common, tries=8).numpy()
    smooth = d / 4 + ridge
    ell_max = float(np.log1p(np.exp(d**0.5)) + ridge / 2)  # minimizers lie in the unit ball
    assert fedavg_condition(smooth, ridge, p, np.array(sizes)).all()
    bound = fedavg_stability(smooth, ell_max, ridge, p, np.array(sizes))
    assert (measured > 0).all() and (measured <= bound).all()
    assert measured[0] == pytest.approx(measured[1], rel=1.0)  # p_i/n_i is the same for both: 1/N
