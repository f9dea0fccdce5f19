"""The guard between clients and server: odd replies never happened, and who sent them is named."""

import re
from typing import NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

import mooring
from mooring.algorithms.base import build, find
from mooring.cli import main
from mooring.core.aggregation import flatten_messages
from mooring.core.cohort import Round
from mooring.core.errors import RequestError
from mooring.data.clients import from_arrays
from mooring.engines.callbacks import plan_callbacks
from mooring.engines.loop import resolve, run
from mooring.engines.reply_checks import (
    MAX_SIZE_FACTOR,
    cap_shares,
    check_replies,
    check_sizes,
    check_statistics,
    check_weights,
    clip_messages,
    describe_mismatch,
    message_pattern,
)
from mooring.engines.simulator import Simulator
from mooring.engines.training_state import TrainingPlan, TrainingState
from mooring.runs.directory import open_run
from tests.algorithms.cases import CASES
from tests.engines.lossy import LossyExchange, homes_of
from tests.support.problems import PROBLEMS, linear_clients


class Two(NamedTuple):
    change: Tensor
    path: Tensor | None


class Other(NamedTuple):
    change: Tensor
    way: Tensor | None


def test_replies_that_are_not_finite_are_refused_by_place():
    message = torch.tensor([[1.0, 2.0], [torch.inf, 0.0], [0.0, torch.nan]])
    found = check_replies(message, torch.tensor([4, 5, 6]))
    assert found.clients.tolist() == [4] and set(found.refused) == {5, 6}
    assert torch.equal(found.message, message[:1])
    assert check_replies(None, torch.tensor([4, 5])).clients.tolist() == [4, 5]


def test_absurd_replies_are_refused_and_large_ones_are_not():
    message = torch.ones(5, 3, dtype=torch.float64)
    message[1] *= 0.99 * MAX_SIZE_FACTOR
    message[3, 1] = 1e30
    found = check_replies(Two(message, None), torch.arange(5))
    assert found.clients.tolist() == [0, 1, 2, 4] and "holds 1e+30, where 1 is usual" in found.refused[3]
    assert check_replies(1e20 * torch.ones(4, 2), torch.arange(4)).clients.tolist() == [
        0,
        1,
        2,
        3,
    ]  # all alike: their scale
    assert check_replies(torch.tensor([[0.0], [0.0], [0.0], [1e9]]), torch.arange(4), usual=1e4).clients.tolist() == [
        0,
        1,
        2,
        3,
    ]
    assert check_replies(torch.tensor([[0.0], [0.0], [0.0], [0.5]]), torch.arange(4)).clients.tolist() == [0, 1, 2, 3]


RIGHT = Two(torch.ones(1, 3), None)
WRONG = {
    "another dtype": (Two(torch.ones(1, 3, dtype=torch.float64), None), "change in its reply holds torch.float64"),
    "another shape": (Two(torch.ones(1, 2), None), r"has the shape \[2\] where \[3\] is right"),
    "several rows": (Two(torch.ones(2, 3), None), "shape"),
    "other keys": (Other(torch.ones(1, 3), None), "made of change, way where change, path is right"),
    "too much": (Two(torch.ones(1, 3), torch.ones(1, 3)), "path in its reply is a Tensor where nothing is right"),
    "no numbers": (Two("text", None), "change in its reply is a str where numbers are right"),
    "text": ("text", "made of str where"),
    "nothing": (None, "made of NoneType where"),
    "nan": (Two(torch.full((1, 3), torch.nan), None), "nan or infinity"),
    "infinity": (Two(torch.tensor([[0.0, -torch.inf, 0.0]]), None), "nan or infinity"),
}


@pytest.mark.parametrize("what", WRONG)
def test_messages_as_they_came_are_held_to_the_pattern(what):
    wrong, why = WRONG[what]
    found = check_replies([RIGHT, wrong, RIGHT], torch.tensor([2, 5, 7]), pattern=RIGHT)
    assert found.clients.tolist() == [2, 7] and list(found.refused) == [5]
    assert re.search(why, found.refused[5])
    assert torch.equal(found.message.change, torch.ones(2, 3)) and found.message.path is None
    assert check_replies([wrong], torch.tensor([5]), pattern=RIGHT).clients.tolist() == []


def merged_or_refused(sent):
    """Each reply is merged as it is or refused with a reason; nothing that is merged is odd."""
    messages = [torch.from_numpy(one) for one in sent]
    found = check_replies(messages, torch.arange(len(sent)), pattern=torch.zeros(1, 2, dtype=torch.float64))
    assert sorted([*found.clients.tolist(), *found.refused]) == list(range(len(sent)))
    assert found.message.shape == (len(found.clients), 2) and bool(torch.isfinite(found.message).all())
    for place, row in zip(found.clients.tolist(), found.message):
        assert torch.equal(messages[place][0], row)


SENT = st.lists(
    arrays(np.float64, st.tuples(st.integers(0, 3), st.integers(0, 4)), elements=st.floats(width=64)),
    min_size=1,
    max_size=6,
)


