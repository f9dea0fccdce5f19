"""Facts, and what settings become: the rules' lam as an algorithm runs with it, and refusals."""

import numpy as np
import pytest
import torch
from torch import nn

from mooring.algorithms.base import algorithm_names, build
from mooring.core.errors import RequestError
from mooring.data.clients import from_arrays
from mooring.estimates.client_statistics import collect_statistics
from mooring.estimates.lambda_from_statistics import bound_curvature, resolve_lam_rule
from mooring.estimates.lambda_rules import LAMBDA_RULES, MAX_LAM_PER_SMOOTHNESS
from mooring.tasks.linear import Linear
from mooring.tasks.network import NetworkTask

TASK = Linear(2, intercept=False, ridge=0.01)


def clients_of(truths, sizes, noise=0.3, seed=0):
    rng = np.random.default_rng(seed)
    xs = [rng.normal(size=(n, 2)) for n in sizes]
    return from_arrays(xs, [x @ w + noise * rng.normal(size=len(x)) for x, w in zip(xs, truths)])


def facts_of(truths, sizes, asks=("rules",), **more):
    return collect_statistics(TASK, clients_of(truths, sizes, **more).cohort(), TASK.start(), asks)


def varied(m=6, seed=3):
    return np.random.default_rng(seed).normal(size=(m, 2))


def test_constants_are_the_worst_clients():
    facts = facts_of(varied(), [30] * 6)
    known = bound_curvature("here", TASK, facts)
    assert known.mu == float(facts.convex.min()) and known.smooth == float(facts.smooth.max())


def test_a_rule_is_settled_to_what_the_table_says():
    facts = facts_of(varied(), [10, 20, 30, 40, 50, 60])
    table = facts.federation.rules
    assert set(table) == {"auto", *LAMBDA_RULES}
    for rule in ("one", "theory", "aer", "ier", "shrinkage_of_all"):
        assert resolve_lam_rule("here", rule, TASK, facts) == table[rule].lam
    for rule in ("client", "shrinkage"):
        np.testing.assert_allclose(resolve_lam_rule("here", rule, TASK, facts).per_client, table[rule].lam)
    np.testing.assert_allclose(
        resolve_lam_rule("here", "coefficient", TASK, facts).per_coefficient, table["coefficient"].lam
    )
    both = resolve_lam_rule("here", "client_and_coefficient", TASK, facts)
    product = np.outer(both.per_client, both.per_coefficient)
    np.testing.assert_allclose(product, table["client_and_coefficient"].lam)


def test_every_rule_can_be_asked_of_the_algorithm():
    for rule in LAMBDA_RULES:
        algorithm = build("fedprox_personal", {"lam": rule})
        assert algorithm.required_statistics == ("rules",)
        algorithm.resolve(TASK, facts_of(varied(), [30] * 6))


def test_clients_without_rows_are_left_out_and_follow_the_common_model():
    facts = facts_of(varied(), [30, 0, 30, 30, 40, 50])
    assert facts.federation.clients.tolist() == [0, 2, 3, 4, 5]
    lam = resolve_lam_rule("here", "client", TASK, facts).per_client
    assert (
        lam[1] == pytest.approx(MAX_LAM_PER_SMOOTHNESS * float(facts.smooth.max())) and max(lam[:1] + lam[2:]) < lam[1]
    )


def test_no_spread_is_cut_at_the_cap_with_a_warning():
    one = clients_of(np.ones((1, 2)), [30]).train
    same = from_arrays([one.x.numpy()] * 8, [one.y.numpy()] * 8)
    facts = collect_statistics(TASK, same.cohort(), TASK.start(), ("rules",))
    assert facts.federation.rules["one"].lam == np.inf
    most = MAX_LAM_PER_SMOOTHNESS * float(facts.smooth.max())
    with pytest.warns(UserWarning, match="the rule asks for more than 10000 times the smoothness"):
        assert resolve_lam_rule("here", "one", TASK, facts) == pytest.approx(most)
    both = resolve_lam_rule("here", "client_and_coefficient", TASK, facts)
    assert np.isfinite(np.outer(both.per_client, both.per_coefficient)).all()


def test_nothing_is_computed_that_was_not_asked_for():
    silent = facts_of(varied(), [30] * 6, ())
    assert silent.fit is None and silent.alone is None and silent.federation is None
    cheap = facts_of(varied(), [30] * 6, ("spread",))
    assert cheap.federation.summary is None and cheap.federation.diagonal is None
    assert facts_of(varied(), [30] * 6, ("fit",)).fit.shape == (6, 2)
    assert cheap.federation.auto == facts_of(varied(), [30] * 6).federation.rules["auto"].lam


def test_algorithms_ask_for_a_spread_only_while_lam_is_open():
    for name in algorithm_names():
        fields = build(name, {})
        if getattr(fields, "lam", None) == "auto" and name not in ("kernel_fedprox", "feddyn"):
            assert "spread" in fields.required_statistics, name
            assert "spread" not in build(name, {"lam": 1.0}).required_statistics, name
        elif name != "dichotomous":
            assert not {"spread", "rules"} & set(fields.required_statistics), name


def test_a_network_tells_scalars_only():
    rng = np.random.default_rng(0)
    task = NetworkTask(lambda: nn.Linear(2, 2).double())
    clients = from_arrays([rng.normal(size=(9, 2)) for _ in range(3)], [rng.integers(0, 2, 9)] * 3, kind="binary")
    facts = collect_statistics(task, clients.cohort(), task.start(), ("spread", "fit", "alone"))
    assert facts.federation is None and facts.fit is None and facts.alone is None
    assert bool((facts.smooth > 0).all())


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"convex": 0.0}, "here needs every client's loss to be strongly convex, but the smallest curvature is 0"),
        ({"smooth": float("nan")}, "here needs the smoothness of the loss, and task 'linear' does not define it"),
    ],
)
def test_refused_constants(change, sentence):
    facts = facts_of(np.ones((3, 2)), [10] * 3, ())
    facts = facts._replace(**{field: torch.full((3,), value, dtype=torch.float64) for field, value in change.items()})
    with pytest.raises(RequestError, match=sentence):
        bound_curvature("here", TASK, facts)


def test_rules_without_a_spread_are_refused():
    with pytest.raises(RequestError, match="here needs an estimate of how clients vary, which task 'linear'"):
        resolve_lam_rule("here", "aer", TASK, facts_of(np.ones((1, 2)), [10]))
