"""Faults of clients, messages and disks: what a federation does about them, and whom it names."""

import errno
import os
import random
import shutil
from typing import ClassVar

import pandas as pd
import pytest
import torch

from mooring.core.cohort import select
from mooring.core.errors import WorkError
from mooring.engines import prepare
from mooring.engines.fit import fit
from mooring.engines.simulator import Simulator
from mooring.remote.client_node import ClientNode
from mooring.remote.exchange import RemoteExchange
from mooring.remote.memory import MemoryTransport
from mooring.remote.messages import Payload
from mooring.remote.requests import REQUESTS
from mooring.remote.server_run import run_federation
from mooring.runs.atomic_files import read_json
from mooring.runs.directory import open_run
from tests.remote.federation_runs import HOW, answer_with, assert_same, make_clients, make_run


def test_late_and_repeated_replies_are_dropped_and_stragglers_named(table, tmp_path, clock):
    run = make_run(table, federation={"deadline": 5.0, "quorum": 0.5})
    grid = MemoryTransport(make_clients(run, table, tmp_path / "state"))

    def fate(message, node, number):
        words = message.fields
        if words["what"] != "local_update" or words["label"] == "local":
            return "fine"
        return {("102", 2): "late", ("103", 3): "twice", ("104", 3): "lost"}.get((node, words["round"][0]), "fine")

    grid.fate = fate
    reports = []
    result = run_federation(run, grid, tmp_path / "run", report=reports.append)
    assert list(result.rounds["accepted"]) == [4, 3, 3, 4]
    about = read_json(tmp_path / "run" / "federation.json")
    assert about["missed"] == {"site 1": 1, "site 3": 1} and about["dropped"] == 2
    assert any("'site 1' is left out of this local update: no reply in time" in sentence for sentence in reports)


def test_without_a_deadline_the_server_waits_for_a_client(table, tmp_path, clock):
    """Its node ends with the message; the client restarts under another node, and the numbers are the same."""
    run = make_run(table)
    right = run_federation(run, MemoryTransport(make_clients(run, table, tmp_path / "a")), tmp_path / "whole")
    grid = MemoryTransport(make_clients(run, table, tmp_path / "b"))

    def fate(message, node, number):
        words = message.fields
        if node == "102" and words["what"] == "local_update" and words["round"][0] == 3:
            del grid.clients["102"]
            grid.clients["205"] = make_clients(run, table, tmp_path / "b")[1]
            return "lost"
        return "fine"

    grid.fate = fate
    reports = []
    assert_same(run_federation(run, grid, tmp_path / "run", report=reports.append).trained, right.trained)
    assert "client 'site 1' reconnected" in reports


def test_a_client_that_restarts_under_its_node_is_asked_again(table, tmp_path, clock):
    """With a key a client has the same node for ever; only the time of its activation tells that it was killed."""
    run = make_run(table)
    right = run_federation(run, MemoryTransport(make_clients(run, table, tmp_path / "a")), tmp_path / "whole")
    grid = MemoryTransport(make_clients(run, table, tmp_path / "b"))

    def fate(message, node, number):
        words = message.fields
        if node == "102" and words["what"] == "local_update" and words["round"][0] == 3 and not grid.sessions:
            grid.sessions["102"] = "later"
            return "lost"
        return "fine"

    grid.fate = fate
    reports = []
    assert_same(run_federation(run, grid, tmp_path / "run", report=reports.append).trained, right.trained)
    assert "client 'site 1' restarted" in reports and "client 'site 1' reconnected" not in reports


def test_a_name_belongs_to_a_key(table, tmp_path, clock):
    run = make_run(table, federation={"wait": 60.0})
    grid = MemoryTransport(make_clients(run, table, tmp_path / "state"))
    grid.enrolled = {"101": "site 0", "102": "site 9"}
    reports = []
    assert len(run_federation(run, grid, tmp_path / "run", report=reports.append).clients) == 3
    assert any("a client states the name 'site 1', but its key was enrolled for 'site 9'" in text for text in reports)


