"""The advice that the page asked for: one at a time, in a thread of its own, each told how far it is."""

from __future__ import annotations

import queue
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mooring.core.errors import RequestError, WorkError

WAITING, RUNNING, DONE, FAILED = "waiting", "running", "done", "failed"
JobFunction = Callable[["Job"], None]


@dataclass
class Job:
    """A run on its way; `state` is what the page shows."""

    run: Path
    work: JobFunction
    state: str = WAITING
    what: str = "waiting for an earlier run"
    done: int = 0
    steps: int = 0
    error: str = ""

    def tell(self, what: str, done: int, steps: int) -> None:
        self.what, self.done, self.steps = what, done, steps

    def told(self) -> dict[str, Any]:
        names = ("state", "what", "done", "steps", "error")
        return {name: getattr(self, name) for name in names}


@dataclass
class Jobs:
    """Jobs by the name of their run."""

    known: dict[str, Job] = field(default_factory=dict)
    line: queue.Queue[Job] = field(default_factory=queue.Queue)

    def start(self) -> None:
        threading.Thread(target=self._work, daemon=True).start()

    def add(self, job: Job) -> None:
        self.known[job.run.name] = job
        self.line.put(job)

    def _work(self) -> None:
        while True:
            run_job(self.line.get())


def run_job(job: Job) -> None:
    """Do a job's work; what goes wrong is kept as one sentence."""
    job.state, job.what = RUNNING, "reading the table"
    try:
        job.work(job)
    except (RequestError, WorkError) as error:
        job.state, job.error = FAILED, str(error)
    except Exception as error:
        traceback.print_exc()  # for whoever looks at the terminal
        job.state, job.error = FAILED, f"unexpected {type(error).__name__}: {error}"
    else:
        job.state = DONE
