"""The contract of an algorithm: hyperparameters in a frozen dataclass, and pure functions on a cohort.

The engine samples clients, weighs and averages messages, counts costs, evaluates and saves.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, Self, TypeVar, get_type_hints

from torch import Tensor

from mooring.algorithms.hyperparameters import check_local_work, resolve_auto
from mooring.algorithms.server_optimizers import ServerOptimizer, check_server_optimizer
from mooring.core.cohort import Round, StateTree
from mooring.core.errors import RequestError
from mooring.core.field_checks import check_fields, describe_unknown
from mooring.core.local_training import LocalTraining
from mooring.core.local_work import LocalWork
from mooring.core.papers import expand_citations
from mooring.core.task import Task
from mooring.core.types import JsonObject
from mooring.core.user_code import find_plugin_name, is_spec, load_plugin, load_python, plugin_names, spec_of

if TYPE_CHECKING:
    from mooring.estimates.client_statistics import ClientStatistics

GROUPS = ("global", "personal", "clustered", "baseline")  # what a client deploys; baselines are to compare with
ServerState = TypeVar("ServerState", bound=tuple[object, ...])
ClientState = TypeVar("ClientState", bound=tuple[object, ...])
Message = TypeVar("Message")


class NoState(NamedTuple):
    """The state of clients that keep nothing between rounds."""


class Algorithm(Generic[ServerState, ClientState, Message]):
    """The contract. A subclass is a frozen dataclass in a file of its own; the file's name is the algorithm's.

    The fields are the hyperparameters. States are NamedTuples of tensors; a message is a tensor, a NamedTuple of
    tensors or None. A client's state and message have a leading [C]; the server's state has its global model in `w`.
    """

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]  # a subclass is a dataclass

    paper: ClassVar[str]  # where the method comes from
    group: ClassVar[str] = "personal"  # one of GROUPS
    reveals: ClassVar[str]  # what a curious server could reconstruct from the messages
    pooled: ClassVar[bool] = False  # needs all rows in one place: a baseline for simulations
    full_participation: ClassVar[bool] = False  # needs every client in every round
    finetunes: ClassVar[bool] = False  # `finetune` trains: at every client with rows, also those that never took part
    # Parts of the server's state that `client_update` and `finetune` do without: they are not sent, and None there.
    server_only: ClassVar[tuple[str, ...]] = ()
    # How a client that comes after the training gets its model (engines/adaptation.py).
    new_client_method: ClassVar[str] = "tune"
    # Fields that `client_update` also takes as one number per client: runs that differ there are trained together.
    per_client_fields: ClassVar[tuple[str, ...]] = ()
    keeps_models: ClassVar[bool] = False  # a client's model contains its rows: it is never sent
    server_fields: ClassVar[tuple[str, ...]] = ()  # fields that only `server_update` uses
    fixed_steps: ClassVar[str] = ""  # why an algorithm without the fields of `LocalWork` takes no optimizer
    eta_rules: ClassVar[tuple[str, ...]] = ()  # words that eta may be, besides "auto"

    def __post_init__(self) -> None:
        """Hold the shared fields to their ranges: those of `LocalWork` and of the server's optimizer."""
        if isinstance(self, LocalWork):
            check_local_work(self, *self.eta_rules)
        if isinstance(self, ServerOptimizer):
            check_server_optimizer(self)

    @property
    def local_work(self) -> LocalWork | None:
        """The hyperparameters of local steps, if the algorithm has them."""
        return self if isinstance(self, LocalWork) else None

    @property
    def one_shot(self) -> bool:
        """Whether a single round with all clients completes the training (exact baselines)."""
        return False

    @property
    def additive(self) -> bool:
        """Whether messages are changes whose mean is added to a model: they may be clipped and averaged robustly."""
        return not self.pooled

    @property
    def required_statistics(self) -> tuple[str, ...]:
        """The optional statistics that `resolve` uses: "fit", "spread", "rules", "alone"
        (`estimates/client_statistics.py`)."""
        return ("spread",) if getattr(self, "lam", None) == "auto" else ()

    @property
    def is_resolved(self) -> bool:
        """Whether every field that may be a number is one: `resolve` then needs no constants of the clients' losses.

        An algorithm outside this package may need them all the same.
        """
        numbers = ("int", "float", "Auto", "Penalty")
        field_names = [f.name for f in dataclasses.fields(self) if any(kind in str(f.type) for kind in numbers)]  # type: ignore[arg-type]
        builtin = type(self).__module__.startswith(PACKAGE + ".")
        return builtin and not any(isinstance(getattr(self, name), str) for name in field_names)

    def resolve(self, task: Task, statistics: ClientStatistics) -> Self:
        """The algorithm with fields such as "auto" turned into numbers, from what clients send before training."""
        return resolve_auto(self, task, statistics) if isinstance(self, LocalWork) else self

    def init(self, task: Task, w0: Tensor) -> tuple[ServerState, ClientState]:
        """The server's state and one client's first state (without the leading [C])."""
        raise NotImplementedError

    def client_update(
        self, server: ServerState, client: ClientState, local: LocalTraining
    ) -> tuple[ClientState, Message]:
        """The local update of a cohort: the clients' new states and their messages."""
        raise NotImplementedError

    def server_update(self, server: ServerState, mean: Message, round: Round) -> ServerState:
        """The server's next state from the weighted mean of the messages."""
        raise NotImplementedError

    def finetune(self, server: ServerState, client: ClientState, local: LocalTraining) -> StateTree:
        """The clients' states after a last local stage before deployment; one that trains declares `finetunes`."""
        return client

    def personal_model(self, server: ServerState, client: ClientState) -> Tensor:
        """[C, d]: the model that each client uses."""
        raise NotImplementedError

    def global_model(self, server: ServerState) -> Tensor:
        """[d]: the model of a client that has no state of its own, because it has no rows or never took part."""
        return server.w  # type: ignore[attr-defined, no-any-return]

    def deployed_task(self, task: Task) -> Task:
        """The task of the models that `personal_model` returns, whose vectors begin with those of `task`; zeros behind
        the global model make it one of them."""
        return task

    @property
    def name(self) -> str:
        """The file's name for algorithms of this package, the class's for others."""
        package, _, file = type(self).__module__.rpartition(".")
        return file if package == PACKAGE else type(self).__name__


