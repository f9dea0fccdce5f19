"""Trust in predictions, chances, calls and the federation's line, on simulated pairs whose truth is known."""

import numpy as np
import pytest
import torch
from scipy.stats import norm

from mooring.advice.calibrate import (
    AHEAD,
    RATE,
    Trust,
    Witness,
    admitted,
    calls,
    chances,
    federation_line,
    interval,
    trust,
    trusted,
    with_witness,
)
from mooring.advice.gain import Gain
from mooring.advice.heldout import held_out_gain


def gain_of(mean, sd, weight=None):
    mean, sd = torch.as_tensor(mean, dtype=torch.float64), torch.as_tensor(sd, dtype=torch.float64)
    mean, sd = (t if t.ndim == 2 else t[None] for t in (mean, sd))
    c, m = mean.shape
    overall = torch.full((c,), 1 / c, dtype=torch.float64) if weight is None else torch.tensor(weight).double()
    none = torch.zeros(m, dtype=torch.float64)
    weights = overall[:, None].expand(c, m)
    return Gain(weights, mean, sd**2, none, overall, torch.zeros(c, dtype=torch.float64), none)


def pairs(slope, inflate, m=300, seed=0):
    rng = np.random.default_rng(seed)
    predicted, sd, error = rng.gamma(2, 1, m), rng.uniform(0.2, 1, m), rng.uniform(0.2, 1, m)
    observed = slope * predicted + np.sqrt(inflate * (sd**2 + error**2)) * rng.standard_normal(m)
    rows = torch.full((m,), 20)
    return Witness(*(torch.from_numpy(part) for part in (observed, error, predicted, sd)), rows)


@pytest.mark.parametrize("slope", [0.6, 1.0])
@pytest.mark.parametrize("inflate", [1.0, 2.5])
def test_slope_and_phi_are_found(slope, inflate):
    found = [trust(pairs(slope, inflate, seed=s)) for s in range(20)]
    # The prior N(1, .2^2) weighs little against 300 clients: the slope's error is about .03 to .05.
    assert np.mean([f.slope for f in found]) == pytest.approx(slope, abs=0.04)
    assert np.mean([f.phi for f in found]) == pytest.approx(inflate, rel=0.1)
    assert np.std([f.slope for f in found]) < 1.6 * np.mean([f.slope_error for f in found])


def test_a_few_clients_hardly_move_the_slope_and_none_not_at_all():
    few = trust(pairs(0.2, 1.0, m=3))
    assert few.slope > 0.4 and few.slope_error > 0.05
    nothing = Witness(*(torch.full((4,), torch.nan) for _ in range(4)), torch.zeros(4))
    assert trust(nothing) == Trust(1.0, 0.2, 1.0)


def test_trusted_gains_have_the_recipes_chance():
    gain = gain_of([[0.5, -0.2], [0.1, 0.4]], [[0.3, 0.2], [0.5, 0.1]], [0.25, 0.75])
    known = Trust(0.9, 0.1, 1.4)
    chance = chances(trusted(gain, known))
    for i in range(2):
        expected = sum(
            w * norm.cdf(0.9 * g / np.sqrt(1.4 * s**2 + 0.1**2 * g**2))
            for w, g, s in zip((0.25, 0.75), gain.mean[:, i].tolist(), gain.variance.sqrt()[:, i].tolist())
        )
        assert float(chance[i]) == pytest.approx(expected)
    assert chances(gain_of([0.0], [0.0])).tolist() == [0.5]  # the same model


def test_intervals_of_many_are_those_of_each(monkeypatch):
    rng = np.random.default_rng(0)
    gain = gain_of(rng.standard_normal((2, 7)), rng.uniform(0.1, 1, (2, 7)), [0.3, 0.7])
    whole = interval(gain, 0.9)
    monkeypatch.setattr("mooring.advice.calibrate.FEW", 3)
    for one, other in zip(whole, interval(gain, 0.9)):
        torch.testing.assert_close(other, one)


def test_intervals_are_quantiles_of_the_mixture():
    gain = gain_of([[0.0], [2.0]], [[1.0], [0.5]], [0.6, 0.4])
    low, high = interval(gain, 0.9)
    for end, chance in ((low, 0.05), (high, 0.95)):
        assert 0.6 * norm.cdf(float(end)) + 0.4 * norm.cdf((float(end) - 2) / 0.5) == pytest.approx(chance, abs=1e-6)
    wide = interval(gain._replace(doubt=torch.tensor([0.25])), 0.9)
    assert float(wide[1]) > float(high) and float(wide[0]) <= float(low)


def test_a_further_witness_is_bayes_rule():
    gain = gain_of([[1.0, 1.0, 1.0], [-1.0, -1.0, -1.0]], np.full((2, 3), 0.5))
    seen = with_witness(gain, torch.tensor([0.8, torch.nan, 0.8]), torch.tensor([0.4, 1.0, 0.0]))
    # Client 0 by integrating prior times likelihood on a grid.
    grid = np.linspace(-6, 6, 60_001)
    prior = 0.5 * norm.pdf(grid, 1, 0.5) + 0.5 * norm.pdf(grid, -1, 0.5)
    post = prior * norm.pdf(0.8, grid, 0.4)
    post /= post.sum()
    assert float(seen.expected[0]) == pytest.approx(float(post @ grid), abs=1e-4)
    assert float(chances(seen)[0]) == pytest.approx(float(post[grid > 0].sum()), abs=1e-3)
    for i in (1, 2):  # no rows, and an error that cannot be: nothing changes
        assert float(seen.expected[i]) == float(gain.expected[i])


