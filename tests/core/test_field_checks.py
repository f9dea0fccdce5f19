"""Settings by name: unknown names and wrong types."""

from collections.abc import Callable
from typing import Any

import pytest

from mooring.core.errors import RequestError
from mooring.core.field_checks import check_fields, describe_unknown

KNOWN = {
    "lam": Any,
    "steps": int,
    "eta": float,
    "word": str,
    "warm": bool,
    "table": dict[str, Any],
    "either": float | str,
    "sizes": list[int],
    "batch": int | None,
    "loss": str | Callable[[int], int],
}


@pytest.mark.parametrize(
    "given",
    [
        {"lam": "auto"}, {"lam": [1, 2]}, {"steps": 3}, {"eta": 1}, {"eta": 0.5}, {"word": "a"}, {"warm": True},
        {"table": {"a": 1}}, {"either": 0.5}, {"either": "auto"}, {"sizes": (1, 2)}, {"batch": None}, {"loss": len}, {},
    ],
)  # fmt: skip
def test_what_fits_is_taken(given):
    check_fields("method", given, KNOWN)


@pytest.mark.parametrize(
    "given, sentence",
    [
        ({"lamb": 1}, "method: unknown hyperparameter 'lamb' (did you mean 'lam'?); known: lam, steps, "),
        ({"steps": 2.5}, "method: steps must be a whole number, got 2.5."),
        ({"steps": True}, "method: steps must be a whole number, got True."),
        ({"eta": "fast"}, "method: eta must be a number, got 'fast'."),
        ({"eta": True}, "method: eta must be a number, got True."),
        ({"word": 3}, "method: word must be text, got 3."),
        ({"warm": 1}, "method: warm must be true or false, got 1."),
        ({"table": 3}, "method: table must be a table, got 3."),
        ({"either": [1]}, "method: either must be a number or text, got [1]."),
        ({"sizes": 3}, "method: sizes must be a list, got 3."),
        ({"batch": "all"}, "method: batch must be a whole number, got 'all'."),
    ],
)
def test_wrong_names_and_types_are_refused_in_one_sentence(given, sentence):
    with pytest.raises(RequestError) as error:
        check_fields("method", given, KNOWN)
    assert str(error.value).startswith(sentence)


def test_names_are_near_whatever_their_case():
    assert describe_unknown("algorithm", "FedAvg", ["local", "fedavg"]).startswith(
        "unknown algorithm 'FedAvg' (did you mean 'fedavg'?)"
    )
    assert describe_unknown("task", "zzz", ["linear"]) == "unknown task 'zzz'; known: linear"
