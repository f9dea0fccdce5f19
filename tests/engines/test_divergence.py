"""A run that diverges stops with a sentence that says where and what would work; what was saved before is whole."""

import re
import warnings
from dataclasses import dataclass

import numpy as np
import pandas as pd
import pytest

import mooring
from mooring.algorithms.base import Algorithm
from mooring.cli import main
from mooring.core.errors import WorkError
from mooring.engines.divergence import suggest_step_sizes
from mooring.engines.training_state import TrainingPlan
from mooring.runs import checkpoint
from mooring.runs.directory import open_run


@pytest.fixture
def rows(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(size=(240, 3)), columns=["a", "b", "c"])
    frame["client"] = [f"c{k % 8}" for k in range(240)]
    frame["target"] = frame["a"] - frame["b"] * (1 + np.arange(240) % 8) / 4 + rng.normal(size=240)
    frame.to_csv(tmp_path / "rows.csv", index=False)
    monkeypatch.chdir(tmp_path)
    return "rows.csv"


STEEP = [
    ("fedavg", {"eta": 50.0}, "eta"),
    ("fedavg", {"eta": 50.0, "batch": 4}, "eta"),
    ("local", {"inner": "sgd", "eta": 50.0}, "eta"),
    ("ditto", {"eta": 50.0}, "eta"),
    ("scaffold", {"eta": 50.0}, "eta"),
    ("fedprox_personal", {"inner": "sgd", "eta": 50.0, "lam": 0.3}, "eta"),
    ("fedprox_personal", {"gamma": 500.0, "lam": 0.3}, "gamma"),
    ("fedavg", {"server_step": 300.0}, "server_step"),
]


@pytest.mark.parametrize("name,fields,blamed", STEEP)
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_too_large_steps_are_named_and_smaller_ones_proposed(rows, name, fields, blamed, participation):
    """What is proposed is then run, and works."""
    how = {"algorithm": name, "rounds": 60, "participation": participation, "threads": 1}
    with pytest.raises(WorkError, match=rf"^{name} diverged (in|by) round \d+: .* Too large: .*{blamed} = ") as told:
        mooring.fit(rows, settings=fields, **how)
    proposed = re.search(r"with (.*) the loss falls", str(told.value))[1]
    better = {key: float(value) for key, value in (pair.split(" = ") for pair in proposed.split(", "))}
    done = mooring.fit(rows, settings=fields | better, **how)
    assert np.isfinite(done.rounds["train_loss"].dropna()).all()
    assert done.summary["personal"] < 10 * done.summary["local"]


def test_the_command_fails_and_the_last_good_checkpoint_stays(rows, capsys):
    """Steps that grow slowly: rounds are saved, then the loss explodes."""
    words = ["--algorithm", "fedavg", "--set", "eta=1.9", "--set", "steps=2", "--set", "batch=0"]
    with pytest.raises(SystemExit) as left:
        main(
            ["fit", rows, *words, "--rounds", "400", "--checkpoint-every", "1", "--evaluate-every", "1", "--out", "run"]
        )
    told = capsys.readouterr().err
    assert left.value.code == 1 and "diverged by round" in told and "with eta = " in told
    run = open_run("run")
    saved = checkpoint.read_latest_checkpoint(run.path)
    assert not run.finished and saved is not None and saved.note is None
    losses = [record["train_loss"] for record in saved.meta["records"]]
    assert np.isfinite(losses).all() and max(losses) <= 1e6 * (1 + saved.meta["first_loss"])


def test_smaller_steps_are_not_proposed_to_an_algorithm_without_steps():
    @dataclass(frozen=True)
    class Exact(Algorithm):
        lam: float = 1.0

    assert "has no step size to make smaller" in suggest_step_sizes(Exact(), None, None, TrainingPlan(), 3)


def test_a_baseline_that_diverges_is_left_out(rows, tmp_path, monkeypatch):
    from mooring.engines import training as fitting

    def build(name, fields):
        return real(name, {"inner": "sgd", "eta": 1e4} if name == "local" else fields)

    real = fitting.build
    monkeypatch.setattr(fitting, "build", build)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        done = mooring.fit(rows, algorithm="fedavg", rounds=3, threads=1)
    assert any("without the baseline 'local': local diverged" in str(one.message) for one in told)
    assert np.isnan(done.summary["local"]) and np.isfinite(done.summary["personal"])
