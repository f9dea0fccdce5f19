"""Jobs of the local page: one recommendation at a time, in a thread of its own, each with its progress."""

from __future__ import annotations

import queue
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from mooring.core.errors import RequestError, WorkError
from mooring.core.types import JsonObject

WAITING, RUNNING, DONE, FAILED = "waiting", "running", "done", "failed"
JobFunction = Callable[["Job"], None]


@dataclass
class Job:
    """A run in progress; the page shows `state`."""

    run: Path
    work: JobFunction
    state: str = WAITING
    what: str = "waiting for an earlier run"
    done: int = 0
    steps: int = 0
    error: str = ""

    def report_progress(self, what: str, done: int, steps: int) -> None:
        self.what, self.done, self.steps = what, done, steps

    def to_json(self) -> JsonObject:
        names = ("state", "what", "done", "steps", "error")
        return {name: getattr(self, name) for name in names}


@dataclass
class Jobs:
    """Jobs by the name of their run."""

    by_run: dict[str, Job] = field(default_factory=dict)
    line: queue.Queue[Job] = field(default_factory=queue.Queue)

    def start(self) -> None:
        threading.Thread(target=self._work, daemon=True).start()

    def add(self, job: Job) -> None:
        self.by_run[job.run.name] = job
        self.line.put(job)

    def _work(self) -> None:
        while True:
            run_job(self.line.get())


def run_job(job: Job) -> None:
    """Run a job; an error is stored as one sentence."""
    job.state, job.what = RUNNING, "reading the table"
    try:
        job.work(job)
    except (RequestError, WorkError) as error:
        job.state, job.error = FAILED, str(error)
    except Exception as error:
        traceback.print_exc()  # for the terminal
        job.state, job.error = FAILED, f"unexpected {type(error).__name__}: {error}"
    else:
        job.state = DONE
