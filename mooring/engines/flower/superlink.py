"""Flower's SuperLink behind its gateway: start it, register keys, submit runs as Flower apps."""

from __future__ import annotations

import json
import os
import secrets
import ssl
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import httpx

from mooring.core.errors import RequestError, WorkError
from mooring.engines.flower import keys
from mooring.engines.flower.child_process import (
    CHILD_MODULE,
    KEYS_VARIABLE,
    METRICS_VARIABLE,
    REFUSED_VARIABLE,
    SECRET_VARIABLE,
    Report,
    child_environment,
    is_loopback,
    start_process,
    wait_for_port,
)
from mooring.engines.flower.client_app import AppPaths
from mooring.engines.flower.flower_patches import ControlClient
from mooring.engines.flower.gateway import OWN, SECRET
from mooring.engines.flower.gateway_grid import ADDRESS_VARIABLE, CA_VARIABLE
from mooring.engines.flower.keys import write_secret
from mooring.engines.flower.messages import join_frames
from mooring.engines.request import read_federation_request
from mooring.runs.runfile import RunFile

START_TIMEOUT_SECONDS = 300.0  # for the SuperLink to start on a busy machine
REFUSED_KEYS_FILE = "refused.jsonl"  # keys that the gateway refused
METRICS_TOKEN_FILE = "metrics.token"
APP_PYPROJECT = """[project]
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
revoked = ""
trust = ""
audit = ""
"""


FIT_APPS = MappingProxyType(  # by the purpose of a run
    {"fit": AppPaths("mooring.engines.flower.client_app.app", "mooring.engines.flower.server_run.app")}
)


class RunningSuperLink(NamedTuple):
    """A SuperLink that was started here."""

    address: str  # on this machine
    ca: Path | None  # the certificate to check it by
    secret: str  # for its own interfaces
    is_alive: Callable[[], bool]


@contextmanager
def start_superlink(
    folder: Path, host: str, port: int, key_folder: Path | None, persistent: bool
) -> Iterator[RunningSuperLink]:
    """Run a SuperLink with its files in `folder` until the block ends."""
    wait_for_port(host, port)
    arguments = [CHILD_MODULE, "superlink", "--host", host, "--port", str(port)]
    arguments += ["--database", str(folder / "state.db")] if persistent else []
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
    secret = secrets.token_urlsafe(32)
    variables = {
        SECRET_VARIABLE: secret,
        KEYS_VARIABLE: "" if key_folder is None else str(key_folder.resolve()),
        REFUSED_VARIABLE: str(folder / REFUSED_KEYS_FILE),
        METRICS_VARIABLE: metrics_token(folder),
        ADDRESS_VARIABLE: address,
        CA_VARIABLE: "" if ca is None else str(ca.resolve()),
        "PATH": os.pathsep.join(
            [str(write_launchers(folder / "home" / "bin")), child_environment(folder / "home")["PATH"]]
        ),
    }
    with start_process(arguments, folder / "home", log, **variables) as started:
        started_at = time.monotonic()
        while not is_healthy(address, ca):
            if started.poll() is not None or time.monotonic() - started_at > START_TIMEOUT_SECONDS:
                raise WorkError(f"Flower's SuperLink did not start; see {log}.")
            time.sleep(0.2)
        yield RunningSuperLink(address, ca, secret, lambda: started.poll() is None)


