"""What a researcher does, by the documentation alone: a method of one's own, compared over seeds, kept with its run."""

import re
import shutil
import sys

import numpy as np
import pandas as pd
import pytest
import torch

import mooring
from mooring.algorithms import base
from mooring.cli import main
from mooring.core import user_code
from mooring.core.errors import RequestError
from mooring.engines.fit import resume_fit
from mooring.runs.directory import MODELS_FILE, open_run
from mooring.runs.runfile import read_run
from tests.support.repository import ROOT

NET = """
from torch import nn

def make(features, classes):
    return nn.Sequential(nn.Linear(features, 4), nn.Tanh(), nn.Linear(4, max(classes, 1)))
"""
LOSS = """
def absolute(output, y):
    return (output[:, 0] - y).abs()
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a table, a network, a loss and the documentation's own algorithm."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(160, 2))
    who = np.arange(160) % 4
    frame = pd.DataFrame({"site": [f"s{i}" for i in who], "a": x[:, 0], "b": x[:, 1]})
    frame["y"] = 100 + 10 * x[:, 0] + who * x[:, 1] + rng.normal(size=160)
    frame.to_csv(tmp_path / "rows.csv", index=False)
    text = (ROOT / "docs" / "adding-an-algorithm.md").read_text()
    (tmp_path / "fedper.py").write_text(re.search(r"```python\n(.*?)```", text, re.S).group(1))
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "loss.py").write_text(LOSS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(*words):
    with pytest.raises(SystemExit) as left:
        main([str(word) for word in words])
    return left.value.code


DATA = ("rows.csv", "--client", "site", "--target", "y")


def test_an_algorithm_in_a_file_of_ones_own(here, capsys):
    words = (*DATA, "--algorithm", "fedper.py:FedPer", "--set", "layers=1", "--rounds", "4", "--no-baselines")
    assert command("fit", *words, "--checkpoint-every", "2", "--out", "run") == 0, capsys.readouterr().err
    kept = open_run("run")
    assert kept.run.algorithm.name == f"{here / 'fedper.py'}:FedPer" and kept.summary["algorithm"] == "FedPer"
    before = kept.models.personal
    # the file is gone: its copy in the run serves
    (here / "fedper.py").unlink()
    (here / "run" / MODELS_FILE).unlink()
    shutil.rmtree(here / "run" / "checkpoint")
    assert command("resume", "run") == 0, capsys.readouterr().err
    assert torch.equal(open_run("run").models.personal, before)


def test_a_changed_file_is_noticed(here, capsys):
    assert command("fit", *DATA, "--model", "net.py:make", "--rounds", "2", "--out", "run", "--no-baselines") == 0
    (here / "run" / MODELS_FILE).unlink()
    (here / "net.py").write_text(NET.replace("4", "5"))
    assert command("resume", "run") == 2
    assert "net.py has changed since the run began" in " ".join(capsys.readouterr().err.split())


def test_a_run_works_from_another_folder(here, capsys, monkeypatch):
    assert (
        command("fit", *DATA, "--model", "net.py:make", "--loss", "loss.py:absolute", "--rounds", "3", "--out", "run")
        == 0
    )
    assert command("predict", "run", "rows.csv", "--out", "before.csv") == 0
    (here / "elsewhere").mkdir()
    shutil.move("run", "elsewhere/run")
    shutil.move("rows.csv", "elsewhere/rows.csv")
    (here / "net.py").unlink()
    (here / "loss.py").unlink()
    monkeypatch.chdir(here / "elsewhere")
    assert command("predict", "run", "rows.csv", "--out", "after.csv") == 0, capsys.readouterr().err
    assert (here / "before.csv").read_bytes() == (here / "elsewhere" / "after.csv").read_bytes()
    predictions = pd.read_csv("after.csv")["y"]
    assert predictions.between(0, 200).all()  # in the target's units


def test_files_that_a_model_imports_are_kept_and_given_with_it(here, monkeypatch, capsys):
    """A model of two files works from another folder; in a stranger's folder neither runs."""
    (here / "parts.py").write_text("import torch\nfrom sizes import WIDTH\nHead = torch.nn.Linear\n")
    (here / "sizes.py").write_text("WIDTH = 5\n")
    (here / "two.py").write_text(
        "from torch import nn\nfrom parts import Head, WIDTH\n"
        "def make(features):\n    return nn.Sequential(Head(features, WIDTH), Head(WIDTH, 1))\n"
    )
    words = (*DATA, "--model", "two.py:make", "--rounds", "2", "--no-baselines", "--algorithm", "fedavg")
    assert command("fit", *words, "--out", "run") == 0, capsys.readouterr().err
    assert command("predict", "run", "rows.csv", "--out", "before.csv") == 0
    assert len(list((here / "run").glob("code-*.py"))) == 3 and "parts" not in sys.modules
    (here / "sizes.py").write_text("WIDTH = 6\n")
    with pytest.raises(RequestError, match=r"sizes\.py has changed since the run began"):
        resume_fit("run")
    for name in ("two.py", "parts.py", "sizes.py"):
        (here / name).unlink()
    (here / "elsewhere").mkdir()
    shutil.move("run", "elsewhere/run")
    monkeypatch.chdir(here / "elsewhere")
    assert command("predict", "run", here / "rows.csv", "--out", "after.csv") == 0, capsys.readouterr().err
    assert (here / "before.csv").read_bytes() == (here / "elsewhere" / "after.csv").read_bytes()


