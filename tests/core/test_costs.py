"""Costs: what is counted, how counts add up, and which of several promises was the worst."""

from math import inf, isnan, nan

import torch

from mooring.core.costs import CostMeter, MeteredTask, SolveTolerances, compare_with_tolerance
from mooring.tasks.linear import Linear
from tests.support.problems import linear_clients


def test_solves_remember_the_worst_by_reached_over_promised():
    near, far = SolveTolerances(3, 1, 0.1, 0.2), SolveTolerances(2, 1, 10.0, 15.0)
    both = near + far
    assert both == far + near == SolveTolerances(5, 2, 0.1, 0.2)  # a factor of 2 is worse than one of 1.5
    assert near + SolveTolerances() == near == SolveTolerances() + near
    assert SolveTolerances().excess() == -inf and near.excess() == 2.0
    assert SolveTolerances(1, 1, 0.1, nan).excess() == inf
    lost = near + SolveTolerances(1, 1, 0.1, nan)
    assert lost.broken == 2 and isnan(lost.gradient_reached)


def test_reached_counts_what_is_above_its_promise():
    assert compare_with_tolerance(torch.tensor([0.1, 0.2, 0.3]), 0.2) == SolveTolerances(
        3, 1, 0.2, compare_with_tolerance(torch.tensor([0.3]), 1).gradient_reached
    )
    assert compare_with_tolerance(torch.tensor([0.1, nan]), 0.2)[:2] == (2, 1)
    assert compare_with_tolerance(torch.tensor([0.1, nan]), 0.2).gradient_reached == inf
    assert compare_with_tolerance(torch.zeros(0), 0.2).promised == 0


def test_a_metered_task_counts_rows_of_gradients_solves_and_draws():
    clients, meter = linear_clients(sizes=[4, 6, 5, 7, 8]), CostMeter()
    task = Linear(3)
    counted = MeteredTask(task, meter)
    rows = clients.train.padded()
    total = int(clients.train.size.sum())
    w = torch.zeros(5, 4, dtype=torch.float64)
    assert torch.equal(counted.grad(w, rows), task.grad(w, rows))
    assert meter.gradients == total and meter.samples == 0
    counted.record_draw(rows)
    assert meter.samples == total
    assert torch.equal(counted.solve(rows), task.solve(rows))
    assert torch.equal(counted.prox(w, 0.3, rows), task.prox(w, 0.3, rows))
    assert meter.gradients == 3 * total
    counted.record_solve(torch.tensor([0.3]), 0.1)
    assert meter.solves.broken == 1
    assert (
        counted.dim == 4
        and counted == task
        and hash(counted) == hash(task)
        and MeteredTask(task, CostMeter()) == counted
    )


def test_meters_add_up_and_name_their_counts():
    one, two = CostMeter(3, 10, SolveTolerances(1, 0, 0.1, 0.05)), CostMeter(4, 20, SolveTolerances(2, 1, 0.1, 0.3))
    one.add(two)
    assert one == CostMeter(7, 30, SolveTolerances(3, 1, 0.1, 0.3))
    assert one.counts() == {
        "samples": 7, "gradients": 30, "promised": 3, "broken": 1, "gradient_promised": 0.1, "gradient_reached": 0.3,
    }  # fmt: skip
