"""Loss sums against a loop over rows; sums of parts add up."""

import pytest
import torch

from mooring.advice.evaluation.loss_sums import (
    MODEL_KINDS,
    LossSums,
    ModelTriple,
    add_sums,
    mean_losses,
    pooled_losses,
    sum_losses,
    zero_sums,
)
from mooring.core.cohort import Batch, Rows
from mooring.tasks.linear import Linear
from mooring.tasks.logistic import Logistic
from tests.support.problems import linear_clients, logistic_clients


def problem(kind):
    task, clients = (Linear(3), linear_clients()) if kind == "linear" else (Logistic(3), logistic_clients())
    rng = torch.Generator().manual_seed(0)
    local, personal = (torch.randn(5, 4, generator=rng, dtype=torch.float64) for _ in range(2))
    return task, clients.train, ModelTriple(local, personal.mean(0), personal, personal[:1])


@pytest.mark.parametrize("kind", ["linear", "logistic"])
def test_sums_are_those_of_a_loop_over_rows(kind):
    task, rows, models = problem(kind)
    found = sum_losses(task, rows, models)
    for i in range(len(rows)):
        local, global_, personal = models.local[i], models.global_, models.personal[i]
        wanted = dict.fromkeys(LossSums._fields, 0.0)
        for x, y in zip(*rows.of(i)):
            row = Batch(x[None, None], y[None, None], torch.ones(1, 1, dtype=x.dtype))

            def risk(w, row=row):
                return float(task.row_risk(w[None], row))

            def apart(w, v, row=row):
                return float(task.row_divergence(w[None], v[None], row))

            loss = torch.tensor([risk(w) for w in (local, global_, personal)]).double()
            difference = loss[:2] - loss[2]
            divergence = torch.tensor([apart(local, personal), apart(global_, personal)]).double()
            d = difference - divergence
            parts = (
                torch.tensor(1.0),
                loss,
                loss[2] ** 2,
                difference,
                divergence,
                divergence**2,
                torch.tensor(apart(global_, local)),
                torch.stack([d[0] ** 2, d[1] ** 2, d[0] * d[1]]),
            )
            wanted = {name: wanted[name] + part.double() for name, part in zip(LossSums._fields, parts)}
        for name, value in wanted.items():
            torch.testing.assert_close(getattr(found, name)[i], value, rtol=1e-5, atol=1e-6)


def test_sums_of_parts_add_up_and_clients_without_rows_have_zeros():
    task, rows, models = problem("linear")
    half = rows.size // 2
    first = Rows(rows.x, rows.y, rows.start, half)
    second = Rows(rows.x, rows.y, rows.start + half, rows.size - half)
    for found, wanted in zip(
        add_sums([sum_losses(task, part, models) for part in (first, second)]), (sum_losses(task, rows, models))
    ):
        torch.testing.assert_close(found, wanted)
    nothing = Rows(rows.x, rows.y, rows.start, torch.zeros_like(rows.size))
    for found, wanted in zip(sum_losses(task, nothing, models), zero_sums(5)):
        assert torch.equal(found, wanted)
    some = Rows(rows.x, rows.y, rows.start, torch.where(torch.arange(5) == 2, 0, rows.size))
    sums = sum_losses(task, some, models)
    assert all(float(part[2].abs().sum()) == 0 for part in sums)
    assert torch.isnan(mean_losses(sums)["local"][2]) and int(mean_losses(sums)["local"].isnan().sum()) == 1


def test_means_by_client_and_over_all_rows():
    task, rows, models = problem("linear")
    sums = sum_losses(task, rows, models)
    means, pooled = mean_losses(sums), pooled_losses(sums)
    for name, w in zip(MODEL_KINDS, models.each()):
        risks = task.risk(w, rows.padded())
        torch.testing.assert_close(means[name], risks)
        assert pooled[name] == pytest.approx(float((risks * rows.size).sum() / rows.size.sum()))
