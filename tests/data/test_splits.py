"""Splits: sizes, purity, strata, units, time."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooring.core.errors import RequestError
from mooring.core.seeds import client_key
from mooring.data.splits import TEST, TRAIN, VALIDATION, group_split, parse_shares, random_split, time_split

sizes = st.lists(st.integers(3, 40), min_size=1, max_size=8)
seeds = st.integers(0, 2**32 - 1)


def ragged(lengths, seed):
    """Rows of the clients, mixed in the table; each client's own rows keep no particular order."""
    code = np.repeat(np.arange(len(lengths)), lengths)
    return np.random.default_rng(seed).permutation(code)


def keys_of(names):
    return np.array([client_key(name) for name in names], dtype=np.uint64)


def keys(clients):
    return keys_of([f"site {i}" for i in range(clients)])


@settings(deadline=None)
@given(sizes, seeds)
def test_every_client_is_split_60_20_20(lengths, seed):
    code = ragged(lengths, seed)
    part = random_split(code, keys(len(lengths)), seed)
    for i, n in enumerate(lengths):
        count = [int(((code == i) & (part == p)).sum()) for p in (TRAIN, VALIDATION, TEST)]
        held = max(round(0.2 * n), 1)
        assert count == [n - 2 * held, held, held]
        assert min(count) >= 1


@settings(deadline=None)
@given(st.lists(st.integers(3, 20), min_size=2, max_size=6), seeds)
def test_a_client_is_split_alike_without_the_others(lengths, seed):
    code = ragged(lengths, seed)
    rng = np.random.default_rng(seed)
    label = rng.integers(0, 3, len(code))
    part = random_split(code, keys(len(lengths)), seed, label)
    for i in range(len(lengths)):
        mine = code == i
        alone = random_split(np.zeros(mine.sum(), dtype=int), keys_of([f"site {i}"]), seed, label[mine])
        np.testing.assert_array_equal(part[mine], alone)


@settings(deadline=None)
@given(st.lists(st.integers(1, 30), min_size=2, max_size=4), seeds)
def test_classes_are_spread_over_the_parts(counts, seed):
    """Each class has its 60/20/20 within two rows, and a class of two rows or more is always trained on."""
    label = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))
    if len(label) < 10:
        return
    part = random_split(np.zeros(len(label), dtype=int), keys(1), seed, label)
    for k, n in enumerate(counts):
        for which, share in ((TRAIN, 0.6), (VALIDATION, 0.2), (TEST, 0.2)):
            assert abs(((label == k) & (part == which)).sum() - share * n) <= 2 + 0.05 * n
        if n >= 2:
            assert ((label == k) & (part == TRAIN)).any()


def test_every_row_is_held_out_equally_often():
    label = np.array([0] * 8 + [1] * 2)
    tested = np.mean([random_split(np.zeros(10, dtype=int), keys(1), s, label) == TEST for s in range(4000)], axis=0)
    np.testing.assert_allclose(tested[:8], tested[:8].mean(), atol=0.03)
    np.testing.assert_allclose(tested[8:], tested[8:].mean(), atol=0.03)
    np.testing.assert_allclose(tested.mean(), 0.2)


def test_the_seed_and_the_name_matter():
    code = np.zeros(50, dtype=int)
    one = random_split(code, keys_of(["a"]), 0)
    np.testing.assert_array_equal(one, random_split(code, keys_of(["a"]), 0))
    assert (one != random_split(code, keys_of(["a"]), 1)).any()
    assert (one != random_split(code, keys_of(["b"]), 0)).any()


@settings(deadline=None)
@given(st.lists(st.integers(3, 10), min_size=1, max_size=5), seeds)
def test_a_unit_is_in_one_part(units_of, seed):
    rng = np.random.default_rng(seed)
    code = np.concatenate([np.full(u * 3, i) for i, u in enumerate(units_of)])
    unit = np.concatenate([np.repeat(np.arange(u), 3) for u in units_of])
    mixed = rng.permutation(len(code))
    code, unit = code[mixed], unit[mixed]
    part = group_split(code, keys(len(units_of)), seed, unit)
    for i, u in enumerate(units_of):
        parts = [set(part[(code == i) & (unit == k)]) for k in range(u)]
        assert all(len(p) == 1 for p in parts)
        assert set().union(*parts) == {TRAIN, VALIDATION, TEST}


@settings(deadline=None)
@given(sizes, seeds)
def test_time_goes_from_train_to_test(lengths, seed):
    code = ragged(lengths, seed)
    time = np.random.default_rng(seed).integers(0, 8, len(code)).astype(float)
    part = time_split(code, time)
    for i in range(len(lengths)):
        mine = [time[(code == i) & (part == p)] for p in (TRAIN, VALIDATION, TEST)]
        assert mine[0].max() <= mine[1].min() and mine[1].max() <= mine[2].min()


shares = st.tuples(st.floats(0.01, 1), st.floats(0, 1), st.floats(0, 1)).map(lambda s: tuple(x / sum(s) for x in s))


@settings(deadline=None)
@given(st.lists(st.integers(3, 60), min_size=1, max_size=5), shares, seeds)
def test_every_client_is_split_by_the_shares(lengths, asked, seed):
    """Each part has its share up to a row, or the one row that it needs; a share of 0 has no row."""
    code = ragged(lengths, seed)
    part = random_split(code, keys(len(lengths)), seed, shares=asked)
    for i, n in enumerate(lengths):
        count = [int(((code == i) & (part == p)).sum()) for p in (TRAIN, VALIDATION, TEST)]
        assert sum(count) == n and count[0] >= 1
        for share, rows in zip(asked[1:], count[1:]):
            assert rows == 0 if share == 0 else rows >= 1
            assert abs(rows - share * n) <= 1.5 or min(count) == 1
        assert abs(count[0] - asked[0] * n) <= 1 or min(count) == 1


def test_the_usual_shares_are_the_default():
    code = ragged([3, 5, 11, 40], 0)
    np.testing.assert_array_equal(
        random_split(code, keys(4), 0), random_split(code, keys(4), 0, shares=(0.6, 0.2, 0.2))
    )


def test_shares_of_units_and_of_time():
    code, time = np.zeros(40, dtype=int), np.arange(40.0)
    asked = (0.5, 0.1, 0.4)
    part = time_split(code, time, asked)
    np.testing.assert_array_equal(part, np.repeat([TRAIN, VALIDATION, TEST], [20, 4, 16]))
    part = group_split(code, keys(1), 0, np.arange(40) // 4, shares=asked)
    assert np.bincount(part).tolist() == [20, 4, 16] and all(len(set(part[4 * u : 4 * u + 4])) == 1 for u in range(10))


@pytest.mark.parametrize("wrong", [(0.5, 0.5), (0.0, 0.5, 0.5), (1.2, -0.1, -0.1), (0.5, 0.3, 0.3), (np.nan, 0.5, 0.5)])
def test_other_shares_are_refused(wrong):
    with pytest.raises(RequestError, match="split must be three shares"):
        parse_shares(wrong)
