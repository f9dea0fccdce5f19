"""The survey of theory on planted federations: its parts agree with the truth and with each other."""

import json
from math import isfinite

import pytest

from mooring.core.errors import RequestError
from mooring.engines.theory_report import report_theory
from mooring.runs.atomic_files import to_json
from mooring.tasks.linear import Linear
from mooring.tasks.logistic import Logistic
from mooring.tasks.network import NetworkTask
from mooring.theory.moreau import moreau
from tests.support.linear_federation import LinearFederation
from tests.support.problems import logistic_clients


def planted(spread, clients=40, samples=60, seed=1):
    made = LinearFederation(clients=clients, samples=samples, dim=4, spread=spread, noise=1.0).make(seed)
    return made, report_theory(Linear(4, intercept=False), made)


@pytest.mark.parametrize("spread", [0.0, 0.3, 1.5])
def test_the_interval_holds_the_planted_radius(spread):
    made, found = planted(spread)
    assert found.heterogeneity["low"] <= made.truth.r_rms + 1e-12
    assert found.heterogeneity["high"] >= made.truth.r_rms - 1e-12
    if spread == 0:
        assert found.heterogeneity["low"] == 0


def test_sides_follow_the_spread():
    assert planted(0.0)[1].thresholds["bayes"]["side"] == "global"
    assert planted(1.5)[1].thresholds["bayes"]["side"] == "local"


def test_empirical_bayes_proposes_noise_over_rows_times_spread():
    _, found = planted(0.5, clients=200)
    assert found.lam["client"]["value"] == pytest.approx(1.0 / (60 * 0.5**2), rel=0.25)
    assert found.lam["one"]["value"] == pytest.approx(found.lam["client"]["value"], rel=0.05)


def test_constants_lie_in_their_intervals_and_promises_use_them():
    _, found = planted(0.5)
    for name in ("smooth", "mu", "noise", "response_noise"):
        told = found.constants[name]
        assert told["low"] <= told["value"] <= told["high"], name
    assert found.constants["response_noise"]["low"] <= 1.0 <= found.constants["response_noise"]["high"]
    known = moreau(found.constants["mu"]["value"], found.constants["smooth"]["value"], found.promises["lam"])
    assert found.promises["rounds"] >= known.cond_g
    assert found.promises["minimax_aer"] <= found.promises["global_aer"]


def test_words_and_json():
    _, found = planted(0.5)
    assert any("R = " in sentence for sentence in found.words)
    table = json.loads(to_json(found._asdict()))
    assert set(table) == {"constants", "heterogeneity", "thresholds", "lam", "promises", "assumptions", "words"}


def test_clients_without_fits_of_their_own():
    """Fewer rows than coefficients: R by likelihood, with the assumption said."""
    made = LinearFederation(clients=80, samples=5, dim=8, spread=1.0, noise=0.5).make(0)
    found = report_theory(Linear(8, intercept=False), made)
    assert found.heterogeneity["low"] <= made.truth.r_rms <= found.heterogeneity["high"]
    assert any("spread" in doubt for doubt in found.assumptions)
    most = found.heterogeneity["R_max"]
    assert most["value"] >= found.heterogeneity["R"] and not isfinite(most["high"])
    assert not isfinite(found.heterogeneity["Gamma"]["value"])


def test_logistic_tasks_and_separable_clients():
    found = report_theory(Logistic(3, ridge=1e-3), logistic_clients(m=12, sizes=[15] * 12))
    assert found.heterogeneity["high"] > 0 and found.lam["one"]["value"] > 0


def test_networks_are_refused():
    from torch import nn

    with pytest.raises(RequestError, match="task 'module' is not smooth and convex"):
        report_theory(NetworkTask(lambda: nn.Linear(3, 2)), logistic_clients())
