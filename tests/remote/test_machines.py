"""Trials of a federation in network namespaces: a line that is cut, and one key at two machines."""

import shutil
import time

import pytest
import torch

from mooring.remote import keys
from mooring.remote.join import DEFAULT_PORT
from mooring.runs.checkpoint import list_checkpoints
from mooring.runs.directory import open_run
from tests.remote.machines import Machines, ip, why_no_namespaces
from tests.remote.processes import LONG, assert_models_are_the_simulators, run_file, wait_until

pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_no_namespaces()), reason=why_no_namespaces() or "network namespaces work here"),
]

HOST = "fed.example.org"
CUT_SECONDS = 15.0  # longer than a client tries to reach its session again


class Deployment:
    """A server and two clients, each on its own machine, and a third machine."""

    def __init__(self, folder, network, path):
        self.folder, self.network, self.path = folder, network, path
        self.out = folder / "server" / "out"
        self.names = sorted(file.stem for file in (folder / "clients").iterdir())
        keys.init(folder / "keys", self.names, [HOST])
        self.started = {}

    def start(self, who, line):
        self.started[who] = self.network.machines[who].start(f"mooring {line}", self.folder / f"{who}.log")

    def serve(self):
        self.start("server", f"serve {self.path} --keys {self.folder}/keys --host 0.0.0.0 --out out --num-clients 2")

    def join(self, machine, name):
        state = self.folder / f"state-{machine}" / "clients" / name
        keys_, data = self.folder / "keys", self.folder / "clients" / f"{name}.csv"
        self.start(
            machine,
            f"join {self.path} --data {data} --state {state} --server {HOST}:{DEFAULT_PORT} --ca {keys_}/ca.crt "
            f"--key {keys_}/clients/{name}",
        )

    def saved_round(self):
        return max((t for t, _ in list_checkpoints(self.out)), default=0)

    def end(self, *names):
        for who in names:
            assert self.started[who].wait(LONG) == 0, (self.folder / f"{who}.log").read_text()[-3000:]

    def kill(self):
        for process in self.started.values():
            process.kill()
            process.wait(60)


@pytest.fixture
def deployment(tmp_path):
    path, folder = run_file(tmp_path, "fedavg", rounds=400, clients=2)
    for k, file in enumerate(sorted(folder.iterdir())):
        file.rename(folder / f"c{k}.csv")
    with Machines(tmp_path, ["server", "first", "second", "third"], HOST, DEFAULT_PORT) as network:
        here = Deployment(tmp_path, network, path)
        try:
            here.serve()
            here.join("first", "c0")
            here.join("second", "c1")
            wait_until(lambda: here.saved_round() >= 1)
            yield here
        finally:
            here.kill()


def assert_models(here):
    place = here.folder / "place"
    (place / "clients").mkdir(parents=True)
    for machine, name in (("first", "c0"), ("second", "c1")):
        shutil.copytree(here.folder / f"state-{machine}" / "clients" / name, place / "clients" / name)
    assert_models_are_the_simulators(here.path, here.out, place)


def test_a_line_that_is_cut_for_a_while_costs_nothing(deployment):
    line = deployment.network.machines["second"].namespace
    ip("-n", line, "link", "set", "eth0", "down")
    time.sleep(1)
    before = deployment.saved_round()
    time.sleep(CUT_SECONDS)
    assert deployment.saved_round() <= before + 1  # rounds wait for the client
    assert "waiting" in (deployment.folder / "server.log").read_text()
    ip("-n", line, "link", "set", "eth0", "up")
    deployment.end("server", "first", "second")
    assert_models(deployment)


def test_one_key_at_two_machines_stops_nobody_else(deployment):
    """A copy of the first client, with its key and its table, at a third machine: the run ends."""
    deployment.join("third", "c0")
    time.sleep(5)
    deployment.end("server", "second")
    assert bool(torch.isfinite(open_run(deployment.out).models.common).all())
