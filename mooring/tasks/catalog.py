"""Tasks by name: those of this package, of installed packages, and of a user's file ("my_file.py:MyTask")."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import sys
from pathlib import Path
from typing import get_type_hints

from mooring.core.errors import RequestError
from mooring.core.field_checks import check_fields, describe_unknown
from mooring.core.task import METRICS, HasSolve, Task
from mooring.core.types import JsonObject
from mooring.core.user_code import is_spec, load_plugin, load_python, plugin_names

NOT_TASKS = ("catalog", "memory")  # a memory belongs to models that an algorithm deploys
OF_DATA = ("dtype", "mean", "scale", "max_count", "items", "sample", "target_column", "target_shape")
NOT_SETTINGS = (*OF_DATA, "make", "kernels", "device", "changing_buffers")  # what no section [task] can hold
ENTRY_POINT_GROUP = "mooring.tasks"  # the group under which an installed package offers tasks
AUTOMATIC = {"regression": "linear", "binary": "logistic", "classes": "logistic", "count": "poisson"}


def classes_by_name() -> dict[str, type[Task]]:
    """The task classes of this package by name, found by folder."""
    folder = importlib.import_module("mooring.tasks")
    classes: dict[str, type[Task]] = {}
    for module in pkgutil.iter_modules(folder.__path__):
        if module.name not in NOT_TASKS:
            for thing in vars(importlib.import_module(f"mooring.tasks.{module.name}")).values():
                if isinstance(thing, type) and Task in thing.__mro__ and "name" in vars(thing):
                    classes[vars(thing)["name"]] = thing
    return dict(sorted(classes.items()))


def names() -> list[str]:
    """All tasks, and those that installed packages offer."""
    own = classes_by_name()
    return [*own, *(name for name in plugin_names(ENTRY_POINT_GROUP) if name not in own)]


def find(name: str, copies: Path | None = None) -> type[Task]:
    """The task class of that name; that of a file from its copy in the run directory `copies`, if it has one."""
    if is_spec(name):
        return check_task_class(load_python(name, "task", copies), name)
    known = classes_by_name()
    if name in known:
        return known[name]
    offered = load_plugin(ENTRY_POINT_GROUP, name)
    if offered is None:
        unknown = describe_unknown("task", name, ["auto", *names()], "mooring list tasks")
        raise RequestError(f"{unknown}; or a file and a class, as my_file.py:MyTask.")
    return check_task_class(offered, name)


def check_task_class(thing: object, name: str) -> type[Task]:
    """Refuse an object that is not a task on the columns of a table, or lacks a declaration."""
    if not (isinstance(thing, type) and issubclass(thing, Task) and dataclasses.is_dataclass(thing)):
        raise RequestError(f"task {name!r} must be a frozen dataclass that inherits from Task.")
    missing = [part for part in ("name", "kinds") if not hasattr(thing, part)] + sorted(thing.__abstractmethods__)
    if missing:
        raise RequestError(f"task {name!r} lacks {', '.join(missing)}.")
    if "features" not in {f.name for f in dataclasses.fields(thing)}:
        raise RequestError(f"task {name!r} needs a field `features`, the number of columns.")
    metric: object = thing.metric
    if isinstance(metric, str) and metric not in METRICS and isinstance(thing.unit_power, property):
        raise RequestError(
            f"task {name!r}: its metric {metric!r} is a new one; state its unit by `unit_power`: 2 if it grows with "
            "the square of the target's unit, 1 if with the unit itself, 0 if it has none."
        )
    return thing


def describe(name: str) -> JsonObject:
    """The rows of `mooring list tasks`."""
    cls = find(name)
    by_class = cls.__module__.endswith(".linear_losses") or not cls.__module__.startswith("mooring.")
    text = (cls.__doc__ if by_class else sys.modules[cls.__module__].__doc__) or ""
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


def build(
    name: str, kind: str, features: int, classes: int, fields: JsonObject | None = None, copies: Path | None = None
) -> Task:
    """A task for a target of this kind; `auto` picks the usual one."""
    fields = dict(fields or {})
    cls = find(AUTOMATIC[kind] if name == "auto" else name, copies)
    if kind not in cls.kinds:
        raise RequestError(
            f"task '{cls.name}' fits a target that is {' or '.join(cls.kinds)}, but this one is {kind}; "
            f"use --task {AUTOMATIC[kind]} or --target-type {cls.kinds[0]}."
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
