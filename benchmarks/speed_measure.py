"""Contests of Mooring with what a user would run instead, and the rows of the table of their times."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

LARGE = 2000  # the side of the matrices whose product is the limit
Times = tuple[float, float]  # CPU seconds, elapsed seconds


@dataclass
class Contest:
    """One or more rows: Mooring's work, and each rival's with the target ratio (None: no target)."""

    name: str
    ours: Callable[[], Times]
    rivals: dict[str, Callable[[], Times]]
    targets: dict[str, float | None]
    operations: float = 0.0  # multiplications and additions of Mooring's work
    least_share: float | None = None  # of the limit
    at_most: bool = False  # whether targets are upper bounds: Mooring's own time over the rival's
    warm: bool = False  # whether all of it ran before; otherwise the first repetition does not count
    missing: dict[str, str] = field(default_factory=dict)  # rivals that cannot run, and why
    note: Callable[[], str] = lambda: ""


class Row(NamedTuple):
    """A line of the table."""

    work: str
    own_times: Times  # medians, in milliseconds
    rival: str
    rival_times: Times | None  # None: it cannot run
    ratios: list[float]
    of_limit: str
    target: float | None
    at_most: bool
    remark: str = ""  # instead of a rival's time

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def is_held(self) -> bool | None:
        if self.target is None or self.rival_times is None:
            return None
        return self.ratio <= self.target if self.at_most else self.ratio >= self.target

    def line(self, before: str) -> str:
        """Return the row in Markdown; `before` is the work of the line above, which is not repeated."""
        is_repeated = self.work == before
        own_text = "" if is_repeated else "{:.0f} ({:.0f})".format(*self.own_times)
        cells = ["" if is_repeated else self.work, own_text, self.rival]
        if self.rival_times is None:
            cells += [self.remark, "", "", "" if is_repeated else self.of_limit, ""]
        else:
            target_text = ""
            if self.target is not None:
                target_text = (
                    f"{'at most' if self.at_most else 'at least'} {self.target:g}: {format_verdict(bool(self.is_held))}"
                )
            cells += [
                "{:.0f} ({:.0f})".format(*self.rival_times),
                f"{self.ratio:.2f}",
                f"{min(self.ratios):.2f}-{max(self.ratios):.2f}",
                "" if is_repeated else self.of_limit,
                target_text,
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
    """Return the medians in milliseconds."""
    cpu, wall = (1000 * statistics.median(column) for column in zip(*times))
    return cpu, wall


def measure(contest: Contest, repeats: int) -> Iterator[Row]:
    """Yield the contest's rows."""
    square = torch.randn(LARGE, LARGE)
    limits, ours = [], []
    rival_times: dict[str, list[Times]] = {name: [] for name in contest.rivals}
    for repetition in range(contest.warm, repeats + 1):
        own_time = contest.ours()
        times_by_rival = {name: rival() for name, rival in contest.rivals.items()}
        limit = timed(lambda: square @ square)[0]
        if repetition:  # the first warms up
            ours.append(own_time)
            limits.append(limit)
            for name, times in times_by_rival.items():
                rival_times[name].append(times)
    own_medians = medians(ours)
    share = contest.operations / (own_medians[0] / 1000) / (2 * LARGE**3 / statistics.median(limits))
    limit_text = f"{100 * share:.0f}%" if contest.operations else ""
    if contest.least_share is not None:
        limit_text += f" (at least {100 * contest.least_share:.0f}%: {format_verdict(share >= contest.least_share)})"
    for name, times in rival_times.items():
        ratios = [(a[0] / b[0] if contest.at_most else b[0] / a[0]) for a, b in zip(ours, times)]
        target = contest.targets.get(name)
        yield Row(contest.name, own_medians, name, medians(times), ratios, limit_text, target, contest.at_most)
    remarks = contest.missing | ({"": contest.note()} if contest.note() else {})
    for name, remark in remarks.items():
        yield Row(contest.name, own_medians, name, None, [], limit_text, None, contest.at_most, remark)


def format_verdict(good: bool) -> str:
    return "held" if good else "**missed**"
