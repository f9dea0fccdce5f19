"""Partitions: nothing is dealt twice, each rule's promise holds, known limits, errors that name what is impossible."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooring.core.errors import RequestError
from mooring.core.seeds import generator
from mooring.data.partitions import (
    apportion,
    by_group,
    classes_per_client,
    dirichlet,
    iid,
    powerlaw_counts,
    powerlaw_sizes,
    shards,
)

RULES = {
    "iid": lambda y, m, seed: iid(y, m, seed),
    "classes": lambda y, m, seed: classes_per_client(y, m, 2, seed),
    "shards": lambda y, m, seed: shards(y, m, 2, seed),
    "dirichlet": lambda y, m, seed: dirichlet(y, m, 1.0, seed),
    "dirichlet_equal": lambda y, m, seed: dirichlet(y, m, 0.3, seed, equal_sizes=True),
    "powerlaw": lambda y, m, seed: powerlaw_sizes(y, m, 1.0, seed),
}
quick = settings(max_examples=25, deadline=None)


def labels(counts, seed=0):
    y = np.repeat(np.arange(len(counts)), counts)
    return generator(seed, "data", 99).permutation(y)


def distance_to_pool(y, dealt):
    """[m]: total variation between each client's label proportions and the pool's."""
    classes = np.unique(y)
    pool = np.array([(y == c).mean() for c in classes])
    return np.array([np.abs([(y[rows] == c).mean() for c in classes] - pool).sum() / 2 for rows in dealt])


@pytest.mark.parametrize("rule", RULES)
@quick
@given(counts=st.lists(st.integers(20, 60), min_size=2, max_size=6), clients=st.integers(3, 8), seed=st.integers(0, 99))
def test_every_row_goes_to_one_client_at_most_and_seeds_repeat(rule, counts, clients, seed):
    y = labels(counts)
    dealt = RULES[rule](y, clients, seed)
    used = np.concatenate(dealt)
    assert len(dealt) == clients and min(map(len, dealt)) >= 1
    assert len(set(used.tolist())) == len(used)
    if rule == "dirichlet_equal":
        assert {len(rows) for rows in dealt} == {len(y) // clients}
    else:
        assert sorted(used) == list(range(len(y)))
    again = RULES[rule](y, clients, seed)
    assert all(np.array_equal(a, b) for a, b in zip(dealt, again))


@pytest.mark.parametrize("rule", RULES)
def test_another_seed_deals_otherwise(rule):
    y = labels([50] * 5)
    one, two = RULES[rule](y, 5, 0), RULES[rule](y, 5, 1)
    assert any(not np.array_equal(np.sort(a), np.sort(b)) for a, b in zip(one, two))


@quick
@given(
    counts=st.lists(st.integers(30, 300), min_size=2, max_size=10),
    clients=st.integers(5, 20),
    data=st.data(),
)
def test_each_client_gets_exactly_k_classes_in_similar_amounts(counts, clients, data):
    k = data.draw(st.integers(-(-len(counts) // clients), len(counts)))
    y = labels(counts)
    dealt = classes_per_client(y, clients, k)
    assert [len(np.unique(y[rows])) for rows in dealt] == [k] * clients
    if min(counts) * 2 > max(counts) and k < len(counts) // 2 and clients >= 10:
        sizes = np.array([len(rows) for rows in dealt])
        assert sizes.max() < 3 * sizes.min()


def test_all_classes_per_client_is_nearly_iid_and_balanced_data_give_equal_sizes():
    y = labels([100] * 10)
    assert distance_to_pool(y, classes_per_client(y, 10, 10)).max() < 1e-12
    assert {len(rows) for rows in classes_per_client(y, 20, 2)} == {50}


def test_shards_are_cut_from_the_sorted_labels():
    y = labels([40] * 5)  # 10 clients x 2 shards of 10 rows: no shard crosses a class border
    dealt = shards(y, 10, 2)
    for rows in dealt:
        values, counts = np.unique(y[rows], return_counts=True)
        assert len(values) in (1, 2) and set(counts) <= {10, 20}


def test_dirichlet_limits():
    y = labels([2000] * 5)
    even = dirichlet(y, 10, 1e6)
    assert distance_to_pool(y, even).max() < 0.02
    assert np.ptp([len(rows) for rows in even]) < 50
    assert distance_to_pool(y, dirichlet(y, 10, 1e6, equal_sizes=True)).max() < 0.02

    # alpha -> 0: each class lies with one client (least = 0 lets the others be empty) ...
    lonely = dirichlet(y, 10, 1e-4, least=0)
    held = np.array([[(y[rows] == c).sum() for rows in lonely] for c in range(5)])
    assert (held.max(1) / held.sum(1)).min() > 0.99
    # ... and with equal sizes each client has one class, while the classes last
    purity = [np.bincount(y[rows]).max() / len(rows) for rows in dirichlet(y, 10, 1e-4, equal_sizes=True)]
    assert np.mean(np.array(purity) > 0.99) >= 0.5


def test_dirichlet_class_shares_have_the_dirichlet_variance():
    """Var of a Dirichlet(a, ..., a) share over m clients: (1/m)(1 - 1/m) / (m a + 1)."""
    y = labels([1000] * 200)
    m, a = 5, 0.7
    shares = np.array([np.bincount(y[rows], minlength=200) / 1000 for rows in dirichlet(y, m, a)])
    expected = (1 / m) * (1 - 1 / m) / (m * a + 1)
    assert shares.var() == pytest.approx(expected, rel=0.15)


@quick
@given(total=st.integers(50, 5000), clients=st.integers(1, 20), exponent=st.floats(0, 3), least=st.integers(0, 2))
def test_powerlaw_counts_add_up(total, clients, exponent, least):
    sizes = powerlaw_counts(total, clients, exponent, generator(0, "data"), least=least)
    assert sizes.sum() == total and sizes.min() >= least


def test_powerlaw_sizes_follow_the_law():
    sizes = np.sort([len(rows) for rows in powerlaw_sizes(np.zeros(100_000), 50, 1.5, least=0)])[::-1]
    rank = np.arange(1, 51)
    assert np.polyfit(np.log(rank), np.log(sizes), 1)[0] == pytest.approx(-1.5, abs=0.01)
    assert np.ptp([len(rows) for rows in powerlaw_sizes(np.zeros(1003), 10, 0.0)]) <= 1


@quick
@given(share=st.lists(st.floats(0.01, 10), min_size=1, max_size=9), total=st.integers(0, 1000))
def test_apportion_is_within_one_of_the_exact_share(share, total):
    whole = apportion(np.array(share), total)
    assert whole.sum() == total
    assert np.abs(whole - np.array(share) / np.sum(share) * total).max() < 1 + 1e-9


def test_groups_keep_their_rows_together():
    group = np.array(["b", "a", "b", "c", "a", "b"])
    assert [rows.tolist() for rows in by_group(group)] == [[1, 4], [0, 2, 5], [3]]
    assert [rows.tolist() for rows in by_group(group, least=2)] == [[1, 4], [0, 2, 5]]
    some = by_group(np.arange(100) // 2, clients=10, seed=3)
    assert len(some) == 10 and all(len(rows) == 2 and rows[1] == rows[0] + 1 for rows in some)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: iid(np.zeros(3), 4), "3 rows are too few for 4 clients"),
        (lambda: iid(np.zeros(3), 0), "clients must be at least 1, got 0"),
        (lambda: classes_per_client(labels([9, 9]), 3, 5), "must be 1 to 2"),
        (lambda: classes_per_client(labels([9] * 7), 2, 2), "cannot hold all 7 classes; take at least 4 clients"),
        (lambda: classes_per_client(labels([2, 60]), 10, 2), "class 0 has 2 rows but 10 clients need some of it"),
        (lambda: shards(np.zeros(5), 3, 2), "5 rows are too few for 3 clients with at least 2 each"),
        (lambda: shards(np.zeros(5), 3, 0), "shards per client must be at least 1"),
        (lambda: dirichlet(np.zeros(9), 3, 0.0), "alpha must be a number > 0, got 0.0"),
        (lambda: dirichlet(labels([50, 50]), 20, 1e-4), "larger alpha, fewer clients or equal sizes"),
        (lambda: powerlaw_sizes(np.zeros(9), 3, -1.0), "exponent must be a number >= 0"),
        (lambda: by_group(np.zeros(9), clients=2), "1 of 1 groups have at least 1 rows"),
        (lambda: by_group(np.arange(9), least=2), "none of the 9 groups has 2 rows"),
    ],
)
def test_impossible_requests_are_named(call, says):
    with pytest.raises(RequestError, match=says):
        call()
