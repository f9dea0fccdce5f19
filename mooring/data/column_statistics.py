"""Statistics of the clients' columns, from which one schema is computed: counts, sums, extremes, no row.

A summary has one row per client. A single client's has one row; the pooled path computes all clients' at once, by the
same functions. `merge_statistics` combines summaries; the result does not depend on their order or grouping, to the
last bit, because clients are sorted by name and sums over them are taken afterwards, in that order. Each client's own
sums run over its rows in the order of its table.

Values that name something (levels of a category, classes of the target) are counted over clients.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from mooring.core.errors import RequestError
from mooring.data.column_types import sort_levels


class LevelCount(NamedTuple):
    """Number of rows with a value, and the first client that has it, sorted by name."""

    rows: int
    client: str


@dataclass(frozen=True, eq=False)
class ColumnStatistics:
    clients: tuple[str, ...]
    facts: dict[str, dict[str, np.ndarray]]  # column -> fact -> a number per client; 0 where it lacks the column
    levels: dict[str, dict[str, LevelCount]] = field(default_factory=dict)  # column -> value -> how often
    roles: dict[str, dict[str, LevelCount]] = field(default_factory=dict)  # role -> column's name -> how many clients

    def of(self, column: str, fact: str) -> np.ndarray:
        """Return [m]: one statistic of a column by client."""
        return self.facts[column][fact]

    def total(self, column: str, fact: str) -> float:
        return float(self.of(column, fact)[:, None].sum(0)[0])

    def stack(self, columns: Sequence[str], fact: str) -> np.ndarray:
        """Return [m, d]: one statistic of several columns."""
        return np.stack([self.of(column, fact) for column in columns], axis=1)

    def select_clients(self, column: str, mask: np.ndarray) -> list[str]:
        """Return the clients that have the column and for which the mask is true."""
        return [name for name, yes in zip(self.clients, mask & (self.of(column, "has") > 0)) if yes]

    def to_json(self) -> str:
        """Return JSON; numbers are restored to the same bits."""
        return json.dumps(
            {
                "clients": self.clients,
                "facts": {c: {f: v.tolist() for f, v in facts.items()} for c, facts in self.facts.items()},
                "levels": self.levels,
                "roles": self.roles,
            },
            allow_nan=False,
        )

    @classmethod
    def from_json(cls, text: str) -> ColumnStatistics:
        """Read a client's summary; anything else is refused in one sentence."""
        try:
            content = json.loads(text, parse_constant=_no_number)
            clients = tuple(_text(name) for name in content["clients"])
            facts = {
                _text(column): {_text(fact): _numbers(values, len(clients)) for fact, values in column_facts.items()}
                for column, column_facts in content["facts"].items()
            }
            levels, roles = (
                {
                    _text(key): {_text(k): LevelCount(_count(c), _text(client)) for k, (c, client) in of.items()}
                    for key, of in d
                }
                for d in (content["levels"].items(), content["roles"].items())
            )
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as failure:
            raise RequestError(f"a client's summary cannot be read: {failure}.") from failure
        if not clients or len(set(clients)) < len(clients):
            raise RequestError("a client's summary must name each of its clients once.")
        return cls(clients, facts, levels, roles)


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number")


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no text")
    return value


def _count(value: object) -> int:
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


def _numbers(values: object, count: int) -> np.ndarray:
    if not isinstance(values, list) or len(values) != count:
        raise ValueError(f"{count} numbers are needed, a number per client")
    if not all(isinstance(v, int | float) and math.isfinite(v) for v in values):
        raise ValueError("a fact is no finite number")
    return np.array(values, dtype=float)


def merge_statistics(summaries: Iterable[ColumnStatistics]) -> ColumnStatistics:
    """Return all clients' summaries as one; their order does not matter."""
    parts = list(summaries)
    clients = [name for summary in parts for name in summary.clients]
    if len(set(clients)) < len(clients):
        twice = next(name for name in clients if clients.count(name) > 1)
        raise RequestError(f"client '{twice}' sent its summary twice; client names must differ.")
    names = sort_levels(clients)
    place = {name: i for i, name in enumerate(names)}
    rows = [np.array([place[name] for name in summary.clients]) for summary in parts]
    facts: dict[str, dict[str, np.ndarray]] = {}
    for summary, positions in zip(parts, rows):
        for column, column_facts in summary.facts.items():
            for fact, values in column_facts.items():
                facts.setdefault(column, {}).setdefault(fact, np.zeros(len(names)))[positions] = values
    return ColumnStatistics(
        tuple(names),
        {column: facts[column] for column in sorted(facts)},
        _add_counts([summary.levels for summary in parts]),
        _add_counts([summary.roles for summary in parts]),
    )


def _add_counts(parts: Sequence[dict[str, dict[str, LevelCount]]]) -> dict[str, dict[str, LevelCount]]:
    """Return counts, added up by value."""
    out: dict[str, dict[str, LevelCount]] = {}
    for part in parts:
        for column, levels in part.items():
            counts = out.setdefault(column, {})
            for value, level in levels.items():
                before = counts.get(value, LevelCount(0, level.client))
                counts[value] = LevelCount(before.rows + level.rows, min(before.client, level.client))
    return {column: dict(sorted(out[column].items())) for column in sorted(out)}


