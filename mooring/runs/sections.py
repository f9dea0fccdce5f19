"""The sections of a run file. Each field is declared once: the command line's flags and Python's arguments are these.

A field has a help text (its title), a description (the end of the sentence '... must
be'), a default, and a flag if it differs from the field's name. Nothing heavy is imported: `--help` reads this.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo

from mooring.core.types import JsonObject
from mooring.runs.purposes import PurposeName

FORMAT_VERSION = 2
DEFAULT_ALGORITHM = "fedprox_personal"  # default of `fit`
DEFAULT_NETWORK_ALGORITHM: JsonObject = {"name": "fedavg_finetune", "tune_steps": 50}  # default for networks
DEFAULT_METHODS = ("local", "pooled", "fedavg", "fedprox", "fedprox_personal")  # default of `compare`


def installed_version() -> str:
    from importlib.metadata import PackageNotFoundError, version  # slow to load, and few commands use it

    try:
        return version("mooring-fl")
    except PackageNotFoundError:
        return "(not installed)"


def _storable(value: object) -> object:
    """Return a value that TOML can store; tables lose their Nones and are sorted, so that equal runs give equal
    bytes."""
    import tomli_w

    from mooring.runs.atomic_files import to_plain

    try:
        value = _tidy(to_plain(value))
        tomli_w.dumps({"value": value})
    except TypeError as error:
        raise ValueError(str(error)) from None
    return value


def _tidy(value: object) -> object:
    if isinstance(value, dict):
        return {key: _tidy(value[key]) for key in sorted(value) if value[key] is not None}
    return [_tidy(item) for item in value] if isinstance(value, list) else value


def _list(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def _shares(split: list[float] | str) -> list[float] | str:
    from mooring.data.splits import are_shares

    if not isinstance(split, str) and not are_shares(split):
        raise ValueError("not three shares")
    return split


def _share_or_number(value: int | float) -> int | float:
    if not (0 < value <= 1 or (value > 1 and isinstance(value, int))):
        raise ValueError("neither a share nor a number of clients")
    return value


def _positive(weights: dict[str, float] | str) -> dict[str, float] | str:
    if not weights or (isinstance(weights, dict) and not all(0 < p < math.inf for p in weights.values())):
        raise ValueError("no weights")
    return weights


def _is_average(spec: str) -> str:
    from mooring.core.aggregation import parse_average

    parse_average(spec)
    return spec


def _is_attack(spec: str) -> str:
    from mooring.core.attacks import parse_attack

    parse_attack(spec)
    return spec


def _auto(value: object) -> object:
    """Return None for "auto", which on a command line overrides the value of a run file."""
    return None if value == "auto" else value


def _per_cent(value: object) -> object:
    """ "1%" is 0.01."""
    if isinstance(value, str) and value.strip().endswith("%"):
        try:
            return float(value.strip()[:-1]) / 100
        except ValueError:
            pass
    return value


Value = Annotated[Any, BeforeValidator(_storable)]
Table = Annotated[JsonObject, BeforeValidator(_storable)]
Columns = Annotated[list[str], BeforeValidator(_list)]
Split = Annotated[str | list[float], BeforeValidator(_list), AfterValidator(_shares)]
Participation = Annotated[int | float, AfterValidator(_share_or_number)]
Average = Annotated[str, AfterValidator(_is_average)]
Attack = Annotated[str, AfterValidator(_is_attack)]
Weights = Annotated[str | dict[str, float], AfterValidator(_positive)]


def plain_field(right: str, default: object = ..., **bounds: Any) -> Any:
    """Return a field that is not an option."""
    return Field(default, description=right, **bounds)


def option(help: str, right: str, default: object = None, *, flag: str = "", unset: str = "", **bounds: Any) -> Any:
    """Return a field that is an option; `unset` describes the behavior if the default is None."""
    extra: JsonObject = {"flag": flag, "unset": unset}
    return Field(default, title=help, description=right, json_schema_extra=extra, **bounds)


def rare_option(*texts: Any, **terms: Any) -> Any:
    """Return an option that few need: help texts leave it out, so that they fit a screen."""
    field = option(*texts, **terms)
    field.json_schema_extra["rare"] = "yes"
    return field


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)


class OpenSection(BaseModel):
    """A section with undeclared fields: the hyperparameters of an algorithm, the settings of a task."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True, defer_build=True)
    __pydantic_extra__: dict[str, Value]

    @model_validator(mode="before")
    @classmethod
    def _sort(cls, table: object) -> object:
        if not isinstance(table, dict):
            return table
        return {key: table[key] for key in sorted(table) if table[key] is not None}

    @property
    def fields(self) -> JsonObject:
        """The section's own fields, without the declared ones."""
        return dict(self.__pydantic_extra__ or {})


