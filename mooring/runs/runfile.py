"""`run.toml`: a run's data, options and resolved numbers, sufficient to repeat it, here or on Flower."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel, ValidationError, model_validator

from mooring.core.errors import RequestError
from mooring.core.field_checks import describe_unknown
from mooring.core.types import JsonObject
from mooring.runs.atomic_files import BLANK_CHECKSUM, read_bytes, with_checksum
from mooring.runs.purposes import PURPOSES
from mooring.runs.sections import (
    FORMAT_VERSION,
    AdviceSection,
    AlgorithmSection,
    DataSection,
    FederationSection,
    RunInfo,
    Section,
    TaskSection,
    TrainingSection,
    installed_version,
    plain_field,
)


class RunFile(Section):
    mooring: RunInfo = plain_field("a table", default_factory=RunInfo)
    data: DataSection = plain_field("a table with a source")
    task: TaskSection = plain_field("a table", default_factory=TaskSection)
    algorithm: AlgorithmSection | None = plain_field("a table", None)
    algorithms: list[AlgorithmSection] | None = plain_field(
        "tables [[algorithms]], one for each method to compare", None
    )
    training: TrainingSection = plain_field("a table", default_factory=TrainingSection)
    advice: AdviceSection | None = plain_field("a table", None)
    federation: FederationSection | None = plain_field("a table", None)

    @model_validator(mode="after")
    def _has_methods(self) -> RunFile:
        purpose = self.mooring.purpose
        methods = PURPOSES[purpose].methods
        if methods == "one" and (self.algorithm is None or self.algorithms):
            raise ValueError(f"a run of '{purpose}' needs one section [algorithm] with a name, and no [[algorithms]]")
        if methods == "several" and (not self.algorithms or self.algorithm):
            raise ValueError(f"a run of '{purpose}' needs sections [[algorithms]] with names, and no [algorithm]")
        return self


SECTIONS: dict[str, type[BaseModel]] = {
    "mooring": RunInfo,
    "data": DataSection,
    "task": TaskSection,
    "algorithm": AlgorithmSection,
    "algorithms": AlgorithmSection,
    "training": TrainingSection,
    "advice": AdviceSection,
    "federation": FederationSection,
}


def make_run(table: JsonObject, source: str) -> RunFile:
    """Return the run that nested tables describe; a RequestError begins with `source`, if it is not empty.

    A participation up to 1 is a share of the clients, so 1 means all clients; a whole number above 1 is their number.
    """
    info = table.get("mooring", {})
    if isinstance(info, dict) and info.get("format", FORMAT_VERSION) != FORMAT_VERSION:
        raise RequestError(
            f"{source}: made by Mooring {info.get('version', 'of an unknown version')} in format {info['format']!r}; "
            f"this is Mooring {installed_version()}, which reads format {FORMAT_VERSION}."
        )
    try:
        return RunFile.model_validate(table)
    except ValidationError as error:
        raise RequestError(f"{source}: {_sentence(error)}" if source else _sentence(error)) from None


def make_training(source: str, **options: Any) -> TrainingSection:
    """Return the section [training], checked by the same rules."""
    try:
        return TrainingSection(**options)
    except ValidationError as error:
        raise RequestError(f"{source}: {_sentence(error, 'training')}") from None


def parse_run(data: bytes, source: str) -> RunFile:
    """Return the run in a file's bytes, without its seal."""
    try:
        table = tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"{source}: this is not TOML: {error}.") from None
    info = table.setdefault("mooring", {})
    if isinstance(info, dict):
        info.setdefault("purpose", purpose_of(table))
    run = make_run(table, source)
    return run.model_copy(update={"mooring": run.mooring.model_copy(update={"seal": None})})


def read_run(path: str | Path) -> RunFile:
    """Return the run in a file that a person may have written or edited."""
    return parse_run(read_bytes(path), str(path))


def purpose_of(table: JsonObject) -> str:
    """Return the purpose of a file that does not state it, by its methods; a file without methods serves every
    command."""
    return "compare" if "algorithms" in table else "fit" if "algorithm" in table else "advise"


def run_bytes(run: RunFile) -> bytes:
    """Return the sealed file: equal runs give equal bytes, and later changes are detected."""
    checked = make_run(run.model_dump(exclude_none=True), "run.toml")  # `model_copy` checks nothing
    table = checked.model_dump(exclude_none=True)
    table["mooring"]["seal"] = BLANK_CHECKSUM
    return with_checksum(tomli_w.dumps(table).encode())


def _sentence(error: ValidationError, *section: str) -> str:
    """Return pydantic's first error as a sentence: the field, the value, and what would be right."""
    first = error.errors(include_url=False)[0]
    first["loc"] = (*section, *first["loc"])
    if not first["loc"]:
        return f"{first['ctx']['error']}."
    dotted, right, model = _place(first["loc"])
    if first["type"] == "extra_forbidden":
        parent, _, name = dotted.rpartition(".")
        kind = f"field of [{parent}]" if parent else "section"
        return f"{describe_unknown(kind, name, sorted(model.model_fields.keys() - {'seal'}))}."
    if first["type"] == "missing":
        return f"{dotted} is missing; it must be {right}."
    value = repr(first["input"])
    return f"{dotted} must be {right}, got {value if len(value) <= 80 else value[:77] + '...'}."


def _place(loc: tuple[int | str, ...]) -> tuple[str, str, type[BaseModel]]:
    """Return a field's dotted name, its description, and the section that it belongs to."""
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
