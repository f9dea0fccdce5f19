"""A step of local SGD, taken in place: the terms that tasks need to write the data's part straight into the parameters.

    v <- v - rate (gradient of the data + ridge v + lam (v - center) + shift)

A gradient that is formed first and subtracted then costs three passes over [C, d]; a matrix product that is added to
the parameters costs one, and multiplies v by its factor in the same pass.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from mooring.core.cohort import Rows, broadcast_per_client

ALL_COLUMNS = slice(None)
Pull = tuple[float | Tensor, Tensor]  # (lam, center): lam a number, [C], [C, 1] or [C, d]; center [d] or [C, d]
N = TypeVar("N", float, Tensor)


class StepTerms(NamedTuple):
    """All terms of a step but the gradient of the data."""

    rate: float | Tensor  # a number or [C, 1]
    lam: float | Tensor = 0.0  # a number, [C, 1] or [C, d]
    center: Tensor | None = None  # [d] or [C, d]
    shift: Tensor | None = None  # [d] or [C, d]

    def shrink(self, part: Tensor, ridge: float, columns: slice = ALL_COLUMNS) -> float:
        """The factor of v[:, columns] in the step if it is a number; otherwise multiply `part`, a view of these
        columns, by it and return 1."""
        factor = 1 - self.rate * (_at(self.lam, columns) + ridge)
        if isinstance(factor, float):
            return factor
        part.mul_(factor)
        return 1.0

    def add(self, part: Tensor, columns: slice = ALL_COLUMNS) -> None:
        """Add the terms that do not depend on v, rate (lam center - shift), to `part`, a view of v[:, columns]."""
        if self.center is not None:
            _add_scaled(part, _columns(self.center, columns), self.rate * _at(self.lam, columns))
        if self.shift is not None:
            _add_scaled(part, _columns(self.shift, columns), -self.rate)


class MixtureUpdate(NamedTuple):
    """Which of S steps change the weight alpha of a mixture, on which rows, and how."""

    steps: list[bool]  # [S]
    rows: Rows | None  # None: the rows of the step itself
    row_index: np.ndarray  # [T, C, B], for the T of S steps that change alpha
    n: np.ndarray  # [T, C]
    pull: float = 0.0  # of alpha towards 0
    by_parts: bool = False  # multiply the derivative by `mixture_slope_factor`

    def updated(self, alpha: float, rate: float, slope: float) -> float:
        """The weight alpha after a step along the derivative of the loss."""
        slope = mixture_slope_factor(alpha) * slope if self.by_parts else slope
        return min(max(alpha - rate * (slope + self.pull * alpha), 0.0), 1.0)


def mixture_slope_factor(alpha: N) -> N:
    """The factor of a mixture's derivative where the gradients of its two parts are weighted by their shares again."""
    return alpha * alpha + (1 - alpha) * (1 - alpha)


def step_terms(
    v: Tensor, size: float | Tensor, active: Tensor | None, pull: Pull | None, shift: Tensor | None
) -> StepTerms:
    """A step of `size` (a number or [C]) of the `active` clients ([C], None: all); pull = (lam, center)."""
    rate = _number(broadcast_per_client(size, v))
    if active is not None:
        rate = rate * active[:, None].to(v.dtype)
    lam, center = (0.0, None) if pull is None else (_number(broadcast_per_client(pull[0], v)), pull[1])
    return StepTerms(rate, lam, center, shift)


def constant_step_terms(v: Tensor, pull: Pull | None, shift: Tensor | None, ridge: float) -> tuple[Tensor, Tensor]:
    """The constant terms (decay, offset) of all steps  v <- v - rate (gradient of the data + decay v - offset).

    decay is [1, 1], [C, 1], [1, d] or [C, d]; offset is [1, 0] where there is none, [1, d] or [C, d].
    """
    decay = torch.full((1, 1), ridge, dtype=v.dtype)
    offset = torch.zeros(1, 0, dtype=v.dtype)
    if pull is not None:
        lam = broadcast_per_client(pull[0], v)
        lam = _once(lam if lam.ndim == 2 else lam.reshape(-1, 1))
        decay, offset = lam + ridge, (lam * _once(pull[1])).expand(-1, v.shape[1])
    if shift is not None:
        offset = (offset if offset.shape[1] else 0) - shift.to(v.dtype).reshape(-1, v.shape[1])
    return decay, offset


def _once(values: Tensor) -> Tensor:
    """[1, d] of [C, d] whose rows are all the same memory; [1, 1] of [C, 1] whose numbers are all equal."""
    if values.ndim < 2 or not len(values):
        return values
    same = values.stride(0) == 0 or (values.shape[1] == 1 and bool((values == values[0]).all()))
    return values[:1] if same else values


def _number(tensor: Tensor) -> float | Tensor:
    return float(tensor) if tensor.ndim == 0 else tensor


def _at(values: float | Tensor, columns: slice) -> float | Tensor:
    """The `columns` of [d] or [C, d]; a number and [C, 1] apply to all columns."""
    return values if isinstance(values, float) else _columns(values, columns)


def _columns(values: Tensor, columns: slice) -> Tensor:
    return values if values.shape[-1] == 1 else values[..., columns]


def _add_scaled(part: Tensor, values: Tensor, scale: float | Tensor) -> None:
    if isinstance(scale, float):
        part.add_(values, alpha=scale)
    else:
        part.addcmul_(values.expand_as(part), scale)
