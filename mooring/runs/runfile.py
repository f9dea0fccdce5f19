"""`run.toml`: what was run, resolved numbers included, complete enough to run it again, here or on Flower."""

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


def make_run(table: JsonObject, where: str) -> RunFile:
    """The run that nested tables describe; RequestError in one sentence that begins with `where`, if it is said.

    A participation up to 1 is a share of the clients, so 1 is everyone; a whole number above 1 is how many.
    """
    made = table.get("mooring", {})
    if isinstance(made, dict) and made.get("format", FORMAT_VERSION) != FORMAT_VERSION:
        raise RequestError(
            f"{where}: made by Mooring {made.get('version', 'of an unknown version')} in format {made['format']!r}; "
            f"this is Mooring {installed_version()}, which reads format {FORMAT_VERSION}."
        )
    try:
        return RunFile.model_validate(table)
    except ValidationError as error:
        raise RequestError(f"{where}: {_sentence(error)}" if where else _sentence(error)) from None


def make_training(where: str, **options: Any) -> TrainingSection:
    """The section [training] alone, held to the same rules."""
    try:
        return TrainingSection(**options)
    except ValidationError as error:
        raise RequestError(f"{where}: {_sentence(error, 'training')}") from None


def parse_run(data: bytes, where: str) -> RunFile:
    """The run of a file's bytes; its seal, if it has one, is dropped."""
    try:
        table = tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"{where}: this is not TOML: {error}.") from None
    made = table.setdefault("mooring", {})
    if isinstance(made, dict):
        made.setdefault("purpose", purpose_of(table))
    run = make_run(table, where)
    return run.model_copy(update={"mooring": run.mooring.model_copy(update={"seal": None})})


def read_run(path: str | Path) -> RunFile:
    """A run file that a person may have written or edited."""
    return parse_run(read_bytes(path), str(path))


def purpose_of(table: JsonObject) -> str:
    """What a file that does not say its purpose is for: its methods tell, and without any it serves every command."""
    return "compare" if "algorithms" in table else "fit" if "algorithm" in table else "advise"


def run_bytes(run: RunFile) -> bytes:
    """The file, sealed: equal runs give equal bytes, and a run directory notices a later change."""
    checked = make_run(run.model_dump(exclude_none=True), "run.toml")  # `model_copy` checks nothing
    table = checked.model_dump(exclude_none=True)
    table["mooring"]["seal"] = BLANK_CHECKSUM
    return with_checksum(tomli_w.dumps(table).encode())


def _sentence(error: ValidationError, *section: str) -> str:
    """The first thing that pydantic found wrong, in a run or a section: where, what was found, what is right."""
    first = error.errors(include_url=False)[0]
    first["loc"] = (*section, *first["loc"])
    if not first["loc"]:
        return f"{first['ctx']['error']}."
    dotted, right, model = _place(first["loc"])
    if first["type"] == "extra_forbidden":
        parent, _, name = dotted.rpartition(".")
        what = f"field of [{parent}]" if parent else "section"
        return f"{describe_unknown(what, name, sorted(model.model_fields.keys() - {'seal'}))}."
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
