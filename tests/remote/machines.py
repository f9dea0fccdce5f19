"""Machines of a federation in one: network namespaces joined by a bridge, and lines with a delay."""

import ctypes
import functools
import multiprocessing
import os
import select
import shutil
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

HOSTS_FOLDER = Path("/etc/netns")  # `ip netns exec NAME` shows NAME/hosts as /etc/hosts
NETWORK = "10.77.0"
DELAY_SECONDS = 0.2


@functools.cache
def why_no_namespaces():
    """Why this machine cannot have network namespaces of its own; empty if it can."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "network namespaces need root and the command `ip`"
    name = f"mooring-{os.getpid()}-try"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"network namespaces are not permitted here: {tried.stderr.strip()}"
    words = ["ip", "-n", name, "link", "add", "br0", "type", "bridge"]
    bridge = subprocess.run(words, capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", name], check=True)
    return "" if not bridge.returncode else f"this machine has no network bridge: {bridge.stderr.strip()}"


class Machine:
    """A network namespace with an address; commands run in it from a folder of its own."""

    def __init__(self, namespace, address, folder):
        self.namespace, self.address, self.folder = namespace, address, folder
        folder.mkdir()

    def start(self, line, log):
        """The command line as it is typed there; output goes to the log."""
        words = [sys.executable, "-m", *line.split()]
        with open(log, "ab") as file:
            inside = ["ip", "netns", "exec", self.namespace, *words]
            return subprocess.Popen(inside, stdout=file, stderr=file, stdin=subprocess.DEVNULL, cwd=self.folder)

    def run(self, *words):
        inside = ["ip", "netns", "exec", self.namespace, *words]
        return subprocess.run(inside, capture_output=True, text=True, cwd=self.folder, timeout=120, check=False)


class Machines:
    """Machines by name, of which the first is the server and known to all others by `host`.

    Where `delay`, the others reach it through a line of their own that delivers everything later, in both directions.
    """

    def __init__(self, folder, names, host, port, delay=0.0):
        self.prefix, self.lines = f"mooring-{os.getpid()}-", []
        self.hub, self.port, self.delay = self.prefix + "hub", port, delay
        self.machines = {
            name: Machine(self.prefix + name, f"{NETWORK}.{k}", folder / name) for k, name in enumerate(names, start=1)
        }
        self.server, self.host = names[0], host

    def __enter__(self):
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _build(self):
        ip("netns", "add", self.hub)
        ip("-n", self.hub, "link", "add", "br0", "type", "bridge")
        ip("-n", self.hub, "link", "set", "br0", "up")
        for k, (name, machine) in enumerate(self.machines.items()):
            ip("netns", "add", machine.namespace)
            ip(
                "-n",
                machine.namespace,
                "link",
                "add",
                "eth0",
                "type",
                "veth",
                "peer",
                "name",
                f"v{k}",
                "netns",
                self.hub,
            )
            ip("-n", self.hub, "link", "set", f"v{k}", "master", "br0", "up")
            ip("-n", machine.namespace, "addr", "add", f"{machine.address}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                ip("-n", machine.namespace, "link", "set", device, "up")
            through = "127.0.0.1" if self.delay and name != self.server else self.machines[self.server].address
            hosts = HOSTS_FOLDER / machine.namespace / "hosts"
            hosts.parent.mkdir(parents=True)
            hosts.write_text(f"127.0.0.1 localhost\n{through} {self.host}\n")
        for machine in list(self.machines.values())[1:] if self.delay else ():
            args = (machine.namespace, (self.machines[self.server].address, self.port), self.delay)
            line = multiprocessing.get_context("fork").Process(target=run_slow_line, args=args, daemon=True)
            line.start()
            self.lines.append(line)

    def __exit__(self, *error):
        for line in self.lines:
            line.kill()
        for namespace in (*(machine.namespace for machine in self.machines.values()), self.hub):
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)
            shutil.rmtree(HOSTS_FOLDER / namespace, ignore_errors=True)


def ip(*words):
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert not done.returncode, f"ip {' '.join(words)}: {done.stderr}"


def run_slow_line(namespace, server, seconds):
    """In the namespace: the server's port on loopback, with a delay."""
    with open(f"/run/netns/{namespace}") as file:
        assert ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0) == 0
    SlowLine(server, seconds, port=server[1]).thread.join()


class SlowLine:
    """A line to the server that delivers everything so many seconds later, in both directions."""

    def __init__(self, server, seconds, port=0):
        self.server, self.seconds, self.ends = server, seconds, []
        self.listening = socket.create_server(("127.0.0.1", port))
        self.port = self.listening.getsockname()[1]
        self.thread = threading.Thread(target=self.accept, daemon=True)
        self.thread.start()

    def accept(self):
        with suppress(OSError):
            while True:
                client, _ = self.listening.accept()
                try:
                    server = socket.create_connection(self.server)
                except OSError:
                    client.close()
                    continue
                self.ends += [client, server]
                for ends in ((client, server), (server, client)):
                    threading.Thread(target=self.copy, args=ends, daemon=True).start()

    def copy(self, source, target):
        """Data leave when their time has come; a line carries much at once."""
        waiting = []
        try:
            while True:
                timeout = None if not waiting else max(waiting[0][0] - time.monotonic(), 0)
                ready, _, _ = select.select([source], [], [], timeout)
                if ready:
                    data = source.recv(1 << 16)
                    waiting.append((time.monotonic() + self.seconds, data))
                while waiting and waiting[0][0] <= time.monotonic():
                    _, data = waiting.pop(0)
                    if not data:
                        target.shutdown(socket.SHUT_WR)
                        return
                    target.sendall(data)
        except (OSError, ValueError):
            with suppress(OSError):
                target.shutdown(socket.SHUT_RDWR)

    def close(self):
        for end in (self.listening, *self.ends):
            end.close()
