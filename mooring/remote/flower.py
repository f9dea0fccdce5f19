"""Flower as a transport, by its public names: `flwr` 1.41 or newer, an extra.

    mooring federation up RUN --transport flower       a SuperLink and SuperNodes on this machine
    mooring federation up RUN --transport simulation   Flower's simulation, on Ray
    mooring federation app RUN FOLDER                  a Flower app, for a SuperLink of one's own

A message is one record with bytes. Flower's nodes ask for messages every few seconds and start a process for each, so a
round takes seconds, and a client reads its table again for every message. Flower may lose a message whose node went
away: one without a reply is sent again after RESEND_SECONDS, then after twice as long, and so on.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec

from mooring.core.errors import RequestError, WorkError
from mooring.data.file_readers import file_stem
from mooring.engines.progress import OnProgress
from mooring.engines.request import read_federation_request
from mooring.remote.client_node import ClientNode
from mooring.remote.memory import answer_bytes
from mooring.remote.serve import (
    Report,
    check_purpose,
    child_environment,
    find_client_tables,
    find_free_port,
    open_log,
    server_folder,
    set_client_count,
    stop_process,
)  # fmt: skip
from mooring.remote.transport import Node
from mooring.runs.atomic_files import make_synced_folder
from mooring.runs.runfile import RunFile
from mooring.runs.sections import FederationSection

if find_spec("flwr") is None:
    raise RequestError("this transport needs Flower: pip install 'mooring-fl[flower]'.")
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

CONTENT = "content"  # of a message: the name of its record, and of the bytes in it
RESEND_SECONDS, PULL_SECONDS, TTL_SECONDS = 180.0, 0.5, 3600.0
START_SECONDS = 300.0  # for a SuperLink on a busy machine
MAX_CACHED_CLIENTS = 16  # clients whose rows one process of the simulation keeps in memory
MARK = "mooring-progress "  # begins a line of JSON in the log of the server's app
APP_FILES = {
    "pyproject.toml": """[project]
name = "mooring-app"
version = "1.0.0"
description = "A Mooring run"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "mooring"

[tool.flwr.app.components]
serverapp = "mooring_app.server:app"
clientapp = "mooring_app.client:app"

[tool.flwr.app.config]
run = {run}
out = ""
clients = ""
trust = ""
""",
    "mooring_app/__init__.py": "",
    "mooring_app/client.py": "from mooring.remote.flower import make_client_app\nfrom {client} import {kind}\n\n"
    "app = make_client_app({kind})\n",
    "mooring_app/server.py": "from mooring.remote.flower import make_server_app\nfrom {server} import {lead}\n\n"
    "app = make_server_app({lead})\n",
}


class FlowerTransport:
    """A transport over Flower's grid."""

    revoked: frozenset[str] = frozenset()
    public_keys: Mapping[str, ec.EllipticCurvePublicKey] = MappingProxyType({})  # Flower's keys are its own

    def __init__(self, grid: Grid):
        self.grid = grid
        self.waiting: dict[str, tuple[str, bytes, float, float]] = {}  # node, content, time to send again, next pause
        self.numbers: dict[str, str] = {}  # of our messages, by those of Flower's

    def nodes(self) -> list[Node]:
        return [Node(str(node)) for node in self.grid.get_node_ids()]

    def push(self, messages: Iterable[tuple[str, bytes]]) -> list[str]:
        return [self._send(node, content, RESEND_SECONDS, "") for node, content in messages]

    def _send(self, node: str, content: bytes, pause: float, number: str) -> str:
        message = Message(to_record(content), int(node), "query", ttl=TTL_SECONDS)
        (sent,) = self.grid.push_messages([message])
        number = number or sent
        self.numbers[sent] = number
        self.waiting[number] = node, content, time.monotonic() + pause, 2 * pause
        return number

    def pull(self, numbers: Iterable[str]) -> dict[str, bytes | str]:
        wanted = set(numbers)
        self.waiting = {number: message for number, message in self.waiting.items() if number in wanted}
        self.numbers = {sent: number for sent, number in self.numbers.items() if number in wanted}
        for number, (node, content, due, pause) in list(self.waiting.items()):
            if time.monotonic() > due:
                self._send(node, content, pause, number)
        out: dict[str, bytes | str] = {}
        for reply in self.grid.pull_messages(list(self.numbers)) if self.numbers else ():
            number = self.numbers.get(reply.metadata.reply_to_message_id, "")
            if number:
                out[number] = f"Flower reports: {reply.error.reason}" if reply.has_error() else from_record(reply)
        if not out:
            time.sleep(PULL_SECONDS)
        return out


