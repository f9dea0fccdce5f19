"""Randomness by purpose: every draw is a pure function of (seed, purpose, counters).

A counter-based hash replaces stateful generators where draws must not depend on who else takes part: the batch of a
client is the same whether it is drawn alone, in a cohort of hundreds, or again after a crash.
"""

import hashlib

import numpy as np

Counter = int | np.integer | np.ndarray  # one number, or an array of them

PURPOSES = {
    "data": 1,
    "split": 2,
    "participation": 3,
    "batches": 4,
    "algorithm": 5,
    "model": 6,
    "bootstrap": 7,
    "forward": 8,
    "attack": 20,
    "rounding": 21,
}

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_A = np.uint64(0xBF58476D1CE4E5B9)
_MIX_B = np.uint64(0x94D049BB133111EB)


def client_key(name: str) -> int:
    """A client's number in all its draws: a digest of its name, so it depends on no other client."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64: a bijection of 64-bit words that looks random."""
    x = x ^ (x >> np.uint64(30))  # a copy: the rest is in place, for words are drawn by the million
    x *= _MIX_A
    x ^= x >> np.uint64(27)
    x *= _MIX_B
    x ^= x >> np.uint64(31)
    return x


def random_words(seed: int | np.ndarray, purpose: str, *counters: Counter) -> np.ndarray:
    """Independent 64-bit words, one per broadcast element of seed and counters (non-negative integers or arrays)."""
    begin = seed if isinstance(seed, np.ndarray) else np.atleast_1d(np.uint64(seed))
    with np.errstate(over="ignore"):
        state = _mix(begin + _GOLDEN * np.uint64(PURPOSES[purpose]))
    for counter in counters:
        state = add_counter(state, counter)
    return state


def add_counter(state: np.ndarray, counter: Counter) -> np.ndarray:
    """The words with one more counter: further(words(s, p, a), b) = words(s, p, a, b)."""
    return add_mixed_counter(state, mix_counter(counter))


def mix_counter(counter: Counter) -> np.ndarray:
    """A counter's own part in `further`, for those that are used again and again."""
    with np.errstate(over="ignore"):
        return _mix(np.asarray(counter).astype(np.uint64, copy=False) + _GOLDEN)


def add_mixed_counter(state: np.ndarray, mixed: np.ndarray) -> np.ndarray:
    """further(state, counter), given mixed(counter)."""
    with np.errstate(over="ignore"):
        return _mix(state + _GOLDEN + mixed)


def words_below(state: np.ndarray, mixed: np.ndarray, limit: int, buffer: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The positions where onto(state, mixed) [m] is below `limit`, and its values there, for a state of one word.

    What `_mix` does last leaves the upper 31 bits as they are: it is done only for those that these bits let through.
    `buffer` is working memory, at least [2, m].
    """
    x, shifted = buffer[0, : len(mixed)], buffer[1, : len(mixed)]
    with np.errstate(over="ignore"):
        np.add(mixed, state + _GOLDEN, out=x)
    x ^= np.right_shift(x, np.uint64(30), out=shifted)
    x *= _MIX_A
    x ^= np.right_shift(x, np.uint64(27), out=shifted)
    x *= _MIX_B
    candidates = np.flatnonzero(x <= np.uint64(limit | ((1 << 33) - 1)))
    word = x[candidates]
    word ^= word >> np.uint64(31)
    low = word < np.uint64(limit)
    return candidates[low], word[low]


def uniforms(seed: int | np.ndarray, purpose: str, *counters: Counter) -> np.ndarray:
    """Uniform numbers in [0, 1) with 53 random bits."""
    return (random_words(seed, purpose, *counters) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def generator(seed: int, purpose: str, *counters: int) -> np.random.Generator:
    """A numpy generator for draws that need no replay inside a cohort, such as planted data or a split."""
    return generator_from_word(random_words(seed, purpose, *counters).ravel()[0])


def generator_from_word(word: np.uint64) -> np.random.Generator:
    """generator(seed, purpose, ...), given words(seed, purpose, ...): those of many are drawn at once in no time."""
    return np.random.Generator(np.random.Philox(key=int(word)))
