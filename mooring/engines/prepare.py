"""From a request to a job: data loaded, task built, algorithm resolved."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_type_hints

import torch
from torch import nn

from mooring.algorithms.base import AnyAlgorithm, build, builtin_names
from mooring.core import attacks
from mooring.core.cohort import Rows
from mooring.core.errors import RequestError
from mooring.core.field_checks import check_fields
from mooring.core.task import Task
from mooring.core.types import JsonObject, NamedValues
from mooring.core.user_code import check_unchanged, is_spec, load_plugin, load_python
from mooring.data import client_arrays
from mooring.data.clients import BINARY, CLASSES, COUNT, MULTILABEL, REGRESSION, Clients
from mooring.data.datasets import LOADERS, is_dataset_name, load_dataset
from mooring.data.loading import load
from mooring.engines.kernel_choice import choose_kernels
from mooring.engines.metrics import Metric
from mooring.engines.request import IN_MEMORY, user_code_specs
from mooring.engines.simulator import Simulator, StatisticsCache
from mooring.engines.training_state import LOSS, TrainingPlan, make_plan
from mooring.runs.directory import RunDirectory
from mooring.runs.runfile import RunFile
from mooring.runs.sections import OPTIONS, DataSection
from mooring.tasks import catalog
from mooring.tasks.linear_losses import Poisson
from mooring.tasks.network import NetworkTask
from mooring.tasks.network_checks import check_module, copy_module
from mooring.tasks.network_losses import BINARY_LOSSES, CLASS_LOSSES, LOSSES, STANDARD_UNITS, TARGET_UNITS

LOSS_GROUP = "mooring.losses"  # the group of entry points under which an installed package offers losses of networks
VALIDATION_SHARE = 0.2  # share of each client's rows, if a pooled data set is partitioned
POOLED_DATA_OPTIONS = {"split", "partition", "data_dir"}  # options of [data] for data sets that are partitioned
POOLED_ONLY_OPTIONS = {"partition", "data_dir"}
NETWORK_SETTINGS = ("buffers", "precision", "compile")  # of section [task], handed to the network's task as they are
MAX_UNIT_CHECK_ROWS = 10_000  # enough to detect the units of a network's outputs
FIXED_TERMS_NOTE = "Algorithms train all coefficients of a formula: only `mooring advise` keeps fixed terms equal."


@dataclass(frozen=True)
class Job:
    """A request with its data and its task."""

    run: RunFile
    clients: Clients
    task: Task
    own: Mapping[str, type[AnyAlgorithm]] = field(default_factory=dict)  # algorithms that were given as objects
    copies: Path | None = None  # the run directory that has copies of the user's Python files
    metrics: Mapping[str, Metric] = field(default_factory=dict)  # the user's functions of targets and predictions

    @property
    def plan(self) -> TrainingPlan:
        return make_plan(self.run.training)

    def algorithms(self) -> list[AnyAlgorithm]:
        """The methods of the run; resolved ones take the resolved numbers."""
        sections = [self.run.algorithm] if self.run.algorithm else self.run.algorithms or []
        return [build(a.name, a.fields | (a.resolved or {}), self.copies, self.own) for a in sections]

    def deploy(self, algorithm: AnyAlgorithm) -> Job:
        """The job with the task of the models that clients use."""
        return replace(self, task=algorithm.deployed_task(self.task))


def prepare(
    run: RunFile,
    source: object = None,
    model: object = None,
    loss: object = None,
    own: Mapping[str, type[AnyAlgorithm]] | None = None,
    copies: Path | None = None,
    metrics: Mapping[str, Metric] | None = None,
) -> Job:
    """Load the data (or take `source`), build the task, fix the number of threads and the kernels.

    Inputs that a run file cannot contain are arguments: data, a model and a loss in memory, user classes (`own`),
    `metrics`. A run that is resumed has `copies` of the Python files that it names in its directory.
    """
    if metrics is not None and not isinstance(metrics, Mapping):
        raise RequestError(f"metrics are functions by name, as in {{'f1': f1}}, got a {type(metrics).__name__}.")
    if copies is not None:
        check_unchanged(user_code_specs(run), copies)
    if run.training.threads:
        torch.set_num_threads(run.training.threads)
    check_unused_options(run, source)
    own_loss = callable(loss) or (run.task.loss is not None and run.task.loss not in LOSSES)
    takes = loss_target_type(loss)
    clients = source if isinstance(source, Clients) else read_clients(run, source, not own_loss, takes)
    state = clients.schema.formula if clients.schema is not None else None
    if state is not None and not state.all_vary and (run.algorithm or run.algorithms):
        clients = replace(clients, notes=[*clients.notes, FIXED_TERMS_NOTE])
    if len(clients) < 2:
        raise RequestError(
            f"{clients.title or 'the data'}: there is one client only, '{clients.names[0]}'; a federation needs two or "
            "more. Check the client column."
        )
    task = make_task(run, clients, model, loss, copies)
    if (
        isinstance(task, NetworkTask)
        and "units" not in run.task.fields
        and predicts_target_units(task, clients, run.training.seed)
    ):
        run = run.model_copy(update={"task": run.task.model_copy(update={"units": TARGET_UNITS})})
        task = make_task(run, clients, model, loss, copies)
    if isinstance(task, NetworkTask) and task.dtype == torch.float64:
        clients = widen_rows(clients)
    job = Job(run, clients, task, own or {}, copies, metrics or {})
    run, task = choose_kernels(run, clients, task, job.algorithms())
    return replace(job, run=run, task=task)


def widen_rows(clients: Clients) -> Clients:
    """Return the clients with their numbers in double precision, for a network whose parameters are."""

    def widen(rows: Rows) -> Rows:
        x, y = (part.double() if part.dtype.is_floating_point else part for part in (rows.x, rows.y))
        return replace(rows, x=x, y=y)

    return replace(clients, train=widen(clients.train), validation=widen(clients.validation), test=widen(clients.test))


def predicts_target_units(task: NetworkTask, clients: Clients, seed: int) -> bool:
    """Return whether a network as given, perhaps pretrained, predicts the target better in its own units than in
    standard ones, (y - mean) / scale, which a fresh one learns more easily."""
    if clients.kind != REGRESSION or task.has_own_loss or (clients.target_mean, clients.target_scale) == (0.0, 1.0):
        return False
    x, y = clients.train.x[:MAX_UNIT_CHECK_ROWS], clients.train.y[:MAX_UNIT_CHECK_ROWS].double()
    output = task.predict(task.start(seed)[None], x[None])[0].double()
    if output.numel() != y.numel():
        return False  # explained where the loss is taken
    output = output.reshape(y.shape)
    as_is = (output - clients.target_mean) / clients.target_scale
    return bool((as_is - y).square().mean() < (output - y).square().mean())


def read_clients(
    run: RunFile, source: object = None, standardise: bool = True, loss_type: str | None = None
) -> Clients:
    data = run.data
    if source is None:
        if data.source == IN_MEMORY:
            raise RequestError("this run's data were in memory; pass the same data again from Python.")
        source = data.source
    if is_pooled(source):
        return load_dataset(str(source), data.data_dir, **partition_options(run))
    wide = run.task.model is None and run.task.name != "module"
    if not wide and client_arrays.is_client_arrays(source):
        options = load_options(run) | {"standardise": standardise, "loss_type": loss_type}
        return client_arrays.load_client_arrays(source, **options)
    return load(source, dtype=torch.float64 if wide else torch.float32, **load_options(run))


def loss_target_type(loss: object) -> str | None:
    """Return the type of targets that a loss of torch's takes, where it takes one only."""
    if isinstance(loss, BINARY_LOSSES):
        return BINARY
    return CLASSES if isinstance(loss, CLASS_LOSSES) else None


