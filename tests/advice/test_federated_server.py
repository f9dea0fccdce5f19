"""Recommendations over machines: the same as in one process, resumed after kills, within each client's policy."""

import json

import numpy as np
import pytest
import torch

from mooring.advice.federated.client import AdviceClientNode
from mooring.advice.federated.plan import list_steps
from mooring.advice.federated.program import advise_together, home_rows, shape_of
from mooring.commands.federation import show_federation
from mooring.core.errors import RequestError, WorkError
from mooring.engines.predict import predict
from mooring.remote.client_requests import DONE_FILE, RESULT_DIR
from mooring.remote.disclosure import SENT_FILE, Policy
from mooring.remote.transcript import TAG_WORDS, Journal
from mooring.report.terminal import Display
from mooring.runs.atomic_files import read_json
from mooring.runs.directory import open_run
from tests.remote.masked_runs import NAMES, Watched, clock, identities, make_nodes, run, write_run, write_tables

__all__ = ["clock"]  # a fixture


class Killed(BaseException):
    """As abrupt as a kill: nobody catches it."""


@pytest.fixture
def federation(tmp_path):
    tables = write_tables(tmp_path)
    return write_run(tables), tables


def models_of(nodes):
    """What each client has, to the bit."""
    out = []
    for node in nodes:
        own = open_run(node.folder / RESULT_DIR).models
        out.append((read_json(node.folder / DONE_FILE), own.common.tolist(), own.personal.tolist()))
    return out


@pytest.mark.parametrize("classes", [False, True], ids=["linear", "two classes"])
def test_machines_and_one_process_have_the_same_numbers_to_the_bit(classes, tmp_path, clock):
    tables = write_tables(tmp_path, classes=classes)
    federation, said = write_run(tables), []
    nodes = make_nodes(federation, tables, tmp_path / "state")
    result, transport = run(federation, nodes, tmp_path / "run", report=said.append)
    homes = [home_rows(node.task, node.clients) for node in nodes]
    record = []
    here, own = advise_together(shape_of(nodes[0].task, nodes[0].clients.schema), homes, 0.01, 0.95, record)
    assert result.result.recommended == here.recommended and result.result.confidence == here.confidence
    np.testing.assert_array_equal(result.result.federation.w, here.federation.w)
    for node, mine in zip(nodes, own):
        kept = node.running.result[1]
        assert kept.recommendations.recommended.tolist() == mine.recommendations.recommended.tolist()
        for name in ("local", "global_", "personal"):
            np.testing.assert_array_equal(getattr(kept.models, name).v, getattr(mine.models, name).v)
    sent = [len(total) - 1 - TAG_WORDS for total in transport.totals()][-len(record) :]
    assert sent == [size for _, size in record]  # in this order, after the agreement on a schema
    shape = shape_of(nodes[0].task, nodes[0].clients.schema)
    planned = {part.step.name: part.numbers for part in list_steps(5, shape, here.federation.extra)}
    assert all(size <= planned[name] for name, size in record)
    assert sum(text.startswith("client") for text in said) == 5 and result.headline.startswith("Recommended: ")


def test_each_client_has_its_model_and_the_server_what_was_declared(federation, tmp_path, clock):
    said = []
    nodes = make_nodes(*federation, tmp_path / "state", report=said.append)
    result, _ = run(federation[0], nodes, tmp_path / "run")
    stored = open_run(tmp_path / "run")
    assert stored.models.personal is None
    rows = {row["client"]: row for row in stored.advice["clients"]}
    for node in nodes:
        done = read_json(node.folder / DONE_FILE)
        assert set(rows[node.name]) >= {"client", "rows", "recommended", "local", "global", "personal"}
        assert rows[node.name]["recommended"] == done["recommended"] and rows[node.name]["rows"] == 30
        assert all(rows[node.name][kind] == float(f"{done[kind]:.2g}") for kind in ("local", "global", "personal"))
        assert done["said"].startswith("Use ")
        predicted = predict(node.folder / RESULT_DIR, node.path)[0]
        assert list(predicted["client"]) == [node.name] * 30 and np.isfinite(predicted["y"]).all()
        sent = [json.loads(line) for line in (node.folder / SENT_FILE).read_text().splitlines()]
        asked = [line["request"] for line in sent if line["request"] != "step"]
        assert asked == ["hello", "roll_call", "cohort", "declare"]
        assert any("under masks" in line["sent"] for line in sent)
    assert sum(result.result.recommended.values()) == 5
    assert torch.isfinite(stored.models.common).all()


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_client_that_is_killed_continues_with_the_same_bytes(moment, federation, tmp_path, clock, monkeypatch):
    """A kill of every client's program at each of its writes, before or after the file is there; everything is started
    anew, and the server begins again."""
    known = identities(NAMES)

    def nodes(state):
        files = sorted(federation[1].iterdir())
        return [AdviceClientNode(federation[0], file, state / file.stem, identity=known[file.stem]) for file in files]

    write, kills, left = Journal.write, 0, 0

    def killed(self, number, record):
        nonlocal left
        left -= 1
        if left == 0 and moment == "before":
            raise Killed
        write(self, number, record)
        if left == 0:
            raise Killed

    monkeypatch.setattr(Journal, "write", killed)
    sent, result, place = {}, None, tmp_path / "killed"
    while result is None:
        left = 7  # each process of all writes so many answers
        transport = Watched(nodes(place / "state"))
        try:
            result, _ = run(federation[0], None, place / "run", transport=transport)
        except Killed:
            kills += 1
        for name, what, request, content in transport.sent:
            if what == "step":
                key = name, request.fields["number"]
                assert sent.setdefault(key, content) == content  # never other bytes for a step
    assert kills > 5
    homes = [home_rows(node.task, node.clients) for node in transport.clients.values()]
    node = next(iter(transport.clients.values()))
    here, own = advise_together(shape_of(node.task, node.clients.schema), homes, 0.01, 0.95)
    assert result.result.recommended == here.recommended
    for (done, common, personal), mine in zip(models_of(transport.clients.values()), own):
        kind = str(mine.recommendations.recommended[0])
        models = {"local": mine.models.local.v, "global": mine.models.global_.v, "personal": mine.models.personal.v}
        assert done["recommended"] == kind and common == here.federation.w.tolist()
        assert personal == [models[kind].tolist()]


