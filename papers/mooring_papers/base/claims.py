"""Claims: sentences of a paper as functions of the results, with one of three verdicts.

    held           the whole 95 % interval is on the paper's side of the threshold
    contradicted   the whole interval is on the other side
    open           neither, or there is no interval: a single repeat has none

Intervals are Student t intervals over repeats: of paired differences for comparisons, of each repeat's slope, crossing
or log ratio for other checks. A comparison is made at every point that the references do not fix. The verdict is that
of the place with the smallest margin: the distance of the mean from the threshold in half-widths of its interval. A
margin is proportional to the root of the number of repeats, which gives an estimate of the repeats that would decide.

"Nearly equal" and "not worse" are equivalence claims (`near`, `close`, `not_below`): held only if the whole interval
lies inside the stated margin.

Quantities are errors, losses, norms, gains or accuracies: a negative value contradicts every claim, an undefined value
leaves it open. Every check has a description (`Check.text`); the registration of a claim contains its digest.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from mooring.core.types import JsonObject
from mooring_papers.base.results import Coordinates, Ref, Results, describe, interval, of, ratio_interval

Series = Ref | str
Quantity = Series | float
Span = tuple[float, float]
EVERYWHERE = (-np.inf, np.inf)
NEARLY = 0.1  # "almost the same", "negligible", "around": within 10% if the paper prints no error
LINEAR = 0.95  # squared correlation of a "linear" relation
HELD, OPEN, CONTRADICTED = WORDS = ("held", "open", "contradicted")


class Verdict(NamedTuple):
    margin: float  # of the worst place; nan if there is no interval
    numbers: JsonObject
    repeats: int
    where: str = ""  # which of several checks is the worst
    decides: JsonObject | None = None  # its numbers; None: those above

    @property
    def outcome(self) -> str:
        if self.margin > 1:
            return HELD
        return CONTRADICTED if self.margin <= -1 else OPEN

    @property
    def is_held(self) -> bool:
        return self.outcome == HELD

    @property
    def needs(self) -> int | None:
        """Number of repeats that would decide an open claim at the same means; None if it cannot be estimated."""
        if self.outcome != OPEN or not self.margin or math.isnan(self.margin):
            return None
        return math.ceil(self.repeats / self.margin**2)

    @property
    def worst(self) -> JsonObject:
        return self.numbers if self.decides is None else self.decides


@dataclass(frozen=True)
class Check:
    """A function of the results that decides a claim, and its description."""

    text: str
    run: Callable[[Results], Verdict]

    def __call__(self, results: Results) -> Verdict:
        return self.run(results)

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]


CheckFunction = Callable[[Results], Verdict] | Check


def check_maker(function: Callable[..., CheckFunction]) -> Callable[..., Check]:
    """Return a function whose checks are described by its name and its arguments."""

    @wraps(function)
    def make(*args: object, **kwargs: object) -> Check:
        check = function(*args, **kwargs)
        return Check(describe(partial(function, *args, **kwargs)), getattr(check, "run", check))

    return make


@dataclass(frozen=True)
class Claim:
    id: str
    says: str  # the test of the paper's sentence, which the registration quotes
    check: Check
    note: str = ""  # explanation of an open claim
    evidence: str = ""  # explanation of a contradicted claim


@check_maker
def lower(a: Quantity, than: Quantity, factor: float = 1.0) -> CheckFunction:
    """a < factor * than at every point: the whole interval of mean(a)/mean(than) is below the factor."""
    return _compare(a, than, factor, sign=1)


@check_maker
def higher(a: Quantity, than: Quantity, factor: float = 1.0) -> CheckFunction:
    """a > factor * than at every point: the whole interval of mean(a)/mean(than) is above the factor."""
    return _compare(a, than, factor, sign=-1)


@check_maker
def close(a: Quantity, to: Quantity, within: float) -> CheckFunction:
    """mean(a)/mean(to) is between 1/(1 + within) and 1 + within, with its whole interval, at every point."""

    def check(results: Results) -> Verdict:
        above, below = lower(a, to, 1 + within)(results), higher(a, to, 1 / (1 + within))(results)
        worst = min(above, below, key=_badness)
        numbers = {"lowest ratio": below.numbers["ratio"], "highest ratio": above.numbers["ratio"]}
        numbers |= {"low": below.numbers["low"], "high": above.numbers["high"], "within": within}
        places = {name: value for name, value in worst.numbers.items() if name.startswith(("points", "worst"))}
        return Verdict(worst.margin, numbers | places, worst.repeats)

    return check


@check_maker
def ratio(a: Quantity, b: Quantity, low: float, high: float) -> CheckFunction:
    """mean(a)/mean(b) lies in [low, high] with its whole interval, at every point."""
    return every(**{f"at least {low:g}": higher(a, b, low), f"at most {high:g}": lower(a, b, high)})


@check_maker
def alike(quantities: Sequence[Quantity], within: float) -> CheckFunction:
    """All quantities are within that share of each other, as in `close`, at every point."""

    def check(results: Results) -> Verdict:
        pairs = [(a, b) for i, a in enumerate(quantities) for b in quantities[i + 1 :]]
        verdicts = [close(a, b, within)(results) for a, b in pairs]
        k = min(range(len(pairs)), key=lambda k: _badness(verdicts[k]))
        pair_numbers = verdicts[k].numbers
        gap = max(pair_numbers["highest ratio"], 1 / (pair_numbers["lowest ratio"] or np.nan))
        numbers = {"largest ratio": float(gap), "within": within, "pair": " / ".join(map(_name, pairs[k]))}
        return Verdict(verdicts[k].margin, numbers, verdicts[k].repeats)

    return check


@check_maker
def ordered(quantities: Sequence[Quantity]) -> CheckFunction:
    """Each quantity is lower than the next, at every point."""
    return every(**{f"{_name(a)} < {_name(b)}": lower(a, b) for a, b in pairwise(quantities)})


@check_maker
def within(a: Series, low: float, high: float) -> CheckFunction:
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


@check_maker
def measured(
    measure: Callable[[Results], tuple[np.ndarray, ...]], low: float = -np.inf, high: float = np.inf
) -> CheckFunction:
    """A statistic of the results, [repeats], lies in [low, high] with its whole interval.

    `measure` returns the statistic, which may be a difference, and the quantities that it is computed from.
    """

    def check(results: Results) -> Verdict:
        values, *quantities = measure(results)
        verdict = _estimate("value", values, low, high)
        return verdict._replace(margin=float(sound(np.array(verdict.margin), *quantities)))

    return check


@check_maker
def falling(a: Series, x: str, span: Span = EVERYWHERE) -> CheckFunction:
    """a falls from each x to the next, beyond the interval of the paired differences."""
    return _monotone(a, x, span, -1)


@check_maker
def rising(a: Series, x: str, span: Span = EVERYWHERE) -> CheckFunction:
    """a rises from each x to the next, beyond the interval of the paired differences."""
    return _monotone(a, x, span, 1)


@check_maker
def flat(a: Series, x: str, within: float, span: Span = EVERYWHERE) -> CheckFunction:
    """Along x no mean is more than 1 + within times another, with the whole interval of their ratio."""

    def check(results: Results) -> Verdict:
        x_, y = results.curve(a, x, span)
        if len(x_) < 2:
            return Verdict(float(sound(np.array(np.nan), results.curve(a, x).y)), {"places": len(x_)}, len(y))
        top, bottom = (side.reshape(len(y), -1) for side in np.broadcast_arrays(y[:, :, None], y[:, None, :]))
        ratios = ratio_interval(top, bottom)
        k, margin = worst_place(sound(margins(*ratios, most=1 + within), y))
        ratio, low, high = (float(part[k]) for part in ratios)
        numbers = {"lowest": float(bottom.mean(0)[k]), "highest": float(top.mean(0)[k]), "ratio": ratio}
        return Verdict(margin, numbers | {"low": low, "high": high, "limit": 1 + within}, len(y))

    return check


@check_maker
def slope(a: Series, x: str, low: float, high: float, span: Span = EVERYWHERE) -> CheckFunction:
    """The slope of log a on log x lies in [low, high] with the whole interval over the repeats' slopes."""

    def check(results: Results) -> Verdict:
        x_, y = results.curve(a, x, span)
        if not (_positive(y) and np.all(y > 0)) or len(x_) < 2:
            return Verdict(_unsound(results.curve(a, x).y), {"slope": np.nan, "range": [low, high]}, len(y))
        slopes = np.polyfit(np.log(x_), np.log(y).T, 1)[0]
        return _estimate("slope", slopes, low, high)

    return check