AnyAlgorithm = Algorithm[Any, Any, Any]
PACKAGE = "mooring.algorithms"
SHARED_MODULES = ("base", "hyperparameters", "kernel_path", "server_optimizers")
ENTRY_POINT_GROUP = "mooring.algorithms"  # the group under which an installed package offers algorithms
IN_MEMORY_PREFIX = "(in memory)"  # begins the name of an algorithm that no file defines


def algorithm_names() -> list[str]:
    """All algorithms, found by folder, and those that installed packages offer."""
    own = builtin_names()
    return own + [name for name in plugin_names(ENTRY_POINT_GROUP) if name not in own]


def names_by_group() -> list[str]:
    """All algorithms: global ones first, then personal and clustered ones, then baselines."""
    return sorted(algorithm_names(), key=lambda name: (GROUPS.index(find(name).group), name))


@lru_cache(maxsize=1)
def builtin_names() -> list[str]:
    """The algorithms of this package."""
    folder = importlib.import_module(PACKAGE)
    return sorted(m.name for m in pkgutil.iter_modules(folder.__path__) if m.name not in SHARED_MODULES)


def normalize_name(name: str) -> str:
    """The name of an algorithm as it is spelled here: `FedAvg` is fedavg."""
    if is_spec(name) or name.startswith(IN_MEMORY_PREFIX):
        return name
    folded = {_letters(builtin): builtin for builtin in builtin_names()}
    return folded.get(_letters(name), name)


def _letters(name: str) -> str:
    return "".join(c for c in name.casefold() if c.isalnum())


