"""A step of local SGD, taken in place: what tasks need to write the data's part of it straight into the parameters.

    v <- v - rate (slope of the data + ridge v + lam (v - center) + shift)

A gradient that is formed first and subtracted then costs three passes over [C, d]; a product of matrices that is added
to what is there costs one, and takes the factor of v along.
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
    """All of a step but the data."""

    rate: float | Tensor  # a number or [C, 1]
    lam: float | Tensor = 0.0  # a number, [C, 1] or [C, d]
    center: Tensor | None = None  # [d] or [C, d]
    shift: Tensor | None = None  # [d] or [C, d]

    def keep(self, part: Tensor, ridge: float, place: slice = ALL_COLUMNS) -> float:
        """The factor of v[:, place] in the step, if it is a number; if not, `part`, a view of it, is multiplied here,
        and 1 is what is left to do."""
        factor = 1 - self.rate * (_at(self.lam, place) + ridge)
        if isinstance(factor, float):
            return factor
        part.mul_(factor)
        return 1.0

    def add(self, part: Tensor, place: slice = ALL_COLUMNS) -> None:
        """Add what does not depend on v to `part`, a view of v[:, place]: rate (lam center - shift)."""
        if self.center is not None:
            _add_scaled(part, _columns(self.center, place), self.rate * _at(self.lam, place))
        if self.shift is not None:
            _add_scaled(part, _columns(self.shift, place), -self.rate)


class MixtureUpdate(NamedTuple):
    """Which of S steps move a mixture, on which rows, and how."""

    steps: list[bool]  # [S]
    rows: Rows | None  # None: those of the step itself
    place: np.ndarray  # [T, C, B], for each of the T steps that do; and so is
    n: np.ndarray  # [T, C]
    pull: float = 0.0  # draws it to 0
    by_parts: bool = False  # the slope counts `parts_felt` of itself

    def moved(self, alpha: float, rate: float, slope: float) -> float:
        """The mixture after a step along the slope of the loss."""
        slope = mixture_slope_factor(alpha) * slope if self.by_parts else slope
        return min(max(alpha - rate * (slope + self.pull * alpha), 0.0), 1.0)


def mixture_slope_factor(alpha: N) -> N:
    """What is left of a mixture's slope where the gradients of its two parts are weighed by their shares again."""
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
    """What is the same in all steps: (held, towards) in  v <- v - rate (slope of the data + held v - towards).

    held is [1, 1], [C, 1], [1, d] or [C, d]; towards [1, 0] where it is nothing, [1, d] or [C, d].
    """
    held = torch.full((1, 1), ridge, dtype=v.dtype)
    towards = torch.zeros(1, 0, dtype=v.dtype)
    if pull is not None:
        lam = broadcast_per_client(pull[0], v)
        lam = _once(lam if lam.ndim == 2 else lam.reshape(-1, 1))
        held, towards = lam + ridge, (lam * _once(pull[1])).expand(-1, v.shape[1])
    if shift is not None:
        towards = (towards if towards.shape[1] else 0) - shift.to(v.dtype).reshape(-1, v.shape[1])
    return held, towards


def _once(values: Tensor) -> Tensor:
    """[1, d] of [C, d] where all rows are one and the same, or of [C, 1] where all numbers are."""
    if values.ndim < 2 or not len(values):
        return values
    same = values.stride(0) == 0 or (values.shape[1] == 1 and bool((values == values[0]).all()))
    return values[:1] if same else values


def _number(tensor: Tensor) -> float | Tensor:
    return float(tensor) if tensor.ndim == 0 else tensor


def _at(values: float | Tensor, place: slice) -> float | Tensor:
    """The columns of [d] or [C, d] at `place`; a number and [C, 1] have the same for all."""
    return values if isinstance(values, float) else _columns(values, place)


def _columns(values: Tensor, place: slice) -> Tensor:
    return values if values.shape[-1] == 1 else values[..., place]


def _add_scaled(part: Tensor, values: Tensor, scale: float | Tensor) -> None:
    if isinstance(scale, float):
        part.add_(values, alpha=scale)
    else:
        part.addcmul_(values.expand_as(part), scale)
