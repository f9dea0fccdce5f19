"""The page docs/coming-from-lme4.md, as a reader would type it, in an empty folder."""

from itertools import combinations

import numpy as np
import pandas as pd
import pytest

import mooring
from tests.journeys.pages import blocks, run_python, typed, words


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    """What the page's Python lines define."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("statistician"))
        return run_python(blocks("docs/coming-from-lme4.md", "python"))


def test_the_page_runs_as_it_stands(names):
    model, simple = names["model"], names["simple"]
    assert model.log_likelihood > simple.log_likelihood
    assert len(model.random_effects) == 2 * 42 and "ICC" in model.summary()


@pytest.mark.parametrize("kind", ["caterpillar", "shrinkage", "residuals", "qq"])
def test_no_text_of_a_figure_overlaps_another_or_leaves_it(names, kind):
    figure = mooring.plot(names["model"], kind)
    figure.canvas.draw()
    texts = [
        text
        for axes in figure.axes
        for text in [*axes.get_xticklabels(), *axes.get_yticklabels(), axes.xaxis.label, axes.yaxis.label]
        if text.get_text() and text.get_visible()
    ]
    boxes = [text.get_window_extent().shrunk(0.9, 0.9) for text in texts]
    inside = [box for box in boxes if figure.bbox.contains(box.x0, box.y0) and figure.bbox.contains(box.x1, box.y1)]
    ticks = {label for axes in figure.axes for label in (*axes.get_xticklabels(), *axes.get_yticklabels())}
    outside = [t.get_text() for t, box in zip(texts, boxes) if box not in inside and t not in ticks]
    assert len(texts) > 8 and outside == []  # ticks beyond an axis are not drawn
    overlapping = [
        (a.get_text(), b.get_text())
        for (a, first), (b, second) in combinations(zip(texts, boxes), 2)
        if first.overlaps(second) and first in inside and second in inside
    ]
    assert overlapping == []


def test_advice_by_a_formula(tmp_path, monkeypatch, capsys):
    """The page's command on a table with its columns: fixed terms are the same in all personal models."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    school, lrt = np.repeat([f"s{i}" for i in range(6)], 20), rng.normal(size=120)
    gender = rng.choice(["F", "M"], 120)
    effect = np.repeat(rng.normal(size=6), 20)
    score = 0.6 * lrt + 0.3 * (gender == "F") + effect + rng.normal(0, 0.5, 120)
    pd.DataFrame({"school": school, "lrt": lrt, "gender": gender, "score": score}).to_csv("exam.csv", index=False)
    (line,) = blocks("docs/coming-from-lme4.md", "bash")
    typed([*words(line.strip()), "--out", "run"])
    assert "Recommendation for exam.csv (6 clients, 120 rows)" in capsys.readouterr().out
    typed(["export", "run", "--out", "coefficients.csv"])
    table = pd.read_csv("coefficients.csv").pivot(index="client", columns="term", values="coefficient")
    fixed = [name for name in table if "gender" in name]
    personal = mooring.open("run").clients.set_index("client")["recommended"] == "personal"
    assert fixed and personal.sum() >= 3
    assert (table.loc[personal[personal].index, fixed].nunique() == 1).all()
