"""Errors of held-out means: own or everybody's variance, long tails, and gains at full size."""

import numpy as np
import pytest
import torch

from mooring.advice.calibrate import Witness, chances
from mooring.advice.heldout import at_full_size, held_out_gain, row_kurtosis, steadied_error, tempering, together


def sums_of(clients):
    """[4, m] of each client's numbers."""
    powers = [[float((np.asarray(rows) ** k).sum()) for rows in clients] for k in range(1, 5)]
    return torch.tensor([len(rows) for rows in clients]), torch.tensor(powers, dtype=torch.float64)


def witness_of(clients):
    rows, sums = sums_of(clients)
    error = steadied_error(rows, sums)
    nothing = torch.full((len(rows),), torch.nan)
    return Witness(sums[0] / rows, error, nothing, nothing, rows, row_kurtosis(rows, sums, error))


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
    normal = witness_of([rng.standard_normal(50) for _ in range(200)])
    assert tempering(normal.kurtosis, normal.rows) > 0.99
    long = witness_of([rare(rng, 0.02, 50) for _ in range(400)])
    # Kurtosis 1 / .02 of rows, so 3 + 47 / 50 of means: 2 / (3.94 - 1); around a client's own mean a few per cent less.
    assert tempering(long.kurtosis, long.rows) == pytest.approx(0.68, abs=0.1)
    nothing = torch.zeros(3, dtype=torch.long), torch.zeros(4, 3)
    assert row_kurtosis(*nothing, steadied_error(*nothing)) == 3.0


def test_two_witnesses_of_rows_are_one_of_all_rows():
    """What 60 clients' 15 and 30 rows say together is what their 45 rows say: same means, variances and tails."""
    rng = np.random.default_rng(4)
    clients = [rare(rng, 0.02, 45) for _ in range(60)]
    parts = witness_of([rows[:15] for rows in clients]), witness_of([rows[15:] for rows in clients])
    both, whole = together(*parts), witness_of(clients)
    torch.testing.assert_close(both.observed, whole.observed)
    assert torch.equal(both.rows, whole.rows)
    # Each part has its own view of how much of a client's variance is its own, and of its mean, at 1 / 15 of the rows.
    assert float(both.error.mean()) == pytest.approx(float(whole.error.mean()), rel=0.05)
    assert both.kurtosis == pytest.approx(whole.kurtosis, rel=0.25)  # (14 / 15)^4 is .76


def test_a_witness_without_rows_adds_nothing():
    rng = np.random.default_rng(5)
    seen = witness_of([rng.standard_normal(10) for _ in range(5)])
    none = Witness(*(torch.full((5,), torch.nan),) * 4, torch.zeros(5, dtype=torch.long))
    both = together(seen, none)
    torch.testing.assert_close(both.observed, seen.observed)
    torch.testing.assert_close(both.error, seen.error)
    assert both.kurtosis == pytest.approx(seen.kurtosis)
    assert not torch.isfinite(together(none, none).observed).any()


def test_chances_are_not_too_sure_where_rows_have_long_tails():
    """Half of the clients gain truly, by fewer rare rows of large loss; all seem to gain a little on common rows."""
    rng = np.random.default_rng(3)
    said, true = [], []
    for _ in range(60):
        rate = 0.02 + rng.choice((-0.01, 0.01), 20)
        clients = [np.where(rng.random(36) < r, -4.0, 0.08 + 0.02 * rng.random(36)) for r in rate]
        said.append(chances(held_out_gain(witness_of(clients))).numpy())
        true.append(0.09 * (1 - rate) - 4 * rate > 0)
    said, true = np.concatenate(said), np.concatenate(true)
    assert true.mean() == pytest.approx(0.5, abs=0.05)
    assert said.mean() < 0.65
    assert (said >= 0.95).mean() < 0.05


def test_what_is_deployed_for_looking_better_is_not_believed_for_that():
    """Normal rows; in half of the federations neither model is better on average, in the others by a client's error."""
    rng = np.random.default_rng(6)
    m, n = 20, 40
    said, true = [], []
    for _ in range(300):
        mu = rng.choice((0.0, 1.0)) * rng.standard_normal() / n**0.5
        theta = mu + 0.3 * rng.standard_normal(m) / n**0.5
        nothing = torch.full((m,), torch.nan)
        observed = torch.from_numpy(theta + rng.standard_normal(m) / n**0.5)
        gain = held_out_gain(
            Witness(observed, torch.full((m,), n**-0.5).double(), nothing, nothing, torch.full((m,), n))
        )
        deployed = gain.expected.numpy() > 0  # who looks better is deployed, and only then something is told
        said.append(chances(gain).numpy()[deployed])
        true.append((theta > 0)[deployed])
    said, true = np.concatenate(said), np.concatenate(true)
    # The standard error over some 300 federations of shares within them is about .02.
    for low, high in ((0.5, 0.6), (0.6, 0.8), (0.8, 0.95), (0.95, 1.0)):
        here = (said >= low) & (said < high)
        assert here.sum() > 100
        assert said[here].mean() == pytest.approx(true[here].mean(), abs=0.06)


def test_a_gain_that_all_clients_see_is_not_shrunk():
    m, n = 30, 25
    nothing = torch.full((m,), torch.nan)
    observed = torch.full((m,), 2.0 / n**0.5, dtype=torch.float64)  # two errors at each of 30 clients: eleven together
    gain = held_out_gain(Witness(observed, torch.full((m,), n**-0.5).double(), nothing, nothing, torch.full((m,), n)))
    assert float(gain.expected[0]) == pytest.approx(float(observed[0]), rel=0.03)
    assert float(chances(gain).min()) > 0.97


def seen_gains(*gains):
    names = ("personal over alone", "personal over common", "common over alone")
    return {
        name: Witness(torch.tensor([gain]), *(torch.ones(1),) * 3, torch.tensor([10]))
        for name, gain in zip(names, gains)
    }


def test_at_full_size_training_alone_is_ahead_of_where_folds_saw_it():
    found = {name: float(part.observed) for name, part in at_full_size(seen_gains(0.5, 0.2, 0.3), 0.8).items()}
    assert found["personal over alone"] == pytest.approx(0.4)
    assert found["personal over common"] == pytest.approx(0.2)
    assert found["common over alone"] == pytest.approx(found["personal over alone"] - found["personal over common"])


@pytest.mark.parametrize("tau2", [0.01, 0.3, 4.0])
def test_gains_at_full_size_are_those_of_normal_truths(tau2):
    """Means of n rows of variance 1 lose 1 / n; shrunk to truths of variance tau2 they lose tau2 / (1 + n tau2)."""

    def gain(n):
        return 1 / n - tau2 / (1 + n * tau2)

    small, large = 8, 10
    found = at_full_size(seen_gains(gain(small), 0.0, gain(small)), small / large, gain(small) * small)
    assert float(found["personal over alone"].observed) == pytest.approx(gain(large))
