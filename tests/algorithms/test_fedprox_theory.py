"""The FedProx family keeps the theorems' promises: rates, certificates, rules for lam, and refusals."""

import numpy as np
import pytest
import torch

from mooring.algorithms.base import build
from mooring.core.cohort import Round
from mooring.core.errors import RequestError
from mooring.data.clients import from_arrays
from mooring.engines.loop import run
from mooring.engines.training_state import TrainingPlan, TrainingState
from mooring.tasks.linear import Linear
from mooring.tasks.linear_losses import Sigmoid
from mooring.tasks.logistic import Logistic
from mooring.theory import one_stage_rate, two_stage_rate
from mooring.theory.moreau import moreau
from tests.algorithms.quadratics import LAM, MU, SMOOTH, D, M, Quadratics
from tests.support.personalized_objective import minimize_objective, objective
from tests.support.problems import PROBLEMS, linear_clients, settled_simulator, simulate


@pytest.mark.parametrize("lam", [0.2, 1.0, 5.0])
def test_the_preset_contracts_as_theorem_2_says(lam):
    """Matrix 14: over the long run |w_t - w~|^2 shrinks by at most r a round under Corollary 1's settings."""
    oracle = Quadratics(1)
    ready, exchange, server = settled_simulator(
        build("fedprox_personal", {"lam": lam, "preset": "theory", "tol": 0.0}), oracle.task, oracle.clients
    )
    expected = one_stage_rate.corollary_step_sizes(MU, SMOOTH, lam)
    assert (ready.eta, ready.gamma, ready.steps) == (
        pytest.approx(expected.eta),
        pytest.approx(expected.gamma),
        expected.steps,
    )
    assert ready.inner == "descent"
    rounds = 12
    run(ready, exchange, TrainingPlan(rounds=rounds, checkpoint="last"), progress := TrainingState(server))
    target = oracle.minimiser(lam)[0]
    before, after = np.sum(target**2), np.sum((progress.server.w.numpy() - target) ** 2)
    assert after <= before * one_stage_rate.rate(expected.gamma, moreau(MU, SMOOTH, lam).mu_g) ** rounds


def test_two_stages_keep_the_promise_of_lemma_b2():
    """Matrix 15 with full gradients: |w_t - w~|^2 stays below the guarantee at every round."""
    oracle = Quadratics(2)
    target = oracle.minimiser(LAM)[0]
    radius = 2 * float(np.linalg.norm(oracle.c, axis=1).max())
    most = SMOOTH * (2 * radius) ** 2 / 2
    for rounds in (1, 2, 4):
        fields = {"lam": LAM, "schedule": "inverse", "radius": radius, "final_steps": 400}
        server, models, exchange = simulate(build("fedprox_two_stage", fields), oracle.task, oracle.clients, rounds)
        assert (exchange.algorithm.mu, exchange.algorithm.smooth) == (pytest.approx(MU), pytest.approx(SMOOTH))
        bound = two_stage_rate.global_guarantee(rounds, MU, SMOOTH, LAM, most, 2 * radius, oracle.p)
        assert np.sum((server.w.numpy() - target) ** 2) <= bound
        rows, p = oracle.clients.train, torch.from_numpy(oracle.p)
        w, v = oracle.minimiser(LAM)
        least = objective(oracle.task, torch.from_numpy(w), torch.from_numpy(v), LAM, p, rows)
        excess = objective(oracle.task, server.w, models, LAM, p, rows) - least
        promised = two_stage_rate.objective_guarantee(rounds, 400, MU, SMOOTH, LAM, most, 2 * radius, oracle.p)
        assert -1e-9 <= excess <= promised
    assert float(models.norm(dim=1).max()) <= radius * (1 + 1e-12) and float(server.w.norm()) <= radius * (1 + 1e-12)


def test_a_certified_stop_is_near_the_prox():
    """|grad h_i| <= tol puts v_i within tol/(mu + lam) of prox_i(w); a loose certificate stops early."""
    oracle = Quadratics()
    rows = oracle.clients.train.full(oracle.task)
    w = torch.zeros(M, D, dtype=torch.float64)
    exact = oracle.task.prox(w, LAM, rows)
    work = []
    for tol in (0.1, 1e-4):
        algorithm = build("fedprox_personal", {"lam": LAM, "inner": "descent", "tol": tol, "steps": 1000})
        _, exchange, server = settled_simulator(algorithm, oracle.task, oracle.clients)
        replies = exchange.ask(server, torch.arange(M), Round(1, 1, M, M, 1.0, 0))
        v = -replies.message.pull / LAM
        assert float((v - exact).norm(dim=1).max()) <= tol / (MU + LAM)
        work.append(replies.meter.gradients)
    assert work[0] < work[1]


def test_warm_starts_help_when_the_moor_is_loose():
    oracle = Quadratics(3)
    target = oracle.minimiser(0.1)[1]
    errors = {}
    for warm in (True, False):
        fields = {"lam": 0.1, "inner": "descent", "steps": 2, "tol": 0.0, "warm": warm}
        _, models, _ = simulate(build("fedprox_personal", fields), oracle.task, oracle.clients, rounds=40)
        errors[warm] = float((models - torch.from_numpy(target)).norm())
    assert errors[True] < 0.1 * errors[False]


