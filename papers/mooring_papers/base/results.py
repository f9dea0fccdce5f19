"""Results of trials, and references of claims and figures to them.

A trial has a point (its coordinates, such as {"gap": 0.5}), a seed, and values: a number or a list (a curve) by name.
`of("error", at=-1, method="fedavg", gap=between(1, 3))` refers to one quantity:

    "error"            the series, or a function of a trial's values
    at=-1              of a curve: the value at this index, or a function of each repeat's curve (np.min, ...)
    method="fedavg"    only these points; the coordinate is fixed and removed
    gap=between(1, 3)  only points whose coordinate is in the range; it remains a coordinate

Two quantities are compared at equal remaining coordinates and equal seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from scipy.special import stdtrit

from mooring.core.types import JsonObject

Values = JsonObject
Coordinates = tuple[tuple[str, Any], ...]  # coordinates in the order of the trial's point

CONFIDENCE = 0.95
_LEVEL = ContextVar("level", default=CONFIDENCE)


class Trial(NamedTuple):
    point: JsonObject
    seed: int
    values: Values


class Ref(NamedTuple):
    series: str | Callable[[Values], object]
    at: int | Callable[[np.ndarray], float] | None
    fixed: JsonObject


def of(series: str | Callable[[Values], object], at: int | Callable | None = None, **fixed: Any) -> Ref:
    """Return a reference to a quantity; see the module's docstring."""
    return Ref(series, at, fixed)


@dataclass(frozen=True)
class between:
    """Accepts numbers from `low` to `high`, inclusive."""

    low: float = -np.inf
    high: float = np.inf

    def __call__(self, value: Any) -> bool:
        return bool(self.low <= value <= self.high)


@dataclass(frozen=True)
class one_of:
    """Accepts these values."""

    values: tuple[object, ...]

    def __call__(self, value: object) -> bool:
        return value in self.values


