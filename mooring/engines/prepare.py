"""From a request to something that can run: data loaded, task built, algorithm settled."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mooring.algorithms.base import Algorithm, build
from mooring.core.errors import RequestError
from mooring.data.clients import REGRESSION, Clients
from mooring.data.datasets import LOADERS, is_name, named
from mooring.data.sources import load
from mooring.engines.loop import Plan, plan_of
from mooring.engines.simulator import Simulator
from mooring.runs.runfile import RunFile, Training, make_run
from mooring.tasks import catalog
from mooring.tasks.module import Module

IN_MEMORY = "(in memory)"
VALIDATION = 0.2  # share of each client's rows, where a pooled data set is dealt out
TRAINING = tuple(name for name in Training.model_fields if name != "threads")
DATA = ("client", "target", "kind", "features", "drop", "unit", "time", "split", "min_rows", "drop_small", "data_dir")


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


def request(
    source: Any, *, purpose: str, where: str = "request", task: Any = "auto", model: Any = None, **options: Any
):
    """The run file of a call: options of the data, the task, the training and the algorithm, each in its section."""
    data = {"source": source_name(source)} | {k: options.pop(k) for k in DATA if options.get(k) is not None}
    if data.get("kind") == "auto":
        data.pop("kind")
    options = {k: v for k, v in options.items() if k not in DATA}
    training = {k: options.pop(k) for k in TRAINING if options.get(k) is not None}
    training["threads"] = options.pop("threads", None) or torch.get_num_threads()
    sections = {k: options.pop(k) for k in ("algorithm", "algorithms", "partition") if options.get(k) is not None}
    if "partition" in sections:
        data["partition"] = sections.pop("partition")
    about = dict(task) if isinstance(task, dict) else {} if task == "auto" else {"name": task}
    if isinstance(model, str):
        about["model"] = model
    elif model is not None:
        about["name"] = "module"
    if options.pop("loss", None) is not None:
        raise RequestError(f"{where}: give a loss inside the task, as task={{'loss': ...}}.")
    unknown = [name for name, value in options.items() if value is not None]
    if unknown:
        raise RequestError(f"{where}: unknown option {unknown[0]!r}; known: {', '.join(sorted((*DATA, *TRAINING)))}.")
    table = {"mooring": {"kind": purpose}, "data": data, "task": about, "training": training, **sections}
    return make_run(table, where)


def source_name(source: Any) -> str:
    """What a run file says of a source: a data set's name, a file's full path, or that it was in memory."""
    if not isinstance(source, str | Path):
        return IN_MEMORY
    return str(source) if is_name(source) or not Path(source).exists() else str(Path(source).resolve())


def prepare(run: RunFile, source: Any = None, model: Any = None) -> Job:
    """Load the data (or take `source`), build the task, fix the number of threads."""
    if run.training.threads:
        torch.set_num_threads(run.training.threads)
    clients = source if isinstance(source, Clients) else read_clients(run, source)
    if len(clients) < 2:
        raise RequestError(
            f"{clients.title or 'the data'}: there is one client only, '{clients.names[0]}'; a federation needs two or "
            "more. Check the client column."
        )
    return Job(run, clients, make_task(run, clients, model))


def read_clients(run: RunFile, source: Any = None) -> Clients:
    data = run.data
    if source is None:
        if data.source == IN_MEMORY:
            raise RequestError("this run's data were in memory; pass the same data again from Python.")
        source = data.source
    if isinstance(source, str) and is_name(source) and source in LOADERS:
        dealt = {"validation": VALIDATION} | (data.partition or {})
        return named(source, data.data_dir, seed=run.training.seed, **dealt)
    if data.partition:
        raise RequestError(
            f"a partition deals out a pooled data set such as digits; {data.source} has clients already."
        )
    options = data.model_dump(exclude_none=True, exclude={"source", "partition", "kind", "split"})
    if isinstance(data.split, str):
        options["split"] = data.split
    wide = run.task.model is None and run.task.name != "module"
    dtype = torch.float64 if wide else torch.float32
    return load(source, kind=data.kind or "auto", seed=run.training.seed, dtype=dtype, **options)


def make_task(run: RunFile, clients: Clients, model: Any = None) -> Any:
    """The task that the run file names, with the dtype of the data."""
    about = run.task
    if about.model is not None:
        model = read_model(about.model)
    if model is not None:
        loss = about.loss or ("half_square" if clients.kind == REGRESSION else "cross_entropy")
        return Module(maker(model, clients), loss, **about.fields)
    if about.name == "module":
        raise RequestError("task 'module' needs a model; give one as model = \"my_model.py:make\".")
    if clients.train.x.ndim != 2:
        raise RequestError(
            f"task '{about.name or 'auto'}' needs rows of numbers, but the inputs have the shape "
            f"{tuple(clients.train.x.shape[1:])}; give a model."
        )
    fields_ = dict(about.fields) | {"dtype": clients.train.x.dtype}
    return catalog.build(about.name or "auto", clients.kind, clients.train.x.shape[1], len(clients.classes), fields_)


def read_model(spec: str) -> Callable[..., nn.Module]:
    """The function that "my_model.py:make" names."""
    path, name = spec.rsplit(":", 1)
    if not Path(path).is_file():
        raise RequestError(f"model {spec!r}: there is no file {path}.")
    found = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(found)  # type: ignore[arg-type]
    try:
        found.loader.exec_module(module)  # type: ignore[union-attr]
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
                    layer.reset_parameters()
            return twin

        return again
    known = {"features": int(clients.train.x[0].numel()), "classes": len(clients.classes)}
    accepted = inspect.signature(model).parameters
    given = {name: value for name, value in known.items() if name in accepted}
    return lambda: model(**given)


def exchange_of(job: Job) -> Simulator:
    """The job's clients in this process."""
    how = job.run.training
    return Simulator(job.task, job.clients, job.clients.weights(how.weights), how.chunk or 0)


def fields_of(algorithm: Algorithm) -> dict[str, Any]:
    """An algorithm's fields as a run file holds them."""
    out = {}
    for field in fields(algorithm):  # type: ignore[arg-type]
        value = getattr(algorithm, field.name)
        if is_dataclass(value):  # a moor
            value = {f.name: list(getattr(value, f.name)) for f in fields(value) if getattr(value, f.name) is not None}
        out[field.name] = value
    return out
