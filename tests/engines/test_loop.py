"""The round loop: cohorts, guards, costs, evaluation, early stop, chunks."""

import numpy as np
import pytest
import torch

from mooring.algorithms.base import algorithm_names, build, find
from mooring.core.cohort import Round
from mooring.core.errors import RequestError, WorkError
from mooring.core.seeds import random_words
from mooring.engines.local_update import extend_model
from mooring.engines.loop import run
from mooring.engines.participation import sample_cohort
from mooring.engines.simulator import Simulator, resolve
from mooring.engines.training_state import TrainingPlan, TrainingState, make_plan
from mooring.runs.runfile import make_training
from mooring.tasks.linear import Linear
from tests.algorithms.cases import CASES
from tests.support.problems import PROBLEMS, linear_clients, simulate


def start(name="fedavg", fields=None, **how):
    task, clients = PROBLEMS["linear"]()
    return resolve(build(name, fields or {}), task, clients, **how)


def test_cohorts_are_the_same_for_every_method_and_uniform():
    keys = linear_clients(m=10).keys
    plan = TrainingPlan(participation=0.3, seed=5)
    assert [sample_cohort(plan, keys, t).tolist() for t in range(20)] == [
        sample_cohort(TrainingPlan(participation=3, seed=5, rounds=7), keys, t).tolist() for t in range(20)
    ]
    counts = np.zeros(10)
    for t in range(2000):
        cohort = sample_cohort(plan, keys, t)
        assert len(set(cohort.tolist())) == 3
        counts[cohort] += 1
    assert np.all(np.abs(counts / 2000 - 0.3) < 0.05)


def test_more_clients_than_there_are_is_refused():
    with pytest.raises(RequestError, match="asks for 9 clients, but there are 5"):
        sample_cohort(TrainingPlan(participation=9), linear_clients().keys, 1)


def test_the_pooled_baseline_refuses_partial_participation():
    algorithm, exchange, server = start("pooled")
    with pytest.raises(RequestError, match="pooled needs every client"):
        run(algorithm, exchange, TrainingPlan(participation=0.5), TrainingState(server))


class Sick(Simulator):
    """An exchange in which some clients answer with nan."""

    sick: tuple[int, ...] = ()

    def ask(self, server, cohort, round, deadline=None):
        replies = super().ask(server, cohort, round, deadline)
        message = replies.message.clone()
        for place, client in enumerate(cohort.tolist()):
            if client in self.sick:
                message[place] = torch.nan
        return replies._replace(message=message)


def sick_run(sick, rounds=3):
    task, clients = PROBLEMS["linear"]()
    algorithm, _, server = resolve(build("fedavg", {"eta": 0.1}), task, clients)
    exchange = Sick(task, clients, clients.weights())
    exchange.begin(algorithm, task.start())
    exchange.sick = sick
    return run(algorithm, exchange, TrainingPlan(rounds=rounds, evaluate_every=rounds), TrainingState(server)), exchange


@pytest.mark.parametrize("k", [1, 2, 4])
def test_bad_replies_are_left_out_and_named(k):
    """The model is what the healthy ones alone would have made, and the offenders' states do not move."""
    outcome, exchange = sick_run(tuple(range(k)))
    assert sorted(outcome.state.offenders) == list(range(k))
    assert exchange.states.merged.tolist() == [0] * k + [3] * (5 - k)
    task, clients = PROBLEMS["linear"]()
    algorithm, healthy, server = resolve(build("fedavg", {"eta": 0.1}), task, clients)
    everyone, p = torch.arange(k, 5), healthy.data.p
    for t in range(1, 4):
        replies = healthy.ask(server, everyone, Round(t, 3, 5, 5 - k, 1.0, 0))
        mean = (p[k:, None] * replies.message).sum(0) / p[k:].sum()
        server = algorithm.server_update(server, mean, Round(t, 3, 5, 5 - k, float(p[k:].sum()), 0))
    torch.testing.assert_close(outcome.state.server.w, server.w, rtol=1e-12, atol=1e-14)


def test_a_diverged_run_is_one_sentence():
    with pytest.raises(WorkError, match=r"diverged in round 1: no client's reply can be used \(clients '0', '1'"):
        sick_run(tuple(range(5)))


def test_costs_are_counted():
    """Three rounds, two of five clients: bytes of the models that travel, rows and gradients of local steps."""
    algorithm, exchange, server = start("fedavg", {"steps": 4, "batch": 2})
    plan = TrainingPlan(rounds=3, participation=2, evaluate_every=3)
    records = run(algorithm, exchange, plan, TrainingState(server)).state.records
    for record in records:
        assert record["bytes_up"] == record["bytes_down"] == 2 * 4 * 8
        assert 2 * 4 <= record["samples"] == record["gradients"] <= 2 * 4 * 2
    algorithm, exchange, server = start("local")
    records = run(algorithm, exchange, TrainingPlan(rounds=3), TrainingState(server)).state.records
    assert len(records) == 1 and records[0]["bytes_up"] == records[0]["bytes_down"] == 0
    assert records[0]["gradients"] == int(exchange.data.train.size.sum())


def test_evaluation_changes_nothing():
    often = simulate(build("fedprox_personal", {"inner": "sgd", "batch": 3}), *PROBLEMS["linear"](), rounds=6)
    algorithm, exchange, server = start("fedprox_personal", {"inner": "sgd", "batch": 3})
    rare = run(algorithm, exchange, TrainingPlan(rounds=6, evaluate_every=1), TrainingState(server))
    assert torch.equal(often[0].w, rare.state.server.w)


