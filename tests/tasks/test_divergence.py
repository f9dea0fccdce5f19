"""Divergences of models against the average rise of the loss over targets that the reference model implies."""

import numpy as np
import pytest
import torch
from scipy.stats import norm, poisson
from torch import nn

from mooring.core.cohort import Batch
from mooring.tasks.catalog import build, find, names
from mooring.tasks.kernel_regression import KernelRegression
from mooring.tasks.linear import Linear
from mooring.tasks.linear_losses import Absolute, Hinge, Poisson, Quantile, SquaredHinge
from mooring.tasks.logistic import Logistic
from mooring.tasks.network import NetworkTask

CLIENTS, ROWS, FEATURES = 3, 7, 2


def inputs(seed=0):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(CLIENTS, ROWS, FEATURES)))


def two_models(task, size=0.5):
    rng = np.random.default_rng(1)
    return (torch.from_numpy(size * rng.normal(size=(CLIENTS, task.dim))).to(task.dtype) for _ in range(2))


def batch_with(x, y):
    return Batch(x, y, torch.full((CLIENTS, ROWS), 1 / ROWS, dtype=x.dtype))


def average_rise(task, w, reference, x, targets, probabilities):
    """The mean over targets, each [C, B] with its probability [C, B], of the difference of `row_risk`."""
    total = torch.zeros(CLIENTS, ROWS, dtype=torch.float64)
    for y, probability in zip(targets, probabilities):
        batch = batch_with(x, y)
        total += probability * (task.row_risk(w, batch) - task.row_risk(reference, batch))
    return total


def normal_targets(center, sd=1.3):
    """Gauss's and Hermite's rule around the reference's predictions: exact for squares."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(9)
    return [center + sd * node for node in nodes], weights / weights.sum()


@pytest.mark.parametrize("task", [Linear(FEATURES), KernelRegression(FEATURES, width=6)])
def test_squared_losses_rise_by_the_squared_distance_of_predictions(task):
    x, (w, reference) = inputs(), two_models(task)
    rise = average_rise(task, w, reference, x, *normal_targets(task.predict(reference, x)))
    found = task.row_divergence(w, reference, batch_with(x, torch.zeros(CLIENTS, ROWS).double()))
    torch.testing.assert_close(found, rise)
    assert float(found.min()) > 0


@pytest.mark.parametrize("classes", [2, 3])
def test_log_losses_rise_by_the_divergence_of_probabilities(classes):
    task = Logistic(FEATURES, classes=classes)
    x, (w, reference) = inputs(), two_models(task)
    likely = task.predict(reference, x)
    labels = [torch.full((CLIENTS, ROWS), k) for k in range(classes)]
    rise = average_rise(task, w, reference, x, labels, likely.unbind(-1))
    torch.testing.assert_close(task.row_divergence(w, reference, batch_with(x, labels[0])), rise)


def test_deviances_rise_by_the_divergence_of_means():
    task = Poisson(FEATURES)
    x, (w, reference) = inputs(), two_models(task)
    mean = task.predict(reference, x).numpy()
    counts = [torch.full((CLIENTS, ROWS), float(k)).double() for k in range(80)]
    probabilities = [torch.from_numpy(poisson.pmf(k, mean)) for k in range(80)]
    rise = average_rise(task, w, reference, x, counts, probabilities)
    torch.testing.assert_close(task.row_divergence(w, reference, batch_with(x, counts[0])), rise)


def test_absolute_errors_rise_as_they_do_with_targets_that_are_symmetric_around_the_reference():
    task, grid = Absolute(FEATURES), norm.ppf((np.arange(400) + 0.5) / 400)
    x, (w, reference) = inputs(), two_models(task)
    targets = [task.predict(reference, x) + e for e in grid]
    rise = average_rise(task, w, reference, x, targets, np.full(400, 1 / 400))
    found = torch.stack([task.row_divergence(w, reference, batch_with(x, y)) for y in targets]).mean(0)
    torch.testing.assert_close(found, rise, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("tau", [0.3, 0.8])
def test_pinball_losses_rise_so_with_targets_whose_quantile_is_the_reference(tau):
    """To the second order in the distance: a twentieth of the targets' standard deviation."""
    task, grid = Quantile(FEATURES, tau=tau), norm.ppf((np.arange(20_000) + 0.5) / 20_000) - norm.ppf(tau)
    z = torch.tensor(0.05).double()
    e = torch.from_numpy(grid)
    rise = (task.row_loss(z, e) - task.row_loss(0 * z, e)).mean()
    one = torch.ones(1, 1, 1).double()
    w, reference = torch.tensor([[0.05, 0.0]]).double(), torch.zeros(1, 2).double()
    batch = Batch(one.expand(1, len(e), 1), e[None], torch.full((1, len(e)), 1 / len(e)).double())
    found = Quantile(1, tau=tau).row_divergence(w, reference, batch).mean()
    assert float(found) == pytest.approx(float(rise), rel=0.05)
    assert float(found) == pytest.approx(0.5 * norm.pdf(norm.ppf(tau)) * 0.05**2, rel=0.05)


