"""A federation over Flower's messages: the simulator's numbers, whatever happens to clients, server and letters."""

import errno
import os
import random
import shutil
from dataclasses import fields, is_dataclass
from typing import ClassVar

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import ttest_1samp

pytest.importorskip("flwr", reason="flwr is not installed; the extra is mooring[flower]")


from mooring.algorithms.base import algorithm_names, find
from mooring.core.cohort import select
from mooring.core.errors import RequestError, WorkError
from mooring.engines import prepare
from mooring.engines.fit import fit
from mooring.engines.flower import client_requests as homes
from mooring.engines.flower import messages as flower_records
from mooring.engines.flower import messenger as posting
from mooring.engines.flower.client_node import ClientNode, run_digest
from mooring.engines.flower.client_requests import RESULT_DIR
from mooring.engines.flower.exchange import FlowerExchange
from mooring.engines.flower.messages import Payload, from_records, rebuild_tree, to_records
from mooring.engines.flower.server_run import run_federation
from mooring.engines.predict import predict
from mooring.engines.request import request
from mooring.engines.simulator import Simulator
from mooring.estimates.client_summaries import LinearStats
from mooring.runs.atomic_files import read_json
from mooring.runs.directory import open_run
from mooring.runs.sections import FederationSection
from mooring.runs.tensor_files import flatten
from tests.algorithms.cases import CASES
from tests.engines.local_grid import LocalGrid

ALGORITHMS = [name for name in algorithm_names() if not find(name).pooled]
HOW = {"target": "y", "rounds": 4, "evaluate_every": 1, "threads": 1}


def write_clients(folder, binary=False, clients=4):
    """Tables with numbers, a category, holes, and a client-specific slope."""
    rng = np.random.default_rng(5)
    folder.mkdir()
    for i in range(clients):
        n = 24 + 3 * i
        frame = pd.DataFrame(rng.normal(size=(n, 2)) * 3 + 1, columns=["a", "b"])
        frame["colour"] = rng.choice(["red", "green", "blue"], n)
        score = frame["a"] - frame["b"] * (1 + i) / 4 + (frame["colour"] == "red") + rng.normal(size=n)
        frame.loc[rng.random(n) < 0.1, "b"] = None
        frame["y"] = np.where(score > score.median(), "yes", "no") if binary else score
        frame.to_csv(folder / f"site {i}.csv", index=False)
    return folder


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """A folder of client tables for each kind of target."""
    folder = tmp_path_factory.mktemp("tables")
    return {kind: write_clients(folder / kind, kind == "binary") for kind in ("regression", "binary")}


@pytest.fixture
def table(tmp_path):
    return write_clients(tmp_path / "clients")


def run_of(folder, name="fedprox_personal", fields=None, federation=None, **more):
    asked = request(str(folder), purpose="fit", algorithm=name, settings=fields, **HOW | more)
    known = {"clients": len(list(folder.iterdir())), "share_models": True}
    return asked.model_copy(update={"federation": FederationSection(**known | (federation or {}))})


def homes_of(run, folder, state):
    return [ClientNode(run, file, state / file.stem) for file in sorted(folder.iterdir())]


def settings_of(name):
    return dict(next(fields for other, fields, problems in CASES if other == name and "linear" in problems))


ROUNDING = 1e-12  # constants come from decompositions of one client's matrix, or of all clients' at once


def alike(one, other):
    """The same settings, numbers up to rounding."""
    if isinstance(one, float):
        return one == pytest.approx(other, rel=ROUNDING, nan_ok=True)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    if is_dataclass(one):
        same = (alike(getattr(one, part.name), getattr(other, part.name)) for part in fields(one))
        return type(one) is type(other) and all(same)
    return one == other


def assert_same(one, other):
    assert alike(one.algorithm, other.algorithm), f"{one.algorithm} is not {other.algorithm}"
    for which in ("last", "best"):
        mine, right = getattr(one, which), getattr(other, which)
        assert mine.t == right.t
        pairs = [(mine.common, right.common), (mine.models, right.models), (mine.test, right.test)]
        pairs += [] if right.alpha is None else [(mine.alpha, right.alpha)]
        for ours, theirs in pairs:
            torch.testing.assert_close(ours, theirs, rtol=ROUNDING, atol=ROUNDING, equal_nan=True)


