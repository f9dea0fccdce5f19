"""States on disk: the same numbers as in memory, row by row, copied and restored; large networks fit."""

import subprocess
import sys
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import mooring
from mooring.algorithms.base import build
from mooring.engines import client_states
from mooring.engines.client_states import ClientStates
from mooring.runs.disk_matrix import DiskMatrix
from mooring.runs.tensor_files import read_tensors, write_tensors

LIMIT = 6e9  # bytes


class Client(NamedTuple):
    v: Tensor
    alpha: Tensor


def two(monkeypatch, clients: int = 6) -> tuple[ClientStates, ClientStates]:
    """The same states in memory and on disk."""
    first = Client(torch.arange(4.0), torch.tensor(0.5, dtype=torch.float64))
    inside, outside = ClientStates(first, clients), ClientStates(first, clients)
    some = torch.tensor([4, 1])
    given = Client(torch.randn(2, 4), torch.randn(2, dtype=torch.float64))
    inside.store(some, given, 3)
    monkeypatch.setattr(client_states, "MIN_DISK_BYTES", 0)
    outside.store(some, given, 3)
    assert isinstance(outside.fields.v, DiskMatrix) and not isinstance(inside.fields.v, DiskMatrix)
    return inside, outside


def same(a: ClientStates, b: ClientStates) -> None:
    everyone = torch.tensor([0, 1, 2, 3, 4, 5, 1])
    for one, other in zip(a.take(everyone), b.take(everyone)):
        assert torch.equal(one, other) and one.dtype == other.dtype
    assert torch.equal(a.merged, b.merged)


def test_a_shelf_holds_what_memory_holds(monkeypatch):
    inside, outside = two(monkeypatch)
    same(inside, outside)
    twin = outside.copy()
    more = Client(torch.ones(1, 4), torch.zeros(1, dtype=torch.float64))
    inside.store(torch.tensor([0]), more, 4)
    outside.store(torch.tensor([0]), more, 4)
    same(inside, outside)
    assert not torch.equal(twin.take(torch.tensor([0])).v, outside.take(torch.tensor([0])).v)  # a copy is one


def test_states_on_disk_come_back_from_a_checkpoint(monkeypatch, tmp_path):
    inside, outside = two(monkeypatch)
    write_tensors(tmp_path / "a", outside.to_snapshot("last"), {})
    same(ClientStates.from_snapshot(outside.first, "last", read_tensors(tmp_path / "a")[0]), inside)
    for name in ("v", "alpha"):
        assert torch.equal(outside.field(name), inside.field(name))


def test_a_run_with_states_on_disk_has_the_same_numbers(monkeypatch):
    rng = np.random.default_rng(0)
    clients = {f"c{i}": (rng.normal(size=(12, 3)).astype("float32"), rng.integers(0, 2, 12)) for i in range(4)}

    def run():
        net = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
        torch.manual_seed(0)
        for part in net.parameters():
            nn.init.normal_(part, std=0.3)
        return mooring.fit(net, clients, algorithm="ditto", rounds=3, participation=0.5, baselines=False)

    before = run()
    monkeypatch.setattr(client_states, "MIN_DISK_BYTES", 0)
    after = run()
    for name in clients:
        for one, other in zip(before.module(name).parameters(), after.module(name).parameters()):
            assert torch.equal(one, other)


def test_numbers_that_are_settled_ask_for_no_curvature():
    """A network's constants are dear; where nothing is a word, nobody measures them."""
    assert build("ditto", {"lam": 0.1, "eta": 0.1, "personal_eta": 0.1, "batch": 5}).is_resolved
    assert not build("ditto", {"lam": 0.1, "eta": 0.1, "batch": 5}).is_resolved
    assert not build("ditto", {}).is_resolved


LARGE_RUN = """
import resource, sys, numpy as np, mooring
from torch import nn
net = nn.Sequential(nn.Linear(64, 3110), nn.ReLU(), nn.Linear(3110, 3110), nn.ReLU(), nn.Linear(3110, 10))
assert sum(part.numel() for part in net.parameters()) > 9_900_000
rng = np.random.default_rng(0)
clients = {f"c{i}": (rng.normal(size=(20, 64)).astype("float32"), rng.integers(0, 10, 20)) for i in range(50)}
how = {"eta": 0.01, "personal_eta": 0.01, "lam": 0.1, "steps": 1, "batch": 20}
mooring.fit(net, clients, algorithm="ditto", rounds=2, baselines=False, settings=how, out=sys.argv[1])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is in kilobytes on Linux only")
def test_fifty_clients_of_ten_million_parameters_fit_into_six_gigabytes(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", LARGE_RUN, tmp_path / "run"], capture_output=True, text=True, check=True
    )
    assert int(done.stdout.split()[-1]) * 1024 < LIMIT
