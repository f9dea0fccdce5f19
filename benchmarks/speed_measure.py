"""Contests of Mooring with what a user would run instead: how their times become rows of a table."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

LARGE = 2000  # the side of the matrices whose product is the limit
Times = tuple[float, float]  # of the processor, of the clock


@dataclass
class Contest:
    """A row or several: Mooring's work, and each rival's with the ratio that is wanted (None: none was set)."""

    name: str
    ours: Callable[[], Times]
    rivals: dict[str, Callable[[], Times]]
    wanted: dict[str, float | None]
    operations: float = 0.0  # multiplications and additions of Mooring's work
    least_share: float | None = None  # of the limit
    at_most: bool = False  # whether ratios are wanted below the number: Mooring's own time over the other's
    warm: bool = False  # whether all of it ran before: else the first repetition does not count
    missing: dict[str, str] = field(default_factory=dict)  # rivals that cannot run, and why
    note: Callable[[], str] = lambda: ""


class Row(NamedTuple):
    """A line of the table."""

    work: str
    mine: Times  # medians, in milliseconds
    rival: str
    theirs: Times | None  # None: it cannot run
    ratios: list[float]
    of_limit: str
    wanted: float | None
    at_most: bool
    remark: str = ""  # instead of a rival's time

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def held(self) -> bool | None:
        if self.wanted is None or self.theirs is None:
            return None
        return self.ratio <= self.wanted if self.at_most else self.ratio >= self.wanted

    def line(self, before: str) -> str:
        """In Markdown; `before` is the work of the line above, which is not said again."""
        same = self.work == before
        mine = "" if same else "{:.0f} ({:.0f})".format(*self.mine)
        cells = ["" if same else self.work, mine, self.rival]
        if self.theirs is None:
            cells += [self.remark, "", "", "" if same else self.of_limit, ""]
        else:
            wanted = ""
            if self.wanted is not None:
                wanted = f"{'at most' if self.at_most else 'at least'} {self.wanted:g}: {verdict(bool(self.held))}"
            cells += [
                "{:.0f} ({:.0f})".format(*self.theirs),
                f"{self.ratio:.2f}",
                f"{min(self.ratios):.2f}-{max(self.ratios):.2f}",
                "" if same else self.of_limit,
                wanted,
            ]
        return "| " + " | ".join(cells) + " |"


HEAD = "| work | Mooring | compared with | its time | ratio | range | of the limit | wanted |\n" + "|---" * 8 + "|"


def table(rows: list[Row]) -> str:
    return "\n".join([HEAD, *(row.line(before.work) for before, row in zip([rows[0]._replace(work=""), *rows], rows))])


def timed(work: Callable[[], Any]) -> Times:
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    return time.process_time() - cpu, time.perf_counter() - wall


def medians(times: list[Times]) -> Times:
    """In milliseconds."""
    cpu, wall = (1000 * statistics.median(column) for column in zip(*times))
    return cpu, wall


def measure(contest: Contest, repeats: int) -> Iterator[Row]:
    """The contest's rows."""
    square = torch.randn(LARGE, LARGE)
    limits, ours = [], []
    theirs: dict[str, list[Times]] = {name: [] for name in contest.rivals}
    for repetition in range(contest.warm, repeats + 1):
        now = contest.ours()
        found = {name: rival() for name, rival in contest.rivals.items()}
        limit = timed(lambda: square @ square)[0]
        if repetition:  # the first warms up
            ours.append(now)
            limits.append(limit)
            for name, times in found.items():
                theirs[name].append(times)
    mine = medians(ours)
    share = contest.operations / (mine[0] / 1000) / (2 * LARGE**3 / statistics.median(limits))
    told = f"{100 * share:.0f}%" if contest.operations else ""
    if contest.least_share is not None:
        told += f" (at least {100 * contest.least_share:.0f}%: {verdict(share >= contest.least_share)})"
    for name, times in theirs.items():
        ratios = [(a[0] / b[0] if contest.at_most else b[0] / a[0]) for a, b in zip(ours, times)]
        wanted = contest.wanted.get(name)
        yield Row(contest.name, mine, name, medians(times), ratios, told, wanted, contest.at_most)
    remarks = contest.missing | ({"": contest.note()} if contest.note() else {})
    for name, why in remarks.items():
        yield Row(contest.name, mine, name, None, [], told, None, contest.at_most, why)


def verdict(good: bool) -> str:
    return "held" if good else "**missed**"