def rows_of_the_table():
    """Every algorithm on a regression; some, and all in the long trials, on a classification."""
    for name in ALGORITHMS:
        yield pytest.param(name, "regression", id=f"{name}-regression")
        if not name.startswith("kernel"):
            marks = () if name in ("fedavg", "apfl", "fedprox_personal") else pytest.mark.slow
            yield pytest.param(name, "binary", id=f"{name}-binary", marks=marks)


@pytest.mark.parametrize("name,kind", list(rows_of_the_table()))
def test_every_algorithm_equals_the_simulator(name, kind, tables, tmp_path):
    tables = tables[kind]
    fields, more = settings_of(name), {} if find(name).full_participation else {"participation": 3}
    run = run_of(tables, name, fields, **more)
    apart = run_federation(run, LocalGrid(homes_of(run, tables, tmp_path / "state")), tmp_path / "run")
    here = fit(tables, algorithm=name, settings=fields, **HOW, **more)
    assert_same(apart.trained, here.trained)
    ours, theirs = (result.job.clients.schema.model_dump(exclude={"digest"}) for result in (apart, here))
    assert ours == theirs
    np.testing.assert_allclose(apart.clients["local"], here.clients["local"], rtol=1e-9)


@pytest.mark.parametrize("kind", ["regression", "binary"])
def test_settings_that_are_settled_from_answers(kind, tables, tmp_path):
    tables, lam = tables[kind], "aer"
    run = run_of(tables, "fedprox_personal", {"lam": lam})
    apart = run_federation(run, LocalGrid(homes_of(run, tables, tmp_path / "state")), tmp_path / "run")
    assert_same(apart.trained, fit(tables, algorithm="fedprox_personal", settings={"lam": lam}, **HOW).trained)


QUICK = {("fedprox_personal", 17), ("apfl", 34), ("apfl", 47), ("scaffold", 58)}  # the others are long trials


class Killed(BaseException):
    """As abrupt as a kill: nobody catches it."""


@pytest.mark.parametrize(
    "name,moment",
    [
        pytest.param(name, moment, marks=() if (name, moment) in QUICK else pytest.mark.slow)
        for name in ("fedprox_personal", "apfl", "scaffold")
        for moment in (3, 17, 26, 34, 47, 58, 63)
    ],
)
def test_a_killed_server_goes_on_to_the_same_models(name, moment, table, tmp_path):
    """At any letter, with clients that live for one letter only; its own new process finds what it needs on disk."""
    run = run_of(table, name)
    right = run_federation(run, LocalGrid(homes_of(run, table, tmp_path / "a")), tmp_path / "whole")

    class Brief(dict):
        def __missing__(self, node):
            raise KeyError(node)

        def __getitem__(self, node):
            return homes_of(run, table, tmp_path / "b")[node - 101]

    grid = LocalGrid(homes_of(run, table, tmp_path / "b"))
    grid.nodes = Brief(grid.nodes)

    def fate(message, node, number):
        if number == moment:
            raise Killed
        return "fine"

    grid.fate = fate
    with pytest.raises(Killed):
        run_federation(run, grid, tmp_path / "cut")
    again = LocalGrid([])
    again.nodes = grid.nodes
    found = run_federation(run, again, tmp_path / "cut")
    for which in ("last", "best"):
        one, other = getattr(found.trained, which), getattr(right.trained, which)
        assert torch.equal(one.common, other.common) and torch.equal(one.models, other.models)


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock, init = Clock(), posting.Messenger.__init__
    monkeypatch.setattr(
        posting.Messenger, "__init__", lambda self, *a, **k: init(self, *a, **k, clock=clock, sleep=clock.sleep)
    )
    return clock


def test_late_and_repeated_replies_are_dropped_and_stragglers_named(table, tmp_path, clock):
    run = run_of(table, federation={"deadline": 5.0, "quorum": 0.5})
    grid = LocalGrid(homes_of(run, table, tmp_path / "state"))

    def fate(message, node, number):
        words = from_records(message.content).fields
        if words["what"] != "local_update" or words["label"] == "local":
            return "fine"
        return {(102, 2): "late", (103, 3): "twice", (104, 3): "lost"}.get((node, words["round"][0]), "fine")

    grid.fate = fate
    said = []
    result = run_federation(run, grid, tmp_path / "run", report=said.append)
    assert list(result.rounds["accepted"]) == [4, 3, 3, 4]
    about = read_json(tmp_path / "run" / "federation.json")
    assert about["missed"] == {"site 1": 1, "site 3": 1} and about["dropped"] == 2
    assert any("'site 1' is left out of this local update: no reply in time" in sentence for sentence in said)


