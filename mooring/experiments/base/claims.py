"""Claims: sentences of a paper as functions of the results, answered with one of three words.

    held           the claim holds beyond the 95 % interval: the whole interval lies in what is claimed
    open           the interval reaches both sides, or there is none: one repeat has no interval
    contradicted   the whole interval lies outside of what is claimed

Comparisons are of means over repeats, paired by seed, at every point that the references leave open. The word is that
of the worst place, measured by its margin: by how many half-widths of its interval a mean lies inside what is claimed.
A margin grows like the root of the number of repeats, which tells how many would decide.

Quantities are errors, losses, norms, gains or accuracies: negative ones contradict every claim, undefined ones leave it
open.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from mooring.experiments.base.results import Point, Ref, Results, bootstrap, interval, of, ratio_interval

Series = Ref | str
Quantity = Series | float
Span = tuple[float, float]
EVERYWHERE = (-np.inf, np.inf)
HELD, OPEN, CONTRADICTED = WORDS = ("held", "open", "contradicted")


class Verdict(NamedTuple):
    margin: float  # of the worst place; nan where there is no interval
    numbers: dict[str, Any]
    repeats: int
    where: str = ""  # which of several checks is the worst
    decides: dict[str, Any] | None = None  # its numbers; None: those above

    @property
    def word(self) -> str:
        if self.margin > 1:
            return HELD
        return CONTRADICTED if self.margin <= -1 else OPEN

    @property
    def held(self) -> bool:
        return self.word == HELD

    @property
    def needs(self) -> int | None:
        """Of an open claim: repeats with which the same means would decide; None where nobody can tell."""
        if self.word != OPEN or not self.margin or math.isnan(self.margin):
            return None
        return math.ceil(self.repeats / self.margin**2)

    @property
    def worst(self) -> dict[str, Any]:
        return self.numbers if self.decides is None else self.decides


Check = Callable[[Results], Verdict]


@dataclass(frozen=True)
class Claim:
    id: str
    says: str  # the paper's statement, with the tolerance under which it is tested
    check: Check
    note: str = ""  # what is known of a claim that is open
    evidence: str = ""  # why a contradicted claim is the paper's own: the reason, and what shows it


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
        worst = min(above, below, key=_badness)
        numbers = {"lowest ratio": below.numbers["ratio"], "highest ratio": above.numbers["ratio"]}
        numbers |= {"low": below.numbers["low"], "high": above.numbers["high"], "within": within}
        places = {name: value for name, value in worst.numbers.items() if name.startswith(("points", "worst"))}
        return Verdict(worst.margin, numbers | places, worst.repeats)

    return check


def ratio(a: Quantity, b: Quantity, low: float, high: float) -> Check:
    """mean(a)/mean(b) lies in [low, high] with its whole interval, at every point."""
    return every(**{f"at least {low:g}": higher(a, b, low), f"at most {high:g}": lower(a, b, high)})


def alike(quantities: Sequence[Quantity], within: float) -> Check:
    """All quantities are within that share of each other, as in `close`, at every point."""

    def check(results: Results) -> Verdict:
        pairs = [(a, b) for i, a in enumerate(quantities) for b in quantities[i + 1 :]]
        verdicts = [close(a, b, within)(results) for a, b in pairs]
        k = min(range(len(pairs)), key=lambda k: _badness(verdicts[k]))
        found = verdicts[k].numbers
        gap = max(found["highest ratio"], 1 / (found["lowest ratio"] or np.nan))
        numbers = {"largest ratio": float(gap), "within": within, "pair": " / ".join(map(_name, pairs[k]))}
        return Verdict(verdicts[k].margin, numbers, verdicts[k].repeats)

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
            worst, margin = worst_place(sound(margins(mean, bottom, top, low, high), values))
            rows.append((margin, point, mean[worst], bottom[worst], top[worst]))
        margin, point, mean, bottom, top = min(rows, key=lambda row: _order(row[0]))
        numbers = {"value": float(mean), "low": float(bottom), "high": float(top), "range": [low, high]}
        return Verdict(margin, numbers | _where(point, len(rows)), len(values))

    return check


def measured(measure: Callable[[Results], tuple[np.ndarray, ...]], low: float = -np.inf, high: float = np.inf) -> Check:
    """What `measure` makes of the results, [repeats], lies in [low, high] with its whole interval.

    It gives the measured values, which may be differences, and the quantities that they rest on.
    """

    def check(results: Results) -> Verdict:
        values, *quantities = measure(results)
        mean, bottom, top = map(float, interval(values))
        verdict = _estimate("value", (mean, bottom, top), low, high, len(values))
        return verdict._replace(margin=float(sound(np.array(verdict.margin), *quantities)))

    return check


def falling(a: Series, x: str, span: Span = EVERYWHERE) -> Check:
    """a falls from each x to the next, beyond the interval of the paired differences."""
    return _monotone(a, x, span, -1)


def rising(a: Series, x: str, span: Span = EVERYWHERE) -> Check:
    """a rises from each x to the next, beyond the interval of the paired differences."""
    return _monotone(a, x, span, 1)


def flat(a: Series, x: str, within: float, span: Span = EVERYWHERE) -> Check:
    """Along x no mean is more than 1 + within times another, with the whole interval of their ratio."""

    def check(results: Results) -> Verdict:
        x_, y = results.curve(a, x, span)
        if len(x_) < 2:
            return Verdict(np.nan, {"places": len(x_)}, len(y))
        top, bottom = (side.reshape(len(y), -1) for side in np.broadcast_arrays(y[:, :, None], y[:, None, :]))
        found = ratio_interval(top, bottom)
        k, margin = worst_place(sound(margins(*found, most=1 + within), y))
        ratio, low, high = (float(one[k]) for one in found)
        numbers = {"lowest": float(bottom.mean(0)[k]), "highest": float(top.mean(0)[k]), "ratio": ratio}
        return Verdict(margin, numbers | {"low": low, "high": high, "limit": 1 + within}, len(y))

    return check


def slope(a: Series, x: str, low: float, high: float, span: Span = EVERYWHERE) -> Check:
    """The slope of log mean(a) on log x lies in [low, high] with its whole bootstrap interval."""

    def check(results: Results) -> Verdict:
        x_, y = results.curve(a, x, span)
        if not (_positive(y) and np.all(y > 0)) or len(x_) < 2:
            return Verdict(_unsound(results.curve(a, x).y), {"slope": np.nan, "range": [low, high]}, len(y))
        found = bootstrap(lambda draw: np.polyfit(np.log(x_), np.log(y[draw].mean(0)), 1)[0], len(y))
        return _estimate("slope", found, low, high, len(y))

    return check


def straight(a: Series, x: str, r2: float, span: Span = EVERYWHERE) -> Check:
    """mean(a) is a rising straight line in x: its squared correlation with x, counted negative for a falling line, is
    at least r2 with its whole bootstrap interval."""

    def check(results: Results) -> Verdict:
        x_, y = results.curve(a, x, span)
        found = bootstrap(lambda draw: straightness(x_, y[draw].mean(0)), len(y))
        verdict = _estimate("r2", found, r2, np.inf, len(y))
        slope_, offset = np.polyfit(x_, y.mean(0), 1)
        numbers = {"slope": float(slope_), "offset": float(offset), **verdict.numbers, "limit": r2}
        del numbers["range"]
        return verdict._replace(margin=float(sound(np.array(verdict.margin), y)), numbers=numbers)

    return check


def crosses(a: Series, b: Quantity, x: str, low: float, high: float, span: Span = EVERYWHERE) -> Check:
    """Along x, mean(a) starts above mean(b) and ends below it; they meet, on logarithmic axes, within [low, high].

    Where they do not meet exactly once the claim is not held, and contradicted if a is below b at the first place or
    above it at the last one, beyond the interval.
    """

    def check(results: Results) -> Verdict:
        x_, top = results.curve(a, x, span)
        bottom = np.full_like(top, b) if isinstance(b, float | int) else results.curve(b, x, span).y
        if not _positive(top, bottom):
            return Verdict(_unsound(top, bottom), {"crossing": np.nan, "range": [low, high]}, len(top))

        def meet(draw: np.ndarray) -> float:
            return meeting(np.log(x_), np.log(top[draw].mean(0)) - np.log(bottom[draw].mean(0)))

        value, first, last = (float(np.exp(v)) for v in bootstrap(meet, len(top)))
        verdict = _estimate("crossing", (value, first, last), low, high, len(top))
        if not np.isnan(value):
            return verdict
        ends = [margins(*ratio_interval(top[:, k], bottom[:, k]), **side) for k, side in ENDS.items()]
        return verdict._replace(margin=min(0.0, *(_order(float(end)) for end in ends)))

    return check


def every(**checks: Check) -> Check:
    """All of several checks; their numbers are told apart by the given names."""
    return _several(checks, len(checks))


def most(share: float, **checks: Check) -> Check:
    """At least this share of several checks."""
    return _several(checks, math.ceil(share * len(checks)))


def not_worse(check: Check) -> Check:
    """What `check` claims is not contradicted: for printed numbers whose intervals overlap."""

    def relaxed(results: Results) -> Verdict:
        verdict = check(results)
        return verdict._replace(margin=verdict.margin + 2 if verdict.margin > -1 else verdict.margin)

    return relaxed


def meeting(x: np.ndarray, gap: np.ndarray) -> float:
    """Where the line through (x, gap) comes down through 0; nan unless it starts above, ends below and crosses once."""
    above = gap > 0
    if not above[0] or above[-1] or (np.diff(above.astype(int)) != 0).sum() != 1:
        return np.nan
    k = int(np.argmin(above))
    return float(x[k - 1] + gap[k - 1] / (gap[k - 1] - gap[k]) * (x[k] - x[k - 1]))


def straightness(x: np.ndarray, y: np.ndarray) -> float:
    """The squared correlation of x and y, negative where y falls; 0 where y is level."""
    if np.ptp(y) == 0:
        return 0.0
    r = float(np.corrcoef(x, y)[0, 1])
    return r * abs(r)


def margins(mean: Any, low: Any, high: Any, least: float = -np.inf, most: float = np.inf) -> np.ndarray:
    """By how many half-widths of [low, high] the means lie inside (least, most): above 1 the whole interval does, at -1
    and below none of it; nan where there is no interval."""
    mean, low, high = (np.asarray(part, dtype=float) for part in (mean, low, high))
    with np.errstate(divide="ignore", invalid="ignore"):
        below = _in_halves(most - mean, np.where(mean < most, high - mean, mean - low))
        above = _in_halves(mean - least, np.where(mean > least, mean - low, high - mean))
    return np.minimum(below, above)


def sound(margin: np.ndarray, *values: np.ndarray) -> np.ndarray:
    """The margins, unless values are negative (everything is contradicted) or undefined (nothing can be told)."""
    return margin if _positive(*values) else np.full_like(margin, _unsound(*values))


def worst_place(margin: np.ndarray) -> tuple[Any, float]:
    """Index and margin of the worst place; () for a single one."""
    if not margin.ndim:
        return (), float(margin)
    k = int(np.argmin([_order(float(one)) for one in margin]))
    return k, float(margin[k])


ENDS: dict[int, dict[str, float]] = {0: {"least": 1.0}, -1: {"most": 1.0}}  # what a crossing claims of a/b


def _in_halves(room: np.ndarray, half: np.ndarray) -> np.ndarray:
    """room / half; an interval without width, up to rounding, is wholly inside, wholly outside, or at the limit."""
    found = np.where(half <= 0, np.where(room == 0, 0.0, np.copysign(np.inf, room)), room / half)
    return np.where(np.isinf(room) & (room > 0), np.inf, found)


def _order(margin: float) -> float:
    """Margins in order; what has no interval is open, with nothing known in its favour."""
    return 0.0 if math.isnan(margin) else margin


def _badness(verdict: Verdict) -> float:
    return _order(verdict.margin)


def _several(checks: Mapping[str, Check], enough: int) -> Check:
    """The word of the worst of the `enough` best."""

    def check(results: Results) -> Verdict:
        verdicts = {name: one(results) for name, one in checks.items()}
        name = sorted(verdicts, key=lambda name: _badness(verdicts[name]))[len(verdicts) - enough]
        worst = verdicts[name]
        where = f"{name}, {worst.where}" if worst.where else name
        numbers: dict[str, Any] = {name: v.numbers for name, v in verdicts.items()}
        if enough < len(checks):
            words = [v.word for v in verdicts.values()]
            numbers = {"checks": len(words), "needed": enough} | {word: words.count(word) for word in WORDS} | numbers
        return Verdict(worst.margin, numbers, worst.repeats, where, worst.worst)

    return check


def _estimate(name: str, found: tuple[float, float, float], low: float, high: float, repeats: int) -> Verdict:
    """An estimate with its interval against a range."""
    value, bottom, top = map(float, found)
    numbers = {name: value, "low": bottom, "high": top, "range": [low, high]}
    return Verdict(float(margins(value, bottom, top, low, high)), numbers, repeats)


def _compare(a: Quantity, b: Quantity, factor: float, sign: int) -> Check:
    """Whether sign * (mean(a)/mean(b) - factor) is below 0; the numbers are those of the worst place."""
    limit = {"most": factor} if sign > 0 else {"least": factor}

    def check(results: Results) -> Verdict:
        rows = []
        for point, left, right in _paired(results, a, b):
            ratio, low, high = ratio_interval(left, right)
            worst, margin = worst_place(sound(margins(ratio, low, high, **limit), left, right))
            found = (left.mean(0)[worst], right.mean(0)[worst], ratio[worst], low[worst], high[worst])
            rows.append((margin, point, found))
        margin, point, found = min(rows, key=lambda row: _order(row[0]))
        numbers = dict(zip(("value", "reference", "ratio", "low", "high"), map(float, found))) | {"limit": factor}
        return Verdict(margin, numbers | _where(point, len(rows)), len(left))

    return check


def _monotone(a: Series, x: str, span: Span, sign: int) -> Check:
    def check(results: Results) -> Verdict:
        x_, y = results.curve(a, x, span)
        if len(x_) < 2:
            return Verdict(np.nan, {"places": len(x_)}, len(y))
        mean, low, high = interval(np.diff(y, axis=1))
        found = margins(mean, low, high, **({"least": 0.0} if sign > 0 else {"most": 0.0}))
        k, margin = worst_place(sound(found, y))
        numbers = {"first": float(y.mean(0)[0]), "last": float(y.mean(0)[-1]), "steps": len(found)}
        worst = {"right steps": int((found > 1).sum()), f"worst {x}": float(x_[k]), "worst step": float(mean[k])}
        return Verdict(margin, numbers | worst | {"low": float(low[k]), "high": float(high[k])}, len(y))

    return check


def _paired(results: Results, a: Quantity, b: Quantity) -> list[tuple[Point, np.ndarray, np.ndarray]]:
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


def _match(point: Point, others: Iterable[Point]) -> Point:
    """The one of `others` whose coordinates all agree with `point`."""
    others = list(others)
    found = [other for other in others if set(other) <= set(point)]
    if len(found) != 1:
        raise KeyError(f"{len(found)} points to compare with {dict(point)} among {[dict(p) for p in others]}")
    return found[0]


def _positive(*arrays: np.ndarray) -> bool:
    return all(bool(np.all(np.isfinite(values) & (values >= 0))) for values in arrays)


def _unsound(*arrays: np.ndarray) -> float:
    """The margin of values that no quantity can have: nan where some are undefined, else beyond contradiction."""
    return -np.inf if any(bool(np.any(values < 0)) for values in arrays) else np.nan


def _where(point: Point, points: int) -> dict[str, Any]:
    """How many points a claim was tested at, and which of them is shown: the worst."""
    return {"points": points, **{f"worst {name}": value for name, value in point}} if points > 1 else {}


def _name(quantity: Quantity) -> str:
    ref = of(quantity) if isinstance(quantity, str) else quantity
    if not isinstance(ref, Ref):
        return f"{ref:g}"
    series = ref.series if isinstance(ref.series, str) else getattr(ref.series, "__name__", "value")
    settled = [f"{name}={value}" for name, value in ref.fixed.items() if not callable(value)]
    return " ".join([series, *settled])