def to_record(content: bytes) -> RecordDict:
    return RecordDict({CONTENT: ConfigRecord({CONTENT: content})})


def from_record(message: Message) -> bytes:
    try:
        return bytes(message.content.config_records[CONTENT][CONTENT])  # type: ignore[arg-type]
    except (KeyError, TypeError):
        return b""  # which is no message: its sender is named


@lru_cache(MAX_CACHED_CLIENTS)
def _load_client(kind: Any, run: str, data: str, state: str, name: str | None = None) -> ClientNode:
    return kind(read_flower_run(run), data, state, name)


def read_flower_run(path: str | Path, trust: bool = False) -> RunFile:
    """Return the run of a run file. Flower's nodes have no enrolled keys: without a line `secure`, messages are
    visible to the server."""
    run = read_federation_request(path, trust)
    options = run.federation or FederationSection()
    if options.secure is not None or run.mooring.purpose != "fit":
        return run
    return run.model_copy(update={"federation": options.model_copy(update={"secure": False})})


def make_client_app(kind: Any, nodes: Mapping[int, Mapping[str, str]] | None = None) -> ClientApp:
    """The app of a client: its node's configuration names run file, table and state, or `nodes` by partition does."""
    app = ClientApp()

    @app.query()
    def answer(message: Message, context: Context) -> Message:
        config = {key: str(value) for key, value in context.node_config.items()}
        client = _load_client(kind, **(config if nodes is None else nodes[int(config["partition-id"])]))
        return Message(to_record(answer_bytes(client, from_record(message))), reply_to=message)

    return app


def make_server_app(lead: Callable[..., object], config: Mapping[str, str] | None = None) -> ServerApp:
    """The app of the server: it leads the run that its configuration names, and writes progress to its log."""
    app = ServerApp()

    def write(**line: object) -> None:
        sys.stdout.write(f"{MARK}{json.dumps(line)}\n")
        sys.stdout.flush()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        options = {key: str(value) for key, value in (config or context.run_config).items()}
        run = read_flower_run(options["run"], bool(options.get("trust")))
        try:
            lead(
                set_client_count(run, int(options["clients"])) if options.get("clients") else run,
                FlowerTransport(grid),
                options["out"],
                report=lambda sentence: write(report=sentence),
                on_progress=lambda *progress: write(progress=progress),
            )
        except (RequestError, WorkError) as error:
            write(failed=str(error))
            raise
        write(done=True)

    return app


def write_app(path: str | Path, folder: str | Path, kinds: Mapping[str, type], leads: Mapping[str, Any]) -> Path:
    """Write the Flower app of a run file as a folder that `flwr run` starts, with the path of the run file in it."""
    run, folder = read_federation_request(path), Path(folder)
    check_purpose(run, leads)
    if folder.exists():
        raise RequestError(f"{folder} already exists; choose another folder for the app.")
    kind, lead = kinds[run.mooring.purpose], leads[run.mooring.purpose]
    names = {"client": kind.__module__, "kind": kind.__name__, "server": lead.__module__, "lead": lead.__name__}
    for name, text in APP_FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text.format(run=json.dumps(str(Path(path).resolve())), **names))
    return folder


def run_flower_federation(
    path: Path, tables: Path, out: Path, kinds: Mapping[str, type], leads: Mapping[str, Any], report: Report,
    on_progress: OnProgress,
) -> Path:  # fmt: skip
    """Run a stock SuperLink, a SuperNode for each table, and the run's app, by Flower's commands; return `out`."""
    files, out = find_client_tables(tables), out.resolve()
    home, states = server_folder(out) / "flower", server_folder(out) / "clients"
    app = write_app(path, home / f"app-{time.time_ns()}", kinds, leads)
    about = {
        file_stem(file): {"run": path.resolve(), "data": file.resolve(), "state": states / file_stem(file)}
        for file in files
    }
    with stock_processes(home, about) as run_command:
        words = [*run_command, str(app), "here", "--stream", "--run-config", join_config(out=out, clients=len(files))]
        follow(words, home / "run", home / "run.log", report, on_progress)
    return out


def join_config(**config: object) -> str:
    """A configuration as Flower's commands take it."""
    return " ".join(f"{key}={json.dumps(str(value))}" for key, value in config.items())


