"""Run directories and run files of an attacker: whatever stands in a field, no verb runs code, imports a module by its
name, starts a process, or opens a file that it names; what is refused is one sentence."""

import itertools
import os
import random
import shutil
import tomllib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from mooring.cli import main
from mooring.core.errors import RequestError
from mooring.data.schema import Schema
from mooring.engines.fit import fit
from tests.support.audit import watch
from tests.support.hostile_runs import CANARY, VALUES, cases, content_of, hostile_copy, places, show, write_hostile

TABLE = "table.csv"
PREDICT, REPORT, EXPORT = ["predict", "copy", TABLE], ["report", "copy"], ["export", "copy"]
PERSONALIZE, RESUME = ["personalize", "copy", TABLE], ["resume", "copy"]
VERBS = {  # that read a file, by the beginning of its name
    "run.toml": [PREDICT, REPORT, PERSONALIZE, RESUME],
    "schema": [PREDICT, PERSONALIZE, EXPORT],
    "models": [PREDICT, PERSONALIZE, EXPORT],
    "advice": [REPORT, [*PREDICT, "--interval", "90%"], RESUME],
    "round-": [RESUME],
    "seconds": [REPORT, RESUME],
    "split": [RESUME, REPORT],
    "": [REPORT],  # what only reports show
}


HOW = {"client": "who", "target": "y", "rounds": 4, "checkpoint_every": 1, "threads": 1}
OPTIONS = [f"--{name.replace('_', '-')}={value}" for name, value in HOW.items()]
FORMULA = "y ~ bs(a, df=4) + b + C(h) + (1 + b | who)"
MORE_RUNS = {
    "advise": ["advise", TABLE, "--formula", FORMULA, "--out", "advise"],
    "compare": ["compare", TABLE, "--methods", "local,fedavg", *OPTIONS, "--out", "compare"],
}


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    """The folder with a finished and an interrupted run, and the events that reading them causes: imports at first use,
    and code that typer and jinja make."""
    folder, usual = tmp_path_factory.mktemp("hostile") / "a" / "b", set()
    folder.mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("XDG_STATE_HOME", str(folder / "state"))
        rng = np.random.default_rng(0)
        frame = pd.DataFrame(rng.normal(size=(120, 2)), columns=["a", "b"])
        frame = frame.assign(h=rng.choice(list("uvw"), 120), who=[f"c{i % 5}" for i in range(120)])
        frame["y"] = frame["a"] + frame["b"] * (1 + np.arange(120) % 5) / 3 + rng.normal(size=120)
        frame.to_csv(TABLE, index=False)
        call(["fit", TABLE, *OPTIONS, "--out", "fit"])
        with pytest.raises(InterruptedError):
            fit(TABLE, **HOW | {"rounds": 6}, out="cut", progress=interrupt)
        use_all_verbs("fit", usual)
        use_all_verbs("cut", usual)
    return folder, usual


def use_all_verbs(run, usual):
    """Add the events of every verb on an honest directory, without those of its first use."""
    for verb in (PREDICT, [*PREDICT, "--interval", "90%"], REPORT, PERSONALIZE, EXPORT, RESUME) * 2:
        shutil.rmtree("copy", ignore_errors=True)
        shutil.copytree(run, "copy")
        with watch() as seen:
            call([*verb])
        usual |= set(seen)


def interrupt(what, done, rounds):
    if done == 3:
        raise InterruptedError


def call(words):
    with pytest.raises(SystemExit) as left:
        main(words)
    return left.value.code


def strange(seen, usual):
    """The events that a hostile field caused; jinja runs `raise __jinja_exception__` to name a template's line,
    and a Python file that a run names is read, to see whether the user has given it."""
    jinja = ("__jinja_exception__", "jinja2.debug", "jinja2/debug.py")
    return [
        event
        for event in set(seen) - usual
        if (not event.startswith("open:") or (CANARY in event and f"{CANARY}.py" not in event))
        and not any(name in event for name in jinja)
    ]


def attack(honest, run, file, path, name, capsys):
    """Run the verbs that read a file on a directory with one field replaced."""
    folder, usual = honest
    if not hostile_copy(folder / run, folder / "copy", file, path, name):
        return
    for verb in next(verbs for begin, verbs in VERBS.items() if file.name.startswith(begin)):
        with watch() as seen:
            code = call(verb)
        err = capsys.readouterr().err
        where = f"{verb[0]} on {show(file, path, name)}"
        assert not strange(seen, usual), f"{where}: {strange(seen, usual)}"
        assert code in (0, 2) and "unexpected" not in err, f"{where}: {err[-500:]}"
        assert all(len(line) < 6_000 for line in err.splitlines() if line.startswith("error")), where
        assert all(c.isprintable() or c == "\n" for c in err), where
        assert CANARY not in {item.name for place in (folder, *folder.parents[:3]) for item in place.iterdir()}, where
        page = folder / "copy" / "report.html"
        text = page.read_text() if verb is REPORT and page.is_file() else ""
        assert f"<script>{CANARY}" not in text and "49{%" not in text, where


