"""The exchange in one process, and `simulate` over it."""

from dataclasses import fields, replace
from typing import NamedTuple

import pytest
import torch
from torch import nn

from mooring.algorithms.base import build
from mooring.algorithms.fedavg import FedAvg
from mooring.core.cohort import Round, weighted_mean
from mooring.engines import local_update
from mooring.engines.exchange import BEST, LAST
from mooring.engines.loop import run
from mooring.engines.reply_checks import message_tensors
from mooring.engines.simulate import simulate
from mooring.engines.simulator import Simulator, chunk_size, resolve
from mooring.engines.training_state import TrainingPlan, TrainingState
from mooring.tasks.compiled_steps import compile_steps
from mooring.tasks.linear import Linear
from mooring.tasks.logistic import Logistic
from mooring.tasks.network import NetworkTask
from tests.support.problems import PROBLEMS, linear_clients, logistic_clients

TURN = Round(1, 3, 5, 5, 1.0, 0)


def ready(name="ditto", **fields):
    task, clients = PROBLEMS["linear"]()
    return task, clients, *resolve(build(name, fields), task, clients)


def test_who_is_there():
    task, clients = PROBLEMS["linear"]()
    roster = Simulator(task, clients, clients.weights("uniform")).roster
    assert len(roster) == 5 and roster.names == clients.names and roster.keys.tolist() == clients.keys.tolist()
    assert roster.p.tolist() == [0.2] * 5
    assert {part: size.tolist() for part, size in roster.sizes.items()} == {
        part: getattr(clients, part).size.tolist() for part in ("train", "validation", "test")
    }


def test_states_count_once_they_are_accepted():
    _, _, _, exchange, server = ready()
    before = exchange.models(server, TURN)
    replies = exchange.ask(server, torch.tensor([0, 2, 3]), TURN)
    assert replies.clients.tolist() == [0, 2, 3] and replies.missing == {} and len(replies.message) == 3
    assert torch.equal(exchange.models(server, TURN), before)
    exchange.accept(torch.tensor([0, 3]), TURN)
    moved = (exchange.models(server, TURN) != before).any(1)
    assert moved.tolist() == [True, False, False, True, False]
    assert exchange.states.merged.tolist() == [1, 0, 0, 1, 0]


def test_the_marked_states_stay_as_they_were():
    _, _, algorithm, exchange, server = ready()
    everyone = torch.arange(5)
    exchange.ask(server, everyone, TURN)
    exchange.accept(everyone, TURN)
    exchange.mark_best(TURN)
    marked = exchange.models(server, TURN)
    server = algorithm.server_update(server, torch.ones(4, dtype=torch.float64), TURN)
    exchange.ask(server, everyone, TURN._replace(t=2))
    exchange.accept(everyone, TURN._replace(t=2))
    assert torch.equal(exchange.models(server, TURN, BEST), marked)
    assert not torch.equal(exchange.models(server, TURN, LAST), marked)
    best, last = (exchange.evaluate(server, TURN, ("test",), at)["test"].risk for at in (BEST, LAST))
    assert not torch.equal(best, last)


def test_numbers_are_of_those_who_were_merged():
    _, _, _, exchange, server = ready("apfl", alpha=0.3, adapt="no")
    exchange.ask(server, torch.tensor([1, 4]), TURN)
    exchange.accept(torch.tensor([1, 4]), TURN)
    alpha = exchange.numbers("alpha")
    assert alpha[[1, 4]].tolist() == [0.3, 0.3] and alpha[[0, 2, 3]].isnan().all()
    assert exchange.numbers("beta") is None


def test_parts_that_are_kept_are_not_sent():
    _, _, algorithm, exchange, server = ready("apfl", adapt="no", output="average")
    seen = []
    visit = type(algorithm).client_update

    class Spy(type(algorithm)):
        def client_update(self, server, *rest):
            seen.append(server)
            return visit(self, server, *rest)

    exchange.algorithm = Spy(**{f.name: getattr(algorithm, f.name) for f in fields(algorithm)})
    exchange.ask(server, torch.arange(5), TURN)
    assert seen and all(found.average is None and found.done is None and found.w is not None for found in seen)
    assert server.average is not None


