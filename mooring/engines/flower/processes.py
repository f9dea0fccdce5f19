"""Processes that are started, watched and ended: each ends with the process that started it.

Telemetry and update checks are off in all of them.
"""

from __future__ import annotations

import importlib.util
import ipaddress
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from mooring.core.errors import RequestError

CHILD_MODULE = "mooring.engines.flower.child_process"
DEFAULT_PORT = 9092
MIN_PORT, MAX_PORT = 20_000, 32_000
TERMINATE_SECONDS = 5.0  # seconds that a process has to end
PORT_WAIT_SECONDS = (
    60.0  # seconds in which the SuperLink of a server that was killed notices, on a machine that is busy
)
Say = Callable[[str], None]


def require_flower() -> None:
    """One sentence where the extra is missing."""
    if importlib.util.find_spec("flwr") is None:
        raise RequestError("a federation across machines needs Flower: pip install 'mooring-fl[flower]'.")


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def child_environment(home: Path) -> dict[str, str]:
    """For Flower's processes: silent, with a home of their own, our package and its commands within reach."""
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    package = str(Path(__file__).resolve().parents[3])
    paths = [package, *(part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part)]
    return os.environ | {
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_HOME": str(home),
        "MOORING_PARENT": str(os.getpid()),
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
    }


def open_log(path: Path) -> IO[bytes]:
    """A log to add to, which only its owner can read."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab")


@contextmanager
def process(arguments: list[str], home: Path, log: Path, **known: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that writes to a log and is ended with the block; `known` are variables of its environment."""
    with open_log(log) as file:
        started = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            env=child_environment(home) | known,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        yield started
    finally:
        end(started)


def end(started: subprocess.Popen[bytes]) -> None:
    for word, seconds in ((signal.SIGTERM, TERMINATE_SECONDS), (signal.SIGKILL, TERMINATE_SECONDS)):
        if started.poll() is not None:
            return
        started.send_signal(word)
        with suppress(subprocess.TimeoutExpired):
            started.wait(seconds)


def wait_for_port(host: str, port: int) -> None:
    """The SuperLink of a server that was killed may take a moment to end."""
    begun = time.monotonic()
    while True:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
                return
            except OSError as error:
                if time.monotonic() - begun > PORT_WAIT_SECONDS:
                    raise RequestError(f"port {port} of {host} is taken ({error.strerror}); choose --port.") from error
        time.sleep(0.3)


def find_free_port() -> int:
    """One by chance, from where no system takes ports for outgoing connections: it is still free a while later."""
    while True:
        port = MIN_PORT + secrets.randbelow(MAX_PORT - MIN_PORT)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
