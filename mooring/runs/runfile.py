"""`run.toml`: what was run, settled numbers included, complete enough to run it again, here or on Flower."""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from mooring.core.errors import RequestError
from mooring.runs.files import UNSEALED, plain, read_bytes, sealed

FORMAT = 1


def _installed() -> str:
    try:
        return version("mooring")
    except PackageNotFoundError:
        return "(not installed)"


def _storable(value: Any) -> Any:
    """A value as TOML can hold it; its tables lose their Nones and are sorted: equal runs give equal bytes."""
    try:
        value = _tidy(plain(value))
        tomli_w.dumps({"value": value})
    except TypeError as error:
        raise ValueError(str(error)) from None
    return value


def _tidy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _tidy(value[key]) for key in sorted(value) if value[key] is not None}
    return [_tidy(item) for item in value] if isinstance(value, list) else value


def _fractions(split: list[float] | str) -> list[float] | str:
    if not isinstance(split, str):
        shares = len(split) == 3 and all(0 <= share <= 1 for share in split) and split[0] > 0
        if not shares or not math.isclose(sum(split), 1):
            raise ValueError("not three shares")
    return split


def _share_or_number(value: int | float) -> int | float:
    if not (0 < value <= 1 or (value > 1 and isinstance(value, int))):
        raise ValueError("neither a share nor a number of clients")
    return value


def _was_chosen(keep: Any) -> Any:
    return "best" if keep == "chosen" else keep  # what runs of version 0.1 call it


Value = Annotated[Any, BeforeValidator(_storable)]
Table = Annotated[dict[str, Any], BeforeValidator(_storable)]


def _say(right: str, default: Any = ..., **bounds: Any) -> Any:
    """A field and what would be right, in words that end the sentence '... must be'."""
    return Field(default, description=right, **bounds)


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Open(BaseModel):
    """A section with fields of its own choosing: the hyper-parameters of an algorithm, the settings of a task."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True)
    __pydantic_extra__: dict[str, Value]

    @model_validator(mode="before")
    @classmethod
    def _sort(cls, table: Any) -> Any:
        if not isinstance(table, dict):
            return table
        return {key: table[key] for key in sorted(table) if table[key] is not None}

    @property
    def fields(self) -> dict[str, Any]:
        """The section's own fields, without the declared ones."""
        return dict(self.__pydantic_extra__ or {})


class Made(Section):
    version: str = _say("the version of Mooring that made the run", default_factory=_installed)
    format: int = _say(f"{FORMAT}", FORMAT, ge=FORMAT, le=FORMAT)
    kind: Literal["fit", "compare", "advise"] = _say('"fit", "compare" or "advise"', "fit")
    seal: str | None = _say("left to Mooring", None)


class Data(Section):
    source: str = _say("a file, or the name of a data set")
    client: str | None = _say("the name of the column that says whose row it is", None)
    target: str | None = _say("the name of the column to predict", None)
    kind: Literal["regression", "binary", "classes", "count"] | None = _say(
        '"regression", "binary", "classes" or "count"', None
    )
    features: list[str] | None = _say("a list of column names", None)
    drop: list[str] | None = _say("a list of column names", None)
    unit: str | None = _say("the name of the column whose equal values stay in one part", None)
    time: str | None = _say("the name of the column that orders the rows", None)
    split: Annotated[list[float] | str, AfterValidator(_fractions)] | None = _say(
        "three shares (train, validation, test) that add up to 1, or the name of a column that says each row's part",
        None,
    )
    min_rows: int | None = _say("a whole number >= 1", None, ge=1)
    drop_small: bool = _say("true or false", False)
    partition: Table | None = _say("a table of settings of the named data set", None)
    data_dir: str | None = _say("a folder", None)


class Task(Open):
    name: str | None = _say("the name of a task", None)
    model: str | None = _say(
        'a file and a function in it, as "my_model.py:make"', None, pattern=r"^.+\.py:[A-Za-z_]\w*$"
    )
    loss: str | None = _say("the name of a loss", None)


class Algorithm(Open):
    name: str = _say("the name of an algorithm")
    settled: Table | None = _say("a table of numbers that the run settled", None)


class Training(Section):
    rounds: int = _say("a whole number >= 1", 100, ge=1)
    participation: Annotated[int | float, AfterValidator(_share_or_number)] = _say(
        "a share of the clients (above 0, up to 1) or a whole number of them from 2 on", 1.0
    )
    weights: Literal["size", "uniform"] = _say('"size" or "uniform"', "size")
    seed: int = _say("a whole number from 0 to 2^63 - 1", 0, ge=0, le=2**63 - 1)
    evaluate_every: int | None = _say("a whole number of rounds >= 1", None, ge=1)
    patience: int | None = _say("a whole number of evaluations >= 1", None, ge=1)
    keep: Annotated[Literal["best", "last"], BeforeValidator(_was_chosen)] = _say(
        '"best" (validation loss) or "last"', "best"
    )
    checkpoint_every: int = _say("a whole number of rounds >= 1", 10, ge=1)
    threads: int | None = _say("a whole number >= 1", None, ge=1)
    chunk: int | None = _say("a whole number of clients >= 1", None, ge=1)


