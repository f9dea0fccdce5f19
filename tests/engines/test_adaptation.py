"""Newcomers: a personal model from a finished run's common one."""

import numpy as np
import pytest
import torch

from mooring.algorithms.base import algorithm_names, build, find
from mooring.core.cohort import Round
from mooring.core.errors import RequestError
from mooring.data.clients import from_arrays
from mooring.engines.adaptation import ADAPTATION_METHODS, adapt_models
from mooring.tasks.network import NetworkTask
from tests.support.problems import PROBLEMS, linear_clients, settled_simulator, simulate

FIRST = Round(1, 1, 1, 1, 1.0, 0)


def newcomer(name, fields, problem="linear", stays=5, how="auto", seed=7):
    """(algorithm, common model, the newcomer's model, its data, task) after three rounds without the newcomer."""
    task, clients = PROBLEMS[problem]()
    server, _, exchange = simulate(build(name, fields), task, clients)
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(12, 3))
    y = x @ rng.normal(size=3) if problem == "linear" else rng.integers(0, 2, 12)
    later = from_arrays([x], [y], names=["later"], kind="regression" if problem == "linear" else "binary")
    data = later.cohort()
    algorithm = exchange.algorithm
    return (
        algorithm,
        server.w,
        adapt_models(algorithm, server, task, data, FIRST, rounds=stays, how=how)[0],
        data,
        task,
    )


APFL = {"eta": 0.05, "decay": 0.1, "steps": 3, "adapt": "no"}


def test_mixture_is_equation_seven():
    """apfl, Eq. 7, one step after another, with the global model standing still."""
    _, w, model, data, task = newcomer("apfl", {**APFL, "alpha": 0.4}, stays=4)
    rows, v = data.train.full(task), w[None]
    for k in range(12):
        v = v - 0.05 / (1 + 0.1 * k) * 0.4 * task.grad(0.4 * v + 0.6 * w, rows)
    torch.testing.assert_close(model, (0.4 * v + 0.6 * w)[0], rtol=1e-12, atol=1e-12)


def test_mixture_adapts_alpha():
    """The first step of each stay moves alpha by Eq. 6; v = w there at first, so the second stay is the first move."""
    fields = {**APFL, "alpha": 0.4, "adapt": "round"}
    _, w, model, data, task = newcomer("apfl", fields, stays=2)
    rows, v, alpha = data.train.full(task), w[None], 0.4
    for k in range(6):
        eta, g = 0.05 / (1 + 0.1 * k), task.grad(alpha * v + (1 - alpha) * w, rows)
        new = min(max(alpha - eta * float((g * (v - w)).sum()), 0), 1) if k % 3 == 0 else alpha
        v, alpha = v - eta * alpha * g, new
    assert alpha != 0.4
    torch.testing.assert_close(model, (alpha * v + (1 - alpha) * w)[0], rtol=1e-12, atol=1e-12)


def test_all_of_the_common_model_is_the_common_model():
    _, w, model, _, _ = newcomer("apfl", {**APFL, "alpha": 0})
    assert torch.equal(model, w)


def test_none_of_the_common_model_is_fine_tuning():
    _, _, mixed, _, _ = newcomer("apfl", {**APFL, "alpha": 1}, "logistic")
    _, _, tuned, _, _ = newcomer("apfl", {**APFL, "alpha": 1}, "logistic", how="tune")
    torch.testing.assert_close(mixed, tuned, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["fedprox_personal", "fedprox_two_stage", "ditto", "pfedme", "l2gd"])
@pytest.mark.parametrize("problem", ["linear", "logistic"])
def test_moored_methods_give_the_proximal_point(name, problem):
    _, w, model, data, task = newcomer(name, {"lam": 0.4}, problem)
    slope = task.grad(model[None], data.train.full(task)) + 0.4 * (model - w)
    assert float(slope.norm()) < 1e-8


def test_a_lam_per_client_is_their_median():
    _, _, model, _, _ = newcomer("ditto", {"lam": [0.1, 0.2, 0.4, 5.0, 9.0]})
    _, _, median, _, _ = newcomer("ditto", {"lam": 0.4})
    torch.testing.assert_close(model, median, rtol=1e-12, atol=1e-12)


