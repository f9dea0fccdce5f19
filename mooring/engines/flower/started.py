"""Processes that end when the process that started them ends: Flower's own, and clients of `federation up`.

    python -m mooring.engines.flower.started superlink ...      behind the guard
    python -m mooring.engines.flower.started supernode ...
    python -m mooring.engines.flower.started mooring join ...

The SuperLink serves three interfaces on one port, and the one that starts runs and enrols nodes asks for no login. The
guard lets other hosts reach only what clients need, and nobody send more at once than a piece of a model. Whoever has
an account on the server's machine is trusted. Where a client's signature is refused, the guard writes a line for
`mooring serve`, with the time that the client believes it is.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
import time
from collections.abc import Callable
from typing import Any

LOOPBACK = ("127.0.0.1", "::1")
OPEN = ("/v1/fleet/",)  # to clients on other hosts
HEALTH = "/health"
LARGEST = 64_000_000  # bytes of a request; Flower cuts models into pieces of 5 MiB
MOST_NOTES = 100  # keys that a server hears of
TO_START, TO_BEAT = 300.0, 60.0  # seconds that an app's process has to start, and from one heartbeat to the next


class Guard:
    """An ASGI application in front of another: requests from other hosts pass only to where clients talk."""

    def __init__(self, app: Any, note: Callable[[str, str], None] = lambda key, when: None):
        self.app, self.note = app, note

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif not allowed(scope):
            await refuse(scope, send, 403, b"this interface is for the server's own host\n")
        elif scope["type"] == "http" and int(head(scope, "content-length") or 0) > LARGEST:
            await refuse(scope, send, 413, b"too large\n")
        else:
            await self.app(scope, bounded(receive), self.watched(scope, send))

    def watched(self, scope: Any, send: Any) -> Any:
        """Notes who is refused for its signature."""

        async def passed_on(message: Any) -> None:
            if message.get("status") == 401 and scope.get("path", "").startswith(OPEN):
                self.note(head(scope, "flwr-public-key"), head(scope, "flwr-timestamp"))
            await send(message)

        return passed_on


def bounded(receive: Any) -> Any:
    """A request's body, cut off as if its sender had gone where it is too large; not every request tells its length."""
    total = 0

    async def piece() -> Any:
        nonlocal total
        message = await receive()
        total += len(message.get("body", b""))
        return message if total <= LARGEST else {"type": "http.disconnect"}

    return piece


def head(scope: Any, name: str) -> str:
    return next((value.decode("latin-1") for key, value in scope.get("headers", ()) if key == name.encode()), "")


async def refuse(scope: Any, send: Any, status: int, why: bytes) -> None:
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"text/plain")]})
        await send({"type": "http.response.body", "body": why})
    else:
        await send({"type": "websocket.close", "code": 1008})


class Notes:
    """A line for each key that was refused, once."""

    def __init__(self, path: str):
        self.path, self.known = path, set[str]()

    def __call__(self, key: str, when: str) -> None:
        if self.path and key not in self.known and len(self.known) < MOST_NOTES:
            self.known.add(key)
            with open(self.path, "a") as file:
                file.write(json.dumps({"key": key[:400], "when": when[:40], "now": time.time()}) + "\n")


def allowed(scope: Any) -> bool:
    """Whether a request comes from this host, or goes to where clients talk."""
    client = scope.get("client")
    path = scope.get("path", "")
    if client is not None and client[0] in LOOPBACK:
        return True
    return scope["type"] == "http" and ".." not in path and (path == HEALTH or path.startswith(OPEN))


def patient() -> None:
    """Let an app's process take longer to start than Flower's 30 seconds.

    A process that is later finds its task's token expired (401), while another is started in its place: on a busy
    machine, where starting takes long, that makes it busier, and none of them ever comes in time.
    """
    for module in ("in_memory_corestate", "sql_corestate"):
        state: Any = importlib.import_module(f"flwr.supercore.corestate.{module}")
        state.HEARTBEAT_DEFAULT_INTERVAL, state.HEARTBEAT_PATIENCE = TO_START, TO_BEAT / TO_START


def superlink() -> None:
    module: Any = importlib.import_module("flwr.superlink.cli.flower_superlink")  # its function has the same name
    serve = module.uvicorn.run

    def guarded(app: Any, **how: Any) -> None:
        note = Notes(os.environ.get("MOORING_REFUSED", ""))
        serve(Guard(app, note), **how, proxy_headers=False)  # no header can say that a request came from elsewhere

    module.uvicorn.run = guarded
    module.flower_superlink()


def supernode() -> None:
    from flwr.supernode.cli.flower_supernode import flower_supernode

    from mooring.engines.flower import lost_answers

    lost_answers.end_connections()
    flower_supernode()


def main() -> None:
    from flwr.supercore.app_utils import start_parent_process_monitor

    what = sys.argv.pop(1)
    start_parent_process_monitor(int(os.environ["MOORING_PARENT"]))
    if what == "mooring":
        runpy.run_module("mooring", run_name="__main__")
        return
    sys.argv[0] = f"flower-{what}"
    patient()
    {"superlink": superlink, "supernode": supernode}[what]()


if __name__ == "__main__":
    main()
