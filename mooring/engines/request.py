"""A request as one checked run file: from options, or from a run file with options that override it.

A given option overrides the run file. The numbers that a run resolved ("auto" and the like) belong to
the unchanged run: any change resolves them again.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch

from mooring.algorithms.base import Algorithm, AnyAlgorithm, build, normalize_name, reference_of
from mooring.core.errors import RequestError
from mooring.core.field_checks import describe_unknown
from mooring.core.trusted_files import check_trusted
from mooring.core.types import JsonObject, NamedValues
from mooring.core.user_code import absolute_spec, add_imported_files, find_copy, is_spec, spec_of
from mooring.data.datasets import is_dataset_name
from mooring.data.formulas import refuse_stateful_terms
from mooring.runs.atomic_files import to_plain
from mooring.runs.directory import RUN_FILE
from mooring.runs.purposes import PURPOSES
from mooring.runs.runfile import RunFile, make_run, read_run
from mooring.runs.sections import DEFAULT_ALGORITHM, DEFAULT_METHODS, DEFAULT_NETWORK_ALGORITHM, OPTIONS

IN_MEMORY = "(in memory)"
SECTIONS = ("data", "task", "training", "advice")
Tables = JsonObject


def request(
    source: object,
    *,
    purpose: str,
    algorithm: str | AnyAlgorithm | None = None,
    methods: Sequence[str | AnyAlgorithm] | None = None,
    settings: NamedValues | None = None,
    model: object = None,
    trust_code: bool = False,
    reads_source: bool = True,
    **options: Any,
) -> RunFile:
    """Return the run of a call; `source` is a run file (`something.toml`) or data. `purpose` is "fit" (one `algorithm`,
    its fields in `settings`), "compare" (several `methods`, `settings` by name) or "advise" (local training of a
    network in `settings`). Files that a run file names, and that were not given before, are used only with
    `trust_code`. Without `reads_source` its data are not read."""
    file = read_tables(source)
    options_by_section = group_by_section(options, model)
    rules = PURPOSES[purpose]
    if options_by_section["advice"] and not rules.has_advice_section:
        raise RequestError(f"{min(options_by_section['advice'])} does not apply: it is for advise.")
    table = {
        section: file.get(section, {}) | options_by_section[section] for section in SECTIONS if section != "advice"
    }
    task_options = {key: options_by_section["task"].get(key) for key in ("name", "model")}
    if any(
        value is not None and value != (file.get("task", {}).get(key) or "auto") for key, value in task_options.items()
    ):
        table["task"] = options_by_section["task"]  # another task: the file's settings are not for it
    listed = [entry | {"name": absolute_spec(entry["name"])} for entry in listed_methods(file)]
    is_network = table["task"].get("model") is not None or table["task"].get("name") == "module"
    if rules.methods == "one":
        sections = [method_to_fit(listed, algorithm, settings or {}, is_network)]
    else:
        sections = methods_to_compare(listed, methods, settings or {}) if rules.methods == "several" else []
    if any(table[section] != file.get(section) for section in table) or sections != listed:
        sections = [{key: value for key, value in entry.items() if key != "resolved"} for entry in sections]
    classes = user_classes([algorithm, *(methods or [])])
    asked_for = [normalize_name(absolute_spec(str(entry).split(" ")[0])) for entry in (algorithm, *(methods or []))]
    passed = [*options_by_section["task"].values(), *asked_for, *classes, partition_name(options_by_section["data"])]
    if file:
        file_values = {
            part: {k: v for k, v in table[part].items() if k not in options_by_section[part]} for part in table
        }
        code = [*file_values["task"].values(), *(entry["name"] for entry in sections if entry["name"] not in passed)]
        code.append(partition_name(file_values["data"]))
        path = Path(str(source))
        check_trusted_files(code, file_values["data"] if reads_source else {}, path, path.parent, trust_code)
    check_trusted_files(
        passed,
        options_by_section["data"] if file else {**options_by_section["data"], "source": source},
        "this call",
        trust_code=True,
    )
    for entry in sections:  # a wrong field is refused before any data are read
        if entry["name"] not in classes:
            build(entry["name"], {k: v for k, v in entry.items() if k not in ("name", "resolved")})
    for key in ("name", "model", "loss"):
        if key in table["task"]:
            table["task"][key] = absolute_spec(table["task"][key])
    if is_spec(partition_name(table["data"])):
        own = absolute_spec(str(partition_name(table["data"])))
        table["data"]["partition"] = table["data"]["partition"] | {"partition": own}
    table["data"]["source"] = source_name(table["data"].get("source", source))
    # Advice on tables is many small matrices: PyTorch's second thread would only wait, and spin beside busy processes.
    exact = rules.has_advice_section and not is_network
    table["training"].setdefault("threads", 1 if exact else torch.get_num_threads())
    table |= {"algorithm": sections[0]} if rules.methods == "one" else {"algorithms": sections or None}
    if rules.has_advice_section:
        table["advice"] = file.get("advice", {}) | options_by_section["advice"]
        if settings:
            table["advice"]["settings"] = table["advice"].get("settings", {}) | rename_lr(settings)
        if table["advice"].get("settings") and not is_network:
            name = min(table["advice"]["settings"])
            raise RequestError(
                f"--set takes task.FIELD=VALUE here, got {name!r}: settings of local training do not apply to models "
                "that are solved exactly."
            )
        if table["advice"].get("settings"):  # FedAvg has all fields of local training and of the server's optimizer
            build("fedavg", table["advice"]["settings"])
    if rules.can_be_federated and "federation" in file:
        table["federation"] = file["federation"]
    try:
        return make_run({"mooring": {"purpose": purpose}, **table}, "")
    except RequestError as error:  # an option is named as it is given, without the section of a run file
        raise RequestError(re.sub(r"^(?:data|training|advice)\.", "", str(error))) from None


def read_federation_request(path: str | Path, trust_code: bool = False) -> RunFile:
    """Return the run of a deployment's run file: `advise` if it is the purpose, or if it has the section [advice] and
    no algorithm; else `fit`. `advise` leaves rows without a target out, as on one machine. The `source` of a deployment
    is not read: each client names its own table."""
    file = read_run(path)
    if file.data.formula is not None:
        refuse_stateful_terms(file.data.formula)
    if file.mooring.purpose != "advise" or (file.advice is None and not has_advise_purpose(path)):
        return request(Path(path), purpose="fit", trust_code=trust_code, reads_source=False)
    run = request(Path(path), purpose="advise", trust_code=trust_code, reads_source=False)
    return run.model_copy(update={"data": run.data.model_copy(update={"drop_missing_target": True})})


def has_advise_purpose(path: str | Path) -> bool:
    """Return whether the file itself names its purpose; without one a file serves every command."""
    return tomllib.loads(Path(path).read_text()).get("mooring", {}).get("purpose") == "advise"


def user_code_specs(run: RunFile) -> list[str]:
    """The user's own Python files that a run names, as "my_file.py:thing"."""
    methods = [run.algorithm] if run.algorithm else run.algorithms or []
    task = run.task.name, run.task.model, run.task.loss
    named = (*task, *(method.name for method in methods), partition_name(run.data.model_dump()))
    return [str(spec) for spec in named if is_spec(spec)]