@pytest.mark.parametrize("at", [1, 5, 9])
def test_a_server_that_is_killed_begins_again_and_ends_the_same(at, federation, tmp_path, clock):
    nodes = make_nodes(*federation, tmp_path / "state")
    known, count = Watched(nodes), 0

    class Stops(Watched):
        def pull(self, numbers):
            nonlocal count
            count += any(what == "step" for _, what, *_ in self.sent[-5:])
            if count == at:
                raise Killed
            return super().pull(numbers)

    with pytest.raises(Killed):
        run(federation[0], None, tmp_path / "run", transport=Stops(nodes))
    assert not (tmp_path / "run").exists()
    result, _ = run(federation[0], None, tmp_path / "run", transport=known)
    again, _ = run(federation[0], None, tmp_path / "again", transport=Watched(nodes))
    assert result.record == again.record


def test_policies_of_clients(federation, tmp_path, clock):
    """One lets no result leave, and is advised all the same; one lets no sums leave, and ends the run by its name."""
    nodes = make_nodes(*federation, tmp_path / "state")
    nodes[1].policy = Policy(quantities=["advice"])
    result, _ = run(federation[0], nodes, tmp_path / "run")
    assert list(result.clients["client"]) == [name for name in NAMES if name != "bob"]
    assert (nodes[1].folder / DONE_FILE).exists() and sum(result.result.recommended.values()) == 5
    for policy, why in [
        (Policy(quantities=["results"]), "'dora' does not send advice"),
        (Policy(min_clients=6), "at least 6 must be in it"),
        (Policy(plans=["0" * 32]), "does not list the plan"),
    ]:
        nodes = make_nodes(*federation, tmp_path / why / "state")
        nodes[3].policy = policy
        with pytest.raises(RequestError, match=why):
            run(federation[0], nodes, tmp_path / why / "run")


@pytest.mark.parametrize(
    "data, why",
    [('time_column = "x0"', "time_column does not apply"), ('formula = "y ~ x0"', "formula does not apply")],
)
def test_what_cannot_be_added_up_is_refused_before_anything_is_sent(data, why, tmp_path, clock):
    tables = write_tables(tmp_path)
    target = 'target = "y"\n'
    federation = write_run(tables, data)
    if "formula" in data:
        path = tmp_path / "run.toml"
        path.write_text(path.read_text().replace(target, ""))
    transport = Watched([])
    with pytest.raises(RequestError, match=why):
        run(federation, None, tmp_path / "run", transport=transport)
    assert not transport.sent


def test_clients_with_other_columns_are_named(federation, tmp_path, clock):
    path = federation[1] / "ann.csv"
    path.write_text(path.read_text().replace("x1", "z1", 1))
    with pytest.raises(RequestError, match="client 'ann' has column 'z1' and lacks column 'x1', unlike client 'bob'"):
        run(federation[0], make_nodes(*federation, tmp_path / "state"), tmp_path / "run")


def test_a_client_that_cannot_go_on_ends_the_run_by_its_name(federation, tmp_path, clock):
    nodes = make_nodes(*federation, tmp_path / "state")
    transport = Watched(nodes)
    transport.fate = lambda request, node, number: "lost" if node == "104" and number > 30 else "fine"
    with pytest.raises((RequestError, WorkError), match="'dora'"):
        run(federation[0], None, tmp_path / "run", transport=transport)


@pytest.mark.parametrize("shares", [True, False])
def test_a_small_federation_is_shown_without_losses_of_all(shares, tmp_path, clock, capsys):
    """Five clients and two columns: too few for the pooled losses, and policies may keep all results."""
    tables = write_tables(tmp_path)
    federation = write_run(tables, advice='shape = "linear"')
    nodes = make_nodes(federation, tables, tmp_path / "state")
    for node in nodes:
        node.policy = None if shares else Policy(quantities=["advice"])
    result, _ = run(federation, nodes, tmp_path / "run")
    assert "recommended" not in result.summary and len(result.clients) == (5 if shares else 0)
    for json_ in (False, True):
        show_federation(Display(json_), tmp_path / "run", json_)
        assert result.headline.split(" for ")[0] in " ".join(capsys.readouterr().out.split())
