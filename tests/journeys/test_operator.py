"""An operator: the trial on one machine of docs/deploying.md, and the files that docs/operating.md names."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import mooring
from mooring.runs.directory import open_run
from tests.journeys.pages import commands

pytest.importorskip("flwr", reason="Flower, the transport of deployments, is not installed")
pytestmark = pytest.mark.processes
RUN = """
[data]
source = "clients"
target = "y"
[algorithm]
name = "fedprox_personal"
[training]
rounds = 3
"""
SECONDS = 300


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a finished federation of two clients, started as the page shows."""
    folder = tmp_path_factory.mktemp("operator")
    (folder / "clients").mkdir()
    rng = np.random.default_rng(0)
    for name, slope in (("north", 1.0), ("south", 2.0)):
        x = rng.normal(size=30)
        frame = pd.DataFrame({"x": x, "y": slope * x + 0.3 * rng.normal(size=30)})
        frame.round(5).to_csv(folder / "clients" / f"{name}.csv", index=False)
    (folder / "run.toml").write_text(RUN)
    (line,) = [words for words in commands("docs/deploying.md") if words[:2] == ["federation", "up"]]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "mooring", *line, "--out", "runs/two"]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    return folder


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_models_are_those_of_one_machine(place, monkeypatch):
    monkeypatch.chdir(place)
    simulated = mooring.fit("run.toml", threads=1)
    torch.testing.assert_close(open_run("runs/two").models.common, simulated.trained.common)


def test_the_server_records_which_client_was_asked_what(place):
    lines = read_lines(place / "runs" / "two.federation" / "audit.jsonl")
    assert {line["client"] for line in lines if line["event"] == "joined"} == {"north", "south"}
    asked = [line for line in lines if line["event"] == "asked"]
    assert len(asked) >= 3 and all(line["clients"] == ["north", "south"] and not line["missing"] for line in asked)


def test_a_client_records_what_left_its_machine(place):
    """Every reply in words with its size; no cell of the table is among them."""
    (path,) = (place / "runs" / "two.federation" / "clients" / "north").glob("*/sent.jsonl")
    lines = read_lines(path)
    assert all(line["sent"] and line["bytes"] > 0 for line in lines) and len(lines) > 5
    cells = pd.read_csv(place / "clients" / "north.csv").to_numpy().ravel()
    assert not any(f"{cell:.5f}".rstrip("0") in path.read_text() for cell in cells)


def test_all_files_are_their_owners(place):
    files = [path for path in (place / "runs").rglob("*") if path.is_file()]
    assert len(files) > 10 and all(path.stat().st_mode & 0o077 == 0 for path in files)


def test_each_client_predicts_with_the_models_it_keeps(place):
    (result,) = (place / "runs" / "two.federation" / "clients" / "south").glob("*/result")
    rows = pd.read_csv(place / "clients" / "south.csv")
    predicted = mooring.open(result).predict(rows)["y"]
    assert np.mean((predicted - rows["y"]) ** 2) < 0.3  # the noise has a variance of 0.09, the target of 4
