"""Local steps taken in place equal steps along the gradient, whatever pulls, shifts and sizes there are."""

from copy import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from mooring.algorithms.apfl import APFL
from mooring.core import solvers
from mooring.core.cohort import CohortData, Round, Rows, broadcast_per_client
from mooring.core.costs import CostMeter, MeteredTask
from mooring.core.minibatches import minibatches
from mooring.core.solvers import sgd
from mooring.engines import local_update
from mooring.tasks.compiled_steps import compile_steps
from mooring.tasks.fused import per_client, perceptron_numba
from mooring.tasks.linear import Linear
from mooring.tasks.logistic import Logistic
from mooring.tasks.network import NetworkTask

SIZES = [9, 23, 4, 0, 16]
TURN = Round(2, 5, 5, 5, 1.0, 3)
FEATURES = 6


def double(make):
    return lambda: make().double()


def net():
    layers = (nn.Linear(FEATURES, 5), nn.ReLU(), nn.Linear(5, 4, bias=False), nn.Tanh(), nn.Linear(4, 3))
    return nn.Sequential(*layers)


def plain_net():
    return nn.Sequential(nn.Flatten(), nn.Linear(FEATURES, 4), nn.ReLU(), nn.Linear(4, 1))


def bent_net():
    layers = (nn.Linear(FEATURES, 5), nn.ReLU(), nn.Linear(5, 4, bias=False), nn.Linear(4, 4), nn.ReLU())
    return nn.Sequential(*layers, nn.Linear(4, 3))


