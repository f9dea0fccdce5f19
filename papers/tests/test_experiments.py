"""Every experiment under its smoke preset: it runs, is drawn and judged; a change of sign contradicts all claims."""

import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from mooring.core.errors import RequestError
from mooring.core.papers import PAPERS
from mooring.runs.atomic_files import read_json
from mooring_papers.base import catalog, claims, runner, trial_cache
from mooring_papers.base.experiment import Experiment, Preset
from mooring_papers.base.reproduce import reproduce
from mooring_papers.base.results import Results, Trial
from mooring_papers.report import experiment_figures
from mooring_papers.report.markdown import format_record_table
from mooring_papers.report.reproduction import draw_record


@pytest.mark.parametrize("one", catalog.list_experiments())
def test_smoke(one, session_cache, tmp_path, monkeypatch):
    """Drawn as SVG without a layout: `test_command.py` has that of PNG files, `test_figures_are_laid_out` of these."""
    monkeypatch.setattr(experiment_figures, "FILE_ENDINGS", ("svg",))
    usual = experiment_figures.create_figure

    def without_layout(width, height):
        figure = usual(width, height)
        figure.set_layout_engine("none")
        return figure

    monkeypatch.setattr(experiment_figures, "create_figure", without_layout)
    (record,) = reproduce(one, "smoke", tmp_path, workers=1)
    draw_record(record, tmp_path)
    experiment = catalog.load_experiment(one).experiment
    assert [claim["claim"] for claim in record["claims"]] == [claim.id for claim in experiment.claims]
    assert all(claim["word"] in claims.WORDS and claim["numbers"] for claim in record["claims"])
    assert record["repeats"] > 1 or not any(claim["word"] == claims.HELD for claim in record["claims"])
    assert record["made"]["trials"] == experiment.version
    assert record["made"]["versions"].keys() == set(trial_cache.LIBRARIES)
    assert read_json(tmp_path / f"{one}-smoke.json")["experiment"] == one
    assert experiment.panels or experiment.tables
    if experiment.panels:
        ET.parse(tmp_path / f"{one}-smoke.svg")
    for text in map(format_record_table, record["tables"]):
        rows = [line.count("|") for line in text.splitlines() if line.startswith("|")]
        assert len(rows) > 2 and len(set(rows)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("one", catalog.list_experiments())
def test_figures_are_laid_out(one, session_cache, tmp_path):
    """Nothing collapses: Matplotlib warns of axes without room, and warnings are errors."""
    (record,) = reproduce(one, "smoke", tmp_path, workers=1)
    draw_record(record, tmp_path)
    assert not record["panels"] or (tmp_path / f"{one}-smoke.png").stat().st_size > 10_000


@pytest.mark.parametrize("one", catalog.list_experiments())
def test_a_change_of_sign_contradicts_every_claim(one, session_cache):
    """Places along an axis stay; every measured number is negated."""
    entry = catalog.load_experiment(one)
    results = runner.run([entry], "smoke", session_cache, workers=1)[one].results
    axes = {panel.x for panel in entry.experiment.panels}

    def flipped(values):
        return {name: value if name in axes else (-np.asarray(value)).tolist() for name, value in values.items()}

    turned = Results([Trial(t.point, t.seed, flipped(t.values)) for t in results.trials])
    words = {claim.id: claim.check(turned).outcome for claim in entry.experiment.claims}
    assert set(words.values()) == {claims.CONTRADICTED}, words  # neither held nor open


def test_catalogue():
    ids = catalog.list_experiments()
    assert len(ids) == len(set(ids))
    assert catalog.list_papers() == [paper.key for paper in PAPERS if paper.alias]
    mine = [one for one in ids if one.startswith("kernel")]
    assert mine == ["kernel-bounds", *(f"kernel-fig{k}" for k in range(1, 7)), "kernel-stopping"]
    assert [entry.id for entry in catalog.select_experiments("kernel-fig1")] == ["kernel-fig1"]
    assert {entry.paper for entry in catalog.select_experiments("kernel")} == {"kernel"}
    assert [entry.id for entry in catalog.select_experiments("all")] == ids
    assert [one.split("-")[0] for one in ids] == sorted((i.split("-")[0] for i in ids), key=catalog.list_papers().index)
    with pytest.raises(RequestError, match=r"unknown experiment 'kernel-fig9' \(did you mean 'kernel-fig6'\?\)"):
        catalog.select_experiments("kernel-fig9")
    with pytest.raises(RequestError, match="--preset must be one of smoke, quick, paper, got 'big'"):
        reproduce("kernel-fig1", "big")
    described = catalog.describe_experiment("kernel-fig1")
    assert described.keys() == {"id", "paper", "title", "claims"}
    assert described["claims"][0] == "s1-is-stationary"


def test_declarations_are_checked():
    with pytest.raises(ValueError, match="presets must be smoke, quick, paper"):
        Experiment("A", lambda seed: {}, {"quick": Preset()}, [])
    with pytest.raises(ValueError, match="needs claims"):
        Experiment("A", lambda seed: {}, dict.fromkeys(("smoke", "quick", "paper"), Preset()), [])


def test_the_example_of_the_guide_runs(monkeypatch, tmp_path):
    text = (Path(__file__).parents[1] / "docs" / "experiments.md").read_text()
    module = ModuleType("example")
    exec(re.search(r"```python\n(.*?)```", text, re.S).group(1), module.__dict__)
    monkeypatch.setitem(sys.modules, "example", module)
    entry = catalog.CatalogEntry("009-fig9", "009", module.EXPERIMENT)
    monkeypatch.setattr(catalog, "load_experiment", lambda one: entry)
    results = runner.run([entry], "quick", tmp_path, workers=1)["009-fig9"].results
    assert [claim.check(results).is_held for claim in module.EXPERIMENT.claims] == [True, True]
    listed = (Path(__file__).parents[1] / "docs" / "claims.md").read_text()
    kinds = {f for f in vars(claims) if f"`{f}(" in listed}
    assert {"lower", "every", "crosses", "straight", "ratio", "within"} <= kinds


def test_both_cores_give_the_same_numbers(session_cache, tmp_path):
    entry = catalog.load_experiment("alternative-lambda")
    alone = runner.run([entry], "smoke", session_cache, workers=1)["alternative-lambda"].results
    two = runner.run([entry], "smoke", tmp_path, workers=2)["alternative-lambda"].results
    assert [(t.point, t.seed, t.values) for t in alone.trials] == [(t.point, t.seed, t.values) for t in two.trials]
