"""`mooring benchmark`: ranks, ties and tests in closed form, and a run that resumes."""

import json

import numpy as np
import pandas as pd
import pytest
from scipy.stats import friedmanchisquare

from mooring.cli import main
from mooring.core.errors import RequestError
from mooring.engines.benchmark import benchmark, expand_methods, list_settings, rank_methods
from mooring.report.figures import draw_critical_differences


def scores(table, seeds=1):
    return pd.DataFrame(
        [
            {"data": data, "seed": seed, "method": method, "test_loss": loss}
            for data, row in table.items()
            for method, loss in row.items()
            for seed in range(seeds)
        ]
    )


def test_ranks_and_tests_are_those_of_the_textbook():
    losses = np.random.default_rng(0).random((6, 4))
    table = {f"d{i}": dict(zip("abcd", row)) for i, row in enumerate(losses)}
    ranks, tests = rank_methods(scores(table, seeds=3))
    by_hand = (losses.argsort(1).argsort(1) + 1).mean(0)
    assert ranks.set_index("method")["mean_rank"].loc[list("abcd")].tolist() == pytest.approx(by_hand.tolist())
    assert tests.friedman == pytest.approx(friedmanchisquare(*losses.T).statistic)
    assert tests.critical_difference == pytest.approx(2.569 * np.sqrt(4 * 5 / (6 * 6)), rel=1e-3)  # q of 4 methods, 5%
    assert (tests.blocks, tests.block) == (6, "data sets")


def test_a_difference_that_is_not_shown_is_a_tie():
    table = {f"d{i}": {"a": 0.5, "b": 0.500004, "c": 0.7 + i} for i in range(4)}
    ranks, _ = rank_methods(scores(table))
    rows = ranks.set_index("method")
    assert rows.loc["a", "mean_rank"] == rows.loc["b", "mean_rank"] == 1.5
    assert (rows.loc["a", "wins"], rows.loc["a", "ties"], rows.loc["b", "ties"]) == (0, 4, 4)
    second = "b" if ranks["method"].iloc[0] == "a" else "a"
    assert rows.loc[second, "p_value_against_best"] == 1.0


def test_groups_and_grids():
    assert {"local", "pooled"} <= set(expand_methods(["baseline"])) and "ditto" in expand_methods(["all"])
    assert expand_methods(["ditto", "all"]).count("ditto") == 1
    assert list_settings("ditto", None, True) == ["ditto", "ditto lam=0.01", "ditto lam=0.1", "ditto lam=1.0"]
    assert list_settings("ditto", None, False) == ["ditto"]
    assert list_settings("fedavg", {"steps": [1, 5]}, True) == ["fedavg", "fedavg steps=1", "fedavg steps=5"]
    with pytest.raises(RequestError, match="dito"):
        expand_methods(["dito"])


@pytest.fixture
def tables(tmp_path):
    for name, spread in (("alike", 0.1), ("apart", 3.0)):
        rng = np.random.default_rng(len(name))
        site, x = np.repeat(np.arange(4), 30), rng.normal(size=120)
        y = (1 + spread * rng.normal(size=4))[site] * x + 0.3 * rng.normal(size=120)
        pd.DataFrame({"client": site, "x": x, "target": y}).to_csv(tmp_path / f"{name}.csv", index=False)
    return [str(tmp_path / "alike.csv"), str(tmp_path / "apart.csv")]


def test_a_benchmark_resumes_and_writes_its_tables(tables, tmp_path, capsys):
    words = ["benchmark", *tables, "--methods", "local,pooled,ditto", "--seeds", "2", "--rounds", "4"]
    words += ["--grid", "ditto.lam=0.1", "--out", str(tmp_path / "out"), "--json"]
    with pytest.raises(SystemExit, match="0"):
        main(words)
    first = json.loads(capsys.readouterr().out)
    marks = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("models.safetensors")}
    with pytest.raises(SystemExit, match="0"):
        main(words)
    again = json.loads(capsys.readouterr().out)
    assert first["ranks"] == again["ranks"] and len(first["results"]) == 12 and len(marks) >= 12
    assert all(path.stat().st_mtime_ns == time for path, time in marks.items())
    assert (tmp_path / "out" / "critical-difference.svg").stat().st_size > 1000
    tex = (tmp_path / "out" / "table.tex").read_text()
    assert tex.count(r"\\") == 4 and r"\textbf" in tex and "alike & apart" in tex


def test_methods_of_a_group_that_do_not_apply_are_left_out_with_a_note(tables, tmp_path, monkeypatch):
    monkeypatch.setattr("mooring.engines.benchmark.algorithm_names", lambda: ["local", "fedbn", "ditto"])
    result = benchmark(tables[:1], ["local", "personal"], tmp_path / "out", seeds=1, rounds=2, tune=False)
    assert set(result.ranks["method"]) == {"local", "ditto"}
    assert any(note.startswith("fedbn was left out: ") for note in result.notes)
    with pytest.raises(RequestError, match="the model has no normalization layer to stay with clients"):
        benchmark(tables[:1], ["fedbn", "local"], tmp_path / "again", seeds=1, rounds=2)


def test_the_figure_has_a_line_per_method():
    ranks = pd.DataFrame({"method": [f"m{i}" for i in range(20)], "mean_rank": np.linspace(1, 20, 20)})
    axes = draw_critical_differences(ranks, 4.0, "data sets").axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == [f"m{i}" for i in range(20)]
