"""What depends on where the clients' rows are: here they are in memory; with their clients, `remote/access.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from mooring.advice.candidates.families import make_offset
from mooring.advice.candidates.shaper import Shaper, make_shaper
from mooring.advice.evaluation.fold_fits import fit_folds_in_memory
from mooring.advice.reporting.column_effects import average_predictions
from mooring.core.types import JsonObject
from mooring.data.clients import Clients
from mooring.data.folds import (
    FoldSplit,
    drop_copies,
    iterate_folds,
    number_distinct_rows,
    row_groups,
    row_times,
    sort_by_time,
    usable_rows,
)
from mooring.engines.metrics import compute_metrics
from mooring.engines.prepare import Job
from mooring.partial_pooling.client_prior import Prior


class UsableRows(NamedTuple):
    """The rows that advice uses: all but a table's own test rows."""

    rows: Any  # `ClientRows`; those in memory can be shaped and split
    groups: Tensor | None = None  # [N]: rows of one group stay in one fold
    times: Tensor | None = None  # [N]: each fold is predicted from earlier rows


class RowAccess:
    """Rows in memory."""

    writes_models = True  # whether the run directory contains the clients' models
    reads_rows = True  # whether rows can be read one by one, to add columns or to predict them
    fit_folds = staticmethod(fit_folds_in_memory)  # the candidates fitted without each fold, and their losses
    average_predictions = staticmethod(average_predictions)  # of the global model, by values of a column

    def usable(self, clients: Clients) -> UsableRows:
        """Every row that appears k times, as all others do, is used once; equal rows are a group. With times, each
        client's rows are in their order."""
        rows, groups, times = usable_rows(clients), row_groups(clients), row_times(clients)
        if times is not None:
            return UsableRows(*sort_by_time(rows, groups, times))
        if groups is None:
            before = len(rows.y)
            rows, groups, _ = drop_copies(rows, number_distinct_rows(rows))
            if len(rows.y) < before:
                clients.notes.append(f"Every row appears {before // len(rows.y)} times; each is used once.")
        return UsableRows(rows, groups)

    def is_in_time_order(self, usable: UsableRows) -> bool:
        """Whether folds are predicted from earlier rows."""
        return usable.times is not None

    def split(self, usable: UsableRows, keys: np.ndarray, seed: int, count: int) -> list[FoldSplit]:
        """The rows in folds."""
        return list(iterate_folds(usable.rows, keys, seed, count, usable.groups, usable.times))

    def make_shaper(
        self, job: Job, usable: UsableRows, wanted: str, prior: Prior | None, ridge: float
    ) -> Shaper | None:
        """How extra columns are made; None where none is worth trying."""
        rows, clients = usable.rows.compact(), job.clients
        offset = None if prior is None else make_offset(job.task, prior, ridge)
        split = job.run.training.seed, usable.groups, self.is_in_time_order(usable)
        return make_shaper(job.task, rows, clients.keys, wanted, clients.schema.numeric_places, offset, *split)

    def test_measures(self, job: Job, models: Mapping[str, Tensor]) -> JsonObject:
        """Well-known measures of models on the clients' test rows."""
        return {name: compute_metrics(job.task, job.clients, w).overall for name, w in models.items()}
