"""Names for types that many modules share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

JsonObject = dict[str, Any]  # what JSON or TOML can hold, or keyword arguments: values by name
NamedValues = Mapping[str, Any]  # the same, only read
OnProgress = Callable[[str, int, int], None]  # (label, rounds done, total rounds)
Words = Literal["auto", "theory", "stay", "stop", "limit", "residuals", "path"]
Auto = float | Words  # of a hyperparameter: a number, or a word that `Algorithm.resolve` turns into one
T = TypeVar("T")


def as_number(value: T | str) -> T:
    """Return the value of a hyperparameter that is resolved; a word is refused."""
    if isinstance(value, str):
        raise TypeError(f"{value!r} is not resolved yet.")
    return value