@pytest.mark.parametrize("rule", ["theory", "aer", "ier", "shrinkage"])
def test_rules_loosen_the_moor_as_clients_differ(rule):
    """One number (or one per client) that shrinks when the planted spread grows."""
    found = []
    for spread in (0.02, 4.0):
        rng = np.random.default_rng(0)
        xs = [rng.normal(size=(60, 3)) for _ in range(8)]
        ys = [x @ (1 + spread * rng.normal(size=3)) + 0.1 * rng.normal(size=60) for x in xs]
        task, clients = Linear(3, intercept=False), from_arrays(xs, ys)
        ready, *_ = settled_simulator(build("fedprox_personal", {"lam": rule}), task, clients)
        found.append(np.mean(ready.lam.per_client) if rule == "shrinkage" else ready.lam)
    assert 0 < found[1] < found[0]


@pytest.mark.parametrize(
    "fields, task, sentence",
    [
        ({"lam": "thoery"}, None, "lam must be a number >= 0 or one of 'auto', 'one', 'client', 'coefficient', "),
        (
            {"lam": "ier"},
            PROBLEMS["absolute"]()[0],
            "lam = 'ier' needs an estimate of how clients vary, which task 'absolute' on these rows does not allow",
        ),
        (
            {"preset": "theory", "lam": 0},
            Linear(3, ridge=0.1),
            "preset = 'theory' needs lam as one number > 0, got 0.0",
        ),
        ({"preset": "theory", "eta": 0.1}, None, "preset = 'theory' sets eta; leave it out, got 0.1"),
        ({"inner": "exact"}, Sigmoid(3), "task 'sigmoid' has no exact prox; set inner = 'sgd'"),
        ({"lam": [0.1, 0.2]}, Linear(3), "lam has 2 numbers, one per client, but there are 5"),
        ({"lam": {"per_coefficient": [1.0]}}, Linear(3), "lam has 1 numbers, one per coefficient, but there are 4"),
    ],
)
def test_infeasible_requests_are_one_sentence(fields, task, sentence):
    sizes = [4, 5, 6, 7, 8]  # fewer training rows than coefficients at the first client
    with pytest.raises(RequestError) as error:
        settled_simulator(build("fedprox_personal", fields), task, linear_clients(sizes=sizes))
    assert str(error.value).startswith(f"FedProxPersonal: {sentence}")


@pytest.mark.parametrize(
    "name, fields, task, sentence",
    [
        (
            "fedprox",
            {"growth": "smooth", "lam": 0},
            None,
            "FedProx: growth = 'smooth' needs lam as one number",
        ),
        ("fedmspp", {"lam": "theory", "batch": 0}, None, "FedMSPP: theory's lam needs batch > 0"),
        ("fedmspp", {"inner": "exact"}, Sigmoid(3), "FedMSPP: task 'sigmoid' has no exact prox; set inner = 'descent'"),
        (
            "fedprox_two_stage",
            {"schedule": "inverse", "lam": 0},
            None,
            "FedProxTwoStage: schedule = 'inverse' needs lam",
        ),
        ("fedprox_two_stage", {"schedule": "inverse"}, Linear(3), "FedProxTwoStage: schedule = 'inverse' needs every"),
    ],
)
def test_infeasible_requests_to_the_others(name, fields, task, sentence):
    with pytest.raises(RequestError) as error:
        settled_simulator(build(name, fields), task, linear_clients(sizes=[4, 5, 6, 7, 8]))
    assert str(error.value).startswith(sentence)


def test_partial_participation_stays_near_the_minimiser():
    """Half of the clients a round: both aggregations hover around w~, nobody's model is lost."""
    task, clients = PROBLEMS["logistic"]()
    best = minimize_objective(task, 1.0, clients.weights("uniform"), clients.train)
    for aggregation in ("average", "elastic"):
        fields = {"lam": 1.0, "gamma": 0.1, "aggregation": aggregation}
        server, models, _ = simulate(
            build("fedprox_personal", fields), task, clients, 100, participation=0.6, weights="uniform"
        )
        assert float((server.w - best.w).norm()) < 0.1 * float(best.w.norm())
        assert float((models - best.v).norm()) < 0.1 * float(best.v.norm())


def test_theory_on_logistic_regression_certifies_its_solves():
    task, clients = Logistic(3, ridge=0.1), PROBLEMS["logistic"]()[1]
    ready, exchange, server = settled_simulator(build("fedprox", {"lam": "theory", "inner": "descent"}), task, clients)
    turn = Round(1, 50, 5, 5, 1.0, 0)
    now = ready.at(turn)
    change = exchange.ask(server, torch.arange(5), turn).message
    grad = task.grad(server.w + change, clients.train.full(task)) + now.lam * change
    assert 0 < float(grad.norm(dim=1).max()) <= now.tol
    assert now.lam == pytest.approx(ready.lam * max(50 ** (1 / 3), 10**0.5))
