"""The models of a run, in memory or in its directory: parameters, networks, estimators, coefficients, predictions."""

from __future__ import annotations

import copy
import warnings
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Protocol

import pandas as pd
import torch
from torch import Tensor, nn

from mooring.core.errors import RequestError
from mooring.core.items import TensorItems, find_items
from mooring.core.task import Task
from mooring.core.types import JsonObject
from mooring.data.clients import REGRESSION, Clients
from mooring.data.column_types import client_name
from mooring.data.schema import Schema
from mooring.data.tables import suggest_name
from mooring.engines.coefficients import coefficient_table, read_scaling
from mooring.engines.exported_models import make_estimator
from mooring.engines.predict import predict_rows
from mooring.engines.prediction_intervals import IntervalScores
from mooring.engines.prepare import Job
from mooring.runs.directory import StoredModels
from mooring.tasks.network import NetworkTask
from mooring.tasks.network_losses import TARGET_UNITS

if TYPE_CHECKING:
    from sklearn.base import BaseEstimator


class ModelStore:
    """What the results of `fit` and `advise` and a saved run do with their models. `client` is a client's name;
    without it the model is the global one."""

    @property
    @abstractmethod
    def place(self) -> str:
        """The run in messages."""

    @property
    @abstractmethod
    def task(self) -> Task: ...

    @property
    @abstractmethod
    def saved(self) -> StoredModels:
        """The models as a run directory contains them."""

    @property
    @abstractmethod
    def encoding(self) -> Schema | Clients:
        """The columns of the models, and the units of the data: a table's schema, or the clients."""

    @property
    @abstractmethod
    def schema(self) -> Schema | None:
        """The encoding of the run's table; None if it was made from arrays."""

    @property
    @abstractmethod
    def intervals(self) -> IntervalScores | None:
        """Held-out residuals that prediction intervals are made from."""

    @property
    @abstractmethod
    def recommended_kinds(self) -> Mapping[str, str]:
        """Each client's recommended model, local, global or personal; empty if there are no recommendations."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.saved.clients)

    @property
    def global_(self) -> Tensor:
        """The global model's parameter vector."""
        return self.saved.common

    def vector(self, client: object = None) -> Tensor:
        """The parameters of a client's model (default: of the global model)."""
        if client is None:
            return self.saved.common
        name, names = client_name(client), self.names
        if name not in names:
            raise RequestError(
                f"unknown client {name!r}; {self.place} has {len(names)}, such as {', '.join(names[:5])}."
                f"{suggest_name(name, names)}"
            )
        if self.saved.personal is None:
            raise RequestError(f"client {name!r} keeps its own model; {self.place} has only the global one.")
        return self.saved.personal[names.index(name)]

    def module(self, client: object = None) -> nn.Module:
        """A client's network (default: the global one), ready to be used: in evaluation mode, and answering in the
        target's own units; classes and labels come as logits."""
        units = self.saved.task
        return build_module(
            self.task, self.vector(client), units.get("target_mean", 0.0), units.get("target_scale", 1.0)
        )

    def model(self, client: object = None) -> nn.Module | BaseEstimator:
        """A client's model (default: the global one), ready to be used: a network, or for linear and logistic tasks an
        estimator of scikit-learn's on the encoded columns in the units of the data."""
        if isinstance(self.task, NetworkTask):
            return self.module(client)
        return make_estimator(self.task, self.vector(client), read_scaling(self.encoding), self.encoding.kind)

    @property
    def coefficients(self) -> pd.DataFrame:
        """One row per client and term in the units of the data: coefficient, global, deviation."""
        models = self.saved
        return coefficient_table(
            self.task, read_scaling(self.encoding), models.common, models.personal, list(models.clients)
        )

    def predict(self, data: object, client: object = None, interval: float | None = None) -> pd.DataFrame | Tensor:
        """Predictions for new rows, each with its client's model, or all with that of `client`; a regression in the
        target's units.

        `data` is a table like the one that the run was made from; the result is a data frame with one row per row.
        Unknown clients and cells without a client get the global model, with a warning. `interval` is the level of
        prediction intervals, such as 0.9. A run that was made from arrays takes arrays (a network also a tuple or
        dictionary of arrays, or a data set of items), all rows by the model of `client` (default: the global one), and
        returns a tensor.
        """
        if self.schema is None:
            return self.predict_arrays(data, client)
        frame, notes = predict_rows(
            self.task,
            self.schema,
            self.saved,
            data,
            client,
            self.place,
            None if interval is None else self.intervals,
            interval,
            self.recommended_kinds,
        )
        for note in notes:
            warnings.warn(note, stacklevel=2)
        return frame

    def predict_arrays(self, x: object, client: object = None) -> Tensor:
        """Predictions for encoded rows: see `predict`."""
        return to_target_units(SimpleNamespace(**self.saved.task), predict_arrays(self.task, self.vector(client), x))


