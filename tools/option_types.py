"""mooring/runs/option_types.py: the options of `fit`, `compare` and `advise` for type checkers, from the sections of a
run file.

`python -m tools.option_types > mooring/runs/option_types.py`
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BeforeValidator

from mooring.runs.sections import OPTIONS, Option

HEADER = '''"""The options of `fit`, `compare` and `advise` in Python, for type checkers; None means unset.

This file is written by `python -m tools.option_types > mooring/runs/option_types.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypedDict

from mooring.core.types import NamedValues


class Options(TypedDict, total=False):
    """The options of `fit` and `compare`."""

'''
ADVICE_HEADER = '''

class AdviceOptions(Options, total=False):
    """Those of `advise`."""

'''
PYTHON_TYPES = {"task": "NamedValues", "loss": "Callable[..., object]"}  # taken in Python beside a run file's values
CONVERSIONS = {"_auto": "auto", "_per_cent": str}  # by validator: what else is taken, a word or a type
OWN_ARGUMENTS = ("model",)  # declared by the functions themselves


def format_types() -> str:
    """The text of the file."""
    options = [option for option in OPTIONS.values() if option.name not in OWN_ARGUMENTS]
    lines: dict[bool, list[str]] = {False: [], True: []}
    for option in options:
        lines[option.section == "advice"].append(f"    {option.name}: {' | '.join(name_types(option))} | None\n")
    return HEADER + "".join(lines[False]) + ADVICE_HEADER + "".join(lines[True])


def name_types(option: Option) -> Iterator[str]:
    """The types of an option's values, without None."""
    validators = [part.func.__name__ for part in option.info.metadata if isinstance(part, BeforeValidator)]
    conversions = [CONVERSIONS[name] for name in validators]
    words = [word for word in conversions if isinstance(word, str)]
    yield from (name_type(type_, words) for type_ in list_alternatives(option.info.annotation))
    yield from (type_.__name__ for type_ in conversions if isinstance(type_, type))
    if option.name in PYTHON_TYPES:
        yield PYTHON_TYPES[option.name]


def list_alternatives(annotation: Any) -> Iterator[Any]:
    """The types in a union, without None and without validators."""
    if get_origin(annotation) is Annotated:
        yield from list_alternatives(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, UnionType):
        for part in get_args(annotation):
            yield from list_alternatives(part)
    elif annotation is not NoneType:
        yield annotation


def name_type(type_: Any, words: list[str]) -> str:
    """A type as a caller's argument: lists and tables of any kind."""
    origin, arguments = get_origin(type_), get_args(type_)
    if origin is Literal:
        choices = [json.dumps(word) for word in dict.fromkeys([*words, *arguments])]
        return f"Literal[{', '.join(choices)}]"
    if origin is list:
        return f"Sequence[{arguments[0].__name__}]"
    if origin is dict:
        return "NamedValues" if arguments[1] is Any else f"Mapping[str, {arguments[1].__name__}]"
    return type_.__name__


if __name__ == "__main__":
    sys.stdout.write(format_types())
