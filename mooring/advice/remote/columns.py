"""Splines and products of clients that keep their rows, from counts and sums that they send.

The same columns as in one process (`shapes/fitting.py`), because everything there follows from sums:

    count_bins               rows in each bin of a fixed grid, by numeric column: knots at quantiles of all rows
    sum_candidate_moments    moments of columns, candidates and residuals of personal linear models: which splines and
                             products pass the test
    sum_columns              sums of columns and of their squares: centers and scales, without each fold
    sum_gradients            histograms of derivatives of the loss, and held-out losses: trees that add to linear
                             models (`shapes/histogram_trees.py`)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mooring.advice.candidates.shaper import INNER_FOLDS, Shaper
from mooring.core.client_functions import rows_function
from mooring.core.cohort import Rows
from mooring.core.task import Task, with_columns
from mooring.core.types import JsonObject
from mooring.data.folds import FoldSplit
from mooring.partial_pooling.client_prior import Prior
from mooring.partial_pooling.lambda_path import solve_path
from mooring.remote.remote_rows import RemoteRows
from mooring.shapes.boosting import OBJECTIVES, Boosting, differentiate_loss, measure_loss
from mooring.shapes.columns import ColumnSums, ShapedColumns, choose_splines
from mooring.shapes.fitting import limit_splines
from mooring.shapes.histogram_trees import (
    GrowingTrees,
    Thresholds,
    choose_thresholds,
    find_bins,
    find_nodes,
    grow_boosters,
    score_trees,
    second_derivative,
    sum_histogram,
)
from mooring.shapes.quantiles import BINS, count_values
from mooring.shapes.screening import (
    CandidateSums,
    Pairs,
    list_pairs,
    multiply_columns,
    screen_products,
    screen_splines,
    sum_candidates,
)
from mooring.shapes.trees import Trees
from mooring.tasks.extra_columns import boosting_of
from mooring.tasks.linear_score import score_linear
from mooring.tasks.proximal import is_dense

HELD_INSIDE, TRAIN_INSIDE = "held inside", "without inside"  # (name, fold, folds, salt of the seed, *part): inner folds
INNER_PARTS = (TRAIN_INSIDE, HELD_INSIDE)
OBJECTIVE_NAMES = list(OBJECTIVES)
STACKING_SALT = 1  # of the inner folds that boosted scores are made with
SCREENING_SALT = 2  # of the inner folds that residuals are made with
Splines = tuple[tuple[int, tuple[float, ...]], ...]


class CandidateMoments(NamedTuple):
    """What `CandidateSums` of splines and of products are made of: z are columns, splines and 1, q products, r the
    residuals of each of K scores."""

    rows: Tensor  # [C]
    zz: Tensor  # [C, c + 1, c + 1]
    zr: Tensor  # [C, K, c + 1]
    rr: Tensor  # [C, K]
    zq: Tensor  # [C, c + 1, P]
    qq: Tensor  # [C, P]
    qr: Tensor  # [C, K, P]


class GradientSums(NamedTuple):
    histogram: Tensor  # [C, boosters - 1, nodes, bins, 2], float32: of those that train on the rows
    loss: Tensor  # [C], held-out


class TotalsAndSquares(NamedTuple):
    total: Tensor  # [C, f]
    squares: Tensor  # [C, f]


@dataclass(frozen=True, eq=False)
class RemoteShaper(Shaper):
    """How extra columns of remote rows are made."""

    task: Any = None
    prior: Prior | None = None
    ridge: float = 0.0
    thresholds: Thresholds | None = None

    def fit(self, rows: RemoteRows, units: Tensor | None = None) -> tuple[ShapedColumns, RemoteRows]:  # type: ignore[override]
        """The extra columns of these rows, and the rows with them; their boosted scores are out of fold."""
        shape = ShapedColumns(rows.x.shape[1], self.splines, self.products, is_score_alone=self.is_score_alone)
        without: list[Trees] | None = None
        if self.boosting is not None:
            *without, booster = self.fit_boosters(rows)
            shape = replace(shape, booster=booster)
        columns = StackedColumns(shape, without) if without else shape
        sums = sum_columns(None, rows.map_columns(columns))
        total, squares = (part.sum(0)[shape.inputs :].numpy() for part in sums)
        shape = shape.standardize(ColumnSums(int(rows.size.sum()), total, squares))
        return shape, rows.map_columns(StackedColumns(shape, without) if without else shape)

    def fit_boosters(self, rows: RemoteRows) -> list[Trees]:
        """The boosters without each inner fold, and that of all rows; they add to linear scores without the fold, or to
        0 where the score is to predict by itself."""
        assert self.boosting is not None and self.thresholds is not None and self.prior is not None
        parts, prior = split_inside(rows, STACKING_SALT), self.prior
        thresholds = {name: torch.from_numpy(part) for name, part in self.thresholds._asdict().items()}
        models, total = [torch.zeros(len(rows), self.task.dim).double()] * INNER_FOLDS, int(rows.size.sum())
        if not self.is_score_alone:
            fits = rows.map_independent(
                lambda k: [fit_offset(self.task, parts[2 * k], prior, self.ridge)], range(INNER_FOLDS)
            )
            models = [v for (v,) in fits]
        settings = torch.tensor([OBJECTIVE_NAMES.index(self.boosting.loss), 2**self.boosting.depth])

        def ask(trees: GrowingTrees, level: int) -> tuple[np.ndarray, float]:
            sent = {name: torch.from_numpy(part) for name, part in trees._asdict().items()} | thresholds

            def ask_fold(k: int) -> list[GradientSums]:
                shared = sent | {"settings": settings, "level": torch.tensor(level), "fold": torch.tensor(k)}
                return [sum_gradients(self.task, parts[2 * k + 1], models[k], **shared)]

            found = [sums for (sums,) in rows.map_independent(ask_fold, range(INNER_FOLDS))]
            histogram = np.zeros((INNER_FOLDS + 1, *found[0].histogram.shape[2:]))
            for k, sums in enumerate(found):
                histogram[[b for b in range(INNER_FOLDS + 1) if b != k]] += sums.histogram.double().sum(0).numpy()
            return histogram, float(sum(sums.loss.sum() for sums in found)) / total

        return grow_boosters(ask, INNER_FOLDS + 1, self.thresholds, rows.x.shape[1], self.boosting)[0]

    def split(self, part: FoldSplit, groups: Tensor | None = None) -> FoldSplit:
        """A fold with extra columns, centered and scaled by its training rows."""
        train, held = part.train, part.held
        assert isinstance(train, RemoteRows) and isinstance(held, RemoteRows)
        shape, shaped = self.fit(train)
        return FoldSplit(shaped, held.map_columns(shape), part.place)  # type: ignore[arg-type]


class StackedColumns(NamedTuple):
    """Columns whose boosted scores of each row are those of trees that have not seen its inner fold."""

    columns: ShapedColumns
    without: Sequence[Trees]  # each inner fold

    @property
    def inputs(self) -> int:
        return self.columns.inputs

    @property
    def width(self) -> int:
        return self.columns.width

    def as_json(self) -> JsonObject:
        return {"columns": self.columns.as_json(), "without": [trees.as_json() for trees in self.without]}


def make_boosted_shaper(
    task: Task, rows: RemoteRows, keys: np.ndarray, prior: Prior, ridge: float, boosting: Boosting, in_time_order: bool
) -> RemoteShaper:
    """The shaper of a boosted score, with thresholds at quantiles of all clients' rows."""
    counts = count_bins(None, rows, columns=torch.arange(rows.x.shape[1])).sum(0).numpy()
    thresholds = choose_thresholds(counts, boosting.bins)
    return RemoteShaper((), (), boosting, None, keys, 0, in_time_order, task, prior, ridge, thresholds)


