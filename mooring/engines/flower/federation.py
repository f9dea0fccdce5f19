"""What `mooring serve` and `mooring federation up` start, watch and stop.

serve   a SuperLink behind its guard, our app as its one run, and lines of progress from it
up      a server and its clients on this machine, a client for each table of a folder
"""

from __future__ import annotations

import base64
import datetime
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from mooring.core.errors import RequestError, WorkError
from mooring.data.file_readers import ENDINGS, file_ending, file_stem
from mooring.engines.flower import keys
from mooring.engines.flower.app_files import make_app_files
from mooring.engines.flower.audit import AUDIT_FILE
from mooring.engines.flower.processes import (
    CHILD_MODULE,
    DEFAULT_PORT,
    TERMINATE_SECONDS,
    Say,
    child_environment,
    end,
    find_free_port,
    is_loopback,
    open_log,
    process,
    require_flower,
)
from mooring.engines.flower.superlink import (
    REFUSED_KEYS_FILE,
    RunningSuperLink,
    control_client,
    report_gauges,
    status,
    stop_interrupted_runs,
    submit_run,
    superlink,
    synchronize,
)
from mooring.engines.progress import OnProgress, ignore_progress
from mooring.engines.request import read_federation_request
from mooring.runs.atomic_files import make_synced_folder, write_json
from mooring.runs.runfile import RunFile

RAY_MODULE = "mooring.engines.flower.ray_simulation"
RAY_ENGINE = "flower-simulation"
REVOKED_NAMES = "revoked.json"  # clients whose keys were taken back: the server's app reads it
SYNCHRONIZE_SECONDS = 2.0
GAUGE_SECONDS = 2.0  # between reports to /metrics
MAX_CLOCK_SKEW_SECONDS = 5.0  # seconds that a client's clock may be off, as Flower has it