class RunInfo(Section):
    version: str = plain_field("the version of Mooring that made the run", default_factory=installed_version)
    format: int = plain_field(f"{FORMAT_VERSION}", FORMAT_VERSION, ge=FORMAT_VERSION, le=FORMAT_VERSION)
    purpose: PurposeName = plain_field('"fit", "compare", "advise" or "personalize"', "fit")
    seal: str | None = plain_field("left to Mooring", None)


class DataSection(Section):
    source: str = plain_field("a file, or the name of a data set")
    client: str | None = option(
        "Column that names the client.", "the name of the column that identifies the client", unset="`client`"
    )
    target: str | None = option("Column to predict.", "the name of the column to predict", unset="`target`")
    formula: str | None = option(
        "Roles: score ~ lrt + (1 | school).",
        "a formula, such as 'score ~ lrt * gender + (1 + lrt | school)'",
        unset="none",
    )
    target_type: Annotated[Literal["regression", "binary", "classes", "count"] | None, BeforeValidator(_auto)] = option(
        "regression, binary, classes or count.",
        '"auto", "regression", "binary", "classes" or "count"',
        unset="auto",
    )
    features: Columns | None = option("Columns to learn from.", "a list of column names", unset="all useful ones")
    drop: Columns | None = option("Columns to leave out.", "a list of column names", unset="none")
    group: str | None = rare_option(
        "Column whose equal values stay in one part.",
        "the name of the column whose equal values stay in one part",
        unset="none",
    )
    time_column: str | None = rare_option(
        "Column to split by: the latest rows test.", "the name of the column that orders the rows", unset="none"
    )
    split: Split | None = option(
        "Shares to train, validate, test; or a column.",
        "three shares (train, validation, test) that add up to 1, or the name of a column with each row's part",
        unset="`split`, or 0.6,0.2,0.2",
    )
    decimal: Literal[".", ","] | None = rare_option(
        "Decimal mark of numbers that are written as text.", '"." or ","', unset="found out by column"
    )
    date_format: str | None = rare_option(
        "How dates are written: %d.%m.%Y.", "a format of strptime, such as %d.%m.%Y", unset="found out by column"
    )
    encoding: str | None = rare_option(
        "Encoding of a CSV file: cp1250.", "an encoding, such as utf-8, cp1250 or latin-1", unset="found out"
    )
    na: Columns | None = rare_option("Further texts that stand for a missing value.", "a list of texts", unset="none")
    sheet: str | int | None = rare_option(
        "Sheet of a workbook: name or number.", "the name or number of a sheet", unset="the first"
    )
    header_row: int | None = rare_option(
        "Row of the header, counted from 1.", "a whole number >= 1", unset="found out", ge=1
    )
    categorical: Columns | None = rare_option(
        "Columns to read as categories, whatever they hold.", "a list of column names", unset="none"
    )
    allow: Columns | None = rare_option(
        "Columns that may predict the target almost perfectly.", "a list of column names", unset="none"
    )
    drop_repeats: bool = rare_option("Leave rows out that repeat an earlier one.", "true or false", False)
    merge_levels: Columns | None = rare_option(
        "Categories that are one: suny=sunny.", 'a list of replacements, as "suny=sunny"', unset="none"
    )
    winsorize: Annotated[float | None, BeforeValidator(_per_cent)] = rare_option(
        "Share of each column's lowest and highest numbers to pull in.",
        'a share above 0 and below 0.5: 0.01 or "1%"',
        unset="none",
        gt=0,
        lt=0.5,
    )
    min_rows: int | None = option(
        "Fewest rows that a client may have.", "a whole number >= 1", unset="5, for advise 1", ge=1
    )
    drop_small: bool = option("Leave smaller clients out.", "true or false", False)
    drop_missing_target: bool = rare_option("Leave rows without a target out.", "true or false", False)
    split_seed: int | None = rare_option(
        "Seed of the split into parts and of the partition.",
        "a whole number from 0 to 2^63 - 1",
        unset="that of training",
        ge=0,
        le=2**63 - 1,
    )
    min_category_rows: int | None = rare_option(
        "Fewest training rows of a category that has a column of its own.", "a whole number >= 1", unset="1", ge=1
    )
    partition: Table | None = rare_option(
        "How a pooled data set is divided among clients: clients=100.",
        "a table of settings of the named data set",
        unset="as the data set defines",
    )
    data_dir: str | None = rare_option("Folder of large data sets.", "a folder", unset="$MOORING_DATA")


