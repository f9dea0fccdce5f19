"""Two-stage FedProx: the last stage does enough work, and lam by the theorems' rules."""

import numpy as np
import pytest
import torch

from mooring.algorithms.base import build
from mooring.algorithms.fedprox_two_stage import MAX_FINAL_STEPS
from mooring.core.cohort import Round
from mooring.data.clients import from_arrays
from mooring.engines import local_update
from mooring.estimates.client_statistics import collect_statistics
from mooring.estimates.lambda_from_statistics import bound_curvature
from mooring.tasks.linear import Linear
from mooring.theory.lambda_aer import lambda_aer
from mooring.theory.lambda_ier import lambda_ier
from tests.support.problems import PROBLEMS, settled_simulator


def steep(condition=200.0, m=4, seed=0):
    """Quadratics with curvatures from 1/condition to 1, as rows of a linear regression."""
    rng = np.random.default_rng(seed)
    scales = np.sqrt(4 * np.geomspace(1 / condition, 1, 4))
    roots = [np.diag(scales) @ np.linalg.qr(rng.normal(size=(4, 4)))[0].T for _ in range(m)]
    return Linear(4, intercept=False), from_arrays(roots, [x @ rng.normal(size=4) for x in roots])


@pytest.mark.parametrize("schedule", ["constant", "inverse"])
def test_the_last_stage_comes_a_thousand_times_nearer(schedule):
    """From the exact common model, with a condition number of 200 and a loose moor."""
    task, clients = steep()
    fields = {"lam": 1e-3, "schedule": schedule, "radius": 0}
    ready, exchange, server = settled_simulator(build("fedprox_two_stage", fields), task, clients)
    w = torch.tensor([0.3, -0.2, 0.5, 0.1], dtype=torch.float64)
    exact = task.prox(w.expand(4, -1), 1e-3, clients.train.full(task))
    begin = exact + torch.tensor([1.0, -1.0, 0.5, 0.2], dtype=torch.float64)
    client = exchange.states.take(torch.arange(4))._replace(v=begin)
    end = local_update.finetune(ready, task, server._replace(w=w), client, exchange.data, Round(1, 1, 4, 4, 1.0, 0)).v
    assert float(((end - exact).norm(dim=1) / (begin - exact).norm(dim=1)).max()) <= 1e-3
    still = client._replace(v=exact)
    end = local_update.finetune(ready, task, server._replace(w=w), still, exchange.data, Round(1, 1, 4, 4, 1.0, 0)).v
    torch.testing.assert_close(end, exact, rtol=1e-9, atol=1e-9)


def test_flat_losses_cut_the_final_steps_with_a_warning():
    task, clients = steep(condition=1e6)
    with pytest.warns(UserWarning, match="final_steps = 'auto' is cut at 10000; so flat a loss asks for"):
        ready, *_ = settled_simulator(build("fedprox_two_stage", {"lam": 0.0, "radius": 0}), task, clients)
    assert ready.final_steps == 10_000


def test_given_final_steps_are_taken_as_in_a_stay():
    ready, *_ = settled_simulator(build("fedprox_two_stage", {"final_steps": 7}), *PROBLEMS["linear"]())
    assert (ready.final_steps, ready.final_eta) == (7, "stay")


def test_without_curvature_the_last_stage_is_ten_stays():
    for work, steps in (({"steps": 3}, 30), ({"epochs": 2, "batch": 4}, 10 * 2 * 4)):  # 13 rows: 4 batches a pass
        fields = {"lam": 0.5, "radius": 0, **work}
        ready, *_ = settled_simulator(build("fedprox_two_stage", fields), *PROBLEMS["absolute"]())
        assert (ready.final_steps, ready.final_eta) == (steps, "stay")


@pytest.mark.parametrize("rule", ["aer", "ier"])
@pytest.mark.parametrize("name", ["fedprox_personal", "fedprox_two_stage"])
def test_the_rules_take_the_radius_that_their_theorem_is_about(name, rule):
    """Average risk: the root mean square distance; every client's risk: the largest one."""
    task, clients = Linear(3, intercept=False), unlike_one_another()
    ready, exchange, _ = settled_simulator(build(name, {"lam": rule}), task, clients)
    facts = collect_statistics(task, exchange.data, task.start(), ("rules",))
    found, mu = facts.federation.radii, bound_curvature("", task, facts).mu
    rms, most = found.rms.value, found.most.value
    rules = {"aer": (lambda_aer, rms, most), "ier": (lambda_ier, most, rms)}
    law, right, wrong = rules[rule]
    p, n = facts.p.numpy(), facts.n.numpy()
    assert ready.lam == pytest.approx(law(right, mu, p, n).lam, rel=1e-7)
    assert abs(law(wrong, mu, p, n).lam / ready.lam - 1) > 0.05  # the radius matters here


def unlike_one_another():
    """Many clients that differ by little, one by more: R_max is well above R_rms, both below sqrt(m/N)."""
    rng = np.random.default_rng(3)
    xs = [rng.normal(size=(40, 3)) for _ in range(9)]
    far = np.array([0.05] * 8 + [0.14])
    ways = rng.normal(size=(9, 3))
    ways /= np.linalg.norm(ways, axis=1, keepdims=True)
    ys = [x @ (1 + f * way) + 0.02 * rng.normal(size=40) for x, f, way in zip(xs, far, ways)]
    return from_arrays(xs, ys, kind="regression")


@pytest.mark.parametrize(("lam", "gamma"), [(0.25, 4.0), (4.0, 0.25), (0.0, 0.0), ([0.5, 1.0, 2.0, 1.0, 1.0], 1.0)])
def test_the_servers_step_left_open_undoes_the_pull(lam, gamma):
    """gamma = 1 / lam averages the clients' models; without a pull nothing moves; stiffnesses travel."""
    task, clients = PROBLEMS["linear"]()
    assert settled_simulator(build("fedprox_two_stage", {"lam": lam}), task, clients)[0].gamma == gamma
    given = {"lam": lam, "gamma": 0.125}
    assert settled_simulator(build("fedprox_two_stage", given), task, clients)[0].gamma == 0.125


def test_without_any_curvature_or_pull_the_last_stage_is_as_long_as_allowed():
    """A client whose rows say nothing, and lam = 0: no number of steps would do, and the sentence says so."""
    rng = np.random.default_rng(5)
    xs = [rng.normal(size=(6, 4)), np.zeros((6, 4))]  # the second client's curvature is 0, not a rounding of it
    clients = from_arrays(xs, [rng.normal(size=6) for _ in xs])
    task = Linear(4, intercept=False, ridge=0.0)
    with pytest.warns(UserWarning, match="asks for inf steps"):
        ready = settled_simulator(build("fedprox_two_stage", {"lam": 0.0, "eta": 0.1}), task, clients)[0]
    assert ready.final_steps == MAX_FINAL_STEPS
