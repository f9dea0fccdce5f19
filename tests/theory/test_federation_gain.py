import math

import numpy as np
import pytest

from mooring.core.errors import RequestError
from mooring.theory import federation_gain as fg
from mooring.theory import kernel_operator as op

SIZES = [50] * 10 + [500] * 10  # Sections 7.2 and 7.3
DIM, SIGMA = 100, 0.5


def test_break_even_numbers_of_section_7_2():
    assert fg.break_even_heterogeneity(50, 100, 0.5, 10.0) == pytest.approx(7.07, abs=0.005)
    assert fg.break_even_heterogeneity(500, 100, 0.5, 10.0) == pytest.approx(0.2236, abs=5e-5)
    assert fg.break_even_heterogeneity(500, 100, 50.0, 10.0) == 10.0


def test_coupon_collector_number_of_section_7_3():
    assert fg.covering_rank(20, 100) == pytest.approx(23, abs=0.1)


def test_unseen_share_by_simulation():
    rng = np.random.default_rng(0)
    seen = np.zeros((400, 30), dtype=bool)
    for trial in range(400):
        for _ in range(6):
            seen[trial, rng.choice(30, 9, replace=False)] = True
    assert 1 - seen.mean() == pytest.approx(fg.unseen_share(6, 30, 9), abs=0.01)
    assert fg.unseen_share(20, 100, 100) == 0
    # at the covering rank less than one direction of hundred is left on average
    assert 100 * fg.unseen_share(20, 100, 23) < 1 < 100 * fg.unseen_share(20, 100, 16)


def test_gain_squared_and_plain_and_the_best_round():
    truth = np.zeros(3)
    local, path = np.array([3.0, 0, 0]), np.array([[2.0, 0, 0], [0, 0.5, 0], [0, 0, 1.0]])
    assert fg.federation_gain(local, path, truth) == (36.0, 6.0)
    assert fg.federation_gain(local, path[2], truth) == (9.0, 3.0)
    with pytest.raises(RequestError, match="undefined"):
        fg.federation_gain(local, truth, truth)


def test_ratio_on_held_out_rows():
    rng = np.random.default_rng(0)
    alone, joint = rng.chisquare(3, 40), 0.5 * rng.chisquare(3, 40)
    found = fg.risk_ratio(alone, joint)
    assert found.value == pytest.approx(alone.mean() / joint.mean()) and found.low < found.value < found.high
    for end in (found.low, found.high):  # there, and only there, the difference is 1.96 standard errors from 0
        gap = alone - end * joint
        assert abs(gap.mean()) == pytest.approx(1.96 * gap.std(ddof=1) / math.sqrt(40))
    for scale in np.geomspace(0.3, 3, 200):
        low, high = (fg.risk_ratio(scale * alone, joint)[k] for k in (1, 2))
        gap = scale * alone - joint
        assert (low <= 1 <= high) == (abs(gap.mean()) <= 1.96 * gap.std(ddof=1) / math.sqrt(40))
    assert fg.risk_ratio(joint, joint) == pytest.approx((1, 1, 1))
    nearly_none = fg.risk_ratio(alone, np.array([5.0] + [0.0] * 39))
    assert nearly_none.high == math.inf and 0 < nearly_none.low < nearly_none.value
    assert fg.risk_ratio(alone[:1], joint[:1])[1:] == (0, math.inf)
    assert math.isnan(fg.risk_ratio(alone, 0 * joint).value)


def test_the_ratio_s_interval_holds_the_truth_as_often_as_it_says():
    """2,000 pairs of correlated losses with ratio 2: Binomial(2000, 0.95) has a standard deviation of 0.5 %."""
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(2000):
        shared = rng.gamma(4, 1, 200)
        found = fg.risk_ratio(2 * (shared + rng.gamma(4, 1, 200)), shared + rng.gamma(4, 1, 200))
        hits += found.low <= 2 <= found.high
    assert hits / 2000 == pytest.approx(0.95, abs=0.015)


def test_least_squares_is_the_minimum_norm_one():
    rng = np.random.default_rng(0)
    for rows in (4, 20):
        x, y = rng.standard_normal((rows, 9)), rng.standard_normal(rows)
        np.testing.assert_allclose(fg.least_squares(x, y), np.linalg.pinv(x.T @ x) @ x.T @ y, atol=1e-9)


