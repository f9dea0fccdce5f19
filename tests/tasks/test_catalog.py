"""Tasks by name: all are found, built for the right targets, and refused in one sentence otherwise."""

import pytest
import torch

from mooring.core.errors import RequestError
from mooring.tasks import catalog

NAMES = {
    "absolute",
    "hinge",
    "linear",
    "logistic",
    "module",
    "poisson",
    "quantile",
    "sigmoid",
    "squared_hinge",
}


def test_all_tasks_are_found():
    assert set(catalog.names()) >= NAMES


@pytest.mark.parametrize("name", sorted(NAMES))
def test_describes_itself(name):
    told = catalog.describe(name)
    assert told["summary"] and told["targets"] and "ridge" in told["fields"] and "dtype" not in told["fields"]
    assert told["exact"] == (name not in ("module", "sigmoid"))
    assert told["smooth"] == (name not in ("absolute", "hinge", "quantile"))


@pytest.mark.parametrize("kind, name", [("regression", "linear"), ("binary", "logistic"), ("count", "poisson")])
def test_auto_picks_the_usual_task(kind, name):
    task = catalog.build("auto", kind, 4, 2)
    assert (task.name, task.dim) == (name, 5)


def test_fields_reach_the_task():
    task = catalog.build("quantile", "regression", 2, 0, {"tau": 0.9, "ridge": 1, "intercept": False})
    assert (task.tau, task.ridge, task.dim, task.box) == (0.9, 1, 2, (pytest.approx(-0.1), 0.9))
    assert catalog.build("auto", "classes", 2, 5).dim == 15
    net = catalog.build("module", "binary", 2, 2, {"make": lambda: torch.nn.Linear(2, 2)})
    assert net.dim == 6


@pytest.mark.parametrize(
    "name, kind, fields, sentence",
    [
        ("poison", "count", {}, "unknown task 'poison' (did you mean 'poisson'?); known: auto, absolute, hinge, "),
        (
            "hinge",
            "regression",
            {},
            "task 'hinge' fits a target that is binary, but this one is regression; use --task l",
        ),
        (
            "linear",
            "binary",
            {},
            "task 'linear' fits a target that is regression, but this one is binary; use --task log",
        ),
        (
            "hinge",
            "binary",
            {"rigde": 1},
            "task 'hinge': unknown hyperparameter 'rigde' (did you mean 'ridge'?); known: intercept,",
        ),
        ("linear", "regression", {"ridge": -1}, "task 'linear': ridge must be >= 0, got -1."),
        ("linear", "regression", {"ridge": "x"}, "task 'linear': ridge must be a number, got 'x'."),
        ("module", "binary", {}, "task 'module' needs a model; give one as model = "),
    ],
)
def test_wrong_requests_are_one_sentence(name, kind, fields, sentence):
    with pytest.raises(RequestError) as error:
        catalog.build(name, kind, 3, 2, fields)
    assert str(error.value).startswith(sentence)
