"""What `tune` proposes is what it measured as fastest, of settings that a run accepts."""

import pytest
import torch

from mooring import fit
from mooring.engines import tune as engine
from mooring.engines.tune import tune
from mooring.tasks.compiled_steps import is_numba_available
from tests.support.problems import linear_clients


def test_the_fastest_comes_first_and_threads_are_put_back(monkeypatch):
    slow = {("torch", 1): 3.0, ("torch", 2): 2.0, ("numba", 1): 1.0, ("numba", 2): 4.0}
    monkeypatch.setattr(engine, "time_round", lambda job, ready, threads, chunk, kernels: slow[kernels, threads])
    monkeypatch.setattr(engine, "is_numba_available", lambda: True)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    found = tune(linear_clients(), algorithm="fedavg")
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)
    assert [trial.seconds for trial in found] == [1.0, 2.0, 3.0, 4.0]
    assert found[0].options == f"--threads 1 --chunk {len(linear_clients())} --kernels numba"


def test_what_is_proposed_can_be_run():
    clients = linear_clients()
    best = tune(clients, algorithm="fedavg", rounds=2, threads=1)[0]
    assert best.seconds > 0 and best.chunk <= len(clients)
    resolved = {"threads": best.threads, "chunk": best.chunk, "kernels": best.kernels}
    assert fit(clients, algorithm="fedavg", rounds=2, **resolved).summary


@pytest.mark.skipif(not is_numba_available(), reason="compiled kernels come with the extra mooring[fast]")
def test_kernels_are_tried_where_the_task_has_them():
    assert {trial.kernels for trial in tune(linear_clients(), algorithm="fedavg", threads=1)} == {"torch", "numba"}
