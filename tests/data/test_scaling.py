"""Federated statistics equal pooled ones."""

import numpy as np
import pandas as pd
from hypothesis import given, settings
from hypothesis import strategies as st

from mooring.data import scaling


@st.composite
def federations(draw):
    clients = draw(st.integers(1, 6))
    rows = draw(st.integers(1, 40))
    seed = draw(st.integers(0, 2**32 - 1))
    offset = draw(st.sampled_from([0.0, 1.0, -3e4, 2e9]))
    rng = np.random.default_rng(seed)
    x = offset + rng.normal(size=(rows, 3))
    x[rng.random(x.shape) < draw(st.sampled_from([0.0, 0.3]))] = np.nan
    return x, rng.integers(0, clients, rows), clients


@settings(deadline=None, max_examples=60)
@given(federations())
def test_merged_statistics_equal_pooled(federation):
    x, code, clients = federation
    found = scaling.moments(x, code, clients)
    pooled = pd.DataFrame(x)
    np.testing.assert_array_equal(found.count, pooled.count())
    present = found.count > 0
    np.testing.assert_allclose(found.mean[present], pooled.mean()[present], rtol=1e-12, atol=1e-12)
    spread = pooled.std(ddof=0)
    varies = spread > 1e-3
    np.testing.assert_allclose(found.scale[varies], spread[varies], rtol=1e-6)


@settings(deadline=None, max_examples=30)
@given(federations())
def test_each_client_can_compute_its_sums_alone(federation):
    x, code, clients = federation
    together = scaling.sums(x, code, clients)
    mean = scaling.mean_of(together)[1]
    squared = scaling.squares(x, code, clients, mean)
    for i in range(clients):
        mine = x[code == i]
        nobody_else = np.zeros(len(mine), dtype=int)
        alone = scaling.sums(mine, nobody_else, 1)
        np.testing.assert_allclose(together.count[i], alone.count[0])
        np.testing.assert_allclose(together.total[i], alone.total[0])
        np.testing.assert_allclose(squared[i], scaling.squares(mine, nobody_else, 1, mean)[0])


def test_a_large_mean_costs_no_digits():
    x = 1e9 + np.array([[-1.0], [1.0]] * 50)
    assert scaling.moments(x, np.arange(100) % 7, 7).scale[0] == 1.0
    plain = np.mean(x**2) - np.mean(x) ** 2  # what plain sums of squares would give
    assert plain != 1.0


def test_a_constant_column_has_scale_one():
    found = scaling.moments(np.full((30, 1), 0.1), np.arange(30) % 3, 3)
    assert found.scale[0] == 1.0


def test_level_counts_merge_to_pooled_counts():
    rng = np.random.default_rng(0)
    levels, code = rng.integers(-1, 4, 200), rng.integers(0, 5, 200)
    counts = scaling.level_counts(levels, code, 5, 4)
    for i in range(5):
        for k in range(4):
            assert counts[i, k] == sum((levels == k) & (code == i))
