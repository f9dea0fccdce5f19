import numpy as np
import pytest
import torch

from mooring.core.errors import RequestError
from mooring.data.clients import from_arrays
from mooring.estimates.facts import gather
from mooring.estimates.from_facts import CAP, curvature, lam_by_rule, radii
from mooring.tasks.linear import Linear
from mooring.theory.lambda_aer import lambda_aer
from mooring.theory.lambda_ier import lambda_ier
from mooring.theory.lambda_one_stage import lambda_one_stage

TASK = Linear(2, intercept=False, ridge=0.01)


def facts_of(truths, sizes, noise=0.3, seed=0, task=TASK):
    rng = np.random.default_rng(seed)
    xs = [rng.normal(size=(n, 2)) for n in sizes]
    ys = [x @ w + noise * rng.normal(size=len(x)) for x, w in zip(xs, truths)]
    return gather(task, from_arrays(xs, ys).cohort(), task.start(), ("fit",))


def test_radii_equal_their_definition():
    facts = facts_of(np.random.default_rng(1).normal(size=(5, 2)), [20, 30, 40, 50, 60])
    p, fit, variance = facts.p.numpy(), facts.shrunk.numpy(), facts.shrunk_variance.numpy()
    share = facts.freedom.numpy() / 2
    average = sum(q * w for q, w in zip(p, fit))
    common = sum(q**2 * v for q, v in zip(p, variance))
    squares = [sum((w - average) ** 2) - (1 - 2 * q) * v - common for q, w, v in zip(p, fit, variance)]
    found = radii(facts)
    np.testing.assert_allclose(found.each, np.sqrt(np.maximum([s / a for s, a in zip(squares, share)], 0)))
    through = sum(q * (1 - q) * a for q, a in zip(p, share)) / sum(q * (1 - q) for q in p)
    assert found.rms == pytest.approx(np.sqrt(max(0, sum(q * s for q, s in zip(p, squares)) / through)))
    assert found.most == found.each.max()


def test_the_spread_is_found_where_rows_leave_coefficients_open():
    """Clients that see one direction each: plain fits would have endless variance."""
    rng = np.random.default_rng(5)
    truths = 3 + rng.normal(size=(200, 2))
    xs = [rng.normal(size=(30, 1)) * np.eye(2)[i % 2] for i in range(200)]
    ys = [x @ w + 0.3 * rng.normal(size=30) for x, w in zip(xs, truths)]
    facts = gather(TASK, from_arrays(xs, [y - 3 * x.sum(1) for x, y in zip(xs, ys)]).cohort(), TASK.start(), ("fit",))
    p = facts.p.numpy()
    planted = np.sqrt(p @ np.sum((truths - p @ truths) ** 2, axis=1))
    assert radii(facts).rms == pytest.approx(planted, rel=0.15)


@pytest.mark.parametrize("ridge", [0.0, 0.5])
def test_radii_have_the_right_mean_square(ridge):
    """Over 200 data sets the corrected squares average to the planted R^2, whatever the task's own ridge."""
    truths = np.random.default_rng(2).normal(scale=0.15, size=(6, 2))
    sizes = [25, 25, 40, 40, 60, 60]
    p = np.array(sizes) / sum(sizes)
    planted = p @ np.sum((truths - p @ truths) ** 2, axis=1)
    corrected, raw = [], []
    for seed in range(200):
        facts = facts_of(truths, sizes, noise=0.8, seed=seed, task=Linear(2, intercept=False, ridge=ridge))
        fit, variance, share = facts.shrunk.numpy(), facts.shrunk_variance.numpy(), facts.freedom.numpy() / 2
        spread = p @ np.sum((fit - p @ fit) ** 2, axis=1)
        through = (p * (1 - p)) @ share / (p @ (1 - p))
        raw.append(spread / through)
        corrected.append((spread - (p * (1 - p)) @ variance) / through)
    error = np.std(corrected) / np.sqrt(200)
    assert abs(np.mean(corrected) - planted) < 4 * error
    assert np.mean(raw) - planted > 10 * error


def test_rules_are_the_theorems_with_estimated_constants():
    facts = facts_of(np.random.default_rng(3).normal(size=(5, 2)), [30] * 5)
    known, spread = curvature("here", TASK, facts), radii(facts)
    p, n = np.full(5, 0.2), np.full(5, 30)
    assert known.mu == float(facts.convex.min()) and known.smooth == float(facts.smooth.max())
    assert lam_by_rule("here", "aer", TASK, facts) == pytest.approx(lambda_aer(spread.rms, known.mu, p, n).lam)
    assert lam_by_rule("here", "ier", TASK, facts) == pytest.approx(lambda_ier(spread.most, known.mu, p, n).lam)
    expected = lambda_one_stage(spread.most, known.mu, known.smooth, known.noise, p, n)
    assert lam_by_rule("here", "theory", TASK, facts) == pytest.approx(expected.lam)
    each = lam_by_rule("here", "shrinkage", TASK, facts).per_client
    by_hand = [
        min(CAP * known.smooth, rho**2 / (30 * known.mu * r**2)) for rho, r in zip(facts.noise.tolist(), spread.each)
    ]
    assert each == pytest.approx(by_hand)


def test_a_lam_beyond_the_cap_is_cut_with_a_warning():
    facts = facts_of(np.ones((5, 2)), [30] * 5)
    flat = facts._replace(convex=torch.full_like(facts.convex, 1e-3))
    with pytest.warns(UserWarning, match="the theorem asks for more than 10000 times the smoothness"):
        assert lam_by_rule("here", "theory", TASK, flat) == pytest.approx(CAP * float(facts.smooth.max()))


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"convex": 0.0}, "here needs every client's loss to be strongly convex, but the smallest curvature is 0"),
        ({"smooth": float("nan")}, "here needs the smoothness of the loss, and task 'linear' cannot tell it"),
    ],
)
def test_refusals(change, sentence):
    facts = facts_of(np.ones((3, 2)), [10] * 3)
    facts = facts._replace(**{field: torch.full((3,), value, dtype=torch.float64) for field, value in change.items()})
    with pytest.raises(RequestError, match=sentence):
        lam_by_rule("here", "aer", TASK, facts)
    with pytest.raises(RequestError, match="here needs the clients' own fits, and task 'linear' has none"):
        lam_by_rule("here", "aer", TASK, facts_of(np.ones((3, 2)), [10] * 3)._replace(shrunk=None))