def test_a_silent_client_ends_the_wait_in_one_sentence(table, tmp_path, clock):
    run = make_run(table, federation={"wait": 60.0})
    grid = MemoryTransport(make_clients(run, table, tmp_path / "state"))
    grid.deaf = {"103"}
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
def test_a_client_whose_table_does_not_fit_is_left_out(fault, table, tmp_path, clock):
    """One sentence at the server and at the client; the models are those of a federation without it."""
    spoil, sentence = FAULTS[fault]
    file = sorted(table.iterdir())[2]
    spoil(pd.read_csv(file)).to_csv(file, index=False)
    run, reports = make_run(table, rounds=2, federation={"wait": 60.0}), []
    clients = make_clients(run, table, tmp_path / "state")
    result = run_federation(run, MemoryTransport(clients), tmp_path / "run", report=reports.append)
    assert any(sentence in text for text in reports if "does not take part" in text), reports
    assert sentence in read_json(clients[2].folder / "dismissed.json")["why"]
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
    run, reports = make_run(table, rounds=2, federation={"wait": 60.0}), []
    clients = make_clients(run, table, tmp_path / "state")
    result = run_federation(run, MemoryTransport(clients), tmp_path / "run", report=reports.append)
    why = read_json(clients[2].folder / "dismissed.json")["why"]
    assert "client 'site 2'" in why and "column 'a'" in why
    assert any(why in sentence for sentence in reports)
    kinds = {column.name: column.kind for column in result.job.clients.schema.columns}
    assert kinds["a"] == "number"
    file.unlink()
    assert_same(result.trained, fit(table, algorithm="fedprox_personal", **HOW | {"rounds": 2}).trained)


@pytest.mark.parametrize("more,rows", [({}, 100 * 15), ({"max_rows": 40}, 40)])
def test_claimed_rows_are_bounded_and_named(more, rows, table, tmp_path, clock, monkeypatch):
    """A client that claims 1e12 rows does not own the model."""
    run, reports, usual = (
        make_run(table, "fedavg", rounds=2, federation=more),
        [],
        REQUESTS["adopt"].answer,
    )

    def claim(home, payload):
        reply = usual(home, payload)
        sizes = {"train": 10**12, "validation": 10**12, "test": 10**12}
        return reply._replace(fields=reply.fields | {"sizes": sizes}) if home.name == "site 2" else reply

    answer_with(monkeypatch, "adopt", claim)
    result = run_federation(
        run, MemoryTransport(make_clients(run, table, tmp_path / "state")), tmp_path / "run", report=reports.append
    )
    assert any(f"client 'site 2' reports {10**12} rows to train; it counts with" in sentence for sentence in reports)
    share = result.job.clients.weights("size")
    assert float(share[2]) < 0.99 and result.clients["train"][2] <= 2 * rows
    assert more or any(
        "client 'site 2' has 9" in text and "weight_cap in [training] bounds it" in text for text in reports
    )


def test_a_client_of_another_version_gets_one_sentence(table, tmp_path, clock, monkeypatch):
    run, reports, usual = (
        make_run(table, rounds=1, federation={"wait": 60.0}),
        [],
        REQUESTS["hello"].answer,
    )

    def old(home, payload):
        reply = usual(home, payload)
        words = {name: value for name, value in reply.fields.items() if name != "protocol"} | {"version": "0.0.9"}
        return reply._replace(fields=words) if home.name == "site 2" else reply

    answer_with(monkeypatch, "hello", old)
    clients = make_clients(run, table, tmp_path / "state")
    result = run_federation(run, MemoryTransport(clients), tmp_path / "run", report=reports.append)
    assert len(result.clients) == 3
    assert any(
        "client 'site 2' has Mooring 0.0.9 (protocol 1)" in text and "install the same" in text for text in reports
    )
    heard = []
    clients[0].report = heard.append
    clients[0].answer("hello", Payload({"run": clients[0].digest, "protocol": 99, "version": "9.9"}))
    assert "the server has Mooring 9.9 (protocol 99)" in heard[0]


def test_a_silence_is_explained_within_ten_seconds(table, tmp_path, clock):
    run, reports = make_run(table, rounds=2, federation={"wait": 60.0, "deadline": 35.0, "quorum": 2}), []
    grid = MemoryTransport(make_clients(run, table, tmp_path / "state"))

    def fate(message, node, number):
        words = message.fields
        return "lost" if node == "103" and words["what"] == "local_update" and words["round"][0] == 2 else "fine"

    grid.fate = fate
    run_federation(run, grid, tmp_path / "run", report=reports.append)
    waits = [text for text in reports if text.startswith("waiting 1") and "'local_update' of 'site 2'" in text]
    assert waits and int(waits[0].split()[1]) <= 11


