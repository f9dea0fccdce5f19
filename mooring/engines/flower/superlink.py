"""Flower's SuperLink behind its gateway, and what is asked of it: which keys are enrolled, which run it runs."""

from __future__ import annotations

import hashlib
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from mooring.core.errors import WorkError
from mooring.engines.flower import keys
from mooring.engines.flower.child_process import KEYS_VARIABLE, METRICS_VARIABLE, REFUSED_VARIABLE, SECRET_VARIABLE
from mooring.engines.flower.frames import join_frames
from mooring.engines.flower.gateway import OWN, SECRET
from mooring.engines.flower.inline_grid import ADDRESS_VARIABLE, CA_VARIABLE
from mooring.engines.flower.keys import write_secret
from mooring.engines.flower.processes import CHILD_MODULE, Say, child_environment, is_loopback, process, wait_for_port

START_TIMEOUT_SECONDS = 300.0  # seconds that a process may take to start, on a machine that is busy
REFUSED_KEYS_FILE = "refused.jsonl"  # keys that the gateway refused
METRICS_TOKEN_FILE = "metrics.token"


class RunningSuperLink(NamedTuple):
    """A SuperLink that was started here."""

    address: str  # for this machine
    ca: Path | None  # the certificate to check it by
    secret: str  # that its own interfaces ask for
    is_alive: Callable[[], bool]


@contextmanager
def superlink(folder: Path, host: str, port: int, key_folder: Path | None, lasting: bool) -> Iterator[RunningSuperLink]:
    """A SuperLink whose files are in `folder`."""
    wait_for_port(host, port)
    arguments = [CHILD_MODULE, "superlink", "--host", host, "--port", str(port)]
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
    secret = secrets.token_urlsafe(32)
    known = {
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
    with process(arguments, folder / "home", log, **known) as started:
        begun = time.monotonic()
        while not is_healthy(address, ca):
            if started.poll() is not None or time.monotonic() - begun > START_TIMEOUT_SECONDS:
                raise WorkError(f"Flower's SuperLink did not start; {log} says why.")
            time.sleep(0.2)
        yield RunningSuperLink(address, ca, secret, lambda: started.poll() is None)


def write_launchers(folder: Path) -> Path:
    """Flower finds the processes of the server's app by their names: these start them with the gateway's secret."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, what in (("flower-superexec", "superexec"), ("flwr-serverapp", "serverapp")):
        path = folder / name
        path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {CHILD_MODULE} {what} "$@"\n')
        path.chmod(0o700)
    return folder


def metrics_token(folder: Path) -> str:
    """The token that /metrics asks for, from a file that only its owner can read."""
    path = folder / METRICS_TOKEN_FILE
    if not path.exists():
        write_secret(path, secrets.token_urlsafe(24).encode() + b"\n")
    return path.read_text().strip()


def is_healthy(address: str, ca: Path | None) -> bool:
    import ssl

    import httpx

    check: Any = True if ca is None else ssl.create_default_context(cafile=str(ca))
    try:
        return httpx.get(f"{'http' if ca is None else 'https'}://{address}/health", verify=check, timeout=2).is_success
    except httpx.HTTPError:
        return False


def report_gauges(link: RunningSuperLink, gauges: dict[str, float]) -> None:
    """Numbers for the gateway's /metrics."""
    import ssl

    import httpx

    check: Any = True if link.ca is None else ssl.create_default_context(cafile=str(link.ca))
    url = f"{'http' if link.ca is None else 'https'}://{link.address}{OWN}gauges"
    httpx.post(url, content=join_frames({"gauges": gauges}), headers={SECRET: link.secret}, verify=check, timeout=2)


class SecretHeader:
    """Sends the gateway's secret with each request."""

    def __init__(self, secret: str):
        self.secret = secret

    def intercept(self, context: Any, call_next: Any) -> Any:
        context.request.headers[SECRET] = self.secret
        return call_next(context)


def control_client(link: RunningSuperLink) -> Any:
    """A client of the interface that starts and stops runs."""
    from flwr.cli.cli_client_interceptor import CliClientHttpInterceptor
    from flwr.supercore.control import ControlHttpClient
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

    return ControlHttpClient.from_server_address(
        server_address=link.address,
        insecure=link.ca is None,
        root_certificates=None if link.ca is None else link.ca.read_bytes(),
        interceptors=[
            CliClientHttpInterceptor(),
            RuntimeVersionHttpInterceptor(component_name="flwr CLI"),
            SecretHeader(link.secret),
        ],
    )


def stop_interrupted_runs(control: Any, say: Say) -> None:
    """A run that a killed server left would go on beside the new one."""
    from flwr.proto.control_pb2 import ListRunsRequest, StopRunRequest

    for number, run in control.ListRuns(ListRunsRequest()).run_dict.items():
        if run.status.status != "finished":
            control.StopRun(StopRunRequest(run_id=number))
            say("an interrupted run was stopped; it resumes from its checkpoint")


def synchronize(control: Any, enrolled: dict[str, bytes], say: Say) -> set[str]:
    """Make Flower's nodes those of the enrolled keys; the names of clients whose keys were taken back."""
    from flwr.proto.control_pb2 import ListNodesRequest, UnregisterNodeRequest

    nodes = [node for node in control.ListNodes(ListNodesRequest()).nodes_info if node.status != "unregistered"]
    wanted, gone = set(enrolled.values()), set()
    for node in nodes:
        if node.public_key not in wanted:
            control.UnregisterNode(UnregisterNodeRequest(node_id=node.node_id))
            gone.add(node.name)
            say(f"the key of client '{node.name}' was revoked")
    there = {node.public_key for node in nodes}
    for name, key in enrolled.items():
        if key not in there:
            enroll(control, name, key)
    return gone - enrolled.keys()


def enroll(control: Any, name: str, key: bytes) -> None:
    import httpx
    from flwr.proto.control_pb2 import RegisterNodeRequest

    try:
        control.RegisterNode(RegisterNodeRequest(public_key=key, name=name))
    except httpx.HTTPStatusError as error:
        if error.response.status_code not in (httpx.codes.CONFLICT, httpx.codes.PRECONDITION_FAILED):
            raise WorkError(f"client '{name}' could not be enrolled: {error.response.text[:200]}") from error


def submit_run(control: Any, config: dict[str, str], app: dict[str, str]) -> int:
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
