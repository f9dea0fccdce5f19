"""Stiffness: one number, per client, per coefficient, or their product; and what may be written in a run file."""

import numpy as np
import pytest
import torch

from mooring.core.errors import RequestError
from mooring.core.penalty import PerClientPenalty, is_uniform, parse_lam, penalty_rows

LIKE = torch.zeros(2, 3, dtype=torch.float64)
INDEX = torch.tensor([2, 0])


def test_one_number_is_the_same_for_all():
    assert penalty_rows(0.5, INDEX, LIKE).tolist() == [[0.5], [0.5]]
    assert is_uniform(0.5) and not is_uniform(PerClientPenalty((0.5, 0.5, 0.5)))


def test_factors_multiply_for_the_clients_of_the_cohort():
    rows, columns = (1.0, 2.0, 4.0), (3.0, 5.0, 7.0)
    assert penalty_rows(PerClientPenalty(rows), INDEX, LIKE).tolist() == [[4.0], [1.0]]
    expected = np.outer([4.0, 1.0], columns)
    assert np.array_equal(penalty_rows(PerClientPenalty(rows, columns), INDEX, LIKE).numpy(), expected)
    assert penalty_rows(PerClientPenalty(None, columns), INDEX, LIKE).tolist() == [list(columns)] * 2
    assert penalty_rows(PerClientPenalty(rows, columns), INDEX, LIKE.float()).dtype == torch.float32


def test_what_a_run_file_may_say():
    assert parse_lam("A", 2) == 2.0 and isinstance(parse_lam("A", 2), float)
    assert parse_lam("A", 0) == 0.0
    assert parse_lam("A", "auto", ("auto",)) == "auto"
    assert parse_lam("A", [1.0, 2.0]) == PerClientPenalty(per_client=(1.0, 2.0))
    assert parse_lam("A", {"per_coefficient": [3.0]}) == PerClientPenalty(None, (3.0,))
    assert parse_lam("A", {"per_client": [0.0], "per_coefficient": [3.0]}) == PerClientPenalty((0.0,), (3.0,))


@pytest.mark.parametrize(
    ("lam", "sentence"),
    [
        (-1, "A: lam must be >= 0, got -1."),
        (float("nan"), "A: lam must be >= 0, got nan."),
        ([1.0, -2.0], "A: lam must be >= 0, got -2.0."),
        ({"per_client": [1.0], "per_coefficient": [-3.0]}, "A: lam must be >= 0, got -3.0."),
        ("aut", "A: lam must be a number >= 0 or one of 'auto', 'theory', got 'aut'."),
        ({"per_clients": [1.0]}, "A: lam takes per_client and per_coefficient, got 'per_clients'."),
        ([None], "A: lam must be >= 0, got None."),
    ],
)
def test_what_it_may_not_say(lam, sentence):
    with pytest.raises(RequestError) as error:
        parse_lam("A", lam, ("auto", "theory"))
    assert str(error.value) == sentence
