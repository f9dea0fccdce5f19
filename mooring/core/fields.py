"""Settings by name: an unknown name is answered with the nearest known one, a wrong type with the right one."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable, Mapping
from typing import Any, Union, get_args, get_origin

from mooring.core.errors import RequestError

WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false", dict: "a table", list: "a list"}


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """Half a sentence on a name that nobody knows: what it may have meant, and the known ones."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1) or difflib.get_close_matches(name.lower(), known, n=1)
    hint = f" (did you mean '{near[0]}'?)" if near else ""
    return f"unknown {what} '{name}'{hint}; known: {', '.join(known) or 'none'}"


def check_fields(owner: str, given: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Refuse fields that are not `known`, and values that are not of the known field's type (Any: whatever it is)."""
    for name, value in given.items():
        if name not in known:
            raise RequestError(f"{owner}: {unknown('field', name, known)}.")
        choices = [get_origin(kind) or kind for kind in alternatives(known[name])]
        if not any(fits(value, kind) for kind in choices):
            words = [WORDS[kind] for kind in choices if kind in WORDS]
            raise RequestError(f"{owner}: {name} must be {' or '.join(words)}, got {value!r}.")


def alternatives(hint: Any) -> list[Any]:
    """The members of a union, or the one type that it is."""
    if get_origin(hint) in (Union, types.UnionType):
        return [kind for member in get_args(hint) for kind in alternatives(member)]
    return [hint]


def fits(value: Any, kind: Any) -> bool:
    """Whether a value may stand in a field of this type; types that no run file can hold are left to their owner."""
    if kind not in WORDS:
        return value is None if kind is type(None) else True
    if isinstance(value, bool):
        return kind is bool
    taken = {float: (int, float), list: (list, tuple)}.get(kind, kind)
    return isinstance(value, taken)