def test_chunks_depend_on_the_model_only():
    assert chunk_size(Linear(10, intercept=False)) == 20_000_000 // 80
    assert chunk_size(Linear(10_000_000, intercept=False)) == 1


def test_simulate_equals_the_loop_by_hand():
    task, clients = PROBLEMS["logistic"]()
    plan = TrainingPlan(rounds=5, participation=3, seed=4, evaluate_every=2)
    done = simulate(build("ditto", {}), task, clients, plan, weights="uniform")
    algorithm, exchange, server = resolve(build("ditto", {}), task, clients, weights="uniform", seed=4)
    outcome = run(algorithm, exchange, plan, TrainingState(server))
    assert done.algorithm == algorithm and torch.equal(done.server.w, outcome.state.server.w)
    assert torch.equal(done.models(), exchange.models(outcome.state.server, Round(5, 5, 5, 5, 1.0, 4)))
    again = simulate(algorithm, task, clients, plan, weights="uniform", resolved=True)
    assert torch.equal(again.models(), done.models()) and torch.equal(again.models(BEST), done.models(BEST))


def test_a_callback_sees_every_round_and_may_stop():
    task, clients = linear_problem = (Linear(3, ridge=0.1), linear_clients())
    seen = []

    def watch(now):
        seen.append((now.t, now.models()))
        return now.t == 3

    done = simulate(build("ditto", {}), *linear_problem, TrainingPlan(rounds=9), watch=watch)
    assert [t for t, _ in seen] == [1, 2, 3] and done.outcome.last.t == 3
    assert torch.equal(seen[-1][1], done.models())
    shorter = simulate(build("ditto", {}), task, clients, TrainingPlan(rounds=2))
    torch.testing.assert_close(seen[1][1], shorter.models(), rtol=0, atol=0)


def test_a_run_may_begin_elsewhere():
    task, clients = PROBLEMS["linear"]()
    w0 = torch.arange(4, dtype=torch.float64)
    for resolved in (False, True):
        method = build("fedavg", {"eta": 1e-9, "batch": 0, "steps": 1})
        done = simulate(method, task, clients, TrainingPlan(rounds=1), resolved=resolved, w0=w0)
        torch.testing.assert_close(done.server.w, w0, rtol=0, atol=1e-6)


@pytest.mark.parametrize("make", [lambda: Logistic(3, classes=3), lambda: NetworkTask(small_net)])
def test_chunks_side_by_side_give_the_bytes_and_counts_of_one_after_another(make):
    task, before = make(), torch.get_num_threads()
    clients = logistic_clients(m=7, classes=3)
    if isinstance(task, NetworkTask):
        clients = replace(clients, train=replace(clients.train, x=clients.train.x.float()))
    algorithm, everyone = FedAvg(eta=0.1, steps=4, batch=3), torch.arange(7)
    found = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            exchange = Simulator(task, clients, clients.weights(), chunk=2)
            exchange.begin(algorithm, task.start())
            found.append(exchange.ask(algorithm.init(task, task.start())[0], everyone, Round(1, 2, 7, 7, 1.0, 0)))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0].message, found[1].message)
    counted = [(one.meter.samples, one.meter.gradients) for one in found]
    assert counted[0] == counted[1] and min(counted[0]) > 0


