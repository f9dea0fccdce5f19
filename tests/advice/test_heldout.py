"""Errors of held-out means: own or everybody's variance, long tails, and gains at full size."""

import numpy as np
import pytest
import torch

from mooring.advice.calibrate import Witness, chances
from mooring.advice.heldout import at_full_size, held_out_gain, steadied_error, tempering


def sums_of(clients):
    """[4, m] of each client's numbers."""
    powers = [[float((np.asarray(rows) ** k).sum()) for rows in clients] for k in range(1, 5)]
    return torch.tensor([len(rows) for rows in clients]), torch.tensor(powers, dtype=torch.float64)


def rare(rng, rate, n):
    """Mostly a little better, seldom much worse or much better, as sure networks are: kurtosis of about 1 / rate."""
    event = rng.random(n) < rate
    return np.where(event, rng.choice((-4.0, 4.0), n), 0.02)


def test_equal_variances_are_everybodys_and_unequal_ones_each_clients_own():
    rng = np.random.default_rng(0)
    alike = [rng.standard_normal(20) for _ in range(200)]
    # Sample variances of 20 rows vary by a third; all of it is chance here.
    error = steadied_error(*sums_of(alike)).numpy()
    assert error.std() / error.mean() < 0.05
    assert error.mean() == pytest.approx(20**-0.5, rel=0.05)
    apart = [scale * rng.standard_normal(500) for scale in (0.1, 1.0, 3.0)]
    own = [rows.std(ddof=1) / 500**0.5 for rows in apart]
    np.testing.assert_allclose(steadied_error(*sums_of(apart))[1:], own[1:], rtol=0.02)


def test_clients_that_have_not_seen_a_rare_row_do_not_take_their_variance_for_small():
    rng = np.random.default_rng(1)
    clients = [rare(rng, 0.02, 30) for _ in range(100)]
    error = steadied_error(*sums_of(clients)).numpy()
    blind = np.array([rows.std() < 1e-9 for rows in clients])
    assert blind.mean() > 0.3  # (1 - .02)^30 is .55
    assert error[blind].min() > 0.5 * (0.02 * 16 / 30) ** 0.5
    own = np.array([rows.std(ddof=1) for rows in clients]) / 30**0.5
    assert own[blind].max() < 1e-9


def test_tempering_is_one_for_normal_rows_and_follows_the_kurtosis():
    rng = np.random.default_rng(2)
    rows, sums = sums_of([rng.standard_normal(50) for _ in range(200)])
    assert tempering(rows, sums, steadied_error(rows, sums)) > 0.99
    rows, sums = sums_of([rare(rng, 0.02, 50) for _ in range(400)])
    # Kurtosis 1 / .02 of rows, so 3 + 47 / 50 of means: 2 / (3.94 - 1); around a client's own mean a few per cent less.
    assert tempering(rows, sums, steadied_error(rows, sums)) == pytest.approx(0.68, abs=0.1)
    nothing = torch.zeros(3, dtype=torch.long), torch.zeros(4, 3)
    assert tempering(*nothing, steadied_error(*nothing)) == 1.0


def test_chances_are_not_too_sure_where_rows_have_long_tails():
    """Half of the clients gain truly, by fewer rare rows of large loss; all seem to gain a little on common rows."""
    rng = np.random.default_rng(3)
    said, true = [], []
    for _ in range(60):
        rate = 0.02 + rng.choice((-0.01, 0.01), 20)
        clients = [np.where(rng.random(36) < r, -4.0, 0.08 + 0.02 * rng.random(36)) for r in rate]
        rows, sums = sums_of(clients)
        error = steadied_error(rows, sums)
        nothing = torch.full((20,), torch.nan)
        seen = Witness(sums[0] / rows, error, nothing, nothing, rows, tempering(rows, sums, error))
        said.append(chances(held_out_gain(seen)).numpy())
        true.append(0.09 * (1 - rate) - 4 * rate > 0)
    said, true = np.concatenate(said), np.concatenate(true)
    assert true.mean() == pytest.approx(0.5, abs=0.05)
    assert said.mean() < 0.65
    assert (said >= 0.95).mean() < 0.05


def test_at_full_size_training_alone_is_ahead_of_where_folds_saw_it():
    seen = {
        name: Witness(torch.tensor([gain]), *(torch.ones(1),) * 3, torch.tensor([10]))
        for name, gain in (("personal over alone", 0.5), ("personal over common", 0.2), ("common over alone", 0.3))
    }
    found = {name: float(part.observed) for name, part in at_full_size(seen, 0.8).items()}
    assert found["personal over alone"] == pytest.approx(0.4)
    assert found["personal over common"] == pytest.approx(0.2)
    assert found["common over alone"] == pytest.approx(found["personal over alone"] - found["personal over common"])
