"""Table 1, contract: every algorithm runs, keeps shapes, leaves its inputs alone, and does not depend on chunking."""

import dataclasses
import functools
from typing import NamedTuple

import pytest
import torch

from mooring.algorithms.base import GROUPS, Algorithm, algorithm_names, build, describe, names_by_group
from mooring.core.cohort import CohortData, Round, StateTree, select, weighted_mean
from mooring.core.task import Task
from mooring.engines import local_update
from tests.algorithms.cases import CASES
from tests.support.accuracy import EPS, assert_equal_up_to_rounding, condition
from tests.support.problems import PROBLEMS, settled_simulator, simulate

ROWS = [(name, fields, problem) for name, fields, problems in CASES for problem in problems]
IDS = [f"{name}-{problem}-{i}" for i, (name, _, problem) in enumerate(ROWS)]


def leaves(tree):
    if tree is None:
        return []
    return [tree] if isinstance(tree, torch.Tensor) else [leaf for part in tree for leaf in leaves(part)]


class Update(NamedTuple):
    """One local update, with everything that went in and came out."""

    algorithm: Algorithm
    task: Task
    server: StateTree
    client: StateTree
    data: CohortData
    round: Round
    after: StateTree
    message: StateTree
    inputs: list[torch.Tensor]  # copies of what went in


@functools.cache
def update_all(row):
    """The update of all clients of a row of the table, computed once for the tests that only look at it."""
    name, fields, problem = ROWS[row]
    task, clients = PROBLEMS[problem]()
    algorithm, exchange, server = settled_simulator(build(name, fields), task, clients)
    everyone = torch.arange(len(clients))
    data, client = exchange.data.select(everyone), exchange.states.take(everyone)
    inputs = [leaf.clone() for leaf in leaves((server, client, data.train.x, data.train.y))]
    turn = Round(1, 3, len(clients), len(clients), 1.0, 0)
    after, message = local_update.client_update(algorithm, task, server, client, data, turn)
    return Update(algorithm, task, server, client, data, turn, after, message, inputs)


@functools.cache
def condition_of(problem):
    return condition(*PROBLEMS[problem]())


def test_every_algorithm_has_a_row():
    assert {name for name, _, _ in CASES} == set(algorithm_names())


def test_the_list_goes_by_group():
    listed = names_by_group()
    assert sorted(listed) == sorted(algorithm_names())
    places = [GROUPS.index(describe(name)["group"]) for name in listed]
    assert places == sorted(places) and listed[0] == "fedavg" and listed[-1] == "pooled"


@pytest.mark.parametrize("name", algorithm_names())
def test_describes_itself(name):
    description = describe(name)
    assert description["summary"] and description["paper"] and description["reveals"] and description["limits"]
    assert len(description["summary"]) < 120


@pytest.mark.parametrize("row", range(len(ROWS)), ids=IDS)
def test_keeps_shapes_and_dtypes(row):
    algorithm, task, server, client, data, turn, after, message, _ = update_all(row)
    for old, new in zip(leaves(client), leaves(after)):
        assert new.shape == old.shape and new.dtype == old.dtype
    for part in leaves(message):
        assert len(part) == len(data)
    merged = algorithm.server_update(server, weighted_mean(message, data.p), turn)
    for old, new in zip(leaves(server), leaves(merged)):
        assert new.shape == old.shape and new.dtype == old.dtype
    final = local_update.finetune(algorithm, task, merged, after, data, turn)
    assert algorithm.personal_model(merged, final).shape[-1] == algorithm.deployed_task(task).dim
    assert algorithm.personal_model(merged, final).dtype == task.dtype


@pytest.mark.parametrize("row", range(len(ROWS)), ids=IDS)
def test_does_not_change_its_inputs(row):
    algorithm, task, server, client, data, turn, *_, inputs = update_all(row)
    local_update.finetune(algorithm, task, server, client, data, turn)
    for old, new in zip(inputs, leaves((server, client, data.train.x, data.train.y)), strict=True):
        assert torch.equal(old, new)


@pytest.mark.parametrize("row", range(len(ROWS)), ids=IDS)
def test_a_cohort_equals_cohorts_of_one(row):
    """A local update does not depend on the cohort, up to rounding as the problem's conditioning magnifies it.

    Tried at the clients with the fewest and the most rows, and one between: padding differs most there.
    """
    name, _, problem = ROWS[row]
    algorithm, task, server, client, data, turn, *results, _ = update_all(row)
    if algorithm.pooled:
        pytest.skip("a pooled baseline has the rows of all clients at once")
    # A product with the Hessian by a difference of gradients divides their rounding by its step.
    magnified = EPS**-0.25 if name == "per_fedavg" else 1.0
    for i in (0, 2, 4):
        place = torch.tensor([i])
        alone = local_update.client_update(algorithm, task, server, select(client, place), data.select(place), turn)
        for in_cohort, by_itself in zip(leaves(results), leaves(alone), strict=True):
            assert_equal_up_to_rounding(in_cohort[i], by_itself[0], condition_of(problem), magnified)


@pytest.mark.parametrize("row", range(len(ROWS)), ids=IDS)
def test_resolved_fields_are_numbers(row):
    algorithm = update_all(row).algorithm
    for field in dataclasses.fields(algorithm):
        assert getattr(algorithm, field.name) not in ("auto", "theory"), field.name


@pytest.mark.parametrize("name,fields,problem", ROWS, ids=IDS)
def test_training_does_not_hurt(name, fields, problem):
    """Twelve rounds end at a lower training loss of the deployed models than the start's."""
    task, clients = PROBLEMS[problem]()
    _, models, exchange = simulate(build(name, fields), task, clients, rounds=12)
    start = task.loss(task.start()[None].expand(len(clients), -1), clients.train.full(task))
    deployed = exchange.deployed_task
    end = deployed.loss(models, clients.train.full(deployed))
    assert float((exchange.data.p * end).sum()) < float((exchange.data.p * start).sum())


@pytest.mark.parametrize("name,fields,problems", CASES, ids=[f"{name}-{i}" for i, (name, *_) in enumerate(CASES)])
def test_absent_clients_are_untouched(name, fields, problems):
    """Equivalence 17: a client that does not take part keeps its state bit for bit, whatever the loss."""
    algorithm = build(name, fields)
    if algorithm.full_participation:
        pytest.skip("needs everyone")
    task, clients = PROBLEMS[problems[0]]()
    algorithm, exchange, server = settled_simulator(algorithm, task, clients)
    cohort = torch.tensor([0, 3])
    exchange.ask(server, cohort, Round(1, 3, 5, 2, float(exchange.data.p[cohort].sum()), 0))
    before = exchange.states.take(torch.arange(5))
    exchange.accept(cohort, Round(1, 3, 5, 2, 0.5, 0))
    for old, new in zip(leaves(before), leaves(exchange.states.take(torch.arange(5)))):
        assert torch.equal(old[[1, 2, 4]], new[[1, 2, 4]])