def sum_by_client(values: np.ndarray, code: np.ndarray, clients: int) -> np.ndarray:
    """Return each client's sum [clients] of values [N], where row r belongs to client code[r]."""
    return np.bincount(code, weights=values, minlength=clients)


def count_levels(
    codes: np.ndarray, values: Sequence[str], code: np.ndarray, clients: Sequence[str]
) -> dict[str, LevelCount]:
    """Return the number of rows with each of `values`; code -1 is a missing value."""
    present = codes >= 0
    owner, level = code[present], codes[present]
    ordered = sorted(clients)
    place = {name: i for i, name in enumerate(ordered)}
    rank = np.array([place[name] for name in clients])
    first = np.full(len(values), len(clients))
    np.minimum.at(first, level, rank[owner])
    count = np.bincount(level, minlength=len(values))
    return {values[k]: LevelCount(int(count[k]), ordered[int(first[k])]) for k in np.flatnonzero(count).tolist()}


def order_statistics(values: np.ndarray, code: np.ndarray, clients: int, exact: bool = False) -> dict[str, np.ndarray]:
    """Return order statistics by client: the number of finite values and of different ones, the extremes,
    the median, the interquartile range, and the mean distance from the median; 0 if there is no value.

    These are not cells of the table: extremes are rounded outwards and the median to steps of a tenth or less of
    the mean distance, except for values that are such short decimals anyway. If all values are equal, see `disguise`.
    If they do not leave the client, they may be `exact`.
    """
    present = np.isfinite(values)
    values, code = values[present], code[present]
    order = np.argsort(values)
    short = code[order].astype(np.uint16) if clients <= 1 << 16 else code[order]  # short integers are sorted by radix
    order = order[np.argsort(short, kind="stable")]
    value, owner = values[order], code[order]
    size = np.bincount(owner, minlength=clients)
    start = np.cumsum(size) - size
    has_values = size > 0
    new = np.ones(len(value), dtype=bool)
    new[1:] = (value[1:] != value[:-1]) | (owner[1:] != owner[:-1])

    def at(share: float) -> np.ndarray:
        """The value below which that share of a client's values lies (an observed one)."""
        out = np.zeros(clients)
        out[has_values] = value[start[has_values] + np.floor(share * (size[has_values] - 1)).astype(np.int64)]
        return out

    middle = at(0.5)
    with np.errstate(over="ignore"):
        off = sum_by_client(np.abs(value - middle[owner]), owner, clients) / np.maximum(size, 1)
        between = at(0.75) - at(0.25)
    top = np.finfo(float).max
    low, high, off = at(0.0), at(1.0), np.minimum(off, top)
    between = np.minimum(between, top)
    if not exact:
        low, high, middle, between = round_order_statistics(low, high, middle, between, steps(off))
    return {
        "finite": size.astype(float),
        "distinct": sum_by_client(new, owner, clients),
        "low": low,
        "high": high,
        "middle": middle,
        "between": between,
        "off": off,
    }


def round_order_statistics(
    low: np.ndarray, high: np.ndarray, middle: np.ndarray, between: np.ndarray, step: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return extremes, medians and interquartile ranges that are no cells of the table."""
    is_constant = low == high
    low, high, middle = (
        np.where(is_constant, values, to_steps(values, step, rounding))
        for values, rounding in ((low, np.floor), (high, np.ceil), (middle, np.rint))
    )
    for k in np.flatnonzero(is_constant & (low != 0)):
        low[k] = high[k] = middle[k] = disguise(low[k])
    return low, high, middle, to_steps(between, step, np.rint)


def steps(size: np.ndarray) -> np.ndarray:
    """Powers of ten between a hundredth and a tenth of these sizes; 1 where a size is 0."""
    return 10.0 ** (np.floor(np.log10(np.where(size > 0, size, 10.0))) - 1)


def to_steps(values: np.ndarray, step: np.ndarray, rounding: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Return values rounded to multiples of the step by `rounding` (floor, ceil, rint); multiples are unchanged."""
    with np.errstate(over="ignore", invalid="ignore"):
        count = values / step
        nearest = np.rint(count)
        is_on_step = np.abs(count - nearest) <= 1e-9 + 4 * np.finfo(float).eps * np.abs(count)
        moved = np.where(is_on_step, values, rounding(count) * step)
    return np.where(np.isfinite(moved), moved, values)


def disguise(value: float) -> float:
    """Return a value that all rows of a client share, to three digits, with a fingerprint of it in later digits:
    clients with equal values send equal numbers, others send different ones."""
    rounded = float(f"{value:.3g}")
    if rounded == value:
        return value
    return rounded * (1 + 1e-6 * (1 + zlib.crc32(struct.pack("<d", value))) / 2**32)
