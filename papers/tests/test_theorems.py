"""Theorems by name: all are listed, any can be evaluated, wrong requests get one sentence."""

import inspect
import json
from pathlib import Path

import numpy as np
import pytest

from mooring.cli import main
from mooring.core.errors import RequestError
from mooring.theory.kernel_operator import LocalUpdate
from mooring.theory.lambda_aer import lambda_aer
from mooring.theory.upper_bounds import local_aer
from mooring_papers.theory import catalog


def test_every_file_is_a_theorem_with_a_line_and_statements():
    known = catalog.theorems()
    assert {"alternative", "apfl_bounds", "diversity", "kernel_bounds", "stability", "logistic_constants"} <= set(known)
    for name, says in known.items():
        assert says.endswith(".") and catalog.statements(name), name
        for part in catalog.describe(name):
            assert part["says"], part["name"]


def test_every_theorem_of_the_papers_has_a_file_of_tests():
    package = Path(catalog.__file__).parent
    names = {file.stem for file in package.glob("*.py")} - {"__init__", "catalog"}
    assert names and names <= {file.stem.removeprefix("test_") for file in Path(__file__).parent.glob("test_*.py")}


def test_every_statement_is_found_by_its_full_name():
    for theorem in catalog.theorems():
        for name, statement in catalog.statements(theorem).items():
            assert catalog.find(f"{theorem}.{name}") is statement
            assert list(catalog.quantities(statement)) == list(inspect.signature(statement).parameters)


def test_an_answer_is_the_functions():
    p, n = [0.25, 0.75], [20, 60]
    found = catalog.evaluate("lambda_aer", ["radius=0.5", "mu=1", f"p={p}", f"n={n}"])
    assert found == lambda_aer(0.5, 1, p, n)._asdict()
    found = catalog.evaluate("upper_bounds.local_aer", ["mu=1", "smooth=2", "ell_max=3", f"p={p}", f"n={n}"])
    assert found == {"local_aer": local_aer(1, 2, 3, np.array(p), np.array(n))}
    gap = catalog.evaluate("diversity.pairwise_spread", ["truths=[[0,0],[3,4]]"])
    assert gap == {"pairwise_spread": 5.0}


def test_parts_and_infinity():
    kind = catalog._value("t", "update", '{"eta":0.1,"steps":3,"prox":false}', LocalUpdate)
    assert kind == LocalUpdate(0.1, 3, False)
    assert catalog._value("t", "lam", "inf", float) == np.inf


@pytest.mark.parametrize(
    "name, given, sentence",
    [
        ("lambda_aerr", ["mu=1"], "unknown theorem 'lambda_aerr'"),
        ("lambda_aer", ["mue=1"], "got 'mue=1'; quantities are radius, mu, p, n"),
        ("lambda_aer", ["mu=1"], "give radius, p, n"),
        ("lambda_aer", ["mu=one"], "mu must be a number or JSON, got 'one'"),
        ("smooth_bound", ["mu=1"], "use fedmspp_rate.smooth_bound or fedprox_shared_rate.smooth_bound"),
        ("upper_bounds", ["mu=1"], "'upper_bounds' has several statements; choose one of upper_bounds."),
        ("kernel_bounds.rkhs", ["mu=1"], "unknown theorem 'kernel_bounds.rkhs'"),
    ],
)
def test_wrong_requests(name, given, sentence):
    with pytest.raises(RequestError) as error:
        catalog.evaluate(name, given)
    assert sentence in str(error.value)


def test_the_command_lists_shows_and_evaluates(capsys):
    answers = []
    for words in ([], ["lambda_ier"], ["lambda_ier", "radius=1", "mu=1", "p=[0.5,0.5]", "n=[10,10]"]):
        with pytest.raises(SystemExit) as end:
            main(["theorem", *words, "--json"])
        assert end.value.code == 0
        answers.append(json.loads(capsys.readouterr().out))
    assert "minimax" in [row["name"] for row in answers[0]["theorems"]]
    assert answers[1]["statements"][0]["asks"].startswith("radius, mu, p, n")
    assert answers[2] == {"lam": 0.1, "case": "A"}