@settings(max_examples=100, deadline=None)
@given(SENT)
def test_whatever_comes_what_is_merged_is_finite_and_of_one_shape(sent):
    merged_or_refused(sent)


@pytest.mark.slow
@settings(max_examples=1000, deadline=None)
@given(SENT)
def test_whatever_comes_a_thousand_times(sent):
    merged_or_refused(sent)


ROWS = [(name, fields, problem) for name, fields, problems in CASES for problem in problems if not find(name).pooled]


@pytest.mark.parametrize("name,fields,problem", ROWS)
def test_the_pattern_is_what_clients_send(name, fields, problem):
    task, clients = PROBLEMS[problem]()
    exchange = Simulator(task, clients, clients.weights())
    ready, server = resolve(build(name, fields), task, exchange)
    pattern = message_pattern(ready, task, task.start(0), clients.train.x[:1], clients.train.y[:1])
    for place in range(len(clients)):
        sent = exchange.ask(server, torch.tensor([place]), Round(1, 4, 5, 5, 1.0, 0)).message
        assert describe_mismatch(sent, pattern) is None


class Sick(LossyExchange):
    """Clients on machines of their own, some of which send what is wrong."""

    sick: tuple[int, ...] = ()
    wrong: object = None

    def ask(self, server, cohort, round, deadline=None):
        replies = super().ask(server, cohort, round, deadline)
        sent = [self.wrong(m) if p in self.sick else m for p, m in zip(replies.clients.tolist(), replies.message)]
        return replies._replace(message=sent)


LIES = {
    "nan": lambda m: m * torch.nan,
    "infinity": lambda m: m * torch.inf,
    "shape": lambda m: m[:, :2],
    "dtype": lambda m: m.float(),
    "text": lambda m: "text",
    "1e30": lambda m: m + 1e30,
}


def federation(m, sick=(), lie="nan", alone=None):
    """A run of m clients; with `alone` only those clients exist."""
    clients = linear_clients(m=m, sizes=[9 + i % 5 for i in range(m)])
    task, _ = PROBLEMS["linear"]()
    homes = homes_of(task, clients, clients.weights())
    names = clients.names
    if alone is not None:
        homes, names = [homes[i] for i in alone], [names[i] for i in alone]
        for place, home in enumerate(homes):
            home.place = place
    exchange = Sick(task, names, homes)
    exchange.sick, exchange.wrong = sick, LIES[lie]
    ready = build("fedavg", {"eta": 0.1, "batch": 0})
    w0 = task.start(0)
    exchange.begin(ready, w0)
    return ready, exchange, TrainingState(ready.init(task, w0)[0])


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("k", [1, 7, 13, 19])
def test_the_result_is_that_of_the_run_without_them(k, lie):
    """k of 20 clients are odd. 1e30 is refused as long as the honest are the majority of a round."""
    if lie == "1e30" and k > 9:
        pytest.skip("most say so: nobody can tell who is odd")
    plan, sick = TrainingPlan(rounds=4), tuple(range(0, k))
    ready, exchange, progress = federation(20, sick, lie)
    poisoned = run(ready, exchange, plan, progress).state
    assert sorted(poisoned.offenders) == list(sick) and set(poisoned.left_out.values()) == {4}
    assert exchange.merged.tolist() == [0] * k + [4] * (20 - k)
    ready, without, progress = federation(20, alone=range(k, 20))
    right = run(ready, without, plan, progress).state
    torch.testing.assert_close(poisoned.server.w, right.server.w, rtol=1e-12, atol=1e-14)


def test_a_round_without_an_honest_message_keeps_the_old_model():
    """Two of six are asked and one in six is honest: rounds in which nobody is leave the model as it was."""
    ready, exchange, progress = federation(6, sick=(0, 1, 2))
    models = []
    plan = TrainingPlan(rounds=12, participation=2, seed=1)
    callbacks = plan_callbacks(ready, plan, 6, report=lambda now, _: models.append(now.server.w))
    outcome = run(ready, exchange, plan, progress, callbacks)
    accepted = [record["accepted"] for record in outcome.state.records]
    assert 0 in accepted and 2 in accepted
    for t in range(1, 12):
        assert torch.equal(models[t], models[t - 1]) == (accepted[t] == 0)


