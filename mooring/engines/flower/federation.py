"""What `mooring serve` and `mooring federation up` start, watch and stop.

serve                  a SuperLink behind its gateway, and one run after another as its Flower runs
run_local_federation   a server and its clients on this machine, a client for each table of a folder
"""

from __future__ import annotations

import base64
import datetime
import importlib.util
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import httpx

from mooring.core.errors import RequestError, WorkError
from mooring.core.types import JsonObject
from mooring.data.file_readers import ENDINGS, file_ending, file_stem
from mooring.engines.flower import keys
from mooring.engines.flower.child_process import (
    CHILD_MODULE,
    DEFAULT_PORT,
    TERMINATE_SECONDS,
    Report,
    child_environment,
    find_free_port,
    is_loopback,
    is_running,
    open_log,
    start_process,
    stop_process,
)
from mooring.engines.flower.client_app import AppPaths
from mooring.engines.flower.disclosure import AUDIT_FILE
from mooring.engines.flower.flower_patches import ControlClient
from mooring.engines.flower.server_run import PARTICIPATION_FILE
from mooring.engines.flower.superlink import (
    FIT_APPS,
    REFUSED_KEYS_FILE,
    RunningSuperLink,
    control_client,
    find_apps,
    make_app_files,
    read_run_status,
    report_gauges,
    start_superlink,
    stop_interrupted_runs,
    synchronize_keys,
)
from mooring.engines.progress import OnProgress, ignore_progress
from mooring.engines.request import read_federation_request
from mooring.runs.atomic_files import make_synced_folder, write_json
from mooring.runs.runfile import RunFile

RAY_MODULE = "mooring.engines.flower.ray_simulation"
RAY_ENGINE = "flower-simulation"
REVOKED_NAMES_FILE = "revoked.json"  # clients whose keys were revoked: the server's app reads it
SYNCHRONIZE_SECONDS = 2.0
GAUGE_SECONDS = 2.0  # between reports to /metrics
POLL_SECONDS = 0.2
MAX_CLOCK_SKEW_SECONDS = 5.0  # of a client's clock, as Flower has it


class QueuedRun(NamedTuple):
    path: Path  # of the run file
    out: Path  # its run directory
    run: RunFile


class Server(NamedTuple):
    """A SuperLink, the client of its control interface, and the folder of its files."""

    link: RunningSuperLink
    control: ControlClient
    folder: Path
    enrollment: Enrollment
    report: Report


