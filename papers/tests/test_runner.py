"""Trials are run once, kept under what they depend on, and an interrupted run goes on where it stopped."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mooring.core.errors import RequestError, WorkError
from mooring.engines.loop import run_steps
from mooring.engines.simulator import Simulator
from mooring_papers.base import catalog, runner, trial_cache
from mooring_papers.base.claims import Claim, lower
from mooring_papers.base.experiment import Experiment, Preset, grid

CALLS: list = []
LOAD = catalog.load_experiment


def trial(seed, gap, scale=1.0):
    CALLS.append((gap, seed))
    if gap in BROKEN:
        raise BROKEN[gap]
    return {"value": scale * gap + seed, "curve": [float("nan"), float("inf"), -float("inf"), 1]}


BROKEN: dict = {}


def entry(**more):
    preset = Preset(grid(gap=[1, 2, 3]), repeats=2, **more)
    claims = [Claim("small", "it is small", lower("value", 10.0))]
    return catalog.CatalogEntry(
        "009-fig1", "009", Experiment("A", trial, dict.fromkeys(("smoke", "quick", "paper"), preset), claims)
    )


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    CALLS.clear()
    BROKEN.clear()
    monkeypatch.setattr(catalog, "load_experiment", lambda one: entry())


def run(folder, given=None, **more):
    return runner.run([given or entry()], "quick", folder, workers=1, **more)["009-fig1"]


def test_a_second_call_runs_nothing(tmp_path):
    told = []
    first = run(tmp_path, on_progress=lambda what, done, total: told.append((what, done, total)))
    assert len(CALLS) == 6
    assert told == [("quick trials", done, 6) for done in range(7)]
    again = run(tmp_path)
    assert len(CALLS) == 6
    assert [t.values["value"] for t in first.results.trials] == [t.values["value"] for t in again.results.trials]
    assert str(again.results.trials[0].values["curve"]) == "[nan, inf, -inf, 1.0]"
    assert again.seconds == first.seconds > 0


def test_settings_points_and_seeds_are_part_of_the_key(tmp_path):
    run(tmp_path)
    run(tmp_path, entry(settings={"scale": 2.0}))
    assert len(CALLS) == 12
    more = catalog.CatalogEntry("009-fig2", "009", entry().experiment)  # another experiment with the same trials
    runner.run([more], "quick", tmp_path, workers=1)
    assert len(CALLS) == 12


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ZeroDivisionError("by zero")])
def test_an_interrupted_run_goes_on(tmp_path, error):
    BROKEN[2] = error
    expected = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else WorkError
    with pytest.raises(expected) as caught:
        run(tmp_path)
    if expected is WorkError:
        assert str(caught.value) == "009-fig1 failed at gap = 2, seed 0: ZeroDivisionError: by zero"
    BROKEN.clear()
    CALLS.clear()
    run(tmp_path)
    assert CALLS == [(2, 0), (2, 1), (3, 0), (3, 1)]


def test_a_wrong_request_inside_a_trial_keeps_its_sentence(tmp_path):
    BROKEN[1] = RequestError("mnist.npz is missing.")
    with pytest.raises(RequestError, match=r"^mnist.npz is missing\.$"):
        run(tmp_path)


def test_a_damaged_file_is_made_anew(tmp_path):
    run(tmp_path)
    kept = sorted(tmp_path.rglob("*.json"))
    assert len(kept) == 6
    kept[0].write_bytes(kept[0].read_bytes()[:-9])
    run(tmp_path)
    assert len(CALLS) == 7


def test_what_is_kept_says_what_it_is(tmp_path):
    run(tmp_path)
    what = json.loads(next(tmp_path.rglob("*.json")).read_text())["what"]
    assert what.keys() == {"experiment", "point", "settings", "seed"} and what["experiment"] == "009-fig1"


def test_the_version_of_an_experiment_is_part_of_the_key(tmp_path):
    run(tmp_path)
    newer = replace(entry().experiment, version=2)
    run(tmp_path, entry()._replace(experiment=newer))
    assert len(CALLS) == 12
    run(tmp_path, entry()._replace(experiment=replace(newer, title="B")))
    assert len(CALLS) == 12


def with_points(name, points, settings):
    """An experiment whose smoke preset has these points and settings."""
    entry = LOAD(name)
    smoke = entry.experiment.presets["smoke"]
    preset = replace(smoke, points=points, settings=smoke.settings | settings, repeats=1)
    experiment = replace(entry.experiment, presets=entry.experiment.presets | {"smoke": preset})
    return entry._replace(experiment=experiment), runner.list_trials(entry, preset)


SWEPT = {
    "effect-fig1-softmax": (grid(method=["FedProx"], classes=[10], lam=[0.5, 1.5, 2.5]), {"rounds": 4}),
    "effect-fig2": (grid(relative=[False, True], lam=[0.1, 1.0], steps=[3]), {"rounds": 5}),
    "effect-fig6-cnn": (grid(method=["FedProx"], classes=[6], lam=[0.2, 0.5, 2.5], epochs=[2]), {}),
    "effect-tab3": (grid(row=["MNIST CNN2"], classes=[2], method=["pFedMe"], size=["small", "large"]), {"rounds": 3}),
}


@pytest.mark.parametrize("name", SWEPT)
def test_trials_that_are_alike_are_trained_as_one_and_give_what_each_gives_alone(name, tmp_path, monkeypatch):
    monkeypatch.setattr(catalog, "load_experiment", LOAD)
    entry, units = with_points(name, *SWEPT[name])
    alone = [run_steps(entry.experiment.trial(seed=0, **unit.point, **unit.settings)) for unit in units]
    monkeypatch.setattr(Simulator, "ask", None)  # all of them together, or not at all
    found = runner.run([entry], "smoke", tmp_path, workers=1)[name]
    for one, trial in zip(alone, found.results.trials, strict=True):
        assert one.keys() == trial.values.keys()
        for series, values in one.items():
            np.testing.assert_allclose(trial.values[series], values, rtol=1e-5, atol=1e-7)

    def values():
        return {unit.key: json.loads(trial_cache._place(tmp_path, unit.key).read_text())["values"] for unit in units}

    whole = values()
    for unit in units[1:]:
        trial_cache._place(tmp_path, unit.key).unlink()  # as if killed while these were written
    runner.run([entry], "smoke", tmp_path, workers=1)
    assert values() == whole, "to the last bit"


def test_trials_of_unlike_methods_data_and_seeds_are_not_put_together():
    entry = LOAD("effect-tab3")
    units = runner.list_trials(entry, replace(entry.experiment.presets["smoke"], repeats=2))
    together = runner.group_trials(units)
    assert sorted(unit.key for batch in together for unit in batch) == sorted(unit.key for unit in units)
    for batch in together:
        ways = {(unit.seed, *(unit.point[name] for name in ("row", "classes", "method"))) for unit in batch}
        assert len(ways) == 1 and len(batch) == (3 if "size" in batch[0].point else 1)
    whole, part = (
        {u.key for u in runner.list_trials(e, e.experiment.presets["quick"])} for e in (entry, LOAD("effect-fig1-cnn"))
    )
    assert part < whole, "figures and tables share their trials"
    plain = LOAD("effect-tab2")
    units = runner.list_trials(plain, plain.experiment.presets["quick"])
    assert runner.group_trials(units) == [[unit] for unit in units]


def test_what_is_trained_beside_a_trial_is_part_of_the_key():
    points = [{"gap": gap} for gap in (1, 2, 3)]
    assert len({trial_cache.trial_key(trial, {"gap": 1}, 0, 1, (), beside) for beside in ((), points[:2], points)}) == 3


def test_a_batch_is_kept_whole_or_not_at_all(tmp_path, monkeypatch):
    given = entry(swept=("gap",))
    monkeypatch.setattr(catalog, "load_experiment", lambda one: given)
    BROKEN[2] = ZeroDivisionError("by zero")
    with pytest.raises(WorkError, match="gap = 2, seed 0"):
        run(tmp_path, given)
    assert list(tmp_path.rglob("*.json")) == []
    BROKEN.clear()
    assert len(run(tmp_path, given).results.trials) == len(list(tmp_path.rglob("*.json"))) == 6


def test_data_files_are_part_of_the_key(tmp_path, monkeypatch):
    monkeypatch.setenv("MOORING_DATA", str(tmp_path))
    (tmp_path / "mnist.npz").write_bytes(b"12")
    (tmp_path / "other.npz").write_bytes(b"1")
    assert trial_cache.digest_data_files(()) == {}
    assert trial_cache.digest_data_files(("mnist",)) == {"mnist.npz": hashlib.sha256(b"12").hexdigest()}
    keys = [trial_cache.trial_key(trial, {"gap": 1}, 0, 1, needs) for needs in ((), ("mnist",))]
    (tmp_path / "mnist.npz").write_bytes(b"13")  # as long as before
    os.utime(tmp_path / "mnist.npz", ns=(1, 1))
    assert len({*keys, trial_cache.trial_key(trial, {"gap": 1}, 0, 1, ("mnist",))}) == 3


def test_an_unwritable_folder_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(WorkError, match="could not be written"):
        run(tmp_path / "file" / "cache")


def test_the_default_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("MOORING_CACHE", str(tmp_path))
    assert trial_cache.default_trial_folder() == tmp_path
    monkeypatch.delenv("MOORING_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert trial_cache.default_trial_folder() == tmp_path / "mooring" / "trials"


ORPHANS = """
import os, signal
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from mooring_papers.base.runner import _start_worker