def describe(value: object) -> str:
    """Return a description of a reference, a function or a value that does not depend on the module it is in.

    It is part of a claim's registration, so functions in claims need a name.
    """
    if isinstance(value, Ref):
        fixed = [f"{name}={describe(item)}" for name, item in value.fixed.items()]
        place = [] if value.at is None else [f"at={describe(value.at)}"]
        return f"{describe(value.series)}[{', '.join([*place, *fixed])}]"
    if isinstance(value, partial):
        arguments = [*map(describe, value.args), *(f"{name}={describe(item)}" for name, item in value.keywords.items())]
        return f"{describe(value.func)}({', '.join(arguments)})"
    if isinstance(value, between | one_of):
        return repr(value)
    if callable(value):
        return str(getattr(value, "text", None) or getattr(value, "__name__", value))
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}={describe(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(describe, value)) + "]"
    return f"{value:.12g}" if isinstance(value, float) else str(value)


class MissingTrials(KeyError):
    """No trial is at the points that a reference asks for."""


class Curve(NamedTuple):
    x: np.ndarray  # [X]
    y: np.ndarray  # [repeats, X]


class Results:
    """All trials of one experiment under one preset."""

    def __init__(self, trials: Sequence[Trial]):
        self.trials = sorted(trials, key=lambda trial: trial.seed)

    def take(self, ref: Ref | str) -> dict[Coordinates, np.ndarray]:
        """Return [repeats] (or [repeats, T] for a curve) by the coordinates that `ref` does not fix, in order of
        trials."""
        ref = of(ref) if isinstance(ref, str) else ref
        values: dict[Coordinates, list[np.ndarray]] = {}
        for trial in self.trials:
            if all(_is_accepted(trial.point.get(name), condition) for name, condition in ref.fixed.items()):
                values.setdefault(_free_coordinates(trial.point, ref.fixed), []).append(self.read(trial.values, ref))
        if not values:
            raise MissingTrials(f"no trial has {ref.series!r} at {ref.fixed}")
        return {point: np.stack(repeats) for point, repeats in values.items()}

    def read(self, values: Values, ref: Ref) -> np.ndarray:
        """Return the quantity in the values of one trial."""
        return _value(values, ref)

    def repeats(self, ref: Ref | str) -> np.ndarray:
        """Return [repeats] of a reference that fixes all coordinates."""
        values = self.take(ref)
        if len(values) != 1:
            raise KeyError(f"{ref} is at {len(values)} points, not at one")
        return next(iter(values.values()))

    def curve(self, ref: Ref | str, x: str, span: tuple[float, float] = (-np.inf, np.inf)) -> Curve:
        """Return a quantity along x: a coordinate of the points, or a series that contains the x values."""
        values = self.take(ref)
        names = {name for point in values for name, _ in point}
        if x in names:
            if names != {x}:
                raise KeyError(f"{ref} along {x!r} does not fix {sorted(names - {x})}")
            order = sorted(values, key=lambda point: point[0][1])
            place, y = np.array([point[0][1] for point in order], dtype=float), np.stack([values[p] for p in order], 1)
        else:
            fixed = ref.fixed if isinstance(ref, Ref) else {}
            place, y = self.repeats(of(x, **fixed))[0].astype(float), self.repeats(ref)
        inside = (place >= span[0]) & (place <= span[1])
        return Curve(place[inside], y[:, inside])


class PlannedResults(Results):
    """Trials that have not been run: their points are known, and every value is 1."""

    def read(self, values: Values, ref: Ref) -> np.ndarray:
        return np.ones(())


@contextmanager
def confidence(level: float) -> Iterator[None]:
    """Set the confidence level of intervals within this block: a version with more repeats has a higher one."""
    token = _LEVEL.set(level)
    try:
        yield
    finally:
        _LEVEL.reset(token)


def quantile(repeats: int) -> float:
    """Return the quantile of Student's t with repeats - 1 degrees of freedom, at the level of the interval."""
    return float(stdtrit(repeats - 1, (1 + _LEVEL.get()) / 2))


def interval(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the mean over repeats (axis 0) and the ends of its Student t interval; nan for a single repeat."""
    values = np.asarray(values, dtype=float)
    mean, n = values.mean(0), len(values)
    if n == 1:
        return mean, np.full_like(mean, np.nan), np.full_like(mean, np.nan)
    with np.errstate(invalid="ignore"):  # an infinite value has no interval: nan
        half = quantile(n) * values.std(0, ddof=1) / np.sqrt(n)
    return mean, mean - half, mean + half


def ratio_interval(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return mean(a)/mean(b) over paired repeats (axis 0) and the ends of Fieller's interval.

    It contains the factors f for which the Student t interval of the paired differences a - f b contains 0, so it
    agrees with a test of the differences. If the interval of mean(b) contains 0, the ends are nan.
    """
    a, b = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    top, bottom, n = a.mean(0), b.mean(0), len(a)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(bottom == 0, np.inf, top / bottom)
        if n == 1:
            return ratio, np.full_like(ratio, np.nan), np.full_like(ratio, np.nan)
        residual = a - ratio * b  # has mean 0, which avoids rounding errors
        scale = quantile(n) ** 2 / (n * (n - 1))
        deviation = b - bottom
        spread, cross, deviation_square = (
            (x * y).sum(0) for x, y in ((residual, residual), (residual, deviation), (deviation,) * 2)
        )
        # (top - f bottom)^2 = scale * sum (residual - (f - ratio) deviation)^2, solved for f - ratio
        square, linear, free = bottom**2 - scale * deviation_square, scale * cross, -scale * spread
        root = np.sqrt(np.maximum(linear**2 - square * free, 0))
        bounded = square > 0
        low = np.where(bounded, ratio + (-linear - root) / square, np.nan)
        high = np.where(bounded, ratio + (-linear + root) / square, np.nan)
    return ratio, low, high


def _is_accepted(value: object, condition: object) -> bool:
    return bool(condition(value)) if callable(condition) else value == condition


def _free_coordinates(point: JsonObject, fixed: JsonObject) -> Coordinates:
    return tuple((name, value) for name, value in point.items() if name not in fixed or callable(fixed[name]))


def _value(values: Values, ref: Ref) -> np.ndarray:
    if isinstance(ref.series, str) and ref.series not in values:
        raise KeyError(f"no series {ref.series!r}; there are {', '.join(values)}")
    value = np.asarray(ref.series(values) if callable(ref.series) else values[ref.series], dtype=float)
    if ref.at is None:
        return value
    return np.asarray(ref.at(value) if callable(ref.at) else value[ref.at], dtype=float)