def split_inside(rows: RemoteRows, salt: int) -> list[RemoteRows]:
    """Rows without each inner fold, and of it, in turn."""
    inner = [(name, k, INNER_FOLDS, salt, *rows.part) for k in range(INNER_FOLDS) for name in INNER_PARTS]
    sizes = rows.map_independent(lambda part: [count_rows(None, rows.at(part, rows.size))], inner)
    return [rows.at(part, size) for part, (size,) in zip(inner, sizes)]


def fit_offset(task: Task, rows: RemoteRows, prior: Prior, ridge: float) -> Tensor:
    """[m, d]: personal linear models, pulled as the prior proposes with the clients' typical noise."""
    pull = prior._replace(noise=prior.noise.mean().expand(len(rows))).shape(rows.size)
    return next(solve_path(task, rows, rows.size.double(), [1.0], pull, ridge, prior.start)).v


def make_remote_shaper(
    task: Task, rows: RemoteRows, keys: np.ndarray, numeric: Sequence[int], prior: Prior, ridge: float
) -> RemoteShaper | None:
    """The shaper with the splines and products that explain residuals; None where none does."""
    steps: list[Callable[[], Any]] = [
        lambda: count_bins(None, rows, columns=torch.tensor(numeric, dtype=torch.int64)),
        lambda: split_inside(rows, SCREENING_SALT),
    ]
    (counted,), (parts,) = rows.map_independent(lambda step: [step()], steps)
    counts = np.zeros((rows.x.shape[1], BINS), dtype=np.int64)
    counts[list(numeric)] = counted.sum(0).numpy()
    splines = choose_splines(counts, numeric)
    pairs = list_pairs([i for i in numeric if (counts[i] > 2).sum() > 1])
    if not splines and not pairs:
        return None
    shape, width = ShapedColumns(rows.x.shape[1], splines), rows.x.shape[1]

    def screen(k: int) -> list[CandidateMoments]:
        train, held = parts[2 * k], parts[2 * k + 1]
        models = fit_offset(task, train, prior, ridge)
        settings = {"pairs": torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2), "inputs": torch.tensor(width)}
        with_splines = held.map_columns(shape) if splines else held
        return [sum_candidate_moments(task, with_splines, models, **settings)]

    found = [sums for (sums,) in rows.map_independent(screen, range(INNER_FOLDS))]
    total = CandidateMoments(*(sum(part.double().sum(0) for part in parts) for parts in zip(*found)))  # type: ignore[arg-type]
    bends, products = screen_candidates(total, splines, pairs, width)
    bends = limit_splines(bends)
    extra = ShapedColumns(width, bends, products).extra
    if not extra or not is_dense(with_columns(task, width + extra)):
        return None
    return RemoteShaper(bends, products, None, None, keys, seed=0)


