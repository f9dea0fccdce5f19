"""The result of `advise` in Python: printed, used for predictions, drawn and written."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import mooring
from mooring.core.errors import RequestError
from tests.support.planted_table import planted


@pytest.fixture(scope="module")
def table():
    return planted(0.5, clients=12)


@pytest.fixture(scope="module")
def advice(table):
    return mooring.advise(data=table, client="who", target="y", threads=1)


def test_it_prints_ten_lines_that_begin_with_the_recommendation(advice):
    lines = repr(advice).splitlines()
    assert len(lines) == 10 and lines[0].startswith("Recommendation for ") and lines[1] == advice.headline
    assert "7 more in .recommendations" in lines[7] and lines[8] == advice.words["losses"]
    few = mooring.advise(planted(0.5, clients=3), client="who", target="y", threads=1)
    assert len(repr(few).splitlines()) == 7


def test_notebooks_show_a_table_without_markup_from_names(table):
    hostile = table.assign(who=table["who"].replace({"c0": "<b>x</b>"}))
    found = mooring.advise(hostile, client="who", target="y", threads=1)._repr_html_()
    assert "<table" in found and "<b>x</b>" not in found and "&lt;b&gt;x" in found


def test_recommendations_are_one_frame_whose_percentages_follow_from_its_losses(advice):
    frame = advice.recommendations
    assert len(frame) == 12 and frame["recommended"].isin(["local", "global", "personal"]).all()
    mine = np.array([row[row["recommended"]] for row in frame.to_dict("records")])
    for other in ("local", "global"):
        pct = 100 * (1 - mine / frame[other])
        np.testing.assert_allclose(frame[f"improvement_over_{other}_pct"], pct, atol=1e-6)


def test_predictions_use_the_recommended_models(advice, table, tmp_path):
    rows = table.head(200)
    here = advice.predict(rows)
    run = advice.save(tmp_path / "run")
    pd.testing.assert_frame_equal(here, mooring.predict(run, rows)[0])
    one = rows[rows["who"] == "c3"]
    np.testing.assert_array_equal(advice.predict(one, client="c3")["y"], here.loc[one.index, "y"])
    k = list(advice.clients["client"]).index("c3")
    assert torch.equal(advice.vector("c3"), advice.models.recommended[k])
    encoded = mooring.open(run).inputs(one)
    np.testing.assert_allclose(advice.model("c3").predict(encoded), here.loc[one.index, "y"], rtol=1e-9)
    with pytest.raises(RequestError, match="unknown client 'c99'"):
        advice.model("c99")


def test_figures_and_the_report_need_no_run_directory(advice, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert advice.plot().axes and advice.plot("path").axes
    assert advice.report() == Path("report.html") and advice.headline.rstrip(".") in Path("report.html").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html"]


def test_progress_is_a_switch_or_a_function(table, capsys):
    seen = []
    how = {"client": "who", "target": "y", "threads": 1}
    mooring.advise(table, **how, progress=lambda *step: seen.append(step))
    assert seen and capsys.readouterr().err == ""
    mooring.advise(table, **how, progress=True)
    assert "explaining: 1 of 2" in capsys.readouterr().err