def test_without_a_deadline_a_client_that_comes_back_is_waited_for(table, tmp_path, clock):
    """Its node dies with the letter; the client starts again under another node, and the numbers are the same."""
    run = run_of(table)
    right = run_federation(run, LocalGrid(homes_of(run, table, tmp_path / "a")), tmp_path / "whole")
    grid = LocalGrid(homes_of(run, table, tmp_path / "b"))

    def fate(message, node, number):
        words = from_records(message.content).fields
        if node == 102 and words["what"] == "local_update" and words["round"][0] == 3:
            del grid.nodes[102]
            grid.nodes[205] = homes_of(run, table, tmp_path / "b")[1]
            return "lost"
        return "fine"

    grid.fate = fate
    said = []
    assert_same(run_federation(run, grid, tmp_path / "run", report=said.append).trained, right.trained)
    assert "client 'site 1' reconnected" in said


def test_a_client_started_again_under_its_old_node_is_asked_again(table, tmp_path, clock):
    """With a key a client has the same node for ever; only the time of its activation tells that it was killed."""
    run = run_of(table)
    right = run_federation(run, LocalGrid(homes_of(run, table, tmp_path / "a")), tmp_path / "whole")
    grid = LocalGrid(homes_of(run, table, tmp_path / "b"))

    def fate(message, node, number):
        words = from_records(message.content).fields
        if node == 102 and words["what"] == "local_update" and words["round"][0] == 3 and not grid.since:
            grid.since[102] = "later"
            return "lost"
        return "fine"

    grid.fate = fate
    said = []
    assert_same(run_federation(run, grid, tmp_path / "run", report=said.append).trained, right.trained)
    assert "client 'site 1' restarted" in said and "client 'site 1' reconnected" not in said


def test_a_name_belongs_to_a_key(table, tmp_path, clock):
    run = run_of(table, federation={"wait": 60.0})
    grid = LocalGrid(homes_of(run, table, tmp_path / "state"))
    grid.enrolled = {101: "site 0", 102: "site 9"}
    said = []
    assert len(run_federation(run, grid, tmp_path / "run", report=said.append).clients) == 3
    assert any("a client states the name 'site 1', but its key was enrolled for 'site 9'" in one for one in said)


def test_those_whose_replies_may_be_lost_are_asked_again(table, tmp_path, clock):
    """Two replies of one pull never come, and nobody sets a deadline: the models are those of a good line."""
    run = run_of(table, "apfl", rounds=3, federation={"wait": 60.0})
    grid = LocalGrid(homes_of(run, table, tmp_path / "state"))
    pull, lost = grid.pull_messages, []

    def fate(message, node, number):
        words = from_records(message.content).fields
        if words["what"] == "local_update" and words["round"][0] == 2 and node in (102, 103) and node not in lost:
            lost.append(node)
            grid.lost = True
            return "lost"
        return "fine"

    def pull_messages(message_ids):
        grid.lost = False
        return pull(message_ids)

    grid.fate, grid.pull_messages = fate, pull_messages
    result = run_federation(run, grid, tmp_path / "run")
    assert lost == [102, 103]
    right = run_federation(run, LocalGrid(homes_of(run, table, tmp_path / "a")), tmp_path / "whole")
    assert_same(result.trained, right.trained)


def test_a_silent_client_ends_the_wait_in_one_sentence(table, tmp_path, clock):
    run = run_of(table, federation={"wait": 60.0})
    grid = LocalGrid(homes_of(run, table, tmp_path / "state"))
    grid.deaf = {103}
    with pytest.raises(WorkError, match=r"did not connect in 60 seconds: 3 of 4 clients are connected"):
        run_federation(run, grid, tmp_path / "run")


FAULTS = {
    "a missing column": (lambda frame: frame.drop(columns="b"), "client 'site 2' lacks column 'b'"),
    "an extra column": (lambda frame: frame.assign(c=1.0), "client 'site 2' has the extra column 'c'"),
    "another target type": (lambda frame: frame.assign(y="high"), "site 2"),
    "no target": (lambda frame: frame.drop(columns="y"), "site 2"),
    "no rows left": (lambda frame: frame.assign(y=None), "site 2"),
    "too few rows": (lambda frame: frame.head(2), "site 2"),
    "an absurd cell": (
        lambda frame: frame.assign(a=frame["a"].where(frame.index > 0, 1e30)),
        "client 'site 2', column",
    ),
}