def test_losses_are_means_over_rows_of_deployed_models():
    task, clients = PROBLEMS["linear"]()
    algorithm, exchange, server = resolve(build("local", {"ridge": 0.1}), task, clients)
    outcome = run(algorithm, exchange, TrainingPlan(rounds=1), TrainingState(server))
    total = count = 0.0
    for i in range(len(clients)):
        x, y = clients.test.of(i)
        w = exchange.states.take(torch.tensor([i])).v[0]
        total += float(((x @ w[:3] + w[3] - y) ** 2).sum())
        count += len(y)
    assert outcome.last.test_loss == pytest.approx(total / count, rel=1e-12)


def test_who_was_never_asked_deploys_the_common_model():
    task, clients = PROBLEMS["linear"]()
    server, models, exchange = simulate(build("fedprox_personal", {}), task, clients, rounds=1, participation=2)
    never = exchange.states.merged == 0
    assert int(never.sum()) == 3
    assert torch.equal(models[never], server.w.expand(3, -1))
    assert not torch.equal(models[~never], server.w.expand(2, -1))


def test_early_stop_keeps_the_best_round():
    """On pure noise the validation loss gets worse: the run stops, and the chosen round is the best evaluated one."""
    clients = linear_clients(m=4, d=30, sizes=[40] * 4, seed=3)
    noise = torch.randn(len(clients.train.y), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    object.__setattr__(clients.train, "y", noise)
    algorithm, exchange, server = resolve(build("local", {"inner": "sgd", "eta": 0.05}), Linear(30), clients)
    outcome = run(algorithm, exchange, TrainingPlan(rounds=200, evaluate_every=1, patience=5), TrainingState(server))
    losses = [record["validation_loss"] for record in outcome.state.records]
    assert len(losses) < 200
    assert outcome.best.t == int(np.argmin(losses)) + 1 == len(losses) - 5
    assert outcome.best.validation_loss == pytest.approx(min(losses), rel=1e-12)


@pytest.mark.parametrize("problem", ["linear", "softmax"])
def test_chunks_do_not_matter(problem):
    task, clients = PROBLEMS[problem]()
    fields = {"inner": "sgd", "batch": 3, "lam": 0.3, "eta": 0.05}
    one = simulate(build("fedprox_personal", fields), task, clients, rounds=4, chunk=1)
    all_ = simulate(build("fedprox_personal", fields), task, clients, rounds=4, chunk=99)
    torch.testing.assert_close(one[1], all_[1], rtol=1e-12, atol=1e-12)


def test_a_plan_is_what_the_run_file_says():
    training = make_training("here", rounds=7, participation=0.5, seed=3, checkpoint="last", patience=2, threads=1)
    assert make_plan(training) == TrainingPlan(rounds=7, participation=0.5, seed=3, checkpoint="last", patience=2)
    with pytest.raises(RequestError, match=r"here: training\.rounds must be a whole number >= 1, got 0"):
        make_training("here", rounds=0)
    with pytest.raises(RequestError, match="participation must be a share"):
        make_training("here", participation=-0.5)


@pytest.mark.parametrize("name", algorithm_names())
def test_a_last_stage_is_for_everyone_with_rows(name):
    """Two of five clients are asked, once. The others deploy the global model, or what a last stage makes of it; so
    does the one without rows."""
    if find(name).full_participation:
        pytest.skip("needs everyone")
    clients = linear_clients(sizes=[7, 10, 13, 16, 2])  # two rows: one to validate, one to test
    fields = next(fields for other, fields, problems in CASES if other == name and "linear" in problems)
    fields = fields | ({"inner": "sgd"} if name == "local" else {})  # exact, it asks everyone at once
    server, models, exchange = simulate(build(name, fields), Linear(3, ridge=0.1), clients, rounds=1, participation=2)
    never = (exchange.states.merged == 0) & (clients.train.size > 0)
    same = (models == extend_model(server.w, models.shape[1])).all(1)
    assert clients.train.size[4] == 0 and bool(same[4]) and int(never.sum()) >= 2
    if name != "ifca":  # its server's model is that of a cluster, which a client may choose
        assert same[never].tolist() == [not find(name).finetunes] * int(never.sum())
    tuned = ("fedavg_finetune", "scaffold_finetune", "per_fedavg", "fedprox_two_stage", "fedbabu", "fedrep", "ifca")
    assert find(name).finetunes == (name in (*tuned, "knn_per"))


def test_the_second_stage_of_two_stage_fedprox_is_at_every_client():
    """Eight clients, two a round, two rounds: everyone ends at the minimiser of its own moored objective."""
    task, clients = Linear(3, ridge=0.1), linear_clients(m=8, spread=2.0)
    algorithm = build("fedprox_two_stage", {"lam": 0.3, "final_steps": 400, "radius": 0})
    server, models, exchange = simulate(algorithm, task, clients, rounds=2, participation=2)
    assert int((exchange.states.merged == 0).sum()) >= 4
    right = task.prox(server.w[None], 0.3, clients.train.full(task))
    torch.testing.assert_close(models, right, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("count", [2, 30, 900])
def test_a_cohort_of_a_large_population_has_the_lowest_lots_of_all(count):
    keys = np.random.default_rng(0).integers(0, 2**63, 70_000).astype(np.uint64)
    for t in (1, 2):
        lots = random_words(3, "participation", t, keys)
        assert sample_cohort(TrainingPlan(participation=count, seed=3), keys, t).tolist() == sorted(
            np.argsort(lots)[:count]
        )
