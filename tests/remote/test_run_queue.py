"""Several runs per server, one after another: clients answer the run that a request names."""

import pytest

from mooring.core.errors import RequestError
from mooring.remote import serve
from mooring.remote.client_node import ClientNode
from mooring.remote.client_requests import DISMISSED_FILE, DONE_FILE
from mooring.remote.join import ClientRuns
from mooring.remote.memory import MemoryTransport
from mooring.remote.messages import Payload
from mooring.remote.serve import FIT_LEADS
from mooring.remote.server_run import run_federation
from tests.remote.federation_runs import make_run
from tests.remote.processes import Federation, run_file


def test_clients_take_part_in_one_run_after_another(table, tmp_path, clock):
    runs = [make_run(table, name, rounds=2, federation={"share_models": False}) for name in ("fedavg", "ditto")]
    nodes = [
        ClientRuns([ClientNode(run, file, tmp_path / "state" / file.stem) for run in runs])
        for file in sorted(table.iterdir())
    ]
    for number, run in enumerate(runs):
        assert not any(node.are_finished() for node in nodes)
        result = run_federation(run, MemoryTransport(nodes), tmp_path / f"run {number}")
        assert len(result.clients) == 4
    assert all(node.are_finished() for node in nodes)
    assert all((client.folder / DONE_FILE).exists() for node in nodes for client in node.clients.values())


def test_a_run_that_a_client_was_not_given_does_not_end_its_own(table, tmp_path):
    file = sorted(table.iterdir())[0]
    clients = [ClientNode(make_run(table, "fedavg", rounds=rounds), file, tmp_path / "state") for rounds in (1, 2)]
    node = ClientRuns(clients)
    node.answer("dismissed", Payload({"run": "another", "why": "it has another run file"}))
    assert not any((client.folder / DISMISSED_FILE).exists() for client in clients)
    assert node.answer("hello", Payload({"run": "another"})).fields["run"] == clients[0].digest
    node.answer("dismissed", Payload({"run": clients[1].digest, "why": "no rows"}))
    assert (clients[1].folder / DISMISSED_FILE).exists() and not node.are_finished()


def test_a_queue_is_checked_before_it_starts(tmp_path):
    path, _ = run_file(tmp_path)
    other = path.with_name("second.toml")
    other.write_text(path.read_text())
    queue = serve._read_queue([path, other], tmp_path / "out", 2, False, FIT_LEADS)
    assert [queued.out.name for queued in queue] == ["run", "second"]
    assert serve._read_queue(path, tmp_path / "out", 2, False, FIT_LEADS)[0].out == tmp_path / "out"
    with pytest.raises(RequestError, match="different names"):
        serve._read_queue([path, path], tmp_path / "out", 2, False, FIT_LEADS)
    other.write_text('[mooring]\npurpose = "advise"\n' + path.read_text().replace('[algorithm]\nname = "fedavg"\n', ""))
    with pytest.raises(RequestError, match="the run file's purpose is advise"):
        serve._read_queue([path, other], tmp_path / "out", 2, False, FIT_LEADS)


class Queue(Federation):
    """Servers and clients that are given two run files."""

    def server(self):
        command, path, *options = super().server()
        return [command, path, path.with_name("second.toml"), *options]

    def client(self, name, **instead):
        command, path, *options = super().client(name, **instead)
        return [command, path, path.with_name("second.toml"), *options]


@pytest.mark.processes
def test_a_server_runs_a_queue_without_restarting_clients(tmp_path):
    path, folder = run_file(tmp_path, "fedavg", rounds=2)
    path.with_name("second.toml").write_text(path.read_text().replace("rounds = 2", "rounds = 3"))
    with Queue(tmp_path, path, folder) as queue:
        queue.check_end()
        for name in queue.names:
            assert queue.alive[name].wait(60) == 0
    assert (tmp_path / "out" / "run" / "summary.json").exists()
    assert (tmp_path / "out" / "second" / "summary.json").exists()
    clients = tmp_path / "out.federation" / "clients"
    assert all(len(list((clients / name).glob("*/done.json"))) == 2 for name in queue.names)
