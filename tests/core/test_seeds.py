"""Draws are functions of their counters alone: a plain transcription, independence of company, and uniformity."""

import numpy as np
import pytest
from scipy import stats

from mooring.core import seeds
from mooring.core.seeds import PURPOSES, add_counter, client_key, generator, random_words, uniforms

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def mixed(x):
    """SplitMix64's finaliser, in Python's whole numbers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def word(seed, purpose, *counters):
    state = mixed((seed + GOLDEN * PURPOSES[purpose]) & MASK)
    for counter in counters:
        state = mixed((state + GOLDEN + mixed((counter + GOLDEN) & MASK)) & MASK)
    return state


@pytest.mark.parametrize("counters", [(), (0,), (3, 0, 7), (2**63 + 5, 1)])
def test_words_are_splitmix_over_the_counters(counters):
    for seed, purpose in ((0, "data"), (12345, "batches")):
        assert int(random_words(seed, purpose, *counters)[0]) == word(seed, purpose, *counters)


def test_a_draw_does_not_depend_on_who_else_is_drawn():
    keys = np.array([client_key(name) for name in ("a", "b", "c")], dtype=np.uint64)
    together = random_words(1, "batches", keys[:, None], np.arange(5))
    assert together.shape == (3, 5)
    assert all(
        int(together[i, k]) == int(random_words(1, "batches", int(keys[i]), k)[0]) for i in range(3) for k in range(5)
    )
    assert np.array_equal(add_counter(random_words(1, "batches", keys), 4), random_words(1, "batches", keys, 4))


def test_purposes_and_orders_of_counters_differ():
    purposes = {int(random_words(0, purpose, 1, 2)[0]) for purpose in PURPOSES}
    assert len(purposes) == len(PURPOSES) == len(set(PURPOSES.values()))
    assert int(random_words(0, "data", 1, 2)[0]) != int(random_words(0, "data", 2, 1)[0])
    assert int(random_words(0, "data")[0]) != int(random_words(0, "data", 0)[0])


def test_uniforms_are_the_top_53_bits_and_uniform():
    counters = np.arange(20000)
    found = uniforms(5, "participation", counters)
    assert (found[:100] * 2.0**53).tolist() == [int(w) >> 11 for w in random_words(5, "participation", counters)[:100]]
    assert ((found >= 0) & (found < 1)).all()
    assert stats.kstest(found, "uniform").pvalue > 1e-4
    ranks = stats.spearmanr(found[:-1], found[1:])
    assert abs(ranks.statistic) < 4 / np.sqrt(len(found))


def test_generators_are_keyed_by_the_word():
    key = word(3, "split", 9)
    expected = np.random.Generator(np.random.Philox(key=key)).normal(size=4)
    assert np.array_equal(generator(3, "split", 9).normal(size=4), expected)


def test_names_are_keys_of_64_bits():
    names = [f"client {k}" for k in range(1000)]
    keys = [client_key(name) for name in names]
    assert len(set(keys)) == 1000 and all(0 <= key <= MASK for key in keys)
    assert client_key("7") != client_key("07")


def test_words_under_a_bar_are_those_that_are():
    state, lots = random_words(3, "participation", 7), seeds.mix_counter(np.arange(50_000))
    word = add_counter(state, np.arange(50_000))
    low = int(np.sort(word)[100])
    for bar in (0, 1, 1 << 33, int(word.min()), low, low + 1, 1 << 60, (1 << 64) - 1):
        places, found = seeds.words_below(state, lots, bar, np.empty((2, len(lots)), np.uint64))
        assert np.array_equal(places, np.flatnonzero(word < np.uint64(bar))) and np.array_equal(found, word[places])