@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=() if k % 2 == 0 else pytest.mark.slow) for k, name in enumerate(FAULTS)]
)
def test_a_client_that_does_not_fit_is_told_and_the_others_go_on(fault, table, tmp_path, clock):
    """One sentence at the server and at the client; the models are those of a federation without it."""
    spoil, sentence = FAULTS[fault]
    file = sorted(table.iterdir())[2]
    spoil(pd.read_csv(file)).to_csv(file, index=False)
    run, said = run_of(table, rounds=2, federation={"wait": 60.0}), []
    homes_ = homes_of(run, table, tmp_path / "state")
    result = run_federation(run, LocalGrid(homes_), tmp_path / "run", report=said.append)
    assert any(sentence in one for one in said if "does not take part" in one), said
    assert sentence in read_json(homes_[2].folder / "dismissed.json")["why"]
    file.unlink()
    here = fit(table, algorithm="fedprox_personal", **HOW | {"rounds": 2})
    assert_same(result.trained, here.trained)
    assert open_run(tmp_path / "run").run.federation.clients == ["site 0", "site 1", "site 3"]


@pytest.mark.parametrize("share", [0.2, 0.3, 1.0])
def test_words_in_one_clients_numbers_leave_that_client_out(share, table, tmp_path, clock):
    """The predictor stays for the others, and that client gets a sentence, however many of its cells are words."""
    file = sorted(table.iterdir())[2]
    frame = pd.read_csv(file)
    entries = pd.Series([f"n/k {row}" for row in frame.index])
    frame["a"] = frame["a"].astype(object).where(frame.index >= share * len(frame), entries)
    frame.to_csv(file, index=False)
    run, said = run_of(table, rounds=2, federation={"wait": 60.0}), []
    homes_ = homes_of(run, table, tmp_path / "state")
    result = run_federation(run, LocalGrid(homes_), tmp_path / "run", report=said.append)
    why = read_json(homes_[2].folder / "dismissed.json")["why"]
    assert "client 'site 2'" in why and "column 'a'" in why
    assert any(why in sentence for sentence in said)
    kinds = {column.name: column.kind for column in result.job.clients.schema.columns}
    assert kinds["a"] == "number"
    file.unlink()
    assert_same(result.trained, fit(table, algorithm="fedprox_personal", **HOW | {"rounds": 2}).trained)


@pytest.mark.parametrize("more,rows", [({}, 100 * 15), ({"max_rows": 40}, 40)])
def test_claimed_rows_are_bounded_and_named(more, rows, table, tmp_path, clock, monkeypatch):
    """A client that claims 1e12 rows does not own the model."""
    run, said, usual = run_of(table, "fedavg", rounds=2, federation=more), [], homes.REQUEST_HANDLERS["adopt"]

    def claim(home, payload):
        reply = usual(home, payload)
        sizes = {"train": 10**12, "validation": 10**12, "test": 10**12}
        return reply._replace(fields=reply.fields | {"sizes": sizes}) if home.name == "site 2" else reply

    monkeypatch.setitem(homes.REQUEST_HANDLERS, "adopt", claim)
    result = run_federation(
        run, LocalGrid(homes_of(run, table, tmp_path / "state")), tmp_path / "run", report=said.append
    )
    assert any(f"client 'site 2' reports {10**12} rows to train; it counts with" in sentence for sentence in said)
    share = result.job.clients.weights("size")
    assert float(share[2]) < 0.99 and result.clients["train"][2] <= 2 * rows
    assert more or any("client 'site 2' has 9" in one and "weight_cap in [training] bounds it" in one for one in said)


