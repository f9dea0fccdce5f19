"""Federations of real processes for tests: the commands of a server and its clients, and what to compare them with."""

import faulthandler
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
import torch

from mooring.engines.fit import fit
from mooring.engines.request import request
from mooring.remote import keys
from mooring.remote.client_node import run_digest
from mooring.remote.client_requests import RESULT_DIR
from mooring.remote.serve import find_free_port
from mooring.runs.checkpoint import list_checkpoints
from mooring.runs.directory import open_run
from tests.remote.federation_runs import write_clients

FORKS = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

LONG = 400.0  # seconds that anything may take on a busy machine


def run_file(tmp_path, name="fedavg", rounds=3, clients=2, more="secure = false", settings="", training=""):
    """A run file and the folder of its clients' tables."""
    folder = write_clients(tmp_path / "clients", clients=clients)
    text = f"""
[data]
source = "{folder}"
target = "y"
[algorithm]
name = "{name}"
{settings}
[training]
rounds = {rounds}
evaluate_every = {max(rounds // 2, 1)}
threads = 1
{training}
[federation]
{more}
"""
    path = tmp_path / "run.toml"
    path.write_text(text)
    return path, folder


def assert_models_are_the_simulators(path, out, place):
    """The common model at the server, every personal one in its client's folder."""
    here, run = fit(path), request(path, purpose="fit")
    saved = open_run(out).models
    torch.testing.assert_close(saved.common, here.trained.common, rtol=1e-12, atol=1e-12)
    assert saved.personal is None
    for name, right in here.models.items():
        own = open_run(place / "clients" / name / run_digest(run) / RESULT_DIR).models
        torch.testing.assert_close(own.personal[0], right, rtol=1e-12, atol=1e-12)


def commands_of(folder):
    """Processes, by number, whose command line names the folder."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            try:
                with open(f"/proc/{entry}/cmdline", "rb") as file:
                    words = file.read()
            except OSError:
                continue
            if str(folder).encode() in words:
                found[int(entry)] = words.replace(b"\0", b" ").decode()
    return found


def wait_until(true, seconds=LONG, pause=0.1):
    begun = time.monotonic()
    while not true():
        assert time.monotonic() - begun < seconds
        time.sleep(pause)


def mooring(words, log, folder):
    """The command line, in a child that has all modules already."""
    os.setpgid(0, 0)
    if folder is not None:
        os.chdir(folder)
    sys.stdout = sys.stderr = open(log, "a", buffering=1)  # noqa: SIM115 - until the process ends
    os.dup2(sys.stdout.fileno(), 1)
    os.dup2(sys.stdout.fileno(), 2)
    faulthandler.register(signal.SIGUSR1, file=sys.stdout)  # says where it hangs, when asked
    sys.argv = ["mooring", *map(str, words)]
    runpy.run_module("mooring", run_name="__main__")


class Child:
    """A forked command: it starts at once, and is killed like any other process."""

    def __init__(self, words, log, folder=None):
        self.process = multiprocessing.get_context("fork").Process(target=mooring, args=(words, log, folder))
        self.process.start()

    def poll(self):
        return self.process.exitcode

    def kill(self):
        self.process.kill()
        self.process.join(60)

    def wait(self, seconds):
        self.process.join(seconds)
        return self.process.exitcode


class Command:
    """The command as a user starts it."""

    def __init__(self, words, log):
        with open(log, "ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "mooring", *map(str, words)], stdout=file, stderr=file
            )

    def poll(self):
        return self.process.poll()

    def kill(self):
        self.process.kill()
        self.process.wait(60)

    def wait(self, seconds):
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None


class Federation:
    """A server and its clients on loopback, over TLS or not; clients take `through` for the server's port."""

    def __init__(self, tmp_path, path, folder, *, kind=Child, tls=True, port=None, through=None):
        self.path, self.folder, self.kind, self.tmp = path, folder, kind, tmp_path
        self.out, self.place, self.port = tmp_path / "out", tmp_path / "out.federation", port or find_free_port()
        self.names = sorted(file.stem for file in folder.iterdir())
        self.tls, self.through = tls, through
        if tls:
            keys.init(tmp_path / "keys", self.names)
        self.alive = {}

    def __enter__(self):
        for who in ("server", *self.names):
            self.start(who)
        return self

    def __exit__(self, *rest):
        for one in self.alive.values():
            one.kill()

    def start(self, who):
        self.alive[who] = self.kind(self.server() if who == "server" else self.client(who), self.log(who))

    def log(self, who):
        return self.tmp / f"{who}.log"

    def server(self):
        words = ["serve", self.path, "--out", self.out, "--port", self.port, "--num-clients", len(self.names)]
        return [*words, "--keys", self.tmp / "keys"] if self.tls else [*words, "--insecure"]

    def client(self, name, **instead):
        known = {"data": self.folder / f"{name}.csv", "key": self.tmp / "keys" / "clients" / name, "name": None}
        known |= {
            "run": self.path,
            "ca": self.tmp / "keys" / "ca.crt",
            "state": self.place / "clients" / name,
        } | instead
        words = ["join", known["run"], "--data", known["data"], "--state", known["state"]]
        words += ["--server", f"127.0.0.1:{self.through or self.port}"]
        words += ["--name", known["name"]] if known["name"] else []
        return [*words, "--ca", known["ca"], "--key", known["key"]] if self.tls else [*words, "--insecure"]

    def saved(self):
        """The round of the latest checkpoint."""
        return max((t for t, _ in list_checkpoints(self.out)), default=0)

    def kill(self, victim):
        """SIGKILL of the server, of a client, or of all at once."""
        for who in {"server": ["server"], "all": list(self.alive)}.get(victim, [victim]):
            self.alive[who].kill()

    @contextmanager
    def paused(self, name):
        """Rounds wait for an embedded client that is stopped meanwhile, so that the run cannot end."""
        number = self.alive[name].process.pid
        os.kill(number, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(number, signal.SIGCONT)

    def again(self):
        """The same commands once more for those that are not running."""
        for who, one in self.alive.items():
            if one.poll() is not None:
                self.start(who)

    def check_end(self, seconds=LONG):
        """The server ends, and well; else everybody tells what it reports and where it stands."""
        server = self.alive["server"]
        if server.wait(seconds) != 0:
            for one in self.alive.values():
                if isinstance(one, Child) and one.poll() is None:
                    os.kill(one.process.pid, signal.SIGUSR1)
            time.sleep(2)
            logs = [f"--- {who}, exit {one.poll()}\n{self.log_text(who)}" for who, one in self.alive.items()]
            raise AssertionError("\n".join(logs))

    def log_text(self, who):
        return self.log(who).read_text(errors="replace") if self.log(who).exists() else ""
