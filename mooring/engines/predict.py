"""`predict`: what a finished run's models say about new rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from mooring.core.errors import RequestError
from mooring.data.clients import REGRESSION
from mooring.data.columns import as_names
from mooring.data.gather import gather
from mooring.data.schema import Schema, encode
from mooring.data.sources import name_columns, text_columns
from mooring.engines.prepare import make_task, model_digest
from mooring.engines.request import admit_run
from mooring.runs.directory import RunDir, open_run


class Shape:
    """What a task needs to know of the data that a run was made from, without the data."""

    def __init__(self, schema: Schema, dtype: torch.dtype):
        self.kind, self.classes = schema.kind, schema.classes
        self.train = self
        self.x = torch.zeros(1, len(schema.features), dtype=dtype)


def task_of(directory: RunDir) -> tuple[Any, Schema]:
    """The task and the schema of a run that was made from a table."""
    schema = Schema.model_validate({k: v for k, v in directory.schema.items() if k != "seal"})
    run = directory.run
    if run.task.model is not None and directory.inputs.get("model", now := model_digest(run.task.model)) != now:
        raise RequestError(f"{directory.path}: {run.task.model} has changed since the run began.")
    wide = run.task.model is None
    return make_task(run, Shape(schema, torch.float64 if wide else torch.float32)), schema  # type: ignore[arg-type]


def predict(
    path: str | Path, source: Any, client: str | None = None, trust: bool = False
) -> tuple[pd.DataFrame, list[str]]:
    """A row per row of `source`: the prediction (regression) or the class and its probabilities; and notes.

    With `client` every row is answered by that client's model. Otherwise a table with the client column is answered
    row by row by each client's own model, and anybody unknown by the common one. `trust` lets a run that a stranger
    made run the model file that it names.
    """
    directory = open_run(path)
    if trust:
        admit_run(directory.run, directory.path, trust)
    models = directory.models
    task, schema = task_of(directory)
    table = gather(source, text_columns(schema), name_columns(None, schema))
    x, notes = encode(table.frame, schema, table.place)
    owners = owners_of(table.frame, schema, client, models.clients, directory.path)
    unknown = sorted(set(owners) - set(models.clients))
    if unknown:
        notes.append(f"{len(unknown)} unknown client(s), such as '{unknown[0]}': answered by the common model.")
    place = {name: i for i, name in enumerate(models.clients)}
    output = None
    for owner in dict.fromkeys(owners):
        mine = np.flatnonzero(owners == owner)
        w = models.common if owner not in place or models.personal is None else models.personal[place[owner]]
        part = task.predict(w[None], torch.as_tensor(x[mine]).to(task.dtype)[None])[0].detach().double().numpy()
        output = np.empty((len(owners), *part.shape[1:])) if output is None else output
        output[mine] = part
    return answers(output, owners, schema), notes


def owners_of(
    frame: pd.DataFrame, schema: Schema, client: str | None, known: tuple[str, ...], where: Path
) -> np.ndarray:
    """Whose model answers each row."""
    if client is not None:
        if client not in known:
            raise RequestError(
                f"{where}: unknown client {client!r}; it has {len(known)}, such as {', '.join(known[:5])}."
            )
        return np.full(len(frame), client, dtype=object)
    if schema.client in frame.columns:
        names = as_names(frame[schema.client])
        return np.array([*names.categories, ""], dtype=object)[names.codes]
    raise RequestError(f"the rows have no column '{schema.client}' that says whose they are; name one with --client.")


def answers(output: Any, owners: np.ndarray, schema: Schema) -> pd.DataFrame:
    """Predictions as a table, in the target's own units and words."""
    frame = pd.DataFrame({"client": owners})
    if schema.kind == REGRESSION:
        return frame.assign(**{schema.target: output * schema.target_scale + schema.target_mean})
    if output.ndim == 1:
        return frame.assign(**{schema.target: output})
    frame[schema.target] = np.array(schema.classes, dtype=object)[output.argmax(1)]
    return frame.assign(**{f"p({name})": output[:, k] for k, name in enumerate(schema.classes)})
