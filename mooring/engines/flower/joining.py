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
from mooring.engines.flower.audit import SENT
from mooring.engines.flower.home import DISMISSED, DONE, RESULT, Home
from mooring.engines.flower.keys import identity_of
from mooring.engines.flower.policy import read_policy
from mooring.engines.flower.processes import GRACE, PORT, STARTED, Say, free_port, is_loopback, need_flower, process
from mooring.engines.request import asked_run
from mooring.runs.files import make_folder, read_json


def join(
    path: str | Path,
    data: str | Path,
    state: str | Path,
    *,
    server: str = f"127.0.0.1:{PORT}",
    name: str | None = None,
    ca: Path | None = None,
    key: Path | None = None,
    peers: Path | None = None,
    insecure: bool = False,
    embedded: bool = False,
    trust: bool = False,
    policy: Path | None = None,
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
    run = asked_run(path, trust)
    if run.federation is not None and run.federation.secure and (key is None or peers is None):
        raise RequestError("secure = true needs this client's key and its peers' keys: give --key and --peers.")
    identity = identity_of(key, peers, ca)
    rules = None if policy is None else read_policy(policy)
    if rules is not None:
        rules.check_run(run)
    home = kinds[run.mooring.purpose](
        run, Path(data).resolve(), Path(state).resolve(), name, say, identity=identity, policy=rules
    )
    secure_client.forget(home)  # this command is the consent to take part once
    home.member  # noqa: B018 - what is wrong with the table is told before anything is sent
    say(f"client '{home.name}' takes part in {home.what}. A curious server sees {home.reveals}.")
    say(f"what leaves this machine is recorded in {home.folder / SENT}")
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
    from mooring.engines.flower.door import door
    from mooring.engines.flower.replies import reply_of

    with door(lambda message: reply_of(home, message)) as address:
        keep_node(home, server, ca, key, address, until, say)


def keep_node(
    home: Home, server: str, ca: Path | None, key: Path | None, address: str, until: Callable[[], bool], say: Say
) -> None:
    import httpx

    from mooring.engines.flower.door import DOOR
    from mooring.engines.flower.node import remember_node, take_leave

    make_folder(home.folder)
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