def fields(folder):
    """Every field of the run directories, once per kind of file; hostile values take turns."""
    found = {}
    for run in (name for name in ("advise", "cut", "fit", "compare") if (folder / name).is_dir()):
        for file, path, _ in cases(folder / run):
            found.setdefault((file.name.split("-0")[0], path), (run, file, path))
    names = itertools.cycle(VALUES)
    return [(*place, name) for place, name in zip(found.values(), names)]


def test_a_sample_of_hostile_fields(honest, monkeypatch, capsys):
    monkeypatch.chdir(honest[0])
    monkeypatch.setenv("XDG_STATE_HOME", str(honest[0] / "state"))
    for case in random.Random(0).sample(fields(honest[0]), 15):
        attack(honest, *case, capsys)


@pytest.mark.slow
def test_every_field(honest, monkeypatch, capsys):
    monkeypatch.chdir(honest[0])
    monkeypatch.setenv("XDG_STATE_HOME", str(honest[0] / "state"))
    for run, command in MORE_RUNS.items():
        call(command)
        use_all_verbs(run, honest[1])
    every = fields(honest[0])
    assert len(every) > 600
    failures = []
    for case in every:
        try:
            attack(honest, *case, capsys)
        except AssertionError as error:
            failures.append(str(error).splitlines()[0])
    assert not failures, f"{len(failures)} of {len(every)}: " + "\n".join(failures)


def join(path, folder):
    """What `mooring join` does before it connects, and its first reply."""
    from mooring.advice.federated.client import AdviceClientNode
    from mooring.engines.request import read_federation_request
    from mooring.remote.client_node import ClientNode
    from mooring.remote.messages import Payload

    run = read_federation_request(path)
    kind = {"fit": ClientNode, "advise": AdviceClientNode}[run.mooring.purpose]
    node = kind(run, Path(TABLE).resolve(), folder / "state of the client", "c0", lambda sentence: None)
    node.member  # noqa: B018
    return node.answer("survey", Payload({"run": node.digest}))


def test_hostile_run_files_join_nothing(honest, monkeypatch):
    pytest.importorskip("flwr")
    folder, _ = honest
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    frame = pd.read_csv(TABLE).query("who == 'c0'").drop(columns="who")
    joined, usual = folder / "joined", set()
    joined.mkdir()
    monkeypatch.chdir(joined)
    frame.to_csv(TABLE, index=False)
    table = tomllib.loads((folder / "fit" / "run.toml").read_text())
    table["data"] |= {"formula": "y ~ a + C(h) + (1 | who)"}
    table["data"] = {k: v for k, v in table["data"].items() if k not in ("client", "target")}
    table["federation"] = {"clients": 5}
    honest_file, hostile_file = joined / "honest.toml", joined / "run.toml"
    import tomli_w

    honest_file.write_text(tomli_w.dumps(table))
    for _ in range(2):
        with watch() as seen:
            assert "summary" in join(honest_file, joined).fields
        usual |= set(seen)
    refused, failures = 0, []
    for path, name in itertools.product(places(content_of(honest_file)), VALUES):
        shutil.copy(honest_file, hostile_file)
        if not write_hostile(hostile_file, path, VALUES[name]):
            continue
        with watch() as seen:
            try:
                join(hostile_file, joined)
            except RequestError:
                refused += 1
            except Exception as error:
                failures.append(f"{show(hostile_file, path, name)}: {type(error).__name__} {str(error)[:200]}")
        assert not strange(seen, usual), f"{show(hostile_file, path, name)}: {strange(seen, usual)}"
        assert not os.path.exists(CANARY)
    assert refused > 100 and not failures, "\n".join(failures)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("mean", [0.0], "mean and scale need 5 numbers each"),
        ("scale", [1.0, 1.0, 0.0, 1.0, 1.0], "a scale is not positive"),
        ("target_scale", float("nan"), "a number is not finite"),
        ("format", 99, "not a schema of this version: format"),
        ("formula", {"text": "y ~ open('x')"}, "not a schema of this version: formula"),
        ("columns", VALUES["deep"], "not a schema of this version: columns"),
    ],
)
def test_a_schema_is_checked_when_it_is_read(honest, field, value, words):
    from mooring.runs.directory import open_run

    content = open_run(honest[0] / "fit").schema
    assert Schema.from_content(content).target == "y"
    with pytest.raises(RequestError) as error:
        Schema.from_content(content | {field: value})
    assert words in str(error.value) and "\n" not in str(error.value)
