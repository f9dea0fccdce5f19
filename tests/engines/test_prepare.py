"""From a run file to a job: what is refused by name, how data are dealt, and which task comes out."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from mooring.core.errors import RequestError
from mooring.engines.prepare import (
    check_unused_options,
    data_seed,
    load_options,
    make_task,
    model_factory,
    partition_options,
    prepare,
)
from mooring.runs.runfile import make_run
from mooring.tasks.linear import Linear
from mooring.tasks.linear_losses import Quantile
from mooring.tasks.logistic import Logistic
from mooring.tasks.network_losses import LOSSES
from tests.support.problems import linear_clients, logistic_clients

BINARY = replace(logistic_clients(), classes=("no", "yes"))


def asked(source="heart", task=None, training=None, **data):
    sections = {"data": {"source": source, **data}, "task": task or {}, "training": training or {}}
    return make_run({"mooring": {"purpose": "advise"}, **sections}, "here")


@pytest.mark.parametrize(
    ("source", "options", "sentence"),
    [
        (
            "heart",
            {"partition": {"clients": 5}},
            r"partition \(--partition\) does not apply: that is for pooled data sets",
        ),
        ("digits", {"target": "y"}, r"target \(--target\) does not apply: data set 'digits' is no table"),
        ("digits", {"split": "part"}, r"split \(--split\) does not apply: data set 'digits' is no table"),
    ],
)
def test_options_without_a_use_are_refused_by_name(source, options, sentence):
    with pytest.raises(RequestError, match=sentence):
        check_unused_options(asked(source, **options))


def test_clients_in_memory_take_no_options_of_tables():
    with pytest.raises(RequestError, match="the clients' data are given as they are to be used"):
        check_unused_options(asked(target="y"), linear_clients())
    check_unused_options(asked("digits", split=[0.5, 0.25, 0.25], partition={"clients": 4}))


def test_one_client_is_no_federation():
    with pytest.raises(RequestError, match="there is one client only, '0'; a federation needs two or more"):
        prepare(asked(), linear_clients(m=1, sizes=[9]))


def test_seeds_of_the_data_and_of_the_training_part_where_asked():
    assert data_seed(asked(training={"seed": 4})) == 4
    assert data_seed(asked(training={"seed": 4}, split_seed=9)) == 9
    assert load_options(asked(training={"seed": 4, "weights": "beds"}))["weights"] == "beds"
    assert "weights" not in load_options(asked(training={"weights": "uniform"}))


def test_dealing_takes_the_runs_shares_unless_it_has_its_own():
    assert partition_options(asked("digits", training={"seed": 2})) == {"seed": 2, "validation": 0.2}
    shares = partition_options(asked("digits", split=[0.5, 0.3, 0.2]))
    assert (shares["validation"], shares["test"]) == (0.3, 0.2)
    assert partition_options(asked("digits", partition={"seed": 3, "clients": 4}, training={"seed": 2}))["seed"] == 3
    with pytest.raises(RequestError, match="test is given twice: by --split and by --partition"):
        partition_options(asked("digits", split=[0.5, 0.3, 0.2], partition={"test": 0.1}))
    with pytest.raises(RequestError, match="--partition of digits"):
        partition_options(asked("digits", partition={"client": 4}))


def test_tasks_follow_the_target_or_the_name():
    assert make_task(asked(), linear_clients()) == Linear(3)
    assert isinstance(make_task(asked(), BINARY), Logistic)
    chosen = make_task(asked(task={"name": "quantile", "tau": 0.9}), linear_clients())
    assert isinstance(chosen, Quantile) and chosen.tau == 0.9
    with pytest.raises(RequestError, match="task 'module' needs a model"):
        make_task(asked(task={"name": "module"}), linear_clients())
    with pytest.raises(RequestError, match="is for a network, given as a model"):
        make_task(asked(task={"loss": "cross_entropy"}), linear_clients())
    with pytest.raises(RequestError, match="a model is a task of its own; leave out task 'quantile'"):
        make_task(asked(task={"name": "quantile"}), linear_clients(), nn.Linear(3, 1))
    with pytest.raises(RequestError, match="device 'cuda' is for networks"):
        make_task(asked(training={"device": "cuda"}), linear_clients())


@pytest.mark.parametrize(
    ("task", "given", "kind"),
    [("poisson", {}, "count"), ("absolute", {}, "regression"), ("auto", {}, None), ("logistic", {}, None),
     ("poisson", {"target_type": "regression"}, "regression")],
)  # fmt: skip
def test_a_task_for_one_kind_of_target_decides_how_it_is_read(task, given, kind):
    assert load_options(asked(task={"name": task}, **given)).get("target_type") == kind


def test_networks_get_the_loss_of_their_target():
    def net(features, classes):
        return nn.Linear(features, max(classes, 1))

    assert make_task(asked(), linear_clients(), nn.Linear(3, 1)).row_loss is LOSSES["half_square"]
    assert make_task(asked(), BINARY, net).row_loss is LOSSES["cross_entropy"]
    assert make_task(asked(), BINARY, nn.Linear(3, 1)).row_loss is LOSSES["binary_cross_entropy"]


def test_a_module_is_copied_with_its_weights_and_a_function_gets_the_sizes():
    given = nn.Linear(3, 2)
    twin = model_factory(given, BINARY)()
    assert twin is not given and torch.equal(twin.weight, given.weight)
    made = model_factory(lambda features, classes: nn.Linear(features, classes), BINARY)()
    assert (made.in_features, made.out_features) == (3, 2)
    with pytest.raises(RequestError, match=r"a model is a torch.nn.Module or a function that makes one, got int"):
        model_factory(3, BINARY)