def write_launchers(folder: Path) -> Path:
    """Write commands with the names that Flower looks for, which start its processes with the gateway's secret."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, what in (("flower-superexec", "superexec"), ("flwr-serverapp", "serverapp")):
        path = folder / name
        path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {CHILD_MODULE} {what} "$@"\n')
        path.chmod(0o700)
    return folder


def metrics_token(folder: Path) -> str:
    """Return the token for /metrics, from a file that only its owner can read."""
    path = folder / METRICS_TOKEN_FILE
    if not path.exists():
        write_secret(path, secrets.token_urlsafe(24).encode() + b"\n")
    return path.read_text().strip()


def is_healthy(address: str, ca: Path | None) -> bool:
    try:
        return httpx.get(f"{_base_url(address, ca)}/health", verify=_verification(ca), timeout=2).is_success
    except httpx.HTTPError:
        return False


def report_gauges(link: RunningSuperLink, gauges: dict[str, float]) -> None:
    """Send numbers to the gateway's /metrics."""
    url, content = f"{_base_url(link.address, link.ca)}{OWN}gauges", join_frames({"gauges": gauges})
    httpx.post(url, content=content, headers={SECRET: link.secret}, verify=_verification(link.ca), timeout=2)


def _base_url(address: str, ca: Path | None) -> str:
    return f"{'http' if ca is None else 'https'}://{address}"


def _verification(ca: Path | None) -> ssl.SSLContext | bool:
    return True if ca is None else ssl.create_default_context(cafile=str(ca))


def control_client(link: RunningSuperLink) -> ControlClient:
    """Return a client of the SuperLink's control interface."""
    return ControlClient(link.address, link.ca, {SECRET: link.secret})


def stop_interrupted_runs(control: ControlClient, report: Report) -> None:
    """Stop the runs of a killed server, which would continue beside the new one."""
    for number, run in control.list_runs().items():
        if run.status.status != "finished":
            control.stop_run(number)
            report("an interrupted run was stopped; it resumes from its checkpoint")


def synchronize_keys(control: ControlClient, enrolled: dict[str, bytes], report: Report) -> set[str]:
    """Register the enrolled keys as Flower's nodes, unregister others, and return the names of revoked clients."""
    nodes = control.list_nodes()
    wanted, unregistered = set(enrolled.values()), set()
    for node in nodes:
        if node.public_key not in wanted:
            control.unregister_node(node.node_id)
            unregistered.add(node.name)
            report(f"the key of client '{node.name}' was revoked")
    registered = {node.public_key for node in nodes}
    for name, key in enrolled.items():
        if key not in registered:
            _register_node(control, name, key)
    return unregistered - enrolled.keys()


def _register_node(control: ControlClient, name: str, key: bytes) -> None:
    try:
        control.register_node(name, key)
    except httpx.HTTPStatusError as error:
        if error.response.status_code not in (httpx.codes.CONFLICT, httpx.codes.PRECONDITION_FAILED):
            raise WorkError(f"client '{name}' could not be enrolled: {error.response.text[:200]}") from error


def read_run_status(control: ControlClient, number: int) -> str:
    try:
        return control.run_status(number)
    except httpx.TransportError:
        return "unknown"  # the caller notices where the SuperLink has ended


def find_apps(run: RunFile, apps: Mapping[str, AppPaths]) -> AppPaths:
    """Return the Flower apps for the purpose of a run."""
    purpose = run.mooring.purpose
    if purpose not in apps:
        raise RequestError(f"a federation can {' or '.join(apps)}, and the run file's purpose is {purpose}.")
    return apps[purpose]


def make_app_files(paths: AppPaths) -> dict[str, str]:
    """Return the files of a Flower app."""
    files = {"pyproject.toml": APP_PYPROJECT, "mooring_app/__init__.py": ""}
    for name, path in paths._asdict().items():
        module, _, attribute = path.rpartition(".")
        files[f"mooring_app/{name}.py"] = f"import {module}\n\napp = {module}.{attribute}\n"
    return files


def write_app(path: str | Path, folder: str | Path, apps: Mapping[str, AppPaths]) -> Path:
    """Write the Flower app of a run file as a folder that `flwr run` starts, with the path of the run file in it."""
    run, folder = read_federation_request(path), Path(folder)
    if folder.exists():
        raise RequestError(f"{folder} already exists; choose another folder for the app.")
    for name, text in make_app_files(find_apps(run, apps)).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text.replace('run = ""', f"run = {json.dumps(str(Path(path).resolve()))}"))
    return folder