def test_calls_keep_their_rate_and_few_need_more():
    wrong = np.array([0.001, 0.01, 0.02, 0.2, 0.6])
    many = np.repeat(wrong, 40)
    called = admitted(many, RATE)
    assert (many[called].sum() + AHEAD) / called.sum() <= RATE and not called[many > 0.5].any()
    worse = np.flatnonzero(~called)[np.argmin(many[~called])]
    assert (many[called].sum() + many[worse] + AHEAD) / (called.sum() + 1) > RATE  # none more would fit
    assert not admitted(wrong[:1], RATE).any()  # a lone call: AHEAD is more than RATE
    better, worse = calls(torch.from_numpy(np.r_[np.full(20, 0.999), np.full(20, 0.001), 0.5]))
    assert better.sum() == 20 and worse.sum() == 20 and not (better & worse).any()


def test_calls_on_calibrated_chances_are_rarely_wrong():
    rng = np.random.default_rng(0)
    false, made = 0, 0
    for _ in range(200):
        mean, sd = rng.normal(0.5, 1, 50), rng.uniform(0.2, 1, 50)
        truth = mean + sd * rng.standard_normal(50)
        better, worse = calls(chances(gain_of(mean, sd)))
        false += (better & (truth < 0)).sum() + (worse & (truth > 0)).sum()
        made += better.sum() + worse.sum()
    # About 5,000 calls: an error rate of RATE has a standard error below .003.
    assert made > 3_000 and false / made < RATE + 0.006


@pytest.mark.parametrize("m", [4, 30])
def test_the_line_covers_the_mean_of_the_clients_gains(m):
    rng = np.random.default_rng(1)
    share = torch.full((m,), 1 / m, dtype=torch.float64)
    covered = {"rows": 0, "both": 0}
    for _ in range(400):
        truth = rng.normal(0.5, 0.4, m)  # gains of the deployed models
        posterior_sd, error = 0.3, 0.5
        observed = truth + error * rng.standard_normal(m)
        predicted = truth + posterior_sd * rng.standard_normal(m)
        seen = Witness(
            torch.from_numpy(observed),
            torch.full((m,), error),
            torch.from_numpy(predicted),
            torch.full((m,), posterior_sd),
            torch.full((m,), 10),
        )
        gain = gain_of(predicted, np.full(m, posterior_sd))
        for name, line in (
            ("rows", federation_line(seen, None, share, Trust(1, 0, 1), 0.95)),
            ("both", federation_line(seen, gain, share, Trust(1, 0, 1), 0.95)),
        ):
            covered[name] += line[1] <= truth.mean() <= line[2]
    # 400 trials: three standard errors of a share of .95 are .033.
    assert covered["rows"] / 400 > 0.95 - 0.033 and covered["both"] / 400 > 0.95 - 0.033


def test_no_line_without_rows_and_no_end_with_one_client():
    nothing = Witness(*(torch.full((2,), torch.nan) for _ in range(4)), torch.zeros(2))
    assert all(np.isnan(federation_line(nothing, None, torch.ones(2) / 2, Trust(1, 0, 1), 0.95)))
    one = Witness(*(torch.tensor([1.0]) for _ in range(4)), torch.tensor([5]))
    assert federation_line(one, None, torch.ones(1), Trust(1, 0, 1), 0.95)[1:] == (-np.inf, np.inf)


def held_out(truth, rows, seed, sd=1.0):
    rng = np.random.default_rng(seed)
    d = [g + sd * rng.standard_normal(n) for g, n in zip(truth, rows)]
    mean = torch.tensor([x.mean() if len(x) else np.nan for x in d], dtype=torch.float64)
    error = torch.tensor([x.std(ddof=1) / len(x) ** 0.5 if len(x) > 1 else 0.0 for x in d], dtype=torch.float64)
    nothing = torch.full((len(truth),), torch.nan)
    return Witness(mean, error, nothing, nothing, torch.tensor(rows))


def test_held_out_rows_alone_give_calibrated_chances():
    rng = np.random.default_rng(2)
    chance, right = [], []
    for seed in range(200):
        rows = rng.integers(3, 40, 40)
        spread = 0.22 * abs(rng.standard_cauchy())  # the prior's law: 20 rows have an error of .22
        truth = rng.normal(rng.normal(0, 0.3), min(spread, 1.5), 40)
        chance.append(chances(held_out_gain(held_out(truth, rows, seed))).numpy())
        right.append(truth > 0)
    chance, right = np.concatenate(chance), np.concatenate(right)
    for low in np.arange(0, 1, 0.2):
        here = (chance >= low) & (chance < low + 0.2)
        # Hundreds of clients a bin, in 200 federations: .08 is over three standard errors.
        assert here.sum() < 200 or abs(chance[here].mean() - right[here].mean()) < 0.08


def test_no_spread_seen_does_not_decide_about_all_at_once():
    """Row noise hides any spread; a plug-in of 0 would call everybody at once."""
    seen = held_out(np.full(30, 0.08), [8] * 30, seed=3)
    chance = chances(held_out_gain(seen))
    assert float(chance.max() - chance.min()) > 0.05


def test_held_out_gains_without_rows_and_of_equal_models():
    seen = held_out([0.5, 0.5, 0.5], [30, 30, 0], seed=0)
    chance = chances(held_out_gain(seen))
    assert 0.5 < float(chance[2]) <= float(chance[:2].max())
    same = Witness(torch.zeros(3), torch.zeros(3), *(torch.full((3,), torch.nan),) * 2, torch.tensor([4, 5, 6]))
    assert chances(held_out_gain(same)).tolist() == [0.5, 0.5, 0.5]
