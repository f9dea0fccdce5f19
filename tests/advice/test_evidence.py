"""Intervals cover, calls are right nineteen times in twenty, verdicts follow."""

import numpy as np
import pytest
import torch

from mooring.advice.evidence import Difference, calls, compare, verdicts
from mooring.advice.folds import row_losses
from mooring.core.seeds import client_key
from mooring.tasks.linear import Linear
from tests.problems import linear_clients

KEYS = np.array([client_key(str(i)) for i in range(500)], dtype=np.uint64)


def losses(gain, sizes, rng, sd=1.0):
    """Row losses of two models whose difference has the given mean at each client."""
    second = rng.gamma(2.0, size=int(np.sum(sizes)))
    first = second + np.repeat(gain, sizes) + sd * rng.normal(size=int(np.sum(sizes)))
    return torch.from_numpy(first), torch.from_numpy(second), torch.as_tensor(sizes)


def test_row_losses_are_those_of_each_clients_own_model():
    clients, task = linear_clients(), Linear(3)
    models = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = row_losses(task, models, clients.test, unit=4.0)
    expected = []
    for i in range(5):
        x, y = clients.test.of(i)
        expected.append(4 * (x @ models[i, :3] + models[i, 3] - y) ** 2)
    torch.testing.assert_close(found, torch.cat(expected))


@pytest.mark.parametrize("rows", [5, 40])
def test_intervals_cover_the_true_gain(rows):
    rng = np.random.default_rng(rows)
    gain = rng.normal(size=300)
    first, second, size = losses(gain, np.full(300, rows), rng)
    found = compare(first, second, size, KEYS[:300])
    assert 0.88 <= np.mean((found.low <= gain) & (gain <= found.high)) <= 0.99


def test_calls_are_wrong_in_at_most_five_percent():
    rng = np.random.default_rng(0)
    shares = []
    for _ in range(60):
        spread = rng.choice([0.0, 0.1, 0.5])
        gain = rng.choice([-0.1, 0.0, 0.1]) + spread * rng.normal(size=80)
        first, second, size = losses(gain, rng.integers(4, 60, size=80), rng)
        found = compare(first, second, size, KEYS[:80])
        shares.append(np.mean(gain[found.better] <= 0) if found.better.any() else 0.0)
    assert np.mean(shares) <= 0.05


def test_nobody_is_called_where_nobody_gains():
    rng = np.random.default_rng(1)
    called = 0
    for _ in range(40):
        first, second, size = losses(np.zeros(50), np.full(50, 20), rng)
        found = compare(first, second, size, KEYS[:50])
        called += bool(found.better.any() or found.worse.any())
    assert called <= 8  # a whole federation may look helped by chance, at the level of its mean


def test_many_small_clients_borrow_from_each_other():
    """A gain that no client of eight rows could show alone is called when four hundred agree."""
    rng = np.random.default_rng(2)
    first, second, size = losses(np.full(400, 0.3), np.full(400, 8), rng)
    found = compare(first, second, size, KEYS[:400])
    assert found.better.mean() > 0.95
    few = compare(*losses(np.full(2, 0.3), np.full(2, 8), rng), KEYS[:2])
    assert not few.better.any()


def test_clients_without_test_rows_are_never_called():
    rng = np.random.default_rng(3)
    first, second, size = losses(np.ones(30), [0, *[50] * 29], rng)
    found = compare(first, second, size, KEYS[:30])
    assert np.isnan(found.mean[0]) and not found.better[0] and found.better[1:].all()


def test_calls_without_noise_or_clients():
    better, worse = calls(np.full(3, np.nan), np.zeros(3))
    assert not better.any() and not worse.any()


def difference(sign):
    yes, no = np.array([sign > 0]), np.array([sign < 0])
    return Difference(np.array([float(sign)]), np.zeros(1), np.zeros(1), yes, no)


@pytest.mark.parametrize(
    "alone_personal,common_personal,alone_common,verdict",
    [
        (1, 1, 0, "personal"),
        (1, 0, 1, "common"),
        (0, 0, 1, "common"),
        (0, 1, -1, "alone"),
        (0, 0, -1, "alone"),
        (0, 0, 0, "undecided"),
        (1, 0, 0, "undecided"),
    ],
)
def test_verdicts(alone_personal, common_personal, alone_common, verdict):
    assert verdicts(difference(alone_personal), difference(common_personal), difference(alone_common)) == [verdict]


def test_nobody_is_personal_where_all_may_be_alike():
    assert verdicts(difference(1), difference(1), difference(1), alike=True) == ["common"]
    assert verdicts(difference(1), difference(1), difference(0), alike=True) == ["undecided"]


def test_who_seems_to_gain_is_not_told_to_train_alone():
    for gain, verdict in ((0.2, "undecided"), (0.05, "alone")):  # alone is better than common by 1
        seeming = difference(0)._replace(mean=np.array([gain]))
        assert verdicts(seeming, difference(1), difference(-1)) == [verdict]