def is_pooled(source: object) -> bool:
    """Return whether a source is a data set that has no clients until it is partitioned."""
    return is_dataset_name(source) and source in LOADERS


def check_unused_options(run: RunFile, source: object = None) -> None:
    """Refuse options of [data] that do not apply to this source."""
    source = run.data.source if source is None else source
    set_options = {
        name for name, field in DataSection.model_fields.items() if getattr(run.data, name) != field.default
    } - {"source"}
    if isinstance(source, Clients):
        unused, reason = set_options, "the clients' data are given as they are to be used"
    elif is_pooled(source):
        unused, reason = set_options - POOLED_DATA_OPTIONS, f"data set '{source}' is no table; --partition divides it"
        if isinstance(run.data.split, str):
            unused |= {"split"}
    else:
        unused, reason = (
            set_options & POOLED_ONLY_OPTIONS,
            f"that is for pooled data sets such as digits; {run.data.source} is none",
        )
    if unused:
        name = min(unused)
        raise RequestError(f"{name} ({OPTIONS[name].flag}) does not apply: {reason}.")


def load_options(run: RunFile) -> JsonObject:
    """Return a run file's options for `load` and `check`."""
    options = run.data.model_dump(exclude_none=True, exclude={"source", "split_seed", *POOLED_ONLY_OPTIONS})
    weights = run.training.weights
    if isinstance(weights, str) and weights not in ("size", "uniform"):
        options["weights"] = weights
    if run.mooring.purpose == "advise" and run.task.model is None and run.task.name != "module":
        options.setdefault("min_rows", 1)  # small clients are part of the prior, and pulled strongly
    known = catalog.classes_by_name().get(run.task.name or "")
    if known is not None and len(known.kinds) == 1:
        options.setdefault("target_type", known.kinds[0])  # poisson fits counts, linear any number
    return options | {"seed": data_seed(run), "refuse_leaks": run.mooring.purpose == "advise"}


