"""Extra columns that let linear models bend: splines of numeric columns, products of two, and a boosted score.

    x [..., f]  ->  [x, (extra(x) - centers) / scales] [..., f + e]

The base columns come first and unchanged. Everything that the extra columns need (knots, pairs, trees, centers,
scales) follows from sums over rows that clients may send, and is the same for all clients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mooring.core.errors import RequestError
from mooring.core.types import JsonObject
from mooring.shapes.quantiles import bin_values
from mooring.shapes.screening import multiply_columns
from mooring.shapes.splines import KNOT_LEVELS, choose_knot_count, place_knots, spline_basis
from mooring.shapes.trees import Trees

LINEAR, SPLINE, PRODUCT, BOOSTED = "linear", "spline", "product", "boosted"
MAX_STANDARD_SCORE = 10.0  # limit of boosted scores, in standard deviations of those of the training rows
MIN_SCALE = 1e-6  # of the root mean square; a column with a smaller standard deviation is constant: only centered


class ExtraColumn(NamedTuple):
    kind: str  # "spline", "product" or "boosted"
    bases: tuple[int, ...]  # the base columns that it is made of; () for a boosted score, which uses all
    number: int  # which of its spline's columns, or which class's score; from 1


class ColumnSums(NamedTuple):
    """Sums over rows of the extra columns; those of clients may be added."""

    rows: int
    total: np.ndarray  # [e]
    squares: np.ndarray  # [e]

    def __add__(self, other: ColumnSums) -> ColumnSums:  # type: ignore[override]
        return ColumnSums(self.rows + other.rows, self.total + other.total, self.squares + other.squares)


@dataclass(frozen=True)
class ShapedColumns:
    """A description of the extra columns, and the map from rows to rows with them."""

    inputs: int
    splines: tuple[tuple[int, tuple[float, ...]], ...] = ()  # (base column, its knots)
    products: tuple[tuple[int, int], ...] = ()  # pairs of base columns
    booster: Trees | None = None  # of the base columns
    centers: tuple[float, ...] = ()  # of the extra columns; empty: not standardized yet
    scales: tuple[float, ...] = ()
    is_score_alone: bool = False  # whether the boosted score predicts by itself; else it adds to linear models

    def __post_init__(self) -> None:
        columns = [i for i, _ in self.splines] + [i for pair in self.products for i in pair]
        if not all(0 <= i < self.inputs for i in columns):
            raise RequestError(f"extra columns: base columns must be from 0 to {self.inputs - 1}, got {columns}.")
        for column, knots in self.splines:
            rising = all(a < b for a, b in pairwise(knots))
            if len(knots) < 3 or not rising or not all(map(math.isfinite, knots)):
                raise RequestError(f"extra columns: column {column} needs 3 or more rising knots, got {knots}.")
        if self.booster is not None and self.booster.features != self.inputs:
            features = self.booster.features
            raise RequestError(f"extra columns: the booster was fitted on {features} columns instead of {self.inputs}.")
        for name, values in (("centers", self.centers), ("scales", self.scales)):
            if len(values) not in (0, self.extra) or not all(map(math.isfinite, values)):
                raise RequestError(f"extra columns: {self.extra} finite {name} are needed, got {values}.")
        if any(scale <= 0 for scale in self.scales):
            raise RequestError(f"extra columns: scales must be > 0, got {self.scales}.")

    @property
    def groups(self) -> tuple[ExtraColumn, ...]:
        """What each extra column is, in order."""
        bends = [ExtraColumn(SPLINE, (i,), k) for i, knots in self.splines for k in range(1, len(knots) - 1)]
        pairs = [ExtraColumn(PRODUCT, pair, 1) for pair in self.products]
        outputs = 0 if self.booster is None else len(self.booster.base)
        return (*bends, *pairs, *(ExtraColumn(BOOSTED, (), k + 1) for k in range(outputs)))

    @property
    def extra(self) -> int:
        """How many columns are added."""
        return len(self.groups)

    @property
    def width(self) -> int:
        """All columns: base and extra."""
        return self.inputs + self.extra

    def names(self, features: Sequence[str]) -> list[str]:
        """Names of all columns: those of the base columns, then such as "age, spline 1", "age x dose"."""
        outputs = 0 if self.booster is None else len(self.booster.base)
        names = list(features)
        for kind, bases, number in self.groups:
            if kind == SPLINE:
                names.append(f"{features[bases[0]]}, spline {number}")
            elif kind == PRODUCT:
                names.append(" x ".join(features[i] for i in bases))
            else:
                names.append("boosted score" if outputs == 1 else f"boosted score {number}")
        return names

    def make_extra(self, x: Tensor, scores: Tensor | None = None) -> Tensor:
        """The extra columns before centers and scales: [..., e].

        `scores` [..., K], such as out-of-fold scores, replace those of the booster.
        """
        parts = [spline_basis(x[..., i], knots) for i, knots in self.splines]
        if self.products:
            parts.append(multiply_columns(x, self.products))
        if self.booster is not None:
            if scores is None:
                flat = self.booster.score(x.detach().cpu().reshape(-1, self.inputs).numpy())
                scores = torch.from_numpy(flat).reshape(*x.shape[:-1], flat.shape[1])
            parts.append((scores.double() - torch.from_numpy(self.booster.base)).to(x))
        return torch.cat(parts, -1) if parts else x[..., :0]

    def __call__(self, x: Tensor, scores: Tensor | None = None) -> Tensor:
        """Base and extra columns of x [..., f]: [..., f + e]. `scores` are explained in `make_extra`."""
        if x.shape[-1] != self.inputs:
            raise RequestError(f"extra columns: {self.inputs} base columns are needed, got {x.shape[-1]}.")
        extra = self.make_extra(x, scores)
        if self.centers:
            center, scale = (torch.tensor(part, dtype=x.dtype, device=x.device) for part in (self.centers, self.scales))
            extra = (extra - center) / scale
            if self.booster is not None:  # of all rows, and may differ far more than those that made the scale
                extra[..., -len(self.booster.base) :].clamp_(-MAX_STANDARD_SCORE, MAX_STANDARD_SCORE)
        return torch.cat([x, extra], -1)

    def sum_extra(self, x: Tensor, scores: Tensor | None = None) -> ColumnSums:
        """Sums over the rows x [N, f] of the extra columns and their squares, for `standardize`."""
        extra = self.make_extra(x.double(), scores)
        return ColumnSums(len(x), extra.sum(0).numpy(), (extra**2).sum(0).numpy())

    def standardize(self, sums: ColumnSums) -> ShapedColumns:
        """The description whose extra columns have mean 0 and standard deviation 1 over the rows of these sums."""
        center = sums.total / sums.rows
        scale = np.sqrt(np.maximum(sums.squares / sums.rows - center**2, 0))
        scale = np.where(scale > MIN_SCALE * np.sqrt(sums.squares / sums.rows), scale, 1.0)
        return replace(self, centers=tuple(center.tolist()), scales=tuple(scale.tolist()))

    def as_json(self) -> JsonObject:
        """Plain numbers and lists; `from_json` gives back an equal description."""
        return {
            "inputs": self.inputs,
            "splines": [[i, list(knots)] for i, knots in self.splines],
            "products": [list(pair) for pair in self.products],
            "booster": None if self.booster is None else self.booster.as_json(),
            "centers": list(self.centers),
            "scales": list(self.scales),
            "is_score_alone": self.is_score_alone,
        }

    @staticmethod
    def from_json(content: object, title: str = "extra columns") -> ShapedColumns:
        """The description of `as_json`; anything else is a RequestError of one sentence."""
        try:
            if not isinstance(content, Mapping):
                raise TypeError(f"an object was expected, got {type(content).__name__}")
            booster = content["booster"]
            return ShapedColumns(
                _read_index(content["inputs"]),
                tuple((_read_index(i), tuple(map(float, knots))) for i, knots in content["splines"]),
                tuple((_read_index(i), _read_index(j)) for i, j in content["products"]),
                None if booster is None else Trees.from_json(booster, title),
                tuple(map(float, content["centers"])),
                tuple(map(float, content["scales"])),
                bool(content["is_score_alone"]),
            )
        except RequestError:
            raise
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            reason = f"no {error} in it" if isinstance(error, KeyError) else str(error)
            raise RequestError(f"{title}: not extra columns that Mooring wrote ({reason}).") from error


def choose_splines(
    counts: np.ndarray,
    numeric: Sequence[int] | None = None,
    max_knots: int = max(KNOT_LEVELS),
    values: np.ndarray | None = None,
) -> tuple[tuple[int, tuple[float, ...]], ...]:
    """Columns with their knots, from the counts of all clients [f, bins]; only columns of `numeric`, if it is given.

    `values` are the bins' middles, by default those of `bin_values`.
    """
    values, distinct = bin_values() if values is None else values, (counts > 0).sum(1)
    columns = [
        i for i in (range(len(counts)) if numeric is None else numeric) if choose_knot_count(math.inf, distinct[i])
    ]
    splines = []
    for i in columns:
        number = min(choose_knot_count(counts[i].sum() / len(columns), distinct[i]), max_knots)
        splines.append((i, place_knots(values, counts[i], number)))
    return tuple((i, knots) for i, knots in splines if knots)


def partial_dependence(
    shape: ShapedColumns, predict: Callable[[Tensor], Tensor], x: Tensor, column: int, values: Tensor
) -> Tensor:
    """The mean prediction over the rows x [N, f] if all of them had each value [G] in a base column: [G, ...].

    `predict` maps base and extra columns [N, f + e] to predictions [N, ...].
    """
    means = []
    for value in values:
        changed = x.clone()
        changed[:, column] = value
        means.append(predict(shape(changed)).mean(0))
    return torch.stack(means)


def _read_index(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"a whole number >= 0 was expected, got {value!r}")
    return value