def test_a_class_that_no_other_client_has(tables, tmp_path, clock):
    folder = tmp_path / "clients"
    shutil.copytree(tables["binary"], folder)
    file = sorted(folder.iterdir())[1]
    frame = pd.read_csv(file)
    frame.assign(y=frame["y"].where(frame.index > 3, "maybe")).to_csv(file, index=False)
    run, reports = make_run(folder, rounds=1, target_type="binary"), []
    run_federation(
        run, MemoryTransport(make_clients(run, folder, tmp_path / "state")), tmp_path / "run", report=reports.append
    )
    assert any("does not take part" in text and "site 1" in text and "maybe" in text for text in reports), reports


def test_suspicious_values_are_reported_to_their_client_only(table, tmp_path, clock):
    """A code for missing in a few rows, a level spelt twice."""
    file, heard = sorted(table.iterdir())[3], []
    frame = pd.read_csv(file)
    frame["a"] = frame["a"].where(frame.index > 3, -999.0)
    frame["colour"] = frame["colour"].where(frame.index > 3, "RED")
    frame.to_csv(file, index=False)
    run = make_run(table, rounds=1)
    clients = make_clients(run, table, tmp_path / "state")
    for home in clients:
        home.report = lambda sentence, name=home.name: heard.append((name, sentence))
    grid, requests = MemoryTransport(clients), []
    grid.fate = lambda message, node, number: requests.append((node, message.fields)) or "fine"
    run_federation(run, grid, tmp_path / "run")
    assert {name for name, _ in heard} == {"site 3"}
    assert any("column 'a': -999 lies" in sentence for _, sentence in heard)
    assert {node for node, words in requests if "about -1000 lies" in str(words)} == {"104"}
    assert any("'red' and 'RED' differ in case" in sentence for _, sentence in heard)


def test_a_client_with_another_run_file_takes_no_part(table, tmp_path, clock):
    run, reports = make_run(table, rounds=2, federation={"wait": 60.0}), []
    clients = make_clients(run, table, tmp_path / "state")
    clients[2] = ClientNode(make_run(table, "ditto"), sorted(table.iterdir())[2], tmp_path / "state" / "x")
    result = run_federation(run, MemoryTransport(clients), tmp_path / "run", report=reports.append)
    assert len(result.clients) == 3
    assert any("client 'site 2' has another run file than the server" in text for text in reports)
    assert "another run file" in read_json(clients[2].folder / "dismissed.json")["why"]