def data_seed(run: RunFile) -> int:
    """Return the seed of splits and partitions."""
    return run.training.seed if run.data.split_seed is None else run.data.split_seed


def partition_options(run: RunFile) -> JsonObject:
    """Return the options of a pooled data set's partition; the run's shares and seed are defaults."""
    from mooring.data.image_datasets import load_image_dataset

    partition = run.data.partition or {}
    hints = get_type_hints(load_image_dataset)
    fixed = ("name", "data_dir", "dtype", "return")
    check_fields(
        f"--partition of {run.data.source}", partition, {name: hints[name] for name in hints if name not in fixed}
    )
    shares: JsonObject = {"validation": VALIDATION_SHARE}
    if run.data.split is not None:
        twice = {"validation", "test"} & set(partition)
        if twice:
            raise RequestError(f"{min(twice)} is given twice: by --split and by --partition; leave one out.")
        shares = {"validation": run.data.split[1], "test": run.data.split[2]}
    return {"seed": data_seed(run), **shares, **partition}


def make_task(
    run: RunFile, clients: Clients, model: object = None, loss: object = None, copies: Path | None = None
) -> Task:
    """The task that the run file names, with the dtype of the data; a user's file is the one in `copies`, if any."""
    section = run.task
    if section.model is not None and (model is None or isinstance(model, str)):
        model = load_python(section.model, "model", copies)
    if model is not None:
        if section.name not in (None, "module"):
            raise RequestError(f"a model is a task of its own; leave out task '{section.name}', or the model.")
        return make_network_task(run, clients, model, loss, copies)
    if section.name == "module":
        raise RequestError("task 'module' needs a model; give one as model = \"my_model.py:make\".")
    if run.training.device not in (None, "cpu"):
        raise RequestError(f"device {run.training.device!r} is for networks; other tasks compute on the processor.")
    if section.loss is not None or loss is not None:
        raise RequestError(
            f"loss {section.loss!r} is for a network, given as a model; "
            "tasks such as quantile or absolute have their own: see --task."
        )
    if clients.train.x.ndim != 2:
        raise RequestError(
            f"task '{section.name or 'auto'}' needs rows of numbers, but the inputs have the shape "
            f"{tuple(clients.train.x.shape[1:])}; give a model."
        )
    settings = dict(section.fields) | {"dtype": clients.train.x.dtype}
    if clients.max_count is not None and section.name in (None, "auto", Poisson.name):
        settings["max_count"] = clients.max_count
    shape = clients.kind, clients.train.x.shape[1], len(clients.classes)
    return catalog.build(section.name or "auto", *shape, settings, copies)


def make_network_task(
    run: RunFile, clients: Clients, model: object, loss: object = None, copies: Path | None = None
) -> NetworkTask:
    """A network's task; its loss is the requested one, or follows from the target."""
    section = run.task
    fields_ = {name: kind for name, kind in catalog.field_types(NetworkTask).items() if name != "loss"}
    check_fields("the model's task", section.fields, fields_)
    if not callable(loss):
        loss = section.loss
        if loss == IN_MEMORY:
            raise RequestError("the run's loss was in memory; pass it again from Python.")
        if loss is not None and loss not in LOSSES:
            loss = load_python(loss, "loss", copies) if is_spec(loss) else load_plugin(LOSS_GROUP, loss) or loss
    make, units = model_factory(model, clients), section.fields.get("units", STANDARD_UNITS)
    fields = {"ridge": section.fields.get("ridge", 0.0), "device": run.training.device or "cpu"}
    fields |= {"items": getattr(clients, "items", None), "sample": clients.train.x[:2]}
    fields |= {"changing_buffers": getattr(clients, "changing_buffers", None)}
    fields |= {"target_column": getattr(clients, "target_column", False)}
    fields |= {"target_shape": tuple(clients.train.y.shape[1:])}
    named: Any = name_plain_loss(loss, clients.kind)
    fields |= {name: section.fields[name] for name in NETWORK_SETTINGS if name in section.fields}
    fields |= {"mean": clients.target_mean, "scale": clients.target_scale} if clients.kind == REGRESSION else {}
    if named is not None:
        return NetworkTask(make, named, units=units, **fields)
    if clients.kind == BINARY and has_single_output(
        NetworkTask(make, items=fields["items"], sample=fields["sample"]), clients
    ):
        return NetworkTask(make, "binary_cross_entropy", **fields)
    usual = {REGRESSION: "half_square", COUNT: "half_square", MULTILABEL: "binary_cross_entropy"}
    return NetworkTask(make, usual.get(clients.kind, "cross_entropy"), units=units, **fields)