class TrainedStore(ModelStore):
    """The models of a job that was trained in this process."""

    job: Job
    run: Path | None  # its directory, if it was written

    @property
    def place(self) -> str:
        return str(self.run or "the run")

    @property
    def task(self) -> Task:
        return self.job.task

    @property
    def encoding(self) -> Clients:
        return self.job.clients

    @property
    def schema(self) -> Schema | None:
        return self.job.clients.schema


def predict_arrays(task: Task, w: Tensor, x: object) -> Tensor:
    """Predictions of the model w [d] for rows x: see `ModelStore.predict`."""
    items = find_items(x) if isinstance(task, NetworkTask) else None
    if isinstance(task, NetworkTask) and items is not None:
        return task.predict_items(w, *items)
    inputs = torch.as_tensor(x)
    inputs = inputs.to(task.dtype) if inputs.dtype.is_floating_point else inputs
    if isinstance(task, NetworkTask) and task.items is not None:  # its rows are numbers of items
        return task.predict_items(w, TensorItems(inputs), len(inputs))
    return task.predict(w[None], inputs[None])[0]


class HasTargetUnits(Protocol):
    """The target of a fit: its kind, and its units."""

    @property
    def kind(self) -> str: ...
    @property
    def target_mean(self) -> float: ...
    @property
    def target_scale(self) -> float: ...


def to_target_units(clients: HasTargetUnits, prediction: Tensor) -> Tensor:
    """Return a standardized prediction in the target's own units; probabilities are unchanged."""
    if clients.kind != REGRESSION:
        return prediction
    return prediction * clients.target_scale + clients.target_mean


def describe_task(job: Job) -> tuple[JsonObject, list[JsonObject]]:
    """Return the description of the task and of the order of parameters in a models file."""
    task = job.task
    description: JsonObject = {
        "name": task.name,
        "metric": task.metric,
        "kind": job.clients.kind,
        "classes": list(job.clients.classes),
    }
    description |= {"features": list(job.clients.features), "settings": task.describe()}
    description |= {"target_mean": job.clients.target_mean, "target_scale": job.clients.target_scale}
    rows = getattr(job.clients, "train", None)  # remote clients keep their rows
    if rows is not None:
        description |= {"inputs": list(rows.x.shape[1:]), "outputs": list(rows.y.shape[1:])}
        description |= {"whole": not rows.x.dtype.is_floating_point}
    return description, [{"name": part.name, "shape": list(part.shape), "start": part.start} for part in task.layout]


class TargetUnitsModule(nn.Module):
    """A network that was trained on (y - mean) / scale, and answers in the units of y."""

    def __init__(self, net: nn.Module, mean: float, scale: float):
        super().__init__()
        self.net = net
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float64))
        self.register_buffer("scale", torch.tensor(scale, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        output = self.net(x)
        return output * self.scale.to(output.dtype) + self.mean.to(output.dtype)


def build_module(task: Task, w: Tensor, mean: float = 0.0, scale: float = 1.0) -> nn.Module:
    """The network with the parameters w [d], ready to be used: evaluation mode, answers in the target's own units.

    `mean` and `scale` are those of the target that the rows were standardised by. Classes and labels come as logits.
    """
    if not isinstance(task, NetworkTask):
        raise RequestError(f"task '{task.name}' is no network; its models are in .models, and in .coefficients.")
    net = task.device.unload_module(copy.deepcopy(task.module))
    values = task.layers(w[None])
    with torch.no_grad():
        for name, part in (*net.named_parameters(), *net.named_buffers()):
            if name in values:
                part.copy_(values[name][0] if part.dtype.is_floating_point else values[name][0].round())
    plain = task.units == TARGET_UNITS or task.metric == "log-loss" or (mean == 0 and scale == 1)
    return (net if plain else TargetUnitsModule(net, mean, scale)).eval()
