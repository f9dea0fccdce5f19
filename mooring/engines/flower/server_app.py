"""The Flower app of the server: a run file's whole run, written to a run directory.

    flwr run APP --run-config 'run="run.toml" out="runs/one" progress="progress.jsonl"'
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from mooring.core.errors import RequestError, WorkError
from mooring.engines.flower.conversation import converse
from mooring.engines.request import request

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    told = {key: str(value) for key, value in context.run_config.items()}
    note = Progress(told.get("progress", ""))
    try:
        run = request(Path(told["run"]), purpose="fit")
        if told.get("clients"):
            clients = [*told["clients"].split("\n")] if not told["clients"].isdigit() else int(told["clients"])
            run = with_clients(run, clients)
        note.put(kind="begun", process=os.getpid())
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


def with_clients(run: Any, clients: Any) -> Any:
    """The run file with who takes part."""
    from mooring.runs.sections import Federation

    known = run.federation.model_dump() if run.federation else {}
    return run.model_copy(update={"federation": Federation(**known | {"clients": clients})})


class Progress:
    """Lines of JSON that `mooring serve` reads while the run goes on."""

    def __init__(self, path: str):
        self.path = Path(path) if path else None

    def put(self, **line: Any) -> None:
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")
