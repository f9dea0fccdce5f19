"""What to deploy and how sure: a table of edge cases, then whole federations whose answer is known."""

import numpy as np
import pytest
import torch

from mooring.advice.calibrate import trust, trusted
from mooring.advice.crossfit import Fold, cross_fit
from mooring.advice.decide import LEVEL, PRACTICAL, decide
from mooring.advice.tally import PAIRS
from mooring.core.cohort import Rows
from mooring.data.clients import from_arrays
from mooring.tasks.linear import Linear
from mooring.tasks.logistic import Logistic
from mooring.tasks.quantile import Quantile
from tests.advice.test_calibrate import gain_of


def answer(over_alone, over_common, common_over_alone=None, loss=1.0):
    """The decision about one client from (mean, sd) of each gain."""
    if common_over_alone is None:
        one = over_alone == over_common == (0.0, 0.0)
        common_over_alone = (over_alone[0] - over_common[0], 0.0 if one else 0.1)
    gains = [gain_of([mean], [sd]) for mean, sd in (over_alone, over_common, common_over_alone)]
    return decide(*gains, torch.tensor([loss], dtype=torch.float64), PRACTICAL, LEVEL)


@pytest.mark.parametrize(
    ("over_alone", "over_common", "deploy", "will_do", "sure_alone", "sure_common"),
    [
        ((0.5, 0.1), (0.3, 0.1), "personal", "personal", "sure", "sure"),
        ((0.5, 0.1), (0.1, 0.1), "personal", "personal", "sure", "likely"),
        ((0.05, 0.1), (0.3, 0.1), "personal", "personal", "open", "sure"),
        ((0.5, 0.1), (0.005, 0.01), "personal", "common", "sure", "open"),  # half a per cent is no practical difference
        ((0.004, 0.01), (0.3, 0.1), "personal", "alone", "open", "sure"),
        ((0.004, 0.01), (0.004, 0.01), "personal", "common", "open", "open"),
        ((0.5, 0.1), (0.0, 0.0), "common", "common", "sure", "same"),  # personal is the common model
        ((0.5, 0.1), (-0.2, 0.1), "common", "common", "sure", "same"),
        ((-0.3, 0.1), (0.2, 0.1), "alone", "alone", "same", "sure"),
        ((0.0, 0.0), (0.0, 0.0), "common", "common", "same", "same"),  # all three are one
    ],
)
def test_every_case_has_an_answer(over_alone, over_common, deploy, will_do, sure_alone, sure_common):
    found = answer(over_alone, over_common)
    assert (found.deploy[0], found.will_do[0]) == (deploy, will_do)
    assert (found.over_alone.sure[0], found.over_common.sure[0]) == (sure_alone, sure_common)
    for side, word in ((found.over_alone, sure_alone), (found.over_common, sure_common)):
        assert side.low[0] <= side.gain[0] <= side.high[0]
        if word == "same":
            assert side.chance[0] == 0.5 and side.gain[0] == 0 and not side.better[0] and not side.worse[0]


def test_nobody_deploys_what_is_expected_to_lose_more():
    rng = np.random.default_rng(0)
    alone, common = rng.normal(0, 0.3, 500), rng.normal(0, 0.3, 500)
    gains = [gain_of(mean, np.full(500, 0.2)) for mean in (alone, common, alone - common)]
    found = decide(*gains, torch.ones(500, dtype=torch.float64), PRACTICAL, LEVEL)
    excess = {"personal": np.zeros(500), "alone": alone, "common": common}
    least = np.min(list(excess.values()), 0)
    told = np.array([excess[name][i] for i, name in enumerate(found.deploy)])
    enough = np.array([excess[name][i] for i, name in enumerate(found.will_do)])
    np.testing.assert_allclose(told, least)
    assert (enough <= least + PRACTICAL).all()
    # The gain that is told is the other model's expected loss less the deployed one's.
    np.testing.assert_allclose(found.over_alone.gain, alone - told, atol=1e-12)
    np.testing.assert_allclose(found.over_common.gain, common - told, atol=1e-12)


def federation(spread, m=30, n=60, d=3, seed=0, noise=1.0, kind="regression"):
    rng = np.random.default_rng(seed)
    w = rng.standard_normal(d) + spread * rng.standard_normal((m, d))
    x = rng.standard_normal((m, n, d))
    z = np.einsum("mnd,md->mn", x, w)
    if kind == "binary":
        return from_arrays(x, (rng.random(z.shape) < 1 / (1 + np.exp(-z))).astype(int), kind="binary")
    return from_arrays(x, z + noise * rng.standard_normal(z.shape))


def decided(task, clients, **more):
    _, evidence = cross_fit(task, clients.train, clients.keys, **more)
    gains = [trusted(evidence.gain[name], trust(evidence.seen[name])) for name in PAIRS]
    return evidence, decide(*gains, evidence.losses["personal"], PRACTICAL, LEVEL)


def test_identical_clients_are_told_that_common_will_do():
    _, found = decided(Linear(3), federation(0.0))
    assert (found.will_do == "common").mean() > 0.95
    assert found.over_alone.chance.mean() > 0.85 and not found.over_common.better.any()


