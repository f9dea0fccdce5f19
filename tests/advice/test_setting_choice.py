"""The choice: folds, the prior's proposal, what unseats it, and clients that leave the plan."""

from math import log

import numpy as np
import pytest
import torch

from mooring.advice.candidates.families import (
    DIAGONAL,
    GLOBAL,
    INTERCEPT,
    LAMBDA,
    LOCAL,
    MIXTURE,
    PULLED_FAMILIES,
    SIZE,
    Setting,
    fit_settings,
)
from mooring.advice.evaluation.cross_fitting import cross_fit
from mooring.advice.evaluation.fold_fits import FoldResult, screen_settings
from mooring.advice.evaluation.held_out_losses import HeldOutLosses
from mooring.advice.evaluation.setting_choice import (
    Choice,
    choose_exceptions,
    choose_settings,
    exception_pairs,
    list_candidates,
    most_likely_options,
    prior_probabilities,
)
from mooring.advice.reporting.setting_summary import as_algorithm, client_lams, effective_family, setting_lams
from mooring.algorithms.base import build
from mooring.core.cohort import Rows
from mooring.data.folds import assign_folds, concatenate_rows, iterate_folds, row_clients
from mooring.partial_pooling.client_prior import average_kinds, estimate_global_ridge, estimate_priors, kind_weights
from mooring.tasks.linear import Linear
from tests.support.linear_federation import LinearFederation
from tests.support.problems import linear_clients, simulate


def test_joined_rows_are_each_clients_own():
    clients = linear_clients()
    rows = concatenate_rows(clients.train, clients.validation)
    for i in range(len(clients)):
        expected = [torch.cat(pair) for pair in zip(clients.train.of(i), clients.validation.of(i))]
        for found, wanted in zip(rows.of(i), expected):
            torch.testing.assert_close(found, wanted)
    some = rows.select(torch.tensor([3, 1])).compact()
    torch.testing.assert_close(some.of(0)[0], rows.of(3)[0])


def test_priors_near_others_are_of_their_kinds_without_a_negligible_one():
    task, rows = Linear(4), planted(0.5, clients=20, samples=20).train
    scalar, diagonal, intercept = estimate_priors(task, rows)
    for near in ([scalar, diagonal, intercept], [scalar, diagonal], [scalar]):
        is_likely = diagonal._replace(spread=diagonal.spread._replace(deviance=scalar.spread.deviance - 50))
        is_unlikely = diagonal._replace(spread=diagonal.spread._replace(deviance=scalar.spread.deviance + 50))
        for own, expected in ((is_likely, near), (is_unlikely, [p for p in near if p is not diagonal])):
            again = estimate_priors(task, rows, [own if p is diagonal else p for p in near])
            assert [p.kind for p in again] == [p.kind for p in expected]


def test_every_row_is_held_out_once_and_small_clients_are_spread_over_the_folds():
    clients = linear_clients(sizes=[3, 11, 40])
    rows = concatenate_rows(clients.train, clients.validation)
    seen = torch.zeros(len(rows.y))
    for part in iterate_folds(rows, clients.keys, folds=4):
        seen[part.place] += 1
        assert torch.equal(part.train.size + part.held.size, rows.size)
        torch.testing.assert_close(rows.y[part.place], part.held.y)
    assert bool((seen == 1).all())
    fold = assign_folds(rows, clients.keys, 4, 0)
    for i in range(3):
        counts = torch.bincount(fold[row_clients(rows) == i], minlength=4)
        assert int(counts.max() - counts.min()) <= 1


def planted(spread, clients=60, samples=30, dim=4, seed=0, **more):
    return LinearFederation(clients=clients, samples=samples, dim=dim, spread=spread, **more).make(seed)


def advised_risk(made, dim):
    task = Linear(dim, intercept=False)
    choice, evidence = cross_fit(task, concatenate_rows(made.train, made.validation), made.keys)
    risk = {
        name: float(made.truth.excess_risk(getattr(evidence.models, name)).mean())
        for name in ("local", "global_", "personal")
    }
    return choice, risk


