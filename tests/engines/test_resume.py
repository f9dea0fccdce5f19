"""A run killed at any moment resumes to the same bytes as one that was never killed."""

import hashlib
import os
import random
import signal
import time

import numpy as np
import pandas as pd
import pytest

from mooring.algorithms.base import algorithm_names, find
from mooring.core.errors import RequestError
from mooring.engines.compare import compare, resume_comparison
from mooring.engines.fit import fit, resume_fit
from mooring.runs.directory import MODELS_FILE
from tests.algorithms.cases import CASES


@pytest.fixture
def table(tmp_path):
    rng = np.random.default_rng(0)
    n = 240
    frame = pd.DataFrame(rng.normal(size=(n, 3)), columns=["a", "b", "c"])
    frame["who"] = [f"client {i % 8}" for i in range(n)]
    frame["y"] = frame["a"] - frame["b"] * (1 + (np.arange(n) % 8)) / 4 + rng.normal(size=n)
    path = tmp_path / "rows.csv"
    frame.to_csv(path, index=False)
    return path


def digest(run):
    return hashlib.sha256((run / MODELS_FILE).read_bytes()).hexdigest()


def start(table, out, algorithm="fedprox_personal", settings=None, rounds=12, **more):
    settings = {"inner": "sgd", "batch": 4, "lam": 0.3} if settings is None else settings
    return fit(
        table, client="who", target="y", algorithm=algorithm, settings=settings, rounds=rounds, out=out,
        participation=5, checkpoint_every=1, evaluate_every=2, threads=1, **more,
    )  # fmt: skip


def killed(after, job):
    """Run `job` in a child process and kill it after some seconds; whether it was still alive."""
    child = os.fork()
    if child == 0:
        try:
            job()
        finally:
            os._exit(0)
    time.sleep(after)
    os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1] == signal.SIGKILL


@pytest.mark.processes
def test_killed_at_twenty_random_moments(table, tmp_path):
    begin = time.perf_counter()
    start(table, tmp_path / "whole")
    lasts = time.perf_counter() - begin
    expected, chance = digest(tmp_path / "whole"), random.Random(0)
    for k in range(20):
        out = tmp_path / f"run {k}"
        killed(chance.uniform(0, 1.1) * lasts, lambda out=out: start(table, out))
        if not out.exists():  # killed before the directory appeared: nothing half-made is left to be resumed
            assert not list(tmp_path.glob(f"run {k}*"))
            start(table, out)
        resume_fit(out)
        assert digest(out) == expected, k


@pytest.mark.parametrize("name", algorithm_names())
def test_every_algorithm_resumes_bit_for_bit(name, table, tmp_path):
    """Stopped after the third round's checkpoint, by an error that stands for a kill."""
    settings = dict(next(fields for other, fields, problems in CASES if other == name and "linear" in problems))
    settings.pop("lam", None) if isinstance(settings.get("lam"), dict) else None
    everyone = {"participation": 1.0} if find(name).full_participation else {}

    def run(out, tell=lambda *_: None):
        return fit(
            table, client="who", target="y", algorithm=name, settings=settings, rounds=6, out=out,
            checkpoint_every=1, evaluate_every=1, threads=1, progress=tell, **({"participation": 5} | everyone),
        )  # fmt: skip

    run(tmp_path / "whole")

    def stop(what, done, rounds):
        if what == name and done == 3:
            raise InterruptedError

    try:
        run(tmp_path / "cut", stop)
    except InterruptedError:
        resume_fit(tmp_path / "cut")
    assert digest(tmp_path / "cut") == digest(tmp_path / "whole")


def test_equal_requests_give_equal_bytes(table, tmp_path):
    start(table, tmp_path / "a")
    start(table, tmp_path / "b")
    for name in (MODELS_FILE, "run.toml", "split.parquet", "schema.json", "clients.parquet"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name


def test_a_comparison_resumes_where_it_was(table, tmp_path):
    how = {"client": "who", "target": "y", "rounds": 6, "checkpoint_every": 1, "threads": 1}

    def stop(what, done, rounds):
        if what == "fedprox_personal" and done == 4:
            raise InterruptedError

    methods = ["local", "fedavg", "fedprox_personal"]
    whole = compare(table, methods, out=tmp_path / "whole", **how)
    with pytest.raises(InterruptedError):
        compare(table, methods, out=tmp_path / "cut", progress=stop, **how)
    again = resume_comparison(tmp_path / "cut")
    pd.testing.assert_frame_equal(again.clients, whole.clients)
    for method in methods:
        assert digest(tmp_path / "cut" / "methods" / method) == digest(tmp_path / "whole" / "methods" / method)


def test_changed_data_are_refused(table, tmp_path):
    start(table, tmp_path / "run")
    frame = pd.read_csv(table)
    frame.loc[0, "a"] += 1
    frame.to_csv(table, index=False)
    with pytest.raises(RequestError, match="has changed since the run began"):
        resume_fit(tmp_path / "run")


def test_an_existing_directory_is_refused(table, tmp_path):
    start(table, tmp_path / "run", rounds=1)
    with pytest.raises(RequestError, match="already exists"):
        start(table, tmp_path / "run", rounds=1)
