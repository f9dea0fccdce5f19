"""`export`: a finished run's models for other tools, as the bytes of a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mooring.core.errors import RequestError
from mooring.core.fields import unknown
from mooring.data.columns import name_of
from mooring.engines.coefficients import in_units_of_data, scaling_of
from mooring.engines.opened import Opened, open
from mooring.runs.files import to_json


def export(path: str | Path, to: str = "csv", client: Any = None, method: str | None = None) -> tuple[bytes, list[str]]:
    """The file, and notes. `to` is one of FORMATS; `client` keeps one client, `method` is that of a comparison."""
    if to not in FORMATS:
        raise RequestError(f"mooring export: {unknown('format', to, FORMATS)}.")
    run = open(path, method)
    if client is not None:
        run.model(client)  # a client that is not there is told in one sentence
    return FORMATS[to](run, None if client is None else name_of(client)), run.notes


def as_csv(run: Opened, client: str | None) -> bytes:
    """A row for each client and term: coefficient, common, deviation."""
    return table_of(run, client).to_csv(index=False).encode()


def as_json(run: Opened, client: str | None) -> bytes:
    about = {"run": str(run.path), "method": run.method, "target": run.schema.target, "kind": run.schema.kind}
    return (to_json(about | {"coefficients": table_of(run, client).to_dict("records")}) + "\n").encode()


def as_sklearn(run: Opened, client: str | None) -> bytes:
    """`coef_` and `intercept_` as scikit-learn's linear models hold them, on the encoded columns, by client."""
    scaling = scaling_of(run.schema)
    named = {"common": run.common} if client is None else {}
    chosen = run.models if client is None else {client: run.model(client)}

    def fitted(w: Any) -> dict[str, Any]:
        slopes, intercept = in_units_of_data(run.task, w[None], scaling)
        one = run.schema.kind not in ("binary", "classes")  # a regression has no axis of classes
        return {"coef_": (slopes[0, 0] if one else slopes[0]).tolist(), "intercept_": intercept[0].tolist()}

    about = {"feature_names_in_": list(scaling.features), "classes_": list(scaling.classes)}
    models = {"clients": {name: fitted(w) for name, w in chosen.items()}}
    return (to_json(about | models | {name: fitted(w) for name, w in named.items()}) + "\n").encode()


def as_torch(run: Opened, client: str | None) -> bytes:
    """The weights of a network as its `state_dict` names them."""
    from safetensors.torch import save

    return save({name: part.contiguous() for name, part in run.module(client).state_dict().items()})


def table_of(run: Opened, client: str | None) -> Any:
    table = run.coefficients
    return table if client is None else table[table["client"] == client]


FORMATS = {"csv": as_csv, "json": as_json, "sklearn": as_sklearn, "torch": as_torch}
