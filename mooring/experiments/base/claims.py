"""Claims: sentences of a paper as functions of the results, answered with one of three words.

    held           the whole 95 % interval is on the paper's side of the threshold
    contradicted   the whole interval is on the other side
    open           neither, or there is no interval: one repeat has none

Intervals are Student's over repeats: of paired differences for comparisons, of the repeats' own slopes, crossings or
logarithms of ratios for others. A comparison is made at every point that the references leave open. The word is that
of the worst place, measured by its margin: by how many half-widths of its interval a mean lies inside what is claimed.
A margin grows like the root of the number of repeats, which estimates how many would decide.

"Nearly equal" and "not worse" are equivalence claims (`near`, `close`, `not_below`): held only if the whole interval
lies inside the stated margin.

Quantities are errors, losses, norms, gains or accuracies: negative ones contradict every claim, undefined ones leave it
open. Every check describes itself (`Check.text`); the registration of a claim contains a digest of that text.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from mooring.experiments.base.results import Coordinates, Ref, Results, describe, interval, of, ratio_interval

Series = Ref | str
Quantity = Series | float
Span = tuple[float, float]
EVERYWHERE = (-np.inf, np.inf)
NEARLY = 0.1  # "almost the same", "negligible", "around": within 10 % where the paper prints no error of its own
LINEAR = 0.95  # squared correlation of a "linear" relation
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


@dataclass(frozen=True)
class Check:
    """What decides a claim, and its description."""

    text: str
    run: Callable[[Results], Verdict]

    def __call__(self, results: Results) -> Verdict:
        return self.run(results)

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]


Maker = Callable[[Results], Verdict] | Check


def check_maker(function: Callable[..., Maker]) -> Callable[..., Check]:
    """A function that makes checks, whose checks are described by its name and arguments."""

    @wraps(function)
    def make(*args: Any, **more: Any) -> Check:
        found = function(*args, **more)
        return Check(describe(partial(function, *args, **more)), getattr(found, "run", found))

    return make


@dataclass(frozen=True)
class Claim:
    id: str
    says: str  # how the paper's sentence, which the registration quotes, is tested
    check: Check
    note: str = ""  # what is known of a claim that is open
    evidence: str = ""  # why a contradicted claim is the paper's own: the reason, and what shows it


@check_maker
def lower(a: Quantity, than: Quantity, factor: float = 1.0) -> Maker:
    """a < factor * than at every point: the whole interval of mean(a)/mean(than) is below the factor."""
    return _compare(a, than, factor, sign=1)


@check_maker
def higher(a: Quantity, than: Quantity, factor: float = 1.0) -> Maker:
    """a > factor * than at every point: the whole interval of mean(a)/mean(than) is above the factor."""
    return _compare(a, than, factor, sign=-1)


@check_maker
def close(a: Quantity, to: Quantity, within: float) -> Maker:
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
def ratio(a: Quantity, b: Quantity, low: float, high: float) -> Maker:
    """mean(a)/mean(b) lies in [low, high] with its whole interval, at every point."""
    return every(**{f"at least {low:g}": higher(a, b, low), f"at most {high:g}": lower(a, b, high)})


@check_maker
def alike(quantities: Sequence[Quantity], within: float) -> Maker:
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


@check_maker
def ordered(quantities: Sequence[Quantity]) -> Maker:
    """Each quantity is lower than the next, at every point."""
    return every(**{f"{_name(a)} < {_name(b)}": lower(a, b) for a, b in pairwise(quantities)})


@check_maker
def within(a: Series, low: float, high: float) -> Maker:
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
def measured(measure: Callable[[Results], tuple[np.ndarray, ...]], low: float = -np.inf, high: float = np.inf) -> Maker:
    """What `measure` makes of the results, [repeats], lies in [low, high] with its whole interval.

    It gives the measured values, which may be differences, and the quantities that they rest on.
    """

    def check(results: Results) -> Verdict:
        values, *quantities = measure(results)
        verdict = _estimate("value", values, low, high)
        return verdict._replace(margin=float(sound(np.array(verdict.margin), *quantities)))

    return check


@check_maker
def falling(a: Series, x: str, span: Span = EVERYWHERE) -> Maker:
    """a falls from each x to the next, beyond the interval of the paired differences."""
    return _monotone(a, x, span, -1)


@check_maker
def rising(a: Series, x: str, span: Span = EVERYWHERE) -> Maker:
    """a rises from each x to the next, beyond the interval of the paired differences."""
    return _monotone(a, x, span, 1)


@check_maker
def flat(a: Series, x: str, within: float, span: Span = EVERYWHERE) -> Maker:
    """Along x no mean is more than 1 + within times another, with the whole interval of their ratio."""

    def check(results: Results) -> Verdict:
        x_, y = results.curve(a, x, span)
        if len(x_) < 2:
            return Verdict(float(sound(np.array(np.nan), results.curve(a, x).y)), {"places": len(x_)}, len(y))
        top, bottom = (side.reshape(len(y), -1) for side in np.broadcast_arrays(y[:, :, None], y[:, None, :]))
        found = ratio_interval(top, bottom)
        k, margin = worst_place(sound(margins(*found, most=1 + within), y))
        ratio, low, high = (float(one[k]) for one in found)
        numbers = {"lowest": float(bottom.mean(0)[k]), "highest": float(top.mean(0)[k]), "ratio": ratio}
        return Verdict(margin, numbers | {"low": low, "high": high, "limit": 1 + within}, len(y))

    return check


@check_maker
def slope(a: Series, x: str, low: float, high: float, span: Span = EVERYWHERE) -> Maker:
    """The slope of log a on log x lies in [low, high] with the whole interval over the repeats' slopes."""

    def check(results: Results) -> Verdict:
        x_, y = results.curve(a, x, span)
        if not (_positive(y) and np.all(y > 0)) or len(x_) < 2:
            return Verdict(_unsound(results.curve(a, x).y), {"slope": np.nan, "range": [low, high]}, len(y))
        slopes = np.polyfit(np.log(x_), np.log(y).T, 1)[0]
        return _estimate("slope", slopes, low, high)

    return check


