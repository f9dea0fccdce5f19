"""Flower's SuperLink behind its guard, and what is asked of it: whose keys are enrolled, which run it runs."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mooring.core.errors import WorkError
from mooring.engines.flower import keys
from mooring.engines.flower.processes import STARTED, Say, is_loopback, process, wait_for_port

PATIENCE = 300.0  # seconds that a process may take to start, on a machine that is busy
REFUSED = "refused.jsonl"  # whom the guard saw refused


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