class TaskSection(OpenSection):
    name: Annotated[str | None, BeforeValidator(_auto)] = option(
        "Kind of model: `mooring list tasks`, or your own: my_file.py:MyTask.",
        'the name of a task, or a file and a class in it, as "my_file.py:MyTask"',
        flag="--task",
        unset="auto",
    )
    model: str | None = option(
        "Your own network: my_model.py:make.",
        'a file and a function in it, as "my_model.py:make"',
        unset="none",
        pattern=r"^.+\.py:[A-Za-z_]\w*$",
    )
    loss: str | None = rare_option(
        "The network's loss: a name, or your own: my_loss.py:f.",
        'the name of a loss, or a file and a function in it, as "my_loss.py:f"',
        unset="by the target",
    )


class AlgorithmSection(OpenSection):
    name: str = plain_field("the name of an algorithm")
    resolved: Table | None = plain_field("a table of numbers that the run resolved", None)


class TrainingSection(Section):
    rounds: int = option("Communication rounds.", "a whole number >= 1", 100, ge=1)
    participation: Participation = option(
        "Share or number of clients per round.",
        "a share of the clients (above 0, up to 1) or a whole number of them from 2 on",
        1.0,
    )
    weights: Weights = rare_option(
        "Client weights p: size, uniform, or a column.",
        '"size", "uniform", the name of a column, or a table with a positive number for each client',
        "size",
    )
    baselines: bool = rare_option("Train local and pooled models beside it, as baselines.", "true or false", True)
    seed: int = option(
        "The same seed gives the same bytes.", "a whole number from 0 to 2^63 - 1", 0, ge=0, le=2**63 - 1
    )
    seeds: int = option("Repetitions, with the seeds that follow.", "a whole number >= 1", 1, ge=1)
    evaluate_every: int | None = rare_option(
        "Rounds between evaluations.", "a whole number of rounds >= 1", unset="about 20 in all", ge=1
    )
    patience: int | None = rare_option(
        "Evaluations without improvement before stopping.", "a whole number of evaluations >= 1", unset="never", ge=1
    )
    checkpoint: Literal["best", "last"] = rare_option(
        "Whose models are used: the round with the best validation loss, or the last.", '"best" or "last"', "best"
    )
    select_by: str = rare_option(
        "What the best round, early stopping and a network's plan go by: loss, or a measure such as accuracy.",
        '"loss" or the name of a measure',
        "loss",
    )
    checkpoint_every: int = rare_option("Rounds between checkpoints.", "a whole number of rounds >= 1", 10, ge=1)
    threads: int | None = rare_option("Threads; kept in the run file.", "a whole number >= 1", unset="all", ge=1)
    device: str | None = rare_option("Where a network computes: cpu, cuda.", "a device of torch", unset="cpu")
    chunk: int | None = rare_option(
        "Clients worked on at once.", "a whole number of clients >= 1", unset="by the model's size", ge=1
    )
    kernels: Annotated[Literal["torch", "numba"] | None, BeforeValidator(_auto)] = rare_option(
        "What takes local steps: torch, or numba's compiled kernels; kept in the run file.",
        '"auto", "torch" or "numba"',
        unset="numba where it is installed and faster",
    )
    average: Average = rare_option(
        "How messages are averaged: mean, or robustly.",
        '"mean", "median", "trimmed", "clipped", "geometric" or "krum"; "trimmed:0.3" sets the malicious share',
        "mean",
    )
    clip: float | None = rare_option("The longest message that counts as it is.", "a number > 0", unset="none", gt=0)
    noise: float | None = rare_option(
        "Gaussian noise for privacy, in clips; see `mooring explain epsilon`.",
        "a number >= 0.01",
        unset="none",
        ge=0.01,
    )
    delta: float | None = rare_option(
        "The delta at which epsilon is reported.", "a number between 0 and 1", unset="1e-05", gt=0, lt=1
    )
    weight_cap: float | None = rare_option(
        "The largest share of one client in a round.", "a share above 0, up to 1", unset="none", gt=0, le=1
    )
    attack: Attack | None = rare_option(
        "Simulate a share of malicious clients, sign-flip:0.2.",
        'an attack and a share: sign-flip, scale, noise, little, label-flip, nan or huge, as "sign-flip:0.2"',
        unset="none",
    )


