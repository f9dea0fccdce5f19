"""Partitions of the user's own, by the page that describes them."""

import re

import pytest

import mooring
from mooring.cli import main
from mooring.core.errors import RequestError
from mooring.engines.request import user_code_specs
from mooring.runs.directory import open_run
from tests.support.repository import ROOT


@pytest.fixture
def page(tmp_path, monkeypatch):
    text = (ROOT / "docs" / "adding-a-partition.md").read_text()
    (tmp_path / "halves.py").write_text(re.search(r"```python\n(.*?)```", text, re.S).group(1))
    monkeypatch.chdir(tmp_path)
    return text


def test_the_page_runs_as_it_stands(page, tmp_path):
    command = re.search(r"```bash\nmooring (.*?)\n```", page, re.S).group(1).split()
    with pytest.raises(SystemExit, match="0"):
        main([*command, "--out", "run"])
    run = open_run(tmp_path / "run")
    assert user_code_specs(run.run) == [str(tmp_path / "halves.py") + ":deal"]
    assert list((tmp_path / "run").glob("code-*"))
    assert mooring.open(tmp_path / "run").directory.models.clients


def test_labels_are_divided_as_the_function_says(page):
    done = mooring.fit("digits", partition={"partition": "halves.py:deal", "clients": 4}, rounds=1, baselines=False)
    labels = [done.job.clients.train.of(i)[1].double().mean().item() for i in range(4)]
    assert labels == sorted(labels) and labels[3] - labels[0] > 4


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("return [np.arange(10)] * clients", "each at most once"),
        ("return [np.arange(10)]", "must give rows to each of 4 clients"),
        ("return [[len(y) + i] for i in range(clients)]", "must give row numbers from 0"),
    ],
)
def test_wrong_partitions_are_refused(tmp_path, monkeypatch, body, sentence):
    (tmp_path / "wrong.py").write_text(f"import numpy as np\n\ndef deal(y, clients, seed):\n    {body}\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RequestError, match=sentence):
        mooring.fit("digits", partition={"partition": "wrong.py:deal", "clients": 4}, rounds=1, baselines=False)


def test_unknown_partitions_are_refused():
    with pytest.raises(RequestError, match="unknown partition 'dirichlett'"):
        mooring.fit("digits", partition={"partition": "dirichlett", "clients": 4}, rounds=1, baselines=False)
