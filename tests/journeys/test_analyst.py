"""An analyst with a table: the pages as they would be typed, in an empty folder."""

import numpy as np
import pandas as pd
import pytest

import mooring
from tests.journeys.pages import commands, run_page, typed
from tests.support.repository import ROOT


def test_the_page_on_tables(tmp_path, monkeypatch, capsys):
    """Every block of docs/tables.md in its order: Python is run, a run file saved, a command given."""
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    run_page(ROOT / "docs" / "tables.md", names)
    assert capsys.readouterr().out.count("Predict: mooring predict ") >= 5
    assert len(pd.read_csv("predictions.csv")) == 100
    table = pd.read_csv("coefficients.csv")
    assert list(table.columns) == ["client", "term", "coefficient", "global", "deviation"]
    served = pd.read_csv("served.csv")
    newcomer, told = pd.read_csv("new_client.csv"), mooring.open("runs/joined")
    assert "14" in told.names and len(served) == len(newcomer)
    assert np.mean((served["score"] - newcomer["score"]) ** 2) < 0.8 * newcomer["score"].var()
    assert len(names["again"].clients) == len(names["result"].clients) == 41


@pytest.mark.parametrize("page", ["README.md", "docs/advice.md", "docs/theory.md"])
def test_commands_work_in_an_empty_folder(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for argv in commands(page):
        if argv[0] != "reproduce":  # minutes of work, which tests/experiments does
            typed(argv)


def test_rows_without_a_target_are_left_out_of_advice_with_a_note(tmp_path):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"town": np.repeat(list("abcd"), 40), "x": rng.normal(size=160)})
    frame["y"] = frame["x"] + rng.normal(size=160)
    frame.loc[[3, 50, 90], "y"] = np.nan
    how = {"client": "town", "target": "y", "threads": 1}
    with pytest.raises(mooring.RequestError, match="target"):
        mooring.fit(frame, **how, rounds=2)
    fitted = mooring.fit(frame, **how, rounds=2, drop_missing_target=True)
    advice = mooring.advise(frame, **how)
    note = "3 rows of 160 left out: target 'y' is missing there."
    assert note in advice.job.clients.notes and note in fitted.job.clients.notes
    assert advice.clients["rows"].sum() == 157
    with pytest.raises(mooring.RequestError, match="target"):
        mooring.advise(frame, **how, drop_missing_target=False)
