"""What `mooring serve` and `mooring federation up` start.

serve                  one process: HTTPS in a thread, and one run after another in the main thread
run_local_federation   a server and its clients on this machine, a client for each table of a folder
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import IO, NamedTuple

from mooring.core.errors import RequestError
from mooring.data.file_readers import ENDINGS, file_ending, file_stem
from mooring.engines.progress import OnProgress, ignore_progress
from mooring.engines.request import read_federation_request
from mooring.remote import keys
from mooring.remote.disclosure import AUDIT_FILE, append_record
from mooring.remote.join import DEFAULT_PORT, PARENT_VARIABLE, is_loopback
from mooring.remote.secure_rule import decide_secure
from mooring.remote.server_run import PARTICIPATION_FILE, run_federation
from mooring.runs.atomic_files import make_synced_folder
from mooring.runs.runfile import RunFile
from mooring.runs.sections import FederationSection

METRICS_TOKEN_FILE = "metrics.token"
MIN_PORT, MAX_PORT = 20_000, 32_000  # of servers on this machine
END_SECONDS = 20.0  # for a client to end after its run
TERMINATE_SECONDS = 5.0  # for a process to end when it is asked to
Report = Callable[[str], None]
Lead = Callable[..., object]  # leads a run to its end: `run_federation`, or that of another purpose
FIT_LEADS: Mapping[str, Lead] = MappingProxyType({"fit": run_federation})  # by the purpose of a run


class QueuedRun(NamedTuple):
    path: Path  # of the run file
    out: Path  # its run directory
    run: RunFile


def serve(
    paths: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    key_folder: Path | None = None,
    host: str = "127.0.0.1",
    port: int = DEFAULT_PORT,
    insecure: bool = False,
    clients: int | None = None,
    trust: bool = False,
    leads: Mapping[str, Lead] = FIT_LEADS,
    report: Report,
    on_progress: OnProgress = ignore_progress,
) -> list[Path]:
    """Serve one run, or several one after another, to their ends; return the run directories.

    The run directory of a single run is `out`; those of several are in `out`, by the names of the run files. A run that
    was interrupted is resumed; of several, those that are finished are skipped.
    """
    from mooring.remote.http.server import HttpTransport, listen
    from mooring.remote.http.signatures import EnrolledKeys

    check_transport(host, insecure, key_folder)
    queue = _read_queue(paths, Path(out).resolve(), clients, trust, leads)
    folder = server_folder(Path(out).resolve())
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the block below is left
    transport = HttpTransport(EnrolledKeys(key_folder), metrics_token(folder), report)
    with listen(transport, host, port, key_folder):
        for number, queued in enumerate(queue, start=1):
            place = f", run {number} of {len(queue)}" if len(queue) > 1 else ""
            if len(queue) > 1 and (queued.out / PARTICIPATION_FILE).exists():
                report(f"{queued.path.name} is finished ({queued.out}){place}")
                continue
            report(
                f"serving {run_name(queued.run)} on {format_address(host, port)}{place}; clients join with `mooring "
                "join`"
            )
            queued.out.parent.mkdir(parents=True, exist_ok=True)
            leads[queued.run.mooring.purpose](
                queued.run,
                transport,
                queued.out,
                report=report,
                record=partial(write_audit, folder / AUDIT_FILE, queued.path.stem),
                on_progress=report_gauges(transport.gauges, on_progress),
            )
            transport.nodes()  # reports refusals since the last look
    return [queued.out for queued in queue]


def write_audit(path: Path, run: str, **line: object) -> None:
    append_record(path, {"run": run} | line)


def _read_queue(
    paths: str | Path | Sequence[str | Path], out: Path, clients: int | None, trust: bool, leads: Mapping[str, Lead]
) -> list[QueuedRun]:
    """Return the runs to serve, each checked before any of them starts."""
    files = [Path(paths)] if isinstance(paths, str | Path) else [Path(path) for path in paths]
    if len({file.stem for file in files}) < len(files):
        raise RequestError("several run files need different names: their run directories are named after them.")
    queue = []
    for file in files:
        run = decide_secure(read_federation_request(file, trust))
        check_purpose(run, leads)
        if clients is not None:
            run = set_client_count(run, clients)
        elif run.federation is None or run.federation.clients is None:
            raise RequestError("how many clients take part? Give --num-clients 8, or clients = 8 in [federation].")
        queue.append(QueuedRun(file.resolve(), out if len(files) == 1 else out / file.stem, run))
    return queue


def check_purpose(run: RunFile, known: Mapping[str, object]) -> None:
    if run.mooring.purpose not in known:
        raise RequestError(
            f"a federation can {' or '.join(known)}, and the run file's purpose is {run.mooring.purpose}."
        )


def set_client_count(run: RunFile, clients: int) -> RunFile:
    """Return the run file with the number of clients."""
    options = run.federation or FederationSection()
    return run.model_copy(update={"federation": FederationSection(**options.model_dump() | {"clients": clients})})


def metrics_token(folder: Path) -> str:
    """Return the token for /metrics, from a file that only its owner can read."""
    path = folder / METRICS_TOKEN_FILE
    if not path.exists():
        keys.write_secret(path, secrets.token_urlsafe(24).encode() + b"\n")
    return path.read_text().strip()


def report_gauges(gauges: dict[str, float], on_progress: OnProgress) -> OnProgress:
    """Return `on_progress` that also sets gauges of /metrics; epsilon where the run is private."""
    started_at = time.monotonic()

    def report_both(what: str, done: int, rounds: int) -> None:
        on_progress(what, done, rounds)
        gauges.update(rounds_done=done, rounds_planned=rounds, run_seconds=time.monotonic() - started_at)
        if ": epsilon " in what:
            gauges["epsilon_spent"] = float(what.rpartition(" ")[2])

    return report_both


def format_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def server_folder(out: Path) -> Path:
    """Return the folder of the server's own files: keys, logs, audit."""
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