@contextmanager
def stock_processes(home: Path, nodes: Mapping[str, Mapping[str, object]]) -> Iterator[list[str]]:
    """A stock SuperLink, and a SuperNode for each configuration in `nodes`, until the block ends; yields `flwr run`,
    which finds this SuperLink as "here" with the environment of `home / "run"`."""
    port, bin_folder = find_free_port(), Path(sys.executable).parent
    address = f"127.0.0.1:{port}"
    with ExitStack() as stack:

        def start(name: str, *command: str) -> None:
            environment = flower_environment(home / name)
            with open_log(home / f"{name}.log") as log:
                words = [str(bin_folder / command[0]), "--insecure", "--host", "127.0.0.1", *command[1:]]
                stack.callback(stop_process, subprocess.Popen(words, env=environment, stdout=log, stderr=log))

        start("superlink", "flower-superlink", "--port", str(port), "--disable-runtime-dependency-installation")
        wait_for_port(port)
        for name, config in nodes.items():
            own = ("--superlink", address, "--port", str(find_free_port()), "--node-config", join_config(**config))
            start(f"supernode {name}", "flower-supernode", *own)
        make_synced_folder(home / "run")
        (home / "run" / "config.toml").write_text(f'[superlink.here]\naddress = "{address}"\ninsecure = true\n')
        yield [str(bin_folder / "flwr"), "run"]


def wait_for_port(port: int) -> None:
    end = time.monotonic() + START_SECONDS
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=2).close()
            return
        except OSError as error:
            if time.monotonic() > end:
                raise WorkError(f"Flower's SuperLink did not start in {START_SECONDS:g} s.") from error
            time.sleep(0.3)


def run_simulation(path: Path, tables: Path, out: Path, report: Report, on_progress: OnProgress) -> Path:
    """Run a fit in Flower's own simulation; on a cluster of Ray all paths must be on a shared file system."""
    if find_spec("ray") is None:
        raise RequestError('this transport needs Ray; install it with: pip install "mooring-fl[ray]".')
    if read_federation_request(path).algorithm is None:
        raise RequestError("Flower's simulation is for fits; `mooring advise` advises on one machine.")
    out = out.resolve()
    home = server_folder(out) / "flower"
    words = [sys.executable, "-m", "mooring.remote.flower", str(path.resolve()), str(tables.resolve()), str(out)]
    follow(words, home, home / "simulation.log", report, on_progress)
    return out


def flower_environment(home: Path) -> dict[str, str]:
    """The environment of Flower's processes: no telemetry, their own home folder, its commands on the path."""
    make_synced_folder(home)
    switches = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return child_environment() | switches | {"FLWR_HOME": str(home), "PATH": path}


def follow(words: list[Any], home: Path, log_file: Path, report: Report, on_progress: OnProgress) -> None:
    """Run a command that shows the log of the server's app, and report the progress in it until the run ends."""
    environment, pipe = flower_environment(home), subprocess.PIPE
    with (
        open_log(log_file) as log,
        subprocess.Popen(words, env=environment, stdout=pipe, stderr=subprocess.STDOUT) as started,
    ):
        try:
            for line in started.stdout or ():
                log.write(line)
                log.flush()
                _, mark, content = line.decode(errors="replace").partition(MARK)
                about = json.loads(content) if mark else {}
                if "report" in about:
                    report(about["report"])
                elif "progress" in about:
                    on_progress(*about["progress"])
                elif "failed" in about:
                    raise WorkError(about["failed"])
                elif "done" in about:
                    return
            raise WorkError(f"Flower ended the run; see {log_file.parent}.")
        finally:
            stop_process(started)


def main() -> None:
    """Flower's simulation in a process of its own."""
    from flwr.simulation import run_simulation as simulate

    from mooring.remote.server_run import run_federation

    run, tables, out = map(Path, sys.argv[1:])
    states = server_folder(out) / "clients"
    files = find_client_tables(tables)
    nodes = {
        k: {"run": str(run), "data": str(file), "state": str(states / file_stem(file))} for k, file in enumerate(files)
    }
    server = make_server_app(run_federation, {"run": str(run), "out": str(out), "clients": str(len(files))})
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    simulate(server, make_client_app(ClientNode, nodes), len(files), backend_config=resources)  # type: ignore[arg-type]


if __name__ == "__main__":
    from mooring.remote import flower

    flower.main()  # Ray's processes look for what they run in a module that they can import