@check_maker
def straight(a: Series, x: str, r2: float, span: Span = EVERYWHERE) -> CheckFunction:
    """a increases linearly in x: the squared correlation with x, negative for a decreasing line, is at least r2 with
    its whole interval over repeats."""

    def check(results: Results) -> Verdict:
        x_, y = results.curve(a, x, span)
        verdict = _estimate("r2", np.array([straightness(x_, row) for row in y]), r2, np.inf)
        slope_, offset = np.polyfit(x_, y.mean(0), 1)
        numbers = {"slope": float(slope_), "offset": float(offset), **verdict.numbers, "limit": r2}
        del numbers["range"]
        return verdict._replace(margin=float(sound(np.array(verdict.margin), y)), numbers=numbers)

    return check


@check_maker
def crosses(a: Series, b: Quantity, x: str, low: float, high: float, span: Span = EVERYWHERE) -> CheckFunction:
    """Along x, a starts above b and ends below it; they meet, on logarithmic axes, within [low, high].

    The interval is that of the repeats' crossings. If some repeat does not cross exactly once, the claim is not held,
    and contradicted if a is below b at the first place or above it at the last one, beyond the interval.
    """

    def check(results: Results) -> Verdict:
        x_, top = results.curve(a, x, span)
        bottom = np.full_like(top, b) if isinstance(b, float | int) else results.curve(b, x, span).y
        if not _positive(top, bottom):
            return Verdict(_unsound(top, bottom), {"crossing": np.nan, "range": [low, high]}, len(top))
        gaps = np.log(top) - np.log(bottom)
        places = np.array([find_crossing(np.log(x_), gap) for gap in gaps])
        mean, first, last = (float(np.exp(part)) for part in interval(places))
        numbers = {"crossing": mean, "low": first, "high": last, "range": [low, high]}
        verdict = Verdict(float(margins(mean, first, last, low, high)), numbers, len(top))
        if not np.isnan(mean):
            return verdict
        crossing_of_means = float(np.exp(find_crossing(np.log(x_), np.log(top.mean(0)) - np.log(bottom.mean(0)))))
        end_margins = [margins(*ratio_interval(top[:, k], bottom[:, k]), **side) for k, side in ENDS.items()]
        margin = min(0.0, *(_order(float(end)) for end in end_margins))
        return verdict._replace(margin=margin, numbers=numbers | {"crossing": crossing_of_means})

    return check


