"""Nonlinear columns: splines, products and a boosted score beside the linear columns, made inside every fold.

A model stays a vector: all candidates live on the columns [linear, splines, products, boosted score], and a candidate
of one set of columns has zeros elsewhere.

    linear    the columns of the table
    spline    and natural splines of the numeric ones that explain residuals
    product   and products of a few pairs that do
    boosted   linear columns and the boosted score
    both      linear columns, splines and the boosted score
    score     the boosted score only, of trees without an offset

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
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mooring.core.cohort import Rows
from mooring.core.task import Task, layer_mask, with_columns
from mooring.data.folds import FoldSplit, assign_folds
from mooring.shapes.boosting import Boosting, average_loss, has_boosting, out_of_fold_scores
from mooring.shapes.columns import BOOSTED, LINEAR, PRODUCT, SPLINE, ShapedColumns
from mooring.shapes.fitting import fit_columns, limit_splines
from mooring.tasks.extra_columns import boosting_of

BOTH, SCORE = "both", "score"
SETS_WITH = {SPLINE: {SPLINE, PRODUCT, BOTH}, PRODUCT: {PRODUCT}, BOOSTED: {BOOSTED, BOTH, SCORE}}  # an extra column
USED = "used"  # what is left of all columns when a run is written
EXTRA_KINDS = (SPLINE, PRODUCT, BOOSTED)  # what `ShapedColumns.groups` calls extra columns
Offset = Callable[[Rows, np.ndarray], np.ndarray]  # (rows, fold [N]) -> [N, K], scores of models without each fold
MIN_ROWS_FOR_AUTO = 100  # below which "auto" keeps linear columns
INNER_FOLDS = 3  # of training rows, whose scores come from the others
MAX_BOOSTED_NUMBERS = 20_000_000  # rows times columns times folds up to which "auto" fits trees


class ColumnSets:
    """Named sets of columns, and models on them as models on all columns."""

    def __init__(self, task: Task, shape: ShapedColumns):
        self.task, self.shape = task, shape
        base = list(range(shape.inputs))
        extra = [(shape.inputs + k, column.kind) for k, column in enumerate(shape.groups)]
        splines, pairs, scores = ([k for k, kind in extra if kind == wanted] for wanted in EXTRA_KINDS)
        self.columns = {LINEAR: base}
        if splines:
            self.columns[SPLINE] = base + splines
        if pairs:
            self.columns[PRODUCT] = base + splines + pairs
        if scores:
            self.columns[BOOSTED] = base + scores
        if splines and scores:
            self.columns[BOTH] = base + splines + scores
        if scores and shape.is_score_alone:
            self.columns[SCORE] = scores

    def names(self) -> list[str]:
        return list(self.columns)

    def task_on(self, name: str) -> Any:
        """The task with these columns only."""
        return with_columns(self.task, len(self.columns[name]))

    def rows_on(self, rows: Any, name: str) -> Any:
        """The rows with these columns only; cached with the rows."""
        key = ("columns", name)
        if key not in rows.cache:
            columns = self.columns[name]
            every = len(columns) == rows.x.shape[-1]
            rows.cache[key] = rows if every else rows.select_columns(columns)
        return rows.cache[key]

    def place(self, name: str) -> Tensor:
        """[d of the set]: where its coefficients lie among all."""
        small, large = self.task_on(name), self.task
        scores = _scores(large)
        slopes = torch.tensor(self.columns[name])[:, None] * scores + torch.arange(scores)
        intercepts = torch.arange(large.dim - (small.dim - slopes.numel()), large.dim)
        return torch.cat([slopes.flatten(), intercepts])

    def embed(self, name: str, v: Tensor) -> Tensor:
        """Models [..., d of the set] as models [..., d] on all columns."""
        out = v.new_zeros(*v.shape[:-1], self.task.dim)
        out[..., self.place(name)] = v
        return out

    def extract(self, name: str, v: Tensor) -> Tensor:
        """The coefficients of the set from models [..., d] on all columns."""
        return v[..., self.place(name)]


class TaskAndRows(NamedTuple):
    task: Any
    rows: Any


def on_columns(task: Task, rows: object, sets: ColumnSets | None, name: str) -> TaskAndRows:
    """Task and rows with a set of columns only; as they are without sets."""
    if sets is None:
        return TaskAndRows(task, rows)
    return TaskAndRows(sets.task_on(name), sets.rows_on(rows, name))


def _scores(task: Any) -> int:
    """Linear scores per row."""
    return max(int(layer_mask(task.layout, ("intercept",)).sum()), 1) if task.intercept else task.dim // task.features


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


def add_columns(rows: Rows, shape: ShapedColumns, scores: Tensor | None = None) -> Rows:
    """The rows with their extra columns; `scores` replace those of the booster."""
    return Rows(shape(rows.x, scores), rows.y, rows.start, rows.size)


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
    is_alone = boosted and booster is None and (in_time_order or scores is not None)
    if is_alone:
        target = rows.y.double().numpy()
        alone = out_of_fold_scores(rows.x.double().numpy(), target, fold, boosting)
        limit = np.inf if in_time_order or scores is None else average_loss(target, scores, boosting)
        booster = alone.booster if len(alone.booster) and alone.loss.min() <= limit else None
    if not splines and not columns.products and booster is None:
        return None
    trees = None if booster is None else boosting
    return Shaper(splines, columns.products, trees, offset, keys, seed, is_alone)


def prune_columns(shape: ShapedColumns, used: set[str]) -> ShapedColumns | None:
    """The extra columns that models on these sets of columns need; None if they need none."""
    has = {kind: bool(used & sets) for kind, sets in SETS_WITH.items()}
    keep = [k for k, column in enumerate(shape.groups) if has[column.kind]]
    if not keep:
        return None
    return replace(
        shape,
        splines=shape.splines if has[SPLINE] else (),
        products=shape.products if has[PRODUCT] else (),
        booster=shape.booster if has[BOOSTED] else None,
        centers=tuple(shape.centers[k] for k in keep),
        scales=tuple(shape.scales[k] for k in keep),
    )


def used_columns(shape: ShapedColumns, pruned: ShapedColumns | None) -> list[int]:
    """The places of the columns of a pruned shape among those of the full one."""
    extra = () if pruned is None else pruned.groups
    return [*range(shape.inputs), *(shape.inputs + k for k, column in enumerate(shape.groups) if column in extra)]