def test_a_strangers_file_beside_given_code_is_not_run(here):
    """The same bytes of a model that was given once, and beside them a helper that was not."""
    (here / "helper.py").write_text("WIDTH = 3\n")
    (here / "mine.py").write_text("import torch, helper\ndef make(features): return torch.nn.Linear(features, 1)\n")
    mooring.fit("rows.csv", client="site", target="y", model="mine.py:make", rounds=1, baselines=False)
    theirs = here / "theirs"
    theirs.mkdir()
    shutil.copy("mine.py", theirs / "mine.py")
    shutil.copy("rows.csv", theirs / "rows.csv")
    (theirs / "helper.py").write_text(f"open({str(theirs / 'ran')!r}, 'w')\n")
    (theirs / "run.toml").write_text(
        f"[data]\nsource = '{theirs / 'rows.csv'}'\nclient = 'site'\ntarget = 'y'\n"
        f"[task]\nmodel = '{theirs / 'mine.py'}:make'\n[algorithm]\nname = 'fedavg'\n"
    )
    with pytest.raises(RequestError, match=r"helper\.py is Python that a run file wants to run"):
        mooring.fit("theirs/run.toml", rounds=1)
    assert not (theirs / "ran").exists()


def test_an_algorithm_as_an_object(here, monkeypatch):
    """An object of a class in an imported file can be resumed by anybody; one in memory, by passing it again."""
    monkeypatch.syspath_prepend(here)
    import fedper

    by_file = mooring.fit("rows.csv", client="site", target="y", algorithm=fedper.FedPer(steps=3), rounds=3, out="run")
    assert read_run("run/run.toml").algorithm.name == f"{here / 'fedper.py'}:FedPer"

    class Mine(fedper.FedPer):
        pass

    by_memory = mooring.fit("rows.csv", client="site", target="y", algorithm=Mine(steps=3), rounds=3, out="mine")
    assert torch.equal(by_memory.trained.models, by_file.trained.models)
    (here / "mine" / MODELS_FILE).unlink()
    with pytest.raises(RequestError, match="Mine was in memory; pass it again"):
        resume_fit("mine")
    again, _ = resume_fit("mine", algorithm=Mine())
    assert torch.equal(again.trained.models, by_memory.trained.models)


def test_what_is_no_algorithm_is_refused(here):
    with pytest.raises(RequestError, match="must be a frozen dataclass that inherits from Algorithm"):
        mooring.fit("rows.csv", client="site", target="y", algorithm="net.py:make")
    with pytest.raises(RequestError, match="unknown algorithm 'fedpar'"):
        mooring.fit("rows.csv", client="site", target="y", algorithm="fedpar")


def test_algorithms_of_installed_packages_are_found(here, monkeypatch):
    monkeypatch.syspath_prepend(here)
    from importlib.metadata import EntryPoint

    point = EntryPoint("my_fedper", "fedper:FedPer", base.ENTRY_POINT_GROUP)
    monkeypatch.setattr(
        user_code, "entry_points", lambda group, name=None: [point] if name in (None, point.name) else []
    )
    assert "my_fedper" in base.algorithm_names()
    result = mooring.fit("rows.csv", client="site", target="y", algorithm="my_fedper", rounds=2, out="run")
    assert read_run("run/run.toml").algorithm.name == "my_fedper" and result.trained.algorithm.name == "FedPer"