@check_maker
def near(a: Quantity, b: Quantity, margin: float) -> CheckFunction:
    """a and b are equivalent: the whole interval of a - b lies within +-margin, at every point."""
    return _difference(a, b, -margin, margin)


@check_maker
def not_below(a: Quantity, b: Quantity, margin: float) -> CheckFunction:
    """a is not worse than b, higher being better: the whole interval of a - b lies above -margin, at every point."""
    return _difference(a, b, -margin, np.inf)


@check_maker
def every(**checks: Check) -> CheckFunction:
    """All of several checks, by name."""
    return _several(checks, len(checks))


@check_maker
def most(share: float, **checks: Check) -> CheckFunction:
    """At least this share of several checks."""
    return _several(checks, math.ceil(share * len(checks)))


def find_crossing(x: np.ndarray, gap: np.ndarray) -> float:
    """Return the x at which gap falls through 0; nan unless it starts above, ends below and crosses once."""
    above = gap > 0
    if not above[0] or above[-1] or (np.diff(above.astype(int)) != 0).sum() != 1:
        return np.nan
    k = int(np.argmin(above))
    return float(x[k - 1] + gap[k - 1] / (gap[k - 1] - gap[k]) * (x[k] - x[k - 1]))


def straightness(x: np.ndarray, y: np.ndarray) -> float:
    """Return the squared correlation of x and y, negative if y falls; 0 if y is constant."""
    if np.ptp(y) == 0:
        return 0.0
    r = float(np.corrcoef(x, y)[0, 1])
    return r * abs(r)


