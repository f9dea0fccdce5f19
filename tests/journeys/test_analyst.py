"""An analyst with a table: the pages as they would be typed, in an empty folder."""

import re

import numpy as np
import pandas as pd
import pytest

import mooring
from mooring.cli import main
from tests.journeys.pages import blocks, commands, run_page, run_python, typed
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
    new_rows, joined = pd.read_csv("new_client.csv"), mooring.open("runs/joined")
    assert "14" in joined.names and len(served) == len(new_rows)
    assert np.mean((served["score"] - new_rows["score"]) ** 2) < 0.8 * new_rows["score"].var()
    assert len(names["again"].clients) == len(names["result"].clients) == 41


@pytest.mark.parametrize("page", ["docs/advice.md", "docs/theory.md"])
def test_commands_work_in_an_empty_folder(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_page(ROOT / page) >= 2


def numbers(text):
    return [float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*(?:\.\d+)?", text)]


def test_the_readme_shows_what_its_lines_print(tmp_path, monkeypatch, capsys):
    """Its command and its Python lines, at 80 columns; numbers may differ in their last digits between machines."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for argv in commands("README.md"):
        typed([*argv, "--quiet"])
    outputs = [capsys.readouterr().out]
    run_python(blocks("README.md", "python"))
    outputs.append(capsys.readouterr().out)
    shown = blocks("README.md", "text")
    assert len(shown) == 2
    for text, output in zip(shown, outputs):
        assert re.sub(r"[\d.,]+", "#", " ".join(text.split())) == re.sub(r"[\d.,]+", "#", " ".join(output.split()))
        np.testing.assert_allclose(numbers(text), numbers(output), rtol=0.02, atol=0.11)


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


def euros(value):
    return (
        f"{value:,.2f} EUR".replace(",", " ").replace(".", ",").replace(" ", ".", 1)
        if value >= 1000
        else f"{value:.2f} EUR".replace(".", ",")
    )


def messy_workbook(path):
    """A German workbook: a title, amounts as text, a weight with its unit, a stray cell, a misspelt word, a total."""
    rng = np.random.default_rng(0)
    rows = 90
    frame = pd.DataFrame({"Filiale": np.resize(["Bern", "Genf", "Basel"], rows), "Gewicht": rng.integers(5, 90, rows)})
    frame["Wetter"] = np.resize(["sonnig", "regnerisch"], rows)
    effect = frame["Filiale"].map({"Bern": 9.0, "Genf": 14.0, "Basel": 11.0}) * frame["Gewicht"]
    frame["Umsatz"] = 900 + effect + np.where(frame["Wetter"] == "sonnig", 150, 0) + rng.normal(0, 60, rows)
    written = frame.assign(Gewicht=[f"{w} kg" for w in frame["Gewicht"]], Umsatz=frame["Umsatz"].map(euros))
    written.loc[7, "Gewicht"], written.loc[8, "Wetter"] = "k.A.", "sonig"
    title = pd.DataFrame([["Umsätze 2024", None, None, None], [None] * 4, list(written.columns)])
    total = pd.DataFrame([["Gesamt", None, None, euros(frame["Umsatz"].sum())]])
    body = written.set_axis(range(4), axis=1)
    pd.concat([title.set_axis(range(4), axis=1), body, total]).to_excel(path, index=False, header=False)
    return frame


def test_from_a_messy_workbook_to_predictions_in_excel(tmp_path, monkeypatch, capsys):
    """`check` names each problem with its cure; with these, `advise` and `predict` do what the page promises."""
    monkeypatch.chdir(tmp_path)
    frame = messy_workbook(tmp_path / "umsatz.xlsx")
    roles = ["--client", "Filiale", "--target", "Umsatz"]
    with pytest.raises(SystemExit) as left:
        main(["check", "umsatz.xlsx", *roles])
    sentence = " ".join(capsys.readouterr().out.split())
    assert left.value.code == 2 and "k.A." in sentence and "--na" in sentence
    cures = ["--na", "k.A.", "--merge-levels", "sonig=sonnig"]
    typed(["check", "umsatz.xlsx", *roles, *cures])
    typed(["advise", "umsatz.xlsx", *roles, *cures, "--shape", "linear", "--out", "run"])
    output = " ".join(capsys.readouterr().out.split())
    assert "Recommendation for umsatz.xlsx (3 clients, 90 rows)" in output and "RMSE" in output
    typed(["predict", "run", "umsatz.xlsx", "--interval", "90%", "--out", "predictions.xlsx"])
    predictions = pd.read_excel("predictions.xlsx")
    error = np.sqrt(np.mean((predictions["Umsatz"] - frame["Umsatz"]) ** 2))
    covered = frame["Umsatz"].between(predictions["Umsatz_low"], predictions["Umsatz_high"]).mean()
    assert len(predictions) == 90 and error < 100 and covered > 0.8  # the noise has a deviation of 60
