"""Work on blocks of clients, put together in the order of the clients; counters of work."""

from typing import NamedTuple

import torch

from mooring.core.cohort import Rows, stack_states
from mooring.core.costs import CostMeter, SolveTolerances

SIZES = [40, 3, 17, 0, 90, 5, 33]


class Pair(NamedTuple):
    total: torch.Tensor
    place: torch.Tensor
    nothing: None


def rows():
    ys = [torch.full((n,), float(i), dtype=torch.float64) for i, n in enumerate(SIZES)]
    return Rows.stack([y[:, None] for y in ys], ys)


def test_each_gives_every_client_its_own_result_whatever_its_kind():
    whole = rows()
    assert len(whole.blocks()) > 2  # sizes differ too much for one block
    sums = whole.each(lambda part, _: (part.padded().weight > 0).sum(1))
    assert sums.tolist() == SIZES
    pair = whole.each(lambda part, at: Pair((part.padded().y * part.padded().weight).sum(1), at, None))
    assert isinstance(pair, Pair) and pair.place.tolist() == list(range(7)) and pair.nothing is None
    torch.testing.assert_close(pair.total, torch.tensor([0.0, 1, 2, 0, 4, 5, 6], dtype=torch.float64))
    sizes, places = whole.each(lambda part, at: (part.size, at))
    assert sizes.tolist() == SIZES and places.tolist() == list(range(7))
    assert whole.each(lambda part, at: None) is None


def test_each_of_a_selection_and_with_a_limit():
    some = rows().select(torch.tensor([4, 1, 6]))
    assert some.each(lambda part, _: part.size).tolist() == [90, 3, 33]
    seen = []
    rows().each(lambda part, at: seen.append(len(at)) or part.size, most=1)
    assert seen == [1] * 7


def test_stacked_keeps_the_order_that_it_is_given():
    parts = [torch.tensor([1, 2]), torch.tensor([0])]
    assert stack_states(parts).tolist() == [1, 2, 0]
    assert stack_states(parts, torch.tensor([2, 0, 1])).tolist() == [0, 1, 2]


def test_meters_add_up_and_name_all_their_counts():
    one, other = CostMeter(1, 2, SolveTolerances(3, 1, 0.5, 0.6)), CostMeter(10, 20, SolveTolerances(30, 0, 0.5, 0.4))
    one.add(other)
    assert one == CostMeter(11, 22, SolveTolerances(33, 1, 0.5, 0.6)) and other.samples == 10
    assert one.counts() == {"samples": 11, "gradients": 22, **SolveTolerances(33, 1, 0.5, 0.6)._asdict()}
