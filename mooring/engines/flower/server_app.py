"""The Flower app of the server: a run file's whole run, written to a run directory.

flwr run APP --run-config 'run="run.toml" out="runs/one" progress="progress.jsonl"'
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.app_utils import start_parent_process_monitor

from mooring.core.errors import RequestError, WorkError
from mooring.engines.flower import audit
from mooring.engines.flower.flower_patches import LossDetectingGrid
from mooring.engines.flower.inline_grid import use_gateway
from mooring.engines.flower.server_run import run_federation
from mooring.engines.request import read_federation_request
from mooring.runs.atomic_files import read_json
from mooring.runs.runfile import RunFile
from mooring.runs.sections import FederationSection

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    start_parent_process_monitor(os.getppid())  # whoever kills the SuperLink ends its app too
    run_server_app(LossDetectingGrid(grid), {key: str(value) for key, value in context.run_config.items()})


def run_server_app(grid: Any, told: Mapping[str, str], converse: Callable[..., Any] = run_federation) -> None:
    """The run that `told` names, to its end; what happens is written to the file of progress."""
    note = ProgressFile(told.get("progress", ""))
    try:
        run = read_federation_request(told["run"], bool(told.get("trust")))
        if told.get("clients"):
            run = set_client_count(run, int(told["clients"]))
        note.put(kind="begun", process=os.getpid())
        grid = use_gateway(grid)
        grid.revoked = partial(read_revoked, told.get("revoked", ""))
        if told.get("audit"):
            grid.record = lambda **line: audit.append_record(Path(told["audit"]), line)
        converse(
            run,
            grid,
            told["out"],
            say=lambda sentence: note.put(kind="said", text=sentence),
            tell=lambda what, done, rounds: note.put(kind="round", what=what, done=done, rounds=rounds),
        )
    except Exception as error:
        foreseen = isinstance(error, RequestError | WorkError)
        text = str(error) if foreseen else f"unexpected {type(error).__name__}: {error}"
        note.put(kind="failed", text=text, request=isinstance(error, RequestError))
        raise
    note.put(kind="done")


def set_client_count(run: RunFile, clients: int) -> RunFile:
    """The run file with how many take part."""
    known = run.federation.model_dump() if run.federation else {}
    return run.model_copy(update={"federation": FederationSection(**known | {"clients": clients})})


def read_revoked(path: str) -> frozenset[str]:
    """Clients whose keys were taken back while the run is under way."""
    if not path or not Path(path).exists():
        return frozenset()
    return frozenset(read_json(path)["revoked"])


class ProgressFile:
    """Lines of JSON that `mooring serve` reads while the run goes on."""

    def __init__(self, path: str):
        self.path = Path(path) if path else None

    def put(self, **line: Any) -> None:
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")
