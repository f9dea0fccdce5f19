"""Sets of columns, linear ones and others: a model on one set is a model on all columns, with zeros elsewhere.

linear    the columns of the table
spline    and natural splines of the numeric ones that explain residuals
product   and products of a few pairs that do
boosted   linear columns and the boosted score
both      linear columns, splines and the boosted score
score     the boosted score only, of trees without an offset
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mooring.core.cohort import Rows
from mooring.core.task import Task, layer_mask, with_columns
from mooring.shapes.columns import BOOSTED, LINEAR, PRODUCT, SPLINE, ShapedColumns

BOTH, SCORE = "both", "score"
SETS_WITH = {SPLINE: {SPLINE, PRODUCT, BOTH}, PRODUCT: {PRODUCT}, BOOSTED: {BOOSTED, BOTH, SCORE}}  # an extra column
USED = "used"  # what is left of all columns when a run is written
EXTRA_KINDS = (SPLINE, PRODUCT, BOOSTED)  # what `ShapedColumns.groups` calls extra columns


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
        scores = count_scores(large)
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


def count_scores(task: Any) -> int:
    """Linear scores per row."""
    return max(int(layer_mask(task.layout, ("intercept",)).sum()), 1) if task.intercept else task.dim // task.features


def add_columns(rows: Rows, shape: ShapedColumns, scores: Tensor | None = None) -> Rows:
    """The rows with their extra columns; `scores` replace those of the booster."""
    return Rows(shape(rows.x, scores), rows.y, rows.start, rows.size)


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
