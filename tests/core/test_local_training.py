"""What clients keep of their optimizers: by the order of models, and refused where their number is another one."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from mooring.algorithms.base import NoState
from mooring.algorithms.fedavg import FedAvg
from mooring.core.cohort import Round
from mooring.core.errors import RequestError
from mooring.engines.local_update import client_update, initial_states
from tests.support.problems import PROBLEMS, settled_simulator, simulate

KEPT = {"eta": 0.05, "batch": 4, "steps": 3, "optimizer": "adam", "optimizer_state": "keep"}
PLAIN = {"eta": 0.05, "batch": 4, "steps": 3}


@dataclass(frozen=True)
class TrainsTwo(FedAvg):
    """Trains a second model, by steps of its own, of which it sends nothing."""

    trained_models: ClassVar[int] = 2

    def client_update(self, server, client, local):
        w = local.train(server.w)
        v = local.expand(server.w)
        for step in local.steps():
            v = step.move(v, step.grad(v))
        return client, w - server.w


@dataclass(frozen=True)
class TrainsTooMany(TrainsTwo):
    trained_models: ClassVar[int] = 1


@dataclass(frozen=True)
class TrainsTooFew(FedAvg):
    trained_models: ClassVar[int] = 2


@pytest.mark.parametrize("fields", [PLAIN, KEPT], ids=["plain", "kept"])
@pytest.mark.parametrize(
    "kind,sentence",
    [
        (TrainsTooMany, "TrainsTooMany: client_update must train 1 model in every round, .* but trains more."),
        (TrainsTooFew, "TrainsTooFew: client_update must train 2 models in every round, .* but trains 1."),
    ],
)
def test_another_number_of_models_is_refused(kind, sentence, fields):
    with pytest.raises(RequestError, match=sentence):
        simulate(kind(**fields), *PROBLEMS["linear"]())


@pytest.mark.parametrize("fields", [PLAIN, KEPT], ids=["plain", "kept"])
def test_a_second_model_leaves_the_first_ones_optimizer_alone(fields):
    server, _, _ = simulate(TrainsTwo(**fields), *PROBLEMS["linear"]())
    expected, _, _ = simulate(FedAvg(**fields), *PROBLEMS["linear"]())
    assert torch.equal(server.w, expected.w)


def test_both_optimizers_are_kept_and_equal_for_equal_models():
    """`train` and steps of one's own take the same steps, so both states are the same, and count six steps."""
    task, clients = PROBLEMS["linear"]()
    algorithm, exchange, server = settled_simulator(TrainsTwo(**KEPT), task, clients)
    states = initial_states(algorithm, task, server.w, len(clients))
    for t in (1, 2):
        states, _ = client_update(algorithm, task, server, states, exchange.data, Round(t, 2, 5, 5, 1.0, 0))
    rounds, first, second = states.memory[:, :1], *states.memory[:, 1:].tensor_split(2, dim=1)
    assert rounds.flatten().tolist() == [2.0] * 5 and first[:, 0].tolist() == [6.0] * 5
    torch.testing.assert_close(first, second, rtol=1e-12, atol=1e-12)


def test_a_step_leaves_its_arguments_alone():
    task, clients = PROBLEMS["linear"]()

    @dataclass(frozen=True)
    class Watched(FedAvg):
        def client_update(self, server, client, local):
            w = local.expand(server.w)
            for step in local.steps():
                g = step.grad(w)
                before = w.clone(), g.clone()
                moved = step.move(w, g)
                assert torch.equal(w, before[0]) and torch.equal(g, before[1]) and not torch.equal(moved, w)
                w = moved
            return client, w - server.w

    for optimizer in ("sgd", "adam"):
        simulate(Watched(**PLAIN | {"optimizer": optimizer, "epochs": 2}), task, clients, rounds=2)


def test_a_field_of_the_engine_is_not_the_algorithms():
    task, clients = PROBLEMS["linear"]()

    class Taken(NoState):
        _fields = ("memory",)

    @dataclass(frozen=True)
    class Named(FedAvg):
        def init(self, task, w0):
            return self.init_server(w0), Taken()

    with pytest.raises(RequestError, match="a client's state has a field 'memory', which the engine adds itself"):
        simulate(Named(**PLAIN), task, clients)
