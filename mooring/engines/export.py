"""`export`: a finished run's models for other tools, as the bytes of a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mooring.core.errors import RequestError
from mooring.core.field_checks import describe_unknown
from mooring.core.types import JsonObject
from mooring.data.column_types import client_name
from mooring.engines.coefficients import read_scaling
from mooring.engines.exported_models import onnx_bytes, sklearn_coefficients
from mooring.engines.saved_run import SavedRun, open
from mooring.runs.atomic_files import csv_bytes, to_json
from mooring.runs.directory import SCHEMA_FILE, explain_contents
from mooring.tasks.linear_losses import Poisson

if TYPE_CHECKING:
    import pandas as pd


def export(
    path: str | Path, to: str = "csv", client: object = None, method: str | None = None
) -> tuple[bytes, list[str]]:
    """Return the file, and notes. `to` is one of FORMATS; `client` keeps one client, `method` is that of a
    comparison."""
    if to not in FORMATS:
        raise RequestError(f"mooring export: {describe_unknown('format', to, FORMATS)}.")
    with explain_contents(path):
        run = open(path, method)
        if client is not None:
            run.vector(client)  # raises an error for an unknown client
        return FORMATS[to](run, None if client is None else client_name(client)), run.notes


def as_csv(run: SavedRun, client: str | None) -> bytes:
    """One row per client and term: coefficient, global, deviation."""
    return csv_bytes(client_coefficients(run, client))


def as_json(run: SavedRun, client: str | None) -> bytes:
    header: JsonObject = {
        "run": str(run.path),
        "method": run.method,
        "target": run.encoding.target,
        "kind": run.encoding.kind,
    }
    if isinstance(run.task, Poisson) and run.task.max_prediction is not None:
        header["max_prediction"] = run.task.max_prediction
    return (to_json(header | {"coefficients": client_coefficients(run, client).to_dict("records")}) + "\n").encode()


def as_sklearn(run: SavedRun, client: str | None) -> bytes:
    """`coef_` and `intercept_` as scikit-learn's linear models hold them, on the encoded columns, by client."""
    scaling = read_scaling(run.encoding)
    global_models = {"global": run.global_} if client is None else {}
    chosen = run.models if client is None else {client: run.vector(client)}

    def numbers(w: Tensor) -> JsonObject:
        return sklearn_coefficients(run.task, w, scaling, run.encoding.kind)

    columns = {"feature_names_in_": list(scaling.features), "classes_": list(scaling.classes)}
    models = {"clients": {name: numbers(w) for name, w in chosen.items()}}
    header = columns | {"kind": run.encoding.kind}
    return (to_json(header | models | {name: numbers(w) for name, w in global_models.items()}) + "\n").encode()


def as_torch(run: SavedRun, client: str | None) -> bytes:
    """The weights of a network as its `state_dict` names them."""
    from safetensors.torch import save

    return save(
        {
            name: part.clone(memory_format=torch.contiguous_format)
            for name, part in run.module(client).state_dict().items()
        }
    )


def as_onnx(run: SavedRun, client: str | None) -> bytes:
    """A network; of a table it takes the encoded columns in the units of the data, else the inputs as they were."""
    module = run.module(client)
    if (run.directory.path / SCHEMA_FILE).is_file():
        mean, scale = torch.tensor(run.encoding.mean), torch.tensor(run.encoding.scale)
        return onnx_bytes(StandardizedModule(module, mean, scale), torch.zeros(2, len(mean)))
    first = next((part for part in module.modules() if isinstance(part, nn.Linear)), None)
    is_fully_connected = first is not None and not any(hasattr(part, "kernel_size") for part in module.modules())
    if first is None or not is_fully_connected:
        raise RequestError(
            f"{run.path}: the shape of a row is not kept in the run; export `mooring.open(...).module(client)` by "
            "torch.onnx with an input of your own."
        )
    return onnx_bytes(module, torch.zeros(2, first.in_features))


class StandardizedModule(nn.Module):
    """A network behind the scaling of its columns."""

    mean: Tensor
    scale: Tensor

    def __init__(self, module: nn.Module, mean: Tensor, scale: Tensor):
        super().__init__()
        self.module = module
        self.register_buffer("mean", mean)
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        return self.module((x - self.mean) / self.scale)


def client_coefficients(run: SavedRun, client: str | None) -> pd.DataFrame:
    table = run.coefficients
    return table if client is None else table[table["client"] == client]


FORMATS = {"csv": as_csv, "json": as_json, "sklearn": as_sklearn, "torch": as_torch, "onnx": as_onnx}