def test_moored_plans_beat_both_ends_on_planted_data():
    choice, risk = advised_risk(planted(0.2), 4)
    assert choice.plan.family in PULLED_FAMILIES and not choice.own
    assert risk["personal"] < 0.9 * min(risk["local"], risk["global_"])


def test_coefficients_that_differ_differently_get_their_own_stiffness():
    made = planted((0.0, 0.0, 1.0, 1.0))
    (prior,) = average_kinds(estimate_priors(Linear(4, intercept=False), made.train))
    assert prior.kind == "diagonal" and float(prior.variance[:2].max()) < 0.1 < float(prior.variance[2:].min())
    even = [kind_weights(estimate_priors(Linear(4, intercept=False), planted(0.5, seed=s).train)) for s in range(8)]
    assert sum(each < one for _, one, each in even) >= 6


def test_clients_that_are_alike_are_hardly_sent_apart_by_chance():
    task, harm = Linear(4, intercept=False), []
    for seed in range(10):
        made = planted(0.0, samples=20, seed=seed)
        found = estimate_priors(task, made.train)
        weighed, plain = average_kinds(found)[0].variance.mean(), found[0].variance.mean()
        assert float(weighed) <= float(found[1].variance.max()) + 1e-12
        harm.append([float(weighed) ** 2, float(plain) ** 2])
    ours, plain = np.mean(harm, 0)
    assert 0 < ours < 0.3 * plain
    sure = estimate_priors(task, planted(0.5).train)
    assert float(average_kinds(sure)[0].variance.mean()) > 0.99 * min(float(q.variance.mean()) for q in sure)


def test_a_common_model_with_many_rows_has_next_to_no_ridge():
    made = planted(0.2)
    task = Linear(4, intercept=False)
    assert 0 < estimate_global_ridge(task, estimate_priors(task, made.train)[0], len(made.train.y)) < 0.02


def test_held_out_rows_weigh_the_settings_and_the_prior_has_half_of_the_belief():
    settings = [Setting(GLOBAL, 0.0), Setting(LOCAL, 0.1), Setting(SIZE, 1.0, 0.0), Setting(SIZE, 1.0, 0.5)]
    owner, fold, heat = torch.arange(400) // 20, torch.arange(400) % 5, 2.0  # squared losses of 1
    prior = estimate_priors(Linear(4, intercept=False), planted(0.2, clients=5).train)[0]

    def found(*more: float) -> Choice:
        loss = torch.ones(4, 400) + torch.tensor(more)[:, None] / 400
        return choose_settings(Linear(1), settings, HeldOutLosses(loss, fold, owner, 20), settings[2:], [prior])

    even = found(0, 0, 0, 0)
    assert sum(even.mix[setting] for setting in settings[2:]) == pytest.approx(0.5) and len(even.mix) == 4
    odds = found(0, -heat * log(3), 0, 0)  # a likelihood three times as high
    assert odds.plan == settings[1] and odds.mix[settings[1]] == pytest.approx(3 * odds.mix[settings[2]], rel=0.02)
    sure = found(0, -80, 0, 0)
    assert sure.mix == {settings[1]: 1.0} and sure.table["weight"].tolist() == [0, 1, 0, 0]


def test_without_a_prior_noise_does_not_unseat_the_best_lambda_and_evidence_does():
    rng = torch.Generator().manual_seed(0)
    settings = [Setting(GLOBAL, 0.0), Setting(LOCAL, 0.1), Setting(LAMBDA, 1.0)]
    owner, fold = torch.arange(400) // 20, torch.arange(400) % 5
    loss = 1 + 0.5 * torch.rand(3, 400, generator=rng)
    found = choose_settings(Linear(1), settings, HeldOutLosses(loss, fold, owner, 20), [])
    assert found.plan == settings[2] and found.mix == {settings[2]: 1.0}
    loss[1] -= 0.2
    assert choose_settings(Linear(1), settings, HeldOutLosses(loss, fold, owner, 20), []).plan == settings[1]


