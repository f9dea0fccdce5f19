"""Sums of held-out rows against a loop over rows; folds add up."""

import numpy as np
import torch

from mooring.advice.heldout import moments
from mooring.advice.tally import MODELS, PAIRS, Trio, mean_losses, tally_of, total, witnesses_of
from mooring.core.cohort import Rows
from mooring.tasks.linear import Linear
from tests.problems import linear_clients


def trio(m=5, d=4, seed=0):
    draw = torch.Generator().manual_seed(seed)
    alone, personal = (torch.randn(m, d, dtype=torch.float64, generator=draw) for _ in range(2))
    common = torch.randn(d, dtype=torch.float64, generator=draw)
    return Trio(alone, common, personal, common[None])


def loop(rows, models):
    """Every client's losses on its rows, by model."""
    out = []
    for i in range(len(rows)):
        x, y = rows.of(i)
        own = {"alone": models.alone[i], "common": models.common, "personal": models.personal[i]}
        out.append({name: ((x @ w[:3] + w[3] - y) ** 2).numpy() for name, w in own.items()})
    return out


def test_means_and_moments_are_those_of_the_rows():
    clients, models = linear_clients(), trio()
    tally, expected = tally_of(Linear(3), clients.train, models), loop(clients.train, models)
    losses, seen = mean_losses(tally), witnesses_of(tally)
    for i, mine in enumerate(expected):
        for name in MODELS:
            np.testing.assert_allclose(losses[name][i], mine[name].mean())
        for name, (o, p) in PAIRS.items():
            gap = mine[o] - mine[p]
            np.testing.assert_allclose(seen[name].observed[i], gap.mean())
            found = moments(tally.rows, tally.gaps[list(PAIRS).index(name)])
            np.testing.assert_allclose(found.variance[i], gap.var())
            np.testing.assert_allclose(found.fourth[i], ((gap - gap.mean()) ** 4).mean())
            assert int(seen[name].rows[i]) == len(gap)


def test_folds_add_up_and_no_rows_say_nothing():
    clients, models, task = linear_clients(), trio(), Linear(3)
    none = torch.zeros(5, dtype=torch.long)
    empty = Rows(clients.test.x[:0], clients.test.y[:0], none, none)
    parts = [tally_of(task, rows, models) for rows in (clients.train, clients.test, empty)]
    both = total(parts)
    torch.testing.assert_close(both.losses, parts[0].losses + parts[1].losses)
    assert torch.equal(both.rows, clients.train.size + clients.test.size)
    assert all(part.isnan().all() for part in mean_losses(parts[2]).values())