def test_squared_hinges_rise_by_the_squared_distance_inside_the_margin():
    """There P(y = 1) = (1 + z)/2 makes the reference the minimizer of the expected loss."""
    task = SquaredHinge(FEATURES)
    x, (w, reference) = 0.2 * inputs(), two_models(task, 0.3)
    z, true = task.scores(w, x), task.scores(reference, x)
    assert float(torch.stack([z, 2 * true - z, true]).abs().max()) < 1
    labels = [torch.full((CLIENTS, ROWS), float(k)).double() for k in (0, 1)]
    rise = average_rise(task, w, reference, x, labels, [(1 - true) / 2, (1 + true) / 2])
    for y in labels:
        torch.testing.assert_close(task.row_divergence(w, reference, batch_with(x, y)), rise)
    hinge = Hinge(FEATURES).row_divergence(w, reference, batch_with(x, labels[1]))
    assert float(hinge.abs().max()) < 1e-12  # linear inside the margin: targets decide, not the distance


def test_networks_diverge_in_what_they_predict():
    x = inputs().float()
    numbers = NetworkTask(lambda: nn.Linear(FEATURES, 1), loss="half_square")
    w, reference = two_models(numbers)
    rise = average_rise(numbers, w, reference, x, *normal_targets(numbers.predict(reference, x)))
    found = numbers.row_divergence(w, reference, batch_with(x, torch.zeros(CLIENTS, ROWS)))
    torch.testing.assert_close(found.double(), rise, rtol=1e-4, atol=1e-5)
    classes = NetworkTask(lambda: nn.Linear(FEATURES, 3), loss="cross_entropy")
    w, reference = two_models(classes)
    labels = [torch.full((CLIENTS, ROWS), k) for k in range(3)]
    rise = average_rise(classes, w, reference, x, labels, classes.predict(reference, x).unbind(-1))
    found = classes.row_divergence(w, reference, batch_with(x, labels[0]))
    torch.testing.assert_close(found.double(), rise, rtol=1e-4, atol=1e-5)


def test_several_yes_or_no_diverge_by_their_mean():
    task = NetworkTask(lambda: nn.Linear(FEATURES, 2), loss="binary_cross_entropy")
    x, (w, reference) = inputs().float(), two_models(task)
    p = task.predict(reference, x)
    total = torch.zeros(CLIENTS, ROWS).double()
    for first in (0.0, 1.0):
        for second in (0.0, 1.0):
            y = torch.tensor([first, second]).expand(CLIENTS, ROWS, 2)
            chance = torch.where(y == 1, p, 1 - p).prod(-1)
            batch = batch_with(x, y)
            total += chance * (task.row_risk(w, batch) - task.row_risk(reference, batch))
    found = task.row_divergence(w, reference, batch_with(x, torch.zeros(CLIENTS, ROWS, 2)))
    torch.testing.assert_close(found.double(), total, rtol=1e-4, atol=1e-5)


def test_a_loss_of_ones_own_has_the_absolute_difference():
    task = NetworkTask(lambda: nn.Linear(FEATURES, 1), loss=lambda z, y: (z.reshape(y.shape) - y).abs() ** 1.5)
    x, (w, reference) = inputs().float(), two_models(task)
    batch = batch_with(x, torch.ones(CLIENTS, ROWS))
    difference = task.row_risk(w, batch) - task.row_risk(reference, batch)
    assert float(difference.min()) < 0 < float(difference.max())
    torch.testing.assert_close(task.row_divergence(w, reference, batch), difference.abs())


@pytest.mark.parametrize("name", [name for name in names() if name != "module"])
def test_of_every_task_it_is_at_least_0_and_0_from_itself(name):
    kind = next(kind for kind in ("regression", "binary", "classes", "count") if kind in find(name).kinds)
    task = build(name, kind, FEATURES, 2)
    x, (w, reference) = inputs(), two_models(task)
    rng = np.random.default_rng(2)
    y = torch.from_numpy(rng.integers(0, 2, (CLIENTS, ROWS)))
    batch = batch_with(x, y if name == "logistic" else y.double())
    found = task.row_divergence(w, reference, batch)
    assert found.shape == (CLIENTS, ROWS) and float(found.min()) >= 0
    assert float(found.max()) > 0 or name == "hinge"
    assert float(task.row_divergence(w, w, batch).abs().max()) < 1e-12