def serve(
    path: str | Path,
    out: str | Path,
    *,
    key_folder: Path | None = None,
    host: str = "127.0.0.1",
    port: int = DEFAULT_PORT,
    insecure: bool = False,
    clients: int | None = None,
    lasting: bool = True,
    trust: bool = False,
    say: Say,
    tell: OnProgress = ignore_progress,
) -> Path:
    """Run a federation to its end, or go on with the one in `out`; the run directory.

    `lasting`: the SuperLink keeps its own state on disk, so that clients find it again after it was killed.
    """
    require_flower()
    run, out = read_federation_request(path, trust), Path(out).resolve()
    check_transport(host, insecure, key_folder)
    if run.federation is not None and run.federation.engine == RAY_ENGINE:
        raise RequestError(f'engine = "{RAY_ENGINE}" has no clients that join; use `mooring federation up`.')
    if clients is None and (run.federation is None or run.federation.clients is None):
        raise RequestError("how many clients take part? Give --num-clients 8, or clients = 8 in [federation].")
    folder = server_folder(out)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    (folder / REFUSED_KEYS_FILE).unlink(missing_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that what was started here is ended
    with superlink(folder, host, port, key_folder, lasting) as link:
        control = control_client(link)
        tell = report_to_metrics(link, tell)
        try:
            stop_interrupted_runs(control, say)
            enrollment = Enrollment(control, key_folder, folder, say)
            enrollment.synchronize()
            progress = folder / f"progress-{time.time_ns()}.jsonl"
            progress.touch()
            config = {"run": str(Path(path).resolve()), "out": str(out), "progress": str(progress)}
            config["clients"] = "" if clients is None else str(clients)
            config["audit"] = str(folder / AUDIT_FILE)
            config["trust"] = "yes" if trust else ""
            config["revoked"] = str(folder / REVOKED_NAMES)
            number = submit_run(control, config, make_app_files(run))
            say(f"serving {run_name(run)} on {host}:{port}; clients join with `mooring join`")
            follow_run(
                progress, enrollment.refusal, lambda: status(control, number), link.is_alive, say, tell,
                enrollment.synchronize,
            )  # fmt: skip
        finally:
            control.close()
    return out


def report_to_metrics(link: RunningSuperLink, tell: OnProgress) -> OnProgress:
    """`tell` that also reports rounds and seconds to /metrics; epsilon where the run is private."""
    begun, reported = time.monotonic(), -GAUGE_SECONDS

    def both(what: str, done: int, rounds: int) -> None:
        nonlocal reported
        tell(what, done, rounds)
        if time.monotonic() - reported < GAUGE_SECONDS and done < rounds:
            return
        reported = time.monotonic()
        gauges = {"rounds_done": done, "rounds_planned": rounds, "run_seconds": time.monotonic() - begun}
        if ": epsilon " in what:
            gauges["epsilon_spent"] = float(what.rpartition(" ")[2])
        with suppress(OSError, ValueError, httpx.HTTPError):
            report_gauges(link, gauges)

    return both


class Enrollment:
    """The enrolled keys of a server, which may change while it runs."""

    def __init__(self, control: Any, key_folder: Path | None, folder: Path, say: Say):
        self.control, self.key_folder, self.file, self.say = control, key_folder, folder / REVOKED_NAMES, say
        self.known: dict[str, bytes] | None = None
        self.names: dict[str, str] = {}  # by public key, also of those that are revoked now
        self.revoked: set[str] = set()

    def synchronize(self) -> None:
        """Register new keys, and take back those that are gone: the gateway refuses them, the app leaves them out."""
        if self.key_folder is None:
            return
        now = keys.enrolled_keys(self.key_folder)
        if now == self.known:
            return
        self.known = now
        self.names |= {base64.b64encode(key).decode(): name for name, key in now.items()}
        self.revoked = (self.revoked | synchronize(self.control, now, self.say)) - now.keys()
        write_json(self.file, {"revoked": sorted(self.revoked)})

    def refusal(self, line: dict[str, Any]) -> str:
        return refusal(self.names, line, set(self.known or ()))


def server_folder(out: Path) -> Path:
    """Where a server keeps Flower's own files."""
    return out.with_name(out.name + ".federation")


def run_name(run: RunFile) -> str:
    return "an advice" if run.algorithm is None else run.algorithm.name


def check_transport(host: str, insecure: bool, key_folder: Path | None) -> None:
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


def follow_run(
    progress: Path,
    refused: Callable[[dict[str, Any]], str],
    state: Callable[[], str],
    alive: Callable[[], bool],
    say: Say,
    tell: OnProgress,
    synchronize: Callable[[], None] = lambda: None,
) -> None:
    """Pass on what the app writes, and what the gateway refuses, until the app has ended."""
    log, looked = progress.parent / "superlink.log", time.monotonic()
    synchronized = time.monotonic()
    app: int | None = None  # the process of the server's app
    with follow_json_lines(progress) as lines, follow_json_lines(progress.parent / REFUSED_KEYS_FILE) as refusals:
        while True:
            for line in refusals():
                say(refused(line))
            news = lines()
            for line in news:
                if line["kind"] == "said":
                    say(line["text"])
                elif line["kind"] == "round":
                    tell(line["what"], line["done"], line["rounds"])
                elif line["kind"] == "begun":
                    app = int(line["process"])
                elif line["kind"] == "failed":
                    raise (RequestError if line["request"] else WorkError)(line["text"])
                elif line["kind"] == "done":
                    return
            if time.monotonic() - synchronized > SYNCHRONIZE_SECONDS:
                synchronize()
                synchronized = time.monotonic()
            if not alive():
                raise WorkError(f"Flower has ended ({log}); the same command resumes from the last round.")
            if app is not None and not news and not is_running(app):
                say("the server's app was ended; its processes are being stopped")
                raise WorkError(f"the server's app was ended ({log}); the same command resumes from the last round.")
            if not news and time.monotonic() - looked > TERMINATE_SECONDS:
                looked = time.monotonic()
                if (now := state()).startswith("finished"):
                    raise WorkError(f"Flower's run is {now} ({log}); the same command resumes from the last round.")
            time.sleep(0.2)


def is_running(process: int) -> bool:
    """Whether a process of this machine lives; a child that has ended and was not waited for does not."""
    try:
        os.kill(process, 0)
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except OSError:
        return True  # another system, or somebody else's


@contextmanager
def follow_json_lines(path: Path) -> Iterator[Callable[[], list[Any]]]:
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


def refusal(names: dict[str, str], line: dict[str, Any], enrolled: set[str] | None = None) -> str:
    """What to say of a client whose signature was refused: its clock, or its key."""
    who = f"client '{names[line['key']]}'" if line["key"] in names else "a client whose key is not enrolled"
    if line["key"] not in names:
        return f"{who} was refused"
    if enrolled is not None and names[line["key"]] not in enrolled:
        return f"{who} was refused: its key was revoked"
    with suppress(ValueError):
        off = datetime.datetime.fromisoformat(line["when"]).timestamp() - line["now"]
        if abs(off) > MAX_CLOCK_SKEW_SECONDS:
            return f"{who} was refused: its clock is {abs(off):.0f} s {'ahead' if off > 0 else 'behind'}"
    return f"{who} was refused: its signature is not right"


def run_local_federation(
    path: str | Path,
    folder: str | Path,
    out: str | Path,
    *,
    embedded: bool = False,
    insecure: bool = False,
    trust: bool = False,
    say: Say,
    tell: OnProgress = ignore_progress,
) -> Path:
    """A whole federation on this machine: a client for each table of `folder`."""
    require_flower()
    files = find_client_tables(Path(folder))
    out = Path(out).resolve()
    place = server_folder(out)
    make_synced_folder(place / "clients")
    run = read_federation_request(path, trust)
    if run.federation is not None and run.federation.engine == RAY_ENGINE:
        if run.algorithm is None:
            raise RequestError(f'engine = "{RAY_ENGINE}" is for fits; `mooring advise` advises on one machine.')
        return run_ray_simulation(Path(path).resolve(), Path(folder).resolve(), out, say, tell)
    if run.federation is not None and run.federation.secure and insecure:
        raise RequestError("secure = true needs the clients' keys; leave out --insecure.")
    key_folder = None
    if not insecure:
        key_folder = place / "keys"
        keys.init(key_folder, [file_stem(file) for file in files])
    port = find_free_port()
    with running_clients(files, Path(path).resolve(), place, port, key_folder, embedded, trust):
        return serve(
            path,
            out,
            key_folder=key_folder,
            port=port,
            insecure=insecure,
            clients=len(files),
            lasting=False,
            trust=trust,
            say=say,
            tell=tell,
        )


def find_client_tables(folder: Path) -> list[Path]:
    """A folder's tables, one a client."""
    files = sorted(file for file in folder.iterdir() if file_ending(file) in ENDINGS)
    if len(files) < 2:
        raise RequestError(f"{folder} holds {len(files)} client tables; a federation needs two or more.")
    return files


def run_ray_simulation(run: Path, folder: Path, out: Path, say: Say, tell: OnProgress) -> Path:
    """The same run in Flower's own simulation."""
    if importlib.util.find_spec("ray") is None:
        raise RequestError(f'engine = "{RAY_ENGINE}" needs Ray; install it with: pip install "mooring-fl[ray]".')
    place = server_folder(out)
    progress = place / f"progress-{time.time_ns()}.jsonl"
    words = [RAY_MODULE, str(run), str(folder), str(place / "clients"), str(out), str(progress)]
    with process(words, place / "home", place / "simulation.log", RAY_USAGE_STATS_ENABLED="0") as started:
        follow_run(progress, str, lambda: "running", lambda: started.poll() is None, say, tell)
        with suppress(subprocess.TimeoutExpired):
            started.wait(4 * TERMINATE_SECONDS)
    return out


@contextmanager
def running_clients(
    files: list[Path], run: Path, place: Path, port: int, key_folder: Path | None, embedded: bool, trust: bool
) -> Iterator[None]:
    """A `mooring join` for each table, ended with the block."""
    started = []
    try:
        for file in files:
            name = file_stem(file)
            words = ["join", str(run), "--data", str(file), "--state", str(place / "clients" / name)]
            words += ["--server", f"127.0.0.1:{port}"] + (["--embedded"] if embedded else [])
            words += ["--trust-code"] if trust else []
            if key_folder is None:
                words += ["--insecure"]
            else:
                words += ["--ca", str(key_folder / keys.CA), "--key", str(key_folder / keys.CLIENTS / name)]
                words += ["--peers", str(key_folder / keys.PEERS)]
            log = place / "clients" / f"{name}.log"
            with open_log(log) as file_:
                started.append(
                    subprocess.Popen(
                        [sys.executable, "-m", CHILD_MODULE, "mooring", *words],
                        env=child_environment(place / "home"),
                        stdin=subprocess.DEVNULL,
                        stdout=file_,
                        stderr=subprocess.STDOUT,
                    )
                )
        yield
        for one in started:
            with suppress(subprocess.TimeoutExpired):
                one.wait(4 * TERMINATE_SECONDS)
    finally:
        for one in started:
            if one.poll() is None:
                one.terminate()
        for one in started:
            end(one)
