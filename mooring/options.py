"""The command line's options, derived from the run file's sections."""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from mooring.core.errors import RequestError
from mooring.core.field_checks import type_alternatives
from mooring.core.types import JsonObject
from mooring.runs.sections import DEFAULT_ALGORITHM, DEFAULT_METHODS, OPTIONS, Option

DATA, TASK, TRAINING, ADVICE = (
    tuple(name for name, option in OPTIONS.items() if option.section == section)
    for section in ("data", "task", "training", "advice")
)

# Arguments are hidden from the list of options: the commands' own texts tell what they are.
Source = Annotated[str, typer.Argument(hidden=True)]
Method = Annotated[
    str | None,
    typer.Option(
        "--algorithm",
        metavar="NAME",
        help=f"See `mooring list algorithms`; or my_file.py:MyAlgorithm. [{DEFAULT_ALGORITHM}]",
    ),
]
Methods = Annotated[
    list[str] | None,
    typer.Option(
        "--methods", metavar="A,B", help=f"Algorithms to compare, as `ditto lam=0.1`. [{', '.join(DEFAULT_METHODS)}]"
    ),
]
Lam = Annotated[
    str | None,
    typer.Option("--lam", metavar="N", help="Pull towards the global model. [automatic]"),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Hyperparameter: lr=0.1 or task.ridge=1."),
]
SetEach = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Hyperparameter: fedavg.steps=5."),
]
SetTask = Annotated[list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Hyperparameter: task.ridge=1.")]
Out = Annotated[Path | None, typer.Option("--out", metavar="PATH", help="The run directory. [runs/NAME-1, -2, ...]")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else.")]

Csv = Annotated[bool, typer.Option("--csv", help="Print the clients' table as CSV only.")]
Track = Annotated[
    str | None,
    typer.Option("--track", metavar="mlflow|tensorboard", help="Also log the run to a tracker. [none]"),
]
TrustCode = Annotated[bool, typer.Option("--trust-code", help="Run the Python code that the run file names.")]


SOURCES = "SOURCE: a table (CSV, Parquet, npz), a folder of tables, a data set, or a run file (.toml)."
RARE_OPTIONS_HINT = "Rarer options: `mooring list options`."


def example(command: str) -> str:
    """What stands at the end of a help text."""
    return f"{SOURCES} {RARE_OPTIONS_HINT}\n\nExample: {command}"


def option_names() -> list[str]:
    return list(OPTIONS)


def describe(name: str) -> dict[str, str]:
    """An option as `mooring list options` shows it."""
    option = OPTIONS[name]
    return {
        "flag": option.flag,
        "file": f"[{option.section}] {option.field}",
        "python": option.name,
        "default": option.default,
        "summary": str(option.info.title),
    }


def add_options(*names: str, **defaults: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command with these options as flags: its `**given` are those that were given, as a run file would hold them.

    `defaults` are those that the help text shows, where they differ from other commands'.
    """
    defaults = {"min_rows": "5"} | defaults

    def dress(function: Callable[..., None]) -> Callable[..., None]:
        parameters = inspect.signature(function, eval_str=True).parameters.values()
        own = [p for p in parameters if p.kind is not p.VAR_KEYWORD]
        derived = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=make_flag(OPTIONS[name], defaults.get(name)),
            )
            for name in names
        ]

        @functools.wraps(function)
        def command(**words: object) -> None:
            given = {name: parse_value(OPTIONS[name], words.pop(name)) for name in names}
            given = {name: value for name, value in given.items() if value is not None}
            try:
                function(**words, **given)
            except RequestError as error:
                if type(error) is not RequestError:
                    raise
                flags = [name for name in ("lam",) if words.get(name) is not None]
                raise RequestError(with_flags(str(error), given, flags)) from error

        first = [p for p in own if p.default is p.empty]
        keyword_only = [p.replace(kind=p.KEYWORD_ONLY) for p in own if p.default is not p.empty]
        command.__signature__ = inspect.Signature([*first, *derived, *keyword_only])  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in [*own, *derived]}
        return command

    return dress


def with_flags(text: str, given: Iterable[str], hyperparameters: Iterable[str] = ()) -> str:
    """An error with the flags that were typed instead of the fields of a run file or of an algorithm."""
    for name in hyperparameters:
        text = re.sub(rf"^\w+: {name}(?= must)", f"--{name}", text)
    for name in given:
        option = OPTIONS[name]
        field = rf"(?:{option.section}\.{option.field}|{name}(?: \({option.flag}\))?)"
        text = re.sub(rf"^{field}(?= (?:must|does not apply|is missing|asks|=))", option.flag, text)
    return text


def option_types(option: Option) -> set[object]:
    """What a field may hold: str, int, float, bool, list, dict or Literal."""
    types = set()
    for type_ in type_alternatives(option.info.annotation):
        if get_origin(type_) is Annotated:
            types |= {get_origin(kind) or kind for kind in type_alternatives(get_args(type_)[0])}
        elif type_ is not type(None):
            types.add(get_origin(type_) or type_)
    return types


def allowed_words(option: Option) -> list[str]:
    """The words that a field may be, if it may be certain words only."""
    return [
        word
        for type_ in type_alternatives(option.info.annotation)
        if get_origin(type_) is Literal
        for word in get_args(type_)
    ]


def make_flag(option: Option, default: str | None = None) -> object:
    """An option as typer declares it: text, or texts that add up, for the run file's own check to judge."""
    types = option_types(option)
    help_ = f"{option.info.title} [{default or option.default}]"
    hidden = option.is_rare
    if types == {bool}:
        flags = f"{option.flag}/--no-{option.flag[2:]}"
        return Annotated[bool | None, typer.Option(flags, help=help_, hidden=hidden)]
    form = (
        "NAME=VALUE"
        if types == {dict}
        else "A,B"
        if types == {list}
        else "|".join(allowed_words(option))
        if allowed_words(option) and option.name != "target_type"
        else "N"
        if types <= {int, float}
        else "TEXT"
    )
    several = list[str] if types in ({dict}, {list}) else str
    return Annotated[several | None, typer.Option(option.flag, metavar=form, help=help_, hidden=hidden)]


def parse_value(option: Option, words: Any) -> object:
    """The value of a flag's text, as a run file contains it; None if the flag was not given."""
    types = option_types(option)
    if words is None or words == [] or types == {bool}:
        return None if words == [] else words
    if types == {dict}:
        return assignments(words, option.flag)
    if types == {list}:
        return split_commas(words)
    if list in types:  # shares, or a word
        shares = [parse_number(part) for part in words.split(",")]
        return shares if len(shares) > 1 or not isinstance(shares[0], str) else words
    return parse_number(words) if types <= {int, float} else words


def parse_number(text: str) -> int | float | str:
    """A number if it is one, else the text."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text.strip()


def split_commas(texts: Iterable[str] | None) -> list[str] | None:
    return None if not texts else [word.strip() for text in texts for word in text.split(",") if word.strip()]


def assignments(texts: Iterable[str] | None, flag: str = "--set") -> JsonObject:
    """`lam=0.1` as {"lam": 0.1}: numbers, true/false, lists and tables as JSON writes them, anything else as text."""
    out = {}
    for text in texts or []:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise RequestError(f"{flag} takes NAME=VALUE, got {text!r}.")
        try:
            out[name.strip()] = json.loads(value)
        except json.JSONDecodeError:
            out[name.strip()] = value.strip()
    return out


def split_assignments(texts: Iterable[str] | None, given: JsonObject) -> tuple[JsonObject, JsonObject]:
    """The fields of methods, and the options with the fields of the task (`task.ridge=1`) among them."""
    fields = assignments(texts)
    of_task = {name[5:]: fields.pop(name) for name in list(fields) if name.startswith("task.")}
    if of_task:
        named = {"name": given["task"]} if "task" in given else {}
        given = given | {"task": named | of_task}
    return fields, given


def group_by_method(fields: JsonObject) -> dict[str, JsonObject]:
    """{"fedavg.steps": 5} as {"fedavg": {"steps": 5}}."""
    out: dict[str, JsonObject] = {}
    for name, value in fields.items():
        method, dot, field = name.rpartition(".")
        if not dot:
            raise RequestError(f"--set takes METHOD.FIELD=VALUE here, got {name!r}.")
        out.setdefault(method, {})[field] = value
    return out
