"""What `mooring serve`, `mooring join` and `mooring federation up` start, watch and stop.

    serve   a SuperLink behind its guard, our app as its one run, and lines of progress from it
    join    a node for one client: Flower's own, or the embedded one
    up      both on this machine, a client for each table of a folder

Every process that is started here ends with the process that started it. Telemetry and update checks are off.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import importlib.util
import ipaddress
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

from mooring.core.errors import RequestError, WorkError
from mooring.data.readers import ENDINGS, ending_of, stem_of
from mooring.engines.fit import Tell, silent
from mooring.engines.flower import keys
from mooring.engines.flower.home import DISMISSED, DONE, RESULT, Home
from mooring.engines.request import asked_run
from mooring.runs.files import read_json
from mooring.runs.runfile import RunFile

PORT = 9092
STARTED, ON_RAY = "mooring.engines.flower.started", "mooring.engines.flower.on_ray"
SIMULATION = "flower-simulation"
PATIENCE = 300.0  # seconds that a process may take to start, on a machine that is busy
GRACE = 5.0  # seconds that a process has to end
CLOCK = 5.0  # seconds that a client's clock may be off, as Flower has it
REFUSED = "refused.jsonl"  # whom the guard saw refused
Say = Callable[[str], None]

PYPROJECT = """[project]
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
run = ""
out = ""
progress = ""
clients = ""
"""
APPS = {  # by purpose: where Flower finds the two apps
    "fit": ("mooring.engines.flower.client_app.app", "mooring.engines.flower.server_app.app"),
    "advise": ("mooring.advice.flower_app.client", "mooring.advice.flower_app.server"),
}


def app_of(run: RunFile) -> dict[str, str]:
    """The files of the Flower app that runs this."""
    files = {"pyproject.toml": PYPROJECT, "mooring_app/__init__.py": ""}
    for name, place in zip(("client", "server"), APPS[run.mooring.purpose]):
        module, _, what = place.rpartition(".")
        files[f"mooring_app/{name}.py"] = f"import {module}\n\napp = {module}.{what}\n"
    return files


def write_app(path: str | Path, folder: str | Path) -> Path:
    """The Flower app of a run file as a folder that `flwr run` starts; `run` is filled in, the rest is for
    --run-config."""
    run, folder = asked_run(path), Path(folder)
    if folder.exists():
        raise RequestError(f"{folder} already exists; choose another folder for the app.")
    for name, text in app_of(run).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text.replace('run = ""', f"run = {json.dumps(str(Path(path).resolve()))}"))
    return folder


def need_flower() -> None:
    """One sentence where the extra is missing."""
    if importlib.util.find_spec("flwr") is None:
        raise RequestError("a federation across machines needs Flower; install it with: pip install 'mooring[flower]'.")


def serve(
    path: str | Path,
    out: str | Path,
    *,
    key_folder: Path | None = None,
    host: str = "127.0.0.1",
    port: int = PORT,
    insecure: bool = False,
    clients: int | None = None,
    lasting: bool = True,
    say: Say,
    tell: Tell = silent,
) -> Path:
    """Run a federation to its end, or go on with the one in `out`; the run directory.

    `lasting`: the SuperLink keeps its own state on disk, so that clients find it again after it was killed.
    """
    need_flower()
    run, out = asked_run(path), Path(out).resolve()
    check_lines(host, insecure, key_folder)
    if run.federation is not None and run.federation.engine == SIMULATION:
        raise RequestError(f'engine = "{SIMULATION}" has no clients that join; use `mooring federation up`.')
    if clients is None and (run.federation is None or run.federation.clients is None):
        raise RequestError("how many clients take part? Say --clients 8, or [federation] clients = 8 in the run file.")
    folder = beside(out)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / REFUSED).unlink(missing_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that what was started here is ended
    with superlink(folder, host, port, key_folder, lasting) as (address, ca, alive):
        control = controls(address, ca)
        try:
            stop_old_runs(control, say)
            clients_keys = {} if key_folder is None else keys.enrolled(key_folder)
            for name, key in clients_keys.items():
                enrol(control, name, key)
            progress = folder / f"progress-{time.time_ns()}.jsonl"
            progress.touch()
            config = {"run": str(Path(path).resolve()), "out": str(out), "progress": str(progress)}
            config["clients"] = "" if clients is None else str(clients)
            number = submit(control, config, app_of(run))
            say(f"serving {run_name(run)} on {host}:{port}; clients join with `mooring join`")
            known = {base64.b64encode(key).decode(): name for name, key in clients_keys.items()}
            follow(progress, partial(refusal, known), lambda: status(control, number), alive, say, tell)
        finally:
            control.close()
    return out


def beside(out: Path) -> Path:
    """Where a server keeps Flower's own files."""
    return out.with_name(out.name + ".federation")


