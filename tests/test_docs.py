"""What the documentation shows is executed."""

import re
import shlex
import sys
import types

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from mooring.algorithms.base import Algorithm, algorithm_names, build, describe
from mooring.algorithms.fedavg import FedAvg
from mooring.cli import main
from mooring.core.task import head_mask
from mooring.tasks.network import NetworkTask
from tests.support.problems import PROBLEMS, linear_clients, simulate
from tests.support.repository import ROOT


def federation(problem):
    if problem == "linear":
        return PROBLEMS["linear"]()
    net = NetworkTask(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double(), "half_square")
    return net, linear_clients()


@pytest.fixture
def fed_per():
    """The class that the page on adding an algorithm shows."""
    text = (ROOT / "docs" / "adding-an-algorithm.md").read_text()
    source = re.search(r"```python\n(.*?)```", text, re.S).group(1)
    module = types.ModuleType("fedper")
    sys.modules["fedper"] = module
    exec(compile(source, "fedper.py", "exec"), module.__dict__)
    yield module.FedPer
    del sys.modules["fedper"]


def test_the_page_names_every_part_of_the_contract():
    page = (ROOT / "docs" / "adding-an-algorithm.md").read_text()
    parts = [name for name in {**vars(Algorithm), **Algorithm.__annotations__} if not name.startswith("_")]
    missing = [name for name in parts if f"`{name}`" not in page and f"`{name}(" not in page and name != "name"]
    assert len(parts) > 18 and not missing
    assert all(f'`"{name}"`' in page for name in ("fit", "spread", "rules", "alone"))


@pytest.mark.parametrize("problem", ["linear", "network"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_the_pages_fedprox_is_fedprox(optimizer, problem):
    text = (ROOT / "docs" / "adding-an-algorithm.md").read_text()
    source = next(block for block in re.findall(r"```python\n(.*?)```", text, re.S) if "class MyFedProx" in block)
    module = types.ModuleType("my_fedprox")
    exec(compile(source, "my_fedprox.py", "exec"), module.__dict__)
    task, clients = federation(problem)
    fields = {"lam": 0.7, "eta": 0.02, "batch": 4, "steps": 5, "optimizer": optimizer, "optimizer_state": "keep"}
    server, _, _ = simulate(module.MyFedProx(**fields), task, clients, rounds=3, participation=0.6)
    expected, _, _ = simulate(build("fedprox", fields | {"inner": "sgd"}), task, clients, rounds=3, participation=0.6)
    torch.testing.assert_close(server.w, expected.w, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("problem", ["linear", "network"])
def test_the_example_algorithm_keeps_its_limits(fed_per, problem):
    task, clients = federation(problem)
    server, models, _ = simulate(fed_per(layers=0), task, clients, rounds=5)
    plain, _, _ = simulate(FedAvg(), task, clients, rounds=5)
    torch.testing.assert_close(server.w, plain.w)
    torch.testing.assert_close(models, plain.w.expand_as(models))


@pytest.mark.parametrize("problem", ["linear", "network"])
def test_the_example_algorithm_shares_the_body_alone(fed_per, problem):
    task, clients = federation(problem)
    server, models, _ = simulate(fed_per(), task, clients, rounds=5)
    mine = head_mask(task.layout)
    assert 0 < int(mine.sum()) < task.dim
    assert torch.equal(models[:, ~mine], server.w[~mine].expand(len(models), -1))
    assert not torch.isclose(models[0, mine], models[1, mine]).any()
    assert torch.equal(server.w[mine], task.start(0)[mine])


def test_the_page_on_networks_works_as_typed(tmp_path, monkeypatch, capsys):
    """Its blocks, one after another in an empty folder, and its commands on tables that have their columns."""
    text = (ROOT / "docs" / "networks.md").read_text()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    torch.manual_seed(0)
    known: dict[str, object] = {}
    for source in re.findall(r"```python\n(.*?)```", text, re.S):
        if file := re.match(r"# (\w+\.py)\n", source):
            (tmp_path / file.group(1)).write_text(source)
        else:
            exec(compile(source, "networks.md", "exec"), known)
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(size=(90, 2)), columns=["a", "b"]).assign(site=np.arange(90) % 3)
    frame.assign(label=np.where(frame["a"] > 0, "yes", "no"), amount=frame["b"] * 3 + 50).to_csv(
        "rows.csv", index=False
    )
    commands = re.findall(r"^    mooring (.*)$", text, re.M)
    assert len(commands) == 3
    for line in commands:
        words = [*shlex.split(line), "--rounds", "1"]
        words += ["--partition", "clients=5", "--seeds", "2"] if "--seeds" in words else []
        with pytest.raises(SystemExit) as left:
            main(words)
        assert left.value.code == 0, capsys.readouterr().err


def departures() -> str:
    """The list of docs/departures.md, from the docstrings; `python -m tests.test_docs` prints it."""
    told = [(name, describe(name)["departs"]) for name in algorithm_names()]
    return "\n".join(f"- `{name}`: {text}" for name, text in told)


def test_the_page_of_departures_names_all():
    page = (ROOT / "docs" / "departures.md").read_text()
    for line in departures().splitlines():
        assert not line.endswith(": "), f"{line}: its docstring has no section Departs"
        assert line in page, (
            "docs/departures.md lags behind the docstrings; `python -m tests.test_docs` prints the section"
        )


@pytest.mark.parametrize("page", [*sorted(ROOT.glob("docs/*.md")), ROOT / "README.md"], ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


if __name__ == "__main__":
    print(departures())  # noqa: T201
