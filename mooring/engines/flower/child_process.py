"""Processes that are started, watched and stopped: each ends with the process that started it.

Flower's own processes, and clients of `federation up`, with Flower's telemetry and update checks off:

    python -m mooring.engines.flower.child_process superlink ...      behind the gateway
    python -m mooring.engines.flower.child_process superexec ...      starts the server's app
    python -m mooring.engines.flower.child_process serverapp ...
    python -m mooring.engines.flower.child_process supernode ...
    python -m mooring.engines.flower.child_process mooring join ...

Files that they write are readable by their owner only.
"""

from __future__ import annotations

import importlib
import ipaddress
import json
import os
import runpy
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

from mooring.core.errors import RequestError
from mooring.engines.flower import flower_patches

if TYPE_CHECKING:
    from starlette.applications import Starlette

CHILD_MODULE = "mooring.engines.flower.child_process"
DEFAULT_PORT = 9092
MIN_PORT, MAX_PORT = 20_000, 32_000
TERMINATE_SECONDS = 5.0  # for a process to end
PORT_WAIT_SECONDS = 60.0  # in which the SuperLink of a killed server ends, on a busy machine
MAX_REFUSED_KEYS = 100  # that are reported to the server
SECRET_VARIABLE, KEYS_VARIABLE, REFUSED_VARIABLE = "MOORING_SECRET", "MOORING_KEYS", "MOORING_REFUSED"
METRICS_VARIABLE = "MOORING_METRICS_TOKEN"
Report = Callable[[str], None]


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def child_environment(home_folder: Path) -> dict[str, str]:
    """Return the environment of Flower's processes: no telemetry, their own home folder, this package on the path."""
    home_folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    package = str(Path(__file__).resolve().parents[3])
    paths = [package, *(part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part)]
    return os.environ | {
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_HOME": str(home_folder),
        "MOORING_PARENT": str(os.getpid()),
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
    }


def open_log(path: Path) -> IO[bytes]:
    """Open a log to append to, which only its owner can read."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab")


@contextmanager
def start_process(
    arguments: list[str], home_folder: Path, log: Path, **variables: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a Python module as a process, with a log and environment variables, until the block ends."""
    with open_log(log) as file:
        started = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            env=child_environment(home_folder) | variables,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        yield started
    finally:
        stop_process(started)


def stop_process(started: subprocess.Popen[bytes]) -> None:
    """Terminate a process, and kill it where that takes too long."""
    for stop in (started.terminate, started.kill):
        if started.poll() is not None:
            return
        stop()
        with suppress(subprocess.TimeoutExpired):
            started.wait(TERMINATE_SECONDS)


def is_running(process: int) -> bool:
    """Return whether a process of this machine is running; a child that ended and was not waited for is not."""
    try:
        os.kill(process, 0)
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except OSError:
        return True  # a system without /proc, or a process of another user


def wait_for_port(host: str, port: int) -> None:
    """Wait until a port is free: the SuperLink of a killed server may take a moment to end."""
    started_at = time.monotonic()
    while True:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
                return
            except OSError as error:
                if time.monotonic() - started_at > PORT_WAIT_SECONDS:
                    raise RequestError(f"port {port} of {host} is taken ({error.strerror}); choose --port.") from error
        time.sleep(0.3)


def find_free_port() -> int:
    """Return a random free port, outside of the range that systems use for outgoing connections."""
    while True:
        port = MIN_PORT + secrets.randbelow(MAX_PORT - MIN_PORT)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class RefusedKeyLog:
    """Writes a line for each refused key, once."""

    def __init__(self, path: str):
        self.path, self.known = path, set[str]()

    def __call__(self, key: str, when: str) -> None:
        if self.path and key and key not in self.known and len(self.known) < MAX_REFUSED_KEYS:
            self.known.add(key)
            with open(self.path, "a") as file:
                file.write(json.dumps({"key": key[:400], "when": when[:40], "now": time.time()}) + "\n")


def run_superlink() -> None:
    from mooring.engines.flower import gateway

    folder = os.environ.get(KEYS_VARIABLE, "")

    def wrap(app: Starlette) -> gateway.Gateway:
        return gateway.Gateway(
            app,
            secret=os.environ[SECRET_VARIABLE],
            keys=gateway.EnrolledKeys(Path(folder) if folder else None),
            node_of=lambda key: app.state.linkstate_factory.state().get_node_id_by_public_key(key),
            note=RefusedKeyLog(os.environ.get(REFUSED_VARIABLE, "")),
            metrics_token=os.environ.get(METRICS_VARIABLE, ""),
        )

    module = flower_patches.wrap_superlink(
        wrap,
        proxy_headers=False,
        access_log=False,
        limit_concurrency=gateway.MAX_CONNECTIONS,
        http=gateway.make_timeout_protocol(),
        server_header=False,
        date_header=False,
    )
    module.flower_superlink()


def run_superexec() -> None:
    flower_patches.load_command("superexec")()


def run_serverapp() -> None:
    flower_patches.shorten_backoff()
    flower_patches.load_command("serverapp")()


def run_supernode() -> None:
    flower_patches.end_connection_on_loss()
    flower_patches.shorten_backoff()
    flower_patches.load_command("supernode")()


def main() -> None:
    os.umask(0o077)
    name = sys.argv.pop(1)
    flower_patches.end_with_parent(int(os.environ["MOORING_PARENT"]))
    if name == "mooring":
        runpy.run_module("mooring", run_name="__main__")
        return
    sys.argv[0] = f"flower-{name}"
    flower_patches.extend_start_timeout()
    if name in ("superexec", "serverapp"):
        gateway = importlib.import_module("mooring.engines.flower.gateway")
        flower_patches.add_secret_header(gateway.SECRET, os.environ[SECRET_VARIABLE])
    CHILDREN[name]()


CHILDREN = {
    "superlink": run_superlink,
    "superexec": run_superexec,
    "serverapp": run_serverapp,
    "supernode": run_supernode,
}


if __name__ == "__main__":
    main()