def run_name(run: RunFile) -> str:
    return "an advice" if run.algorithm is None else run.algorithm.name


def check_lines(host: str, insecure: bool, key_folder: Path | None) -> None:
    """TLS, or nothing but this machine."""
    if key_folder is None and not insecure:
        raise RequestError("a federation needs TLS: make keys with `mooring keys init` and give --keys, or --insecure.")
    if key_folder is not None and insecure:
        raise RequestError("give --keys or --insecure, not both.")
    if insecure and not is_loopback(host):
        raise RequestError(f"--insecure is for this machine only, and {host} can be reached from others; give --keys.")
    for name in (keys.CA, keys.SERVER, keys.SERVER_KEY):
        if key_folder is not None and not (Path(key_folder) / name).exists():
            raise RequestError(f"{key_folder} has no {name}; make it with `mooring keys init`.")


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def environment(home: Path) -> dict[str, str]:
    """For Flower's processes: silent, with a home of their own, our package and its commands within reach."""
    home.mkdir(parents=True, exist_ok=True)
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


@contextmanager
def process(arguments: list[str], home: Path, log: Path, **known: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that writes to a log and is ended with the block; `known` are variables of its environment."""
    with log.open("ab") as file:
        started = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            env=environment(home) | known,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        yield started
    finally:
        end(started)


def end(started: subprocess.Popen[bytes]) -> None:
    for word, seconds in ((signal.SIGTERM, GRACE), (signal.SIGKILL, GRACE)):
        if started.poll() is not None:
            return
        started.send_signal(word)
        with suppress(subprocess.TimeoutExpired):
            started.wait(seconds)


@contextmanager
def superlink(
    folder: Path, host: str, port: int, key_folder: Path | None, lasting: bool
) -> Iterator[tuple[str, Path | None, Callable[[], bool]]]:
    """A SuperLink whose files are in `folder`; its address for this machine, the certificate to check it by, and
    whether it still lives."""
    wait_for_port(host, port)
    arguments = [STARTED, "superlink", "--host", host, "--port", str(port)]
    arguments += ["--database", str(folder / "state.db")] if lasting else []
    arguments += ["--disable-runtime-dependency-installation"]
    ca = None
    if key_folder is None:
        arguments += ["--insecure"]
    else:
        ca = key_folder / keys.CA
        arguments += ["--ssl-ca-certfile", str(ca), "--ssl-certfile", str(key_folder / keys.SERVER)]
        arguments += ["--ssl-keyfile", str(key_folder / keys.SERVER_KEY), "--enable-supernode-auth"]
    address = f"{host if is_loopback(host) else '127.0.0.1'}:{port}"
    log = folder / "superlink.log"
    with process(arguments, folder / "home", log, MOORING_REFUSED=str(folder / REFUSED)) as started:
        begun = time.monotonic()
        while not answers(address, ca):
            if started.poll() is not None or time.monotonic() - begun > PATIENCE:
                raise WorkError(f"Flower's SuperLink did not start; {log} says why.")
            time.sleep(0.2)
        yield address, ca, lambda: started.poll() is None


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
                if time.monotonic() - begun > 3 * GRACE:
                    raise RequestError(f"port {port} of {host} is taken ({error.strerror}); choose --port.") from error
        time.sleep(0.3)


def answers(address: str, ca: Path | None) -> bool:
    import ssl

    import httpx

    check: Any = True if ca is None else ssl.create_default_context(cafile=str(ca))
    try:
        return httpx.get(f"{'http' if ca is None else 'https'}://{address}/health", verify=check, timeout=2).is_success
    except httpx.HTTPError:
        return False


def controls(address: str, ca: Path | None) -> Any:
    """A client of the interface that starts and stops runs."""
    from flwr.cli.cli_client_interceptor import CliClientHttpInterceptor
    from flwr.supercore.control import ControlHttpClient
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

    return ControlHttpClient.from_server_address(
        server_address=address,
        insecure=ca is None,
        root_certificates=None if ca is None else ca.read_bytes(),
        interceptors=[CliClientHttpInterceptor(), RuntimeVersionHttpInterceptor(component_name="flwr CLI")],
    )


def stop_old_runs(control: Any, say: Say) -> None:
    """A run that a killed server left would go on beside the new one."""
    from flwr.proto.control_pb2 import ListRunsRequest, StopRunRequest

    for number, run in control.ListRuns(ListRunsRequest()).run_dict.items():
        if run.status.status != "finished":
            control.StopRun(StopRunRequest(run_id=number))
            say("an interrupted run was stopped; it goes on from its checkpoint")


def enrol(control: Any, name: str, key: bytes) -> None:
    import httpx
    from flwr.proto.control_pb2 import RegisterNodeRequest

    try:
        control.RegisterNode(RegisterNodeRequest(public_key=key, name=name))
    except httpx.HTTPStatusError as error:
        if error.response.status_code not in (httpx.codes.CONFLICT, httpx.codes.PRECONDITION_FAILED):
            raise WorkError(f"client '{name}' could not be enrolled: {error.response.text[:200]}") from error


def submit(control: Any, config: dict[str, str], app: dict[str, str]) -> int:
    """Start an app of these files with these settings; the number of Flower's run."""
    from flwr.cli.build import build_fab_from_files
    from flwr.common.serde import fab_to_proto, user_config_to_proto
    from flwr.proto.control_pb2 import StartRunRequest
    from flwr.supercore.fab import Fab

    content, _ = build_fab_from_files({name: text.encode() for name, text in app.items()})
    fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
    given: dict[str, Any] = dict(config)
    return control.StartRun(StartRunRequest(fab=fab_to_proto(fab), override_config=user_config_to_proto(given))).run_id


def status(control: Any, number: int) -> str:
    import httpx
    from flwr.proto.control_pb2 import ListRunsRequest

    try:
        run = control.ListRuns(ListRunsRequest(run_id=number)).run_dict[number]
    except httpx.TransportError:
        return "unknown"  # whether the SuperLink lives is seen elsewhere
    return f"{run.status.status} {run.status.sub_status}".strip()


def follow(
    progress: Path,
    refused: Callable[[dict[str, Any]], str],
    state: Callable[[], str],
    alive: Callable[[], bool],
    say: Say,
    tell: Tell,
) -> None:
    """Pass on what the app writes, and what the guard does, until the app has ended."""
    log, looked = progress.parent / "superlink.log", time.monotonic()
    with tail(progress) as lines, tail(progress.parent / REFUSED) as refusals:
        while True:
            for line in refusals():
                say(refused(line))
            news = lines()
            for line in news:
                if line["kind"] == "said":
                    say(line["text"])
                elif line["kind"] == "round":
                    tell(line["what"], line["done"], line["rounds"])
                elif line["kind"] == "failed":
                    raise (RequestError if line["request"] else WorkError)(line["text"])
                elif line["kind"] == "done":
                    return
            if not alive():
                raise WorkError(f"Flower has ended ({log}); the same command goes on from the last round.")
            if not news and time.monotonic() - looked > GRACE:
                looked = time.monotonic()
                if (now := state()).startswith("finished"):
                    raise WorkError(f"Flower's run is {now} ({log}); the same command goes on from the last round.")
            time.sleep(0.2)


@contextmanager
def tail(path: Path) -> Iterator[Callable[[], list[Any]]]:
    """A function that gives the lines of JSON that were added since it was last called."""
    rest = ""
    with path.open("a+") as file:
        file.seek(0)

        def added() -> list[Any]:
            nonlocal rest
            rest += file.read()
            *whole, rest = rest.split("\n")
            return [json.loads(line) for line in whole]

        yield added


def refusal(names: dict[str, str], line: dict[str, Any]) -> str:
    """What to say of a client whose signature was refused: its clock, or its key."""
    who = f"client '{names[line['key']]}'" if line["key"] in names else "a client whose key was not enrolled"
    with suppress(ValueError):
        off = datetime.datetime.fromisoformat(line["when"]).timestamp() - line["now"]
        if abs(off) > CLOCK:
            return f"{who} was refused: its clock is {abs(off):.0f} s {'ahead' if off > 0 else 'behind'}"
    return f"{who} was refused: its signature is not right"


def join(
    path: str | Path,
    data: str | Path,
    state: str | Path,
    *,
    server: str = f"127.0.0.1:{PORT}",
    name: str | None = None,
    ca: Path | None = None,
    key: Path | None = None,
    insecure: bool = False,
    embedded: bool = False,
    kinds: Mapping[str, type[Home]] = MappingProxyType({"fit": Home}),
    say: Say,
) -> dict[str, Any]:
    """Take part with one client's table until the run is over; how its own model does, and where it is.

    `kinds` are clients by the purpose of the run."""
    need_flower()
    host = server.rsplit(":", 1)[0].strip("[]")
    if (ca is None or key is None) and not insecure:
        raise RequestError("joining needs TLS: give --ca and --key, as `mooring keys init` makes them, or --insecure.")
    if insecure and not is_loopback(host):
        raise RequestError(f"--insecure is for this machine only, and {host} is another; give --ca and --key.")
    run = asked_run(path)
    home = kinds[run.mooring.purpose](run, Path(data).resolve(), Path(state).resolve(), name)
    home.member  # noqa: B018 - what is wrong with the table is told before anything is sent
    say(f"client '{home.name}' takes part in {home.what}. A curious server sees {home.reveals}.")
    done, dismissed = home.folder / DONE, home.folder / DISMISSED
    for former in (done, dismissed):
        former.unlink(missing_ok=True)

    def over() -> bool:
        return done.exists() or dismissed.exists()

    if embedded:
        from mooring.engines.flower.node import live

        live(home, server, ca=ca, key=key, say=say, until=over)
    else:
        stock_node(home, server, ca, key, over, say)
    if dismissed.exists():
        raise RequestError(f"the server does without this client: {read_json(dismissed)['why']}")
    return read_json(done) | {"result": str(home.folder / RESULT)}


def stock_node(home: Home, server: str, ca: Path | None, key: Path | None, until: Callable[[], bool], say: Say) -> None:
    """Flower's own node, started anew with longer and longer pauses whenever it ends; its letters come to our door."""
    from flwr.app import RecordDict

    from mooring.engines.flower.door import door
    from mooring.engines.flower.replies import reply_of

    memory = SimpleNamespace(state=RecordDict())
    with door(lambda message: reply_of(home, message, memory)) as address:
        keep_node(home, server, ca, key, address, until, say)


def keep_node(
    home: Home, server: str, ca: Path | None, key: Path | None, address: str, until: Callable[[], bool], say: Say
) -> None:
    import httpx

    from mooring.engines.flower.door import DOOR
    from mooring.engines.flower.node import remember_node, take_leave

    home.folder.mkdir(parents=True, exist_ok=True)
    pause, log = 1.0, home.folder / "supernode.log"
    say(f"looking for {server} with Flower's own node, which writes to {log}")
    while not until():
        if log.exists() and (known := re.findall(r"SuperNode ID: (\d+)", log.read_text(errors="replace"))):
            remember_node(home, int(known[-1]))
        with suppress(httpx.HTTPError):  # the node itself tells what is wrong with the connection
            take_leave(home, server, ca, key)
        arguments = [STARTED, "supernode", "--superlink", server, "--node-config", f"{DOOR}={json.dumps(address)}"]
        arguments += ["--host", "127.0.0.1", "--port", str(free_port())]
        arguments += ["--insecure"] if ca is None else ["--root-certificates", str(ca)]
        arguments += [] if key is None else ["--auth-supernode-private-key", str(key)]
        with process(arguments, home.folder / "home", log) as started:
            while started.poll() is None and not until():
                time.sleep(0.3)
            if until():
                time.sleep(2 * GRACE)  # the last reply is on its way
                return
        say(f"Flower's node ended (see {log}); it is started again in {pause:g} s")
        time.sleep(pause)
        pause = min(2 * pause, 30.0)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def up(
    path: str | Path,
    folder: str | Path,
    out: str | Path,
    *,
    embedded: bool = False,
    insecure: bool = False,
    say: Say,
    tell: Tell = silent,
) -> Path:
    """A whole federation on this machine: a client for each table of `folder`."""
    need_flower()
    files = tables_of(Path(folder))
    out = Path(out).resolve()
    place = beside(out)
    (place / "clients").mkdir(parents=True, exist_ok=True)
    run = asked_run(path)
    if run.federation is not None and run.federation.engine == SIMULATION:
        if run.algorithm is None:
            raise RequestError(f'engine = "{SIMULATION}" is for fits; `mooring advise` advises on one machine.')
        return on_ray(Path(path).resolve(), Path(folder).resolve(), out, say, tell)
    key_folder = None
    if not insecure:
        key_folder = place / "keys"
        keys.init(key_folder, [stem_of(file) for file in files])
    port = free_port()
    with everyone(files, Path(path).resolve(), place, port, key_folder, embedded):
        return serve(
            path,
            out,
            key_folder=key_folder,
            port=port,
            insecure=insecure,
            clients=len(files),
            lasting=False,
            say=say,
            tell=tell,
        )


def tables_of(folder: Path) -> list[Path]:
    """A folder's tables, one a client."""
    files = sorted(file for file in folder.iterdir() if ending_of(file) in ENDINGS)
    if len(files) < 2:
        raise RequestError(f"{folder} holds {len(files)} client tables; a federation needs two or more.")
    return files


def on_ray(run: Path, folder: Path, out: Path, say: Say, tell: Tell) -> Path:
    """The same run in Flower's own simulation."""
    if importlib.util.find_spec("ray") is None:
        raise RequestError(f'engine = "{SIMULATION}" needs Ray; install it with: pip install "mooring[ray]".')
    place = beside(out)
    progress = place / f"progress-{time.time_ns()}.jsonl"
    words = [ON_RAY, str(run), str(folder), str(place / "clients"), str(out), str(progress)]
    with process(words, place / "home", place / "simulation.log", RAY_USAGE_STATS_ENABLED="0") as started:
        follow(progress, str, lambda: "running", lambda: started.poll() is None, say, tell)
        with suppress(subprocess.TimeoutExpired):
            started.wait(4 * GRACE)
    return out


@contextmanager
def everyone(
    files: list[Path], run: Path, place: Path, port: int, key_folder: Path | None, embedded: bool
) -> Iterator[None]:
    """A `mooring join` for each table, ended with the block."""
    started = []
    try:
        for file in files:
            name = stem_of(file)
            words = ["join", str(run), "--data", str(file), "--state", str(place / "clients" / name)]
            words += ["--server", f"127.0.0.1:{port}"] + (["--embedded"] if embedded else [])
            if key_folder is None:
                words += ["--insecure"]
            else:
                words += ["--ca", str(key_folder / keys.CA), "--key", str(key_folder / keys.CLIENTS / name)]
            log = place / "clients" / f"{name}.log"
            with log.open("ab") as file_:
                started.append(
                    subprocess.Popen(
                        [sys.executable, "-m", STARTED, "mooring", *words],
                        env=environment(place / "home"),
                        stdin=subprocess.DEVNULL,
                        stdout=file_,
                        stderr=subprocess.STDOUT,
                    )
                )
        yield
        for one in started:
            with suppress(subprocess.TimeoutExpired):
                one.wait(4 * GRACE)
    finally:
        for one in started:
            if one.poll() is None:
                one.terminate()
        for one in started:
            end(one)