def test_personal_models_are_the_average_of_the_mix():
    made, task = planted(0.2, samples=12), Linear(4, intercept=False)
    choice, evidence = cross_fit(task, made.train, made.keys)
    assert len(choice.mix) > 1 and sum(choice.mix.values()) == pytest.approx(1) and not choice.own
    p = made.train.size.double()
    models = {m.setting: m.v for m in fit_settings(task, made.train, p, choice.mix, choice.priors)}
    average = sum(weight * models[setting] for setting, weight in choice.mix.items())
    assert torch.allclose(evidence.models.personal, average, atol=1e-6)
    assert choice.mix[choice.plan] == max(choice.mix.values())


def exceptions(losses):
    """The clients' own choices of two settings, of which the first is the plan."""
    saved, square = losses.apart(*exception_pairs(losses, [0, 1], 0.5))
    return choose_exceptions(losses, [0, 1], 0.5, float(saved), float(square))


def test_clients_leave_only_where_their_own_rows_are_sure():
    rng = torch.Generator().manual_seed(0)
    owner, fold = torch.arange(900) // 30, torch.arange(900) % 5
    loss = torch.rand(1, 900, generator=rng) + 0.02 * torch.rand(2, 900, generator=rng)
    assert exceptions(HeldOutLosses(loss, fold, owner, 30)) == {}
    loss[0, owner < 6] += 1.0  # six clients lose much with the plan
    assert exceptions(HeldOutLosses(loss, fold, owner, 30)) == dict.fromkeys(range(6), 1)


def test_who_cannot_tell_keeps_the_plan():
    assert most_likely_options(torch.zeros(5, 3, dtype=torch.float64)).tolist() == [0] * 5


@pytest.mark.parametrize("family", [GLOBAL, LAMBDA, SIZE, DIAGONAL])
def test_a_plan_as_an_algorithm_gives_the_plans_models(family):
    made = planted(0.3, clients=8, samples=12, dim=3)
    task = Linear(3, intercept=False)
    rows = concatenate_rows(made.train, made.validation)
    choice, _ = cross_fit(task, rows, made.keys, folds=2)
    found = {q.kind: q for q in estimate_priors(task, rows)}
    prior = found["diagonal" if family == DIAGONAL else "scalar"]
    setting = Setting(family, 0.0 if family == GLOBAL else 0.7)
    choice = choice._replace(plan=setting, priors=[prior], own={})
    table = as_algorithm(choice, rows.size.double())
    algorithm = build(table.pop("name"), table)
    _, models, _ = simulate(algorithm, task, made, rounds=400)
    (solved,) = fit_settings(task, rows, rows.size.double(), [setting], [prior])
    torch.testing.assert_close(models, solved.v, atol=1e-3, rtol=1e-2)


def test_a_plan_in_numbers():
    made = planted(0.5)
    prior = estimate_priors(Linear(4, intercept=False), made.train)[0]
    n = made.train.size.numpy()
    by_size = 2 * prior.noise.numpy() / (n * float(prior.variance[0]))
    np.testing.assert_allclose(setting_lams(Setting(SIZE, 2.0), [prior], n), by_size)
    assert (setting_lams(Setting(LOCAL, 0.1), [prior], n) == 0).all()
    assert np.isinf(setting_lams(Setting(GLOBAL, 0.0), [], n)).all()
    none = prior._replace(variance=torch.zeros_like(prior.variance))
    assert (
        effective_family(Setting(SIZE, 1.0), [none]) == GLOBAL
        and np.isinf(setting_lams(Setting(SIZE, 1.0), [none], n)).all()
    )
    mixed = [Setting(SIZE, 2.0), Setting(LAMBDA, 0.7), Setting(MIXTURE, 0.5)]
    found = client_lams([mixed[i % 3] for i in range(len(n))], [prior], n)
    np.testing.assert_allclose(found[::3], by_size[::3])
    assert (found[1::3] == 0.7).all() and np.isnan(found[2::3]).all()


