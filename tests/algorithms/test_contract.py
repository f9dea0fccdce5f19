"""Table 1, contract: every algorithm runs, keeps shapes, leaves its inputs alone, and does not depend on chunking."""

import dataclasses

import pytest
import torch

from mooring.algorithms.base import GROUPS, algorithm_names, build, describe, names_by_group
from mooring.core.cohort import Round, weighted_mean
from tests.algorithms.cases import CASES
from tests.support.accuracy import EPS, assert_equal_up_to_rounding
from tests.support.problems import PROBLEMS, settled_simulator, simulate

ROWS = [(name, fields, problem) for name, fields, problems in CASES for problem in problems]
IDS = [f"{name}-{problem}-{i}" for i, (name, _, problem) in enumerate(ROWS)]


def leaves(tree):
    if tree is None:
        return []
    return [tree] if isinstance(tree, torch.Tensor) else [leaf for part in tree for leaf in leaves(part)]


def visit(name, fields, problem, position=None):
    """One visit to the clients at `position`, with everything that went in and came out."""
    task, clients = PROBLEMS[problem]()
    algorithm, exchange, server = settled_simulator(build(name, fields), task, clients)
    position = torch.arange(len(clients)) if position is None else position
    data = exchange.data.select(position)
    client = exchange.states.take(position)
    turn = Round(1, 3, len(clients), len(clients), 1.0, 0)  # everyone's round, whoever of it is visited here
    return algorithm, server, client, data, turn, algorithm.client_update(server, client, task, data, turn), task


def test_every_algorithm_has_a_row():
    assert {name for name, _, _ in CASES} == set(algorithm_names())


def test_the_list_goes_by_group():
    listed = names_by_group()
    assert sorted(listed) == sorted(algorithm_names())
    places = [GROUPS.index(describe(name)["group"]) for name in listed]
    assert places == sorted(places) and listed[0] == "fedavg" and listed[-1] == "pooled"


@pytest.mark.parametrize("name", algorithm_names())
def test_describes_itself(name):
    told = describe(name)
    assert told["summary"] and told["paper"] and told["reveals"] and told["limits"]
    assert len(told["summary"]) < 120


@pytest.mark.parametrize("name,fields,problem", ROWS, ids=IDS)
def test_keeps_shapes_and_dtypes(name, fields, problem):
    algorithm, server, client, data, turn, (after, message), task = visit(name, fields, problem)
    for old, new in zip(leaves(client), leaves(after)):
        assert new.shape == old.shape and new.dtype == old.dtype
    for part in leaves(message):
        assert len(part) == len(data)
    merged = algorithm.server_update(server, weighted_mean(message, data.p), turn)
    for old, new in zip(leaves(server), leaves(merged)):
        assert new.shape == old.shape and new.dtype == old.dtype
    final = algorithm.finetune(merged, after, task, data, turn)
    assert algorithm.personal_model(merged, final).shape[-1] == task.dim
    assert algorithm.personal_model(merged, final).dtype == task.dtype


@pytest.mark.parametrize("name,fields,problem", ROWS, ids=IDS)
def test_does_not_change_its_inputs(name, fields, problem):
    task, clients = PROBLEMS[problem]()
    algorithm, exchange, server = settled_simulator(build(name, fields), task, clients)
    everyone = torch.arange(len(clients))
    client = exchange.states.take(everyone)
    before = [leaf.clone() for leaf in leaves((server, client, exchange.data.train.x, exchange.data.train.y))]
    turn = Round(1, 3, len(clients), len(clients), 1.0, 0)
    algorithm.client_update(server, client, task, exchange.data, turn)
    algorithm.finetune(server, client, task, exchange.data, turn)
    for old, new in zip(before, leaves((server, client, exchange.data.train.x, exchange.data.train.y))):
        assert torch.equal(old, new)


@pytest.mark.parametrize("name,fields,problem", ROWS, ids=IDS)
def test_a_cohort_equals_cohorts_of_one(name, fields, problem):
    """A local update does not depend on the cohort, up to rounding as the problem's conditioning magnifies it.

    Tried at the clients with the fewest and the most rows, and one between: padding differs most there.
    """
    algorithm, *_, (after, message), task = visit(name, fields, problem)
    if algorithm.pooled:
        pytest.skip("a pooled baseline has the rows of all clients at once")
    clients = PROBLEMS[problem]()[1]
    for i in (0, 2, 4):
        *_, (lone_after, lone_message), _ = visit(name, fields, problem, torch.tensor([i]))
        for many, one in zip(leaves((after, message)), leaves((lone_after, lone_message))):
            # A product with the Hessian by a difference of gradients divides their rounding by its step.
            magnified = EPS**-0.25 if name == "per_fedavg" else 1.0
            assert_equal_up_to_rounding(many[i], one[0], task, clients, magnified)


@pytest.mark.parametrize("name,fields,problem", ROWS, ids=IDS)
def test_settled_fields_are_numbers(name, fields, problem):
    algorithm, *_ = visit(name, fields, problem)
    for field in dataclasses.fields(algorithm):
        assert getattr(algorithm, field.name) not in ("auto", "theory"), field.name


@pytest.mark.parametrize("name,fields,problem", ROWS, ids=IDS)
def test_training_does_not_hurt(name, fields, problem):
    """Twelve rounds end at a lower training loss of the deployed models than the start's."""
    task, clients = PROBLEMS[problem]()
    _, models, exchange = simulate(build(name, fields), task, clients, rounds=12)
    rows = clients.train.full(task)
    start = task.loss(task.start()[None].expand(len(clients), -1), rows)
    assert float((exchange.data.p * task.loss(models, rows)).sum()) < float((exchange.data.p * start).sum())


@pytest.mark.parametrize("name,fields,problem", ROWS, ids=IDS)
def test_absent_clients_are_untouched(name, fields, problem):
    """Equivalence 17: who does not take part keeps its state bit for bit."""
    algorithm = build(name, fields)
    if algorithm.full_participation:
        pytest.skip("needs everyone")
    task, clients = PROBLEMS[problem]()
    algorithm, exchange, server = settled_simulator(algorithm, task, clients)
    cohort = torch.tensor([0, 3])
    exchange.ask(server, cohort, Round(1, 3, 5, 2, float(exchange.data.p[cohort].sum()), 0))
    before = exchange.states.take(torch.arange(5))
    exchange.accept(cohort, Round(1, 3, 5, 2, 0.5, 0))
    for old, new in zip(leaves(before), leaves(exchange.states.take(torch.arange(5)))):
        assert torch.equal(old[[1, 2, 4]], new[[1, 2, 4]])