def name_plain_loss(loss: object, kind: str) -> object:
    """Return the name of a loss of torch's that is one of this package's, without weights and other options, for
    classes and labels; other losses as they are."""
    if type(loss) is nn.CrossEntropyLoss and kind in (BINARY, CLASSES):
        return "cross_entropy" if _has_no_options(loss) else loss
    if type(loss) is nn.BCEWithLogitsLoss and kind in (BINARY, MULTILABEL):
        return "binary_cross_entropy" if _has_no_options(loss) else loss
    return loss


def _has_no_options(loss: nn.Module) -> bool:
    return all(str(value) == str(getattr(type(loss)(), name, None)) for name, value in vars(loss).items())


def has_single_output(task: NetworkTask, clients: Clients) -> bool:
    """Return whether the network outputs one number per row: of two classes, the logit of the second."""
    row = clients.train.x[:1]
    return len(row) > 0 and task.predict(task.start()[None], row[None]).numel() == 1


def model_factory(model: object, clients: Clients) -> Callable[[], nn.Module]:
    """Return a function without arguments that makes the model: a copy of a module with its weights, or the result of a
    function; `features` and `classes` are filled in."""
    if isinstance(model, nn.Module):
        if any(nn.parameter.is_lazy(part) for part in (*model.parameters(), *model.buffers())):
            raise RequestError("the model has lazy layers without shapes; give a function that makes it.")
        check_module(model)
        return lambda: copy_module(model)
    if not callable(model):
        raise RequestError(f"a model is a torch.nn.Module or a function that makes one, got {type(model).__name__}.")
    outputs = clients.train.y.shape[1] if clients.train.y.ndim > 1 else len(clients.classes)
    available = {"features": int(clients.train.x[0].numel()), "classes": outputs}
    accepted = inspect.signature(model).parameters
    arguments = {name: value for name, value in available.items() if name in accepted}
    for name, argument in accepted.items():
        is_required = argument.default is argument.empty and argument.kind not in (
            argument.VAR_POSITIONAL,
            argument.VAR_KEYWORD,
        )
        if is_required and name not in arguments:
            raise RequestError(
                f"the model's function takes '{name}', which is not filled in; only features and classes are: give "
                f"lambda: {getattr(model, '__name__', 'make')}({name}=...)."
            )
    return lambda: model(**arguments)


class DataShape:
    """Shape and kind of a run's data, which a task needs, without the data."""

    def __init__(self, description: NamedValues, dtype: torch.dtype):
        self.kind, self.classes = description["kind"], tuple(description["classes"])
        self.target_mean, self.target_scale = description.get("target_mean", 0.0), description.get("target_scale", 1.0)
        self.max_count: float | None = description.get("settings", {}).get("max_count")
        self.changing_buffers = tuple(description.get("settings", {}).get("changing_buffers", ()))
        self.train = self
        is_integer = description.get("whole", False)
        self.x = torch.zeros(
            1, *description.get("inputs", [len(description["features"])]), dtype=torch.int64 if is_integer else dtype
        )
        self.y = torch.zeros(1, *description.get("outputs", ()))


def read_task(directory: RunDirectory, model: object = None, loss: object = None) -> Task:
    """The task of a finished run's models, without its data; a model or a loss that was in memory is passed again."""
    task, section = read_trained_task(directory, model, loss), directory.run.algorithm
    if section is None or section.name not in builtin_names():
        return task
    return build(section.name, section.fields | (section.resolved or {})).deployed_task(task)


def read_trained_task(directory: RunDirectory, model: object = None, loss: object = None) -> Task:
    """The task that a finished run was trained on."""
    run, description = directory.run, directory.models.task
    if run.task.name == "module" and run.task.model is None and model is None:
        raise RequestError(f"{directory.path}: its model was in memory; pass it again: mooring.open(run, model=model).")
    wide = run.task.model is None and run.task.name != "module"
    return make_task(run, DataShape(description, torch.float64 if wide else torch.float32), model, loss, directory.path)  # type: ignore[arg-type]


def make_simulator(job: Job, statistics: StatisticsCache | None = None) -> Simulator:
    """Return a simulator of the job's clients; in a trial some of them train on wrong labels."""
    training, clients = job.run.training, job.clients
    if training.attack is not None and attacks.parse_attack(training.attack)[0] == attacks.LABEL_FLIP:
        lying = attacks.malicious_clients(training.attack, training.seed, clients.keys)
        clients = replace(clients, train=attacks.flip_labels(clients.train, lying, len(clients.classes)))
    simulator = Simulator(job.task, clients, clients.weights(training.weights), training.chunk or 0, statistics)
    simulator.metrics, simulator.measures_validation = job.metrics, training.select_by != LOSS
    return simulator