@pytest.mark.parametrize("when", ["adopt", pytest.param("begin", marks=pytest.mark.slow), "local_update"])
def test_a_full_disk_at_one_client(when, table, tmp_path, clock, monkeypatch):
    """Its own sentence at the server; the others continue, with it only as far as it can."""
    run, reports = make_run(table, rounds=3, federation={"share_models": False}), []
    usual = REQUESTS[when].answer

    def full(home, payload):
        with monkeypatch.context() as patch:
            if home.name == "site 2" and payload.fields.get("label") != "local":
                patch.setattr(os, "write", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
            return usual(home, payload)

    answer_with(monkeypatch, when, full)
    result = run_federation(
        run, MemoryTransport(make_clients(run, table, tmp_path / "state")), tmp_path / "run", report=reports.append
    )
    assert any("site 2" in text and "could not be written (No space left)" in text for text in reports), reports
    assert len(result.clients) == (3 if when == "adopt" else 4)
    assert list(result.rounds["accepted"]) == [3, 3, 3]


def test_a_client_whose_state_was_lost_is_left_out_with_a_reason(table, tmp_path):
    run = make_run(table)
    grid, gone = MemoryTransport(make_clients(run, table, tmp_path / "state")), []

    def fate(message, node, number):
        words = message.fields
        if words["what"] == "evaluate" and words["round"][0] == 2 and not gone:
            gone.append(next((tmp_path / "state" / "site 1").rglob("fedprox_personal.safetensors")))
            gone[0].unlink()
        return "fine"

    grid.fate = fate
    reports = []
    run_federation(run, grid, tmp_path / "run", report=reports.append)
    assert any("'site 1' sent no model of its own; the global model is recorded" in text for text in reports)
    assert (
        sum("'site 1' is left out of this local update: client 'site 1' has no state" in text for text in reports) == 2
    )


def test_a_message_of_another_form_is_left_out_and_named(table, tmp_path, clock, monkeypatch):
    """What a client sends is held to what the algorithm makes of a row, not to what most clients send."""
    run = make_run(table, "fedavg")
    forged = {
        ("site 0", 1): {"message": torch.zeros(1, 99, dtype=torch.float64)},
        ("site 1", 2): {"message": torch.zeros(1, 5)},
        ("site 2", 3): {},
        ("site 3", 4): {"message/x y": torch.zeros(1)},
    }
    visit = REQUESTS["local_update"].answer

    def lie(home, payload):
        reply = visit(home, payload)
        turn = (home.name, payload.fields["round"][0])
        known = forged.get(turn) if payload.fields["label"] != "local" else None
        return reply if known is None else reply._replace(tensors=known)

    answer_with(monkeypatch, "local_update", lie)
    result = run_federation(run, MemoryTransport(make_clients(run, table, tmp_path / "state")), tmp_path / "run")
    assert list(result.rounds["accepted"]) == [3, 3, 3, 3]
    why = result.trained.outcome.state.offenders
    assert "has the shape [99]" in why[0] and "float32" in why[1]
    assert "where numbers are right" in why[2] and "names a tensor 'message/x y'" in why[3]


class PartialSimulator(Simulator):
    """The simulator with the replies of some clients only: `kept` by round."""

    kept: ClassVar[dict] = {}

    def ask(self, server, cohort, round, deadline=None):
        replies = super().ask(server, cohort, round, deadline)
        keep = torch.isin(replies.clients, torch.tensor(self.kept[round.t], dtype=torch.long))
        return replies._replace(clients=replies.clients[keep], message=select(replies.message, keep))


@pytest.mark.parametrize("rate", [0.3, *(pytest.param(rate, marks=pytest.mark.slow) for rate in (0.0, 0.6, 0.9))])
def test_drop_out_in_every_phase(rate, table, tmp_path, clock, monkeypatch):
    """Letters of rounds and evaluations are lost, late or doubled: each round ends by its deadline with a quorum, or
    the run says why not; and what was merged is exactly what those clients make of that round."""
    run = make_run(
        table, "scaffold", rounds=8, checkpoint="last", federation={"deadline": 5.0, "quorum": 0.25, "wait": 60.0}
    )
    run = run.model_copy(update={"federation": run.federation.model_copy(update={"share_models": False})})
    grid, rng, accepted = MemoryTransport(make_clients(run, table, tmp_path / "state")), random.Random(7), {}

    def fate(message, node, number):
        words = message.fields
        if words["what"] not in ("local_update", "evaluate", "done") or words.get("label") == "local":
            return "fine"
        return rng.choice(["lost", "late", "twice"]) if rng.random() < rate else "fine"

    grid.fate = fate
    accept = RemoteExchange.accept

    def noted(self, who, round):
        if self.algorithm.name == "scaffold":
            accepted[round.t] = who.tolist()
        accept(self, who, round)

    monkeypatch.setattr(RemoteExchange, "accept", noted)
    begun = clock.now
    try:
        result = run_federation(run, grid, tmp_path / "run")
    except WorkError as error:
        assert rate > 0.5 and ("no reply for 60 seconds" in str(error) or "no client answered" in str(error))
        return
    assert clock.now - begun < 20 * 60
    assert rate == 0 or any(len(who) < len(list_tables(table)) for who in accepted.values())
    monkeypatch.setattr(PartialSimulator, "kept", accepted)
    monkeypatch.setattr(prepare, "Simulator", PartialSimulator)
    here = fit(table, algorithm="scaffold", **HOW | {"rounds": 8, "checkpoint": "last"})
    torch.testing.assert_close(result.trained.last.common, here.trained.last.common, rtol=1e-12, atol=1e-12)


def list_tables(folder):
    return sorted(folder.iterdir())