def find(name: str, copies: Path | None = None) -> type[AnyAlgorithm]:
    """The algorithm class of that name: of this package, of an installed one, or of a file ("my_file.py:MyAlgorithm",
    from the copy in `copies` where a run has one)."""
    if is_spec(name):
        return check_algorithm_class(load_python(name, "algorithm", copies), name)
    if name.startswith(IN_MEMORY_PREFIX):
        raise RequestError(
            f"the run's algorithm {name[len(IN_MEMORY_PREFIX) + 1 :]} was in memory; pass it again from Python."
        )
    if name not in builtin_names():  # only then are installed packages searched, which takes a while
        offered = load_plugin(ENTRY_POINT_GROUP, name)
        if offered is None:
            description = describe_unknown("algorithm", name, algorithm_names(), "mooring list algorithms")
            raise RequestError(f"{description}; or a file and a class, as my_file.py:MyAlgorithm.")
        return check_algorithm_class(offered, name)
    module = importlib.import_module(f"{PACKAGE}.{name}")
    return next(
        thing
        for thing in vars(module).values()
        if isinstance(thing, type) and issubclass(thing, Algorithm) and thing.__module__ == module.__name__
    )


def check_algorithm_class(thing: object, name: str) -> type[AnyAlgorithm]:
    """Refuse an object that is not an algorithm."""
    if not (isinstance(thing, type) and issubclass(thing, Algorithm) and dataclasses.is_dataclass(thing)):
        raise RequestError(f"algorithm {name!r} must be a frozen dataclass that inherits from Algorithm.")
    return thing


def reference_of(algorithm: AnyAlgorithm) -> str:
    """What a run file calls an algorithm, so that `find` finds it again."""
    cls = type(algorithm)
    if cls.__module__.rpartition(".")[0] == PACKAGE:
        return algorithm.name
    return find_plugin_name(ENTRY_POINT_GROUP, cls) or spec_of(cls) or f"{IN_MEMORY_PREFIX} {cls.__name__}"


def build(
    name: str, fields: JsonObject, copies: Path | None = None, own: Mapping[str, type[AnyAlgorithm]] | None = None
) -> AnyAlgorithm:
    """An algorithm with some of its fields set, by name; a field that it has not, or of a wrong type, is refused.

    Classes that are at hand already are in `own`, by name.
    """
    cls = (own or {}).get(name) or find(name, copies)
    types = _field_types(cls)  # type: ignore[arg-type]
    local = [field for field in fields if field in LocalWork.__dataclass_fields__ and field not in types]
    if local and cls.fixed_steps:
        raise RequestError(
            f"{name}: '{local[0]}' does not apply, since {cls.fixed_steps}; use an algorithm of local steps, such as "
            "fedavg, ditto or fedprox_personal."
        )
    check_fields(name, fields, types, f"mooring explain {name}")
    return cls(**fields)


@cache  # evaluating annotations takes milliseconds, and clients build their algorithm for every message
def _field_types(cls: type[AnyAlgorithm]) -> JsonObject:
    hints = get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls)}  # type: ignore[arg-type]


def describe(name: str) -> JsonObject:
    """What `mooring list algorithms` shows of an algorithm: group, summary, paper, limits, departures, fields."""
    cls = find(name)
    text = importlib.import_module(cls.__module__).__doc__ or ""
    head = text.split("\n", 1)[0]
    return {
        "name": name,
        "group": cls.group,
        "summary": head.split(": ", 1)[-1],
        "paper": expand_citations(getattr(cls, "paper", "")),
        "limits": _section(text, "Limits"),
        "departs": _section(text, "Departs"),
        "reveals": getattr(cls, "reveals", ""),
        "fields": {f.name: f.default for f in dataclasses.fields(cls)},  # type: ignore[arg-type]
    }


def _section(text: str, title: str) -> str:
    """The lines of a docstring that follow `title`, up to the next blank line or titled line."""
    lines, inside = [], False
    for line in text.splitlines():
        if line.startswith(title + " "):
            inside = True
            lines.append(line[len(title) :].strip())
        elif inside and line.startswith("         "):
            lines.append(line.strip())
        elif inside:
            break
    return " ".join(lines)
