"""Tasks by name: what a run file and the command line may ask for."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import sys
from typing import get_type_hints

from mooring.core.errors import RequestError
from mooring.core.field_checks import check_fields, describe_unknown
from mooring.core.task import HasSolve, Task
from mooring.core.types import JsonObject

NOT_TASKS = ("catalog",)
NOT_SETTINGS = ("dtype", "make", "kernels", "mean", "scale", "device")  # what no section [task] can hold
AUTOMATIC = {"regression": "linear", "binary": "logistic", "classes": "logistic", "count": "poisson"}


def classes_by_name() -> dict[str, type[Task]]:
    """Every task class by its name, found by folder."""
    folder = importlib.import_module("mooring.tasks")
    classes: dict[str, type[Task]] = {}
    for module in pkgutil.iter_modules(folder.__path__):
        if module.name not in NOT_TASKS:
            for thing in vars(importlib.import_module(f"mooring.tasks.{module.name}")).values():
                if isinstance(thing, type) and Task in thing.__mro__ and "name" in vars(thing):
                    classes[vars(thing)["name"]] = thing
    return dict(sorted(classes.items()))


def names() -> list[str]:
    return list(classes_by_name())


def find(name: str) -> type[Task]:
    known = classes_by_name()
    if name not in known:
        raise RequestError(f"{describe_unknown('task', name, ['auto', *known], 'mooring list tasks')}.")
    return known[name]


def describe(name: str) -> JsonObject:
    """What `mooring list tasks` tells."""
    cls = find(name)
    text = (cls.__doc__ if cls.__module__.endswith(".linear_losses") else sys.modules[cls.__module__].__doc__) or ""
    return {
        "name": name,
        "summary": text.split("\n", 1)[0].split(": ", 1)[-1],
        "targets": list(cls.kinds),
        "exact": issubclass(cls, HasSolve),
        "smooth": cls.smooth_loss,
        "fields": {f: default for f, default in _fields(cls).items() if f not in ("dtype", "kernels")},
    }


def _fields(cls: type[Task]) -> JsonObject:
    """The settings of a task with their defaults; what the data decide (features, classes) is left out."""
    if not dataclasses.is_dataclass(cls):
        given = inspect.signature(cls).parameters.values()
        return {p.name: None if p.default is p.empty else p.default for p in given}
    return {f.name: f.default for f in dataclasses.fields(cls) if f.name not in ("features", "classes")}


def field_types(cls: type[Task]) -> JsonObject:
    """The types of the settings that a run file may give a task."""
    hints = get_type_hints(cls if dataclasses.is_dataclass(cls) else cls.__init__)
    return {name: hints[name] for name in _fields(cls) if name not in NOT_SETTINGS}


def build(name: str, kind: str, features: int, classes: int, fields: JsonObject | None = None) -> Task:
    """A task for a target of this kind; `auto` picks the usual one."""
    fields = dict(fields or {})
    cls = find(AUTOMATIC[kind] if name == "auto" else name)
    if kind not in cls.kinds:
        raise RequestError(
            f"task '{cls.name}' fits a target that is {' or '.join(cls.kinds)}, but this one is {kind}; "
            f"use task '{AUTOMATIC[kind]}' or give target_type = {cls.kinds[0]!r}."
        )
    given = {name: value for name, value in fields.items() if name not in NOT_SETTINGS}
    check_fields(f"task '{cls.name}'", given, field_types(cls))
    if not fields.get("ridge", 0.0) >= 0:
        raise RequestError(f"task '{cls.name}': ridge must be >= 0, got {fields['ridge']}.")
    if not dataclasses.is_dataclass(cls):
        if "make" not in fields:
            raise RequestError(f"task '{cls.name}' needs a model; give one as model = \"my_model.py:make\".")
        return cls(**fields)
    if any(f.name == "classes" for f in dataclasses.fields(cls)):
        fields["classes"] = max(classes, 2)
    return cls(features=features, **fields)
