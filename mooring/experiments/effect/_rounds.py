"""How many rounds curves take, as functions of what trials gave."""

from functools import partial

import numpy as np

from mooring.experiments.base.claims import Check, every, measured
from mooring.experiments.base.results import Ref, Results, of


def sound(*values: np.ndarray) -> bool:
    """Errors, losses and accuracies are finite and not negative."""
    return all(bool(np.all(np.isfinite(array) & (array >= 0))) for array in values)


def rounds_to(series: str, share: float, start: float | None = None):
    """The first round at which a curve has come within `share` of its way from its start to its end; -1 for a curve
    that no loss can have."""

    def measure(values: dict) -> float:
        curve = np.asarray(values[series])
        if not sound(curve):
            return -1.0
        first = curve[0] if start is None else start
        return float(values["t"][int(np.argmax(curve - curve[-1] <= share * (first - curve[-1])))])

    return measure


def speed_up(results: Results, series: str, few: dict, many: dict) -> np.ndarray:
    """[repeats]: how many times fewer rounds the curve of `many` takes to where that of `few` ends; -1 for curves that
    that no loss can have."""
    slow, fast = (results.one(of(series, **point)) for point in (few, many))
    if not sound(slow, fast):
        return np.full(len(slow), -1.0)
    t = results.one(of("t", **few))[0]
    arrival = np.argmax(fast <= slow[:, -1:], axis=1)
    return np.where((fast <= slow[:, -1:]).any(1), t[-1] / np.maximum(t[arrival], 1), 0.0)


def gains_more(series: str, few: dict, many: dict, small: dict, large: dict, least: float, most: float) -> Check:
    """The speed-up from more local work: at least `least` for `small`, at most `most` for `large`, and larger for the
    former."""

    def gain(results: Results, lam: dict) -> tuple[np.ndarray, ...]:
        values = speed_up(results, series, few | lam, many | lam)
        return values, values

    def difference(results: Results) -> tuple[np.ndarray, ...]:
        much, little = gain(results, small)[0], gain(results, large)[0]
        return much - little, much, little

    return every(
        **{
            "small lambda": measured(partial(gain, lam=small), low=least),
            "large lambda": measured(partial(gain, lam=large), high=most),
            "difference": measured(difference, low=0.0),
        }
    )


def at_round(series: str, t: int, **fixed) -> Ref:
    """A curve's value at round t."""
    return of(lambda values: values[series][list(values["t"]).index(t)], **fixed)
