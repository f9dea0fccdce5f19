"""What `mooring join` does: a node for one client, Flower's own or the embedded one, until the run is over."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mooring.core.errors import RequestError
from mooring.engines.flower import secure_client
from mooring.engines.flower.audit import SENT_FILE
from mooring.engines.flower.client_node import DISMISSED_FILE, DONE_FILE, RESULT_DIR, ClientNode
from mooring.engines.flower.keys import load_identity
from mooring.engines.flower.policy import read_policy
from mooring.engines.flower.processes import (
    CHILD_MODULE,
    DEFAULT_PORT,
    TERMINATE_SECONDS,
    Say,
    find_free_port,
    is_loopback,
    process,
    require_flower,
)
from mooring.engines.request import read_federation_request
from mooring.runs.atomic_files import make_synced_folder, read_json


def join(
    path: str | Path,
    data: str | Path,
    state: str | Path,
    *,
    server: str = f"127.0.0.1:{DEFAULT_PORT}",
    name: str | None = None,
    ca: Path | None = None,
    key: Path | None = None,
    peers: Path | None = None,
    insecure: bool = False,
    embedded: bool = False,
    trust: bool = False,
    policy: Path | None = None,
    kinds: Mapping[str, type[ClientNode]] = MappingProxyType({"fit": ClientNode}),
    say: Say,
) -> dict[str, Any]:
    """Take part with one client's table until the run is over; how its own model does, and where it is.

    `kinds` are clients by the purpose of the run."""
    require_flower()
    host = server.rsplit(":", 1)[0].strip("[]")
    if (ca is None or key is None) and not insecure:
        raise RequestError("joining needs TLS: give --ca and --key, as `mooring keys init` makes them, or --insecure.")
    if insecure and not is_loopback(host):
        raise RequestError(f"--insecure is for this machine only, and {host} is another; give --ca and --key.")
    run = read_federation_request(path, trust)
    if run.federation is not None and run.federation.secure and (key is None or peers is None):
        raise RequestError("secure = true needs this client's key and its peers' keys: give --key and --peers.")
    identity = load_identity(key, peers, ca)
    rules = None if policy is None else read_policy(policy)
    if rules is not None:
        rules.check_run(run)
    home = kinds[run.mooring.purpose](
        run, Path(data).resolve(), Path(state).resolve(), name, say, identity=identity, policy=rules
    )
    secure_client.delete_state(home)  # this command is the consent to take part once
    home.member  # noqa: B018 - what is wrong with the table is told before anything is sent
    say(f"client '{home.name}' takes part in {home.what}. A curious server sees {home.reveals}.")
    say(f"what leaves this machine is recorded in {home.folder / SENT_FILE}")
    done, dismissed = home.folder / DONE_FILE, home.folder / DISMISSED_FILE
    for former in (done, dismissed):
        former.unlink(missing_ok=True)

    def over() -> bool:
        return done.exists() or dismissed.exists()

    if embedded:
        from mooring.engines.flower.embedded_node import run_embedded_node

        run_embedded_node(home, server, ca=ca, key=key, say=say, until=over)
    else:
        run_stock_node(home, server, ca, key, over, say)
    if dismissed.exists():
        raise RequestError(f"the server does without this client: {read_json(dismissed)['why']}")
    return read_json(done) | {"result": str(home.folder / RESULT_DIR)}


def run_stock_node(
    home: ClientNode, server: str, ca: Path | None, key: Path | None, until: Callable[[], bool], say: Say
) -> None:
    """Flower's own node, started anew with longer and longer pauses whenever it ends; its letters come to our door."""
    from mooring.engines.flower.local_socket import door
    from mooring.engines.flower.message_replies import answer_message

    with door(lambda message: answer_message(home, message)) as address:
        keep_stock_node_running(home, server, ca, key, address, until, say)


def keep_stock_node_running(
    home: ClientNode, server: str, ca: Path | None, key: Path | None, address: str, until: Callable[[], bool], say: Say
) -> None:
    import httpx

    from mooring.engines.flower.embedded_node import deactivate_former_node, remember_node
    from mooring.engines.flower.local_socket import SOCKET_KEY

    make_synced_folder(home.folder)
    pause, log = 1.0, home.folder / "supernode.log"
    say(f"looking for {server} with Flower's own node, which writes to {log}")
    while not until():
        if log.exists() and (known := re.findall(r"SuperNode ID: (\d+)", log.read_text(errors="replace"))):
            remember_node(home, int(known[-1]))
        with suppress(httpx.HTTPError):  # the node itself tells what is wrong with the connection
            deactivate_former_node(home, server, ca, key)
        arguments = [
            CHILD_MODULE,
            "supernode",
            "--superlink",
            server,
            "--node-config",
            f"{SOCKET_KEY}={json.dumps(address)}",
        ]
        arguments += ["--host", "127.0.0.1", "--port", str(find_free_port())]
        arguments += ["--insecure"] if ca is None else ["--root-certificates", str(ca)]
        arguments += [] if key is None else ["--auth-supernode-private-key", str(key)]
        with process(arguments, home.folder / "home", log) as started:
            while started.poll() is None and not until():
                time.sleep(0.3)
            if until():
                time.sleep(2 * TERMINATE_SECONDS)  # the last reply is on its way
                return
        say(f"Flower's node ended (see {log}); it is started again in {pause:g} s")
        time.sleep(pause)
        pause = min(2 * pause, 30.0)
