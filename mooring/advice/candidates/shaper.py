"""How nonlinear columns are made: splines, products and a boosted score, from the training rows of every fold.

Which splines and products are tried is decided once, by a strict test on all rows. Trees are fitted inside every fold:
they add to the out-of-fold scores of personal linear models (the offset), so that they learn what these miss; the rows
of a fold get scores of trees that have not seen them, and training rows get scores of trees that have not seen their
inner fold. Later rows lie outside the range of earlier ones, where linear models continue a trend and trees stay at its
last level: with a time column, trees have no offset, and the score may be used without linear columns. So it is where
no tree improves the offset, but trees alone predict as well: a few large residuals mislead trees on residuals.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from mooring.core.cohort import Rows
from mooring.core.task import Task
from mooring.data.folds import FoldSplit, assign_folds
from mooring.shapes.boosting import Boosting, average_loss, has_boosting, out_of_fold_scores
from mooring.shapes.column_sets import add_columns
from mooring.shapes.columns import BOOSTED, ShapedColumns
from mooring.shapes.fitting import fit_columns, limit_splines
from mooring.tasks.extra_columns import boosting_of

Offset = Callable[[Rows, np.ndarray], np.ndarray]  # (rows, fold [N]) -> [N, K], scores of models without each fold
MIN_ROWS_FOR_AUTO = 50  # per linear score, below which "auto" keeps linear columns
INNER_FOLDS = 3  # of training rows, whose scores come from the others
MAX_BOOSTED_NUMBERS = 20_000_000  # rows times columns up to which "auto" fits trees,
MAX_NUMBERS_WITHOUT_OFFSET = 1_000_000  # and again without the offset: of so many rows a few residuals mislead nothing


@dataclass(frozen=True, eq=False)
class Shaper:
    """How extra columns are made from training rows."""

    splines: tuple[tuple[int, tuple[float, ...]], ...]
    products: tuple[tuple[int, int], ...]
    boosting: Boosting | None
    offset: Offset | None
    keys: np.ndarray
    seed: int
    is_score_alone: bool = False  # trees without the offset

    def fit(self, rows: Rows, units: Tensor | None = None) -> tuple[ShapedColumns, Rows]:
        """The extra columns of these rows, and the rows with them; their boosted scores are out of fold."""
        shape = ShapedColumns(rows.x.shape[1], self.splines, self.products, is_score_alone=self.is_score_alone)
        scores = None
        if self.boosting is not None:
            fold = assign_folds(rows, self.keys, INNER_FOLDS, self.seed + 1, units).numpy()
            offset = None if self.offset is None or self.is_score_alone else self.offset(rows, fold)
            out_of_fold = out_of_fold_scores(
                rows.x.double().numpy(), rows.y.double().numpy(), fold, self.boosting, offset=offset
            )
            scores = torch.from_numpy(out_of_fold.scores)
            shape = replace(shape, booster=out_of_fold.booster)
        shape = shape.standardize(shape.sum_extra(rows.x.double(), scores))
        return shape, add_columns(rows, shape, scores)

    def split(self, part: FoldSplit, groups: Tensor | None = None) -> FoldSplit:
        """A fold with extra columns made from its training rows."""
        own_groups = None if groups is None else groups[_others(part, len(groups))]
        shape, train = self.fit(part.train, own_groups)
        return FoldSplit(train, add_columns(part.held, shape), part.place)


def _others(part: FoldSplit, total: int) -> Tensor:
    """The places of the rows that a fold trains on; with forward chaining it need not train on all others."""
    keep = torch.ones(total, dtype=torch.bool)
    keep[part.place] = False
    return torch.nonzero(keep)[:, 0][: len(part.train.y)]


def make_shaper(
    task: Task,
    rows: Rows,
    keys: np.ndarray,
    wanted: str,
    numeric: Sequence[int] | None,
    offset: Offset | None,
    seed: int,
    groups: Tensor | None,
    in_time_order: bool = False,
) -> Shaper | None:
    """The shaper for `wanted` ("spline", "boosted" or "auto"); None where no extra column is worth trying.

    Trees add to the scores of `offset`. In time order they predict by themselves, and so they do where they do not
    improve those scores, but predict held-out rows at least as well.
    """
    boosting = boosting_of(task)
    if boosting is None:
        return None
    small = rows.x.numel() <= MAX_BOOSTED_NUMBERS
    boosted = has_boosting() and (wanted == BOOSTED or (wanted == "auto" and small))
    fold = assign_folds(rows, keys, INNER_FOLDS, seed + 2, groups).numpy()
    scores = None if offset is None else offset(rows, fold)
    is_spline = wanted != BOOSTED
    with_offset = boosted and not in_time_order
    columns = fit_columns(rows.x, rows.y, fold, boosting, scores, numeric, is_spline, is_spline, with_offset).columns
    splines, booster = limit_splines(columns.splines), columns.booster
    without_offset = in_time_order or (scores is not None and rows.x.numel() <= MAX_NUMBERS_WITHOUT_OFFSET)
    without_offset = without_offset and boosted and booster is None
    if without_offset:
        target = rows.y.double().numpy()
        held_out = out_of_fold_scores(rows.x.double().numpy(), target, fold, boosting)
        limit = np.inf if in_time_order or scores is None else average_loss(target, scores, boosting)
        booster = held_out.booster if len(held_out.booster) and held_out.loss.min() <= limit else None
    if not splines and not columns.products and booster is None:
        return None
    trees = None if booster is None else boosting
    return Shaper(splines, columns.products, trees, offset, keys, seed, without_offset)
