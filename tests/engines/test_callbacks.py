"""Callbacks of the round loop: those that users write, and the order in which they run."""

import torch

import mooring
from mooring.engines.callbacks import (
    AddNoise,
    Aggregate,
    AverageMessages,
    Callback,
    CheckReplies,
    ClipMessages,
    SimulateAttack,
    StopEarly,
    plan_callbacks,
)
from mooring.engines.training_state import TrainingPlan
from tests.support.problems import linear_clients

HOW = {"algorithm": "fedavg", "rounds": 6, "evaluate_every": 2, "threads": 1, "baselines": False}


class Log(Callback):
    """Every hook by name."""

    def __init__(self):
        self.calls = []

    def on_start(self, training):
        self.calls.append(("start", training.state.t))

    def on_replies(self, training, request, replies):
        self.calls.append(("replies", request.round.t, len(replies.clients)))
        return replies

    def on_evaluation(self, training, evaluation, round):
        self.calls.append(("evaluation", evaluation.t))

    def on_round_end(self, training, record):
        self.calls.append(("end", record["round"]))


class LoseFirst(Callback):
    """The first client's reply is never used."""

    def on_replies(self, training, request, replies):
        others = replies.clients > 0
        return replies._replace(
            clients=replies.clients[others], message=replies.message[others], refused={0: "its reply was lost"}
        )


class SumMessages(Callback):
    """A sum of messages instead of their mean."""

    def aggregate(self, training, request, replies):
        return Aggregate(replies.message.sum(0), request.round)


class StopAfter(Callback):
    def __init__(self, rounds):
        self.rounds = rounds

    def on_round_end(self, training, record):
        training.state.stopped = record["round"] == self.rounds


def test_hooks_run_in_the_order_of_the_round_and_change_nothing_by_themselves():
    clients, log = linear_clients(), Log()
    watched, plain = mooring.fit(clients, callbacks=[log], **HOW), mooring.fit(clients, **HOW)
    m = len(clients)
    assert log.calls[:6] == [
        ("start", 0), ("replies", 1, m), ("end", 1), ("replies", 2, m), ("evaluation", 2), ("end", 2),
    ]  # fmt: skip
    assert log.calls[-1] == ("end", 6)
    assert torch.equal(watched.trained.common, plain.trained.common)


def test_a_callback_may_stop_the_run(tmp_path):
    result = mooring.fit(linear_clients(), callbacks=[StopAfter(3)], out=tmp_path / "run", **HOW)
    assert len(result.rounds) == 3 and result.summary["last_round"] == 3


def test_a_callback_may_leave_replies_out_and_the_run_reports_it():
    clients = linear_clients()
    result = mooring.fit(clients, callbacks=[LoseFirst()], **HOW)
    assert set(result.rounds["accepted"]) == {len(clients) - 1}
    assert result.clients["left_out"].dropna().tolist() == ["6 rounds: its reply was lost"]


def test_a_callback_may_aggregate():
    clients = linear_clients()
    mean, total = (mooring.fit(clients, callbacks=c, **HOW | {"rounds": 1}) for c in ([], [SumMessages()]))
    m, w0 = len(clients), torch.zeros_like(mean.trained.common)
    equal = mooring.fit(clients, weights="uniform", **HOW | {"rounds": 1})
    torch.testing.assert_close(total.trained.common - w0, m * (equal.trained.common - w0))


def test_what_a_users_callback_returns_is_checked_and_noise_comes_first():
    plan = TrainingPlan(attack="nan:0.2", clip=1.0, patience=2)
    user, algorithm = Log(), mooring.fit(linear_clients(), **HOW | {"rounds": 1}).trained.algorithm
    kinds = [type(one) for one in plan_callbacks(algorithm, plan, 5, [user])]
    assert kinds.index(SimulateAttack) < kinds.index(Log) < kinds.index(CheckReplies) < kinds.index(ClipMessages)
    assert kinds.index(ClipMessages) < kinds.index(AverageMessages) < kinds.index(StopEarly)
    private = [type(one) for one in plan_callbacks(algorithm, TrainingPlan(clip=1.0, noise=1.0), 5, [user])]
    assert private[0] is AddNoise and ClipMessages not in private
