"""A number that was estimated: its value, an interval, how it was found and what to doubt about it."""

from __future__ import annotations

from math import nan
from typing import Any, NamedTuple


class Estimate(NamedTuple):
    value: Any  # a number, or a tensor with one entry per client
    low: Any
    high: Any
    method: str  # where it came from
    warnings: tuple[str, ...] = ()


def unidentified(reason: str) -> Estimate:
    """The data cannot tell: no value and no interval, but the reason."""
    return Estimate(nan, nan, nan, "not identified", (reason,))
