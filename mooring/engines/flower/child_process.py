"""Processes that end when the process that started them ends: Flower's own, and clients of `federation up`.

    python -m mooring.engines.flower.child_process superlink ...      behind the gateway
    python -m mooring.engines.flower.child_process superexec ...      starts the server's app
    python -m mooring.engines.flower.child_process serverapp ...
    python -m mooring.engines.flower.child_process supernode ...
    python -m mooring.engines.flower.child_process mooring join ...

Files that they write are readable by their owner only.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

from mooring.engines.flower import flower_patches

MAX_REFUSED_KEYS = 100  # keys that a server hears of
SECRET_VARIABLE, KEYS_VARIABLE, REFUSED_VARIABLE = "MOORING_SECRET", "MOORING_KEYS", "MOORING_REFUSED"
METRICS_VARIABLE = "MOORING_METRICS_TOKEN"


class RefusedKeyLog:
    """A line for each key that was refused, once."""

    def __init__(self, path: str):
        self.path, self.known = path, set[str]()

    def __call__(self, key: str, when: str) -> None:
        if self.path and key and key not in self.known and len(self.known) < MAX_REFUSED_KEYS:
            self.known.add(key)
            with open(self.path, "a") as file:
                file.write(json.dumps({"key": key[:400], "when": when[:40], "now": time.time()}) + "\n")


def superlink() -> None:
    from mooring.engines.flower import gateway

    folder = os.environ.get(KEYS_VARIABLE, "")

    def wrap(app: Any) -> gateway.Gateway:
        return gateway.Gateway(
            app,
            secret=os.environ[SECRET_VARIABLE],
            keys=gateway.EnrolledKeys(Path(folder) if folder else None),
            node_of=lambda key: app.state.linkstate_factory.state().get_node_id_by_public_key(key),
            note=RefusedKeyLog(os.environ.get(REFUSED_VARIABLE, "")),
            metrics_token=os.environ.get(METRICS_VARIABLE, ""),
        )

    module = flower_patches.wrap_superlink(
        wrap,
        proxy_headers=False,
        access_log=False,
        limit_concurrency=gateway.MAX_CONNECTIONS,
        http=gateway.impatient_protocol(),
    )
    module.flower_superlink()


def superexec() -> None:
    from flwr.supercore.cli import flower_superexec

    flower_superexec()


def serverapp() -> None:
    from flwr.superlink.cli import flwr_serverapp

    flower_patches.shorten_backoff()
    flwr_serverapp()


def supernode() -> None:
    from flwr.supernode.cli.flower_supernode import flower_supernode

    flower_patches.end_connection_on_loss()
    flower_patches.shorten_backoff()
    flower_supernode()


def main() -> None:
    from flwr.supercore.app_utils import start_parent_process_monitor

    os.umask(0o077)
    what = sys.argv.pop(1)
    start_parent_process_monitor(int(os.environ["MOORING_PARENT"]))
    if what == "mooring":
        runpy.run_module("mooring", run_name="__main__")
        return
    sys.argv[0] = f"flower-{what}"
    flower_patches.extend_start_timeout()
    if what in ("superexec", "serverapp"):
        gateway = importlib.import_module("mooring.engines.flower.gateway")
        flower_patches.add_secret_header(gateway.SECRET, os.environ[SECRET_VARIABLE])
    {"superlink": superlink, "superexec": superexec, "serverapp": serverapp, "supernode": supernode}[what]()


if __name__ == "__main__":
    main()
