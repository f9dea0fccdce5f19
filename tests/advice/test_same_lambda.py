"""`fit`, `theory` and `advise` tell the same lambda for the same rule, on classic tables."""

import warnings

import pytest

import mooring
from mooring.algorithms.base import build
from mooring.engines.prepare import prepare
from mooring.engines.request import request
from mooring.engines.theory_report import find_theory, report_theory
from mooring.estimates.client_statistics import collect_statistics
from mooring.estimates.lambda_rules import LAMBDA_RULES
from tests.support.tables import HSB82, TABLES


@pytest.mark.parametrize("name", TABLES)
def test_fit_and_theory_and_advise_tell_the_same_lambda(name):
    table, columns = TABLES[name]
    job = prepare(request(table, purpose="fit", algorithm="local", **columns))
    theory = report_theory(job.task, job.clients).lam
    assert find_theory(prepare(request(table, purpose="advise", min_rows=5, **columns))).lam == theory
    assert set(theory) == {"auto", *LAMBDA_RULES}
    trained = mooring.fit(table, algorithm="fedprox_personal", rounds=1, **columns).trained.algorithm
    assert trained.lam == theory["auto"]["value"] == theory["one"]["value"]
    facts = collect_statistics(job.task, job.clients.cohort(), job.task.start(), ("rules",))
    for rule in LAMBDA_RULES:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # theorems may ask for more than the cap
            lam, told = build("fedprox_personal", {"lam": rule}).resolve(job.task, facts).lam, theory[rule]
        if "numbers" not in told:
            assert lam == told["value"], rule
        elif rule in ("client", "shrinkage"):
            assert sorted(lam.per_client)[(len(job.clients) - 1) // 2] == pytest.approx(told["value"], rel=1e-12)
            assert min(lam.per_client) == pytest.approx(told["low"], rel=1e-12)


def test_the_other_methods_start_from_it_too():
    job = prepare(request(HSB82.path, purpose="fit", algorithm="local", **HSB82.columns))
    lam = report_theory(job.task, job.clients).lam["auto"]["value"]
    facts = collect_statistics(job.task, job.clients.cohort(), job.task.start(), ("spread", "fit"))
    for name in ("ditto", "fedprox_two_stage", "fedprox", "pfedme", "l2gd"):
        assert build(name, {}).resolve(job.task, facts).lam == lam, name