def margins(mean: object, low: object, high: object, least: float = -np.inf, most: float = np.inf) -> np.ndarray:
    """Return by how many half-widths of [low, high] the means lie inside (least, most): above 1 the whole interval
    does, at -1 and below none of it; nan if there is no interval."""
    mean, low, high = (np.asarray(part, dtype=float) for part in (mean, low, high))
    with np.errstate(divide="ignore", invalid="ignore"):
        below = _in_halves(most - mean, np.where(mean < most, high - mean, mean - low))
        above = _in_halves(mean - least, np.where(mean > least, mean - low, high - mean))
    return np.minimum(below, above)


def sound(margin: np.ndarray, *values: np.ndarray) -> np.ndarray:
    """Return the margins, unless values are negative (contradicted) or undefined (open)."""
    return margin if _positive(*values) else np.full_like(margin, _unsound(*values))


def worst_place(margin: np.ndarray) -> tuple[int | tuple[int, ...], float]:
    """Return the index and the margin of the worst place; () for a single place."""
    if not margin.ndim:
        return (), float(margin)
    k = int(np.argmin([_order(float(value)) for value in margin]))
    return k, float(margin[k])


ENDS: dict[int, dict[str, float]] = {
    0: {"least": 1.0},
    -1: {"most": 1.0},
}  # bounds of a/b at the two ends of a crossing


def _in_halves(slack: np.ndarray, half: np.ndarray) -> np.ndarray:
    """Return slack / half; an interval without width, up to rounding, is inside, outside, or at the limit."""
    halves = np.where(half <= 0, np.where(slack == 0, 0.0, np.copysign(np.inf, slack)), slack / half)
    return np.where(np.isinf(slack) & (slack > 0), np.inf, halves)


def _order(margin: float) -> float:
    """Return a margin for sorting; without an interval it is 0, which is open."""
    return 0.0 if math.isnan(margin) else margin


def _badness(verdict: Verdict) -> float:
    return _order(verdict.margin)


def _several(checks: Mapping[str, Check], required: int) -> Callable[[Results], Verdict]:
    """Return the verdict of the worst of the `required` best checks."""

    def check(results: Results) -> Verdict:
        verdicts = {name: single(results) for name, single in checks.items()}
        name = sorted(verdicts, key=lambda name: _badness(verdicts[name]))[len(verdicts) - required]
        worst = verdicts[name]
        worst_name = f"{name}, {worst.where}" if worst.where else name
        numbers: JsonObject = {name: v.numbers for name, v in verdicts.items()}
        if required < len(checks):
            outcomes = [v.outcome for v in verdicts.values()]
            numbers = (
                {"checks": len(outcomes), "needed": required}
                | {outcome: outcomes.count(outcome) for outcome in WORDS}
                | numbers
            )
        return Verdict(worst.margin, numbers, worst.repeats, worst_name, worst.worst)

    return check


def _estimate(name: str, values: np.ndarray, low: float, high: float) -> Verdict:
    """Return whether the mean of the repeats' estimates is in a range, with its interval."""
    mean, bottom, top = (float(part) for part in interval(values))
    numbers = {name: mean, "low": bottom, "high": top, "range": [low, high]}
    return Verdict(float(margins(mean, bottom, top, low, high)), numbers, len(values))