if __name__ == "__main__":
    pool = ProcessPoolExecutor(1, get_context("spawn"), _start_worker)
    print(pool.submit(os.getpid).result(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.processes
def test_workers_do_not_outlive_a_killed_parent(tmp_path):
    script = tmp_path / "orphans.py"
    script.write_text(ORPHANS)
    worker = int(subprocess.run([sys.executable, script], capture_output=True, text=True).stdout)
    for _ in range(100):
        if not Path(f"/proc/{worker}").exists():
            return
        time.sleep(0.1)
    raise AssertionError(f"worker {worker} is still alive")


PATIENT = """
import sys, time
from pathlib import Path
from mooring_papers.base import runner

def work(batch, folder):
    (folder / batch[0]).touch()
    time.sleep(100)

if __name__ == "__main__":
    runner._run_batch = work
    try:
        list(runner._run_batches([["a"], ["b"], ["c"]], Path(sys.argv[1]), 2))
    except KeyboardInterrupt:
        sys.exit(130)
"""


@pytest.mark.processes
def test_an_interrupt_waits_for_no_trial(tmp_path):
    """Sent to all processes at once, as a terminal does; the workers say nothing and end."""
    script = tmp_path / "patient.py"
    script.write_text(PATIENT)
    kept = tmp_path / "kept"
    kept.mkdir()
    child = subprocess.Popen([sys.executable, script, kept], start_new_session=True, stderr=subprocess.PIPE, text=True)
    for _ in range(600):
        if len(list(kept.iterdir())) == 2:
            break
        time.sleep(0.1)
    begin = time.monotonic()
    os.killpg(child.pid, signal.SIGINT)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 130 and err == ""
    assert time.monotonic() - begin < 30  # not the 100 seconds of a trial; here two processors are shared by all tests
