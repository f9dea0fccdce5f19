"""Gains without a posterior: even and odd parts row by row, and what a posterior says where there is one."""

import math

import numpy as np
import pytest
import torch

import mooring
from mooring.advice.answer import answer
from mooring.advice.bends import (
    Bent,
    bent_gains,
    bent_of,
    everyones_moments,
    lines_of,
    total_bends,
    widths,
    with_bends,
)
from mooring.advice.calibrate import chances
from mooring.advice.crossfit import cross_fit
from mooring.advice.tally import MODELS, PAIRS, Trio, tally_of, witnesses_of
from mooring.core.cohort import Rows
from mooring.data.clients import from_arrays
from mooring.tasks.absolute import Absolute
from mooring.tasks.hinge import Hinge
from mooring.tasks.linear import Linear
from mooring.tasks.logistic import Logistic
from tests.advice.test_tally import trio
from tests.problems import linear_clients


def loss_of(task, x, y, w):
    z = x @ w[:-1] + w[-1]
    if isinstance(task, Linear):
        return (y - z) ** 2
    return abs(y - z)


@pytest.mark.parametrize("task", [Linear(3), Absolute(3)])
def test_parts_are_those_of_a_loop_over_rows(task):
    rows, models = linear_clients().train, trio()
    moments = everyones_moments(task, rows)
    found = bent_of(task, rows, rows.size + 7, models, moments)
    inputs = torch.cat([rows.x, torch.ones_like(rows.x[:, :1])], 1).double()
    for i in range(len(rows)):
        x, y = (part.numpy() for part in rows.of(i))
        p = models.personal[i].numpy()
        for k, other in enumerate((models.alone[i].numpy(), models.common.numpy())):
            here, there, middle = (loss_of(task, x, y, w) for w in (other, 2 * p - other, p))
            np.testing.assert_allclose(found.even[i, k], ((here + there) / 2 - middle).sum(), rtol=1e-9, atol=1e-12)
            np.testing.assert_allclose(found.odd[i, k], ((here - there) / 2).sum(), rtol=1e-9, atol=1e-12)
            np.testing.assert_allclose(found.square[i, k], (((here - there) / 2) ** 2).sum(), rtol=1e-9)
            wide = ((inputs.numpy() @ (other - p)) ** 2).mean()
            np.testing.assert_allclose(found.wide[i, k], len(y) * wide, rtol=1e-9)
        assert float(found.trained[i]) == len(y) * (len(y) + 7)


def test_of_squared_losses_the_bend_is_the_width_at_the_rows_themselves():
    """q = (o - p)'S(o - p) whatever y: the loss is a parabola."""
    rows, models, task = linear_clients().train, trio(), Linear(3)
    for i in range(len(rows)):
        mine = rows.select(torch.tensor([i]))
        own = models._replace(alone=models.alone[[i]], personal=models.personal[[i]])
        found = bent_of(task, mine, mine.size, own, everyones_moments(task, mine))
        torch.testing.assert_close(found.even, found.wide)


def test_folds_add_up_and_clients_without_rows_bend_as_all_do():
    clients, models, task = linear_clients(), trio(), Absolute(3)
    moments = everyones_moments(task, clients.train)
    none = torch.zeros(5, dtype=torch.long)
    empty = Rows(clients.test.x[:0], clients.test.y[:0], none, none)
    parts = [bent_of(task, rows, rows.size, models, moments) for rows in (clients.train, clients.test, empty)]
    both = total_bends(parts)
    torch.testing.assert_close(both.even, parts[0].even + parts[1].even)
    only = torch.tensor([0, 1, 2])
    some = Bent(*(torch.zeros_like(part).index_copy(0, only, part[only]) for part in both))
    gain = bent_gains(Bent(*(part[only] for part in both)), only, models, moments, clients.train.size)
    for k, (name, line) in enumerate(lines_of(some).items()):
        typical = some.even[:, k].sum() / some.wide[:, k].sum()
        torch.testing.assert_close(line.bend[3:], typical.expand(2))
        assert bool((line.noise > 0).all())
        torch.testing.assert_close(gain[name].mean[0, 3:], (typical * widths(models, moments)[:, k])[3:])


