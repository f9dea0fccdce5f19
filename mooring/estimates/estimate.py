"""A number that was estimated: its value, an interval, its method and warnings."""

from __future__ import annotations

from math import nan
from typing import Any, NamedTuple


class Estimate(NamedTuple):
    value: Any  # a number, or a tensor with one entry per client
    low: Any
    high: Any
    method: str  # how it was estimated
    warnings: tuple[str, ...] = ()


def unidentified(reason: str) -> Estimate:
    """Return an estimate without value and interval, with the reason."""
    return Estimate(nan, nan, nan, "not identified", (reason,))