class RunFile(Section):
    mooring: Made = _say("a table", default_factory=Made)
    data: Data = _say("a table with a source")
    task: Task = _say("a table", default_factory=Task)
    algorithm: Algorithm | None = _say("a table", None)
    algorithms: list[Algorithm] | None = _say("tables [[algorithms]], one for each method to compare", None)
    training: Training = _say("a table", default_factory=Training)

    @model_validator(mode="after")
    def _has_methods(self) -> RunFile:
        kind = self.mooring.kind
        if kind == "fit" and (self.algorithm is None or self.algorithms):
            raise ValueError("a run of kind 'fit' needs one section [algorithm] with a name, and no [[algorithms]]")
        if kind == "compare" and (not self.algorithms or self.algorithm):
            raise ValueError("a run of kind 'compare' needs sections [[algorithms]] with names, and no [algorithm]")
        return self


SECTIONS: dict[str, type[BaseModel]] = {
    "mooring": Made,
    "data": Data,
    "task": Task,
    "algorithm": Algorithm,
    "algorithms": Algorithm,
    "training": Training,
}


def make_run(table: dict[str, Any], where: str) -> RunFile:
    """The run that nested tables describe; RequestError in one sentence that begins with `where`.

    A participation up to 1 is a share of the clients, so 1 is everyone; a whole number above 1 is how many.
    """
    made = table.get("mooring", {})
    if isinstance(made, dict) and made.get("format", FORMAT) != FORMAT:
        raise RequestError(
            f"{where}: made by Mooring {made.get('version', 'of an unknown version')} in format {made['format']!r}; "
            f"this is Mooring {_installed()}, which reads format {FORMAT}."
        )
    try:
        return RunFile.model_validate(table)
    except ValidationError as error:
        raise RequestError(f"{where}: {_sentence(error)}") from None


def make_training(where: str, **options: Any) -> Training:
    """The section [training] alone, held to the same rules."""
    try:
        return Training(**options)
    except ValidationError as error:
        raise RequestError(f"{where}: {_sentence(error, 'training')}") from None


def parse_run(data: bytes, where: str) -> RunFile:
    """The run of a file's bytes; its seal, if it has one, is dropped."""
    try:
        table = tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"{where}: this is not TOML: {error}.") from None
    run = make_run(table, where)
    return run.model_copy(update={"mooring": run.mooring.model_copy(update={"seal": None})})


def read_run(path: str | Path) -> RunFile:
    """A run file that a person may have written or edited."""
    return parse_run(read_bytes(path), str(path))


def run_bytes(run: RunFile) -> bytes:
    """The file, sealed: equal runs give equal bytes, and a run directory notices a later change."""
    checked = make_run(run.model_dump(exclude_none=True), "run.toml")  # `model_copy` checks nothing
    table = checked.model_dump(exclude_none=True)
    table["mooring"]["seal"] = UNSEALED
    return sealed(tomli_w.dumps(table).encode())


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """Half a sentence on a name that nobody knows: what it may have meant, and the known ones."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1)
    hint = f" (did you mean '{near[0]}'?)" if near else ""
    return f"unknown {what} '{name}'{hint}; known: {', '.join(known)}"


def _sentence(error: ValidationError, *section: str) -> str:
    """The first thing that pydantic found wrong, in a run or a section: where, what was found, what is right."""
    first = error.errors(include_url=False)[0]
    first["loc"] = (*section, *first["loc"])
    if not first["loc"]:
        return f"{first['ctx']['error']}."
    dotted, right, model = _place(first["loc"])
    if first["type"] == "extra_forbidden":
        section, _, name = dotted.rpartition(".")
        what = f"field of [{section}]" if section else "section"
        return f"{unknown(what, name, model.model_fields.keys() - {'seal'})}."
    if first["type"] == "missing":
        return f"{dotted} is missing; it must be {right}."
    found = repr(first["input"])
    return f"{dotted} must be {right}, got {found if len(found) <= 80 else found[:77] + '...'}."


def _place(loc: tuple[int | str, ...]) -> tuple[str, str, type[BaseModel]]:
    """The dotted name of a place, what would be right there, and the section that it belongs to."""
    model: type[BaseModel] = RunFile
    right, names = "", []
    for part in loc:
        names.append(str(part))
        if isinstance(part, int):
            continue
        field = model.model_fields.get(part)
        right = (field and field.description) or "a number, text, list or table"
        if model is not RunFile or part not in SECTIONS:
            break  # what follows names pydantic's own alternatives
        model = SECTIONS[part]
    return ".".join(names), right, model
