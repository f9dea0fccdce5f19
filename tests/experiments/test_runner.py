"""Trials are run once, kept under what they depend on, and an interrupted run goes on where it stopped."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mooring.core.errors import RequestError, WorkError
from mooring.experiments.base import cache, catalog, runner
from mooring.experiments.base.claims import Claim, lower
from mooring.experiments.base.experiment import Experiment, Preset, grid

CALLS: list = []


def trial(seed, gap, scale=1.0):
    CALLS.append((gap, seed))
    if gap in BROKEN:
        raise BROKEN[gap]
    return {"value": scale * gap + seed, "curve": [float("nan"), float("inf"), -float("inf"), 1]}


BROKEN: dict = {}


def entry(**more):
    preset = Preset(grid(gap=[1, 2, 3]), repeats=2, **more)
    claims = [Claim("small", "it is small", lower("value", 10.0))]
    return catalog.Entry(
        "009-fig1", "009", Experiment("A", trial, dict.fromkeys(("smoke", "quick", "paper"), preset), claims)
    )


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    CALLS.clear()
    BROKEN.clear()
    monkeypatch.setattr(catalog, "load", lambda one: entry())


def run(folder, given=None, **more):
    return runner.run([given or entry()], "quick", folder, workers=1, **more)["009-fig1"]


def test_a_second_call_runs_nothing(tmp_path):
    told = []
    first = run(tmp_path, tell=lambda what, done, total: told.append((what, done, total)))
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
    more = catalog.Entry("009-fig2", "009", entry().experiment)  # another experiment with the same trials
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


def test_the_key_follows_the_code_but_not_its_prose(tmp_path, monkeypatch):
    folder = tmp_path / "mooring_toy"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "helper.py").write_text("def f():\n    return 1\n")
    (folder / "other.py").write_text("X = 1\n")
    main = folder / "fig.py"
    text = '"""Prose."""\nfrom mooring_toy.helper import f\nEXPERIMENT = {claim}\ndef trial(seed):\n    return f()\n'
    main.write_text(text.format(claim=1))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(cache, "PACKAGE", "mooring_toy")

    def digest():
        cache.code.cache_clear()
        return cache.code("mooring_toy.fig")

    first = digest()
    main.write_text(text.format(claim=2).replace("Prose", "Other prose") + "# a comment\n")
    (folder / "other.py").write_text("X = 2\n")
    assert digest() == first
    (folder / "helper.py").write_text("def f():\n    return 2\n")
    second = digest()
    assert second != first
    main.write_text(main.read_text().replace("return f()", "return f() + 1"))
    third = digest()
    assert third != second
    main.write_text("import importlib\nimportlib.import_module('mooring_toy.other')\n" + main.read_text())
    fourth = digest()
    (folder / "other.py").write_text("X = 3\n")  # reached by name only
    assert len({first, second, third, fourth, digest()}) == 5
    cache.code.cache_clear()


def test_the_code_of_an_experiment_reaches_theory_and_data_and_not_claims():
    tree, path = cache._parsed("mooring.experiments.kernel._stationary")
    names = set(cache._imports(tree, "mooring.experiments.kernel._stationary", path))
    assert {"mooring.theory.kernel_operator", "mooring.data.generators"} <= names
    assert cache.code("mooring.experiments.base.claims") == cache.code("mooring.experiments.base.records")  # nothing


def test_data_files_are_part_of_the_key(tmp_path, monkeypatch):
    monkeypatch.setenv("MOORING_DATA", str(tmp_path))
    (tmp_path / "mnist.npz").write_bytes(b"12")
    (tmp_path / "other.npz").write_bytes(b"1")
    assert cache.data_files(()) == []
    assert cache.data_files(("mnist",)) == [["mnist.npz", 2]]
    keys = [cache.key(trial, {"gap": 1}, 0, needs) for needs in ((), ("mnist",))]
    (tmp_path / "mnist.npz").write_bytes(b"123")
    assert len({*keys, cache.key(trial, {"gap": 1}, 0, ("mnist",))}) == 3


def test_an_unwritable_folder_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(WorkError, match="could not be written"):
        run(tmp_path / "file" / "cache")


def test_the_default_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("MOORING_CACHE", str(tmp_path))
    assert cache.default_folder() == tmp_path
    monkeypatch.delenv("MOORING_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.default_folder() == tmp_path / "mooring" / "trials"


ORPHANS = """
import os, signal
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from mooring.experiments.base.runner import begin_worker

if __name__ == "__main__":
    pool = ProcessPoolExecutor(1, get_context("spawn"), begin_worker)
    print(pool.submit(os.getpid).result(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_workers_do_not_outlive_a_killed_parent(tmp_path):
    script = tmp_path / "orphans.py"
    script.write_text(ORPHANS)
    worker = int(subprocess.run([sys.executable, script], capture_output=True, text=True).stdout)
    for _ in range(100):
        if not Path(f"/proc/{worker}").exists():
            return
        time.sleep(0.1)
    raise AssertionError(f"worker {worker} is still alive")