def test_settings_compared_over_seeds(here, capsys):
    methods = "local,ditto lam=0.1,ditto lam=10"
    words = (*DATA, "--methods", methods, "--rounds", "3", "--seeds", "3", "--seed", "5")
    assert command("compare", *words, "--out", "run") == 0, capsys.readouterr().err
    table = pd.read_csv("run/methods.csv")
    assert list(table["method"]) == ["local", "ditto lam=0.1", "ditto lam=10"]
    seeds = pd.read_csv("run/seeds.csv")
    assert sorted(seeds["seed"].unique()) == [5, 6, 7]
    by_method = seeds.groupby("method")["test_loss"]
    for row in table.to_dict("records"):
        assert row["test_loss"] == pytest.approx(by_method.mean()[row["method"]])
        assert row["test_loss_sd"] == pytest.approx(by_method.std()[row["method"]])
    wide = seeds.pivot(index="seed", columns="method", values="test_loss")
    best = wide.mean().idxmin()
    worst = wide.mean().idxmax()
    row = table.set_index("method").loc[worst]
    assert row["behind"] == pytest.approx((wide[worst] - wide[best]).mean())
    assert row["behind_sd"] == pytest.approx((wide[worst] - wide[best]).std())
    alone = mooring.compare("rows.csv", ["local"], client="site", target="y", rounds=3, seed=6)
    assert wide.loc[6, "local"] == pytest.approx(alone.methods["test_loss"][0])
    curves = pd.read_csv("run/curves.csv")
    assert set(curves.columns) >= {"method", "seed", "round", "test_loss"} and len(curves["method"].unique()) == 3


def test_a_repeated_comparison_resumes(here):
    options = {"client": "site", "target": "y", "rounds": 3, "seeds": 2}
    whole = mooring.compare("rows.csv", ["fedavg", "local"], out="run", **options)
    shutil.rmtree(here / "run" / "seed-1" / "methods" / "local")
    (here / "run" / "compare.json").unlink()
    from mooring.engines.compare import resume_comparison as go_on

    again = go_on("run")
    for name in ("test_loss", "test_loss_sd", "behind"):
        assert list(again.methods[name]) == list(whole.methods[name])


def test_the_split_has_a_seed_of_its_own(here):
    options = {"client": "site", "target": "y", "rounds": 2, "baselines": False, "algorithm": "fedavg"}
    first = mooring.fit("rows.csv", seed=1, split_seed=9, **options)
    second = mooring.fit("rows.csv", seed=2, split_seed=9, **options)
    assert first.job.clients.placement.equals(second.job.clients.placement)
    dealt = [
        mooring.fit(
            "digits", partition={"clients": 5, "seed": 3}, seed=seed, rounds=1, algorithm="fedavg", baselines=False
        ).job.clients
        for seed in (1, 2)
    ]
    assert torch.equal(dealt[0].train.y, dealt[1].train.y)
    with pytest.raises(RequestError, match="unknown hyperparameter 'sede'"):
        mooring.fit("digits", partition={"sede": 3})


def test_scores_of_a_method_that_learns_nothing(here):
    """A step so small that nothing is learned: both baselines are better, and the result shows it."""
    result = mooring.fit("rows.csv", client="site", target="y", algorithm="fedavg", settings={"eta": 1e-9}, rounds=1)
    assert repr(result).count("% higher (95% CI: ") == 2 and len(repr(result).splitlines()) <= 10
    for other in ("local", "pooled"):
        assert result.summary[f"improvement_over_{other}"]["pct"] < 0


@pytest.mark.slow
def test_all_methods_on_two_tables(tmp_path, monkeypatch, capsys):
    """`mooring benchmark --methods all`, end to end: tables, tests, figure; resumed without training again."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for name in ("first", "second"):
        x, owner = rng.normal(size=(48, 2)), np.arange(48) % 3
        frame = pd.DataFrame({"client": [f"c{i}" for i in owner], "a": x[:, 0], "b": x[:, 1]})
        frame.assign(target=x[:, 0] + owner * x[:, 1] + rng.normal(size=48)).to_csv(f"{name}.csv", index=False)
    words = ("benchmark", "first.csv", "second.csv", "--methods", "all", "--seeds", "1", "--rounds", "2", "--no-tune")
    assert command(*words, "--out", "all") == 0
    results, ranks = pd.read_csv("all/results.csv"), pd.read_csv("all/ranks.csv")
    left_out = [line for line in capsys.readouterr().err.splitlines() if "was left out:" in line]
    names = set(results["method"])
    assert len(names) + len(left_out) == len(base.algorithm_names()) and len(left_out) <= 2
    assert (results.groupby("method").size() == 2).all() and set(ranks["method"]) == names
    assert np.isfinite(results["test_loss"]).all()
    best = results.pivot(index="method", columns="data", values="test_loss").rank().mean(axis=1)
    found = ranks.set_index("method")["mean_rank"].sort_index()
    np.testing.assert_allclose(found, best.sort_index(), atol=0.5)  # practically equal losses share a rank
    assert "\\begin{tabular}" in (tmp_path / "all" / "table.tex").read_text()
    assert (tmp_path / "all" / "critical-difference.svg").stat().st_size > 5_000
    monkeypatch.setattr("mooring.engines.benchmark.compare", None)  # nothing is trained again
    assert command(*words, "--out", "all") == 0