@pytest.mark.parametrize("name", ["fedavg", "fedprox_personal", "apfl"])
def test_rounds_that_use_memory_again_give_the_bytes_of_fresh_ones(name):
    clients = logistic_clients(m=7, classes=3)
    task, found = Logistic(3, classes=3), {True: [], False: []}
    for again, heard in found.items():
        algorithm, exchange, server = resolve(build(name, {"steps": 3, "batch": 3}), task, clients, chunk=2)
        for t, who in enumerate(([0, 1, 2, 3, 4, 5, 6], [0, 2, 3, 5, 6], [1, 2, 3, 4, 5], [2, 6]), 1):
            cohort, turn = torch.tensor(who), Round(t, 4, 7, len(who), 1.0, 0)
            if not again:
                exchange._used = None
            replies = exchange.ask(server, cohort, turn)
            heard.append([part.clone() for part in message_tensors(replies.message)])
            server = algorithm.server_update(server, weighted_mean(replies.message, exchange.p[cohort]), turn)
            exchange.accept(cohort[1:], turn)
        heard.append([server.w, exchange.models(server, turn)])
    for one, other in zip(*found.values()):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_compiled_steps_pad_nothing_and_are_taken_in_larger_blocks(monkeypatch):
    pytest.importorskip("numba", reason="compiled kernels come with the extra mooring[fast]")
    clients, visited, found = logistic_clients(m=7, classes=3), [], {}
    row = clients.train.x[:1].numel() * clients.train.x.element_size()
    monkeypatch.setattr("mooring.core.cohort.MAX_PADDED_BYTES", 2 * row * int(clients.train.size.max()))
    visit = local_update.client_update
    monkeypatch.setattr(local_update, "client_update", lambda *given: visited.append(len(given[4])) or visit(*given))
    for kernels in ("torch", "numba"):
        task, algorithm = Logistic(3, classes=3), FedAvg(eta=0.1, steps=3, batch=3)
        task = compile_steps(task) if kernels == "numba" else task
        exchange, visited[:] = Simulator(task, clients, clients.weights()), []
        exchange.begin(algorithm, task.start())
        server = algorithm.init(task, task.start())[0]
        found[kernels] = exchange.ask(server, torch.arange(7), Round(1, 2, 7, 7, 1.0, 0)).message, len(visited)
    assert found["numba"][1] < found["torch"][1] and sum(visited) == 7
    torch.testing.assert_close(found["numba"][0], found["torch"][0])


def test_messages_of_as_many_clients_lie_where_the_last_ones_did():
    clients = logistic_clients(m=7, classes=3)
    _, exchange, server = resolve(FedAvg(eta=0.1, steps=2), Logistic(3, classes=3), clients, chunk=2)
    first, second = (
        exchange.ask(server, torch.tensor(who), TURN).message.data_ptr() for who in ([0, 1, 2, 3], [1, 2, 5, 6])
    )
    assert first == second


def small_net():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3))


def test_states_are_sound_where_every_number_is_finite():
    class State(NamedTuple):
        v: torch.Tensor
        visits: torch.Tensor

    large = torch.finfo(torch.float32).max
    inf = float("inf")
    v = torch.tensor([[1.0, 2.0], [large, large], [inf, 1.0], [inf, -inf], [float("nan"), 0.0]])
    assert local_update.finite_states(State(v, torch.ones(5, dtype=torch.long))).tolist() == [
        True,
        True,
        False,
        False,
        False,
    ]


@pytest.mark.parametrize(
    "name, fields, part",
    [
        ("fedprox", {"lam": 1.0, "output": "random"}, "drawn"),
        ("fedmspp", {"lam": 1.0, "batch": 4, "output": "random"}, "drawn"),
        ("apfl", {"alpha": 0.5, "adapt": "no", "output": "average", "eta": 0.1, "epochs": 0}, "average"),
    ],
)
def test_a_client_that_was_never_sampled_deploys_the_output_model(name, fields, part):
    """Theorem 1 is about w_t*: every client deploys it, not the sampled ones only."""
    task, clients = PROBLEMS["linear"]()
    done = simulate(build(name, fields), task, clients, TrainingPlan(3, 0.2, seed=2, evaluate_every=3))
    never = done.exchange.states.merged == 0
    assert bool(never.any()) and not bool(never.all())
    output = getattr(done.server, part)
    assert not torch.equal(output, done.server.w)
    models = done.models()
    assert torch.equal(models[never], output.expand_as(models[never]))
    if name != "apfl":
        assert torch.equal(models, output.expand_as(models))