def test_a_client_of_another_version_gets_one_sentence(table, tmp_path, clock, monkeypatch):
    run, said, usual = run_of(table, rounds=1, federation={"wait": 60.0}), [], homes.REQUEST_HANDLERS["hello"]

    def old(home, payload):
        reply = usual(home, payload)
        words = {name: value for name, value in reply.fields.items() if name != "protocol"} | {"version": "0.0.9"}
        return reply._replace(fields=words) if home.name == "site 2" else reply

    monkeypatch.setitem(homes.REQUEST_HANDLERS, "hello", old)
    everybody = homes_of(run, table, tmp_path / "state")
    result = run_federation(run, LocalGrid(everybody), tmp_path / "run", report=said.append)
    assert len(result.clients) == 3
    assert any("client 'site 2' has Mooring 0.0.9 (protocol 1)" in one and "install the same" in one for one in said)
    heard = []
    everybody[0].report = heard.append
    everybody[0].answer("hello", Payload({"run": everybody[0].digest, "protocol": 99, "version": "9.9"}))
    assert "the server has Mooring 9.9 (protocol 99)" in heard[0]


def test_a_silence_is_explained_within_ten_seconds(table, tmp_path, clock):
    run, said = run_of(table, rounds=2, federation={"wait": 60.0, "deadline": 35.0, "quorum": 2}), []
    grid = LocalGrid(homes_of(run, table, tmp_path / "state"))

    def fate(message, node, number):
        words = from_records(message.content).fields
        return "lost" if node == 103 and words["what"] == "local_update" and words["round"][0] == 2 else "fine"

    grid.fate = fate
    run_federation(run, grid, tmp_path / "run", report=said.append)
    waits = [one for one in said if one.startswith("waiting 1") and "'local_update' of 'site 2'" in one]
    assert waits and int(waits[0].split()[1]) <= 11


def test_a_class_that_no_other_client_has(tables, tmp_path, clock):
    folder = tmp_path / "clients"
    shutil.copytree(tables["binary"], folder)
    file = sorted(folder.iterdir())[1]
    frame = pd.read_csv(file)
    frame.assign(y=frame["y"].where(frame.index > 3, "maybe")).to_csv(file, index=False)
    run, said = run_of(folder, rounds=1, target_type="binary"), []
    run_federation(run, LocalGrid(homes_of(run, folder, tmp_path / "state")), tmp_path / "run", report=said.append)
    assert any("does not take part" in one and "site 1" in one and "maybe" in one for one in said), said


def test_what_looks_odd_is_told_at_home_and_to_no_other_client(table, tmp_path, clock):
    """A code for missing in a few rows, a level spelt twice."""
    file, heard = sorted(table.iterdir())[3], []
    frame = pd.read_csv(file)
    frame["a"] = frame["a"].where(frame.index > 3, -999.0)
    frame["colour"] = frame["colour"].where(frame.index > 3, "RED")
    frame.to_csv(file, index=False)
    run = run_of(table, rounds=1)
    everybody = homes_of(run, table, tmp_path / "state")
    for home in everybody:
        home.report = lambda sentence, name=home.name: heard.append((name, sentence))
    grid, letters = LocalGrid(everybody), []
    grid.fate = lambda letter, node, number: letters.append((node, from_records(letter.content).fields)) or "fine"
    run_federation(run, grid, tmp_path / "run")
    assert {name for name, _ in heard} == {"site 3"}
    assert any("column 'a': -1000 lies" in sentence for _, sentence in heard)
    assert {node for node, words in letters if "-1000" in str(words)} == {104}
    assert any("'RED' and 'red' differ in case" in sentence for _, sentence in heard)


def test_a_client_with_another_run_file_takes_no_part(table, tmp_path, clock):
    run, said = run_of(table, rounds=2, federation={"wait": 60.0}), []
    everybody = homes_of(run, table, tmp_path / "state")
    everybody[2] = ClientNode(run_of(table, "ditto"), sorted(table.iterdir())[2], tmp_path / "state" / "x")
    result = run_federation(run, LocalGrid(everybody), tmp_path / "run", report=said.append)
    assert len(result.clients) == 3
    assert any("client 'site 2' has another run file than the server" in one for one in said)
    assert "another run file" in read_json(everybody[2].folder / "dismissed.json")["why"]