def test_offenders_are_named_in_table_and_terminal(tmp_path, capsys, monkeypatch):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"client": [f"ward [{k % 5}]" for k in range(150)], "x": rng.normal(size=150)})
    frame.assign(target=frame["x"] + rng.normal(size=150)).to_csv(tmp_path / "rows.csv", index=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as left:
        main(["fit", "rows.csv", "--algorithm", "fedavg", "--rounds", "4", "--attack", "nan:0.2", "--out", "run"])
    assert left.value.code == 0
    clients = open_run("run").clients
    odd = clients[clients["left_out"].notna()]
    assert len(odd) == 1 and odd["left_out"].iloc[0] == "4 rounds: its reply holds nan or infinity"
    said = " ".join(capsys.readouterr().out.split())
    assert (
        f"Replies that could not be used: {odd['client'].iloc[0]} (4 rounds: its reply holds nan or infinity)" in said
    )


@settings(max_examples=200, deadline=None)
@given(arrays(np.float64, (5, 4), elements=st.floats(-1e6, 1e6)), st.floats(1e-3, 1e3))
def test_no_clipped_message_is_longer(sent, most):
    message = Two(torch.from_numpy(sent[:, :2].copy()), torch.from_numpy(sent[:, 2:].copy()))
    before, after = flatten_messages(message).norm(dim=1), flatten_messages(clip_messages(message, most)).norm(dim=1)
    assert bool((after <= most * (1 + 1e-12)).all())
    assert torch.allclose(after, before.clamp(max=most), rtol=1e-12)
    assert clip_messages(message, None) is message


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=12), st.floats(0.05, 1))
def test_no_share_exceeds_the_cap(sizes, most):
    p = torch.tensor(sizes, dtype=torch.float64)
    share = cap_shares(p, most)
    assert float(share.sum()) == pytest.approx(1)
    assert float(share.max()) <= max(most, 1 / len(p)) * (1 + 1e-9)
    order = p.argsort()
    assert bool((share[order].diff() >= -1e-12).all())  # who has more never counts less
    if float(p.max() / p.sum()) <= most:
        torch.testing.assert_close(share, p / p.sum())
    assert torch.equal(cap_shares(p, None), p)


@pytest.mark.parametrize("lie", [-1, float("nan"), 1e30, "many", True, 2.5, None, float("inf")])
def test_a_client_cannot_lie_about_its_weight(lie):
    with pytest.raises(RequestError, match=r"client 'b' reports .* rows; a whole number"):
        check_sizes(["a", "b"], [10, lie])
    assert check_sizes(["a", "b"], [0, 7]).tolist() == [0, 7]
    with pytest.raises(RequestError, match="client 'b' would weigh"):
        check_weights(["a", "b"], torch.tensor([0.5, float("nan")]))


def test_a_large_client_counts_up_to_the_cap():
    """One client has 99 % of the rows; capped, its share of the average is one half."""
    clients = linear_clients(m=2, sizes=[1000, 10])
    task, _ = PROBLEMS["linear"]()
    models = {}
    for cap in (None, 0.5):
        exchange = Simulator(task, clients, clients.weights())
        ready, server = resolve(build("fedavg", {"eta": 0.1, "batch": 0}), task, exchange)
        replies = exchange.ask(server, torch.arange(2), Round(1, 1, 2, 2, 1.0, 0))
        models[cap] = run(ready, exchange, TrainingPlan(rounds=1, weight_cap=cap), TrainingState(server)).state.server.w
    torch.testing.assert_close(models[0.5], server.w + replies.message.mean(0))
    assert not torch.allclose(models[None], models[0.5])


@pytest.mark.parametrize("name", sorted({name for name, *_ in CASES}))
def test_facts_that_are_not_finite_name_their_client(name):
    """A value of 1e200: its square is none. Every algorithm refuses, with the client's name."""
    rng = np.random.default_rng(0)
    xs = [rng.normal(size=(12, 3)) for _ in range(4)]
    ys = [x.sum(1) for x in xs]
    xs[2][0, 0] = 1e200
    clients = from_arrays(xs, ys, names=["a", "b", "c", "d"])
    fields = next(fields for other, fields, problems in CASES if other == name and "linear" in problems)
    fields = {k: v for k, v in fields.items() if k != "lam"}
    task, _ = PROBLEMS["linear"]()
    with pytest.raises(RequestError, match="client 'c' cannot take part: its rows give"):
        resolve(build(name, fields), task, Simulator(task, clients, clients.weights()))


def test_facts_of_clients_without_rows_are_no_offence():
    task, clients = PROBLEMS["linear"]()
    facts = Simulator(task, clients, clients.weights()).client_statistics(task.start(0), ())
    check_statistics(clients.names, facts)
    none = torch.full_like(facts.smooth, torch.nan)
    check_statistics(clients.names, facts._replace(smooth=none))  # a task that cannot tell
    n = facts.n.clone()
    n[1], none = 0, facts.smooth.clone()
    none[1] = torch.nan
    check_statistics(clients.names, facts._replace(smooth=none, n=n))
    with pytest.raises(RequestError, match="client '1'"):
        check_statistics(clients.names, facts._replace(smooth=none))


def test_personal_models_that_are_not_finite_are_rolled_back():
    """`local` sends nothing: a client whose own steps overflow keeps its last finite model, and is named."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"client": [f"c{k % 4}" for k in range(120)], "x": rng.normal(size=120)})
    frame["target"] = frame["x"] + rng.normal(size=120)
    with pytest.raises(mooring.WorkError, match=r"local diverged .*\. Too large: eta = 1e\+03; with eta = "):
        mooring.fit(frame, algorithm="local", settings={"inner": "sgd", "eta": 1e3}, rounds=30, threads=1)
