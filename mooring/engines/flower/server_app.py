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
from mooring.engines.flower.conversation import converse
from mooring.engines.flower.flower_patches import Noticing
from mooring.engines.flower.inline_grid import with_inline_messages
from mooring.engines.request import asked_run
from mooring.runs.files import read_json
from mooring.runs.runfile import RunFile
from mooring.runs.sections import Federation

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    start_parent_process_monitor(os.getppid())  # whoever kills the SuperLink ends its app too
    lead(Noticing(grid), {key: str(value) for key, value in context.run_config.items()})


def lead(grid: Any, told: Mapping[str, str], converse: Callable[..., Any] = converse) -> None:
    """The run that `told` names, to its end; what happens is written to the file of progress."""
    note = Progress(told.get("progress", ""))
    try:
        run = asked_run(told["run"], bool(told.get("trust")))
        if told.get("clients"):
            run = with_clients(run, int(told["clients"]))
        note.put(kind="begun", process=os.getpid())
        grid = with_inline_messages(grid)
        grid.revoked = partial(revoked_names, told.get("revoked", ""))
        if told.get("audit"):
            grid.record = lambda **line: audit.append(Path(told["audit"]), line)
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


def with_clients(run: RunFile, clients: int) -> RunFile:
    """The run file with how many take part."""
    known = run.federation.model_dump() if run.federation else {}
    return run.model_copy(update={"federation": Federation(**known | {"clients": clients})})


def revoked_names(path: str) -> frozenset[str]:
    """Clients whose keys were taken back while the run is under way."""
    if not path or not Path(path).exists():
        return frozenset()
    return frozenset(read_json(path)["revoked"])


class Progress:
    """Lines of JSON that `mooring serve` reads while the run goes on."""

    def __init__(self, path: str):
        self.path = Path(path) if path else None

    def put(self, **line: Any) -> None:
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")