@check_maker
def straight(a: Series, x: str, r2: float, span: Span = EVERYWHERE) -> Maker:
    """a is a rising straight line in x: the squared correlation with x, counted negative for a falling line, is at
    least r2 with the whole interval over the repeats' own."""

    def check(results: Results) -> Verdict:
        x_, y = results.curve(a, x, span)
        verdict = _estimate("r2", np.array([straightness(x_, row) for row in y]), r2, np.inf)
        slope_, offset = np.polyfit(x_, y.mean(0), 1)
        numbers = {"slope": float(slope_), "offset": float(offset), **verdict.numbers, "limit": r2}
        del numbers["range"]
        return verdict._replace(margin=float(sound(np.array(verdict.margin), y)), numbers=numbers)

    return check


@check_maker
def crosses(a: Series, b: Quantity, x: str, low: float, high: float, span: Span = EVERYWHERE) -> Maker:
    """Along x, a starts above b and ends below it; they meet, on logarithmic axes, within [low, high].

    The interval is that of the repeats' own meeting points. Where one repeat does not meet exactly once the claim is
    not held, and contradicted if a is below b at the first place or above it at the last one, beyond the interval.
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
        found = Verdict(float(margins(mean, first, last, low, high)), numbers, len(top))
        if not np.isnan(mean):
            return found
        whole = float(np.exp(find_crossing(np.log(x_), np.log(top.mean(0)) - np.log(bottom.mean(0)))))
        ends = [margins(*ratio_interval(top[:, k], bottom[:, k]), **side) for k, side in ENDS.items()]
        margin = min(0.0, *(_order(float(end)) for end in ends))
        return found._replace(margin=margin, numbers=numbers | {"crossing": whole})

    return check


@check_maker
def near(a: Quantity, b: Quantity, margin: float) -> Maker:
    """a and b are equivalent: the whole interval of a - b lies within +-margin, at every point."""
    return _difference(a, b, -margin, margin)


@check_maker
def not_below(a: Quantity, b: Quantity, margin: float) -> Maker:
    """a is not worse than b, higher being better: the whole interval of a - b lies above -margin, at every point."""
    return _difference(a, b, -margin, np.inf)


@check_maker
def every(**checks: Check) -> Maker:
    """All of several checks; their numbers are told apart by the given names."""
    return _several(checks, len(checks))


@check_maker
def most(share: float, **checks: Check) -> Maker:
    """At least this share of several checks."""
    return _several(checks, math.ceil(share * len(checks)))


def find_crossing(x: np.ndarray, gap: np.ndarray) -> float:
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


def _several(checks: Mapping[str, Check], enough: int) -> Callable[[Results], Verdict]:
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


def _estimate(name: str, values: np.ndarray, low: float, high: float) -> Verdict:
    """The mean of the repeats' own estimates, with its interval, against a range."""
    mean, bottom, top = (float(part) for part in interval(values))
    numbers = {name: mean, "low": bottom, "high": top, "range": [low, high]}
    return Verdict(float(margins(mean, bottom, top, low, high)), numbers, len(values))