def test_without_a_prox_the_proximal_point_is_approached():
    _, clients = PROBLEMS["linear"]()
    task = NetworkTask(lambda: torch.nn.Linear(3, 1, dtype=torch.float64), loss="half_square")
    server, _, exchange = simulate(build("ditto", {"lam": 0.4}), task, clients)
    data = linear_clients(m=1, seed=5).cohort()
    model = adapt_models(exchange.algorithm, server, task, data, FIRST, rounds=100)
    slope = task.grad(model, data.train.padded()) + 0.4 * (model - server.w)
    assert float(slope.norm()) < 0.05


def test_fine_tuning_methods_use_their_own_last_stage():
    _, w, model, data, task = newcomer("per_fedavg", {"tune_steps": 1, "inner_eta": 0.1})
    torch.testing.assert_close(model, w - 0.1 * task.grad(w[None], data.train.full(task))[0])
    _, w, model, data, task = newcomer("fedavg_finetune", {"tune_steps": 2, "eta": 0.1})
    v = w[None]
    for _ in range(2):
        v = v - 0.1 * task.grad(v, data.train.full(task))
    torch.testing.assert_close(model, v[0])


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedprox"])
def test_shared_models_are_fine_tuned(name):
    _, w, model, data, task = newcomer(name, {"eta": 0.05, "steps": 3}, stays=2)
    v = w[None]
    for _ in range(6):
        v = v - 0.05 * task.grad(v, data.train.full(task))
    torch.testing.assert_close(model, v[0])


def test_local_trains_alone():
    _, _, model, data, task = newcomer("local", {"ridge": 0.3})
    zero = torch.zeros(1, 4, dtype=torch.float64)
    torch.testing.assert_close(model, task.prox(zero, 0.3, data.train.full(task))[0])


def test_steps_stay_within_the_newcomers_own_curvature():
    """The run's step is safe for its clients; rows ten times as large would make it explode."""
    task, clients = PROBLEMS["linear"]()
    server, _, exchange = simulate(build("fedavg", {}), task, clients)
    rng = np.random.default_rng(0)
    x = 10 * rng.normal(size=(30, 3))
    data = from_arrays([x], [x @ np.ones(3)], kind="regression").cohort()
    model = adapt_models(exchange.algorithm, server, task, data, FIRST, rounds=50)
    assert float(task.loss(model, data.train.full(task))) < float(task.loss(server.w[None], data.train.full(task)))


def test_wrong_ways_are_refused():
    with pytest.raises(RequestError, match="how must be one of mixture, prox"):
        newcomer("fedavg", {}, how="magic")
    with pytest.raises(RequestError, match="fedavg has no lam"):
        newcomer("fedavg", {}, how="prox")


@pytest.mark.parametrize("name", algorithm_names())
def test_every_algorithm_declares_a_way_that_it_can_go(name):
    """A prox is for personal models that lam pulls, never for a shared one; a last stage must be there to be used."""
    task, clients = PROBLEMS["linear"]()
    algorithm, exchange, _ = settled_simulator(
        build(name, {"personal": "head"} if name == "fedbn" else {}), task, clients
    )
    kept = exchange.states.first._fields
    way, personal = find(name).new_client_method, "v" in kept or "own_w" in kept
    assert way in ADAPTATION_METHODS
    assert (way == "prox") == (personal and hasattr(algorithm, "lam"))
    assert way != "finetune" or algorithm.finetunes
    assert personal or way in ("tune", "finetune")


def test_a_cohort_of_newcomers_equals_one_at_a_time():
    task, clients = PROBLEMS["linear"]()
    server, _, exchange = simulate(build("apfl", {"batch": 4}), task, clients)
    later = linear_clients(m=3, seed=9)
    data = later.cohort()
    together = adapt_models(exchange.algorithm, server, task, data, FIRST)
    for i in range(3):
        one = adapt_models(exchange.algorithm, server, task, data.select(torch.tensor([i])), FIRST)
        assert torch.equal(one[0], together[i])
