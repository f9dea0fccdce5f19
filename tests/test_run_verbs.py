"""Runs of every purpose: killed at any moment they resume to the same bytes, from Python and from the command."""

import random
import shutil
import time

import pytest

import mooring
from mooring.cli import main
from mooring.core.errors import RequestError
from mooring.engines.benchmark import benchmark
from mooring.run_verbs import VERBS
from mooring.runs.directory import MODELS_FILE, open_run
from mooring.runs.purposes import PURPOSES
from tests.engines.test_resume import killed, table  # noqa: F401

COLUMNS = {"client": "who", "target": "y"}
TRAINING = {"rounds": 8, "checkpoint_every": 1, "evaluate_every": 2, "threads": 1}
TIMED = ("seconds.json", "results.csv", "benchmark.json")  # run times differ
DRAWN = (".html", ".png", ".svg")  # by commands only
KILLS = 6


def fit(rows, out, **more):
    return mooring.fit(rows, out=out, algorithm="ditto", settings={"lam": 0.3}, **COLUMNS, **TRAINING, **more)


def compare(rows, out, **more):
    return mooring.compare(rows, ["local", "fedavg", "ditto"], out=out, **COLUMNS, **TRAINING, **more)


def compare_seeds(rows, out, **more):
    return compare(rows, out, seeds=2, **more)


def advise(rows, out, **more):
    return mooring.advise(rows, out=out, folds=3, shape="linear", threads=1, **COLUMNS, **more)


def rank(rows, out):
    return benchmark([str(rows)], ["local", "ditto"], out, seeds=2, rounds=4, **COLUMNS)


def contents(folder):
    """The bytes of all files but run times, drawings and checkpoints of finished runs."""
    paths = (path for path in folder.rglob("*") if path.is_file() and path.parent.name != "checkpoint")
    names = {str(path.relative_to(folder)): path for path in paths}
    return {n: p.read_bytes() for n, p in names.items() if p.name not in TIMED and p.suffix not in DRAWN}


def command(*words):
    with pytest.raises(SystemExit) as left:
        main([*map(str, words)])
    assert left.value.code == 0


RANK_WORDS = ("--methods", "local,ditto", "--seeds", 2, "--rounds", 4, "--client", "who", "--target", "y")


@pytest.mark.processes
@pytest.mark.parametrize("start", [fit, compare, compare_seeds, advise, rank], ids=lambda start: start.__name__)
def test_a_killed_run_resumes_to_the_same_bytes_from_python_and_from_the_command(start, table, tmp_path):  # noqa: F811
    begin = time.perf_counter()
    start(table, tmp_path / "whole")
    lasts, expected, chance = time.perf_counter() - begin, contents(tmp_path / "whole"), random.Random(start.__name__)
    interrupted = 0
    for k in range(KILLS):
        out = tmp_path / f"run {k}"
        killed(chance.uniform(0.2, 1) * lasts, lambda out=out: start(table, out))
        if not out.exists():  # killed before the directory appeared
            continue
        interrupted += contents(out) != expected
        for name, resume in (
            ("python", rank if start is rank else lambda _, out: mooring.resume(out)),
            ("command", lambda rows, out: command("benchmark", rows, "--out", out, *RANK_WORDS)
             if start is rank else command("resume", out)),
        ):  # fmt: skip
            again = shutil.copytree(out, tmp_path / f"{name} {k}")
            resume(table, again)
            assert contents(again) == expected, (k, name)
    assert interrupted  # some of them were killed before the end


def stopped(start, rows, out):
    """The directory of a run that is interrupted after its first step."""

    def stop(what, done, total):
        if done:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        start(rows, out, progress=stop)
    return out


@pytest.mark.parametrize(
    ("start", "result"),
    [(fit, "FitResult"), (compare, "Comparison"), (advise, "AdviceResult")],
    ids=["fit", "compare", "advise"],
)
def test_a_run_resumes_as_its_own_purpose(start, result, table, tmp_path):  # noqa: F811
    start(table, tmp_path / "whole")
    run = stopped(start, table, tmp_path / "cut")
    assert type(mooring.resume(run)).__name__ == result
    assert contents(run) == contents(tmp_path / "whole")
    assert (run / MODELS_FILE).exists() == (start is not compare)
    mooring.resume(run)  # finished, it is only read
    assert contents(run) == contents(tmp_path / "whole")


def test_inputs_that_a_purpose_does_not_have_are_refused(table, tmp_path):  # noqa: F811
    run = stopped(compare, table, tmp_path / "cut")
    with pytest.raises(RequestError, match=r"metrics does not apply: .*cut is a run of 'compare'"):
        mooring.resume(run, metrics={"mine": lambda y, p: 0.0})
    from mooring.engines.fit import resume_fit

    with pytest.raises(RequestError, match="is a run of 'compare', not of 'fit'"):
        resume_fit(run)
    assert not (run / MODELS_FILE).exists() and open_run(run).run.mooring.purpose == "compare"


def test_every_purpose_has_verbs():
    assert VERBS.keys() == PURPOSES.keys()
