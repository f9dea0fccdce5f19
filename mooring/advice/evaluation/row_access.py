"""The rows that advice uses."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from mooring.data.clients import Clients
from mooring.data.folds import (
    drop_copies,
    number_distinct_rows,
    row_groups,
    row_times,
    sort_by_time,
    usable_rows,
)


class UsableRows(NamedTuple):
    """The rows that advice uses: all but a table's own test rows."""

    rows: Any  # `ClientRows`; those in memory can be shaped and split
    groups: Tensor | None = None  # [N]: rows of one group stay in one fold
    times: Tensor | None = None  # [N]: each fold is predicted from earlier rows


def usable(clients: Clients) -> UsableRows:
    """Every row that appears k times, as all others do, is used once; equal rows are a group. With times, each client's
    rows are in their order."""
    rows, groups, times = usable_rows(clients), row_groups(clients), row_times(clients)
    if times is not None:
        return UsableRows(*sort_by_time(rows, groups, times))
    if groups is None:
        before = len(rows.y)
        rows, groups, _ = drop_copies(rows, number_distinct_rows(rows))
        if len(rows.y) < before:
            clients.notes.append(f"Every row appears {before // len(rows.y)} times; each is used once.")
    return UsableRows(rows, groups)