def run_local_federation(
    path: str | Path,
    folder: str | Path,
    out: str | Path,
    *,
    insecure: bool = False,
    trust: bool = False,
    leads: Mapping[str, Lead] = FIT_LEADS,
    report: Report,
    on_progress: OnProgress = ignore_progress,
) -> Path:
    """Run a server and a client for each table of `folder` on this machine; return the run directory."""
    files = find_client_tables(Path(folder))
    out = Path(out).resolve()
    own_folder = server_folder(out)
    make_synced_folder(own_folder / "clients")
    key_folder = None
    if not insecure:
        key_folder = own_folder / "keys"
        keys.init(key_folder, [file_stem(file) for file in files])
    port = find_free_port()
    with running_clients(files, Path(path).resolve(), own_folder, port, key_folder, trust):
        serve(
            path,
            out,
            key_folder=key_folder,
            port=port,
            insecure=insecure,
            clients=len(files),
            trust=trust,
            leads=leads,
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


def find_free_port() -> int:
    """Return a random free port, outside of the range that systems use for outgoing connections."""
    while True:
        port = MIN_PORT + secrets.randbelow(MAX_PORT - MIN_PORT)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def child_environment() -> dict[str, str]:
    """The environment of a client's process: this package on its path, and the process that it ends with."""
    package = str(Path(__file__).resolve().parents[2])
    paths = [package, *(part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part)]
    return os.environ | {PARENT_VARIABLE: str(os.getpid()), "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}


@contextmanager
def running_clients(
    files: list[Path], run: Path, folder: Path, port: int, key_folder: Path | None, trust: bool
) -> Iterator[None]:
    """Run `mooring join` for each table, until the block ends."""
    started = []
    try:
        for file in files:
            name = file_stem(file)
            arguments = ["join", str(run), "--data", str(file), "--state", str(folder / "clients" / name)]
            arguments += ["--server", f"127.0.0.1:{port}"] + (["--trust-code"] if trust else [])
            if key_folder is None:
                arguments += ["--insecure"]
            else:
                arguments += ["--ca", str(key_folder / keys.CA), "--key", str(key_folder / keys.CLIENTS / name)]
                arguments += ["--peers", str(key_folder / keys.PEERS)]
            with open_log(folder / "clients" / f"{name}.log") as log:
                command = [sys.executable, "-m", "mooring", *arguments]
                started.append(
                    subprocess.Popen(
                        command, env=child_environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
                    )
                )
        yield
        end = time.monotonic() + END_SECONDS
        for process in started:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(end - time.monotonic(), 0))
    finally:
        for process in started:
            if process.poll() is None:
                process.terminate()
        for process in started:
            stop_process(process)


def open_log(path: Path) -> IO[bytes]:
    """Open a log to append to, which only its owner can read."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab")


def stop_process(started: subprocess.Popen[bytes]) -> None:
    """Terminate a process, and kill it where that takes too long."""
    for stop in (started.terminate, started.kill):
        if started.poll() is not None:
            return
        stop()
        with suppress(subprocess.TimeoutExpired):
            started.wait(TERMINATE_SECONDS)
