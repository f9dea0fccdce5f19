"""From a request to something that can run: data loaded, task built, algorithm settled."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

import torch
from torch import nn

from mooring.algorithms.base import Algorithm, build
from mooring.core import attacks, trust
from mooring.core.errors import RequestError
from mooring.core.fields import check_fields
from mooring.data.clients import REGRESSION, Clients
from mooring.data.datasets import LOADERS, is_name, named
from mooring.data.sources import load
from mooring.engines.kernels import with_kernels
from mooring.engines.loop import Plan, plan_of
from mooring.engines.request import IN_MEMORY
from mooring.engines.simulator import Simulator
from mooring.runs.runfile import RunFile
from mooring.runs.sections import OPTIONS, Data
from mooring.tasks import catalog
from mooring.tasks.module import Module

VALIDATION = 0.2  # share of each client's rows, where a pooled data set is dealt out
POOLED_TAKE = {"split", "partition", "data_dir"}  # options of [data] for data sets that are dealt out
TABLES_TAKE_NOT = {"partition", "data_dir"}


@dataclass(frozen=True)
class Job:
    """What was asked for, with its data and its task."""

    run: RunFile
    clients: Clients
    task: Any

    @property
    def plan(self) -> Plan:
        return plan_of(self.run.training)

    def algorithms(self) -> list[Algorithm]:
        """The methods of the run; settled ones take the settled numbers."""
        asked = [self.run.algorithm] if self.run.algorithm else self.run.algorithms or []
        return [build(a.name, a.fields | (a.settled or {})) for a in asked]


def prepare(run: RunFile, source: Any = None, model: Any = None) -> Job:
    """Load the data (or take `source`), build the task, fix the number of threads and the kernels."""
    if run.training.threads:
        torch.set_num_threads(run.training.threads)
    refuse_unused(run, source)
    clients = source if isinstance(source, Clients) else read_clients(run, source)
    if len(clients) < 2:
        raise RequestError(
            f"{clients.title or 'the data'}: there is one client only, '{clients.names[0]}'; a federation needs two or "
            "more. Check the client column."
        )
    run, task = with_kernels(run, clients, make_task(run, clients, model))
    return Job(run, clients, task)


def read_clients(run: RunFile, source: Any = None) -> Clients:
    data = run.data
    if source is None:
        if data.source == IN_MEMORY:
            raise RequestError("this run's data were in memory; pass the same data again from Python.")
        source = data.source
    if is_pooled(source):
        return named(source, data.data_dir, **dealing(run))
    wide = run.task.model is None and run.task.name != "module"
    return load(source, dtype=torch.float64 if wide else torch.float32, **load_options(run))


def is_pooled(source: Any) -> bool:
    """Whether a source is a data set that has no clients until it is dealt out."""
    return is_name(source) and source in LOADERS


def refuse_unused(run: RunFile, source: Any = None) -> None:
    """Options of [data] that this source has no use for are refused by name, not ignored."""
    source = run.data.source if source is None else source
    given = {name for name, field in Data.model_fields.items() if getattr(run.data, name) != field.default} - {"source"}
    if isinstance(source, Clients):
        unused, why = given, "the clients' data are given as they are to be used"
    elif is_pooled(source):
        unused, why = given - POOLED_TAKE, f"data set '{source}' is no table; it is dealt out by --deal"
        if isinstance(run.data.split, str):
            unused |= {"split"}
    else:
        unused, why = given & TABLES_TAKE_NOT, f"that is for pooled data sets such as digits; {run.data.source} is none"
    if unused:
        name = min(unused)
        raise RequestError(f"{name} ({OPTIONS[name].flag}) has no use here: {why}.")


def load_options(run: RunFile) -> dict[str, Any]:
    """A run file's options as `load` and `check` take them."""
    options = run.data.model_dump(exclude_none=True, exclude={"source", *TABLES_TAKE_NOT})
    weights = run.training.weights
    if isinstance(weights, str) and weights not in ("size", "uniform"):
        options["weights"] = weights
    return options | {"seed": run.training.seed}


