import numpy as np
import pytest

from mooring.core.errors import RequestError
from mooring.theory.weights import (
    check_weights,
    imbalance,
    require_nonnegative,
    require_positive,
    s1,
    s2,
    size_weights,
    uniform_weights,
)

RNG = np.random.default_rng(0)


def random_weights(clients):
    return RNG.dirichlet(np.full(clients, 0.5)), RNG.integers(1, 1000, clients)


def test_sums_equal_loops():
    for clients in (1, 2, 7, 40):
        p, n = random_weights(clients)
        alone = together = 0.0
        for i in range(clients):
            alone += p[i] / n[i]
            together += p[i] * p[i] / n[i]
        assert s1(p, n) == pytest.approx(alone)
        assert s2(p, n) == pytest.approx(together)


def test_known_presets():
    n = np.array([10, 20, 70, 400])
    p = size_weights(n)
    assert s1(p, n) == pytest.approx(4 / 500)
    assert s2(p, n) == pytest.approx(1 / 500)
    assert imbalance(p, n) == pytest.approx(4 * 400 / 500)
    assert imbalance(uniform_weights(4), n) == pytest.approx(1.0)


def test_imbalance_is_the_smallest_constant_and_at_least_one():
    for _ in range(200):
        p, n = random_weights(9)
        assert imbalance(p, n) >= 1
        assert p.max() * s1(p, n) <= imbalance(p, n) * s2(p, n) * (1 + 1e-12)


@pytest.mark.parametrize(
    ("p", "n", "words"),
    [
        ([0.5, 0.5], [1, 2, 3], "one entry per client"),
        ([0.5, 0.6], [1, 2], "sum to 1"),
        ([1.5, -0.5], [1, 2], "sum to 1"),
        ([0.5, 0.5], [3, 0], "client 1"),
        ([], [], "one entry per client"),
    ],
)
def test_wrong_weights_are_named(p, n, words):
    with pytest.raises(RequestError, match=words):
        check_weights(p, n)


def test_constants_must_be_positive():
    require_positive("here", mu=1e-9, smooth=3.0)
    for bad in (0, -1, float("nan"), float("inf")):
        with pytest.raises(RequestError, match="here: mu must be"):
            require_positive("here", mu=bad)


def test_radii_must_not_be_negative():
    require_nonnegative("here", radius=0, noise=0.5)
    for bad in (-1e-9, float("nan"), float("inf")):
        with pytest.raises(RequestError, match="here: radius must be"):
            require_nonnegative("here", radius=bad)