def screen_candidates(
    total: CandidateMoments, splines: Splines, pairs: Pairs, inputs: int
) -> tuple[Splines, tuple[tuple[int, int], ...]]:
    """The splines, and then the products, that explain residuals of at least one score."""
    rows, zz, zr, rr, zq, qq, qr = (part.numpy() for part in total)
    last = len(zz) - 1
    base, extra = [*range(inputs), last], list(range(inputs, last))
    passed = set()
    for k in range(len(zr)):
        cross = zz[np.ix_(base, base)], zr[k][base], float(rr[k]), zz[np.ix_(base, extra)]
        passed |= set(screen_splines(CandidateSums(float(rows), *cross, zz.diagonal()[extra], zr[k][extra]), splines))
    bends = tuple(spline for spline in splines if spline in passed)
    ends = np.cumsum([0, *(len(knots) - 2 for _, knots in splines)]) + inputs
    used = [k for j, spline in enumerate(splines) if spline in passed for k in range(ends[j], ends[j + 1])]
    keep = [*range(inputs), *used, last]
    products: dict[tuple[int, int], None] = {}
    for k in range(len(zr)):
        sums = CandidateSums(float(rows), zz[np.ix_(keep, keep)], zr[k][keep], float(rr[k]), zq[keep], qq, qr[k])
        products |= dict.fromkeys(screen_products(sums, pairs))
    return bends, tuple(products)