def test_lower_bounds_at_one_point_and_their_monotonicity():
    rich = fg.gain_under_model_heterogeneity(500, 5500, 100, 0.5, 10.0, 0.3, kappa=1.5, c1=0.2)
    assert rich == pytest.approx(0.2 * 0.05 / (1.5 * (0.25 * 100 / 5500 + 0.09)))
    scarce = fg.gain_under_model_heterogeneity(50, 5500, 100, 0.5, 10.0, 0.3)
    assert scarce == pytest.approx((0.5 + 50) / (0.25 * 100 / 5500 + 0.09))
    spreads = [fg.gain_under_model_heterogeneity(50, 5500, 100, 0.5, 10.0, s) for s in (0, 0.1, 1, 10)]
    assert spreads == sorted(spreads, reverse=True)
    ranks = [fg.gain_under_covariate_heterogeneity(500, 5500, 100, r, 0.5, 10.0) for r in (10, 50, 99, 100)]
    assert ranks == sorted(ranks, reverse=True)
    assert ranks[-1] == pytest.approx((0.25 * 100 / 500) / (0.25 * 100 / 5500))
    # at the break-even spread, with N large, the bound for a scarce client crosses 1
    at = fg.break_even_heterogeneity(50, 100, 1e-9, 10.0)
    assert fg.gain_under_model_heterogeneity(50, 10**9, 100, 1e-9, 10.0, at) == pytest.approx(1)


def test_no_local_least_squares_beats_the_floor_of_a_scarce_client():
    """The term (1 - n/d) B^2 is exact for noiseless minimum-norm least squares on Gaussian designs."""
    rng = np.random.default_rng(0)
    errors = []
    for _ in range(300):
        x, truth = rng.standard_normal((10, 25)), rng.standard_normal(25)
        truth *= 3 / np.linalg.norm(truth)
        errors.append(np.sum((fg.least_squares(x, x @ truth) - truth) ** 2))
    floor = fg.local_risk_floor(10, 25, 0.0, 3.0)
    assert floor == pytest.approx(9 * (1 - 10 / 25))
    assert np.mean(errors) == pytest.approx(floor, rel=0.05)


def probe_gain(update, client, spread, trials=2):
    """Mean plain gain of one client at the limit when all others share a truth at distance `spread` from its own."""
    gains = []
    for trial in range(trials):
        rng = np.random.default_rng(trial)
        xs = [rng.standard_normal((n, DIM)) for n in SIZES]
        truth, direction = rng.standard_normal((2, DIM))
        other = truth + spread * direction / np.linalg.norm(direction)
        ys = [x @ (truth if i == client else other) + SIGMA * rng.standard_normal(len(x)) for i, x in enumerate(xs)]
        limit = op.limit_point(op.theta_flow(xs, update), np.concatenate(ys))
        gains.append(fg.federation_gain(fg.least_squares(xs[client], ys[client]), limit, truth).plain)
    return np.mean(gains)


@pytest.mark.parametrize("update", [op.fedavg(0.1, 5), op.fedprox(0.1)], ids=["fedavg5", "fedprox"])
def test_section_7_2_gains_cross_one_near_the_prediction(update):
    assert probe_gain(update, client=0, spread=6.0) > 1 > probe_gain(update, client=0, spread=8.5)
    assert probe_gain(update, client=10, spread=0.2) > 1 > probe_gain(update, client=10, spread=0.4)
    assert probe_gain(update, client=0, spread=0.0) > 20 * probe_gain(update, client=10, spread=0.0)


def subspace_gains(rank, update, trials=4):
    """Mean plain gain of a scarce and of a rich client whose rows live on `rank` random coordinates each."""
    gains = []
    for trial in range(trials):
        rng = np.random.default_rng(trial)
        truth, xs = rng.standard_normal(DIM), []
        for n in SIZES:
            x = np.zeros((n, DIM))
            x[:, rng.choice(DIM, rank, replace=False)] = math.sqrt(DIM / rank) * rng.standard_normal((n, rank))
            xs.append(x)
        ys = [x @ truth + SIGMA * rng.standard_normal(len(x)) for x in xs]
        limit = op.limit_point(op.theta_flow(xs, update), np.concatenate(ys))
        gains.append([fg.federation_gain(fg.least_squares(xs[j], ys[j]), limit, truth).plain for j in (0, 10)])
    return np.mean(gains, axis=0)


def test_section_7_3_gains_jump_at_the_coupon_collector_rank_then_part():
    before, after, full = (subspace_gains(r, op.fedavg(0.1 * r / DIM, 5)) for r in (16, 27, 100))
    assert before[0] == pytest.approx(before[1], rel=0.2)
    assert np.all(after > 2.5 * before)
    assert full[0] == pytest.approx(107, rel=0.12)  # "stabilizes around 107": plain, not squared
    assert full[1] == pytest.approx(3.6, rel=0.15)