def _compare(a: Quantity, b: Quantity, factor: float, sign: int) -> Callable[[Results], Verdict]:
    """Whether the paired differences sign * (a - factor * b) are below 0; the numbers are those of the worst place."""

    def check(results: Results) -> Verdict:
        rows = []
        for point, left, right in _paired(results, a, b):
            found = margins(*interval(sign * (left - factor * right)), most=0.0)
            worst, margin = worst_place(sound(found, left, right))
            ratio, low, high = ratio_interval(left, right)
            numbers = (left.mean(0)[worst], right.mean(0)[worst], ratio[worst], low[worst], high[worst])
            rows.append((margin, point, numbers))
        margin, point, numbers = min(rows, key=lambda row: _order(row[0]))
        named = dict(zip(("value", "reference", "ratio", "low", "high"), map(float, numbers))) | {"limit": factor}
        return Verdict(margin, named | _where(point, len(rows)), len(left))

    return check


def _difference(a: Quantity, b: Quantity, low: float, high: float) -> Callable[[Results], Verdict]:
    """Whether the paired differences a - b lie in [low, high]; the numbers are those of the worst place."""

    def check(results: Results) -> Verdict:
        rows = []
        for point, left, right in _paired(results, a, b):
            mean, bottom, top = interval(left - right)
            worst, margin = worst_place(sound(margins(mean, bottom, top, low, high), left, right))
            rows.append((margin, point, (mean[worst], bottom[worst], top[worst])))
        margin, point, numbers = min(rows, key=lambda row: _order(row[0]))
        named = dict(zip(("difference", "low", "high"), map(float, numbers))) | {"range": [low, high]}
        return Verdict(margin, named | _where(point, len(rows)), len(left))

    return check


def _monotone(a: Series, x: str, span: Span, sign: int) -> Callable[[Results], Verdict]:
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


def _paired(results: Results, a: Quantity, b: Quantity) -> list[tuple[Coordinates, np.ndarray, np.ndarray]]:
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


def _match(point: Coordinates, others: Iterable[Coordinates]) -> Coordinates:
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


def _where(point: Coordinates, points: int) -> dict[str, Any]:
    """How many points a claim was tested at, and which of them is shown: the worst."""
    return {"points": points, **{f"worst {name}": value for name, value in point}} if points > 1 else {}


def _name(quantity: Quantity) -> str:
    ref = of(quantity) if isinstance(quantity, str) else quantity
    if not isinstance(ref, Ref):
        return f"{ref:g}"
    series = ref.series if isinstance(ref.series, str) else getattr(ref.series, "__name__", "value")
    settled = [f"{name}={value}" for name, value in ref.fixed.items() if not callable(value)]
    return " ".join([series, *settled])
