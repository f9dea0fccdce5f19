"""Every kind of claim is held on results made for it, contradicted where they say otherwise or change their sign, and
open where they cannot tell."""

import inspect

import numpy as np
import pytest

from mooring_papers.base import claims
from mooring_papers.base.results import Results, Trial, between, confidence, interval, of, one_of, ratio_interval

X = np.array([0.1, 0.3, 1.0, 3.0, 10.0])


def made(**series) -> Results:
    """20 repeats at two points; numbers and curves vary by some per cent from seed to seed, the same for all series."""
    rng = np.random.default_rng(0)
    trials = []
    for seed in range(20):
        wobble = 1 + 0.05 * rng.standard_normal()
        for gap in (1, 2):
            own = {
                name: (np.asarray(value, float) * wobble * (1 + 0.01 * rng.standard_normal())).tolist()
                for name, value in series.items()
            }
            trials.append(Trial({"gap": gap, "method": "fedavg"}, seed, own | {"x": X.tolist()}))
    return Results(trials)


def negated(results: Results) -> Results:
    def flip(value):
        return (-np.asarray(value)).tolist()

    return Results(
        [Trial(t.point, t.seed, {k: v if k == "x" else flip(v) for k, v in t.values.items()}) for t in results.trials]
    )


AT = {"gap": 1}
KINDS = {
    "lower": (claims.lower("a", "b"), {"a": 1, "b": 2}, {"a": 2, "b": 1}),
    "lower than a number": (claims.lower("a", 1.5), {"a": 1}, {"a": 2}),
    "lower by a factor": (claims.lower("a", "b", 0.6), {"a": 1, "b": 2}, {"a": 1.4, "b": 2}),
    "lower along a curve": (claims.lower("a", "b"), {"a": X, "b": 2 * X}, {"a": X, "b": 2 * X[::-1]}),
    "higher": (claims.higher("a", "b", 1.5), {"a": 2, "b": 1}, {"a": 1.2, "b": 1}),
    "higher than a number": (claims.higher("a", 1.5), {"a": 2}, {"a": 1}),
    "close": (claims.close("a", "b", 0.1), {"a": 1.05, "b": 1}, {"a": 1.2, "b": 1}),
    "close from below": (claims.close("a", "b", 0.1), {"a": 0.95, "b": 1}, {"a": 0.8, "b": 1}),
    "ratio": (claims.ratio("a", "b", 1.5, 2.5), {"a": 2, "b": 1}, {"a": 3, "b": 1}),
    "ratio from below": (claims.ratio("a", "b", 1.5, 2.5), {"a": 2, "b": 1}, {"a": 1, "b": 1}),
    "alike": (claims.alike(["a", "b", "c"], 0.1), {"a": 1, "b": 1.04, "c": 1.07}, {"a": 1, "b": 1.07, "c": 1.14}),
    "ordered": (claims.ordered(["a", "b", "c"]), {"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 3, "c": 2}),
    "within": (claims.within("a", 0.9, 1.1), {"a": 1}, {"a": 1.2}),
    "falling": (claims.falling(of("a", **AT), "x"), {"a": 1 / X}, {"a": X}),
    "falling but for a step": (claims.falling(of("a", **AT), "x"), {"a": [5, 4, 3, 2, 1]}, {"a": [5, 4, 4.5, 2, 1]}),
    "rising": (claims.rising(of("a", **AT), "x"), {"a": X}, {"a": 1 / X}),
    "flat": (claims.flat(of("a", **AT), "x", 0.2), {"a": [1, 1.1, 1, 1.05, 1]}, {"a": [1, 1.3, 1, 1, 1]}),
    "flat on a span": (
        claims.flat(of("a", **AT), "x", 0.2, span=(0, 2)),
        {"a": [1, 1, 1, 9, 9]},
        {"a": [1, 1, 2, 2, 2]},
    ),
    "slope": (claims.slope(of("a", **AT), "x", 1.8, 2.2), {"a": X**2}, {"a": X}),
    "slope down": (claims.slope(of("a", **AT), "x", -1.2, -0.8), {"a": 1 / X}, {"a": X}),
    "straight": (claims.straight(of("a", **AT), "x", 0.99), {"a": 2 + X}, {"a": [2, 12, 2, 12, 12]}),
    "straight up": (claims.straight(of("a", **AT), "x", 0.99), {"a": 2 + X}, {"a": 20 - X}),
    "crosses": (
        claims.crosses(of("a", **AT), of("b", **AT), "x", 0.9, 1.1),
        {"a": 1 / X, "b": X},
        {"a": X, "b": 1 / X},
    ),
    "crosses a level elsewhere": (
        claims.crosses(of("a", **AT), 1.0, "x", 0.9, 1.1),
        {"a": 1 / X},
        {"a": 3 / X},
    ),
    "crosses never": (claims.crosses(of("a", **AT), 1.0, "x", 0.9, 1.1), {"a": 1 / X}, {"a": 20 / X}),
    "measured": (
        claims.measured(
            lambda r: (r.repeats(of("b", **AT)) - r.repeats(of("a", **AT)), r.repeats(of("a", **AT))), low=0.0
        ),
        {"a": 1, "b": 2},
        {"a": 2, "b": 1},
    ),
    "near": (claims.near("a", "b", 0.1), {"a": 1.04, "b": 1}, {"a": 1.2, "b": 1}),
    "near from below": (claims.near("a", "b", 0.1), {"a": 0.96, "b": 1}, {"a": 0.8, "b": 1}),
    "not_below": (claims.not_below("a", "b", 0.1), {"a": 0.98, "b": 1}, {"a": 0.8, "b": 1}),
    "most": (
        claims.most(0.6, one=claims.lower("a", 2.0), two=claims.lower("a", 1.5), three=claims.lower("a", 0.5)),
        {"a": 1},
        {"a": 1.7},
    ),
    "every": (
        claims.every(one=claims.lower("a", 2.0), two=claims.higher("a", 0.5)),
        {"a": 1},
        {"a": 0.4},
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_claim_is_held_or_contradicted(kind):
    check, good, bad = KINDS[kind]
    assert check(made(**good)).outcome == claims.HELD
    assert check(made(**bad)).outcome == claims.CONTRADICTED
    assert check(negated(made(**good))).outcome == claims.CONTRADICTED


@pytest.mark.parametrize("kind", KINDS)
def test_one_repeat_leaves_every_claim_open(kind):
    check, good, bad = KINDS[kind]
    for series in (good, bad):
        assert check(Results([t for t in made(**series).trials if t.seed == 0])).outcome == claims.OPEN
    alone = Results([t for t in made(**good).trials if t.seed == 0])
    assert check(negated(alone)).outcome == claims.CONTRADICTED  # no quantity can be negative


@pytest.mark.parametrize("kind", KINDS)
def test_repeats_that_disagree_leave_every_claim_open(kind):
    check, good, bad = KINDS[kind]
    for_it, against_it = ([t for t in made(**series).trials if t.seed == 0] for series in (good, bad))
    verdict = check(Results([*for_it, *(t._replace(seed=1) for t in against_it)]))
    assert verdict.outcome == claims.OPEN
    assert verdict.needs is None or verdict.needs > 2


def test_margins_count_half_widths():
    assert claims.margins(2.0, 1.0, 4.0, most=3.0) == pytest.approx(0.5)
    assert claims.margins(2.0, 1.0, 4.0, most=4.0) == pytest.approx(1.0)  # the end itself is not inside
    assert claims.margins(2.0, 1.0, 4.0, most=1.0) == pytest.approx(-1.0)  # all of it is outside
    assert claims.margins(2.0, 1.0, 4.0, least=1.5, most=9.0) == pytest.approx(0.5)
    assert claims.margins(1.0, 1.0, 1.0, most=1.0) == 0 and claims.margins(1.0, 1.0, 1.0, most=1.1) == np.inf
    assert claims.margins(1.0, 1.0, 1.0, most=0.9) == -np.inf
    assert np.isnan(claims.margins(1.0, np.nan, np.nan, most=2.0))


def test_repeats_that_would_decide():
    """Twice the margin takes four times the repeats."""
    rng = np.random.default_rng(4)
    noise = rng.standard_normal(400)
    few = Results([Trial({}, k, {"a": 10 + 5 * e}) for k, e in enumerate(noise[:8])])
    verdict = claims.lower("a", 10 + 2 * float(np.std(noise)) + 5 * float(noise[:8].mean()))(few)
    assert verdict.outcome == claims.OPEN
    assert verdict.needs == int(np.ceil(8 / verdict.margin**2)) > 8
    more = Results([Trial({}, k, {"a": 10 + 5 * e}) for k, e in enumerate(np.tile(noise[:8], 40))])
    assert claims.lower("a", 10 + 2 * float(np.std(noise)) + 5 * float(noise[:8].mean()))(more).outcome == claims.HELD


def test_every_kind_is_tested():
    functions = [f for name, f in vars(claims).items() if inspect.isfunction(f) and not name.startswith("_")]
    kinds = {f.__name__ for f in functions if f.__annotations__.get("return") == "CheckFunction"}
    assert len(kinds) > 10
    assert kinds == {name.split()[0] for name in KINDS}


def test_differences_within_the_interval_do_not_count():
    rng = np.random.default_rng(1)
    noisy = [Trial({}, seed, {"a": rng.normal(10, 3), "b": rng.normal(10.5, 3)}) for seed in range(10)]
    assert np.mean([t.values["a"] for t in noisy]) < np.mean([t.values["b"] for t in noisy])
    assert not claims.lower("a", "b")(Results(noisy)).is_held
    paired = [Trial({}, t.seed, {"a": t.values["a"], "b": t.values["a"] + 0.5}) for t in noisy]
    assert claims.lower("a", "b")(Results(paired)).is_held  # the same difference, at every seed


def test_nan_and_infinity_hold_nothing():
    for value in (np.nan, np.inf):
        for check in (claims.lower("a", 1e9), claims.higher("a", 1e-9), claims.within("a", 0, 1e300)):
            assert check(Results([Trial({}, seed, {"a": value}) for seed in (0, 1)])).outcome == claims.OPEN


def test_references():
    results = Results(
        [
            Trial({"gap": gap, "method": method}, seed, {"error": [gap, 10 * gap + seed], "rounds": [1, 2]})
            for seed in (1, 0)
            for gap in (1, 2)
            for method in ("x", "y")
        ]
    )
    taken = results.take(of("error", at=-1, method="x"))
    assert list(taken) == [(("gap", 1),), (("gap", 2),)]
    assert taken[(("gap", 2),)].tolist() == [20, 21]  # in the order of seeds
    assert results.repeats(of("error", at=np.max, method="x", gap=2)).tolist() == [20, 21]
    assert list(results.take(of("error", method="x", gap=between(low=2)))) == [(("gap", 2),)]
    assert results.repeats(of(lambda values: values["error"][0] * 3, method="y", gap=2)).tolist() == [6, 6]
    curve = results.curve(of("error", at=0, method="x"), "gap")
    assert curve.x.tolist() == [1, 2] and curve.y.tolist() == [[1, 2], [1, 2]]
    inside = results.curve(of("error", method="x", gap=2), "rounds", span=(2, 9))
    assert inside.x.tolist() == [2] and inside.y.tolist() == [[20], [21]]
    with pytest.raises(KeyError, match="no series 'eror'"):
        results.take("eror")
    with pytest.raises(KeyError, match="no trial"):
        results.take(of("error", method="z"))
    with pytest.raises(KeyError, match="does not fix"):
        results.curve(of("error", at=0), "gap")


def test_a_quantity_with_fewer_coordinates_is_repeated():
    results = Results(
        [Trial({"batch": b, "gap": g}, seed, {"a": 1.0 + b * g}) for b in (0, 20) for g in (1, 2) for seed in (0, 1)],
    )
    verdict = claims.lower(of("a", batch=0), of("a", batch=one_of((20,))))(results)
    assert verdict.is_held
    full = of("a", batch=0, gap=2)
    assert claims.higher(of("a", batch=20), full)(results).numbers["points"] == 2
    with pytest.raises(KeyError, match="points to compare"):
        claims.lower(of("a", gap=1), of("a", batch=0))(results)


def test_intervals_cover_as_often_as_they_say():
    rng = np.random.default_rng(2)
    draws = rng.normal(6, 1, size=(12, 5000))
    _, low, high = interval(draws)
    assert np.mean((low <= 6) & (high >= 6)) == pytest.approx(0.95, abs=0.01)
    pairs = rng.normal(10, 1, size=draws.shape)
    _, low, high = ratio_interval(2 * pairs + rng.normal(0, 1, draws.shape), pairs)
    assert np.mean((low <= 2) & (high >= 2)) == pytest.approx(0.95, abs=0.015)
    assert np.isnan(interval(np.array([3.0]))[1:]).all() and interval(np.array([3.0]))[0] == 3
    assert ratio_interval(pairs[:, 0], pairs[:, 0]) == (1, 1, 1)


def test_a_slope_of_three_repeats_is_covered_as_often_as_the_interval_says():
    """A bootstrap of three repeats covered 76 %."""
    rng = np.random.default_rng(5)
    check, inside = claims.slope("a", "x", -np.inf, np.inf), []
    for _ in range(1500):
        noise = np.exp(0.2 * rng.standard_normal((3, len(X))))
        numbers = check(Results([Trial({}, k, {"a": (X * e).tolist(), "x": X.tolist()}) for k, e in enumerate(noise)]))
        inside.append(numbers.numbers["low"] <= 1 <= numbers.numbers["high"])
    assert np.mean(inside) == pytest.approx(0.95, abs=0.02)


def test_a_stricter_level_widens_the_interval():
    values = np.array([1.0, 2.0, 4.0])
    with confidence(0.975):
        wide = interval(values)
    assert wide[2] - wide[1] > interval(values)[2] - interval(values)[1]


def test_the_interval_of_a_ratio_agrees_with_the_paired_differences():
    rng = np.random.default_rng(6)
    a, b = rng.normal(3, 1, 6), rng.normal(5, 1, 6)
    _, low, high = ratio_interval(a, b)
    for end in (low, high):
        _, bottom, top = interval(a - end * b)
        assert min(abs(bottom), abs(top)) < 1e-9
    assert np.isnan(ratio_interval(a, rng.normal(0, 1, 6))[1])


def test_checks_describe_themselves():
    text = claims.every(one=claims.lower(of("a", at=-1, gap=between(1, 3)), "b", 2.0)).text
    assert text == "every(one=lower(a[at=-1, gap=between(low=1, high=3)], b, 2))"
    assert claims.lower("a", "b").digest != claims.lower("a", "b", 1.1).digest


MEETINGS = [([1, -1], 0.5), ([1, 0.5, -0.5, -1], 1.5), ([1, -1, 1], np.nan), ([1, 1], np.nan), ([-1, 1], np.nan)]


@pytest.mark.parametrize(("gap", "where"), [*MEETINGS, ([1, -1, 1, -1], np.nan)])
def test_meeting(gap, where):
    found = claims.find_crossing(np.arange(len(gap), dtype=float), np.array(gap))
    assert found == pytest.approx(where, nan_ok=True)
