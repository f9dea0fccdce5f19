"""Access to rows that stay with their clients: folds are assigned there, and all folds are fitted side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mooring.advice.candidates.families import Setting
from mooring.advice.evaluation.cross_fitting import FITTED_SETTINGS
from mooring.advice.evaluation.fold_fits import FoldedRows, FoldFits, FoldResult, NearbyPriors, fit_fold
from mooring.advice.evaluation.held_out_losses import LossesByModel
from mooring.advice.evaluation.row_access import RowAccess, UsableRows
from mooring.advice.remote.column_effects import average_remote_predictions
from mooring.advice.remote.columns import (
    RemoteShaper,
    count_rows,
    make_boosted_shaper,
    make_remote_shaper,
)
from mooring.core.errors import RequestError
from mooring.core.types import JsonObject
from mooring.data.clients import Clients
from mooring.data.folds import FoldSplit
from mooring.engines.prepare import Job
from mooring.partial_pooling.client_prior import Prior
from mooring.shapes.columns import BOOSTED
from mooring.tasks.extra_columns import boosting_of

NO_BOOSTED_SCORE = (
    "Rows stay with their clients, so splines and products of columns were tried, a boosted score was not."
)
MAX_TREES = 40  # every level of a tree is a message
HELD, TRAIN = "held", "without"  # parts of a client's rows: (HELD, fold, folds) and (TRAIN, fold, folds)


class RemoteAccess(RowAccess):
    reads_rows = False
    average_predictions = staticmethod(average_remote_predictions)

    def __init__(self, usable: object, writes_models: bool, in_time_order: bool, report: Callable[[str], None] = print):
        self.rows, self.writes_models, self.in_time_order, self.report = usable, writes_models, in_time_order, report

    def usable(self, clients: Clients) -> UsableRows:
        return UsableRows(self.rows)

    def is_in_time_order(self, usable: UsableRows) -> bool:
        return self.in_time_order

    def split(self, usable: UsableRows, keys: np.ndarray, seed: int, count: int) -> list[FoldSplit]:
        """The folds as the clients assign their rows; the first message asks for their sizes."""
        rows: Any = usable.rows
        parts = [(name, k, count) for k in range(count) for name in (TRAIN, HELD)]
        sizes = rows.map_independent(lambda part: [count_rows(None, rows.at(part, rows.size))], parts)
        remote = [rows.at(part, size) for part, (size,) in zip(parts, sizes)]
        folds = [FoldSplit(train, held, held.size[:0]) for train, held in zip(remote[::2], remote[1::2])]
        return [fold for fold in folds if int(fold.held.size.sum())]

    def make_shaper(
        self, job: Job, usable: UsableRows, wanted: str, prior: Prior | None, ridge: float
    ) -> RemoteShaper | None:
        """Splines and products, from sums that the clients send."""
        boosting = boosting_of(job.task) if wanted == BOOSTED else None
        if boosting is not None and prior is not None:
            if boosting.classes > 1:
                raise RequestError("--shape boosted across machines is for targets that are numbers or two classes.")
            boosting = replace(boosting, max_trees=MAX_TREES, patience=6, depth=3, rate=0.2, row_share=1.0, bins=32)
            self.report(
                f"a boosted score takes up to {boosting.depth * (boosting.max_trees + 1) + 10} messages to each client "
                'beside the others; shape = "spline" takes about 5'
            )
            own = prior, ridge, boosting, self.in_time_order
            return make_boosted_shaper(job.task, usable.rows, job.clients.keys, *own)
        if wanted == "auto":
            job.clients.notes.append(NO_BOOSTED_SCORE)
        numeric = job.clients.schema.numeric_places
        if prior is None or not numeric:
            return None
        return make_remote_shaper(job.task, usable.rows, job.clients.keys, numeric, prior, ridge)

    @staticmethod
    def fit_folds(
        data: FoldedRows, settings: list[Setting], choosing: int, near: NearbyPriors, *stored: object
    ) -> FoldFits:
        """All settings in all folds side by side, without stored ones; losses are sums that clients send.

        Steps of Newton's method are messages: the models are stored for `fit_triple`.
        """

        def fit(k: int) -> list[tuple[FoldResult, Tensor]]:
            tried, rows = settings if k < choosing else [], data.parts[k].train
            fold, fits = fit_fold(data, data.parts[k], tried, near, lambda models: models)
            rows.cache[FITTED_SETTINGS] = {models.setting: models for models in fits}
            return [(fold, torch.stack([models.v for models in fits], 1) if fits else torch.empty(0))]

        folds = [pair for (pair,) in data.rows.map_independent(fit, range(len(data.parts)))]
        results, models = zip(*folds)
        losses = LossesByModel(data.task, [part.held for part in data.parts[:choosing]], models[:choosing])
        return FoldFits(list(results), list(range(len(settings))), losses)

    def test_measures(self, job: Job, models: Mapping[str, Tensor]) -> JsonObject:
        """None: each client has its own rows, and their measures."""
        return {}