@rows_function
def count_rows(task: Task, rows: Rows) -> Tensor:
    """[C]: how many rows there are."""
    return rows.size


@rows_function
def count_bins(task: Task, rows: Rows, *, columns: Tensor) -> Tensor:
    """[C, columns, BINS]: how many rows have a value of a column in each bin of the grid."""
    counts = [count_values(rows.of(c)[0][:, columns].numpy()) for c in range(len(rows))]
    return torch.from_numpy(np.stack(counts).astype(np.int32))


@rows_function
def sum_columns(task: Task, rows: Rows) -> TotalsAndSquares:
    """[C, f] each: sums of the columns, and of their squares."""
    x = [rows.of(c)[0].double() for c in range(len(rows))]
    return TotalsAndSquares(torch.stack([part.sum(0) for part in x]), torch.stack([(part**2).sum(0) for part in x]))


@rows_function
def sum_gradients(
    task: Any,
    rows: Rows,
    models: Tensor,
    *,
    feature: Tensor,
    threshold: Tensor,
    leaf: Tensor,
    values: Tensor,
    start: Tensor,
    settings: Tensor,
    level: Tensor,
    fold: Tensor,
) -> GradientSums:
    """Histograms of the boosters that train on these rows, and the loss of the one that does not.

    The boosters [boosters, T, nodes] but for that of the `fold` see these rows; they add to the scores of linear
    models [C, d], which have not seen them.
    """
    thresholds, loss = Thresholds(values.numpy(), start.numpy()), OBJECTIVE_NAMES[int(settings[0])]
    how, nodes = Boosting(loss), 2 ** int(level)
    histograms, losses = [], []
    for c in range(len(rows)):
        x, y = (part.double() for part in rows.of(c))
        offset = score_linear(x, models[c].double().expand(len(x), -1), x.shape[1], task.intercept)[:, 0].numpy()
        bins, cells, target = find_bins(x.numpy(), thresholds), x.numpy(), y.numpy()
        out = []
        for b in range(len(feature)):
            trees = (part[b].numpy() for part in (feature, threshold, leaf))
            scores = (offset + score_trees(cells, *trees))[:, None]
            if b == int(fold):
                losses.append(float(measure_loss(target, scores, how).sum()))
                continue
            gradient = differentiate_loss(target, scores, how)[:, 0]
            place = find_nodes(cells, feature[b, -1].numpy(), threshold[b, -1].numpy(), int(level))
            curvature = second_derivative(scores[:, 0], loss)
            out.append(sum_histogram(bins, place, nodes, thresholds.bins, gradient, curvature))
        histograms.append(torch.from_numpy(np.stack(out).astype(np.float32)))
    return GradientSums(torch.stack(histograms), torch.tensor(losses, dtype=torch.float64))


@rows_function
def sum_candidate_moments(task: Task, rows: Rows, models: Tensor, *, pairs: Tensor, inputs: Tensor) -> CandidateMoments:
    """The moments with residuals of linear models [C, d] on the first `inputs` columns; the others are splines."""
    settings, width = boosting_of(task), int(inputs)
    assert settings is not None
    out = []
    for c in range(len(rows)):
        x, y = rows.of(c)
        base = x[:, :width].double()
        score = score_linear(base, models[c].double().expand(len(x), -1), width, task.intercept)
        residual = torch.from_numpy(-differentiate_loss(y.double().numpy(), score.numpy(), settings))
        q = multiply_columns(base, [(int(i), int(j)) for i, j in pairs])
        sums = [sum_candidates(x, q, r) for r in residual.T]
        zz, zq, qq = (torch.from_numpy(getattr(sums[0], name)) for name in ("zz", "zq", "qq"))
        zr, qr = (torch.from_numpy(np.stack([getattr(s, name) for s in sums])) for name in ("zr", "qr"))
        rr = torch.tensor([s.rr for s in sums], dtype=torch.float64)
        out.append(CandidateMoments(torch.tensor(float(len(x))), zz, zr, rr, zq, qq, qr))
    return CandidateMoments(*(torch.stack(parts) for parts in zip(*out)))