class AdviceSection(Section):
    """Options of `advise`."""

    margin: Annotated[float, BeforeValidator(_per_cent)] = option(
        "Difference too small to matter.",
        'a share from 0 to below 1: 0.01 or "1%"',
        0.01,
        ge=0,
        lt=1,
    )
    level: Annotated[float, BeforeValidator(_per_cent)] = rare_option(
        "Level of the federation's intervals.", 'a share above 0 and below 1: 0.95 or "95%"', 0.95, gt=0, lt=1
    )
    folds: int | None = rare_option(
        "Parts of each client's rows that are held out in turn.",
        "a whole number >= 2",
        unset="5; 10 up to 1,000 rows; 20 for small clients; 1 where fits are slow",
        ge=2,
    )
    shape: Literal["auto", "linear", "spline", "boosted"] = option(
        "Extra columns for nonlinear effects.",
        '"linear", "spline", "boosted" or "auto" (all of them from 50 rows on, per class where there are several, '
        "weighed by held-out rows)",
        "auto",
    )
    theory: bool = rare_option("Ask the theorems too.", "true or false", True)
    settings: Table | None = plain_field("a table of a network's local training: eta, epochs, batch, optimizer", None)


class FederationSection(Section):
    """Options of a deployment; see docs/federation-options.md."""

    clients: int | list[str] | None = plain_field(
        "how many clients take part (2 or more), or a list of their names", None
    )
    quorum: Participation = plain_field(
        "a share of the clients asked (above 0, up to 1) or a whole number of them from 2 on: so many replies a round "
        "needs",
        1.0,
    )
    deadline: float = plain_field(
        "seconds > 0 after which a client that has not answered is named, and a round with a quorum waits for nobody",
        600.0,
        gt=0,
    )
    wait: float = plain_field("seconds > 0 without a sign of life before the server gives up", 3600.0, gt=0)
    share_models: bool = plain_field("true (clients send their personal models) or false", False)
    secure: bool | None = plain_field(
        "true (the server learns sums of messages only) or false (it sees each message); unset, true where it can be",
        None,
    )
    max_rows: int | None = plain_field(
        "a whole number >= 1 of training rows that a client counts with at most", None, ge=1
    )
    compress: Literal["float16", "int8"] | None = plain_field(
        '"float16" or "int8": messages of local updates in fewer bytes', None
    )
    secure_range: float = plain_field("a number > 0 that no entry of a client's share of the mean exceeds", 8.0, gt=0)


class Option(NamedTuple):
    """One option: its name in Python, its place in a run file, and its declaration."""

    name: str
    section: str
    field: str
    info: FieldInfo

    @property
    def flag(self) -> str:
        return self._extra["flag"] or "--" + self.name.replace("_", "-")

    @property
    def is_rare(self) -> bool:
        """Whether help texts leave it out; `mooring list options` and the page list it."""
        return "rare" in self._extra

    @property
    def default(self) -> str:
        """The default in words."""
        value = self.info.default
        if value is None:
            return self._extra["unset"]
        if isinstance(value, bool):
            return "yes" if value else "no"
        return f"{value:g}" if isinstance(value, float) else str(value)

    @property
    def _extra(self) -> dict[str, str]:
        return self.info.json_schema_extra  # type: ignore[return-value]


def _options() -> dict[str, Option]:
    sections: dict[str, type[BaseModel]] = {
        "data": DataSection,
        "task": TaskSection,
        "training": TrainingSection,
        "advice": AdviceSection,
    }
    options = [
        Option(section if field == "name" else field, section, field, info)
        for section, model in sections.items()
        for field, info in model.model_fields.items()
        if info.title
    ]
    return {option.name: option for option in options}


OPTIONS = _options()
