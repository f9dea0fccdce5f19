"""Processes that end when the process that started them ends: Flower's own, and clients of `federation up`.

    python -m mooring.engines.flower.started superlink ...      behind the guard
    python -m mooring.engines.flower.started supernode ...
    python -m mooring.engines.flower.started mooring join ...

The SuperLink serves three interfaces on one port, and the one that starts runs and enrols nodes asks for no login. The
guard lets other hosts reach only what clients need. Whoever has an account on the server's machine is trusted.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from typing import Any

LOOPBACK = ("127.0.0.1", "::1")
OPEN = ("/v1/fleet/",)  # to clients on other hosts
HEALTH = "/health"
TO_START, TO_BEAT = 300.0, 60.0  # seconds that an app's process has to start, and from one heartbeat to the next


class Guard:
    """An ASGI application in front of another: requests from other hosts pass only to where clients talk."""

    def __init__(self, app: Any):
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan" or allowed(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": 403, "headers": [(b"content-type", b"text/plain")]})
            await send({"type": "http.response.body", "body": b"this interface is for the server's own host\n"})
        else:
            await send({"type": "websocket.close", "code": 1008})


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
        serve(Guard(app), **how, proxy_headers=False)  # no header can say that a request came from elsewhere

    module.uvicorn.run = guarded
    module.flower_superlink()


def supernode() -> None:
    from flwr.supernode.cli.flower_supernode import flower_supernode

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
