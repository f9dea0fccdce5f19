"""What trials gave, and how claims and figures refer to it.

A trial has a point (what is varied, such as {"gap": 0.5}), a seed, and values: a number or a list (a curve) by name.
`of("error", at=-1, method="fedavg", gap=lambda g: g > 1)` refers to one quantity:

    "error"            the series, or a function of a trial's values
    at=-1              of a curve: this place, or what a function makes of each repeat's curve (np.min, ...)
    method="fedavg"    only these points; this coordinate is settled and drops out
    gap=lambda ...     only points whose coordinate passes; it stays a coordinate

Two quantities are compared at equal remaining coordinates and equal seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

Values = dict[str, Any]
Point = tuple[tuple[str, Any], ...]  # coordinates in the order of the trial's point

CONFIDENCE = 0.95
DRAWS = 200  # bootstrap resamples of the repeats


class Trial(NamedTuple):
    point: dict[str, Any]
    seed: int
    values: Values


class Ref(NamedTuple):
    series: str | Callable[[Values], Any]
    at: int | Callable[[np.ndarray], float] | None
    fixed: dict[str, Any]


def of(series: str | Callable[[Values], Any], at: int | Callable | None = None, **fixed: Any) -> Ref:
    """A reference to a quantity, as the module says."""
    return Ref(series, at, fixed)


class Curve(NamedTuple):
    x: np.ndarray  # [X]
    y: np.ndarray  # [repeats, X]


class Results:
    """All trials of one experiment under one preset."""

    def __init__(self, trials: Sequence[Trial]):
        self.trials = sorted(trials, key=lambda trial: trial.seed)

    def take(self, ref: Ref | str) -> dict[Point, np.ndarray]:
        """[repeats] (or [repeats, T] for a curve) by the coordinates that `ref` leaves open, in order of trials."""
        ref = of(ref) if isinstance(ref, str) else ref
        found: dict[Point, list[np.ndarray]] = {}
        for trial in self.trials:
            if all(_passes(trial.point.get(name), wanted) for name, wanted in ref.fixed.items()):
                found.setdefault(_open(trial.point, ref.fixed), []).append(_value(trial.values, ref))
        if not found:
            raise KeyError(f"no trial has {ref.series!r} at {ref.fixed}")
        return {point: np.stack(values) for point, values in found.items()}

    def one(self, ref: Ref | str) -> np.ndarray:
        """[repeats] of a reference that leaves nothing open but one point."""
        values = self.take(ref)
        if len(values) != 1:
            raise KeyError(f"{ref} is at {len(values)} points, not at one")
        return next(iter(values.values()))

    def curve(self, ref: Ref | str, x: str, span: tuple[float, float] = (-np.inf, np.inf)) -> Curve:
        """A quantity along x: a coordinate of the points, or a series of the trials that lists the places."""
        values = self.take(ref)
        names = {name for point in values for name, _ in point}
        if x in names:
            if names != {x}:
                raise KeyError(f"{ref} along {x!r} leaves {sorted(names - {x})} open as well")
            order = sorted(values, key=lambda point: point[0][1])
            place, y = np.array([point[0][1] for point in order], dtype=float), np.stack([values[p] for p in order], 1)
        else:
            fixed = ref.fixed if isinstance(ref, Ref) else {}
            place, y = self.one(of(x, **fixed))[0].astype(float), self.one(ref)
        kept = (place >= span[0]) & (place <= span[1])
        return Curve(place[kept], y[:, kept])


def interval(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean over repeats (axis 0) and the ends of its Student interval: nan for a lone repeat, which has none."""
    values = np.asarray(values, dtype=float)
    mean, n = values.mean(0), len(values)
    if n == 1:
        return mean, np.full_like(mean, np.nan), np.full_like(mean, np.nan)
    with np.errstate(invalid="ignore"):  # an infinite repeat has no interval: nan, on which nothing is claimed
        half = stats.t.ppf((1 + CONFIDENCE) / 2, n - 1) * values.std(0, ddof=1) / np.sqrt(n)
    return mean, mean - half, mean + half


def ratio_interval(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """mean(a)/mean(b) over paired repeats (axis 0) and the ends of its interval, by the linearised ratio.

    The interval is that of a - ratio * b in units of mean(b): what both have in common, such as a hard seed, cancels.
    Where mean(b) is 0 the ratio is infinite.
    """
    top, bottom = np.mean(a, axis=0), np.mean(b, axis=0)
    scale = np.where(bottom == 0, 1.0, bottom)
    ratio = np.where(bottom == 0, np.inf, top / scale)
    with np.errstate(invalid="ignore"):
        _, low, high = interval((a - np.where(bottom == 0, 0.0, top / scale) * b) / scale)
    return ratio, ratio + low, ratio + high


def bootstrap(statistic: Callable[[np.ndarray], float], repeats: int) -> tuple[float, float, float]:
    """`statistic` of all repeats, and its percentile interval over resampled ones; its argument: indices of repeats.

    An undefined value (nan) anywhere makes the interval's ends nan, and so does a lone repeat: nothing rests on it.
    """
    rng = np.random.default_rng(0)
    whole = statistic(np.arange(repeats))
    if repeats == 1:
        return whole, np.nan, np.nan
    drawn = np.array([statistic(rng.integers(0, repeats, repeats)) for _ in range(DRAWS)])
    low, high = np.quantile(drawn, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return whole, float(low), float(high)


def _passes(value: Any, wanted: Any) -> bool:
    return bool(wanted(value)) if callable(wanted) else value == wanted


def _open(point: dict[str, Any], fixed: dict[str, Any]) -> Point:
    return tuple((name, value) for name, value in point.items() if name not in fixed or callable(fixed[name]))


def _value(values: Values, ref: Ref) -> np.ndarray:
    if isinstance(ref.series, str) and ref.series not in values:
        raise KeyError(f"no series {ref.series!r}; there are {', '.join(values)}")
    value = np.asarray(ref.series(values) if callable(ref.series) else values[ref.series], dtype=float)
    if ref.at is None:
        return value
    return np.asarray(ref.at(value) if callable(ref.at) else value[ref.at], dtype=float)
