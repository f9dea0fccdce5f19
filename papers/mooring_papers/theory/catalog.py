"""Catalog of the theorems for `mooring theorem NAME quantity=value ...`.

A theorem is a module of `mooring.theory` or of this package, and its functions are the statements in it. Quantities
are numbers, or JSON: `p=[0.5,0.5]`, `update={"eta":0.1,"steps":5,"prox":false}`.
"""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import Any, get_type_hints

import numpy as np

from mooring.core.errors import RequestError
from mooring.core.field_checks import describe_unknown
from mooring.core.types import JsonObject

PACKAGES = ("mooring.theory", "mooring_papers.theory")
Statement = Callable[..., object]


def theorems() -> dict[str, str]:
    """Return each theorem's name and summary."""
    return {name: (_module(name).__doc__ or "").split("\n", 1)[0] for name in sorted(_packages())}


def statements(theorem: str) -> dict[str, Statement]:
    """Return the functions of a theorem by name."""
    module = _module(theorem)
    return {
        name: thing
        for name, thing in vars(module).items()
        if inspect.isfunction(thing) and thing.__module__ == module.__name__ and not name.startswith("_")
    }


def find(name: str) -> Statement | None:
    """Return the statement of that name, `theorem.statement` if several have it; None for a theorem without its own."""
    known = theorems()
    theorem, _, statement = name.rpartition(".")
    if not theorem and name in known:
        return statements(name).get(name)
    places = [t for t in ([theorem] if theorem in known else [] if theorem else known) if statement in statements(t)]
    if not places:
        raise RequestError(f"{describe_unknown('theorem', name, known, 'mooring theorem')}.")
    if len(places) > 1:
        raise RequestError(
            f"theorem: {name!r} is in several theorems; use {' or '.join(f'{t}.{name}' for t in places)}."
        )
    return statements(places[0])[statement]


def quantities(statement: Statement) -> dict[str, str]:
    """Return the quantities of a statement with their defaults; "" if it is required."""
    parameters = inspect.signature(statement).parameters.values()
    return {p.name: "" if p.default is p.empty else str(p.default) for p in parameters}


def describe(name: str | None = None) -> list[dict[str, str]]:
    """Return the rows of `mooring theorem`: all theorems, or the statements of one, with summaries and quantities."""
    known = theorems()
    if name is None:
        return [
            {"name": theorem, "says": says, "asks": ", ".join(statements(theorem))} for theorem, says in known.items()
        ]
    if name in known:
        listed = {f"{name}.{part}": statement for part, statement in statements(name).items()}
    else:
        statement = find(name)
        assert statement is not None  # only the name of a theorem has none
        listed = {name: statement}
    return [
        {
            "name": part,
            "says": (statement.__doc__ or "").split("\n", 1)[0],
            "asks": ", ".join(f"{key}={default}" if default else key for key, default in quantities(statement).items()),
        }
        for part, statement in listed.items()
    ]


def evaluate(name: str, given: Sequence[str]) -> JsonObject:
    """Return the value of a statement at quantities such as "mu=0.5"."""
    statement = find(name)
    if statement is None:
        known = ", ".join(f"{name}.{part}" for part in statements(name))
        raise RequestError(f"theorem: {name!r} has several statements; choose one of {known}.")
    required = quantities(statement)
    values = {}
    for pair in given:
        key, equals, text = pair.partition("=")
        if not equals or key not in required:
            raise RequestError(f"theorem {name}: got {pair!r}; quantities are {', '.join(required)}, as name=value.")
        values[key] = _value(name, key, text, get_type_hints(statement).get(key))
    if missing := [key for key, default in required.items() if default == "" and key not in values]:
        raise RequestError(f"theorem {name}: give {', '.join(missing)}, as name=value.")
    try:
        return _to_plain(statement.__name__, statement(**values))
    except (TypeError, ValueError, ArithmeticError, IndexError) as error:
        raise RequestError(f"theorem {name}: these quantities are inconsistent: {error}.") from error


@cache
def _packages() -> dict[str, str]:
    """The package of each theorem."""
    paths = {package: importlib.import_module(package).__path__ for package in PACKAGES}
    modules = [(module.name, package) for package, path in paths.items() for module in pkgutil.iter_modules(path)]
    return {name: package for name, package in modules if name != "catalog"}


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"{_packages()[name]}.{name}")


def _value(name: str, key: str, text: str, kind: Any) -> object:
    try:
        value = float(text) if text in ("inf", "-inf", "nan") else json.loads(text)
    except json.JSONDecodeError:
        if kind in (float, int, bool, np.ndarray):
            raise RequestError(f"theorem {name}: {key} must be a number or JSON, got {text!r}.") from None
        return text
    if isinstance(value, dict) and hasattr(kind, "_fields"):
        unknown = sorted(set(value) ^ set(kind._fields))
        if unknown:
            raise RequestError(f"theorem {name}: {key} has the parts {', '.join(kind._fields)}, got {text}.")
        return kind(**value)
    if isinstance(value, list) and "Sequence[" in str(kind):
        return [np.asarray(part, dtype=float) for part in value]
    return np.asarray(value, dtype=float) if isinstance(value, list) else value


def _to_plain(name: str, value: object) -> JsonObject:
    """Return the parts of a value by name, as plain numbers and lists."""
    parts = value._asdict() if hasattr(value, "_asdict") else {name: value}
    return {key: np.asarray(part).tolist() if not isinstance(part, str) else part for key, part in parts.items()}
