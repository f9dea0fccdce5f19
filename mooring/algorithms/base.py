"""What an algorithm is: hyper-parameters in a frozen dataclass, and pure functions on a cohort.

State and messages are NamedTuples of tensors: the server's as they are, a client's with a leading [C]. The engine
samples clients, weighs and averages messages, counts costs, evaluates and saves.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from typing import Any, ClassVar, get_type_hints

from torch import Tensor

from mooring.core.cohort import CohortData, Round
from mooring.core.errors import RequestError
from mooring.core.fields import check_fields, unknown
from mooring.core.papers import spelled_out
from mooring.core.task import Task

Setting = Any  # of a field: a number (lam: or a moor), or a word such as "auto" that `settle` turns into one


class Algorithm:
    """The contract. A subclass is a frozen dataclass in a file of its own; the file's name is the algorithm's."""

    paper: ClassVar[str]
    reveals: ClassVar[str]  # what a curious server could reconstruct from the messages
    pooled: ClassVar[bool] = False  # an exact referee that sees all rows; simulator only
    full_participation: ClassVar[bool] = False  # the engine refuses anything else
    kept: ClassVar[tuple[str, ...]] = ()  # parts of the server's state that visits do without: not sent, None there
    last_stage: ClassVar[bool] = False  # `finish` trains: at every client with rows, also those that were never asked
    newcomer: ClassVar[str] = "tune"  # how a client that comes after the training gets its model; see advice/newcomer
    needs: ClassVar[tuple[str, ...]] = ()  # what the task must have: "prox", "solve", "smooth_loss"

    @property
    def one_shot(self) -> bool:
        """Whether a single round with everyone is all there is to do (exact referees)."""
        return False

    @property
    def additive(self) -> bool:
        """Whether messages are changes whose mean is added to a model: they may be clipped and averaged robustly."""
        return not self.pooled

    @property
    def asks(self) -> tuple[str, ...]:
        """The optional facts that `settle` uses: "fit", "spread", "rules", "alone" (`estimates/facts.py`)."""
        return ("spread",) if getattr(self, "lam", None) == "auto" else ()

    def settle(self, task: Task, facts: Any) -> Any:
        """Turn fields such as "auto" into numbers from one exchange of facts."""
        return self

    def start(self, task: Task, w0: Tensor) -> tuple[Any, Any]:
        """The server's state and one client's first state (without the leading [C])."""
        raise NotImplementedError

    def visit(self, server: Any, client: Any, task: Task, data: CohortData, round: Round) -> tuple[Any, Any]:
        """One stay at a cohort: the clients' new states and their messages."""
        raise NotImplementedError

    def merge(self, server: Any, mean: Any, round: Round) -> Any:
        """The server's next state from the weighted mean of the messages."""
        raise NotImplementedError

    def finish(self, server: Any, client: Any, task: Task, data: CohortData, round: Round) -> Any:
        """The last local stage before deployment; one that trains declares `last_stage`."""
        return client

    def deploy(self, server: Any, client: Any) -> Tensor:
        """[C, d]: the model that each client uses."""
        raise NotImplementedError

    @property
    def name(self) -> str:
        return type(self).__module__.rsplit(".", 1)[-1]


def names() -> list[str]:
    """All algorithms, found by folder."""
    folder = importlib.import_module("mooring.algorithms")
    return sorted(m.name for m in pkgutil.iter_modules(folder.__path__) if m.name not in NOT_ALGORITHMS)


NOT_ALGORITHMS = ("base", "settings")


def find(name: str) -> type[Algorithm]:
    """The algorithm class of that name."""
    if name not in names():
        raise RequestError(f"{unknown('algorithm', name, names())}.")
    module = importlib.import_module(f"mooring.algorithms.{name}")
    return next(
        thing
        for thing in vars(module).values()
        if isinstance(thing, type) and issubclass(thing, Algorithm) and thing.__module__ == module.__name__
    )


def build(name: str, fields: dict[str, Any]) -> Algorithm:
    """An algorithm with some of its fields set, by name; a field that it has not, or of a wrong type, is refused."""
    cls = find(name)
    hints = get_type_hints(cls)
    check_fields(name, fields, {f.name: hints[f.name] for f in dataclasses.fields(cls)})  # type: ignore[arg-type]
    return cls(**fields)


def describe(name: str) -> dict[str, Any]:
    """What `mooring list algorithms` tells: summary, paper, limits, departures, reveals, fields and their defaults."""
    cls = find(name)
    text = importlib.import_module(cls.__module__).__doc__ or ""
    head = text.split("\n", 1)[0]
    return {
        "name": name,
        "summary": head.split(": ", 1)[-1],
        "paper": spelled_out(cls.paper),
        "limits": _section(text, "Limits"),
        "departs": _section(text, "Departs"),
        "reveals": cls.reveals,
        "fields": {f.name: f.default for f in dataclasses.fields(cls)},  # type: ignore[arg-type]
    }


def _section(text: str, title: str) -> str:
    """The lines of a docstring that follow `title`, up to the next blank line or titled line."""
    lines, found = [], False
    for line in text.splitlines():
        if line.startswith(title + " "):
            found = True
            lines.append(line[len(title) :].strip())
        elif found and line.startswith("         "):
            lines.append(line.strip())
        elif found:
            break
    return " ".join(lines)
