"""Claims: sentences of a paper as functions of the results that can fail.

Quantities are errors, losses, norms, gains or accuracies: a claim whose quantities are negative or not finite fails.
Comparisons are of means over repeats, paired by seed, at every point that the references leave open, and hold only
beyond the 95 % interval: the interval of a ratio, a mean, a slope or a crossing must lie within the stated range as a
whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from mooring.experiments.base.results import Point, Ref, Results, bootstrap, interval, of, ratio_interval

Series = Ref | str
Quantity = Series | float
Span = tuple[float, float]
EVERYWHERE = (-np.inf, np.inf)


class Verdict(NamedTuple):
    held: bool
    numbers: dict[str, Any]


Check = Callable[[Results], Verdict]


@dataclass(frozen=True)
class Claim:
    id: str
    says: str  # the paper's statement, with the tolerance under which it is tested
    check: Check
    note: str = ""  # why it fails, where it does; shown with a failure only


def lower(a: Quantity, than: Quantity, factor: float = 1.0) -> Check:
    """a < factor * than at every point: the whole interval of mean(a)/mean(than) is below the factor."""
    return _compare(a, than, factor, sign=1)


def higher(a: Quantity, than: Quantity, factor: float = 1.0) -> Check:
    """a > factor * than at every point: the whole interval of mean(a)/mean(than) is above the factor."""
    return _compare(a, than, factor, sign=-1)


def close(a: Quantity, to: Quantity, within: float) -> Check:
    """mean(a)/mean(to) is between 1/(1 + within) and 1 + within, with its whole interval, at every point."""

    def check(results: Results) -> Verdict:
        above, below = lower(a, to, 1 + within)(results), higher(a, to, 1 / (1 + within))(results)
        failed = below if above.held and not below.held else above
        numbers = {"lowest ratio": below.numbers["ratio"], "highest ratio": above.numbers["ratio"]}
        numbers |= {"low": below.numbers["low"], "high": above.numbers["high"], "within": within}
        places = {name: value for name, value in failed.numbers.items() if name.startswith(("points", "worst"))}
        return Verdict(above.held and below.held, numbers | places)

    return check


def ratio(a: Quantity, b: Quantity, low: float, high: float) -> Check:
    """mean(a)/mean(b) lies in [low, high] with its whole interval, at every point."""
    return every(**{f"at least {low:g}": higher(a, b, low), f"at most {high:g}": lower(a, b, high)})


def alike(quantities: Sequence[Quantity], within: float) -> Check:
    """All quantities are within that share of each other, as in `close`, at every point."""

    def check(results: Results) -> Verdict:
        pairs = [(a, b) for i, a in enumerate(quantities) for b in quantities[i + 1 :]]
        verdicts = [close(a, b, within)(results) for a, b in pairs]
        gaps = [max(v.numbers["highest ratio"], 1 / (v.numbers["lowest ratio"] or np.nan)) for v in verdicts]
        worst = int(np.argmax(gaps))
        return Verdict(
            all(v.held for v in verdicts),
            {"largest ratio": float(gaps[worst]), "within": within, "pair": " / ".join(map(_name, pairs[worst]))},
        )

    return check


def ordered(quantities: Sequence[Quantity]) -> Check:
    """Each quantity is lower than the next, at every point."""
    return every(**{f"{_name(a)} < {_name(b)}": lower(a, b) for a, b in pairwise(quantities)})


def within(a: Series, low: float, high: float) -> Check:
    """The mean of a lies in [low, high] with its whole interval, at every point."""

    def check(results: Results) -> Verdict:
        rows = []
        for point, values in results.take(a).items():
            mean, bottom, top = interval(values)
            good = _positive(values) and bool(np.all((bottom >= low) & (top <= high)))
            excess = np.maximum(low - bottom, top - high)
            worst = int(np.argmax(excess)) if excess.ndim else ()
            rows.append((good, float(excess[worst]), point, mean[worst], bottom[worst], top[worst]))
        _, _, point, mean, bottom, top = max(rows, key=lambda row: (not row[0], row[1]))
        numbers = {"value": float(mean), "low": float(bottom), "high": float(top), "range": [low, high]}
        return Verdict(all(row[0] for row in rows), numbers | _where(point, rows))

    return check


def falling(a: Series, x: str, span: Span = EVERYWHERE) -> Check:
    """a falls from each x to the next, beyond the interval of the paired differences."""
    return _monotone(a, x, span, -1)


def rising(a: Series, x: str, span: Span = EVERYWHERE) -> Check:
    """a rises from each x to the next, beyond the interval of the paired differences."""
    return _monotone(a, x, span, 1)


def flat(a: Series, x: str, within: float, span: Span = EVERYWHERE) -> Check:
    """The largest mean along x is at most 1 + within times the smallest."""

    def check(results: Results) -> Verdict:
        x_, y = results.curve(a, x, span)
        mean = y.mean(0)
        ratio = float(mean.max() / mean.min()) if mean.min() > 0 else np.inf
        numbers = {"lowest": float(mean.min()), "highest": float(mean.max()), "ratio": ratio, "limit": 1 + within}
        return Verdict(_positive(y) and len(x_) > 1 and ratio <= 1 + within, numbers)

    return check


def slope(a: Series, x: str, low: float, high: float, span: Span = EVERYWHERE) -> Check:
    """The slope of log mean(a) on log x lies in [low, high] with its whole bootstrap interval."""

    def check(results: Results) -> Verdict:
        x_, y = results.curve(a, x, span)
        if not _positive(y) or len(x_) < 2:
            return Verdict(False, {"slope": np.nan, "range": [low, high]})
        value, bottom, top = bootstrap(lambda draw: np.polyfit(np.log(x_), np.log(y[draw].mean(0)), 1)[0], len(y))
        numbers = {"slope": float(value), "low": float(bottom), "high": float(top), "range": [low, high]}
        return Verdict(bool(low <= bottom and top <= high), numbers)

    return check


def straight(a: Series, x: str, r2: float, span: Span = EVERYWHERE) -> Check:
    """mean(a) is a rising straight line in x: its squared correlation with x is at least r2."""

    def check(results: Results) -> Verdict:
        x_, y = results.curve(a, x, span)
        slope_, offset = np.polyfit(x_, y.mean(0), 1)
        fit = float(np.corrcoef(x_, y.mean(0))[0, 1] ** 2)
        numbers = {"slope": float(slope_), "offset": float(offset), "r2": fit, "limit": r2}
        return Verdict(_positive(y) and slope_ > 0 and fit >= r2, numbers)

    return check


def crosses(a: Series, b: Quantity, x: str, low: float, high: float, span: Span = EVERYWHERE) -> Check:
    """Along x, mean(a) starts above mean(b) and ends below it; they meet, on logarithmic axes, within [low, high]."""

    def check(results: Results) -> Verdict:
        x_, top = results.curve(a, x, span)
        bottom = np.full_like(top, b) if isinstance(b, float | int) else results.curve(b, x, span).y
        if not _positive(top, bottom):
            return Verdict(False, {"crossing": np.nan, "range": [low, high]})

        def meet(draw: np.ndarray) -> float:
            return meeting(np.log(x_), np.log(top[draw].mean(0)) - np.log(bottom[draw].mean(0)))

        value, first, last = (float(np.exp(v)) for v in bootstrap(meet, len(top)))
        numbers = {"crossing": value, "low": first, "high": last, "range": [low, high]}
        return Verdict(bool(low <= first and last <= high), numbers)

    return check


def every(**checks: Check) -> Check:
    """All of several checks; their numbers are told apart by the given names."""

    def check(results: Results) -> Verdict:
        verdicts = {name: one(results) for name, one in checks.items()}
        return Verdict(all(v.held for v in verdicts.values()), {name: v.numbers for name, v in verdicts.items()})

    return check


def meeting(x: np.ndarray, gap: np.ndarray) -> float:
    """Where the line through (x, gap) comes down through 0; nan unless it starts above, ends below and crosses once."""
    above = gap > 0
    if not above[0] or above[-1] or (np.diff(above.astype(int)) != 0).sum() != 1:
        return np.nan
    k = int(np.argmin(above))
    return float(x[k - 1] + gap[k - 1] / (gap[k - 1] - gap[k]) * (x[k] - x[k - 1]))


def _compare(a: Quantity, b: Quantity, factor: float, sign: int) -> Check:
    """Whether sign * (mean(a)/mean(b) - factor) is below 0; the numbers are those of the place nearest to failing."""

    def check(results: Results) -> Verdict:
        rows = []
        for point, left, right in _paired(results, a, b):
            ratio, low, high = ratio_interval(left, right)
            good = _positive(left, right) and bool(np.all(high < factor if sign > 0 else low > factor))
            worst = int(np.argmax(sign * ratio)) if ratio.ndim else ()
            found = (left.mean(0)[worst], right.mean(0)[worst], ratio[worst], low[worst], high[worst])
            rows.append((good, sign * float(ratio[worst]), point, found))
        point, found = max(rows, key=lambda row: (not row[0], row[1]))[2:]
        numbers = dict(zip(("value", "reference", "ratio", "low", "high"), map(float, found))) | {"limit": factor}
        return Verdict(all(row[0] for row in rows), numbers | _where(point, rows))

    return check


def _monotone(a: Series, x: str, span: Span, sign: int) -> Check:
    def check(results: Results) -> Verdict:
        x_, y = results.curve(a, x, span)
        mean, low, high = interval(np.diff(y, axis=1))
        good = high < 0 if sign < 0 else low > 0
        k = int(np.argmax(-sign * mean / np.maximum(np.abs(y.mean(0)[:-1]), np.finfo(float).tiny)))
        numbers = {"first": float(y.mean(0)[0]), "last": float(y.mean(0)[-1]), "steps": len(good)}
        worst = {"right steps": int(good.sum()), f"worst {x}": float(x_[k]), "worst step": float(mean[k])}
        return Verdict(_positive(y) and len(good) > 0 and bool(good.all()), numbers | worst)

    return check


def _paired(results: Results, a: Quantity, b: Quantity):
    """(point, values of a, values of b) at every point of the one with more coordinates; the other is repeated."""
    if isinstance(a, float | int):
        assert not isinstance(b, float | int), "a claim compares a quantity, not two numbers"
        return [(point, np.full_like(right, a), right) for point, right in results.take(b).items()]
    left = results.take(a)
    if isinstance(b, float | int):
        return [(point, values, np.full_like(values, b)) for point, values in left.items()]
    right = results.take(b)
    if len(next(iter(right))) > len(next(iter(left))):
        return [(point, left[_match(point, left)], values) for point, values in right.items()]
    return [(point, values, right[_match(point, right)]) for point, values in left.items()]


def _match(point: Point, others: Mapping[Point, Any]) -> Point:
    """The one of `others` whose coordinates all agree with `point`."""
    found = [other for other in others if set(other) <= set(point)]
    if len(found) != 1:
        raise KeyError(f"{len(found)} points to compare with {dict(point)} among {[dict(p) for p in others]}")
    return found[0]


def _positive(*arrays: np.ndarray) -> bool:
    return all(bool(np.all(np.isfinite(values) & (values >= 0))) for values in arrays)


def _where(point: Any, rows: Sequence[Any]) -> dict[str, Any]:
    """How many points a claim was tested at, and which of them is shown: the one that fails or is nearest to it."""
    return {"points": len(rows), **{f"worst {name}": value for name, value in point}} if len(rows) > 1 else {}


def _name(quantity: Quantity) -> str:
    ref = of(quantity) if isinstance(quantity, str) else quantity
    if not isinstance(ref, Ref):
        return f"{ref:g}"
    series = ref.series if isinstance(ref.series, str) else getattr(ref.series, "__name__", "value")
    settled = [f"{name}={value}" for name, value in ref.fixed.items() if not callable(value)]
    return " ".join([series, *settled])