def partition_name(data: NamedValues) -> object:
    """The name of the partition in a section [data], which may be a file and a function in it; None without one."""
    return (data.get("partition") or {}).get("partition")


def check_trusted_run(run: RunFile, folder: Path, trust_code: bool = False) -> None:
    """Use the files that a run directory's run file names, as far as they were given before, or under `trust_code`."""
    check_trusted_files(user_code_specs(run), run.data.model_dump(), folder / RUN_FILE, folder, trust_code, folder)


def check_trusted_files(
    code: Iterable[object],
    data: Tables,
    origin: str | Path,
    folder: Path = Path(),
    trust_code: bool = False,
    copies: Path | None = None,
) -> None:
    """Check the code of "my_file.py:thing" among some values, from `copies` if it is there, and the data of a
    section [data]; names of data sets are not files."""
    specs = add_imported_files([spec for spec in code if is_spec(spec)], copies)
    scripts = [str(find_copy(copies, spec) or spec.rpartition(":")[0]) for spec in specs]
    data_paths = [data.get("source"), data.get("data_dir")]
    files = [
        name for name in data_paths if isinstance(name, str | Path) and name != IN_MEMORY and not is_dataset_name(name)
    ]
    check_trusted(origin, folder, scripts, map(str, files), trust_code)


def read_tables(source: object) -> Tables:
    """The tables of a run file; none for any other source."""
    if not isinstance(source, str | Path) or not str(source).endswith(".toml"):
        return {}
    return read_run(source).model_dump(exclude_none=True, exclude={"mooring"})


def group_by_section(options: NamedValues, model: object = None) -> dict[str, Tables]:
    """Options by the section that they belong to; those that are None are left out."""
    out: dict[str, Tables] = {section: {} for section in SECTIONS}
    for name, value in {**options, "model": model}.items():
        if name not in OPTIONS:
            raise RequestError(f"{describe_unknown('option', name, sorted(OPTIONS), 'mooring list options')}.")
        if value is None:
            continue
        if name == "task" and isinstance(value, Mapping):
            out["task"] |= value
        elif name == "task" and isinstance(value, type):
            out["task"]["name"] = spec_of(value) or value.__name__
        elif name == "model" and not isinstance(value, str):
            if out["task"].get("name", "auto") not in ("auto", "module"):
                raise RequestError(
                    f"a model is a task of its own; leave out task '{out['task']['name']}', or the model."
                )
            spec = spec_of(value)
            out["task"] |= {"name": "module"} if spec is None else {"model": spec}
        elif name == "loss" and callable(value):
            out["task"]["loss"] = spec_of(value) or IN_MEMORY
        else:
            out[OPTIONS[name].section][OPTIONS[name].field] = to_run_file_value(value)
    return out