def test_with_squared_losses_predictions_are_a_flat_posteriors():
    """o is anything, p the client's own fit: the posterior of its truth is N(p, s^2 (n S)^-1), and its gain has the
    mean (o - p)'S(o - p) and the variance 4 s^2 (o - p)'S(o - p) / n."""
    draw = torch.Generator().manual_seed(0)
    n, s, task = 4_000, 0.7, Linear(3)
    x = torch.randn(2, n, 3, dtype=torch.float64, generator=draw)
    truth = torch.randn(2, 4, dtype=torch.float64, generator=draw)
    y = torch.einsum("cnq,cq->cn", x, truth[:, :3]) + truth[:, 3:]
    y = y + s * torch.randn(2, n, dtype=torch.float64, generator=draw)
    rows = Rows.stack(list(x), list(y))
    own = torch.stack([torch.linalg.lstsq(torch.cat([a, torch.ones(n, 1)], 1), b).solution for a, b in zip(x, y)])
    other = own + 0.3 * torch.randn(2, 4, dtype=torch.float64, generator=draw)
    models = Trio(other, other.mean(0), own, own)
    moments = everyones_moments(task, rows)
    found = bent_of(task, rows, rows.size, models, moments)
    seen = with_bends(witnesses_of(tally_of(task, rows, models)), found)["personal over alone"]
    wide = widths(models, moments)[:, 0]
    few = 5 / math.sqrt(n)  # five errors of moments of n rows, relative
    torch.testing.assert_close(seen.predicted, wide, rtol=few, atol=0.0)
    torch.testing.assert_close(seen.sd**2, 4 * s**2 * wide / n, rtol=3 * few, atol=0.0)
    torch.testing.assert_close(seen.error, seen.sd)
    gain = bent_gains(found, torch.arange(2), models, moments, 4 * rows.size)["personal over alone"]
    torch.testing.assert_close(gain.variance[0], seen.sd**2 / 4, rtol=few, atol=0.0)


def test_equal_models_gain_nothing_with_a_chance_of_one_half():
    clients, task = linear_clients(), Absolute(3)
    same = trio().common.expand(5, -1)
    models = Trio(same, same[0], same, same[:1])
    moments = everyones_moments(task, clients.train)
    found = bent_of(task, clients.train, clients.train.size, models, moments)
    for gain in bent_gains(found, torch.arange(5), models, moments, clients.train.size).values():
        torch.testing.assert_close(chances(gain), torch.full((5,), 0.5, dtype=torch.float64))


def test_several_scores_are_as_wide_as_all_of_them_together():
    task, draw = Logistic(3, 4), torch.Generator().manual_seed(0)
    rows = Rows.stack(
        [torch.randn(9, 3, dtype=torch.float64, generator=draw) for _ in range(2)], [torch.arange(9) % 4] * 2
    )
    alone, personal = (torch.randn(2, 16, dtype=torch.float64, generator=draw) for _ in range(2))
    models = Trio(alone, alone[0], personal, personal)
    gap = (alone - personal)[0]
    scores = rows.x @ gap[:12].view(3, 4) + gap[12:]
    torch.testing.assert_close(widths(models, everyones_moments(task, rows))[0, 0], scores.square().sum(1).mean())


@pytest.mark.parametrize(("task", "kind"), [(Absolute(2), "regression"), (Hinge(2), "binary")])
def test_gains_of_kinked_losses_turn_out_as_they_were_predicted(task, kind):
    """Against fresh rows: the clients' gains are off by no more than twice their errors in root mean square (if normal,
    by 1, and by 1.6 once in a thousand federations of 15), and their mean is within the federation's interval (widened
    to one in a thousand)."""
    rng = np.random.default_rng(1)
    m, n, fresh = 15, 30, 3_000
    truth = rng.normal(size=3) + 0.5 * rng.normal(size=(m, 3))
    x = rng.normal(size=(m, n + fresh, 2))
    z = np.einsum("cnq,cq->cn", x, truth[:, :2]) + truth[:, 2:]
    y = z + rng.normal(size=z.shape) if kind == "regression" else (z + rng.logistic(size=z.shape) > 0).astype(int)
    clients = from_arrays(list(x[:, :n]), list(y[:, :n]), kind=kind)
    _, evidence = cross_fit(task, clients.train, clients.keys)
    found = answer(evidence, clients.train.size, level=0.999)
    later = Rows.stack(*([torch.from_numpy(part[i, n:]) for i in range(m)] for part in (x, y)))
    risk = dict(zip(MODELS, tally_of(task, later, evidence.trio).losses / fresh))
    for name, (o, p) in PAIRS.items():
        gain, true = found.gains[name], risk[o] - risk[p]
        off = (true - gain.expected) / gain.spread
        assert float(off.square().mean().sqrt()) < 2, (name, off)
        _, low, high = found.lines[name]
        assert low <= float(true.mean()) <= high, name


def test_wide_tables_and_kinked_losses_are_advised():
    """More columns than a posterior is made for; test rows of the table's own are one more witness."""
    rng = np.random.default_rng(0)
    data = {f"c{i}": (rng.normal(size=(40, 70)), rng.normal(size=40)) for i in range(4)}
    found = mooring.advise(data, theory=False)
    assert found.clients["deploy"].isin(["personal", "common", "alone"]).all()
    assert found.clients["chance_over_alone"].between(0, 1).all()
    assert np.isfinite(found.clients["gain_over_common"]).all()
