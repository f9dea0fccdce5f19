"""Folds: rows of one unit lie in one of them, sizes are even, and progress is told while they are fitted."""

import numpy as np
import pandas as pd
import pytest
import torch

import mooring
from mooring.advice import crossfit
from mooring.advice.folds import compact, cross, deal, owners, units_of, usable
from mooring.advice.posterior import eigen, halves
from mooring.data.sources import load
from mooring.tasks.logistic import Logistic
from tests.problems import logistic_clients
from tests.tables import CONTRACEPTION


def visits(patients: int = 8, each: int = 12, rows: int = 3, seed: int = 0) -> pd.DataFrame:
    """Patients' visits, of several rows each; `who` tells a visit."""
    rng = np.random.default_rng(seed)
    who = np.repeat(np.arange(patients * each), rows)
    patient = who // each
    order = rng.permutation(len(who))
    x = rng.normal(size=patients * each)[who]
    y = x + patient / 4 + rng.normal(size=len(who))
    return pd.DataFrame({"patient": [f"p{i}" for i in patient], "visit": who, "x": x, "y": y}).iloc[order]


def test_units_lie_in_the_order_of_the_rows():
    clients = load(visits(), client="patient", target="y", unit="visit")
    rows, units = usable(clients), units_of(clients)
    told = pd.DataFrame({"owner": owners(rows), "unit": units, "x": compact(rows).x[:, 0]})
    assert (told.groupby(["owner", "unit"])["x"].nunique() == 1).all()  # x is the visit's
    assert told["x"].nunique() == len(told.groupby(["owner", "unit"]))


def test_no_fold_tears_a_unit_apart():
    clients = load(visits(), client="patient", target="y", unit="visit")
    rows, units = compact(usable(clients)), units_of(clients)
    fold = deal(rows, clients.keys, 5, 0, units)
    told = pd.DataFrame({"owner": owners(rows), "unit": units, "fold": fold})
    assert (told.groupby(["owner", "unit"])["fold"].nunique() == 1).all()
    count = told.drop_duplicates(["owner", "unit"]).groupby(["owner", "fold"]).size().unstack(fill_value=0)
    assert (count.max(axis=1) - count.min(axis=1)).max() <= 1
    torn = pd.DataFrame({"owner": owners(rows), "unit": units, "fold": deal(rows, clients.keys, 5, 0)})
    assert (torn.groupby(["owner", "unit"])["fold"].nunique() > 1).any()
    held = [part.place for part in cross(rows, clients.keys, 0, 5, units)]
    assert sorted(torch.cat(held).tolist()) == list(range(len(rows.y)))


def test_rows_that_are_units_of_their_own_are_dealt_as_without():
    clients = load(visits(), client="patient", target="y", drop=["visit"])
    rows = compact(usable(clients))
    alone = deal(rows, clients.keys, 5, 3, torch.arange(len(rows.y)))
    assert units_of(clients) is None and torch.equal(alone, deal(rows, clients.keys, 5, 3))


def test_advice_heeds_the_units(monkeypatch):
    seen = []
    monkeypatch.setattr(crossfit, "cross", lambda *given: seen.append(given[-1]) or cross(*given))
    mooring.advise(visits(), client="patient", target="y", unit="visit", folds=4)
    assert seen[0] is not None and len(torch.unique(seen[0])) > 50


def test_progress_rises_to_its_end_while_folds_are_fitted():
    told = []
    mooring.advise(
        CONTRACEPTION.path, **CONTRACEPTION.columns, folds=2, theory=False, tell=lambda *step: told.append(step)
    )
    done = [(k, n) for what, k, n in told if what == "holding rows out"]
    assert done[0][0] == 0 and done[-1][0] == done[-1][1] > 50 and [k for k, _ in done] == sorted(k for k, _ in done)
    assert [step for step in told if step[0] == "predicting what was held out"][-1][1:] == (2, 2)


def test_a_dear_choice_from_one_fold_is_nearly_that_of_all(monkeypatch):
    """The candidates are compared in one fold; evidence still comes from every row."""
    clients = logistic_clients(m=12, sizes=[60] * 12, seed=1)
    task = Logistic(3)
    whole, all_seen = crossfit.cross_fit(task, clients.train, clients.keys, folds=5)
    monkeypatch.setattr(crossfit, "DEAR", 0.0)
    part, seen = crossfit.cross_fit(task, clients.train, clients.keys, folds=5)
    assert part.plan.family == whole.plan.family
    for pair, witness in seen.seen.items():
        assert torch.equal(witness.rows, all_seen.seen[pair].rows)


def test_a_half_of_the_posterior_is_its_whole_at_scale_one():
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(5, 7, 4, generator=rng, dtype=torch.float64)
    k, root = x.mT @ x, torch.tensor([0.5, 0.0, 2.0, 1.0], dtype=torch.float64)
    values, turned = eigen(k, root)
    zero, half = halves(k, root)
    assert not bool(zero.any())
    exact = (turned / (1 + values)[:, None]) @ turned.mT
    torch.testing.assert_close(half @ half.mT, exact, rtol=1e-10, atol=1e-12)
    assert exact[0, 0, 0] == pytest.approx(
        float(torch.linalg.inv(torch.diag(1 / root[[0, 2, 3]] ** 2) + k[0][[0, 2, 3]][:, [0, 2, 3]])[0, 0])
    )
