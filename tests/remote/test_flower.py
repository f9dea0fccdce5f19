"""Flower as a transport: its stock commands and its simulation give the simulator's models."""

import tomllib
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr", reason="flwr is not installed; the extra is mooring-fl[flower]")

from mooring.commands.federation import find_kinds, find_leads
from mooring.core.errors import RequestError
from mooring.remote import flower, serve
from mooring.remote.flower import FlowerTransport, run_flower_federation, run_simulation, write_app
from tests.remote.processes import FORKS, assert_models_are_the_simulators, run_file

pytestmark = FORKS


@pytest.mark.processes
def test_stock_commands_give_the_same_models(tmp_path):
    """A SuperLink, SuperNodes and `flwr run`, as Flower has them."""
    path, folder = run_file(tmp_path, "fedavg", rounds=1, clients=2, training="baselines = false")
    reports, progress = [], []
    out = run_flower_federation(
        path, folder, tmp_path / "out", find_kinds(), find_leads(), reports.append, lambda *done: progress.append(done)
    )
    assert ("fedavg", 1, 1) in progress and "client 'site 0' connected" in reports
    assert_models_are_the_simulators(path, out, serve.server_folder(out))


@pytest.mark.slow
def test_flowers_own_simulation_gives_the_same_models(tmp_path):
    pytest.importorskip("ray", reason="ray is not installed; the extra is mooring-fl[ray]")
    path, folder = run_file(tmp_path, "apfl", rounds=2, clients=3)
    progress = []
    out = run_simulation(path, folder, tmp_path / "out", lambda sentence: None, lambda *done: progress.append(done))
    assert ("apfl", 2, 2) in progress
    assert_models_are_the_simulators(path, out, serve.server_folder(out))


def test_a_simulation_without_ray_is_refused(tmp_path, monkeypatch):
    path, folder = run_file(tmp_path)
    monkeypatch.setattr(flower, "find_spec", lambda name: None)
    with pytest.raises(RequestError, match="needs Ray"):
        run_simulation(path, folder, tmp_path / "out", print, print)


class Grid:
    """A part of Flower's grid whose replies a test writes."""

    def __init__(self):
        self.pushed, self.replies = [], []

    def get_node_ids(self):
        return [7, 8]

    def push_messages(self, messages):
        self.pushed += messages
        return [f"f{len(self.pushed)}"]

    def pull_messages(self, numbers):
        found = [reply for reply in self.replies if reply.metadata.reply_to_message_id in numbers]
        self.replies = []
        return found


def reply(number, content=None):
    error = SimpleNamespace(reason="the node is gone")
    metadata = SimpleNamespace(reply_to_message_id=number)
    record = None if content is None else flower.to_record(content)
    return SimpleNamespace(metadata=metadata, content=record, error=error, has_error=lambda: content is None)


def test_a_message_that_flower_lost_is_sent_again(monkeypatch):
    """After three minutes, then after six; a reply to either counts, once, and an error is a reason."""
    now = [0.0]
    monkeypatch.setattr(flower, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: None))
    monkeypatch.setattr(flower, "Message", lambda *about, **how: about)  # Flower's needs a run
    grid = Grid()
    transport = FlowerTransport(grid)
    assert [node.id for node in transport.nodes()] == ["7", "8"]
    (one,), (two,) = transport.push([("7", b"one")]), transport.push([("8", b"two")])
    assert transport.pull([one, two]) == {} and len(grid.pushed) == 2
    now[0] = 181.0
    assert transport.pull([one]) == {} and len(grid.pushed) == 3  # nobody waits for the other
    now[0] = 500.0
    assert transport.pull([one]) == {} and len(grid.pushed) == 3
    now[0] = 542.0
    grid.replies = [reply("f3", b"late"), reply("f9", b"unknown")]
    assert transport.pull([one]) == {one: b"late"}
    assert flower.from_record(SimpleNamespace(content=flower.to_record(b"x"))) == b"x"
    assert flower.from_record(SimpleNamespace(content=flower.RecordDict())) == b""
    (three,) = transport.push([("7", b"three")])
    grid.replies = [reply(f"f{len(grid.pushed)}")]
    assert transport.pull([three]) == {three: "Flower reports: the node is gone"}


def test_the_app_of_a_run_is_a_folder_of_its_own(tmp_path):
    """For a fit and for an advice; the run file is filled in."""
    path, _ = run_file(tmp_path, "fedavg")
    app = write_app(path, tmp_path / "app", find_kinds(), find_leads())
    about = tomllib.loads((app / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    assert about["config"]["run"] == str(path) and about["components"]["clientapp"] == "mooring_app.client:app"
    assert "import ClientNode" in (app / "mooring_app" / "client.py").read_text()
    with pytest.raises(RequestError, match="already exists"):
        write_app(path, app, find_kinds(), find_leads())
    path.write_text('[mooring]\npurpose = "advise"\n' + path.read_text().replace('[algorithm]\nname = "fedavg"\n', ""))
    advice = write_app(path, tmp_path / "advice", find_kinds(), find_leads())
    assert "import advise_federation" in (advice / "mooring_app" / "server.py").read_text()
    with pytest.raises(RequestError, match="can fit, and the run file's purpose is advise"):
        write_app(path, tmp_path / "other", find_kinds(), serve.FIT_LEADS)
