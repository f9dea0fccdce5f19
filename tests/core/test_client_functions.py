"""Client functions give every client what it gets by itself, whatever the blocks that its rows are padded in."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from mooring.core import cohort
from mooring.core.client_functions import CLIENT_FUNCTIONS, client_function
from mooring.core.cohort import Rows


class Moments(NamedTuple):
    count: Tensor
    moment: Tensor


def shifted_moments(task, batch, shift: Tensor, *, scale: float) -> Moments:
    """Counts and sums of x, shifted by client and scaled."""
    real = (batch.weight > 0)[..., None]
    x = torch.where(real, scale * (batch.x + shift[:, None]), 0.0)
    return Moments(real.sum((1, 2)), x.sum(1))


@pytest.fixture
def function():
    yield client_function(shifted_moments)
    del CLIENT_FUNCTIONS["shifted_moments"]


def rows_of(sizes):
    torch.manual_seed(0)
    return Rows.stack([torch.randn(n, 2) for n in sizes], [torch.randn(n) for n in sizes])


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("kept", [False, True])
def test_clients_get_what_each_gets_by_itself(function, blocks, kept, monkeypatch):
    if blocks:
        monkeypatch.setattr(cohort, "MAX_NUMBERS_IN_ONE_BATCH", 0)
    rows, shift = rows_of([40, 3, 17, 90]), torch.arange(8.0).view(4, 2)
    assert len(rows.blocks()) > 1
    if kept:
        with rows.keep_batches():
            found = function(None, rows, shift, scale=2.0)
        assert rows.kept_batches is None
    else:
        found = function(None, rows, shift, scale=2.0)
    for i in range(4):
        x, _ = rows.of(i)
        assert int(found.count[i]) == len(x)
        torch.testing.assert_close(found.moment[i], 2 * (x + shift[i]).sum(0))


def test_the_annotation_is_what_may_leave_a_client(function):
    assert function.result_types == (Moments,)


def test_two_client_functions_cannot_have_one_name(function):
    with pytest.raises(ValueError, match="'shifted_moments' already"):
        client_function(shifted_moments)


def test_compact_rows_are_the_same_rows():
    rows = rows_of([4, 2, 5]).select(torch.tensor([2, 0]))
    compact = rows.compact()
    assert len(compact.y) == 9 and compact.start.tolist() == [0, 5]
    for i in range(2):
        assert all(torch.equal(a, b) for a, b in zip(rows.of(i), compact.of(i)))