def test_hopeless_settings_are_dropped_and_those_that_are_reported_stay():
    """Fifty rows in two folds; a squared loss of 1 is a log-likelihood of 1/2 per row."""
    families = [(SIZE, 1.0), (SIZE, 4.0), *((LOCAL, 0.1 * k) for k in range(1, 6)), (GLOBAL, 0.0), (LAMBDA, 1.0)]
    settings = [Setting(*family, columns=name) for name in ("linear", "spline") for family in families]
    mean = torch.cat([torch.full((9,), 5.0), torch.tensor([1.0, 9.0, 8.0, 7.0, 6.0, 5.5, 6.5, 9.0, 8.0])])
    mean[0] = 3.0
    loss = mean[:, None].expand(-1, 25)
    kept = screen_settings(
        Linear(1), settings, [FoldResult(torch.arange(25), loss, torch.empty(0), torch.empty(0))] * 2, []
    )
    best, linear = 9, 0
    local, ends, lambdas = {13, 14, *range(2, 7)}, {7, 16}, {17}
    assert {best, linear} | ends | lambdas <= set(kept) <= {best, linear} | ends | lambdas | local
    assert len(set(kept) & local) == 4  # the best three, of linear columns here, and the best with the plan's columns
    assert 14 in kept and 10 not in kept and 8 not in kept


def test_an_average_does_not_depend_on_how_many_settings_were_dropped():
    settings = [Setting(GLOBAL, 0.1 * k) for k in range(20)] + [Setting(SIZE, 1.0), Setting(SIZE, 1.0, 0.5)]
    owner, fold = torch.arange(400) // 20, torch.arange(400) % 5
    prior = estimate_priors(Linear(4, intercept=False), planted(0.2, clients=5).train)[0]
    local = Setting(LOCAL, 0.1)
    settings, proposed = [*settings, local], settings[20:22]
    loss = torch.ones(23, 400) + torch.tensor([*[0.2] * 18, 0.002, 0.001, 0.0, 0.001, 0.2])[:, None]
    belief, kept = prior_probabilities(settings, proposed), [18, 19, 20, 21, 22]
    assert float(belief.sum()) == pytest.approx(1) and float(belief[20:22].sum()) == pytest.approx(0.5)
    whole = choose_settings(Linear(1), settings, HeldOutLosses(loss, fold, owner, 20), proposed, [prior])
    few = [settings[k] for k in kept]
    part = choose_settings(Linear(1), few, HeldOutLosses(loss[kept], fold, owner, 20), proposed, [prior], belief[kept])
    assert len(whole.mix) > 2 and part.mix == pytest.approx(whole.mix)


def test_clients_that_differ_in_their_intercept_alone_have_a_prior_for_it():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((40, 12, 4))
    y = x @ [1.0, -1.0, 0.5, 0.0] + rng.standard_normal((40, 1)) + rng.standard_normal((40, 12))
    rows = Rows.stack(*([torch.from_numpy(one) for one in part] for part in (x, y)))
    found = average_kinds(estimate_priors(Linear(4), rows))
    assert [prior.kind for prior in found][1:] == ["intercept"]
    assert float(found[1].variance[:4].abs().max()) == 0 and float(found[1].variance[4]) == pytest.approx(1, rel=0.5)
    settings, proposed = list_candidates(Linear(4), rows, found, "size", 480)
    assert {setting.family for setting in proposed} >= {INTERCEPT} and all(s.value == 1 for s in proposed)
    (models,) = fit_settings(Linear(4), rows, rows.size.double(), [Setting(INTERCEPT, 1.0)], found)
    torch.testing.assert_close(models.v[:, :4], models.w[:4].expand(40, 4))
    assert float(models.v[:, 4].std()) > 0.5
    assert len(settings) == len(set(settings))
