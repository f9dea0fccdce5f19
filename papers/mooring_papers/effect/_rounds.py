"""Numbers of rounds that curves take, as functions of a trial's values."""

from collections.abc import Callable
from functools import partial

import numpy as np

from mooring_papers.base.claims import NEARLY, Claim, measured
from mooring_papers.base.results import Ref, Results, of

MINIMAL = 1 + NEARLY  # ratio of a "minimal" or "marginal" benefit


def sound(*values: np.ndarray) -> bool:
    """Return whether errors, losses and accuracies are finite and not negative."""
    return all(bool(np.all(np.isfinite(array) & (array >= 0))) for array in values)


def rounds_to(series: str, share: float, start: float | None = None) -> Callable[[dict], float]:
    """The first round at which a curve has come within `share` of its way from its start to its end; -1 for a curve
    that no loss can have."""
    return partial(first_round_within, series=series, share=share, start=start)


def first_round_within(values: dict, series: str, share: float, start: float | None) -> float:
    curve = np.asarray(values[series])
    if not sound(curve):
        return -1.0
    first = curve[0] if start is None else start
    return float(values["t"][int(np.argmax(curve - curve[-1] <= share * (first - curve[-1])))])


def speed_up(results: Results, series: str, few: dict, many: dict) -> np.ndarray:
    """[repeats]: how many times fewer rounds the curve of `many` takes to where that of `few` ends; -1 for curves that
    that no loss can have."""
    slow, fast = (results.repeats(of(series, **point)) for point in (few, many))
    if not sound(slow, fast):
        return np.full(len(slow), -1.0)
    t = results.repeats(of("t", **few))[0]
    arrival = np.argmax(fast <= slow[:, -1:], axis=1)
    return np.where((fast <= slow[:, -1:]).any(1), t[-1] / np.maximum(t[arrival], 1), 0.0)


def work_claims(series: str, few: dict, many: dict, small: dict, large: dict, quantity: str) -> list[Claim]:
    """Claims on the speed-up from more local work, with the smallest and with the largest lambda."""

    def gain(lam: dict) -> object:
        return partial(speed_up_twice, series=series, few=few | lam, many=many | lam)

    difference = partial(speed_up_difference, series=series, few=few, many=many, small=small, large=large)
    return [
        Claim(
            "small-lambda-gains",
            f"{quantity}: with the smallest lambda the most local work takes fewer rounds to the value that the least "
            "reaches at the end (ratio of rounds above 1)",
            measured(gain(small), low=1.0),
        ),
        Claim(
            "small-lambda-gains-more",
            f"{quantity}: this ratio of rounds is larger with the smallest lambda than with the largest",
            measured(difference, low=0.0),
        ),
        Claim(
            "large-lambda-gains-minimally",
            f"{quantity}: with the largest lambda the ratio of rounds is at most {MINIMAL}",
            measured(gain(large), high=MINIMAL),
        ),
    ]


def speed_up_twice(results: Results, series: str, few: dict, many: dict) -> tuple[np.ndarray, ...]:
    values = speed_up(results, series, few, many)
    return values, values


def speed_up_difference(
    results: Results, series: str, few: dict, many: dict, small: dict, large: dict
) -> tuple[np.ndarray, ...]:
    small_gain, large_gain = (speed_up(results, series, few | lam, many | lam) for lam in (small, large))
    return small_gain - large_gain, small_gain, large_gain


def at_round(series: str, t: int, **fixed) -> Ref:
    """Return a reference to a curve's value at round t."""
    return of(partial(value_at, series=series, t=t), **fixed)


def value_at(values: dict, series: str, t: int) -> float:
    return values[series][list(values["t"]).index(t)]
