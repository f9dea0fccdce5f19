"""Calls of client functions by message: results are checked, and a client computes what it is allowed to."""

import pytest
import torch

from mooring.core.cohort import Rows
from mooring.core.errors import RequestError
from mooring.estimates.client_queries import STATISTICS, differentiate_at, summarize_rows
from mooring.remote.messages import Payload
from mooring.remote.messenger import ClientFailedError
from mooring.remote.remote_rows import CallBatcher, RemoteRows, answer_calls, make_sender
from mooring.tasks.linear import Linear
from mooring.tasks.logistic import Logistic
from tests.support.problems import logistic_clients

TASK = Logistic(3)
NAMES = ("a", "b", "c")


def remote_rows(rows, spoil=lambda name, tensors: tensors, task=TASK):
    """The same rows behind messages; `spoil` changes what a client sends."""

    def ask_all(letters):
        out = {}
        for name, letter in letters.items():
            own = rows.select(torch.tensor([NAMES.index(name)]))
            reply = answer_calls(name, task, letter, lambda part, own=own: own, (*STATISTICS, "condense_rows"))
            out[name] = Payload({}, spoil(name, dict(reply.tensors)))
        return out

    return RemoteRows(
        CallBatcher(make_sender(ask_all, NAMES)), ("train",), (0, 1, 2), rows.size, rows.x[:1], rows.y[:1]
    )


@pytest.fixture
def rows():
    return logistic_clients(m=3, sizes=[30, 12, 20], seed=1).train


def test_results_are_those_of_rows_in_memory(rows):
    remote, w = remote_rows(rows), torch.tensor([0.1, -0.2, 0.3, 0.0], dtype=torch.float64)
    for found, wanted in zip(differentiate_at(TASK, remote, w=w), differentiate_at(TASK, rows, w=w)):
        torch.testing.assert_close(found, wanted)
    some = torch.tensor([2, 0])
    assert type(summarize_rows(TASK, remote)) is type(summarize_rows(TASK, rows))
    torch.testing.assert_close(summarize_rows(TASK, remote.select(some)).fit, summarize_rows(TASK, rows).fit[some])


def test_sums_of_a_linear_task_serve_its_fits(rows):
    task = Linear(3)
    rows = Rows(rows.x, rows.y.double(), rows.start, rows.size)
    remote, zero = remote_rows(rows, task=task), torch.zeros(1, task.dim, dtype=task.dtype)
    torch.testing.assert_close(task.prox(zero, 0.3, remote.full(task)), task.prox(zero, 0.3, rows.full(task)))


@pytest.mark.parametrize(
    "change, why",
    [
        (lambda t: t | {"0/hessian": t["0/hessian"] * torch.nan}, "not finite or too large"),
        (lambda t: {"0/point": t["0/point"]}, "another form"),
        (lambda t: t | {"0/hessian": t["0/hessian"][:, :2]}, "in another form than the other clients"),
        (lambda t: {}, "does not answer"),
    ],
)
def test_a_client_that_sends_something_else_is_named(rows, change, why):
    remote = remote_rows(rows, lambda name, tensors: change(tensors) if name == "b" else tensors)
    with pytest.raises(ClientFailedError, match=f"client 'b'.*{why}"):
        differentiate_at(TASK, remote, w=torch.zeros(4, dtype=torch.float64))


def test_a_client_computes_nothing_else(rows):
    call = {"name": "sum_for_dispersion", "part": ["train"], "own": 0, "shared": {}}
    with pytest.raises(RequestError, match="does not compute 'sum_for_dispersion'"):
        answer_calls("a", TASK, Payload({"calls": {"0": call}}), lambda part: rows, ("differentiate_at",))
