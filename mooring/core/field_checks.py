"""Settings by name: an unknown name is answered with the nearest known one, a wrong type with the right one."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable
from typing import Literal, Union, get_args, get_origin

from mooring.core.errors import RequestError
from mooring.core.types import NamedValues

TYPE_NAMES = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    dict: "a table",
    list: "a list",
}


MAX_SUGGESTIONS = 3
MAX_LISTED_NAMES = 12  # known names that an error lists where a command lists them all


def describe_unknown(what: str, name: str, known: Iterable[str], listed_by: str = "") -> str:
    """Half a sentence on an unknown name: the nearest known ones, and all of them or the command that lists them."""
    known = list(known)
    quoted = [f"'{close}'" for close in nearest_names(name, known)]
    either = f"{', '.join(quoted[:-1])} or {quoted[-1]}" if len(quoted) > 1 else "".join(quoted)
    hint = f" (did you mean {either}?)" if quoted else ""
    if listed_by and len(known) > MAX_LISTED_NAMES:
        return f"unknown {what} '{name}'{hint}; see `{listed_by}`"
    return f"unknown {what} '{name}'{hint}; known: {', '.join(known) or 'none'}"


def nearest_names(name: str, known: Iterable[str]) -> list[str]:
    """Known names that a name may have meant, capitals and signs aside: itself, those that begin so, the closest."""
    folded: dict[str, str] = {}
    for candidate in known:
        folded.setdefault(_letters(candidate), candidate)
    letters_of_name = _letters(name)
    if letters_of_name in folded:
        return [folded[letters_of_name]]
    begin = [
        candidate
        for letters, candidate in folded.items()
        if len(letters_of_name) > 2 and letters.startswith(letters_of_name)
    ]
    close = difflib.get_close_matches(letters_of_name, folded, n=1)
    return begin[:MAX_SUGGESTIONS] or [folded[candidate] for candidate in close]


def _letters(name: str) -> str:
    return "".join(c for c in name.casefold() if c.isalnum())


def check_fields(owner: str, given: NamedValues, known: NamedValues, listed_by: str = "") -> None:
    """Refuse fields that are not `known`, and values that are not of the known field's type (Any: whatever it is).

    `listed_by` is the command that lists the known ones.
    """
    for name, value in given.items():
        if name not in known:
            raise RequestError(f"{owner}: {describe_unknown('hyperparameter', name, known, listed_by)}.")
        choices = [get_origin(kind) or kind for kind in type_alternatives(known[name])]
        if not any(matches_type(value, kind) for kind in choices):
            descriptions = [TYPE_NAMES[kind] for kind in choices if kind in TYPE_NAMES]
            raise RequestError(f"{owner}: {name} must be {' or '.join(descriptions)}, got {value!r}.")


def type_alternatives(hint: object) -> list[object]:
    """The members of a union, or the one type that it is."""
    if get_origin(hint) in (Union, types.UnionType):
        return [kind for member in get_args(hint) for kind in type_alternatives(member)]
    return [hint]


def matches_type(value: object, kind: object) -> bool:
    """Whether a field of this type accepts a value; types that a run file cannot contain are not checked."""
    if kind is Literal:
        return isinstance(value, str)  # one of which, its owner checks
    if kind not in TYPE_NAMES:
        return value is None if kind is type(None) else True
    if isinstance(value, bool):
        return kind is bool
    taken = {float: (int, float), list: (list, tuple)}.get(kind, kind)
    return isinstance(value, taken)