def _compare(a: Quantity, b: Quantity, factor: float, sign: int) -> Callable[[Results], Verdict]:
    """Return whether the paired differences sign * (a - factor * b) are below 0, with the numbers of the worst
    place."""

    def check(results: Results) -> Verdict:
        rows = []
        for point, left, right in _paired(results, a, b):
            place_margins = margins(*interval(sign * (left - factor * right)), most=0.0)
            worst, margin = worst_place(sound(place_margins, left, right))
            ratio, low, high = ratio_interval(left, right)
            numbers = (left.mean(0)[worst], right.mean(0)[worst], ratio[worst], low[worst], high[worst])
            rows.append((margin, point, numbers))
        margin, point, numbers = min(rows, key=lambda row: _order(row[0]))
        numbers_by_name = dict(zip(("value", "reference", "ratio", "low", "high"), map(float, numbers))) | {
            "limit": factor
        }
        return Verdict(margin, numbers_by_name | _where(point, len(rows)), len(left))

    return check


def _difference(a: Quantity, b: Quantity, low: float, high: float) -> Callable[[Results], Verdict]:
    """Return whether the paired differences a - b lie in [low, high], with the numbers of the worst place."""

    def check(results: Results) -> Verdict:
        rows = []
        for point, left, right in _paired(results, a, b):
            mean, bottom, top = interval(left - right)
            worst, margin = worst_place(sound(margins(mean, bottom, top, low, high), left, right))
            rows.append((margin, point, (mean[worst], bottom[worst], top[worst])))
        margin, point, numbers = min(rows, key=lambda row: _order(row[0]))
        numbers_by_name = dict(zip(("difference", "low", "high"), map(float, numbers))) | {"range": [low, high]}
        return Verdict(margin, numbers_by_name | _where(point, len(rows)), len(left))

    return check


def _monotone(a: Series, x: str, span: Span, sign: int) -> Callable[[Results], Verdict]:
    def check(results: Results) -> Verdict:
        x_, y = results.curve(a, x, span)
        if len(x_) < 2:
            return Verdict(np.nan, {"places": len(x_)}, len(y))
        mean, low, high = interval(np.diff(y, axis=1))
        step_margins = margins(mean, low, high, **({"least": 0.0} if sign > 0 else {"most": 0.0}))
        k, margin = worst_place(sound(step_margins, y))
        numbers = {"first": float(y.mean(0)[0]), "last": float(y.mean(0)[-1]), "steps": len(step_margins)}
        worst = {"right steps": int((step_margins > 1).sum()), f"worst {x}": float(x_[k]), "worst step": float(mean[k])}
        return Verdict(margin, numbers | worst | {"low": float(low[k]), "high": float(high[k])}, len(y))

    return check


def _paired(results: Results, a: Quantity, b: Quantity) -> list[tuple[Coordinates, np.ndarray, np.ndarray]]:
    """Return (point, values of a, values of b) at every point of the quantity with more coordinates."""
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


def _match(point: Coordinates, points: Iterable[Coordinates]) -> Coordinates:
    """Return the point of `others` whose coordinates all agree with `point`."""
    points = list(points)
    matches = [candidate for candidate in points if set(candidate) <= set(point)]
    if len(matches) != 1:
        raise KeyError(f"{len(matches)} points to compare with {dict(point)} among {[dict(p) for p in points]}")
    return matches[0]


def _positive(*arrays: np.ndarray) -> bool:
    return all(bool(np.all(np.isfinite(values) & (values >= 0))) for values in arrays)


def _unsound(*arrays: np.ndarray) -> float:
    """Return the margin of impossible values: minus infinity if some are negative, nan if some are undefined."""
    return -np.inf if any(bool(np.any(values < 0)) for values in arrays) else np.nan


def _where(point: Coordinates, points: int) -> JsonObject:
    """Return the number of points that a claim was tested at, and the worst of them."""
    return {"points": points, **{f"worst {name}": value for name, value in point}} if points > 1 else {}


def _name(quantity: Quantity) -> str:
    ref = of(quantity) if isinstance(quantity, str) else quantity
    if not isinstance(ref, Ref):
        return f"{ref:g}"
    series = ref.series if isinstance(ref.series, str) else getattr(ref.series, "__name__", "value")
    fixed = [f"{name}={value}" for name, value in ref.fixed.items() if not callable(value)]
    return " ".join([series, *fixed])