def test_unrelated_clients_with_many_rows_are_told_that_alone_will_do():
    _, found = decided(Linear(3), federation(5.0, n=200))
    assert (found.will_do == "alone").mean() > 0.9 and set(found.deploy) <= {"personal", "alone"}
    assert found.over_common.better.all() and (found.over_common.sure == "sure").all()


def test_in_between_personal_models_are_deployed_and_surely_better_than_common():
    _, found = decided(Linear(3), federation(0.7, n=15))
    assert (found.deploy == "personal").mean() > 0.8
    assert found.over_common.better.mean() > 0.5 and found.over_alone.chance.mean() > 0.6


@pytest.mark.parametrize("m", [2, 4])
def test_few_clients_have_an_answer_and_a_wide_interval(m):
    _, found = decided(Linear(3), federation(0.3, m=m, n=30))
    assert set(found.deploy) <= {"personal", "common", "alone"} and np.isfinite(found.over_alone.chance).all()
    assert np.isfinite(found.over_alone.low).all()


def test_a_client_without_rows_has_an_answer():
    clients = federation(0.5, m=12, n=20)
    size = clients.train.size.clone()
    size[3] = 0
    start = torch.cumsum(size, 0) - size
    keep = torch.repeat_interleave(torch.arange(12), clients.train.size) != 3
    rows = Rows(clients.train.x[keep], clients.train.y[keep], start, size)
    _, evidence = cross_fit(Linear(3), rows, clients.keys)
    gains = [trusted(evidence.gain[name], trust(evidence.seen[name])) for name in PAIRS]
    found = decide(*gains, torch.ones(12, dtype=torch.float64), PRACTICAL, LEVEL)
    assert found.deploy[3] == "common" or np.isfinite(found.over_alone.gain[3])
    assert found.over_alone.gain[3] > 0  # "alone" knows nothing


def test_two_classes_have_all_of_it():
    _, found = decided(Logistic(3), federation(0.8, n=40, kind="binary"))
    assert set(found.deploy) <= {"personal", "common", "alone"}
    assert found.over_common.chance.mean() > 0.6 and (found.over_alone.high > found.over_alone.low).any()


def test_losses_without_a_posterior_have_all_of_it_too():
    clients = federation(0.8, m=3, n=10)
    _, evidence = cross_fit(Quantile(3), clients.train, clients.keys, folds=2)
    for name in PAIRS:
        seen, gain = evidence.seen[name], evidence.gain[name]
        assert all(bool(torch.isfinite(part).all()) for part in (seen.observed, seen.predicted, seen.sd, gain.mean))
        assert bool((gain.variance > 0).all())


def test_folds_that_were_kept_are_not_fitted_again():
    clients, kept = federation(0.5, m=8, n=20), {}
    plan, first = cross_fit(Linear(3), clients.train, clients.keys, folds=3, save=kept.__setitem__)
    assert sorted(kept) == [0, 1, 2] and all(isinstance(part, torch.Tensor) for part in kept[0])
    saved = []
    half = {k: Fold(*kept[k]) for k in (0, 2)}
    same, again = cross_fit(
        Linear(3), clients.train, clients.keys, folds=3, done=half, save=lambda k, _: saved.append(k)
    )
    assert saved == [1] and same.plan == plan.plan
    for name in PAIRS:
        assert torch.equal(again.gain[name].mean, first.gain[name].mean)
        assert torch.equal(again.seen[name].observed, first.seen[name].observed)


def test_the_prior_of_a_fold_has_not_seen_its_held_out_rows():
    """Changing one fold's targets leaves that fold's prior as it was, and changes the others'."""
    clients = federation(0.5, m=8, n=30)
    kept, other = {}, {}
    cross_fit(Linear(3), clients.train, clients.keys, folds=3, save=kept.__setitem__)
    y = clients.train.y.clone()
    y[kept[1].place] += 3.0
    changed = Rows(clients.train.x, y, clients.train.start, clients.train.size)
    cross_fit(Linear(3), changed, clients.keys, folds=3, save=other.__setitem__)
    torch.testing.assert_close(other[1].variance, kept[1].variance, rtol=1e-6, atol=1e-9)
    assert not torch.allclose(other[0].noise, kept[0].noise, rtol=1e-2)


def test_very_many_clients_have_the_answer_of_few(monkeypatch):
    """In blocks, each with a centre of its own: nearly the same gains, and an answer for each client."""
    clients = federation(0.5, m=40, n=20)
    _, whole = cross_fit(Linear(3), clients.train, clients.keys)
    monkeypatch.setattr("mooring.advice.crossfit.BLOCK", 20)
    _, apart = cross_fit(Linear(3), clients.train, clients.keys)
    for name in PAIRS:
        one, other = whole.gain[name], apart.gain[name]
        assert other.mean.shape == one.mean.shape and other.overall.sum() == pytest.approx(1)
        assert np.corrcoef(one.expected, other.expected)[0, 1] > 0.7  # twenty clients say less of the centre than forty
        share = torch.full((40,), 1 / 40, dtype=torch.float64)
        np.testing.assert_allclose(other.total(share)[0], one.total(share)[0], atol=2 * one.total(share)[1] ** 0.5)
