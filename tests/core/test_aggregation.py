"""Robust averages against loops that transcribe their definitions, against limits, and against liars."""

import itertools
import statistics
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.optimize import minimize
from scipy.stats import trim_mean

from mooring.core.aggregation import (
    AVERAGES,
    average,
    flatten_messages,
    geometric_median,
    krum,
    parse_average,
    trimmed_mean,
    weighted_median,
)
from mooring.core.cohort import weighted_mean

VALUES = arrays(np.float64, st.tuples(st.integers(1, 9), st.integers(1, 3)), elements=st.integers(-9, 9).map(float))


class Message(NamedTuple):
    change: torch.Tensor
    path: torch.Tensor | None


def even(n):
    return torch.full((n,), 1 / n, dtype=torch.float64)


@settings(max_examples=100, deadline=None)
@given(VALUES)
def test_with_equal_shares_they_are_the_textbooks(values):
    x, n = torch.from_numpy(values), len(values)
    for column in range(x.shape[1]):
        assert float(weighted_median(x, even(n))[column]) == pytest.approx(statistics.median(values[:, column]))
    for cut in range((n - 1) // 2 + 1):
        if 2 * cut < n:
            right = trim_mean(values, cut / n + 1e-12, axis=0)
            np.testing.assert_allclose(trimmed_mean(x, even(n), cut / n).numpy(), right, atol=1e-9)


@settings(max_examples=60, deadline=None)
@given(arrays(np.float64, st.integers(1, 6), elements=st.integers(-9, 9).map(float)), st.data())
def test_shares_are_as_many_equal_clients(values, data):
    """A client of weight 3 counts as three clients: median and trimmed mean are those of the longer list."""
    counts = data.draw(st.lists(st.integers(1, 4), min_size=len(values), max_size=len(values)))
    x, share = torch.from_numpy(values)[:, None], torch.tensor(counts).double() / sum(counts)
    longer = np.repeat(values, counts)
    assert float(weighted_median(x, share)[0]) == pytest.approx(float(np.median(longer)))
    for beta in (0.0, 0.1, 0.25, 0.4):
        mass = np.full(len(longer), 1 / len(longer))
        order = np.argsort(longer, kind="stable")
        total = kept = at = 0.0
        for k in order:  # what of each client's weight lies between beta and 1 - beta
            inside = max(0.0, min(at + mass[k], 1 - beta) - max(at, beta))
            total, kept, at = total + inside * longer[k], kept + inside, at + mass[k]
        assert float(trimmed_mean(x, share, beta)[0]) == pytest.approx(total / kept, abs=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_the_geometric_median_minimises_the_sum_of_distances(seed):
    rng = np.random.default_rng(seed)
    x, share = rng.normal(size=(7, 3)), rng.dirichlet(np.ones(7))
    found = geometric_median(torch.from_numpy(x), torch.from_numpy(share)).numpy()

    def distance(z):
        return float((share * np.linalg.norm(x - z, axis=1)).sum())

    right = minimize(
        distance, x.mean(0), method="Nelder-Mead", options={"xatol": 1e-10, "fatol": 1e-14, "maxiter": 9999}
    )
    assert distance(found) <= right.fun + 1e-9
    same = torch.ones(4, 2, dtype=torch.float64)
    assert torch.equal(geometric_median(same, even(4)), same[0])


@pytest.mark.parametrize("n,beta", [(3, 0.25), (8, 0.25), (9, 0.4), (1, 0.25), (2, 0.25)])
def test_krum_by_its_definition(n, beta):
    x = torch.randn(n, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    near = max(n - int(beta * n) - 2, min(n - 1, 1))
    score = []
    for i in range(n):
        others = sorted(sum((a - b) ** 2 for a, b in zip(x[i].tolist(), x[j].tolist())) for j in range(n) if j != i)
        score.append(sum(others[:near]))
    assert krum(x, beta) == min(range(n), key=score.__getitem__)


def test_the_clipped_mean_by_its_definition():
    x = torch.tensor([[3.0, 4.0], [0.3, 0.4], [60.0, 80.0]], dtype=torch.float64)
    right = (x[0] + x[1] + x[2] * 5 / 100) / 3  # the median length is 5
    torch.testing.assert_close(average(x, even(3), "clipped"), right)


@pytest.mark.parametrize("spec", AVERAGES)
def test_equal_messages_average_to_themselves_in_their_own_form(spec):
    message = Message(torch.full((5, 2, 3), 0.5), None)
    found = average(message, torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), spec)
    assert isinstance(found, Message) and found.path is None and found.change.dtype == torch.float32
    torch.testing.assert_close(found.change, message.change[0])
    assert average(None, even(2), spec) is None
    one = torch.randn(1, 4)
    torch.testing.assert_close(average(one, torch.ones(1), spec), one[0])


@pytest.mark.parametrize("spec", AVERAGES)
def test_an_average_does_not_share_memory_with_the_messages(spec):
    message = torch.ones(5, 3)
    found = average(message, even(5), spec)
    message.zero_()
    torch.testing.assert_close(found, torch.ones(3))


def test_the_mean_is_the_loops_own():
    x, p = torch.randn(6, 3, dtype=torch.float64), torch.rand(6, dtype=torch.float64)
    assert torch.equal(average(x, p), weighted_mean(x, p))
    torch.testing.assert_close(average(x, p, "trimmed:0"), weighted_mean(x, p))


@pytest.mark.parametrize("spec", ["median", "trimmed:0.3", "geometric", "krum:0.3", "clipped"])
@pytest.mark.parametrize("lie", [1e3, 1e12])
def test_a_minority_moves_them_by_a_bounded_amount(spec, lie):
    """Three of ten send anything; the answer stays within the honest ones' ball (twice it, for clipped messages)."""
    honest = torch.randn(7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    around = flatten_messages(honest).norm(dim=1).max()
    for direction in itertools.islice(torch.eye(4, dtype=torch.float64), 2):
        found = average(torch.cat([honest, lie * direction.expand(3, -1)]), even(10), spec)
        assert float(found.norm()) <= 2 * float(around)
    assert float(average(torch.cat([honest, lie * torch.ones(3, 4)]), even(10)).norm()) > 100  # the mean does not


@pytest.mark.parametrize("spec", ["best", "trimmed:0.5", "trimmed:-1", "median:0.2", "krum:x", ""])
def test_what_is_no_average_is_refused(spec):
    with pytest.raises(ValueError):
        parse_average(spec)
    assert parse_average("krum:0.1") == ("krum", 0.1) and parse_average("median")[0] == "median"