def convolutional_net():
    layers = (nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    return nn.Sequential(*layers, nn.Linear(4, 3))


TASKS = {
    "linear": lambda: Linear(FEATURES, ridge=0.1),
    "linear without intercept": lambda: Linear(FEATURES, intercept=False),
    "logistic": lambda: Logistic(FEATURES, ridge=0.1),
    "softmax": lambda: Logistic(FEATURES, classes=3, ridge=0.1),
    "softmax of seven classes": lambda: Logistic(FEATURES, classes=7, ridge=0.1),
    "softmax without intercept": lambda: Logistic(FEATURES, classes=3, intercept=False, ridge=0.0),
    "network": lambda: NetworkTask(double(net), ridge=0.1),
    "network for regression": lambda: NetworkTask(double(plain_net), "half_square"),
    "convolutional network": lambda: NetworkTask(double(convolutional_net), ridge=0.1),
}


def cohort(task, dtype=torch.float64, sizes=SIZES):
    rng = np.random.default_rng(0)
    xs = [torch.tensor(rng.normal(size=(n, FEATURES)), dtype=dtype) for n in sizes]
    kinds = {"linear": None, "logistic": getattr(task, "classes", 2)}
    classes = 3 if getattr(task, "classifies", False) else kinds.get(task.name)
    ys = [torch.tensor(rng.normal(size=n) if classes is None else rng.integers(0, classes, n)) for n in sizes]
    rows = Rows.stack(xs, [y.to(dtype) if classes is None else y for y in ys])
    m = len(sizes)
    return CohortData(np.arange(m, dtype=np.uint64), torch.arange(m), torch.ones(m) / m, rows, rows)


def along_the_gradient(task, w, data, eta, pull, shift, **work):
    """The definition, client by client."""
    v = w.expand(len(data), -1).clone()
    for step in minibatches(task, data, TURN, **work):
        g = task.grad(v, step.batch)
        rate = eta(step.k) if callable(eta) else eta
        rate = torch.as_tensor(rate, dtype=v.dtype).expand(len(v))
        for c in range(len(v)):
            if step.active is None or bool(step.active[c]):
                slope = g[c] if shift is None else g[c] + shift.expand_as(v)[c]
                if pull is not None:
                    slope = slope + broadcast_per_client(pull[0], v).expand_as(v)[c] * (v[c] - pull[1].expand_as(v)[c])
                v[c] = v[c] - rate[c] * slope
    return v


def pulls(d):
    """Nothing; a number; one per client; one per client and coefficient, towards centers of their own; and a shift."""
    rng, m = np.random.default_rng(1), len(SIZES)

    def draw(*shape):
        return torch.tensor(rng.uniform(size=shape))

    return {
        "nothing": (None, None),
        "number": ((0.3, draw(d)), None),
        "per client": ((draw(m), draw(m, d)), None),
        "column": ((draw(m, 1), draw(d)), draw(m, d)),
        "per coefficient": ((draw(m, d), draw(m, d)), draw(d)),
    }


RATES = {
    "number": 0.1,
    "per client": torch.linspace(0.05, 0.2, len(SIZES)),
    "falling": lambda k: 0.1 / (1 + k),
    "falling per client": lambda k: torch.linspace(0.05, 0.2, len(SIZES), dtype=torch.float64) / (1 + k),
}
WORKS = {
    "steps": {"batch": 4, "steps": 7},
    "passes": {"batch": 5, "epochs": 2},
    "all rows": {"batch": 30, "steps": 3},
    "drawn": {"batch": 4, "steps": 3, "draws": "replacement"},
}
PULLS = ("nothing", "number", "per client", "column", "per coefficient")
# A pull acts on a step and work decides which rows a step has: every pull with steps that differ in number between
# clients, and every work with the pull that has all parts.
PULLS_AND_WORKS = [(pull, "passes") for pull in PULLS] + [("column", work) for work in WORKS if work != "passes"]


@pytest.mark.parametrize("pull,work", PULLS_AND_WORKS)
@pytest.mark.parametrize("name", TASKS)
def test_steps_in_place_follow_the_gradient(name, pull, work):
    task = TASKS[name]()
    data = cohort(task)
    w = task.start(0).double() + 0.1
    pulled, shift = pulls(task.dim)[pull]
    for eta in RATES.values():
        found = sgd(task, w, data, TURN, eta, pull=pulled, shift=shift, **WORKS[work])
        expected = along_the_gradient(task, w, data, eta, pulled, shift, **WORKS[work])
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("pull,work", PULLS_AND_WORKS)
@pytest.mark.parametrize("name", ["network", "network for regression"])
def test_networks_client_by_client_follow_the_gradient(name, pull, work, monkeypatch):
    monkeypatch.setattr(per_client, "MIN_PER_CLIENT_BYTES", 0)
    assert TASKS[name]().steps_by_client
    test_steps_in_place_follow_the_gradient(name, pull, work)


def test_a_client_of_a_large_network_does_not_depend_on_its_company(monkeypatch):
    monkeypatch.setattr(per_client, "MIN_PER_CLIENT_BYTES", 0)
    for make in (net, convolutional_net):
        task = NetworkTask(make)
        data, w = cohort(task, torch.float32), task.start(1)
        together = sgd(task, w, data, TURN, 0.1, batch=3, epochs=2, pull=(0.3, w))
        for c in range(len(SIZES)):
            lone = sgd(task, w, data.select(torch.tensor([c])), TURN, 0.1, batch=3, epochs=2, pull=(0.3, w))
            assert torch.equal(lone[0], together[c])


@pytest.mark.parametrize("name", ["softmax", "network", "network for regression", "convolutional network"])
def test_steps_may_be_taken_in_pieces(name, monkeypatch):
    monkeypatch.setattr(per_client, "MIN_PER_CLIENT_BYTES", 0)
    task = TASKS[name]()
    if name == "softmax":
        pytest.importorskip("numba", reason="compiled kernels come with the extra mooring[fast]")
        task = compile_steps(task)
    data, w = cohort(task), task.start(0).double() + 0.1
    starts = w * torch.linspace(0.5, 1.5, len(SIZES), dtype=w.dtype)[:, None]
    for begin in (w, starts):
        whole = sgd(task, begin, data, TURN, 0.1, batch=3, epochs=2, pull=(0.3, w))
        with monkeypatch.context() as patched:
            patched.setattr(solvers, "MAX_DRAWN_ROWS", 40)
            assert torch.equal(sgd(task, begin, data, TURN, 0.1, batch=3, epochs=2, pull=(0.3, w)), whole)
        assert torch.equal(sgd(task, begin, data, TURN, 0.1, batch=3, steps=0), begin.expand(len(SIZES), -1))


def test_only_large_networks_and_convolutions_go_client_by_client():
    small, large = (NetworkTask(lambda width=width: nn.Sequential(nn.Linear(FEATURES, width))) for width in (5, 10_000))
    assert not small.steps_by_client and large.steps_by_client and NetworkTask(convolutional_net).steps_by_client


@pytest.mark.parametrize("pull,work", PULLS_AND_WORKS)
@pytest.mark.parametrize("name", [name for name in TASKS if "network" not in name])
def test_compiled_steps_follow_the_gradient(name, pull, work):
    pytest.importorskip("numba", reason="compiled kernels come with the extra mooring[fast]")
    task = TASKS[name]()
    data = cohort(task)
    w = task.start(0) + 0.1
    pulled, shift = pulls(task.dim)[pull]
    for eta in RATES.values():
        found = sgd(compile_steps(task), w, data, TURN, eta, pull=pulled, shift=shift, **WORKS[work])
        expected = along_the_gradient(task, w, data, eta, pulled, shift, **WORKS[work])
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


def compiled_network(make, monkeypatch, **options):
    pytest.importorskip("numba", reason="compiled kernels come with the extra mooring[fast]")
    monkeypatch.setattr(per_client, "MIN_PER_CLIENT_BYTES", 0)
    task = NetworkTask(make, kernels="numba", **options)
    if perceptron_numba.find_matrix_product(task.dtype) is None:
        pytest.skip("PyTorch brings no products of matrices that can be called here")
    assert task.compiles
    return task


@pytest.mark.parametrize("by_hand", [True, False])
@pytest.mark.parametrize("pull,work", PULLS_AND_WORKS)
@pytest.mark.parametrize("make", [bent_net, lambda: nn.Sequential(nn.Linear(FEATURES, 3))])
def test_compiled_networks_follow_the_gradient(make, pull, work, by_hand, monkeypatch):
    monkeypatch.setattr(perceptron_numba, "is_summed_directly", lambda inputs, outputs: by_hand)
    task = compiled_network(double(make), monkeypatch, ridge=0.1)
    data, w = cohort(task), task.start(0) + 0.1
    pulled, shift = pulls(task.dim)[pull]
    for eta in RATES.values():
        found = sgd(task, w, data, TURN, eta, pull=pulled, shift=shift, **WORKS[work])
        expected = along_the_gradient(task, w, data, eta, pulled, shift, **WORKS[work])
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("batch", [3, 14, 70])
def test_compiled_networks_of_many_outputs_and_rows_follow_the_gradient(batch, monkeypatch):
    """Outputs in several pieces, rows that are no multiple of four, and more rows than are summed by hand."""
    make = double(lambda: nn.Sequential(nn.Linear(FEATURES, 93), nn.ReLU(), nn.Linear(93, 3)))
    task = compiled_network(make, monkeypatch)
    data, w, found = cohort(task, sizes=[70, 140]), task.start(0) + 0.1, []
    expected = along_the_gradient(task, w, data, 0.1, None, None, batch=batch, steps=4)
    for hand in (True, False):
        monkeypatch.setattr(perceptron_numba, "is_summed_directly", lambda inputs, outputs, hand=hand: hand)
        found.append(sgd(task, w, data, TURN, 0.1, batch=batch, steps=4))
        torch.testing.assert_close(found[-1], expected, rtol=1e-11, atol=1e-12)
    assert batch <= perceptron_numba.MAX_DIRECT_ROWS or torch.equal(*found)


def test_networks_of_other_layers_losses_and_sizes_are_not_compiled(monkeypatch):
    assert not NetworkTask(bent_net).compiles  # small ones are worked on as a stack
    monkeypatch.setattr(per_client, "MIN_PER_CLIENT_BYTES", 0)
    assert not NetworkTask(net).compiles and not NetworkTask(convolutional_net).compiles
    assert not NetworkTask(plain_net, "half_square").compiles


@pytest.mark.parametrize("name", ["softmax", "network"])
def test_compiled_steps_are_the_same_bytes_for_any_company_and_threads(name, monkeypatch):
    pytest.importorskip("numba", reason="compiled kernels come with the extra mooring[fast]")
    plain_task = Logistic(FEATURES, classes=3, dtype=torch.float32)
    task = compile_steps(plain_task)
    if name == "network":
        task = compiled_network(double(bent_net), monkeypatch)
        plain_task = copy(task)
        plain_task.kernels = "torch"
    data, w = cohort(task, task.dtype), torch.linspace(-0.5, 0.5, task.dim, dtype=task.dtype)
    before = torch.get_num_threads()
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(sgd(task, w, data, TURN, 0.1, batch=3, epochs=2))
    torch.set_num_threads(before)
    apart = [sgd(task, w, data.select(torch.tensor([c])), TURN, 0.1, batch=3, epochs=2) for c in range(len(SIZES))]
    assert all(torch.equal(found[0], other) for other in (*found[1:], torch.cat(apart)))
    plain = sgd(plain_task, w, data, TURN, 0.1, batch=3, epochs=2)
    torch.testing.assert_close(found[0], plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("task", [compile_steps(Linear(FEATURES)), compile_steps(Logistic(FEATURES, classes=3))])
def test_what_diverges_shows_in_compiled_steps(task):
    pytest.importorskip("numba", reason="compiled kernels come with the extra mooring[fast]")
    start = torch.ones(task.dim, dtype=torch.float64)
    found = sgd(task, start * (1e308 if task.name == "logistic" else 1), cohort(task), TURN, 1e30, batch=4, steps=30)
    assert not bool(torch.isfinite(found[0]).any())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_compiled_steps_know_how_far_apart_scores_are(dtype):
    """One row of ones and a step of size one: what is added to the intercepts are the residuals themselves."""
    pytest.importorskip("numba", reason="compiled kernels come with the extra mooring[fast]")
    task = compile_steps(Logistic(1, classes=40, ridge=0.0, dtype=dtype))
    scores = torch.linspace(0, 200, 40, dtype=torch.float64).flip(0).to(dtype)
    start = torch.cat([torch.zeros(40, dtype=dtype), scores])
    one = torch.ones(1)
    rows = Rows(one[:, None].to(dtype), torch.tensor([1]), torch.tensor([0]), torch.tensor([1]))
    data = CohortData(np.zeros(1, np.uint64), torch.tensor([0]), one, rows, rows)
    found = sgd(task, start, data, TURN, 1.0, batch=1, steps=1)[0, :40]
    expected = torch.softmax(scores.double(), 0) - nn.functional.one_hot(torch.tensor(1), 40)
    torch.testing.assert_close(-found.double(), expected, rtol=10 * torch.finfo(dtype).eps, atol=1e-30)


@pytest.mark.parametrize("kernels", ["torch", "numba"])
def test_steps_in_place_are_counted_and_spare_their_input(kernels):
    if kernels == "numba":
        pytest.importorskip("numba", reason="compiled kernels come with the extra mooring[fast]")
    task, meter, naive = Logistic(FEATURES), CostMeter(), CostMeter()
    task = compile_steps(task) if kernels == "numba" else task
    data, w = cohort(task), torch.zeros(FEATURES + 1, dtype=torch.float64)
    sgd(MeteredTask(task, meter), w, data, TURN, 0.1, batch=4, epochs=1)
    along_the_gradient(MeteredTask(task, naive), w, data, 0.1, None, None, batch=4, epochs=1)
    assert (meter.samples, meter.gradients) == (naive.samples, naive.gradients) == (sum(SIZES), sum(SIZES))
    assert not w.any()


MIXTURES = {
    "fixed": {"adapt": "no", "batch": 4, "steps": 5},
    "once a round": {"adapt": "round", "adapt_on": "train", "batch": 4, "steps": 5},
    "every step": {"adapt": "step", "adapt_on": "train", "alpha_pull": 0.2, "batch": 5, "epochs": 2},
    "by parts": {"adapt": "step", "adapt_on": "train", "alpha_pull": 0.2, "alpha_by": "parts", "batch": 4, "steps": 5},
    "on held-out rows": {"adapt": "step", "adapt_on": "validation", "batch": 4, "epochs": 2, "output": "own"},
    "once on held-out rows": {"adapt": "round", "adapt_on": "validation", "alpha_pull": 0.1, "batch": 4, "steps": 3},
    "each its own": {"alpha": (0.1, 0.9, 0.5, 0.3, 1.0), "adapt": "step", "adapt_on": "validation", "steps": 3},
}


def visited(algorithm, task, data, turns=3):
    """The server's and the clients' state after some stays, and what they cost."""
    meter = CostMeter()
    server, first = local_update.first_states(algorithm, task, task.start(0).double() + 0.1)
    client = type(first)(*(part.expand(len(data), *part.shape).clone() for part in first))
    for t in range(1, turns + 1):
        turn = TURN._replace(t=t)
        client, message = local_update.client_update(algorithm, MeteredTask(task, meter), server, client, data, turn)
        server = algorithm.server_update(server, message._replace(change=message.change.mean(0)), turn)
    return server, client, (meter.samples, meter.gradients)


@pytest.mark.parametrize("by_hand", [True, False])
@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("make", [bent_net, lambda: nn.Sequential(nn.Linear(FEATURES, 3))])
def test_compiled_mixtures_follow_their_gradients(make, mixture, by_hand, monkeypatch):
    monkeypatch.setattr(perceptron_numba, "is_summed_directly", lambda inputs, outputs: by_hand)
    with monkeypatch.context() as large:
        compiled_network(double(make), large)  # or this is skipped
    test_mixtures_client_by_client_follow_their_gradients(make, mixture, monkeypatch, "numba")


@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("make", [net, plain_net, lambda: nn.Sequential(nn.Linear(FEATURES, 3))])
def test_mixtures_client_by_client_follow_their_gradients(make, mixture, monkeypatch, kernels="torch"):
    loss = "half_square" if make is plain_net else "cross_entropy"
    task = NetworkTask(double(make), loss, kernels=kernels)
    data = cohort(task)
    some = torch.tensor([5, 0, 4, 3, 1])  # of the clients' rows are held out; one has none, and one no others
    data = replace(data, validation=replace(data.train, size=some))
    algorithm = APFL(**({"alpha": 0.3, "eta": 0.2, "decay": 0.1, "batch": 4} | MIXTURES[mixture]))
    stacked = visited(algorithm, task, data)
    monkeypatch.setattr(per_client, "MIN_PER_CLIENT_BYTES", 0)
    task = NetworkTask(double(make), loss, kernels=kernels)
    assert task.mixture_steps(data.train) is not None
    for most in (1 << 22, 40):
        monkeypatch.setattr(solvers, "MAX_DRAWN_ROWS", most)
        quick = visited(algorithm, task, data)
        for found, expected in zip((*quick[0], *quick[1]), (*stacked[0], *stacked[1])):
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11)
        assert quick[2] == stacked[2]
