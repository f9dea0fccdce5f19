"""A client's model in the form that other tools use: a torch module, a scikit-learn estimator, or a file of either.

Estimators take the encoded columns in the units of the data (`SavedRun.inputs` makes them from a table). They are
exchanged as JSON (`export --to sklearn`, `load_sklearn`): nothing is pickled.
"""

from __future__ import annotations

import json
import warnings
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from mooring.core.errors import RequestError
from mooring.core.task import Task
from mooring.core.types import JsonObject, NamedValues
from mooring.data.clients import BINARY, CLASSES, REGRESSION
from mooring.data.column_types import client_name
from mooring.engines.coefficients import Scaling, to_data_units
from mooring.runs.atomic_files import read_bytes

if TYPE_CHECKING:
    from sklearn.base import BaseEstimator

SKLEARN_TASKS = ("linear", "logistic")  # tasks whose models scikit-learn has


def sklearn_coefficients(task: Task, w: Tensor, scaling: Scaling, kind: str) -> JsonObject:
    """`coef_` and `intercept_` as scikit-learn's linear models hold them, on the encoded columns."""
    slopes, intercept = to_data_units(task, w[None], scaling)
    single_output = kind not in (BINARY, CLASSES)  # a regression has no axis of classes
    return {"coef_": (slopes[0, 0] if single_output else slopes[0]).tolist(), "intercept_": intercept[0].tolist()}


def make_estimator(task: Task, w: Tensor, scaling: Scaling, kind: str) -> BaseEstimator:
    """A fitted LinearRegression or LogisticRegression."""
    if task.name not in SKLEARN_TASKS:
        raise RequestError(
            f"task '{task.name}' is no model of scikit-learn's; those of {' and '.join(SKLEARN_TASKS)} are. "
            "`coefficients` has the numbers."
        )
    header = {"feature_names_in_": list(scaling.features), "classes_": list(scaling.classes), "kind": kind}
    return _estimator(header, sklearn_coefficients(task, w, scaling, kind))


def load_sklearn(path: str | Path, client: object = None) -> BaseEstimator:
    """A client's estimator (default: the global one) from a file of `mooring export RUN --to sklearn`."""
    try:
        content = json.loads(read_bytes(path))
        models = {str(name): model for name, model in content["clients"].items()}
        shared = content.get("global")
    except (ValueError, KeyError, AttributeError, TypeError):
        raise RequestError(f"{path} is no file of `mooring export RUN --to sklearn`.") from None
    if client is None and shared is None:
        raise RequestError(f"{path} has no global model; it has {', '.join(models)}.")
    if client is not None and client_name(client) not in models:
        raise RequestError(f"{path}: no model of client {client_name(client)!r}; it has {', '.join(list(models)[:5])}.")
    return _estimator(content, shared if client is None else models[client_name(client)])


def _estimator(header: NamedValues, numbers: NamedValues) -> BaseEstimator:
    from sklearn.linear_model import LinearRegression, LogisticRegression

    estimator = LinearRegression() if header["kind"] == REGRESSION else LogisticRegression()
    estimator.coef_ = np.array(numbers["coef_"])
    intercept = np.array(numbers["intercept_"])
    estimator.intercept_ = intercept.item() if header["kind"] == REGRESSION else intercept
    estimator.feature_names_in_ = np.array(header["feature_names_in_"], dtype=object)
    estimator.n_features_in_ = len(estimator.feature_names_in_)
    if header["kind"] != REGRESSION:
        estimator.classes_ = np.array(header["classes_"])
    return estimator


def onnx_bytes(module: nn.Module, inputs: Tensor) -> bytes:
    """A network as an ONNX file: `input` [rows, ...] to `output`, any number of rows."""
    if find_spec("onnx") is None:
        raise RequestError("--to onnx needs the package onnx: pip install 'mooring-fl[onnx]'.")
    rows = {0: "rows"}
    with TemporaryDirectory() as folder, torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's newer exporter wants onnxscript as well
        path = Path(folder) / "model.onnx"
        torch.onnx.export(
            module.eval(),
            (inputs,),
            str(path),
            input_names=["input"],
            output_names=["output"],
            dynamic_axes={"input": rows, "output": rows},
            dynamo=False,
        )
        return path.read_bytes()