def to_run_file_value(value: object) -> Any:
    """Return a value in the form of a run file, if possible; otherwise the run file's own check refuses it."""
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "items"):  # a mapping, or a pandas series
        return {str(key): to_run_file_value(item) for key, item in value.items()}
    try:
        return to_plain(value)
    except TypeError:
        return value


def listed_methods(file: Tables) -> list[Tables]:
    """The methods of a run file."""
    return [file["algorithm"]] if "algorithm" in file else file.get("algorithms", [])


def user_classes(algorithms: Sequence[object]) -> dict[str, type[AnyAlgorithm]]:
    """The classes of the algorithms among these that were given as objects, by the names that run files give them."""
    return {reference_of(algorithm): type(algorithm) for algorithm in algorithms if isinstance(algorithm, Algorithm)}


def method_to_fit(
    file_methods: list[Tables], algorithm: str | AnyAlgorithm | None, settings: NamedValues, network: bool = False
) -> Tables:
    """Return the section [algorithm]: the requested one, the run file's, or the default."""
    if algorithm is None and len(file_methods) > 1:
        names = ", ".join(entry["name"] for entry in file_methods)
        raise RequestError(f"the run file lists several methods ({names}); choose one by --algorithm.")
    if algorithm is None:
        usual = DEFAULT_NETWORK_ALGORITHM if network else {"name": DEFAULT_ALGORITHM}
        return {**(file_methods[0] if file_methods else usual), **rename_lr(settings)}
    if not isinstance(algorithm, str):
        if not isinstance(algorithm, Algorithm):
            raise RequestError(f"algorithm must be a name or an Algorithm, got {type(algorithm).__name__}.")
        if settings:
            raise RequestError(f"give the fields of {algorithm.name} to the algorithm itself, not as settings.")
        return {"name": reference_of(algorithm), **hyperparameters(algorithm)}
    name = normalize_name(absolute_spec(algorithm))
    section = next((section for section in file_methods if section["name"] == name), {"name": name})
    return {**section, **rename_lr(settings)}


def methods_to_compare(
    file_methods: list[Tables], methods: Sequence[str | AnyAlgorithm] | None, settings: NamedValues
) -> list[Tables]:
    """Return the sections [[algorithms]]: the requested ones, the run file's (a single one with baselines), or the
    default."""
    if methods is None:
        listed = [section["name"] for section in file_methods]
        methods = (
            listed or DEFAULT_METHODS
            if len(listed) != 1
            else [*(n for n in ("local", "pooled") if n not in listed), *listed]
        )
    out: list[Tables] = []
    for method in methods if len(file_methods) < 2 else dict.fromkeys(methods):
        if isinstance(method, str):
            name, *assignments = method.split() if not is_spec(method) else [method]
            fields_given = rename_lr(settings.get(name, {}) | parse_assignments(assignments))
            name = normalize_name(absolute_spec(name))
            mine_too = [section for section in file_methods if section["name"] == name] or [{"name": name}]
            out += [section | fields_given for section in mine_too]
        else:
            out.append({"name": reference_of(method), **hyperparameters(method)})
    unused = sorted(set(settings) - {method.split()[0] for method in methods if isinstance(method, str)})
    if unused:
        raise RequestError(f"settings for {unused[0]!r}, which is not among the methods.")
    return out


def rename_lr(settings: NamedValues) -> Tables:
    """Hyperparameters by the names that algorithms have for them: `lr`, a common name of the step size, is `eta`."""
    if "lr" in settings and "eta" in settings:
        raise RequestError("lr and eta are two names of the step size; give one of them.")
    return {"eta" if name == "lr" else name: value for name, value in settings.items()}


def parse_assignments(assignments: Sequence[str]) -> Tables:
    """The fields of a method that is named together with them: `ditto lam=0.1`."""
    fields = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals:
            raise RequestError(f"a method is followed by its fields, as in 'ditto lam=0.1'; got {assignment!r}.")
        try:
            fields[name] = json.loads(value)
        except json.JSONDecodeError:
            fields[name] = value
    return fields


def source_name(source: object) -> str:
    """Return a source's name in a run file: a data set's name, a file's full path, or that it was in memory."""
    if not isinstance(source, str | Path):
        return IN_MEMORY
    try:
        is_file = not is_dataset_name(source) and Path(source).exists()
    except (OSError, ValueError):  # no name that a file can have
        is_file = False
    return str(Path(source).resolve()) if is_file else str(source)


def hyperparameters(algorithm: AnyAlgorithm) -> JsonObject:
    """Return an algorithm's fields in the form of a run file."""
    out = {}
    for field in fields(algorithm):  # type: ignore[arg-type]
        value = getattr(algorithm, field.name)
        if is_dataclass(value):  # a PerClientPenalty
            value = {f.name: list(getattr(value, f.name)) for f in fields(value) if getattr(value, f.name) is not None}
        out[field.name] = value
    return out