def dealing(run: RunFile) -> dict[str, Any]:
    """How a pooled data set is dealt out; the run's shares and seed hold unless the dealing has its own."""
    from mooring.data.images import named_images

    own = run.data.partition or {}
    hints = get_type_hints(named_images)
    fixed = ("name", "data_dir", "dtype", "return")
    check_fields(f"--deal of {run.data.source}", own, {name: hints[name] for name in hints if name not in fixed})
    shares: dict[str, Any] = {"validation": VALIDATION}
    if run.data.split is not None:
        twice = {"validation", "test"} & set(own)
        if twice:
            raise RequestError(f"{min(twice)} is said twice: by --split and by --deal; leave one out.")
        shares = {"validation": run.data.split[1], "test": run.data.split[2]}
    return {"seed": run.training.seed, **shares, **own}


def make_task(run: RunFile, clients: Clients, model: Any = None) -> Any:
    """The task that the run file names, with the dtype of the data."""
    about = run.task
    if about.model is not None:
        model = read_model(about.model)
    if model is not None:
        if about.name not in (None, "module"):
            raise RequestError(f"a model is a task of its own; leave out task '{about.name}', or the model.")
        fields_ = {name: kind for name, kind in catalog.field_types(Module).items() if name != "loss"}
        check_fields("the model's task", about.fields, fields_)
        loss = about.loss or ("half_square" if clients.kind == REGRESSION else "cross_entropy")
        return Module(maker(model, clients), loss, **about.fields)
    if about.name == "module":
        raise RequestError("task 'module' needs a model; give one as model = \"my_model.py:make\".")
    if about.loss is not None:
        raise RequestError(
            f"loss {about.loss!r} is for a network; tasks such as quantile or absolute have their own: see --task."
        )
    if clients.train.x.ndim != 2:
        raise RequestError(
            f"task '{about.name or 'auto'}' needs rows of numbers, but the inputs have the shape "
            f"{tuple(clients.train.x.shape[1:])}; give a model."
        )
    known = dict(about.fields) | {"dtype": clients.train.x.dtype}
    return catalog.build(about.name or "auto", clients.kind, clients.train.x.shape[1], len(clients.classes), known)


def model_digest(spec: str) -> str:
    """The sha256 of the file that "my_model.py:make" names."""
    path = spec.rsplit(":", 1)[0]
    if not Path(path).is_file():
        raise RequestError(f"model {spec!r}: there is no file {path}.")
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def read_model(spec: str) -> Callable[..., nn.Module]:
    """The function that "my_model.py:make" names."""
    path, name = spec.rsplit(":", 1)
    if not Path(path).is_file():
        raise RequestError(f"model {spec!r}: there is no file {path}.")
    module, source = ModuleType(Path(path).stem), trust.code_of(path)
    module.__file__ = path
    try:
        exec(compile(source, path, "exec"), vars(module))
    except Exception as error:
        raise RequestError(f"model {spec!r}: {path} fails with {type(error).__name__}: {error}.") from error
    if not callable(getattr(module, name, None)):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise RequestError(f"model {spec!r}: {path} has no function {name!r}; it has {', '.join(known) or 'none'}.")
    return getattr(module, name)


def maker(model: Any, clients: Clients) -> Callable[[], nn.Module]:
    """A function without arguments that makes the model, fresh each time; `features` and `classes` are filled in."""
    if isinstance(model, nn.Module):
        blueprint = model

        def again() -> nn.Module:
            import copy

            twin = copy.deepcopy(blueprint)
            for layer in twin.modules():
                if hasattr(layer, "reset_parameters"):
                    layer.reset_parameters()  # type: ignore[operator]
            return twin

        return again
    known = {"features": int(clients.train.x[0].numel()), "classes": len(clients.classes)}
    accepted = inspect.signature(model).parameters
    given = {name: value for name, value in known.items() if name in accepted}
    return lambda: model(**given)


def exchange_of(job: Job) -> Simulator:
    """The job's clients in this process; in a trial some of them train on wrong labels."""
    how, clients = job.run.training, job.clients
    if how.attack is not None and attacks.parse(how.attack)[0] == attacks.LABELS:
        lying = attacks.liars(how.attack, how.seed, clients.keys)
        clients = replace(clients, train=attacks.flip_labels(clients.train, lying, len(clients.classes)))
    return Simulator(job.task, clients, clients.weights(how.weights), how.chunk or 0)