@pytest.mark.parametrize("when", ["adopt", pytest.param("begin", marks=pytest.mark.slow), "local_update"])
def test_a_full_disk_at_one_client(when, table, tmp_path, clock, monkeypatch):
    """Its own sentence at the server; the others go on, with it only as far as it can."""
    run, said = run_of(table, rounds=3, federation={"share_models": False}), []
    usual = homes.REQUEST_HANDLERS[when]

    def full(home, payload):
        with monkeypatch.context() as patch:
            if home.name == "site 2" and payload.fields.get("label") != "local":
                patch.setattr(os, "write", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
            return usual(home, payload)

    monkeypatch.setitem(homes.REQUEST_HANDLERS, when, full)
    result = run_federation(
        run, LocalGrid(homes_of(run, table, tmp_path / "state")), tmp_path / "run", report=said.append
    )
    assert any("site 2" in one and "could not be written (No space left)" in one for one in said), said
    assert len(result.clients) == (3 if when == "adopt" else 4)
    assert list(result.rounds["accepted"]) == [3, 3, 3]


def test_a_client_whose_state_was_lost_is_left_out_and_says_so(table, tmp_path):
    run = run_of(table)
    grid, gone = LocalGrid(homes_of(run, table, tmp_path / "state")), []

    def fate(message, node, number):
        words = from_records(message.content).fields
        if words["what"] == "evaluate" and words["round"][0] == 2 and not gone:
            gone.append(next((tmp_path / "state" / "site 1").rglob("fedprox_personal.safetensors")))
            gone[0].unlink()
        return "fine"

    grid.fate = fate
    said = []
    run_federation(run, grid, tmp_path / "run", report=said.append)
    assert any("'site 1' sent no model of its own; the global model is recorded" in one for one in said)
    assert sum("'site 1' is left out of this local update: client 'site 1' has no state" in one for one in said) == 2


def test_rows_that_changed_are_refused_when_a_run_goes_on(table, tmp_path):
    run = run_of(table)
    run_federation(run, LocalGrid(homes_of(run, table, tmp_path / "state")), tmp_path / "run")
    file = sorted(table.iterdir())[0]
    file.write_text("\n".join(file.read_text().split("\n")[:-3]) + "\n")
    with pytest.raises(RequestError, match=r"site 0.csv has changed since the run began"):
        run_federation(run, LocalGrid(homes_of(run, table, tmp_path / "state")), tmp_path / "run")
    with pytest.raises(RequestError, match="is another run than the run file's"):
        other = run_of(table, "ditto")
        run_federation(other, LocalGrid(homes_of(other, table, tmp_path / "state")), tmp_path / "run")


def test_personal_models_stay_home_unless_shared(table, tmp_path):
    """The server's directory has none; each client's own predicts as the simulator's does."""
    run = run_of(table, federation={"share_models": False})
    result = run_federation(run, LocalGrid(homes_of(run, table, tmp_path / "state")), tmp_path / "run")
    assert open_run(tmp_path / "run").models.personal is None and result.trained.used.alpha is None
    here = fit(table, **HOW, out=tmp_path / "here")
    rows = pd.read_csv(sorted(table.iterdir())[1])
    right, _ = predict(here.run, rows.assign(client="site 1"))
    found, _ = predict(tmp_path / "state" / "site 1" / run_digest(run) / RESULT_DIR, rows.assign(client="site 1"))
    np.testing.assert_allclose(found["y"], right["y"], rtol=1e-9)


@pytest.mark.parametrize("kind", ["regression", "binary"])
def test_each_client_has_a_verdict_of_its_own(kind, tables, tmp_path):
    """By its own test rows: the simulator's models, and the paired interval of a textbook."""
    folder = tables[kind]
    run = run_of(folder, rounds=2, checkpoint="last", federation={"share_models": False})
    everybody = homes_of(run, folder, tmp_path / "state")
    run_federation(run, LocalGrid(everybody), tmp_path / "run")
    here = fit(folder, algorithm="fedprox_personal", **HOW | {"rounds": 2, "checkpoint": "last"})
    alone = fit(folder, algorithm="local", **HOW | {"rounds": 2, "checkpoint": "last"})
    unit = here.job.clients.target_scale**here.job.task.unit_power
    for k, home in enumerate(everybody):
        told = read_json(home.folder / "done.json")
        batch = here.job.clients.test.select(torch.tensor([k])).padded()
        own, other = (result.job.task.row_risk(result.models[home.name][None], batch)[0] for result in (here, alone))
        right = ttest_1samp(unit * (other - own).numpy(), 0.0)
        interval = right.confidence_interval(0.95)
        ends = [told[f"improvement_over_local_ci_{end}"] for end in ("low", "high")]
        np.testing.assert_allclose(ends, [interval.low, interval.high], rtol=1e-6)
        np.testing.assert_allclose(told["improvement_over_local"], float(unit * (other - own).mean()), rtol=1e-6)
        assert (ends[0] <= 0 <= ends[1]) == (right.pvalue > 0.05)


@pytest.mark.parametrize("name", ["fedper", "fedrep", "fedbabu", "ditto"])
def test_personal_coefficients_go_neither_up_nor_down(name, table, tmp_path):
    """The intercept is personal: messages of rounds have the other coefficients, in both directions."""
    fields = {"personal": "head", "batch": 4, "epochs": 1}
    run = run_of(table, name, fields, rounds=2, federation={"share_models": False})
    grid = SizesOnTheWire(homes_of(run, table, tmp_path / "state"))
    apart = run_federation(run, grid, tmp_path / "run")
    here = fit(table, algorithm=name, settings=fields, **HOW | {"rounds": 2})
    torch.testing.assert_close(apart.trained.common, here.trained.common, rtol=ROUNDING, atol=ROUNDING)
    np.testing.assert_allclose(apart.clients["personal"], here.clients["personal"], rtol=1e-9)
    assert set(grid.up) == set(grid.down) == {here.job.task.dim - 1}


class SizesOnTheWire(LocalGrid):
    """Collects the sizes of models: in the server's state of each message, and in each message of a local update."""

    def __init__(self, homes):
        super().__init__(homes)
        self.down, self.up = [], []

    def push_messages(self, messages):
        messages = list(messages)
        for message in messages:
            fields, tensors = from_records(message.content)
            if fields.get("label") == "local":
                continue  # the baseline has no personal part
            self.down += [part.numel() for name, part in tensors.items() if name == "server/w"]
        return super().push_messages(messages)

    def pull_messages(self, message_ids):
        found = super().pull_messages(message_ids)
        for message in found:
            tensors = from_records(message.content).tensors
            self.up += [part.numel() for name, part in tensors.items() if name.startswith("message") and part.numel()]
        return found


def test_pooled_algorithms_are_refused(table, tmp_path):
    run = run_of(table, "pooled")
    with pytest.raises(RequestError, match="needs all rows in one place"):
        run_federation(run, LocalGrid(homes_of(run, table, tmp_path / "state")), tmp_path / "run")


@pytest.mark.parametrize("largest", [flower_records.MAX_INLINE_TENSOR_BYTES, 0], ids=["small", "large"])
def test_parcels_come_out_as_they_went_in(largest, monkeypatch):
    monkeypatch.setattr(flower_records, "MAX_INLINE_TENSOR_BYTES", largest)
    rng = torch.Generator().manual_seed(0)
    state = LinearStats(
        torch.tensor([3.0]), torch.rand(1, 2, 2, generator=rng), None, torch.tensor([[True, False], [False, True]])
    )
    words = {"a": 0.1 + 0.2, "b": [1, None, "é"], "c": {"d": float("nan")}}
    found = from_records(
        to_records(Payload(words, flatten("x", state) | {"deep": torch.zeros(0, 3, dtype=torch.int64)}))
    )
    assert repr(found.fields) == repr(words)
    twin = rebuild_tree("x", found.tensors)
    assert twin._fields == state._fields and twin.moment is None
    assert all(torch.equal(one, other) for one, other in zip(twin, state) if other is not None)
    assert found.tensors["deep"].shape == (0, 3) and found.tensors["deep"].dtype == torch.int64


def test_a_message_of_another_form_is_left_out_and_named(table, tmp_path, clock, monkeypatch):
    """What a client sends is held to what the algorithm makes of a row, not to what most clients send."""
    run = run_of(table, "fedavg")
    forged = {
        ("site 0", 1): {"message": torch.zeros(1, 99, dtype=torch.float64)},
        ("site 1", 2): {"message": torch.zeros(1, 5)},
        ("site 2", 3): {},
        ("site 3", 4): {"message/x y": torch.zeros(1)},
    }
    visit = homes.REQUEST_HANDLERS["local_update"]

    def lie(home, payload):
        reply = visit(home, payload)
        turn = (home.name, payload.fields["round"][0])
        known = forged.get(turn) if payload.fields["label"] != "local" else None
        return reply if known is None else reply._replace(tensors=known)

    monkeypatch.setitem(homes.REQUEST_HANDLERS, "local_update", lie)
    result = run_federation(run, LocalGrid(homes_of(run, table, tmp_path / "state")), tmp_path / "run")
    assert list(result.rounds["accepted"]) == [3, 3, 3, 3]
    why = result.trained.outcome.state.offenders
    assert "has the shape [99]" in why[0] and "float32" in why[1]
    assert "where numbers are right" in why[2] and "names a tensor 'message/x y'" in why[3]


class Only(Simulator):
    """The simulator with the replies of some clients only: `kept` by round."""

    kept: ClassVar[dict] = {}

    def ask(self, server, cohort, round, deadline=None):
        replies = super().ask(server, cohort, round, deadline)
        keep = torch.isin(replies.who, torch.tensor(self.kept[round.t], dtype=torch.long))
        return replies._replace(who=replies.who[keep], message=select(replies.message, keep))


@pytest.mark.parametrize("rate", [0.3, *(pytest.param(rate, marks=pytest.mark.slow) for rate in (0.0, 0.6, 0.9))])
def test_drop_out_in_every_phase(rate, table, tmp_path, clock, monkeypatch):
    """Letters of rounds and evaluations are lost, late or doubled: each round ends by its deadline with a quorum, or
    the run says why not; and what was merged is exactly what those clients make of that round."""
    run = run_of(
        table, "scaffold", rounds=8, checkpoint="last", federation={"deadline": 5.0, "quorum": 0.25, "wait": 60.0}
    )
    run = run.model_copy(update={"federation": run.federation.model_copy(update={"share_models": False})})
    grid, rng, accepted = LocalGrid(homes_of(run, table, tmp_path / "state")), random.Random(7), {}

    def fate(message, node, number):
        words = from_records(message.content).fields
        if words["what"] not in ("local_update", "evaluate", "done") or words.get("label") == "local":
            return "fine"
        return rng.choice(["lost", "late", "twice"]) if rng.random() < rate else "fine"

    grid.fate = fate
    accept = FlowerExchange.accept

    def noted(self, who, round):
        if self.algorithm.name == "scaffold":
            accepted[round.t] = who.tolist()
        accept(self, who, round)

    monkeypatch.setattr(FlowerExchange, "accept", noted)
    begun = clock.now
    try:
        result = run_federation(run, grid, tmp_path / "run")
    except WorkError as error:
        assert rate > 0.5 and ("no reply for 60 seconds" in str(error) or "no client answered" in str(error))
        return
    assert clock.now - begun < 20 * 60
    assert rate == 0 or any(len(who) < len(table_of(table)) for who in accepted.values())
    monkeypatch.setattr(Only, "kept", accepted)
    monkeypatch.setattr(prepare, "Simulator", Only)
    here = fit(table, algorithm="scaffold", **HOW | {"rounds": 8, "checkpoint": "last"})
    torch.testing.assert_close(result.trained.last.common, here.trained.last.common, rtol=1e-12, atol=1e-12)


def table_of(folder):
    return sorted(folder.iterdir())


class Overheard(LocalGrid):
    """A grid that keeps the words of all replies."""

    def __init__(self, homes):
        super().__init__(homes)
        self.heard = []

    def pull_messages(self, message_ids):
        found = super().pull_messages(message_ids)
        self.heard += [repr(from_records(message.content).fields) for message in found]
        return found


def test_rare_levels_are_not_named_and_the_schema_is_the_pooled_one(table, tmp_path):
    """ "ochre" is rare everywhere and in all, "mauve" at each client and not in all, "teal" at one client only."""
    for i, file in enumerate(sorted(table.iterdir())):
        frame = pd.read_csv(file)
        frame.loc[:1, "colour"] = "mauve"
        frame.loc[13 : 15 if i == 0 else 12, "colour"] = "ochre"
        frame.loc[3 : 4 if i else 12, "colour"] = "teal"
        frame.to_csv(file, index=False)
    run = run_of(table, rounds=1, min_category_rows=4)
    grid = Overheard(homes_of(run, table, tmp_path / "state"))
    apart = run_federation(run, grid, tmp_path / "run")
    here = fit(table, algorithm="fedprox_personal", **HOW | {"rounds": 1, "min_category_rows": 4})
    ours, theirs = (result.job.clients.schema.model_dump(exclude={"digest"}) for result in (apart, here))
    assert ours == theirs
    colour = next(column for column in here.job.clients.schema.columns if column.name == "colour")
    assert colour.other and {"mauve", "teal"} <= set(colour.levels) and "ochre" not in colour.levels
    assert not any("ochre" in words for words in grid.heard) and any("mauve" in words for words in grid.heard)
