"""Lines about a deployment on standard error: plain at a terminal, with a time elsewhere, or JSON."""

from __future__ import annotations

import datetime
import json
import math
import sys
import time
from collections.abc import Callable

from mooring.core.process import replace_control_characters
from mooring.core.types import JsonObject

TEXT, JSON = "text", "json"
SECONDS_BETWEEN_ROUNDS = 1.0


class EventLog:
    """Prints sentences (`write_message`) and, where there is no bar, rounds: at most one per second (`follow`)."""

    def __init__(self, format_: str):
        self.format, self.at_terminal = format_, sys.stderr.isatty()

    def write_message(self, sentence: str) -> None:
        self._print({"event": "message", "text": sentence}, sentence)

    def follow(self, on_progress: Callable[[str, int, int], None]) -> Callable[[str, int, int], None]:
        latest: dict[str, float] = {}

        def report_progress(what: str, done: int, rounds: int) -> None:
            on_progress(what, done, rounds)
            if self.format == TEXT and self.at_terminal:
                return
            name, now = what.partition(":")[0], time.monotonic()
            if done < rounds and now - latest.get(name, -math.inf) < SECONDS_BETWEEN_ROUNDS:
                return  # quick rounds would fill a log
            latest[name] = now
            about = {"event": "progress", "what": what, "done": done, "planned": rounds}
            self._print(about, f"{what}: {done} of {rounds}")

        return report_progress

    def _print(self, about: JsonObject, sentence: str) -> None:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        if self.format == JSON:
            line = json.dumps({"time": now, "level": "info", **about})
        else:
            line = replace_control_characters(sentence if self.at_terminal else f"{now} {sentence}")
        print(line, file=sys.stderr, flush=True)  # noqa: T201