def serve(
    paths: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    key_folder: Path | None = None,
    host: str = "127.0.0.1",
    port: int = DEFAULT_PORT,
    insecure: bool = False,
    clients: int | None = None,
    persistent: bool = True,
    trust: bool = False,
    apps: Mapping[str, AppPaths] = FIT_APPS,
    report: Report,
    on_progress: OnProgress = ignore_progress,
) -> list[Path]:
    """Serve one run, or several one after another, to their ends; return the run directories.

    The run directory of a single run is `out`; those of several are in `out`, by the names of the run files. A run that
    was interrupted is resumed; of several, those that are finished are skipped. `persistent`: the SuperLink keeps its
    state on disk, so that clients reconnect after it was killed. `apps` are the Flower apps by the purpose of a run.
    """
    check_transport(host, insecure, key_folder)
    queue = _read_queue(paths, Path(out).resolve(), clients, trust, apps)
    folder = server_folder(Path(out).resolve())
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    (folder / REFUSED_KEYS_FILE).unlink(missing_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the child processes are ended
    with start_superlink(folder, host, port, key_folder, persistent) as link:
        control = control_client(link)
        try:
            stop_interrupted_runs(control, report)
            server = Server(link, control, folder, Enrollment(control, key_folder, folder, report), report)
            server.enrollment.synchronize()
            for number, queued in enumerate(queue, start=1):
                place = f", run {number} of {len(queue)}" if len(queue) > 1 else ""
                if len(queue) > 1 and (queued.out / PARTICIPATION_FILE).exists():
                    report(f"{queued.path.name} is finished ({queued.out}){place}")
                    continue
                report(f"serving {run_name(queued.run)} on {host}:{port}{place}; clients join with `mooring join`")
                _lead_to_end(server, queued, clients, trust, apps, on_progress)
        finally:
            control.close()
    return [queued.out for queued in queue]


def _read_queue(
    paths: str | Path | Sequence[str | Path],
    out: Path,
    clients: int | None,
    trust: bool,
    apps: Mapping[str, AppPaths],
) -> list[QueuedRun]:
    """Return the runs to serve, each checked before any of them starts."""
    files = [Path(paths)] if isinstance(paths, str | Path) else [Path(path) for path in paths]
    if len({file.stem for file in files}) < len(files):
        raise RequestError("several run files need different names: their run directories are named after them.")
    queue = []
    for file in files:
        run = read_federation_request(file, trust)
        find_apps(run, apps)
        if run.federation is not None and run.federation.engine == RAY_ENGINE:
            raise RequestError(f'engine = "{RAY_ENGINE}" has no clients that join; use `mooring federation up`.')
        if clients is None and (run.federation is None or run.federation.clients is None):
            raise RequestError("how many clients take part? Give --num-clients 8, or clients = 8 in [federation].")
        queue.append(QueuedRun(file.resolve(), out if len(files) == 1 else out / file.stem, run))
    return queue


def _lead_to_end(
    server: Server,
    queued: QueuedRun,
    clients: int | None,
    trust: bool,
    apps: Mapping[str, AppPaths],
    on_progress: OnProgress,
) -> None:
    """Submit a run to the SuperLink, and follow it to its end."""
    progress = server.folder / f"progress-{time.time_ns()}.jsonl"
    progress.touch()
    queued.out.parent.mkdir(parents=True, exist_ok=True)
    config = {
        "run": str(queued.path),
        "out": str(queued.out),
        "progress": str(progress),
        "clients": "" if clients is None else str(clients),
        "audit": str(server.folder / AUDIT_FILE),
        "trust": "yes" if trust else "",
        "revoked": str(server.folder / REVOKED_NAMES_FILE),
    }
    number = server.control.start_run(make_app_files(find_apps(queued.run, apps)), config)
    follow_run(
        progress,
        server.enrollment.describe_refusal,
        lambda: read_run_status(server.control, number),
        server.link.is_alive,
        server.report,
        report_to_metrics(server.link, on_progress),
        server.enrollment.synchronize,
    )


def report_to_metrics(link: RunningSuperLink, on_progress: OnProgress) -> OnProgress:
    """Return `on_progress` that also reports rounds and seconds to /metrics; epsilon where the run is private."""
    started_at, reported = time.monotonic(), -GAUGE_SECONDS

    def report_both(what: str, done: int, rounds: int) -> None:
        nonlocal reported
        on_progress(what, done, rounds)
        if time.monotonic() - reported < GAUGE_SECONDS and done < rounds:
            return
        reported = time.monotonic()
        gauges = {"rounds_done": done, "rounds_planned": rounds, "run_seconds": time.monotonic() - started_at}
        if ": epsilon " in what:
            gauges["epsilon_spent"] = float(what.rpartition(" ")[2])
        with suppress(OSError, ValueError, httpx.HTTPError):
            report_gauges(link, gauges)

    return report_both


class Enrollment:
    """The enrolled keys of a server, which may change while it runs."""

    def __init__(self, control: ControlClient, key_folder: Path | None, folder: Path, report: Report):
        self.control, self.key_folder, self.report = control, key_folder, report
        self.file = folder / REVOKED_NAMES_FILE
        self.known: dict[str, bytes] | None = None
        self.names: dict[str, str] = {}  # by public key, also of revoked ones
        self.revoked: set[str] = set()

    def synchronize(self) -> None:
        """Register new keys and unregister those that are gone: the gateway refuses them, the app leaves them out."""
        if self.key_folder is None:
            return
        enrolled = keys.enrolled_keys(self.key_folder)
        if enrolled == self.known:
            return
        self.known = enrolled
        self.names |= {base64.b64encode(key).decode(): name for name, key in enrolled.items()}
        self.revoked = (self.revoked | synchronize_keys(self.control, enrolled, self.report)) - enrolled.keys()
        write_json(self.file, {"revoked": sorted(self.revoked)})

    def describe_refusal(self, line: JsonObject) -> str:
        return describe_refusal(self.names, line, set(self.known or ()))


def server_folder(out: Path) -> Path:
    """Return the folder of the server's own files: keys, logs, Flower's state."""
    return out.with_name(out.name + ".federation")


def run_name(run: RunFile) -> str:
    return "advice" if run.algorithm is None else run.algorithm.name


def check_transport(host: str, insecure: bool, key_folder: Path | None) -> None:
    """Refuse connections without TLS, except on this machine."""
    if key_folder is None and not insecure:
        raise RequestError("a federation needs TLS: make keys with `mooring keys init` and give --keys, or --insecure.")
    if key_folder is not None and insecure:
        raise RequestError("give --keys or --insecure, not both.")
    if insecure and not is_loopback(host):
        raise RequestError(f"--insecure is for this machine only, and {host} can be reached from others; give --keys.")
    for name in (keys.CA, keys.SERVER, keys.SERVER_KEY):
        if key_folder is not None and not (Path(key_folder) / name).exists():
            raise RequestError(f"{key_folder} has no {name}; make it with `mooring keys init`.")


def follow_run(
    progress: Path,
    describe_refused: Callable[[JsonObject], str],
    read_status: Callable[[], str],
    is_alive: Callable[[], bool],
    report: Report,
    on_progress: OnProgress,
    synchronize: Callable[[], None] = lambda: None,
) -> None:
    """Report what the server's app writes, and what the gateway refuses, until the app ends."""
    log, checked = progress.parent / "superlink.log", time.monotonic()
    synchronized = time.monotonic()
    app: int | None = None  # the process of the server's app
    with follow_json_lines(progress) as read_lines, follow_json_lines(progress.parent / REFUSED_KEYS_FILE) as refusals:
        while True:
            for line in refusals():
                report(describe_refused(line))
            lines = read_lines()
            for line in lines:
                if line["kind"] == "report":
                    report(line["text"])
                elif line["kind"] == "round":
                    on_progress(line["what"], line["done"], line["rounds"])
                elif line["kind"] == "begun":
                    app = int(line["process"])
                elif line["kind"] == "failed":
                    raise (RequestError if line["request"] else WorkError)(line["text"])
                elif line["kind"] == "done":
                    return
            if time.monotonic() - synchronized > SYNCHRONIZE_SECONDS:
                synchronize()
                synchronized = time.monotonic()
            if not is_alive():
                raise WorkError(f"Flower has ended ({log}); the same command resumes from the last round.")
            if app is not None and not lines and not is_running(app):
                report("the server's app was ended; its processes are being stopped")
                raise WorkError(f"the server's app was ended ({log}); the same command resumes from the last round.")
            if not lines and time.monotonic() - checked > TERMINATE_SECONDS:
                checked = time.monotonic()
                if (status := read_status()).startswith("finished"):
                    raise WorkError(f"Flower's run is {status} ({log}); the same command resumes from the last round.")
            time.sleep(POLL_SECONDS)


@contextmanager
def follow_json_lines(path: Path) -> Iterator[Callable[[], list[JsonObject]]]:
    """Yield a function that returns the lines of JSON that were added since its last call."""
    partial_line = ""
    with path.open("a+") as file:
        file.seek(0)

        def read_added() -> list[JsonObject]:
            nonlocal partial_line
            partial_line += file.read()
            *lines, partial_line = partial_line.split("\n")
            return [json.loads(line) for line in lines]

        yield read_added


def describe_refusal(names: dict[str, str], line: JsonObject, enrolled: set[str] | None = None) -> str:
    """Return a sentence about a client whose signature was refused: its clock, or its key."""
    if line["key"] not in names:
        return "a client whose key is not enrolled was refused"
    name = names[line["key"]]
    if enrolled is not None and name not in enrolled:
        return f"client '{name}' was refused: its key was revoked"
    with suppress(ValueError):
        skew = datetime.datetime.fromisoformat(line["when"]).timestamp() - line["now"]
        if abs(skew) > MAX_CLOCK_SKEW_SECONDS:
            direction = "ahead" if skew > 0 else "behind"
            return f"client '{name}' was refused: its clock is {abs(skew):.0f} s {direction}"
    return f"client '{name}' was refused: its signature is not valid"


def run_local_federation(
    path: str | Path,
    folder: str | Path,
    out: str | Path,
    *,
    embedded: bool = False,
    insecure: bool = False,
    trust: bool = False,
    apps: Mapping[str, AppPaths] = FIT_APPS,
    report: Report,
    on_progress: OnProgress = ignore_progress,
) -> Path:
    """Run a server and a client for each table of `folder` on this machine; return the run directory."""
    files = find_client_tables(Path(folder))
    out = Path(out).resolve()
    own_folder = server_folder(out)
    make_synced_folder(own_folder / "clients")
    run = read_federation_request(path, trust)
    if run.federation is not None and run.federation.engine == RAY_ENGINE:
        if run.algorithm is None:
            raise RequestError(f'engine = "{RAY_ENGINE}" is for fits; `mooring advise` advises on one machine.')
        return run_ray_simulation(Path(path).resolve(), Path(folder).resolve(), out, report, on_progress)
    if run.federation is not None and run.federation.secure and insecure:
        raise RequestError("secure = true needs the clients' keys; leave out --insecure.")
    key_folder = None
    if not insecure:
        key_folder = own_folder / "keys"
        keys.init(key_folder, [file_stem(file) for file in files])
    port = find_free_port()
    with running_clients(files, Path(path).resolve(), own_folder, port, key_folder, embedded, trust):
        serve(
            path,
            out,
            key_folder=key_folder,
            port=port,
            insecure=insecure,
            clients=len(files),
            persistent=False,
            trust=trust,
            apps=apps,
            report=report,
            on_progress=on_progress,
        )
    return out


def find_client_tables(folder: Path) -> list[Path]:
    """Return a folder's tables, one per client."""
    files = sorted(file for file in folder.iterdir() if file_ending(file) in ENDINGS)
    if len(files) < 2:
        raise RequestError(f"{folder} holds {len(files)} client tables; a federation needs two or more.")
    return files


def run_ray_simulation(run: Path, folder: Path, out: Path, report: Report, on_progress: OnProgress) -> Path:
    """Run the same run in Flower's own simulation; return the run directory."""
    if importlib.util.find_spec("ray") is None:
        raise RequestError(f'engine = "{RAY_ENGINE}" needs Ray; install it with: pip install "mooring-fl[ray]".')
    own_folder = server_folder(out)
    progress = own_folder / f"progress-{time.time_ns()}.jsonl"
    arguments = [RAY_MODULE, str(run), str(folder), str(own_folder / "clients"), str(out), str(progress)]
    log = own_folder / "simulation.log"
    with start_process(arguments, own_folder / "home", log, RAY_USAGE_STATS_ENABLED="0") as started:
        follow_run(progress, str, lambda: "running", lambda: started.poll() is None, report, on_progress)
        with suppress(subprocess.TimeoutExpired):
            started.wait(4 * TERMINATE_SECONDS)
    return out


@contextmanager
def running_clients(
    files: list[Path], run: Path, folder: Path, port: int, key_folder: Path | None, embedded: bool, trust: bool
) -> Iterator[None]:
    """Run `mooring join` for each table, until the block ends."""
    started = []
    try:
        for file in files:
            name = file_stem(file)
            arguments = ["join", str(run), "--data", str(file), "--state", str(folder / "clients" / name)]
            arguments += ["--server", f"127.0.0.1:{port}"] + (["--embedded"] if embedded else [])
            arguments += ["--trust-code"] if trust else []
            if key_folder is None:
                arguments += ["--insecure"]
            else:
                arguments += ["--ca", str(key_folder / keys.CA), "--key", str(key_folder / keys.CLIENTS / name)]
                arguments += ["--peers", str(key_folder / keys.PEERS)]
            with open_log(folder / "clients" / f"{name}.log") as log:
                started.append(
                    subprocess.Popen(
                        [sys.executable, "-m", CHILD_MODULE, "mooring", *arguments],
                        env=child_environment(folder / "home"),
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        yield
        for process in started:
            with suppress(subprocess.TimeoutExpired):
                process.wait(4 * TERMINATE_SECONDS)
    finally:
        for process in started:
            if process.poll() is None:
                process.terminate()
        for process in started:
            stop_process(process)
