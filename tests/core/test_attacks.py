"""Attacks do what they say, and only to those who lie; robust averages withstand them."""

from typing import NamedTuple

import numpy as np
import pytest
import torch

from mooring.algorithms.base import build
from mooring.core.attacks import ATTACKS, apply_attack, flip_labels, malicious_clients, parse_attack
from mooring.core.errors import RequestError
from mooring.engines.loop import full_round, mean_over_rows, resolve, run
from mooring.engines.simulator import Simulator
from mooring.engines.training_state import TrainingPlan, TrainingState
from mooring.tasks.linear import Linear
from tests.algorithms.cases import CASES
from tests.support.problems import linear_clients, logistic_clients


class Message(NamedTuple):
    change: torch.Tensor
    path: torch.Tensor | None


KEYS = np.arange(100, 120).astype(np.uint64)


def sent(spec, t=1, parts=False):
    x = torch.randn(20, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    message = Message(x[:, :2], x[:, 2:]) if parts else x
    found = apply_attack(message, torch.arange(20), spec, 0, KEYS, t)
    return (
        x,
        torch.cat([found.change, found.path], 1) if parts else found,
        torch.from_numpy(malicious_clients(spec, 0, KEYS)),
    )


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.parametrize("parts", [False, True])
def test_only_liars_lie(name, parts):
    true, told, lying = sent(f"{name}:0.2", parts=parts)
    assert int(lying.sum()) == 4 and torch.equal(told[~lying], true[~lying])
    assert (name == "label-flip") == torch.equal(told[lying], true[lying])
    mine = {
        "sign-flip": lambda: torch.equal(told[lying], -true[lying]),
        "scale": lambda: torch.equal(told[lying], 100 * true[lying]),
        "nan": lambda: bool(told[lying].isnan().all()),
        "huge": lambda: bool((told[lying] == 1e30).all()),
        "noise": lambda: not torch.equal(told[lying], sent("noise:0.2", t=2)[1][lying]),
        "little": lambda: bool((told[lying] < true[~lying].mean(0)).all()) and bool((told[lying] > true.amin(0)).all()),
        "label-flip": lambda: True,
    }
    assert mine[name]()
    assert torch.equal(sent(f"{name}:0")[1], true)


def test_labels_are_flipped_at_malicious_clients_only():
    clients = logistic_clients(m=3, classes=3)
    rows = flip_labels(clients.train, np.array([False, True, False]), 3)
    assert torch.equal(rows.of(1)[1], 2 - clients.train.of(1)[1])
    assert torch.equal(rows.of(2)[1], clients.train.of(2)[1]) and torch.equal(rows.x, clients.train.x)
    numbers = linear_clients(m=2)
    assert torch.equal(flip_labels(numbers.train, np.array([True, False])).of(0)[1], -numbers.train.of(0)[1])


@pytest.mark.parametrize("spec", ["sign-flip", "sign-flip:2", "poison:0.1", "nan:x"])
def test_what_is_no_attack_is_refused(spec):
    with pytest.raises(ValueError):
        parse_attack(spec)


def trained(name, fields, **plan):
    clients = linear_clients(m=20, sizes=[30] * 20, spread=0.3)
    task = Linear(3, ridge=0.01)
    plan = TrainingPlan(**{"rounds": 15} | plan)
    exchange = Simulator(task, clients, clients.weights())
    ready, server = resolve(build(name, fields), task, exchange)
    outcome = run(ready, exchange, plan, TrainingState(server))
    lying = torch.from_numpy(malicious_clients(plan.attack or "nan:0.2", plan.seed, clients.keys))
    scores = exchange.evaluate(outcome.state.server, full_round(15, 15, exchange.roster, plan), ("test",))["test"]
    return mean_over_rows(scores._replace(rows=torch.where(lying, 0, scores.rows))), outcome


@pytest.mark.parametrize("spec", ["median", "trimmed", "geometric"])
@pytest.mark.parametrize("attack", ["sign-flip", "scale", "noise", "little", "huge"])
@pytest.mark.parametrize("name", ["ditto", "fedprox_personal"])
def test_honest_clients_personal_models_lose_at_most_two_points(name, attack, spec):
    """A fifth lies. Of what the honest clients' models explain of their targets they lose two points in a hundred."""
    fair, _ = trained(name, {})
    robust, _ = trained(name, {}, attack=f"{attack}:0.2", average=spec)
    clients = linear_clients(m=20, sizes=[30] * 20, spread=0.3)
    assert robust - fair <= 0.02 * float(clients.test.y.var())


def test_the_plain_mean_is_spoilt():
    fair, _ = trained("fedavg", {})
    plain, _ = trained("fedavg", {"eta": 0.05}, attack="scale:0.2", rounds=2)
    assert plain > 2 * fair


# fedbn needs a model with normalization layers
ADDITIVE = sorted({name for name, *_ in CASES if build(name, {}).additive and name not in ("local", "fedbn")})


@pytest.mark.parametrize("name", ADDITIVE)
@pytest.mark.parametrize("spec", ["median", "trimmed", "clipped", "geometric", "krum"])
def test_every_algorithm_whose_messages_are_changes_takes_them(name, spec):
    """Without liars the personal or common models stay finite and useful: no worse than saying nothing."""
    # a training row is its own neighbor: only with a fixed weight of the neighbors do losses before and after compare
    loss, outcome = trained(name, {"alpha": 0.5} if name == "knn_per" else {}, average=spec, rounds=6)
    assert np.isfinite(loss) and outcome.last.train_loss < outcome.state.first_loss


@pytest.mark.parametrize("name,how", [("kernel_fedavg", {"average": "median"}), ("pooled", {"clip": 1.0})])
def test_other_messages_are_refused(name, how):
    with pytest.raises(RequestError, match=f"does not apply: the messages of {name} are no changes"):
        trained(name, {}, **how)


def test_a_stiffness_that_travels_is_refused():
    with pytest.raises(RequestError, match="does not apply"):
        trained("fedprox_personal", {"lam": [0.1] * 20}, average="median")
