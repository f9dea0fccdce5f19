"""Which code takes a run's local steps: resolved before it begins, written down, and the same when it goes on."""

import numpy as np
import pytest
import torch
from torch import nn

from mooring import fit
from mooring.core.cohort import chunk_size
from mooring.core.errors import RequestError
from mooring.data.clients import from_arrays
from mooring.engines import kernel_choice
from mooring.engines.fit import resume_fit
from mooring.engines.kernel_choice import estimate_seconds_saved
from mooring.engines.prepare import prepare
from mooring.engines.request import request
from mooring.runs.directory import open_run
from mooring.tasks.compiled_steps import is_compiled
from mooring.tasks.fused import per_client
from mooring.tasks.fused.perceptron_numba import find_matrix_product

FIELDS = {"steps": 5, "batch": 4, "eta": 0.1}


def clients(features: int = 5):
    rng = np.random.default_rng(0)
    xs = [rng.normal(size=(n, features)) for n in (12, 20, 31)]
    ys = [rng.integers(0, 3, len(x)) for x in xs]
    parts = [np.resize(["train", "train", "validation", "test"], len(x)) for x in xs]
    return from_arrays(xs, ys, parts=parts, kind="classes")


def prepared(**options):
    return prepare(request(clients(), purpose="fit", algorithm="fedavg", settings=FIELDS, **options), clients())


def test_short_runs_compile_nothing_and_long_ones_do(monkeypatch):
    monkeypatch.setattr(kernel_choice, "is_numba_available", lambda: True)
    for rounds, chosen in ((10, "torch"), (100_000, "numba")):
        job = prepared(rounds=rounds)
        assert job.run.training.kernels == chosen and is_compiled(job.task) == (chosen == "numba")
    monkeypatch.setattr(kernel_choice, "is_numba_available", lambda: False)
    assert prepared(rounds=100_000).run.training.kernels == "torch"


def test_a_run_says_how_many_clients_are_worked_on_at_once():
    job = prepared(rounds=10)
    assert job.run.training.chunk == chunk_size(job.task) > 1
    assert prepared(rounds=10, chunk=2).run.training.chunk == 2


def test_the_estimate_grows_with_the_work():
    """Twice the rounds save twice as much; exact solvers and summaries of linear tasks have no steps to save."""

    def saved(algorithm, settings, **options):
        job = prepare(request(clients(), purpose="fit", algorithm=algorithm, settings=settings, **options), clients())
        return estimate_seconds_saved(job.run, job.clients, job.task, job.algorithms())

    assert saved("fedavg", FIELDS, rounds=20) == pytest.approx(2 * saved("fedavg", FIELDS, rounds=10))
    assert saved("fedavg", {**FIELDS, "epochs": 2}, rounds=10) > saved("fedavg", FIELDS | {"steps": 1}, rounds=10)
    assert saved("fedprox_personal", {"inner": "exact"}, rounds=10) == 0


def test_a_run_stores_its_kernels_and_resumes_with_them(tmp_path, monkeypatch):
    pytest.importorskip("numba", reason="compiled kernels come with the extra mooring[fast]")
    found = {}
    for kind in ("torch", "numba"):
        out = tmp_path / kind
        found[kind] = fit(clients(), algorithm="fedavg", settings=FIELDS, rounds=6, kernels=kind, out=out)
        assert open_run(out).run.training.kernels == kind
    torch.testing.assert_close(found["numba"].trained.models, found["torch"].trained.models, rtol=1e-10, atol=1e-11)
    again = fit(clients(), algorithm="fedavg", settings=FIELDS, rounds=6, kernels="numba", out=tmp_path / "again")
    assert torch.equal(again.trained.models, found["numba"].trained.models)
    resumed, _ = resume_fit(tmp_path / "numba", source=clients())
    assert is_compiled(resumed.job.task)
    monkeypatch.setattr(kernel_choice, "is_numba_available", lambda: False)
    with pytest.raises(RequestError, match="numba is not installed; install mooring-fl\\[fast\\]"):
        resume_fit(tmp_path / "numba", source=clients())


def test_a_network_has_kernels_as_well(tmp_path, monkeypatch):
    pytest.importorskip("numba", reason="compiled kernels come with the extra mooring[fast]")
    if find_matrix_product(torch.float64) is None:
        pytest.skip("PyTorch brings no products of matrices that can be called here")
    monkeypatch.setattr(per_client, "MIN_PER_CLIENT_BYTES", 0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)).double()
    found = {}
    for name, kind in (("torch", "torch"), ("numba", "numba"), ("again", "numba")):
        options = {"algorithm": "fedavg", "settings": FIELDS, "rounds": 3, "kernels": kind, "out": tmp_path / name}
        found[name] = fit(clients(), model=model, **options).trained.models
        assert open_run(tmp_path / name).run.training.kernels == kind
    torch.testing.assert_close(found["numba"], found["torch"], rtol=1e-10, atol=1e-11)
    assert torch.equal(found["again"], found["numba"])
    resumed, _ = resume_fit(tmp_path / "numba", source=clients(), model=model)
    assert is_compiled(resumed.job.task)


def test_tasks_without_kernels_refuse_them():
    with pytest.raises(
        RequestError, match=r"kernels = 'numba' are for linear and logistic tasks, and .* task 'kernel' has"
    ):
        data = from_arrays([np.zeros((5, 2))] * 2, [np.arange(5.0)] * 2, kind="regression")
        prepare(request(data, purpose="fit", algorithm="fedavg", task="kernel", kernels="numba"), data)
